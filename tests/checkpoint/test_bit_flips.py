"""A flipped bit in any file of a checkpoint is reported, or has no effect on what is loaded."""

import random
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.checkpoint.conversion import convert, read
from mesh_transformer.checkpoint.formats import Format
from mesh_transformer.checkpoint.original import write
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.checkpoint.state_tree import in_memory
from mesh_transformer.config import Config
from mesh_transformer.util import DamagedError, InputError
from tests.checkpoint.test_original import random_state

CONFIG = Config(
    layers=2, d_model=16, n_heads=2, n_vocab=32, seq=8, pe_rotary_dims=4, cores_per_replica=2
)
KINDS: tuple[Format, ...] = ("native", "original", "hf")


def load(path: Path, kind: Format) -> tuple[dict[str, Any], Any]:
    """Read the whole checkpoint; return its config's model keys and its state."""
    config, state = read(Source(path, kind), CONFIG if kind == "original" else None)
    keys = ("layers", "d_model", "n_heads", "n_vocab", "seq", "pe", "d_rotary", "norm")
    return {key: getattr(config, key) for key in keys}, in_memory(state)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[Format, tuple[Path, Any]]:
    """A checkpoint of each format, and what is loaded from it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    start = folder / "original" / "step_7"
    write(str(start), random_state(CONFIG), CONFIG)
    paths: dict[Format, Path] = {"original": start}
    for kind, path in (("native", folder / "native" / "step_7"), ("hf", folder / "hf")):
        convert(start, "original", path, kind, config=CONFIG)
        paths[kind] = path
    return {kind: (path, load(path, kind)) for kind, path in paths.items()}


def flip(folder: Path, generator: random.Random) -> str:
    """Flip a bit of a file, each with a probability by its size; return the file and the byte."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in paths]
    (path,) = generator.choices(paths, sizes)
    content = bytearray(path.read_bytes())
    position = generator.randrange(len(content))
    content[position] ^= 1 << generator.randrange(8)
    path.write_bytes(content)
    return f"{path.relative_to(folder)} at byte {position}"


def equal(one: Any, other: Any) -> bool:
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)


def flips(checkpoints, kind: Format, seeds: range, folder: Path) -> None:
    """Flip one bit per seed, and check the error or what is loaded."""
    path, expected = checkpoints[kind]
    expected_error = DamagedError if kind == "native" else InputError
    reported = 0
    for seed in seeds:
        damaged = folder / f"{seed}" / path.name
        shutil.copytree(path, damaged)
        place = flip(damaged, random.Random(seed))
        try:
            loaded = load(damaged, kind)
        except expected_error as error:
            line = str(error)
            assert str(damaged.parent) in line, place
            assert "\n" not in line, place
            reported += 1
        else:
            assert equal(loaded, expected), f"seed {seed}: {place} changed the values unnoticed"
        shutil.rmtree(damaged.parent)
    print(f"{kind}: {reported} of {len(seeds)} flipped bits reported, the others without effect")
    assert reported > len(seeds) / 3  # the rest are in padding, or in parts that are not read


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bits_are_reported_or_without_effect(checkpoints, kind, tmp_path):
    flips(checkpoints, kind, range(15), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_flipped_bits(checkpoints, kind, tmp_path):
    flips(checkpoints, kind, range(15, 115), tmp_path)
