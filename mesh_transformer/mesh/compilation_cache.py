"""Compiled programs in a folder of the user's, so that a second start compiles nothing."""

import functools
import os
from pathlib import Path
from typing import Any

import jax

VARIABLE = "MESH_TRANSFORMER_CACHE"


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mesh-transformer"


def use_compilation_cache() -> None:
    """Turns JAX's persistent cache on, in `$MESH_TRANSFORMER_CACHE` or the user's cache folder.

    An empty variable turns it off.  A cache that JAX was already given stays as it is.
    """
    folder = os.environ.get(VARIABLE, str(cache_folder() / "compiled"))
    if not folder or jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    # By default what compiles within a second is not kept; a start has hundreds of those.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if "://" not in folder:
        _write_in_every_process()


def _write_in_every_process() -> None:
    """Has each process of several keep what it compiles; by itself JAX has the first do so alone.

    That spares storage which all of them share.  But hosts have a disk each, without which all but
    the first would compile anew at every start; and on CPUs a process's programs are its own.  JAX
    has no setting for this: where its inside is not the one known here, it stays as it is.
    """
    try:
        from jax._src import compiler, distributed

        write, state = compiler._cache_write, distributed.global_state
    except (ImportError, AttributeError):
        return

    @functools.wraps(write)
    def write_here(*args: Any, **kwargs: Any) -> None:
        rank, state.process_id = state.process_id, 0
        try:
            write(*args, **kwargs)
        finally:
            state.process_id = rank

    compiler._cache_write = write_here
