"""The optimizer of mesh-transformer-jax: clipping, Adam and weight decay."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import Declaration, map_declared
from mesh_transformer.util import to_bf16, to_f32

OptState = dict[str, Any]  # Adam's moments, each in the structure of the parameters


@dataclass(frozen=True)
class Optimizer:
    """Gradient clipping by global norm, Adam, and decoupled weight decay of the matrices.

    Gradients must be means over microbatches and
    replicas, in f32, and sharded like the state.

    The original mesh-transformer-jax stores some biases once per shard and uses the sum of the
    copies.  This library stores only the sum.  To reproduce the original's training with c copies,
    set the config's `original_bias_copies` to c.  For these biases, the optimizer then multiplies
    the Adam step and the contribution to the squared gradient norm by c.

    Attributes:
      declared: a tree with the `Declaration` of every trained parameter.  `Declaration.summed`
        marks the biases described above.
    """

    config: Config
    declared: Any

    def _copies(self, declaration: Declaration) -> int:
        return self.config.original_bias_copies if declaration.summed else 1

    def _adam(self) -> optax.GradientTransformation:
        c = self.config
        return optax.scale_by_adam(b1=c.adam_b1, b2=c.adam_b2, eps=c.adam_eps)

    def init(self, params: Any) -> OptState:
        """Return Adam's initial state, with zero moments in the parameters' shapes.

        The moments are in f32 or, if the config sets `bf16_optimizer`, in bf16.
        """
        adam = self._adam().init(to_f32(params))
        assert isinstance(adam, optax.ScaleByAdamState)
        return self._pack(adam)

    def _pack(self, adam: optax.ScaleByAdamState) -> OptState:
        cast = to_bf16 if self.config.bf16_optimizer else to_f32
        return {"count": adam.count, "mu": cast(adam.mu), "nu": cast(adam.nu)}

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
        grads = jax.tree.map(lambda g: g * clip, grads)
        before = optax.ScaleByAdamState(state["count"], to_f32(state["mu"]), to_f32(state["nu"]))
        updates, after = self._adam().update(grads, before)
        assert isinstance(after, optax.ScaleByAdamState)

        def move(declaration: Declaration, p: Array, u: Array) -> Array:
            decay = self.config.weight_decay if declaration.decay else 0.0
            u = (u + decay * p.astype(jnp.float32)) * self._copies(declaration)
            return (p.astype(jnp.float32) - rate * u).astype(p.dtype)

        moved = map_declared(move, self.declared, params, updates)
        return moved, self._pack(after)
