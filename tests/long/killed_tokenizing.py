"""Kills create_finetune_tfrecords.py at random moments, resumes it, and compares the bytes.

`python -m tests.long.killed_tokenizing 200` is the long run; the test suite has a short one.  Each
process is killed by SIGKILL after a random number of file system calls.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import zstandard
from pyarrow import parquet

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["To", "be,", "or", "not", "question!\n", "'tis", "don't", "caf\u00e9", "42", "\u4e2d"]
LONGEST = 100  # maximum file system calls until a kill; a complete run makes about as many


def write_text(folder: Path) -> None:
    """Write some files of each kind, all of different sizes."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(4)

    def text(length: int) -> str:
        return " ".join(generator.choice(WORDS, length))

    for number, length in enumerate((90, 1, 300)):
        documents = [text(length + more) for more in range(3)]
        (folder / f"{number}.txt").write_text("<|endoftext|>".join(documents), encoding="utf-8")
    lines = [json.dumps({"text": text(length), "meta": {}}) for length in range(1, 60)]
    halves = ("\n".join(lines[:20]) + "\n", "\n".join(lines[20:]))
    frames = b"".join(zstandard.compress(half.encode()) for half in halves)
    (folder / "3.jsonl.zst").write_bytes(frames)
    (folder / "4.csv").write_text(f'text\n"{text(200)}"\n"{text(7)}"\n"{text(90)}"\n', "utf-8")
    rows = [{"text": text(length), "id": length} for length in range(1, 60, 3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "5.parquet", row_group_size=6)


def main_in_child(script: Any, arguments: list[str], kill_after: int | None) -> int:
    """Run the script in a fork, killed after `kill_after` calls; returns the fork's wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    status = 1
    try:
        left = iter(range(kill_after or 0, -1, -1))

        def count(event: str, _: tuple) -> None:
            if event in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir"):
                if next(left):
                    return
                os.kill(os.getpid(), signal.SIGKILL)

        if kill_after is not None:
            sys.addaudithook(count)
        script.main(arguments)
        status = 0
    finally:
        os._exit(status)


def run(folder: Path, kills: int) -> None:
    """Create sets until `kills` processes were killed; each set is resumed until it is complete."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from mesh_transformer.cli import text_records as script  # pyright: ignore[reportMissingImports]
    from mesh_transformer.data import corpus  # pyright: ignore[reportMissingImports]
    from mesh_transformer.data import documents as text_documents  # pyright: ignore[reportMissingImports]

    text_documents.PIECE_CHARACTERS = 64
    corpus.BATCH_CHARACTERS = 200
    corpus.SAVE_EVERY = 2
    # Imported here, before the forks, because every child needs it; it starts no threads.
    from mesh_transformer.data import tokenizer
    from mesh_transformer.storage import access

    access.tensorflow()
    loaded = tokenizer.load_tokenizer()
    script.load_tokenizer = lambda _: loaded
    write_text(folder / "in")

    def arguments(name: str) -> list[str]:
        options = ["--sequences-per-file", "150", "--seq", "16", "--n-repack-epochs", "2"]
        return [str(folder / "in"), "set", "--output-dir", str(folder / name), *options]

    assert main_in_child(script, arguments("whole"), None) == 0
    expected = contents(folder / "whole")
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    generator, killed, sets = random.Random(seed), 0, 0
    while killed < kills:
        name = f"set_{sets}"
        while killed < kills:
            status = main_in_child(script, arguments(name), generator.randrange(LONGEST))
            assert status in (0, signal.SIGKILL), status
            if status == 0:
                break
            killed += 1
            assert not (folder / name / "set.index").exists() or (
                contents(folder / name).items() >= expected.items()
            )
        assert main_in_child(script, arguments(name), None) == 0
        assert contents(folder / name) == expected, name
        sets += 1
    print(f"{killed} killed, {sets} sets equal to the uninterrupted one", flush=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def check(folder: Path, kills: int) -> None:
    """Run this program in a process without threads, because a fork would lose them."""
    command = [
        sys.executable,
        "-m",
        "tests.long.killed_tokenizing",
        str(kills),
        str(folder / "killed"),
    ]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{kills} killed" in result.stdout


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run(Path(sys.argv[2]), int(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as place:
            run(Path(place) / "killed", int(sys.argv[1]))
