"""Compiled programs in a folder of the user's, so that a second start compiles nothing."""

import os
from pathlib import Path

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
