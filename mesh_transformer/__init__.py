"""GPT-J and related models in JAX and Haiku, parallel over a (dp, mp) mesh."""

import importlib
from typing import TYPE_CHECKING, Any

from mesh_transformer import old_names

if TYPE_CHECKING:
    from mesh_transformer.config import Config
    from mesh_transformer.training.fit import fit
    from mesh_transformer.training.functions import (
        apply,
        decode_step,
        generation_weights,
        hidden,
        log_probs,
        logits_from,
        loss,
        prefill,
    )
    from mesh_transformer.transformer_shard import CausalTransformer, load
    from mesh_transformer.util import InputError

__all__ = [
    "CausalTransformer",
    "Config",
    "InputError",
    "apply",
    "decode_step",
    "fit",
    "generation_weights",
    "hidden",
    "load",
    "log_probs",
    "logits_from",
    "loss",
    "prefill",
]
__version__ = "1.1.0.dev0"

_MODULES = {
    "CausalTransformer": "transformer_shard",
    "Config": "config",
    "InputError": "util",
    "apply": "training.functions",
    "decode_step": "training.functions",
    "fit": "training.fit",
    "generation_weights": "training.functions",
    "hidden": "training.functions",
    "load": "transformer_shard",
    "log_probs": "training.functions",
    "logits_from": "training.functions",
    "loss": "training.functions",
    "prefill": "training.functions",
}


def __getattr__(name: str) -> Any:
    """Return the public object `name`; its module is imported only on first use, to save time."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"mesh_transformer.{_MODULES[name]}"), name)


old_names.install()
