"""The optimizer: gradient clipping, a rule for updates such as Adam, and weight decay."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import Declaration, map_declared
from mesh_transformer.model.casts import to_bf16, to_f32
from mesh_transformer.training.update_rules import RULES, OwnRule, Rule

OptState = dict[str, Any]  # `count` and the moments of the config's rule; see `update_rules.Rule`


@dataclass(frozen=True)
class Optimizer:
    """Gradient clipping by global norm, the config's `optimizer`, and decoupled weight decay.

    Weight decay applies to the matrices.  Gradients must be means over microbatches and replicas,
    and sharded like the state.

    The original mesh-transformer-jax stores some biases once per shard and uses the sum of the
    copies.  This library stores only the sum.  To reproduce the original's training with c copies,
    set the config's `original_bias_copies` to c.  For these biases, the optimizer then multiplies
    the update and the contribution to the squared gradient norm by c.

    Attributes:
      declared: a tree with the `Declaration` of every trained parameter.  `Declaration.summed`
        marks the biases described above.
    """

    config: Config
    declared: Any

    def _copies(self, declaration: Declaration) -> int:
        return self.config.original_bias_copies if declaration.summed else 1

    @functools.cached_property
    def _rule(self) -> Rule:
        return RULES.get(self.config.optimizer, OwnRule)(self.config, self.declared)

    def moments(self) -> dict[str, Any]:
        """Return {name: tree of `Moment`s}: which arrays the state has besides its `count`."""
        return self._rule.moments()

    def init(self, params: Any) -> OptState:
        """Return the initial state, whose moments are those of `Rule.initial`.

        The moments are in f32 or, if the config sets `bf16_optimizer`, in bf16.
        """

        moments = self._rule.initial(params)
        return self._stored({"count": jnp.zeros((), jnp.int32)} | moments)

    def _stored(self, state: OptState) -> OptState:
        """Cast the moments to the dtype that they have between steps."""
        # Adafactor's are few, and its averages over many steps would lose small terms in bf16.
        in_bf16 = self.config.bf16_optimizer and self.config.optimizer != "adafactor"
        return to_bf16(state) if in_bf16 else state

    def squares(self, grads: Any) -> Any:
        """Return each leaf's contribution to the squared gradient norm, in f32.

        Inside a `shard_map`, each device computes the contributions of its own shards, without a
        sum over devices.
        """

        def square(declaration: Declaration, g: Array) -> Array:
            return jnp.sum(jnp.square(g.astype(jnp.float32))) * self._copies(declaration)

        return map_declared(square, self.declared, grads)

    def update(
        self, grads: Any, state: OptState, params: Any, rate: Array, norm: Array
    ) -> tuple[Any, OptState]:
        """Return the updated parameters and optimizer state.

        The gradients are clipped to the global norm `config.clip_norm`.

        Args:
          rate: the learning rate of this update (see `schedule.learning_rate`).
          norm: the global norm of the gradients before clipping.
        """
        clip = jnp.minimum(1.0, self.config.clip_norm / jnp.maximum(norm, 1e-38))
        grads = jax.tree.map(lambda g: g * clip, to_f32(grads))
        updates, after = self._rule.update(grads, to_f32(state), to_f32(params))

        def move(declaration: Declaration, p: Array, u: Array) -> Array:
            decay = self.config.weight_decay if declaration.decay else 0.0
            u = (u + decay * p.astype(jnp.float32)) * self._copies(declaration)
            return (p.astype(jnp.float32) - rate * u).astype(p.dtype)

        moved = map_declared(move, self.declared, params, updates)
        return moved, self._stored(after)
