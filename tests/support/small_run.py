"""A run small enough for milliseconds a step: records, config values, and the rows it leaves."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from mesh_transformer.data.tfrecords import write_records
from mesh_transformer.training.metrics import NAME

SEQ = 16
VOCAB = 64
# Two files whose sizes share no factor with a step's 8 records: 30 steps read them 4 times.
ROWS = {"one": 37, "two": 24}
TIMES = ("train/tokens_per_sec", "train/mfu")  # what two equal runs may differ in

VALUES = {
    "layers": 2,
    "d_model": 32,
    "n_heads": 8,
    "n_vocab": VOCAB,
    "seq": SEQ,
    "pe_rotary_dims": 4,
    "dtype": "float32",
    "tpu_size": 8,
    "cores_per_replica": 4,
    "per_replica_batch": 2,
    "gradient_accumulation_steps": 2,
    "warmup_steps": 3,
    "anneal_steps": 30,
    "lr": 1e-2,
    "end_lr": 1e-3,
    "adam_eps": 1e-4,
    "total_steps": 30,
    "val_every": 10,
    "val_batches": 2,
    "ckpt_every": 7,
}


def write_set(folder: Path, name: str, rows: dict[str, int] = ROWS, seed: int = 0) -> str:
    """Record files of random tokens and their index, whose path is returned."""
    rng = np.random.default_rng(seed)
    for part, count in rows.items():
        path = folder / f"{name}_{part}.tfrecords"
        write_records(str(path), rng.integers(0, VOCAB, (count, SEQ + 1)))
    index = folder / f"{name}.index"
    index.write_text("".join(f"{name}_{part}.tfrecords\n" for part in rows))
    return str(index)


def run_values(folder: Path, **changes: Any) -> dict[str, Any]:
    """Config values of a run on fresh record sets in `folder`."""
    train_set = write_set(folder, "train")
    val_set = {"held_out": write_set(folder, "val", {"one": 13}, seed=1)}
    return VALUES | {"train_set": train_set, "val_set": val_set} | changes


def mixed_values(folder: Path, **changes: Any) -> dict[str, Any]:
    """Config values of a run on two sets, mixed and shuffled."""
    values = run_values(folder)
    other = write_set(folder, "other", {"one": 5, "two": 9}, seed=2)
    sets = {values["train_set"]: 3.0, other: 1.0}
    return values | {"train_set": sets, "shuffle_buffer": 10} | changes


def write_config(path: Path, values: dict[str, Any]) -> str:
    path.write_text(json.dumps(values))
    return str(path)


def rows_of(folder: Path | str) -> list[dict[str, Any]]:
    """A run's metrics, less what the clock decides."""
    rows = [json.loads(line) for line in (Path(folder) / NAME).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def assert_same_rows(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal to the bit: JSON writes a float so that it reads back as the same."""
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == other
