"""LoRA (Hu 2021): names of low-rank adapters, and merging adapters into the model's weights."""

from typing import Any

import jax.numpy as jnp
from jax import Array


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of a weight's two adapter factors, found in the weight's Haiku module."""
    return f"{weight}_lora_a", f"{weight}_lora_b"


def merged(modules: dict[str, Any], scale: float) -> dict[str, Any]:
    """Merge one layer's adapters, [in, R] and [R, out], into the layer's weights.

    Returns the weights without the adapters.  Weights that had adapters are in f32; all other
    weights are unchanged.
    """

    def merge(leaves: dict[str, Array]) -> dict[str, Array]:
        weights = set(leaves).difference(*map(adapter_names, leaves))
        result = {name: leaves[name] for name in weights}
        for name in weights:
            a, b = (leaves.get(factor) for factor in adapter_names(name))
            if a is not None and b is not None:
                a, b = a.astype(jnp.float32), b.astype(jnp.float32)
                product = jnp.tensordot(a, b, 1, precision="highest")
                result[name] = result[name].astype(jnp.float32) + scale * product
        return result

    return {module: merge(leaves) for module, leaves in modules.items()}
