"""Where checkpoints are, and what storage says when it fails: in a few words, and said once."""

import errno
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable
from typing import Any

from mesh_transformer.util import InputError

AnyPath = str | os.PathLike[str]
_STEP_NAME = re.compile(r"step_(0|[1-9]\d*)")

# tensorstore writes "...: No space left on device [os_error_code='28']".
_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")

# tensorstore's and Orbax's words for what ends after a save or restore has failed.
_LATE = ("Event loop is closed", "Encountered error while reading array index")


def is_uri(path: str) -> bool:
    """Whether `path` is an address, such as `gs://bucket/model`, and not on a local disk."""
    return "://" in path


def local_path(path: AnyPath) -> str:
    """A local path absolute and with its `~` expanded; a URI less its closing slashes."""
    path = os.fspath(path)
    return path.rstrip("/") if is_uri(path) else os.path.abspath(os.path.expanduser(path))


def step_number(path: str) -> int | None:
    """The N of a path that ends in `step_N`, as every format writes it; None for others."""
    match = _STEP_NAME.fullmatch(os.path.basename(path))
    return None if match is None else int(match[1])


def check_free(path: str) -> None:
    """InputError where something is at a local `path` already."""
    if not is_uri(path) and os.path.lexists(path):
        raise InputError(f"{path}: is there already; choose another name or move it away")


def reason(error: BaseException) -> str:
    """The cause of a storage error in a few words, on one line."""
    cause: BaseException | None = error
    root = error
    while cause is not None:
        root = cause
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        if match := _OS_ERROR.search(str(cause)):
            return os.strerror(int(match[1]))
        cause = cause.__cause__ or cause.__context__
    text = " ".join(str(root).split()) or type(root).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def is_full(error: BaseException) -> bool:
    """Whether a storage error says that the disk, or the user's part of it, is full."""
    return reason(error) in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


def free_space(folder: str) -> str:
    """What to add to a line about a full disk: ", N bytes free"; nothing where not known."""
    try:
        return f", {shutil.disk_usage(folder).free:,} bytes free"
    except OSError:  # A bucket has no such number, nor has a folder that has gone.
        return ""


def hush_failures(is_new: Callable[[logging.LogRecord], bool]) -> None:
    """Keep Orbax from printing a failed save or restore, which is raised as one line anyway.

    Its threads log each error with a traceback, asyncio logs those that came after the first,
    and what else ends after the first failure comes to `sys.unraisablehook`.  Log lines that are
    not `is_new` are left out from now on: some come up only when the failed save is garbage.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_new)
    previous = sys.unraisablehook
    if getattr(previous, "__name__", "") == "_without_late_failures":
        return

    def _without_late_failures(unraisable: Any) -> None:
        if not str(unraisable.exc_value).startswith(_LATE):
            previous(unraisable)

    sys.unraisablehook = _without_late_failures
