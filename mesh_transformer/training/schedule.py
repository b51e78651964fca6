"""Learning rate schedules, whose lengths are in updates or in tokens."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.util import is_named, load_named

# The config keys that determine a schedule, apart from `total_steps`, on which only wsd depends.
KEYS = (
    "schedule",
    "lr",
    "end_lr",
    "warmup_steps",
    "anneal_steps",
    "warmup_tokens",
    "anneal_tokens",
)


def gpt3_schedule(
    warmup_steps: float, anneal_steps: float, lr: float, end_lr: float
) -> Callable[[Array], Array]:
    """Return a schedule: linear warm-up from 0 to `lr`, then cosine decay to `end_lr`.

    The warm-up takes `warmup_steps` steps, and the decay `anneal_steps` steps.  The schedule maps
    the number of completed updates to the learning rate of the next update.  The learning rate of
    the first update is therefore 0, unless `warmup_steps` is 0.
    """

    def schedule(step: Array) -> Array:
        warm = _share(step, warmup_steps)
        annealed = jnp.clip(step - warmup_steps, 0, anneal_steps) / anneal_steps
        return warm * lr - (lr - end_lr) * (1 - jnp.cos(jnp.pi * annealed)) / 2

    return schedule


def _share(done: Array, length: float) -> Array | float:
    """Return the completed share, 0 to 1, of a phase that begins at 0."""
    return jnp.clip(done, 0, length) / length if length else 1.0


def learning_rate(
    config: Config, step: Array, sequences: Array | None = None, rows: int = 0
) -> Array:
    """Return the learning rate of the next update.

    A user's function gets the config and `step`.  All other schedules begin with a linear warm-up
    from 0 to `lr`.  The learning rate then follows the config's `schedule`.  With n updates (or
    tokens) completed, W those of the warm-up, A those of the decay, and N those of the whole run:

    * cosine: see `gpt3_schedule`; `end_lr` from n = W + A on.
    * linear: a straight line from `lr` at n = W to `end_lr` at n = W + A.
    * constant: `lr`.
    * wsd (warm-up, stable, decay): `lr` until n = N - A, then a straight line to `end_lr` at n = N.
    * inverse_sqrt: `lr` * sqrt(W / n).

    In tokens, N is the number that the run will have consumed after `total_steps` updates: those
    consumed so far, and those of the remaining updates at the current batch size.

    Args:
      step: number of completed updates.
      sequences: number of sequences that these updates have consumed; required if the schedule
        counts tokens.
      rows: sequences per microbatch; required if the schedule counts tokens.
    """
    c = config
    if is_named(c.schedule):
        return jnp.asarray(load_named(c.schedule, "schedule")(c, step), jnp.float32)
    assert c.anneal_steps is not None
    done, warmup, anneal = step, c.warmup_steps, c.anneal_steps
    if c.schedule_in_tokens:
        assert sequences is not None
        # Products with `seq` can exceed int32, and f32 rounds them by less than one part in 10^7.
        done = sequences.astype(jnp.float32) * c.seq
        warmup, anneal = float(c.warmup_tokens or 0), float(c.anneal_tokens or 1)
    if c.schedule == "cosine":
        return gpt3_schedule(warmup, anneal, c.lr, c.end_lr)(done)
    warm = _share(done, warmup)
    if c.schedule == "inverse_sqrt":
        return warm * c.lr * jnp.sqrt(warmup / jnp.maximum(done, warmup))
    annealed = jnp.float32(0)
    if c.schedule == "linear":
        annealed = jnp.clip(done - warmup, 0, anneal) / anneal
    elif c.schedule == "wsd":
        annealed = 1 - jnp.clip(_remaining(c, step, rows), 0, anneal) / anneal
    return warm * c.lr - (c.lr - c.end_lr) * annealed


def _remaining(config: Config, step: Array, rows: int) -> Array:
    """Return the number of updates, or of their tokens, that remain until `total_steps`."""
    assert config.total_steps is not None
    total, most = config.total_steps, config.gradient_accumulation_steps
    remaining = total - step
    if not config.schedule_in_tokens:
        return remaining
    microbatches = remaining.astype(jnp.float32) * most
    if config.batch_ramp_steps:
        # The steps up to which each microbatch but the first is missing.
        starts = [
            min(-(-rise * config.batch_ramp_steps // (most - config.batch_ramp_from)), total)
            for rise in range(1, most - config.batch_ramp_from + 1)
        ]
        missing = jnp.maximum(jnp.asarray(starts, jnp.int32) - step, 0)
        microbatches -= jnp.sum(missing.astype(jnp.float32))
    return microbatches * (rows * config.seq)


def warmup_remark(config: Config) -> str:
    """Return a line to print if the warm-up does not end before the run does; otherwise ""."""
    total, warmup = config.total_steps, config.warmup_steps
    if total is None or warmup <= total:
        return ""
    reached = config.lr * total / warmup
    return (
        f"warmup_steps {warmup} is more than total_steps {total}: the learning rate only reaches "
        f"{reached:.3g}, not lr {config.lr:.3g}; lower warmup_steps"
    )


def schedule_changes(config: Config, saved: dict[str, Any]) -> str:
    """Describe how the learning rate schedule differs from the one in a saved config.

    The defaults of some keys depend on `total_steps`, so extending a run can change its schedule.

    Args:
      saved: the config stored in a checkpoint, as a dict; empty if there is none.

    Returns:
      The keys with their old and new values; "" if the schedule is the same.
    """
    before = Config.from_dict(saved) if saved else config
    keys = (*KEYS, "total_steps") if config.schedule == "wsd" else KEYS
    return ", ".join(
        f"{key} is {new}, was {old}"
        for key in keys
        if (new := getattr(config, key)) != (old := getattr(before, key))
    )
