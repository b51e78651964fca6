"""Quickstart: train, reshard and sample a tiny GPT-J in minutes, with one command per step.

The script fetches real text and creates TFRecords.  It then trains on a 2x4 mesh over two hosts,
which are processes on this machine, and resumes the run in one process on a 1x8 mesh.  Finally, it
plots the loss and samples from the model.  All output is written to build/quickstart.
"""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from mesh_transformer.util import run_script

FOLDER = Path("build/quickstart")
TRAIN = ["hamlet", "henry_v", "julius_caesar", "lear", "othello", "richard_iii", "tempest"]
VALIDATE = ["macbeth"]
RESHARD_AT, END = 120, 160


def call(*words: object) -> None:
    """Print a Python command and run it; if it fails, exit this script with the same status."""
    command = [str(word) for word in words]
    print(f"\n$ python {shlex.join(command)}", flush=True)
    status = subprocess.run([sys.executable, *command], check=False).returncode
    if status:
        sys.exit(status)


def write_config(name: str, **changes: object) -> Path:
    """Write a copy of configs/tiny.json with some values changed, and return its path."""
    path = FOLDER / f"{name}.json"
    tiny = json.loads(Path("configs/tiny.json").read_text(encoding="utf-8"))
    path.write_text(json.dumps(tiny | changes, indent=2), encoding="utf-8")
    return path


def main() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    for name, works in (("train", TRAIN), ("val", VALIDATE)):
        text = FOLDER / "text" / name
        call("scripts/fetch_text.py", text, "--only", *works)
        records = ("--output-dir", FOLDER / "records", "--seq", 64)
        call("scripts/create_finetune_tfrecords.py", text, name, *records)

    data = {
        "train_set": str(FOLDER / "records/train.index"),
        "val_set": {"macbeth": str(FOLDER / "records/val.index")},
        "val_every": 40,
        "ckpt_every": 40,
    }
    model = FOLDER / "model"
    # First dp 2 x mp 4, then dp 1 x mp 8.  The second config has twice the batch per replica, so a
    # step has 16 sequences with either.
    first = write_config("tiny_2x4", **data)
    second = write_config("tiny_1x8", **data, cores_per_replica=8, per_replica_batch=16)
    until = ("--model-dir", model, "--max-steps")
    call("train.py", "--config", first, "--local-hosts", 2, *until, RESHARD_AT)
    call("device_train.py", "--config", second, *until, END)

    curve = FOLDER / "loss.png"
    call("scripts/plot_loss.py", model / "metrics.jsonl", curve)
    prompt = ("--prompt", "ROMEO:\nBut, soft!", "--length", 48, "--seed", 1)
    call("device_sample.py", "--config", first, "--model-path", model, *prompt)

    lines = (model / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    before, after = (
        sum(row["train/loss"] for row in part) / len(part) for part in (rows[:10], rows[-10:])
    )
    print(f"\nThe loss fell from {before:.2f} to {after:.2f} over {len(rows)} steps; see {curve}.")
    if after > before - 2:
        print("The loss should have fallen by at least 2 nats.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_script(main)
