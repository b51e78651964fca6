"""The functions that the config key `hooks` names, which are called with each metrics row."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from mesh_transformer.util import InputError, brief, load_named

Hook = Callable[[dict[str, Any]], object]  # called with the metrics row of each step


def load_hook(name: str) -> Hook:
    """Return the function that the config key `hooks` names.

    Raises:
      InputError: if there is no such function.
    """
    if not callable(hook := load_named(name, "hooks")):
        raise InputError(f"hooks: {name} is {brief(repr(hook))}, expected a function of a row")
    return hook


def call_hooks(hooks: Sequence[Hook], row: dict[str, Any]) -> None:
    """Call hooks with a row, which they may add numbers to; see `call_hook`.

    Raises:
      InputError: if a hook has added something that is not a finite number.
    """
    before = set(row)
    for hook in hooks:
        call_hook(hook, row)
    for name in row.keys() - before:
        row[name] = _as_number(name, row[name])


def call_hook(hook: Hook, row: dict[str, Any]) -> None:
    """Call a hook; if it raises an error, the traceback ends in a line that names the hook."""
    try:
        hook(row)
    except Exception as error:
        notes = getattr(error, "__notes__", ())  # JAX adds its own, too
        # A hook that calls others is not to blame if one of them failed.
        if not any(note.startswith("error: the hook") for note in notes):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            where = (
                f"the hook {getattr(hook, '__module__', '')}:{name} failed at step {row['step']}"
            )
            error.add_note(f"error: {where}; see the traceback above")
        raise


def _as_number(name: str, value: Any) -> float:
    """Return what a hook has added to a row as a number."""
    with contextlib.suppress(TypeError, ValueError):
        if math.isfinite(number := float(value)):  # others are not JSON
            return number
    raise InputError(
        f"a hook added {name!r} to a row: {brief(repr(value))}, expected a finite number"
    )
