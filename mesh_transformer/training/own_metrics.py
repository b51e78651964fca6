"""Metrics that functions of the user's compute from the gradients, inside of the training step."""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from jax import Array

from mesh_transformer.training.objectives import PREFIX
from mesh_transformer.util import InputError, load_named

# The names of the metrics of a step, which a function may not use.
TAKEN = {"loss", "last_loss", "grad_norm", "learning_rate", "skipped", "sequences", "tokens"}
TAKEN |= {"tokens_per_sec", "mfu"}


def own_metrics(name: str, grads: Any, params: Any, others: Collection[str]) -> dict[str, Array]:
    """Return the metrics of a function that the config key `metrics` names.

    Args:
      others: the names of the other metrics.

    Raises:
      InputError: if the function does not return numbers by name, or uses another metric's name.
    """
    values = load_named(name, "metrics")(grads, params)
    if not isinstance(values, dict):
        raise InputError(f"metrics: {name} returned {type(values).__name__}, expected a dict")
    metrics = {}
    for key, value in values.items():
        if key in TAKEN or f"{PREFIX}{key}" in others:
            raise InputError(f"metrics: {name} returned {key!r}, the name of another metric")
        if jnp.shape(value):
            shape = jnp.shape(value)
            raise InputError(f"metrics: {name} returned {key!r} of shape {shape}, expected numbers")
        metrics[f"{PREFIX}{key}"] = jnp.float32(value)
    return metrics
