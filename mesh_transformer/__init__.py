"""GPT-J in JAX and Haiku, model-parallel over a (dp, mp) mesh."""

from typing import Any

__all__ = ["CausalTransformer", "Config", "InputError", "load"]


def __getattr__(name: str) -> Any:
    """The public names, imported at first use: `import mesh_transformer` itself does no work."""
    if name in ("CausalTransformer", "load"):
        from mesh_transformer import transformer_shard as home
    elif name == "Config":
        from mesh_transformer import config as home
    elif name == "InputError":
        from mesh_transformer import util as home
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(home, name)
