"""A small run, with steps of milliseconds: its records, config values and metrics rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from mesh_transformer.data.tfrecords import write_records
from mesh_transformer.training.metrics import NAME

SEQ = 16
VOCAB = 64
# Two files whose sizes share no factor with the 8 records per step; 30 steps read them 4 times.
ROWS = {"one": 37, "two": 24}
# The beginnings of the names of metrics in which two equal runs may differ.
TIMES = ("train/tokens_per_sec", "train/mfu", "host_seconds/", "seconds/")

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
    """Write record files of random tokens and their index; returns the path of the index."""
    rng = np.random.default_rng(seed)
    for part, count in rows.items():
        path = folder / f"{name}_{part}.tfrecords"
        write_records(str(path), rng.integers(0, VOCAB, (count, SEQ + 1)))
    index = folder / f"{name}.index"
    index.write_text("".join(f"{name}_{part}.tfrecords\n" for part in rows))
    return str(index)


def run_values(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write record sets to `folder`, and return config values for a run on them."""
    train_set = write_set(folder, "train")
    val_set = {"held_out": write_set(folder, "val", {"one": 13}, seed=1)}
    return VALUES | {"train_set": train_set, "val_set": val_set} | changes


def mixed_values(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return config values for a run on two mixed and shuffled sets, like `run_values`."""
    values = run_values(folder)
    other = write_set(folder, "other", {"one": 5, "two": 9}, seed=2)
    sets = {values["train_set"]: 3.0, other: 1.0}
    return values | {"train_set": sets, "shuffle_buffer": 10} | changes


def write_config(path: Path, values: dict[str, Any]) -> str:
    path.write_text(json.dumps(values))
    return str(path)


def rows_of(folder: Path | str) -> list[dict[str, Any]]:
    """Return a run's complete metrics rows without the values that depend on the clock."""
    path = Path(folder) / NAME
    return parse_rows(path.read_text() if path.exists() else "")


def parse_rows(text: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def damage_step(step: Path) -> None:
    """Flip a bit in the middle of each file of a native step that may hold arrays."""
    for path in step.glob("state/**/d/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def assert_same_rows(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Check that rows are equal bit for bit, because floats in JSON read back unchanged."""
    assert [row["step"] for row in actual] == [row["step"] for row in expected]
    for actual_row, expected_row in zip(actual, expected, strict=True):
        assert actual_row == expected_row
