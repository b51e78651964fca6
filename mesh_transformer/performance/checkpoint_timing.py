"""Saving and restoring a state through the library, beside a plain file of as many bytes."""

import dataclasses
import os
import shutil
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.performance import benchmark
from mesh_transformer.transformer_shard import CausalTransformer

WRITTEN_AT_ONCE = 64 << 20  # bytes, of the plain file


@dataclasses.dataclass(frozen=True)
class Checkpointing:
    """Seconds to save and restore a state, beside a plain file of as many bytes; medians."""

    state_bytes: int  # of all devices together
    disk_bytes: int
    blocked_seconds: float  # until training may go on
    save_seconds: float
    write_seconds: float  # of the plain file, fsync included
    restore_seconds: float
    read_seconds: float
    save_bytes_per_second: float
    restore_bytes_per_second: float
    save_ratio: float  # save over write, the median of the pairs
    restore_ratio: float


def measure(config: Config, mesh: Mesh, folder: Path, rounds: int) -> Checkpointing:
    """Saves and restores a state, and writes and reads a plain file, by turns.

    What was written is flushed to disk, and dropped from the machine's memory before it is read.
    Moments are as random as the parameters: zeros would take next to no room.
    """
    network = CausalTransformer(config, devices=list(mesh.devices.flat))
    state = network.state
    assert state is not None
    for name in ("mu", "nu"):
        moments = state["opt_state"][name]
        state["opt_state"][name] = jax.tree.map(
            lambda x, moment: jnp.array(x, moment.dtype), state["params"], moments
        )
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(jax.block_until_ready(state)))
    del state
    found: list[tuple[float, ...]] = []
    disk = 0
    for _ in tqdm(range(rounds), desc="checkpoint", disable=jax.process_index() > 0):
        saved, plain = folder / "saved", folder / "plain"
        blocked = benchmark.timed(lambda: network.save(str(saved)))[0]  # noqa: B023
        rest = benchmark.timed(network.wait)[0] + _flush(saved)
        network.close()
        written = benchmark.timed(lambda: _write(plain, size))[0]  # noqa: B023
        disk = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        for path in (saved, plain):
            _forget(path)
        network.state = None  # no device need hold two
        restored = benchmark.timed(lambda: (network.restore(str(saved)), network.state))[0]  # noqa: B023
        read = benchmark.timed(lambda: _read(plain))[0]  # noqa: B023
        network.close()
        shutil.rmtree(saved)
        plain.unlink()
        found.append((blocked, blocked + rest, written, restored, read))
    blocked, saved_in, written, restored, read = map(statistics.median, zip(*found, strict=True))
    return Checkpointing(
        state_bytes=size,
        disk_bytes=disk,
        blocked_seconds=blocked,
        save_seconds=saved_in,
        write_seconds=written,
        restore_seconds=restored,
        read_seconds=read,
        save_bytes_per_second=size / saved_in,
        restore_bytes_per_second=size / restored,
        save_ratio=statistics.median(each[1] / each[2] for each in found),
        restore_ratio=statistics.median(each[3] / each[4] for each in found),
    )


def _flush(folder: Path) -> float:
    """Seconds until all files under a folder are on disk."""
    began = time.perf_counter()
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - began


def _forget(path: Path) -> None:
    """Has the next read of flushed files come from disk."""
    for each in filter(Path.is_file, [path, *path.rglob("*")]):
        with each.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write(path: Path, size: int) -> None:
    some = os.urandom(min(size, WRITTEN_AT_ONCE))
    with path.open("wb", buffering=0) as file:
        for at in range(0, size, len(some)):
            file.write(some[: size - at])
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    into = bytearray(WRITTEN_AT_ONCE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(into):
            pass
