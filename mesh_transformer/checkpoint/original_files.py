"""The files of mesh-transformer-jax checkpoints: meta.json, and 16 .npz "pieces" per shard."""

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
from tqdm import tqdm

from mesh_transformer.checkpoint.stored_tensors import parse_json
from mesh_transformer.data.prefetch import Prefetch
from mesh_transformer.storage import files
from mesh_transformer.storage.access import reason
from mesh_transformer.util import InputError

PIECES = 16
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_COPY_ADVICE = "copy the checkpoint again"
# What zipfile and numpy raise for a file that is damaged or of another kind.
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


def entry_numbers(folder: str, kind: str) -> list[int]:
    """Return the numbers N of the files and folders called <kind>_N in `folder`, ascending."""
    matches = [re.fullmatch(rf"{kind}_(\d+)", name) for name in files.names(folder)]
    return sorted(int(match[1]) for match in matches if match)


def step_numbers(folder: str) -> Iterator[int]:
    """Yield the numbers N of the folders step_N in `folder` that hold shards, ascending."""
    for number in entry_numbers(folder, "step"):
        if entry_numbers(os.path.join(folder, f"step_{number}"), "shard"):
            yield number


def step_folder(path: str) -> str:
    """Return `path` itself if it is a step_<N>, else the newest step_<N> in the folder `path`.

    The newest step is the last one listed in meta.json.  If there is no meta.json, it is the one
    with the highest N.

    Raises:
      InputError: if there is no checkpoint.
    """
    if entry_numbers(path, "shard"):
        return path
    refuse_version_2(path)
    if not files.is_folder(path):
        raise InputError(f"{path}: no such folder; expected a mesh-transformer-jax checkpoint")
    if files.is_file(os.path.join(path, "meta.json")):
        newest = read_index(path)["checkpoints"][-1]
        step = os.path.join(path, f"step_{newest}")
        refuse_version_2(step)
        if not entry_numbers(step, "shard"):
            raise InputError(
                f"{path}/meta.json names step {newest} as the newest, but the folder {step} is "
                "missing or has no folders shard_<i>; copy it from the original checkpoint again, "
                "or give the path of another step"
            )
        return step
    if not (steps := [*step_numbers(path)]):
        raise InputError(
            f"{path}: found no mesh-transformer-jax checkpoint; expected shard_<i> folders, or "
            "step_<N> folders that hold them"
        )
    return os.path.join(path, f"step_{steps[-1]}")


def read_index(folder: str) -> dict[str, Any]:
    """Return the contents of a model folder's meta.json; {} if there is none."""
    path = os.path.join(folder, "meta.json")
    try:
        with files.open_file(path) as file:
            index = parse_json(file.read())
    except FileNotFoundError:
        return {}
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({reason(error)}); copy it again") from None
    steps = index.get("checkpoints") if isinstance(index, dict) else None
    if not isinstance(steps, list) or not steps or not all(type(step) is int for step in steps):
        raise InputError(
            f"{path}: expected a mapping whose `checkpoints` is a list of steps, found "
            f"{str(index)[:80]}; copy this file again, or give the path of a step_<N> folder"
        )
    return index


def write_index(path: str, index: dict[str, Any], step: int) -> None:
    """Write a meta.json that lists `step` as the last checkpoint.

    mesh-transformer-jax resumes from the checkpoint that is listed last.

    Args:
      index: the contents of the previous meta.json; {} if there is none.
    """
    steps = [*(s for s in index.get("checkpoints", []) if s != step), step]
    values = {"step": step, "checkpoints": steps, "aux": {**index.get("aux", {}), str(step): {}}}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())


def refuse_version_2(step: str) -> None:
    """Raise InputError if the folder `step` is a checkpoint of mesh-transformer-jax's version 2."""
    if files.is_file(os.path.join(step, "params", "shard_0.npz")):
        raise InputError(
            f"{step}: this is a checkpoint of mesh-transformer-jax's version 2 (params/shard_<i>"
            ".npz), which cannot be read; only those of its version 1 can"
        )


def index_before(path: str) -> dict[str, Any]:
    """Return the index that a step is going to be added to.

    Args:
      path: the step's folder, which holds the new index until `finish` has moved it.

    Raises:
      InputError: if the step was written by a process that was killed before it called `finish`,
        which is then made up for unless another step has been written since.
    """
    index = read_index(os.path.dirname(path))
    if files.is_file(os.path.join(path, "meta.json")):
        if set(index.get("checkpoints", ())) <= set(read_index(path)["checkpoints"]):
            finish(path)
        raise InputError(
            f"{path}: this step was written by a process that was killed at the very end; it is "
            "complete, so use it by this path, or delete it to write another"
        )
    return index


def finish(path: str) -> None:
    """Move the index that a complete step holds to where it belongs, beside the step."""
    files.replace(os.path.join(path, "meta.json"), os.path.join(os.path.dirname(path), "meta.json"))


def split(leaves: int) -> list[tuple[int, int]]:
    """Divide a shard's leaves among its 16 pieces; return each piece's range as (first, end).

    `first` is the index of the piece's first leaf, and `end` the index after its last leaf.
    """
    size, longer = divmod(leaves, PIECES)
    edges = [piece * size + min(piece, longer) for piece in range(PIECES + 1)]
    return list(itertools.pairwise(edges))


class Shard:
    """One folder shard_<i> of a checkpoint, whose leaves (arrays) are read from disk on use."""

    def __init__(self, folder: str, shards: int) -> None:
        """List the leaves of a folder.

        Args:
          shards: the number of shards of the checkpoint, for error messages.

        Raises:
          InputError: if a piece is missing or is not a complete `.npz` archive.
        """
        self.folder = folder
        self._shards = shards
        self._places: list[tuple[str, str]] = []  # the file and archive member of each leaf
        for piece in range(PIECES):
            path = os.path.join(folder, f"{piece}.npz")
            self._places += [(path, name) for name in _members(path)]

    def __len__(self) -> int:
        return len(self._places)

    def where(self, index: int, name: str) -> str:
        """Return a description of a leaf for error messages: "<file>: <array> (<name>)"."""
        path, member = self._places[index]
        return f"{path}: {member.removesuffix('.npy')} ({name})"

    def dtype(self, index: int, name: str, shape: tuple[int, ...]) -> np.dtype:
        """Return the dtype in a leaf's header; see `read` for the arguments and errors."""
        with self._opened(index, name, shape) as (_, dtype):
            return dtype

    def read(self, index: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return the values of a leaf.

        numpy stores bfloat16 as 2-byte voids; these are returned as bfloat16.

        Args:
          index: the position of the leaf in the shard.
          name: the parameter or count that the leaf holds, such as "step".
          shape: the shape that the leaf must have.

        Raises:
          InputError: if the leaf is damaged, pickled or of another shape.  The header is checked
            first, so the values of a pickled leaf are never read.
        """
        with self._opened(index, name, shape) as (stream, dtype):
            return npy.read_array(stream, allow_pickle=False).view(dtype)

    @contextlib.contextmanager
    def _opened(
        self, index: int, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[Any, np.dtype]]:
        """Return a context manager that checks a leaf's header and yields (stream, dtype).

        The stream starts at the header.
        """
        path, member = self._places[index]
        where = self.where(index, name)
        try:
            with files.open_file(path) as file, zipfile.ZipFile(file) as archive:
                with archive.open(member) as stream:
                    actual, dtype = _header(stream)
                if dtype.hasobject:
                    raise InputError(
                        f"{where} is a pickled object, which could run code: refused as unsafe; "
                        f"expected numbers of shape {shape}; do not trust this checkpoint"
                    )
                if actual != shape:
                    raise InputError(
                        f"{where} has shape {actual}, expected {shape} in each of {self._shards} "
                        "shards; use the config that the model was trained with, and copy all "
                        "shards"
                    )
                with archive.open(member) as stream:
                    yield stream, _BFLOAT16 if dtype == np.dtype("V2") else dtype
        except InputError:
            raise
        except _DAMAGED as error:
            raise InputError(
                f"{where} is damaged: {reason(error)}; expected shape {shape}; {_COPY_ADVICE}"
            ) from None


def _members(path: str) -> list[str]:
    """Return the names of the arrays in one .npz file: arr_0.npy, arr_1.npy, and so on.

    Raises:
      InputError: if the file is missing or damaged, or its arrays have other names.
    """
    try:
        with files.open_file(path) as file, zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing; a shard has 16 files, 0.npz to 15.npz; {_COPY_ADVICE}"
        ) from None
    except _DAMAGED as error:
        size = f", {files.size(path):,} bytes" if files.is_file(path) else ""
        raise InputError(
            f"{path}: not a complete .npz archive ({reason(error)}{size}); {_COPY_ADVICE}"
        ) from None
    expected = [f"arr_{i}.npy" for i in range(len(names))]
    if sorted(names) != sorted(expected):
        missing = next(name for name in expected if name not in names)
        raise InputError(
            f"{path} holds {len(names)} arrays, but none is {missing.removesuffix('.npy')}; "
            f"expected arr_0 to arr_{len(names) - 1}; "
            "check that this is a mesh-transformer-jax checkpoint"
        )
    return expected


def _header(stream: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and dtype in the header of a .npy stream.

    Raises:
      ValueError: if the header cannot be parsed.
    """
    try:
        version = npy.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = npy.read_array_header_1_0(stream)
        else:
            shape, _, dtype = npy.read_array_header_2_0(stream)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error):
        raise
    except Exception as error:  # numpy parses headers as Python, which may raise anything
        raise ValueError(f"its .npy header is damaged: {error}") from None
    return shape, dtype


def write(step: str, leaves: Sequence[Callable[[], Iterable[np.ndarray]]], shards: int) -> None:
    """Create the folders of a step's shards, and write 16 .npz files to each, leaf by leaf.

    Each file is byte for byte what `np.savez` would write.

    Args:
      leaves: for each leaf, a function that returns its arrays, one per shard.
    """
    folders = [os.path.join(step, f"shard_{number}") for number in range(shards)]
    for folder in folders:
        os.makedirs(folder)
    bar = tqdm(leaves, desc=f"writing {shards} shards", unit="leaf", disable=None)
    # While one leaf is written, the next one is read.
    with bar, contextlib.closing(Prefetch((list(leaf()) for leaf in bar), 1)) as arrays:
        for piece, (first, end) in enumerate(split(len(leaves))):
            paths = [os.path.join(folder, f"{piece}.npz") for folder in folders]
            _write_piece(paths, arrays, end - first)


def _write_piece(paths: Sequence[str], arrays: Iterator[list[np.ndarray]], count: int) -> None:
    """Write the next `count` leaves of `arrays` to the files in `paths`, one per shard."""
    with contextlib.ExitStack() as stack:
        archives = [stack.enter_context(zipfile.ZipFile(path, "w")) for path in paths]
        for number, parts in zip(range(count), arrays, strict=False):
            for archive, values in zip(archives, parts, strict=True):
                # Zip64 must be chosen before the size is known.
                with archive.open(f"arr_{number}.npy", "w", force_zip64=True) as stream:
                    _write_array(stream, values)


def _write_array(stream: Any, values: np.ndarray) -> None:
    """Write an array as `np.save` would, without the copies that `np.save` makes.

    The header of a bfloat16 array gives the dtype "<V2", because numpy does not know bfloat16.
    """
    values = np.asarray(values, order="C")
    header = {"descr": values.dtype.str, "fortran_order": False, "shape": values.shape}
    npy.write_array_header_1_0(stream, header)
    stream.write(values.reshape(-1).view(np.uint8).data)
