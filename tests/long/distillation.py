"""Train a student with and without a teacher, and compare their losses after equal steps.

`python -m tests.long.distillation` trains a teacher on the bytes of `data/tiny.train.index`, and
then students from the same initial weights on the same batches: alone, and with the teacher.  It
prints the students' cross entropy on validation data, per byte in nats, for several seeds.
"""

import argparse
import statistics
import tempfile
from typing import Any

import numpy as np

import mesh_transformer
from mesh_transformer.config import Config
from mesh_transformer.data.loader import open_train_set
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.transformer_shard import CausalTransformer

COMMON: dict[str, Any] = {"block": "llama", "n_vocab": 256, "seq": 128, "dtype": "float32"}
COMMON |= {"tokenizer": "bytes", "per_replica_batch": 8, "lr": 3e-3, "end_lr": 3e-4}
COMMON |= {"warmup_steps": 20, "val_batches": 32}
TEACHER = {"layers": 4, "d_model": 128, "n_heads": 4}
STUDENT = {"layers": 2, "d_model": 48, "n_heads": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "forward": {"distill_kl": "forward", "distill_weight": 0.9},
    "reverse": {"distill_kl": "reverse", "distill_weight": 0.9},
}


def corpus(index: str) -> np.ndarray:
    """Return the bytes of the text in a record set of GPT-2's tokens."""
    config = Config.load("tiny").replace(train_set=index)
    records, tokens = open_train_set(config, 31), []
    for _ in range(16 if "val" in index else 280):
        tokens.append(records.get_samples()["obs"].reshape(-1))
    records.close()
    text = load_tokenizer().decode(np.concatenate(tokens).tolist())
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)


def trained(config: Config, data: np.ndarray, val: np.ndarray) -> tuple[CausalTransformer, float]:
    """Train a network, and return it with its last validation loss."""
    network = CausalTransformer(config)
    rows = mesh_transformer.fit(network, data, val=val)
    return network, rows[-1]["val/loss_val"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of a student")
    parser.add_argument("--teacher-steps", type=int, default=600)
    args = parser.parse_args()
    data, val = corpus("data/tiny.train.index"), corpus("data/tiny.val.index")

    def config_of(steps: int, **changes: Any) -> Config:
        return Config.from_dict(COMMON | {"total_steps": steps, "val_every": steps} | changes)

    losses: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        teacher, loss = trained(config_of(args.teacher_steps, **TEACHER), data, val)
        teacher.save(folder)
        teacher.close()
        print(f"teacher: {loss:.4f}", flush=True)
        for seed in range(args.seeds):
            for name, changes in VARIANTS.items():
                path = None if name == "alone" else folder
                config = config_of(args.steps, **STUDENT, seed=seed, teacher=path, **changes)
                losses[name].append(trained(config, data, val)[1])
                print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
    for name, values in losses.items():
        gains = [alone - own for alone, own in zip(losses["alone"], values, strict=True)]
        print(f"{name}: mean {statistics.mean(values):.4f}, better by {statistics.mean(gains):.4f}")


if __name__ == "__main__":
    main()
