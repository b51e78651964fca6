"""Fine-tunes SmolLM2 with LoRA on chats, on several meshes and with a host killed on the way.

`python -m tests.long.chat_model` trains the whole model for 4 steps on meshes of 2 x 4 and 1 x 8
devices, and on two local hosts, one of which is killed: all metrics must be equal, bit for bit.
The test suite does the same with the model's first 2 layers.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mesh_transformer.checkpoint import hf
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.cli import completion_records
from mesh_transformer.config import Config
from mesh_transformer.training import loop
from mesh_transformer.transformer_shard import CausalTransformer
from tests.long.interruptions import Interruption, interrupt
from tests.support.small_run import assert_same_rows, rows_of, write_config
from tests.support.smollm2 import model_path

LORA = {
    "lora_rank": 4,
    "lora_alpha": 8.0,
    "lora_targets": ["q", "k", "v", "o", "gate", "fc", "out"],
}
SEQ = 64


def cut_model(gguf: str, folder: Path, layers: int) -> str:
    """Write the first layers of a model as a Hugging Face folder; returns its path."""
    config, state = hf.read(gguf)
    state["params"]["layers"] = jax.tree.map(lambda x: x[:layers], state["params"]["layers"])
    hf.write(str(folder), state, config.replace(layers=layers))
    return str(folder)


def write_chats(folder: Path, tokenizer: str) -> dict[str, str]:
    """Write records of chats about squares to learn and to hold out; returns their indices."""
    numbers = np.random.default_rng(0).permutation(60).tolist()
    indices = {}
    for name, own in (("train", numbers[:48]), ("held_out", numbers[48:])):
        messages = (
            [
                {"role": "user", "content": f"Square {number}."},
                {"role": "assistant", "content": f"It is {number**2}."},
            ]
            for number in own
        )
        lines = [json.dumps({"messages": chat}) + "\n" for chat in messages]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        words = [str(folder / f"{name}.jsonl"), name, "--output-dir", str(folder)]
        completion_records.main([*words, "--seq", str(SEQ), "--tokenizer", tokenizer, "--pack"])
        indices[name] = str(folder / f"{name}.index")
    return indices


def run_config(base: str, indices: dict[str, str], steps: int, **changes: Any) -> Config:
    """Return the config of a run that fine-tunes a base model on any mesh within 2 x 8."""
    values = {
        "virtual_mesh": [2, 8],
        "tpu_size": 8,
        "cores_per_replica": 4,
        "per_replica_batch": 1,
        "dtype": "float32",
        "seq": SEQ,
        "lr": 5e-3,
        "warmup_steps": 0,
        "anneal_steps": steps,
        "total_steps": steps,
        "ckpt_every": 2,
        "val_every": steps // 2,
        "val_batches": 3,
        "train_set": indices["train"],
        "val_set": {"held_out": indices["held_out"]},
        "tune_model_path": base,
    }
    return Source(base).config.replace(**(values | LORA | changes))


def same_bits(folder: Path, base: str, steps: int) -> Path:
    """Fine-tune on two meshes, and with a host killed; returns the model folder of the first run.

    Raises:
      AssertionError: if the metrics of the three runs differ in any bit, or the held-out loss does
        not fall.
    """
    config = run_config(base, write_chats(folder, base), steps)
    for mp in (4, 8):
        loop.train(
            CausalTransformer(config.replace(cores_per_replica=mp), init=False), folder / f"mp{mp}"
        )
    rows = rows_of(folder / "mp4")
    assert_same_rows(rows_of(folder / "mp8"), rows)
    losses = [row["val/loss_held_out"] for row in rows if "val/loss_held_out" in row]
    print(f"held-out losses: {', '.join(f'{loss:.3f}' for loss in losses)}")
    assert losses[-1] < 0.9 * losses[0]
    path = write_config(folder / "config.json", config.as_dict())
    interrupt(path, folder / "mp4", folder / "killed", [Interruption("SIGKILL", 2, 1)])
    return folder / "mp4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30, help="layers of the model (default 30)")
    parser.add_argument("--steps", type=int, default=4, help="training steps (default 4)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        same_bits(folder, cut_model(model_path(), folder / "base", args.layers), args.steps)
    print("all runs have the same bits")


if __name__ == "__main__":
    main()
