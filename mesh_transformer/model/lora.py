"""LoRA (Hu 2021): low-rank adapters of weights, and a function to merge them into the weights."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from mesh_transformer.config_model import Model
from mesh_transformer.mesh import haiku as hk
from mesh_transformer.mesh.declaration import count_input_axes
from mesh_transformer.mesh.parallel import Axes, Parallel, param


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the parameter names of the two LoRA factors of the weight named `weight`."""
    return f"{weight}_lora_a", f"{weight}_lora_b"


def rank_axis(name: str) -> int:
    """Return the axis R of the factor with this parameter name."""
    return -1 if name.endswith("_lora_a") else 0


def factors(
    config: Model,
    par: Parallel,
    target: str,
    weight: str,
    shape: tuple[int, ...],
    axes: Axes,
    unit: int = 1,
) -> tuple[Array, Array] | None:
    """Return the LoRA factors (Hu 2021) of a weight, or None if the config adds no adapter to it.

    The factors are a, [in, R], and b, [R, out], which become parameters of the current Haiku
    module.  The factor b is initialised to zero.  The caller must add x @ a @ b times the scale
    (see `scaled`) to the product of x and the weight.

    A weight may have several input axes or several output axes (see `count_input_axes`).  The
    factors split each of these axes over the mesh in the same way as the weight.

    Args:
      target: the weight's name in `config.lora_targets`.
      weight: the weight's parameter name.
      shape: the weight's global shape.
      axes: for each of the weight's axes, the mesh axis that splits it, or None.
      unit: see `Declaration.unit`.
    """
    if not config.adapts(target):
        return None
    inputs = count_input_axes(axes)
    name_a, name_b = adapter_names(weight)
    shape_a, axes_a = (*shape[:inputs], config.lora_rank), (*axes[:inputs], None)
    shape_b, axes_b = (config.lora_rank, *shape[inputs:]), (None, *axes[inputs:])
    init = hk.TruncatedNormal(stddev=math.prod(shape[:inputs]) ** -0.5)
    zeros = hk.Constant(0.0)
    return (
        param(par, name_a, shape_a, axes_a, init, decay=True, adapter=True, unit=unit),
        param(par, name_b, shape_b, axes_b, zeros, decay=True, adapter=True, unit=unit),
    )


class Adapter(NamedTuple):
    """A LoRA adapter of a model: the config with its keys, and its factors, stacked by layer."""

    config: Model
    params: Any


Scale = float | Array  # the factor of an adapter's contribution; an array has the shape [B, 1, R]


def scale_of(config: Model, own: Scale | None) -> Scale:
    """Return `own` or, if it is None, the scale of the config's adapters."""
    return config.lora_scale if own is None else own


def scaled(low: Array, scale: Scale) -> Array:
    """Return the product of an input and an adapter's factor a, [B, T, R], times the scale."""
    return (low * scale).astype(low.dtype)


def adapted_columns(x_BTD: Array, adapter: tuple[Array, Array], scale: Scale) -> Array:
    """Return an adapter's contribution to a linear layer's output, [B, T, *columns].

    Args:
      adapter: the LoRA factors (a, b).
      scale: the factor by which the contribution is scaled.
    """
    a_DR, b = adapter
    low_BTR = scaled(x_BTD @ a_DR, scale)
    # An axis of size 1 keeps the order in which XLA sums the gradients, and so the bits of runs.
    y_BT1N = jnp.einsum("XBTR,RXN->BTXN", low_BTR[None], b.reshape(len(b), 1, -1))
    return y_BT1N.reshape(*x_BTD.shape[:2], *b.shape[1:])


def merged(modules: dict[str, Any], scale: float) -> dict[str, Any]:
    """Merge one layer's adapters, [in, R] and [R, out], into the layer's weights.

    Args:
      modules: the layer's parameters, {module: {name: array}}.
      scale: the factor by which adapters are scaled, `config.lora_scale`.

    Returns:
      The parameters without the adapters.  Weights that had adapters are in f32; all other
      parameters are unchanged.
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
