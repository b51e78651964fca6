"""The few helpers that belong to no other module: errors for users, casts, sizes to compile for."""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import jax
import jax.numpy as jnp


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mesh-transformer"


Tree = TypeVar("Tree")


class InputError(ValueError):
    """What the user gave cannot be used; the message is one line that says what to do.

    Scripts print it and exit with status 2 (`run_script`); a library caller catches it.
    """


class StoppedError(RuntimeError):
    """A run cannot go on, though its input was good; scripts print it and exit with status 1."""


class HostError(StoppedError):
    """A host of several has failed: another attempt, from the newest checkpoint, may go well."""


def bucket(size: int, smallest: int, largest: int | None = None) -> int:
    """The least of `smallest` times a power of two that holds `size`; none is above `largest`."""
    found = smallest * 2 ** math.ceil(math.log2(max(size / smallest, 1)))
    return found if largest is None else min(found, largest)


def run_script(main: Callable[[], int | None]) -> None:
    """Call a script's `main` and exit: 2 with one line on stderr where the input is bad.

    Ctrl-C, where the script does not handle it, exits with 130 and no traceback, at once.
    """
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        exit_now("", 130)  # whose threads may still be writing to a slow disk
    except (InputError, StoppedError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)


def exit_now(message: str, status: int) -> NoReturn:
    """Exits without waiting for other threads, after a line on stderr if there is a message."""
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _cast(tree: Tree, dtype: jnp.dtype) -> Tree:
    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)


def to_f32(tree: Tree) -> Tree:
    """The tree with its floating leaves in float32; integers stay."""
    return _cast(tree, jnp.dtype(jnp.float32))


def to_bf16(tree: Tree) -> Tree:
    """The tree with its floating leaves in bfloat16; integers stay."""
    return _cast(tree, jnp.dtype(jnp.bfloat16))
