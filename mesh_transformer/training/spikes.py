"""Detection of loss spikes: gradient norms far above the median of recent ones."""

import jax.numpy as jnp
from jax import Array

WINDOW = 128  # steps whose gradient norms are kept
LEAST = 16  # no step is a spike before this number of norms is kept


def fresh_norms() -> Array:
    """Return an empty window of gradient norms: zeros, f32 [WINDOW]; 0 marks an unused entry."""
    return jnp.zeros(WINDOW, jnp.float32)


def is_spike(norms: Array, norm: Array, factor: float) -> Array:
    """Return whether a gradient norm is more than `factor` times the median of recent ones.

    The result is False if the window `norms` has fewer than `LEAST` norms.
    """
    kept = jnp.sum(norms > 0)
    median = jnp.sort(norms)[jnp.minimum(WINDOW - kept + kept // 2, WINDOW - 1)]
    return (kept >= LEAST) & (norm > factor * median)


def with_norm(norms: Array, norm: Array, step: Array) -> Array:
    """Return the window `norms` with its oldest norm replaced by `norm`.

    `norm` is the gradient norm of the update after `step` completed updates.  Norms of skipped
    updates are added too.  If the norms stay at a higher level, their median therefore reaches that
    level after a while.  A norm that is not finite is not added.
    """
    return jnp.where(jnp.isfinite(norm), norms.at[step % WINDOW].set(norm), norms)
