"""Updates that are skipped, such as loss spikes.

A spike is a gradient norm far above the median of recent steps.
"""

import jax.numpy as jnp
from jax import Array

from mesh_transformer.config import Config

WINDOW = 128  # steps whose gradient norms are kept
LEAST = 16  # no step is a spike before this number of norms is kept


def fresh_norms() -> Array:
    """Return an empty window of gradient norms: zeros, f32 [WINDOW]; 0 marks an unused entry."""
    return jnp.zeros(WINDOW, jnp.float32)


def is_spike(norms: Array, norm: Array, factor: float) -> Array:
    """Return whether the gradient norm `norm` is more than `factor` times the median of `norms`.

    The result is False if the window `norms` has fewer than `LEAST` nonzero entries.
    """
    kept = jnp.sum(norms > 0)
    median = jnp.sort(norms)[jnp.minimum(WINDOW - kept + kept // 2, WINDOW - 1)]
    return (kept >= LEAST) & (norm > factor * median)


def with_norm(norms: Array, norm: Array, step: Array) -> Array:
    """Return the window `norms` with the oldest gradient norm replaced by `norm`.

    A `norm` that is not finite is not added.  Add the norms of skipped updates too, so that the
    median adapts if the norms stay at a higher level.

    Args:
      step: number of updates completed before the one with the gradient norm `norm`.
    """
    return jnp.where(jnp.isfinite(norm), norms.at[step % WINDOW].set(norm), norms)


def is_skipped(config: Config, norms: Array | None, metrics: dict[str, Array]) -> Array:
    """Return whether an update leaves the model unchanged: for its data, its loss or its norm.

    Args:
      norms: the window of gradient norms, with `skip_spikes`.
      metrics: those of the update.
    """
    norm = metrics["grad_norm"]
    skipped = metrics["counted"] == 0
    if config.skip_nonfinite:
        skipped |= ~(jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm))
    if config.skip_spikes:
        assert norms is not None
        skipped |= is_spike(norms, norm, config.skip_spikes)
    return skipped
