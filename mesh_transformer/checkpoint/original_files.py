"""The files of the original's checkpoints: the model folder's index, the shards' 16 pieces each."""

import contextlib
import itertools
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib import format as npy

from mesh_transformer.data.prefetch import Prefetch
from mesh_transformer.data.storage import reason
from mesh_transformer.util import InputError

PIECES = 16
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_COPY = "copy the checkpoint anew"
# What zipfile and numpy raise for a file that is torn or is something else.
_DAMAGED = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


def numbered(folder: str, kind: str) -> list[int]:
    """The numbers of the sub-folders `<kind>_<number>`, ascending."""
    if not os.path.isdir(folder):
        return []
    matches = [re.fullmatch(rf"{kind}_(\d+)", name) for name in os.listdir(folder)]
    return sorted(int(match[1]) for match in matches if match)


def step_folder(path: str) -> str:
    """The `step_<N>` that `path` means: itself, or a model folder's newest.

    That is the last of meta.json's `checkpoints`, or where there is no meta.json the highest N.

    Raises:
      InputError: where there is none.
    """
    if numbered(path, "shard"):
        return path
    if not os.path.isdir(path):
        raise InputError(f"{path}: no such folder; expected one of the original's checkpoints")
    if os.path.exists(os.path.join(path, "meta.json")):
        newest = read_index(path)["checkpoints"][-1]
        step = os.path.join(path, f"step_{newest}")
        if not numbered(step, "shard"):
            raise InputError(
                f"{path}/meta.json: names step {newest}, but {step} holds no shard_<i>; copy it, "
                "or give the path of a step that is there"
            )
        return step
    steps = [os.path.join(path, f"step_{step}") for step in numbered(path, "step")]
    steps = [step for step in steps if numbered(step, "shard")]
    if not steps:
        raise InputError(
            f"{path}: found no checkpoint of the original's; expected shard_<i> folders, or "
            "step_<N> folders that hold them"
        )
    return steps[-1]


def read_index(folder: str) -> dict[str, Any]:
    """A model folder's meta.json; {} where there is none."""
    path = os.path.join(folder, "meta.json")
    try:
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({reason(error)}); copy it anew") from None
    steps = index.get("checkpoints") if isinstance(index, dict) else None
    if not isinstance(steps, list) or not steps or not all(type(step) is int for step in steps):
        raise InputError(
            f"{path}: expected a mapping whose `checkpoints` is a list of steps, found "
            f"{str(index)[:80]}; copy it anew, or give the path of a step_<N>"
        )
    return index


def write_index(path: str, index: dict[str, Any], step: int) -> None:
    """A meta.json with one more step than `index` has; the original resumes from the last."""
    steps = [*(s for s in index.get("checkpoints", []) if s != step), step]
    values = {"step": step, "checkpoints": steps, "aux": {**index.get("aux", {}), str(step): {}}}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())


def split(leaves: int) -> list[tuple[int, int]]:
    """The first leaf of each piece, and the one after its last."""
    size, longer = divmod(leaves, PIECES)
    edges = [piece * size + min(piece, longer) for piece in range(PIECES + 1)]
    return list(itertools.pairwise(edges))


class Shard:
    """One `shard_i` folder of so many; its leaves are read from the disk when asked for.

    Raises InputError for a piece that is missing or no whole `.npz` archive.
    """

    def __init__(self, folder: str, shards: int) -> None:
        self.folder = folder
        self._shards = shards
        self._places: list[tuple[str, str]] = []  # of each leaf: its file, its name in there
        for piece in range(PIECES):
            path = os.path.join(folder, f"{piece}.npz")
            self._places += [(path, name) for name in _members(path)]

    def __len__(self) -> int:
        return len(self._places)

    def where(self, index: int, name: str) -> str:
        """A leaf as error lines call it: its file, its name there, what it is."""
        path, member = self._places[index]
        return f"{path}: {member.removesuffix('.npy')} ({name})"

    def dtype(self, index: int, name: str, shape: tuple[int, ...]) -> np.dtype:
        """What the values of a leaf are, by its header; errors as of `read`."""
        with self._opened(index, name, shape) as (_, dtype):
            return dtype

    def read(self, index: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The values of a leaf that must have this shape; 2-byte voids are bfloat16.

        Raises InputError, before its values are read where its header already tells.
        """
        with self._opened(index, name, shape) as (stream, dtype):
            return npy.read_array(stream, allow_pickle=False).view(dtype)

    @contextlib.contextmanager
    def _opened(
        self, index: int, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[Any, np.dtype]]:
        """A leaf's stream and dtype, once its header has been checked."""
        path, member = self._places[index]
        try:
            with zipfile.ZipFile(path) as archive:
                with archive.open(member) as stream:
                    found, dtype = _header(stream)
                self._check(index, name, shape, found, dtype)
                with archive.open(member) as stream:
                    yield stream, _BFLOAT16 if dtype == np.dtype("V2") else dtype
        except InputError:
            raise
        except _DAMAGED as error:
            raise InputError(
                f"{self.where(index, name)} is damaged: {reason(error)}; expected {shape}; {_COPY}"
            ) from None

    def _check(
        self, index: int, name: str, shape: tuple[int, ...], found: tuple[int, ...], dtype: np.dtype
    ) -> None:
        if dtype.hasobject:
            raise InputError(
                f"{self.where(index, name)} is a pickled object, which could run code: refused as "
                f"unsafe; expected numbers of shape {shape}; do not trust this checkpoint"
            )
        if found != shape:
            raise InputError(
                f"{self.where(index, name)} has shape {found}, expected {shape} in each of "
                f"{self._shards} shards; use the config that it was trained with, and all shards"
            )


def _members(path: str) -> list[str]:
    """The arrays of a piece, in their order."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = archive.namelist()
    except FileNotFoundError:
        raise InputError(f"{path}: is missing; a shard has 16 pieces, 0 to 15; {_COPY}") from None
    except _DAMAGED as error:
        size = f", {os.path.getsize(path):,} bytes" if os.path.isfile(path) else ""
        raise InputError(
            f"{path}: expected a whole .npz archive, found something else or part of one "
            f"({reason(error)}{size}); {_COPY}"
        ) from None
    wanted = [f"arr_{i}.npy" for i in range(len(found))]
    if sorted(found) != sorted(wanted):
        strange = min(set(found) ^ set(wanted))
        raise InputError(
            f"{path}: expected the arrays arr_0, arr_1, ..., found {len(found)}, of which "
            f"{strange.removesuffix('.npy')} is missing or out of place; "
            "is this one of the original's checkpoints?"
        )
    return wanted


def _header(stream: Any) -> tuple[tuple[int, ...], np.dtype]:
    try:
        version = npy.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = npy.read_array_header_1_0(stream)
        else:
            shape, _, dtype = npy.read_array_header_2_0(stream)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error):
        raise
    except Exception as error:  # numpy parses it as Python, which has errors of its own
        raise ValueError(f"its header is none of numpy's: {error}") from None
    return shape, dtype


def write(folders: Sequence[str], leaves: Sequence[Callable[[], Iterable[np.ndarray]]]) -> None:
    """Makes the shards' folders and writes the 16 pieces of each, leaf by leaf.

    Each leaf gives one array a shard.  The files are those of `np.savez`, byte for byte.
    """
    for folder in folders:
        os.makedirs(folder)
    # The next leaf is read while one is written.
    with contextlib.closing(Prefetch((list(leaf()) for leaf in leaves), 1)) as made:
        for piece, (first, end) in enumerate(split(len(leaves))):
            paths = [os.path.join(folder, f"{piece}.npz") for folder in folders]
            _write_piece(paths, made, end - first)


def _write_piece(paths: Sequence[str], made: Iterator[list[np.ndarray]], count: int) -> None:
    """The next `count` leaves, an archive a shard."""
    with contextlib.ExitStack() as stack:
        archives = [stack.enter_context(zipfile.ZipFile(path, "w")) for path in paths]
        for place, parts in zip(range(count), made, strict=False):
            for archive, values in zip(archives, parts, strict=True):
                # Zip64 from the start, as the size is not known then.
                with archive.open(f"arr_{place}.npy", "w", force_zip64=True) as stream:
                    _write_array(stream, values)


def _write_array(stream: Any, values: np.ndarray) -> None:
    """What np.save writes, less its copies; bfloat16 is "<V2" there, as numpy knows none."""
    values = np.asarray(values, order="C")
    header = {"descr": values.dtype.str, "fortran_order": False, "shape": values.shape}
    npy.write_array_header_1_0(stream, header)
    stream.write(values.reshape(-1).view(np.uint8).data)
