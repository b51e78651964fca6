"""Time saving and restoring a training state, and a plain file of its size: `bench --checkpoint`.

The flags are those of `bench`.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from mesh_transformer.cli import benchmark as command
from mesh_transformer.mesh.accelerators import GIB
from mesh_transformer.mesh.program import Layout
from mesh_transformer.performance import benchmark
from mesh_transformer.performance.report import Column
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import run_script

CHUNK_BYTES = 64 << 20  # bytes per read or write call on the plain file
COLUMNS: list[Column] = [
    ("state", lambda f: f"{f['state_bytes'] / GIB:.2f} GiB"),
    (
        "save, training blocked (s)",
        lambda f: f"{f['save_seconds']:.2f}, {f['blocked_seconds']:.2f}",
    ),
    (
        "GB/s; save over write + fsync",
        lambda f: f"{f['save_bytes_per_second'] / 1e9:.2f}; {f['save_ratio']:.2f}",
    ),
    ("restore (s)", lambda f: f"{f['restore_seconds']:.2f}"),
    (
        "GB/s; restore over read",
        lambda f: f"{f['restore_bytes_per_second'] / 1e9:.2f}; {f['restore_ratio']:.2f}",
    ),
]


def measure(layout: Layout, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure the time to save and restore the training state of a new model.

    For comparison, each round also writes and reads a plain file of the same size.  The checkpoint
    and the plain file are flushed to disk and dropped from the page cache before they are read.
    The optimizer's moments are set to random values, because moments of zero would take almost no
    space on disk.

    Returns:
      The sizes of the state on all devices together and of the checkpoint on disk, and medians over
      the rounds: `blocked_seconds` is the time from the start of a save until training can
      continue, and the ratios are those of a save and a restore to the plain file of their round.
    """
    network = CausalTransformer(layout.config, devices=list(layout.mesh.devices.flat))
    state = network.state
    assert state is not None
    count = state["opt_state"].pop("count")
    state["opt_state"] = _random_like(state["opt_state"]) | {"count": count}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(jax.block_until_ready(state)))
    del state
    timings: list[tuple[float, ...]] = []
    disk = 0
    for _ in tqdm(range(rounds), desc="checkpoint", disable=jax.process_index() > 0):
        saved, plain = folder / "saved", folder / "plain"
        blocked = benchmark.timed(lambda: network.save(str(saved)))[0]  # noqa: B023
        rest = benchmark.timed(network.wait)[0] + _flush(saved)
        network.close()
        written = benchmark.timed(lambda: _write(plain, size))[0]  # noqa: B023
        disk = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        for path in (saved, plain):
            _drop_cache(path)
        network.state = None  # so that no device holds two states
        restored = benchmark.timed(lambda: (network.restore(str(saved)), network.state))[0]  # noqa: B023
        read = benchmark.timed(lambda: _read(plain))[0]  # noqa: B023
        network.close()
        shutil.rmtree(saved)
        plain.unlink()
        timings.append((blocked, blocked + rest, written, restored, read))
    blocked, total, written, restored, read = map(statistics.median, zip(*timings, strict=True))
    return {
        "state_bytes": size,
        "disk_bytes": disk,
        "blocked_seconds": blocked,
        "save_seconds": total,
        "write_seconds": written,
        "restore_seconds": restored,
        "read_seconds": read,
        "save_bytes_per_second": size / total,
        "restore_bytes_per_second": size / restored,
        "save_ratio": statistics.median(row[1] / row[2] for row in timings),
        "restore_ratio": statistics.median(row[3] / row[4] for row in timings),
    }


def _random_like(tree: Any) -> Any:
    """Return random arrays with the shapes, dtypes and shardings of those in `tree`."""

    def random() -> Any:
        return jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape, x.dtype), tree)

    return jax.jit(random, out_shardings=jax.tree.map(lambda x: x.sharding, tree))()


def _flush(folder: Path) -> float:
    """Flush all files under a folder to disk.  Return the seconds that flushing took."""
    began = time.perf_counter()
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - began


def _drop_cache(path: Path) -> None:
    """Drop a file, or all files under a folder, from the operating system's page cache.

    The files must already be flushed to disk.  They are then read from disk, not from memory.
    """
    for file_path in filter(Path.is_file, [path, *path.rglob("*")]):
        with file_path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write(path: Path, size: int) -> None:
    """Write a file of `size` random bytes and flush it to disk."""
    chunk = os.urandom(min(size, CHUNK_BYTES))
    with path.open("wb", buffering=0) as file:
        for offset in range(0, size, len(chunk)):
            file.write(chunk[: size - offset])
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    """Read a whole file and discard its contents."""
    buffer = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def result(layout: Layout, args: argparse.Namespace, _: float | None) -> dict[str, Any]:
    """Return the results that `bench --checkpoint` reports."""
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=args.folder) as folder:
        return measure(layout, Path(folder), args.rounds)


if __name__ == "__main__":
    sys.argv.insert(1, "--checkpoint")
    run_script(command.main)
