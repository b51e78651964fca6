"""Quickstart: train, reshard and sample a tiny GPT-J in minutes, with one command per step.

The script fetches real text and creates TFRecords.  It then trains on a 2x4 mesh over two hosts,
which are processes on this machine, and resumes the run in one process on a 1x8 mesh.  Finally, it
plots the loss and samples from the model.  All output is written to a new folder, build/quickstart,
or build/quickstart-2 and so on if that exists.
"""

import itertools
import json
import shlex
import subprocess
import sys
from pathlib import Path

from mesh_transformer import status_lines
from mesh_transformer.cli.arguments import Parser, positive
from mesh_transformer.util import InputError, run_script

FOLDER = Path("build/quickstart")
TINY = Path("configs/tiny.json")
GUIDE = "docs/your-text.md"
TRAIN = ["hamlet", "henry_v", "julius_caesar", "lear", "othello", "richard_iii", "tempest"]
VALIDATE = ["macbeth"]
STEPS = 120


def call(*words: object) -> None:
    """Print a command and run it; if it fails, exit this script with the same status.

    The command is either `mesh-transformer` or a Python script, which ends in `.py`.
    """
    program, *arguments = map(str, words)
    if program == "mesh-transformer":
        shown, command = [program], ["-m", "mesh_transformer"]
    else:
        shown, command = ["python", program], [program]
    print(f"\n$ {shlex.join([*shown, *arguments])}", flush=True)
    with status_lines.paused():
        status = subprocess.run([sys.executable, *command, *arguments], check=False).returncode
    if status:
        sys.exit(status)


def new_folder() -> Path:
    """Create and return an empty folder: `FOLDER`, or that with the first free number."""
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = FOLDER if number == 1 else FOLDER.with_name(f"{FOLDER.name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def write_config(path: Path, **changes: object) -> Path:
    """Write a copy of configs/tiny.json with some values changed, and return its path."""
    tiny = json.loads(TINY.read_text(encoding="utf-8"))
    path.write_text(json.dumps(tiny | changes, indent=2), encoding="utf-8")
    return path


def next_commands(model: Path) -> str:
    """Return what to try next with the trained model, for the end of the output."""
    return f"""
Next, after `. .venv/bin/activate`:
  mesh-transformer sample --model-path {model}  # type prompts; Ctrl-D ends
  mesh-transformer serve --model-path {model}   # a web page and an API
{GUIDE} describes how to train on your own text."""


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--steps",
        type=positive,
        default=STEPS,
        help=f"number of training steps, a third of them on the second mesh (default {STEPS})",
    )
    steps = parser.parse_args().steps
    if not TINY.exists():
        raise InputError(f"{TINY} is not in this folder; run quickstart.py in its checkout")
    folder = new_folder()
    print(f"writing to {folder}", flush=True)
    for name, works in (("train", TRAIN), ("val", VALIDATE)):
        text = folder / "text" / name
        call("scripts/fetch_text.py", text, "--only", *works)
        records = ("--output-dir", folder / "records", "--seq", 64)
        call("mesh-transformer", "records", text, name, *records)

    data = {
        "train_set": str(folder / "records/train.index"),
        "val_set": {"macbeth": str(folder / "records/val.index")},
        "val_every": 40,
        "ckpt_every": 40,
    }
    model = folder / "model"
    # First dp 2 x mp 4, then dp 1 x mp 8.  The second config has twice the batch per replica, so a
    # step has 16 sequences with either.
    first = write_config(folder / "tiny_2x4.json", **data)
    second = write_config(
        folder / "tiny_1x8.json", **data, cores_per_replica=8, per_replica_batch=16
    )
    until = ("--model-dir", model, "--max-steps")
    reshard_at = -(-2 * steps // 3)
    call("mesh-transformer", "pod", "--config", first, "--local-hosts", 2, *until, reshard_at)
    call("mesh-transformer", "train", "--config", second, *until, steps)

    curve = folder / "loss.png"
    call("mesh-transformer", "plot", model / "metrics.jsonl", curve)
    prompt = ("--prompt", "ROMEO:\nBut, soft!", "--length", 48, "--seed", 1)
    call("mesh-transformer", "sample", "--model-path", model, *prompt)

    lines = (model / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    before, after = (
        sum(row["train/loss"] for row in part) / len(part) for part in (rows[:10], rows[-10:])
    )
    means = f"from {before:.2f} to {after:.2f} (means of 10 steps)"
    print(f"\nThe loss fell {means} in {len(rows)} steps; see {curve}.")
    if after > before - 2:
        print("The loss should have fallen by at least 2 nats.", file=sys.stderr)
        return 1
    print(next_commands(model))
    return 0


if __name__ == "__main__":
    run_script(main)
