"""LoRA (Hu 2021): low-rank adapters beside frozen weights, and their sum."""

from typing import Any

import jax.numpy as jnp
from jax import Array


def adapter_names(weight: str) -> tuple[str, str]:
    """What the two factors beside a weight are called, in its own module."""
    return f"{weight}_lora_a", f"{weight}_lora_b"


def merged(modules: dict[str, Any], scale: float) -> dict[str, Any]:
    """One layer's modules with their adapters, [in, R] and [R, out], in their weights; in f32."""

    def one(leaves: dict[str, Array]) -> dict[str, Array]:
        own = set(leaves).difference(*map(adapter_names, leaves))
        found = {name: leaves[name] for name in own}
        for name in own:
            a, b = (leaves.get(each) for each in adapter_names(name))
            if a is not None and b is not None:
                a, b = a.astype(jnp.float32), b.astype(jnp.float32)
                product = jnp.tensordot(a, b, 1, precision="highest")
                found[name] = found[name].astype(jnp.float32) + scale * product
        return found

    return {module: one(leaves) for module, leaves in modules.items()}
