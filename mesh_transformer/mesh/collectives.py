"""Words between devices that have a gradient of their own."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_cast(x: Array, axis: int, dtype: Any) -> Array:
    """f32 parts along `axis` joined over dp and cast; their gradient is summed in f32.

    Without the custom rule the transpose would sum the replicas' gradients in `dtype`.
    """
    return lax.all_gather(x.astype(dtype), "dp", axis=axis, tiled=True)


def gather_cast_forward(x: Array, axis: int, dtype: Any) -> tuple[Array, None]:
    return gather_cast(x, axis, dtype), None


def gather_cast_backward(axis: int, dtype: Any, _: None, g: Array) -> tuple[Array]:
    g = g.astype(jnp.float32)
    return (lax.psum_scatter(g, "dp", scatter_dimension=axis, tiled=True),)


gather_cast.defvjp(gather_cast_forward, gather_cast_backward)
