"""The Haiku modules before and after the layers: embeddings and output projection.

Array names end in their shape, as in `layers`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mesh_transformer.config_model import Model
from mesh_transformer.mesh import haiku as hk
from mesh_transformer.mesh.parallel import Parallel, param
from mesh_transformer.model import attention
from mesh_transformer.model.dropout import Dropout, drop_entries
from mesh_transformer.model.layers import Linear, initialiser
from mesh_transformer.model.norms import Norm

T5_BUCKETS = 32
T5_MAX_DISTANCE = 128


def t5_bucket(distance: Array) -> Array:
    """Return the T5 bucket (Raffel 2020) of a query's distance to an earlier key.

    Each distance up to 15 has its own bucket, larger distances share logarithmically spaced
    buckets, and all distances from 128 on share the last bucket.  The buckets come from a table
    computed in NumPy, because a logarithm in f32 rounds differently between backends.
    """
    steps = np.arange(T5_MAX_DISTANCE)
    exact = T5_BUCKETS // 2
    ratio = np.log(np.maximum(steps, 1) / exact) / np.log(T5_MAX_DISTANCE / exact)
    far = np.minimum(exact + (ratio * (T5_BUCKETS - exact) + 1e-6).astype(int), T5_BUCKETS - 1)
    table = jnp.asarray(np.where(steps < exact, steps, far))
    return table[jnp.clip(distance, 0, T5_MAX_DISTANCE - 1)]


class RelativePosition(hk.Module):
    """T5's causal relative position bias, with 32 buckets and one table for all layers.

    Calling the module returns the f32 bias_BHTS.
    """

    def __init__(self, config: Model, par: Parallel):
        super().__init__(name="relative")
        self.par = par
        self.heads = config.n_heads

    def __call__(self, positions_BT: Array, key_positions_BS: Array) -> Array:
        init = hk.TruncatedNormal(stddev=0.02)
        shape = (self.heads, T5_BUCKETS)
        table = param(self.par, "rel_embedding", shape, ("mp", None), init, decay=True)
        distance_BTS = positions_BT[:, :, None] - key_positions_BS[:, None, :]
        bias_HBTS = table.astype(jnp.float32)[:, t5_bucket(distance_BTS)]
        return jnp.moveaxis(bias_HBTS, 0, 1)


@jax.custom_vjp
def lookup(w_VD: Array, row_BT: Array) -> Array:
    """Return the rows of a table at the indices `row_BT`, as [B, T, D].

    The table's gradient is summed in f32, because a frequent token adds thousands of terms to the
    gradient of one row.
    """
    return w_VD[row_BT]


def _lookup_forward(w_VD: Array, row_BT: Array) -> tuple[Array, tuple[Array, Array]]:
    return w_VD[row_BT], (w_VD, row_BT)


def _lookup_backward(saved: tuple[Array, Array], g_BTD: Array) -> tuple[Array, None]:
    w_VD, row_BT = saved
    sums_VD = jnp.zeros(w_VD.shape, jnp.float32).at[row_BT].add(g_BTD.astype(jnp.float32))
    return sums_VD.astype(w_VD.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


class Embedding(hk.Module):
    """Token embedding, split by vocabulary over mp.

    If the config's `pe` is "fixed", learned position embeddings are added.  Calling the module
    returns the residual stream x_BTD, after dropout if its random numbers are given.
    """

    def __init__(self, config: Model, par: Parallel):
        super().__init__(name="embedding")
        self.config = config
        self.par = par

    def __call__(
        self, tokens_BT: Array, positions_BT: Array, dropout: Dropout | None = None
    ) -> Array:
        c, par = self.config, self.par
        init = initialiser(c, "embedding")
        w_VD = param(par, "w", (c.n_vocab, c.d_model), ("mp", None), init, decay=True)
        rows = w_VD.shape[0]
        row_BT = tokens_BT.astype(jnp.int32) - par.rank() * rows
        local_BT = (row_BT >= 0) & (row_BT < rows)
        rows_BTD = lookup(w_VD, jnp.clip(row_BT, 0, rows - 1))
        x_BTD = par.join(jnp.where(local_BT[..., None], rows_BTD, 0))
        positions_BTD = None
        if c.pe == "fixed":
            init = initialiser(c, "positions")
            table = param(par, "pos_embs", (c.seq, c.d_model), (None, "mp"), init, decay=True)
            table = jnp.asarray(par.gather(table))[:, : c.d_model]  # without padding
            positions_BTD = par.own_positions(table[jnp.clip(positions_BT, 0, c.seq - 1)])
        x_BTD = par.by_rows(self._entered)(x_BTD, positions_BTD)
        if dropout is not None and c.dropout_embedding:
            length = tokens_BT.shape[1] * par.cp
            kept_BTD = par.cut(dropout.kept(0, c.dropout_embedding, length, c.d_model))
            x_BTD = drop_entries(x_BTD, par.own_positions(kept_BTD), c.dropout_embedding)
        return x_BTD

    @hk.transparent
    def _entered(self, x_BTD: Array, positions_BTD: Array | None) -> Array:
        """Return what enters the first layer, from the rows of tokens and positions."""
        c, par = self.config, self.par
        if c.layer_kind.biased_ends:
            bias = hk.Constant(0.0)
            x_BTD += param(par, "b", (c.d_model,), (None,), bias, summed=True)
        if c.embed_scale != 1:  # Original: Gemma's is rounded to the dtype, too
            x_BTD *= jnp.asarray(c.embed_scale, x_BTD.dtype)
        if c.embed_norm:
            x_BTD = Norm(c, par, after=True)(x_BTD)
        if positions_BTD is not None:
            x_BTD += positions_BTD
        return x_BTD


class Projection(hk.Module):
    """The last norm, and the output head, from the normed x_BTD to f32 logits_BTV.

    The logits are split over mp along the vocabulary.  If mp does not divide the vocabulary, it is
    padded with logits of -1e10, whose probability is 0.
    """

    def __init__(self, config: Model, par: Parallel):
        super().__init__(name="projection")
        self.config = config
        self.par = par

    def __call__(self, x: Array, *, norm: bool = True, head: bool = True) -> Array:
        """Apply the norm if `norm` is true, then the output head if `head` is true."""
        if norm:
            x = self.par.by_rows(Norm(self.config, self.par))(x)
        return self.par.by_rows(self._logits)(x) if head else x

    @hk.transparent
    def _logits(self, x: Array) -> Array:
        c, par = self.config, self.par
        biased = c.layer_kind.biased_ends
        x = Linear(c, par, c.n_vocab, "head", biased, dtype=jnp.float32)(x)
        if c.logit_divisor != 1:
            x /= c.logit_divisor
        x = attention.capped(x, c.logit_cap)
        if par.local_size(c.n_vocab) * par.mp > c.n_vocab:  # the vocabulary is padded
            id_V = par.rank() * x.shape[-1] + jnp.arange(x.shape[-1])
            x = jnp.where(id_V < c.n_vocab, x, attention.MASKED)
        return x
