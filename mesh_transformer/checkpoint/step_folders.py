"""The folders `step_<N>` of a native model folder: which are complete, left over, or the best.

A model folder has no index file: its steps are found by listing it.  A step is complete if it has a
commit file, which Orbax writes last.  Without this file, a step folder is left over from an
interrupted save or deletion if it has Orbax's temporary suffix or Orbax's metadata file, and the
next writer deletes it.  Anything else named `step_*` is left alone.

If the run keeps its best step, a file `best` names that step, and is replaced when it changes.
"""

import itertools
import json
import os
import re
from typing import Any

from etils import epath

from mesh_transformer.storage import files
from mesh_transformer.storage.access import (
    AnyPath,
    convert_storage_errors,
    delete_tree,
    entries,
    files_below,
    is_uri,
    local_path,
)
from mesh_transformer.util import DamagedError, InputError

COMMIT_FILE = "commit_success.txt"  # Orbax writes it last; it makes a step folder a complete step
MARK_FILE = "_CHECKPOINT_METADATA"  # Orbax writes it first, `delete_step` deletes it last
TEMPORARY = ".orbax-checkpoint-tmp"
BEST = "best"  # the name of the file that names the best step
_STEP_NAME = re.compile(r"step_(0|[1-9]\d*)")


def step_number(path: str) -> int | None:
    """Return N if the last component of `path` is `step_N`, otherwise None.

    All checkpoint formats name their step folders `step_N`.
    """
    match = _STEP_NAME.fullmatch(os.path.basename(path))
    return None if match is None else int(match[1])


def is_committed(path: epath.Path) -> bool:
    return step_number(path.name) is not None and (path / COMMIT_FILE).exists()


def is_unfinished(path: epath.Path) -> bool:
    """Return whether a folder is left over from an unfinished save or deletion of a step.

    Returns False for folders named step_<N> that other programs created.
    """
    name, temporary, _ = path.name.partition(TEMPORARY)
    if step_number(name) is None or not path.is_dir() or is_committed(path):
        return False
    return bool(temporary) or (path / MARK_FILE).exists()


def delete_step(path: epath.Path) -> None:
    """Delete a checkpoint step's folder; if `path` is a symbolic link, delete only the link.

    Orbax's commit file is deleted first, so that a partly deleted step is never taken for a
    complete step.  Orbax's metadata file is deleted last, so that an interrupted deletion can be
    recognised and completed.
    """
    if os.path.islink(path):
        delete_tree(path)
        return
    (path / COMMIT_FILE).unlink(missing_ok=True)
    for item in path.iterdir():
        if item.is_dir():
            delete_tree(item)
    delete_tree(path)


def set_aside(step: str) -> str:
    """Rename a damaged checkpoint folder, so that it is no longer read, and return the new name.

    The new name is `step_N.damaged` or, if that exists, `step_N.damaged2` and so on.
    """
    folder, name = os.path.split(step)
    taken = {path.name for path in entries(epath.Path(folder))}
    numbered = (f"{name}.damaged{number}" for number in itertools.count(2))
    new = next(new for new in itertools.chain([f"{name}.damaged"], numbered) if new not in taken)
    source, target = epath.Path(step), epath.Path(folder) / new
    with convert_storage_errors(f"{step} cannot be renamed"):
        if is_uri(step):
            # Object by object.  An interrupted move leaves a damaged step, which can be set aside
            # again, or a partly deleted one.
            marks = {source / COMMIT_FILE, source / MARK_FILE}
            for path in sorted(files_below(source)):
                moved = target / path.relative_to(source)
                moved.parent.mkdir(parents=True, exist_ok=True)
                if path in marks:
                    path.copy(moved)
                else:
                    path.rename(moved)
            delete_step(source)
        else:
            source.rename(target)
    return new


def committed_steps(folder: AnyPath) -> list[int]:
    """Return the committed steps of a model folder, ascending."""
    folder = epath.Path(folder)
    with convert_storage_errors(f"model folder {folder}"):
        names = [path.name for path in entries(folder) if is_committed(path)]
    return sorted(int(name.removeprefix("step_")) for name in names)


def best_step(folder: epath.Path) -> int | None:
    """Return the step that the file `best` of a model folder names.

    Returns None if there is no such file, or if it names no step, as after a power failure.

    Raises:
      InputError: if the file cannot be read.
    """
    path = folder / BEST
    with convert_storage_errors(f"{path}"):
        if not path.is_file():
            return None
        text = path.read_text()
    try:
        return int(json.loads(text)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def write_best(folder: epath.Path, best: dict[str, Any]) -> None:
    """Replace the file `best` of a model folder.

    Args:
      best: the JSON values to write: `step`, `set` (the validation set) and `loss`.
    """
    files.write_text(os.fspath(folder / BEST), json.dumps(best) + "\n")


def own_steps(folder: str) -> list[epath.Path]:
    """Return the step folders in a model folder: committed ones and unfinished ones."""
    with convert_storage_errors(f"model folder {folder}"):
        paths = entries(epath.Path(local_path(folder)))
        return [path for path in paths if is_committed(path) or is_unfinished(path)]


def damage_error(step: epath.Path, problem: str) -> DamagedError:
    """Return the error to raise if a step's files are not what was saved.

    The message names the newest committed step before this one, if there is one.

    Args:
      problem: text that follows the path of the step in the message, such as ": its ...".
    """
    own = step_number(step.name)
    try:
        earlier = [number for number in committed_steps(step.parent) if number < (own or 0)]
    except InputError:  # the folder cannot be listed
        earlier = []
    previous = f"step_{earlier[-1]}" if earlier else None
    advice = f", or use {previous}, the newest step before it" if previous else ""
    return DamagedError(
        f"checkpoint {step}{problem}; copy the step again{advice}", os.fspath(step), previous
    )


def no_checkpoint_error(folder: epath.Path) -> InputError:
    """Return the error to raise if a folder has no finished checkpoint or does not exist."""
    problem = "holds no finished checkpoint" if folder.is_dir() else "does not exist"
    if folder.is_file():
        problem = "is a file"
    models = [] if is_uri(os.fspath(folder)) else _model_folders(os.fspath(folder))
    example = f" such as {models[0]}" if models else ""
    return InputError(
        f"checkpoint folder {folder} {problem}; expected a model folder{example}, a step_<N> "
        "inside one, or a Hugging Face folder"
    )


def _model_folders(folder: str) -> list[str]:
    """Return the model folders in `folder`, or those next to `folder` if there are none in it.

    A model folder contains at least one checkpoint folder named `step_<N>`.
    """
    for place in (folder, os.path.dirname(folder)):
        inside = sorted(os.scandir(place), key=lambda e: e.name) if os.path.isdir(place) else []
        paths = [entry.path for entry in inside if os.path.isdir(entry.path)]  # also for loops
        models = [path for path in paths if any(map(_STEP_NAME.fullmatch, os.listdir(path)))]
        if models:
            return models
    return []
