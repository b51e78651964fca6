"""GPT-J in JAX and Haiku, model-parallel over a (dp, mp) mesh."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_transformer.config import Config
    from mesh_transformer.transformer_shard import CausalTransformer, load
    from mesh_transformer.util import InputError

__all__ = ["CausalTransformer", "Config", "InputError", "load"]

_HOMES = {
    "CausalTransformer": "transformer_shard",
    "Config": "config",
    "InputError": "util",
    "load": "transformer_shard",
}


def __getattr__(name: str) -> Any:
    """The public names, imported at first use: `import mesh_transformer` itself does no work."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"mesh_transformer.{_HOMES[name]}"), name)
