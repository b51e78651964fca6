"""Whether a checkpoint step is what was saved: checksums of its leaves, digests of its JSON.

    step_<N>/checksums.json   {"leaves": {"params.proj.w": [uint32 per layer]},
                               "files": {"aux/metadata": SHA-256},
                               "digest": SHA-256 of the other two}

It is written before the step is committed.  Steps of earlier versions have none.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from mesh_transformer.checkpoint.checksums import tree_checksums
from mesh_transformer.util import InputError

NAME = "checksums.json"
# JSON that says where arrays are and what they look like; the arrays' own files are not hashed.
_FILES = ("aux/metadata", "state/_METADATA", "state/_sharding")
_PER_PROCESS = "state/array_metadatas"

Path = tuple[str, ...]

_log = logging.getLogger(__name__)


class Integrity(NamedTuple):
    """What was saved: checksums of each leaf's layers (one where it has none), files' digests."""

    leaves: dict[str, list[int]]  # by their keys joined with dots, as Orbax names them
    files: dict[str, str]


def write(step: epath.Path, sums: Mapping[str, Sequence[int]]) -> None:
    """Writes the record of a step whose other files are complete.

    Args:
      sums: of each leaf's layers, by the leaf's name.
    """
    names = [name for name in _FILES if (step / name).exists()]
    if (step / _PER_PROCESS).is_dir():
        names += sorted(f"{_PER_PROCESS}/{path.name}" for path in (step / _PER_PROCESS).iterdir())
    record: dict[str, Any] = {
        "leaves": dict(sums),
        "files": {name: _sha256((step / name).read_bytes()) for name in names},
    }
    (step / NAME).write_text(json.dumps(record | {"digest": _digest(record)}))


def read(step: epath.Path) -> Integrity | None:
    """The record of a step; None, after a warning, where an earlier version saved it.

    Raises:
      InputError: where the record itself is damaged.
    """
    path = step / NAME
    if not path.exists():
        _warn(str(step))
        return None
    try:
        record = json.loads(path.read_text())
        digest = record.pop("digest")
        leaves = {name: list(sums) for name, sums in record["leaves"].items()}
        files = dict(record["files"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise damaged(step, f"its file {NAME}") from None
    if digest != _digest(record):
        raise damaged(step, f"its file {NAME}")
    return Integrity(leaves, files)


@functools.cache
def _warn(step: str) -> None:
    """Warns once per step and process."""
    _log.warning(
        "checkpoint %s has no checksums, as an earlier version saved it: damage cannot be noticed",
        step,
    )


def check_file(step: epath.Path, record: Integrity | None, name: str, content: bytes) -> None:
    """Raises InputError where a file's content is not what was saved."""
    if record is not None and record.files.get(name, _sha256(content)) != _sha256(content):
        raise damaged(step, f"its file {name}")


def damaged_file(step: epath.Path, record: Integrity | None) -> str | None:
    """The first JSON file of a step that is missing or not what was saved."""
    for name, digest in record.files.items() if record else ():
        path = step / name
        if not path.exists() or _sha256(path.read_bytes()) != digest:
            return name
    return None


def check_leaves(step: epath.Path, record: Integrity | None, leaves: dict[Path, Any]) -> None:
    """Raises InputError naming the first of these arrays on a mesh that is not what was saved.

    Every process of the mesh has to call it.
    """
    if record is None:
        return
    for path, sums in tree_checksums(leaves).items():
        check_sums(step, record, path, 0, sums)


def check_sums(
    step: epath.Path, record: Integrity, path: Path, first: int, sums: Sequence[int]
) -> None:
    """Raises InputError where the sums of a leaf's layers, from `first` on, are not those saved."""
    saved = record.leaves.get(".".join(path))
    if saved is None:
        return  # not a leaf of that step: shapes are checked elsewhere
    for layer, found in enumerate(sums, first):
        if found != saved[layer]:
            part = f" (layer {layer})" if len(saved) > 1 else ""
            raise damaged(step, f"its leaf {'/'.join(path)}{part}")


def damaged(step: epath.Path, what: str) -> InputError:
    """The error for a step that is not what was saved."""
    return InputError(
        f"checkpoint {step}: {what} is damaged, it is not what was saved; restore another step or "
        "copy this one anew"
    )


def _digest(record: Mapping[str, Any]) -> str:
    return _sha256(json.dumps(record, sort_keys=True).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
