"""The norms of the residual stream, and of queries and keys.

Array names end in their shape: B batch, T query, D model, N columns of a projection.
"""

import jax.numpy as jnp
from jax import Array, lax

from mesh_transformer.config_model import Model
from mesh_transformer.mesh import haiku as hk
from mesh_transformer.mesh.parallel import Axes, Parallel, param
from mesh_transformer.model.heads import Heads
from mesh_transformer.util import InputError, is_named, load_named


class Norm(hk.Module):
    """The norm that the config selects, computed in f32.

    Calling the module returns the normed x, as input of matmuls that are split over mp (see
    `Parallel.fan_out`).

    Raises:
      InputError: if each shard has parameters of its own, but the code does not run on each shard.

    Args:
      fanned_out: whether the input is already the result of `Parallel.fan_out`, which several norms
        of one layer then share.
      after: whether the result is part of the residual stream, so that it is not fanned out.
    """

    def __init__(
        self,
        config: Model,
        par: Parallel,
        name: str = "norm",
        *,
        fanned_out: bool = False,
        after: bool = False,
    ):
        super().__init__(name=name)
        self.config = config
        self.par = par
        self.fanned_out = fanned_out
        self.after = after

    def __call__(self, x_BTD: Array) -> Array:
        c, kind, dtype = self.config, self.config.norm_kind, x_BTD.dtype
        assert c.norm_eps is not None
        x_BTD = x_BTD.astype(jnp.float32)
        if is_named(c.norm):
            return self._fan_out(self._own(x_BTD).astype(dtype))
        shape: tuple[int, ...] = () if kind.scalar else x_BTD.shape[-1:]
        axes: Axes = (None,) * len(shape)
        # The 2-norm, in place of the root mean square, and 1e-5 outside it are the original's.
        if kind.centered:
            mean_BT1 = jnp.mean(x_BTD, axis=-1, keepdims=True)
            variance_BT1 = jnp.var(x_BTD, axis=-1, keepdims=True)
            normed, initial = (x_BTD - mean_BT1) * lax.rsqrt(variance_BT1 + c.norm_eps), 1.0
        elif kind.root_mean:
            mean_BT1 = jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True)
            normed, initial = x_BTD * lax.rsqrt(mean_BT1 + c.norm_eps), 1.0
        else:
            size_BT1 = jnp.linalg.norm(x_BTD, axis=-1, keepdims=True)
            normed, initial = x_BTD / (size_BT1 + c.norm_eps), x_BTD.shape[-1] ** 0.5
        if kind.per_shard:
            if self.par.mp != c.shards and not hk.running_init():
                raise InputError(
                    f"norm {c.norm} has parameters of its own on each shard; run it with "
                    f"partitioning shard_map and cores_per_replica {c.shards}"
                )
            # Scale and offset differ between shards, so the fan-out must come before them.
            normed = self._fan_out(normed)
            shape, axes = (c.shards, *shape), ("mp", *axes)
        if kind.plus_one:
            normed *= 1 + self._param("scale", shape, axes, 0.0)
        elif kind.scaled:
            normed *= self._param("scale", shape, axes, initial)
        if kind.offset:
            normed += self._param("offset", shape, axes, 0.0)
        normed = normed.astype(dtype)
        return normed if kind.per_shard else self._fan_out(normed)

    @hk.transparent
    def _own(self, x_BTD: Array) -> Array:
        """Return the result of the user's function that the config names."""
        width = x_BTD.shape[-1:]
        return load_named(str(self.config.norm), "norm")(
            x_BTD,
            lambda name, initial: self._param(name, (), (), initial),
            lambda name, initial: self._param(name, width, (None,), initial),
        )

    def _fan_out(self, x: Array) -> Array:
        return x if self.fanned_out or self.after else self.par.fan_out(x)

    def _param(self, name: str, shape: tuple[int, ...], axes: Axes, initial: float) -> Array:
        init = hk.Constant(initial)
        value = param(self.par, name, shape, axes, init, fanned_out=self.fanned_out)
        return (value[0] if self.config.norm_kind.per_shard else value).astype(jnp.float32)


class ProjectionNorm(hk.Module):
    """The root-mean-square norm of queries or keys over all heads, computed in f32.

    Args:
      columns: their global number.
      copied: as for `layers.Linear`.
    """

    def __init__(self, config: Model, par: Parallel, name: str, columns: int, copied: Heads | None):
        super().__init__(name=name)
        self.config = config
        self.par = par
        self.columns = columns
        self.copied = copied

    def __call__(self, x_BTN: Array) -> Array:
        c, par, kind, copied = self.config, self.par, self.config.norm_kind, self.copied
        normed = x_BTN.astype(jnp.float32)
        squares = jnp.square(normed)
        if copied is not None:
            squares *= copied.shares(self.columns)
        sum_BT1 = par.sum(jnp.sum(squares, axis=-1, keepdims=True))
        assert c.norm_eps is not None
        normed *= lax.rsqrt(sum_BT1 / self.columns + c.norm_eps)
        if kind.scaled:
            axes: Axes = ("mp" if copied is None else None,)
            init = hk.Constant(0.0 if kind.plus_one else 1.0)
            scale_N = param(
                par,
                "scale",
                (self.columns,),
                axes,
                init,
                fanned_out=copied is not None,
                unit=c.d_head,
            ).astype(jnp.float32)
            if copied is not None:
                scale_N = copied.kept(scale_N)
            normed *= scale_N + 1 if kind.plus_one else scale_N
        return normed.astype(x_BTN.dtype)
