"""Compile a training step for several sequence lengths, and plot the memory that it needs."""

import argparse
from typing import Any

from mesh_transformer.cli.arguments import Parser
from mesh_transformer.config import Config
from mesh_transformer.mesh.devices import make_mesh, use_virtual_devices
from mesh_transformer.performance import pictures
from mesh_transformer.performance.hlo import planned_memory
from mesh_transformer.performance.plan import abstract_batch
from mesh_transformer.training.step import StateLayout, compile_train
from mesh_transformer.util import run_script

MODEL = {
    "layers": 2,
    "d_model": 256,
    "n_heads": 4,
    "n_vocab": 512,
    "dtype": "float32",
    "tpu_size": 1,
}
LENGTHS = (4096, 8192, 16384, 32768, 65536)
MIB = 2**20


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("picture", help="SVG or PNG file to write")
    return parser.parse_args()


def memory(attention: str, length: int) -> float:
    """Return the MiB that the compiler counts for a step with one sequence of a length."""
    config = Config.from_dict(MODEL | {"attention": attention, "seq": length})
    layout = StateLayout(config, make_mesh(config))
    train: Any = compile_train(layout)
    lowered = train.lower(layout.abstract, abstract_batch(layout))
    return planned_memory(lowered.compile()) / MIB


def main() -> int:
    args = parse_args()
    use_virtual_devices(1)
    figure, axes = pictures.pyplot().subplots(figsize=(5, 3.4), layout="constrained")
    for attention, lengths in (("blocks", LENGTHS), ("xla", LENGTHS[:2])):
        sizes = []
        for length in lengths:
            sizes.append(memory(attention, length))
            print(f"{attention}, {length} tokens: {sizes[-1]:.0f} MiB", flush=True)
        axes.plot(lengths, sizes, marker="o", label=attention)
    axes.set(xlabel="tokens per sequence", ylabel="MiB per device", xticks=LENGTHS, ylim=(0, None))
    axes.tick_params(axis="x", rotation=30)
    axes.grid(alpha=0.3)
    axes.legend()
    pictures.save(figure, args.picture)
    return 0


if __name__ == "__main__":
    run_script(main)
