"""LoRA on a trained base in 8 and in 4 bits: how far is its loss from that on the whole base?

    python -m tests.long.quantized_base [seeds] [steps]

A small model learns the bytes of docs/, then adapters learn those of the library's source.  Prints
the mean loss of the last 50 steps and of held-out text, and fails if one differs by over 1 percent.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mesh_transformer.config import Config
from mesh_transformer.transformer_shard import CausalTransformer, load

ROOT = Path(__file__).parents[2]
ROWS, SEQ, BOUND = 16, 64, 0.01
BASE = Config(
    layers=2,
    d_model=128,
    n_heads=4,
    n_vocab=256,
    seq=SEQ,
    tokenizer="bytes",
    block="llama",
    per_replica_batch=ROWS,
    lr=3e-3,
    warmup_steps=20,
    total_steps=400,
)
TARGETS = ["q", "k", "v", "o", "gate", "fc", "out"]


def text_of(pattern: str) -> np.ndarray:
    paths = sorted(ROOT.glob(pattern))
    return np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)


def batch_of(text: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    starts = rng.integers(0, len(text) - SEQ, ROWS)
    tokens = np.stack([text[start : start + SEQ + 1] for start in starts]).astype(np.uint32)
    return {"obs": tokens[None, :, :-1], "target": tokens[None, :, 1:]}


def trained(network: CausalTransformer, text: np.ndarray, seed: int) -> float:
    """Train up to `total_steps`, and return the mean loss of the last 50 steps."""
    rng, losses = np.random.default_rng(seed), []
    for _ in range(network.config.total_steps or 0):
        losses.append(network.train(batch_of(text, rng))["loss"])
    return float(np.mean(losses[-50:]))


def held_out(network: CausalTransformer, text: np.ndarray) -> float:
    rng = np.random.default_rng(0)
    batches = [{key: x[0] for key, x in batch_of(text, rng).items()} for _ in range(10)]
    return float(np.mean([network.eval(batch)["loss"] for batch in batches]))


def compare(folder: str, seed: int, steps: int) -> float:
    """Print the losses of one seed, and return the largest difference, relative to bfloat16."""
    base = CausalTransformer(BASE.replace(seed=seed))
    loss = trained(base, text_of("docs/*.md"), seed)
    print(f"seed {seed}: loss of the base {loss:.4f}", flush=True)
    base.save(folder)
    base.wait()
    code = text_of("mesh_transformer/**/*.py")
    text, rest = np.split(code, [9 * len(code) // 10])
    keys = {"lora_rank": 8, "lora_targets": TARGETS, "total_steps": steps, "seed": seed}
    results: dict[Any, np.ndarray] = {}
    for bits in (None, 8, 4):
        network = load(folder, BASE.replace(**keys, frozen_bits=bits))
        before = held_out(network, rest)
        results[bits] = np.array([trained(network, text, seed), held_out(network, rest)])
        ratio = results[bits] / results[None] - 1
        last, after = results[bits]
        print(
            f"seed {seed}, frozen_bits {bits}: held out {before:.4f} before, {after:.4f} after "
            f"({ratio[1]:+.2%}); last 50 steps {last:.4f} ({ratio[0]:+.2%})",
            flush=True,
        )
    return max(np.abs(results[bits] / results[None] - 1).max() for bits in (8, 4))


def main(seeds: str = "3", steps: str = "300") -> None:
    worst = 0.0
    for seed in range(int(seeds)):
        with tempfile.TemporaryDirectory() as folder:
            worst = max(worst, compare(folder, seed, int(steps)))
    print(f"largest difference {worst:.2%}, allowed {BOUND:.0%}")
    sys.exit(int(worst > BOUND))


if __name__ == "__main__":
    main(*sys.argv[1:])
