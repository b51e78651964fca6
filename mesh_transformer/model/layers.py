"""The parts of GPT-J, each written once for every mesh.

Array names end in their shape: B batch, T query, S cache or key, D model, H heads this program
sees, K head size, R rank of an adapter, F feed-forward, C columns of one head group, N columns
of a projection, V vocabulary this program sees, L layers, G norm groups (1, or with
layernorm-desync the shards that this program holds).
"""

import math
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.mesh.parallel import Axes, Parallel, param
from mesh_transformer.model.attention import Attend, LayerCache, attend, rotate, write
from mesh_transformer.model.lora import adapter_names

T5_BUCKETS = 32
T5_MAX_DISTANCE = 128


class Context(NamedTuple):
    """What all layers share: where the queries stand and which keys they see."""

    positions_BT: Array
    bias_BHTS: Array | None  # None: `attend` has its own masks
    slot_B: Array | None = None  # where each row's cache takes its one new key
    attend: Attend | None = None  # in place of attention by `bias`


def fan_in_init(fan_in: int) -> hk.initializers.Initializer:
    """Truncated at two sigma, sigma 1/sqrt(fan in), as Haiku's Linear has it."""
    return hk.initializers.TruncatedNormal(stddev=fan_in**-0.5)


def _output_init(config: Config) -> hk.initializers.Initializer:
    """For the two matrices that write into the residual stream."""
    return hk.initializers.TruncatedNormal(stddev=2 / config.layers / config.d_model**0.5)


class Norm(hk.Module):
    """The config's norm, in f32, and the way into the mp-split part of a layer (Megatron's f).

    Returns x_GBTD: one normed copy for all heads, or with layernorm-desync one for each shard's.
    """

    def __init__(self, config: Config, par: Parallel):
        super().__init__(name="norm")
        self.par = par
        self.kind = config.norm
        self.shards = config.cores_per_replica

    def __call__(self, x_BTD: Array) -> Array:
        dtype, par = x_BTD.dtype, self.par
        x_BTD = x_BTD.astype(jnp.float32)
        if self.kind == "layernorm-desync":
            # The gains differ by shard, so the fan-out must come before them.
            x_GBTD = par.fan_out(_standardize(x_BTD))[None]
            return self._affine(x_GBTD, (self.shards, x_BTD.shape[-1]), ("mp", None)).astype(dtype)
        if self.kind.startswith("layernorm"):
            normed = self._affine(_standardize(x_BTD), x_BTD.shape[-1:], (None,))
        else:
            normed = self._rms(x_BTD)
        return par.fan_out(normed.astype(dtype))[None]

    def _affine(self, x: Array, shape: tuple[int, ...], axes: Axes) -> Array:
        scale = param(self.par, "scale", shape, axes, hk.initializers.Constant(1.0))
        x = x * _gain(scale)
        if self.kind == "layernorm-nobias":
            return x
        return x + _gain(param(self.par, "offset", shape, axes, hk.initializers.Constant(0.0)))

    def _rms(self, x_BTD: Array) -> Array:
        """Original: x over (its 2-norm + 1e-5), times a scale that starts at sqrt(D)."""
        width = x_BTD.shape[-1]
        shape, axes = ((width,), (None,)) if self.kind.startswith("rms") else ((), ())
        normed = x_BTD / (jnp.linalg.norm(x_BTD, axis=-1, keepdims=True) + 1e-5)
        normed *= _gain(param(self.par, "scale", shape, axes, hk.initializers.Constant(width**0.5)))
        if self.kind.endswith("-bias"):
            offset = param(self.par, "offset", shape, axes, hk.initializers.Constant(0.0))
            normed += _gain(offset)
        return normed


def _gain(value: Array) -> Array:
    """A norm's parameter in f32; per-shard ones [G, D] against x_GBTD."""
    value = value.astype(jnp.float32)
    return value[:, None, None, :] if value.ndim == 2 else value


def _standardize(x_BTD: Array) -> Array:
    mean = jnp.mean(x_BTD, axis=-1, keepdims=True)
    variance = jnp.var(x_BTD, axis=-1, keepdims=True)
    return (x_BTD - mean) * jax.lax.rsqrt(variance + 1e-5)


def _adapter(
    config: Config, par: Parallel, target: str, weight: str, shape: tuple[int, ...], axes: Axes
) -> tuple[Array, Array] | None:
    """LoRA (Hu 2021) beside a weight of this module, or None: a [in, R] and b [R, out], zero first.

    What they add to a product is `config.lora_scale` times x @ a @ b.  They are split as the
    weight is.  Where mp splits its first axis all but the last are inputs, else the first alone.

    Args:
      target: the matrix, as `config.lora_targets` names it.
      shape, axes: the weight's own.
    """
    if not config.adapts(target):
        return None
    inputs = len(shape) - 1 if axes[0] == "mp" else 1
    name_a, name_b = adapter_names(weight)
    shape_a, axes_a = (*shape[:inputs], config.lora_rank), (*axes[:inputs], None)
    shape_b, axes_b = (config.lora_rank, *shape[inputs:]), (None, *axes[inputs:])
    init = fan_in_init(math.prod(shape[:inputs]))
    zeros = hk.initializers.Constant(0.0)
    return (
        param(par, name_a, shape_a, axes_a, init, decay=True, adapter=True),
        param(par, name_b, shape_b, axes_b, zeros, decay=True, adapter=True),
    )


def _adapted_columns(x_GBTD: Array, adapter: tuple[Array, Array], scale: float) -> Array:
    """What an adapter adds, [B, T, columns], where mp splits them; each reads its norm group."""
    a_DR, b = adapter
    b_RGN = b.reshape(b.shape[0], x_GBTD.shape[0], -1)
    low_GBTR = jnp.einsum("GBTD,DR->GBTR", x_GBTD, a_DR) * scale
    y_BTGN = jnp.einsum("GBTR,RGN->BTGN", low_GBTR, b_RGN)
    return y_BTGN.reshape(*y_BTGN.shape[:2], -1)


class Linear(hk.Module):
    """A matmul whose columns mp splits; every column reads its own norm group.

    `dtype` is the result's, rounded to once (default: the inputs').
    """

    def __init__(
        self,
        config: Config,
        par: Parallel,
        columns: int,
        name: str,
        with_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
    ):
        super().__init__(name=name)
        self.config = config
        self.par = par
        self.columns = columns
        self.with_bias = with_bias
        self.dtype = dtype

    def __call__(self, x_GBTD: Array) -> Array:
        groups, width = x_GBTD.shape[0], x_GBTD.shape[-1]
        shape, axes = (width, self.columns), (None, "mp")
        w_DN = param(self.par, "w", shape, axes, fan_in_init(width), decay=True)
        if groups == 1:  # a plain matmul, which the remat policy "dots" knows to save
            y_BTN = jnp.matmul(x_GBTD[0], w_DN, preferred_element_type=self.dtype)
        else:
            w_DGN = w_DN.reshape(width, groups, -1)
            y_BTGN = jnp.einsum("GBTD,DGN->BTGN", x_GBTD, w_DGN, preferred_element_type=self.dtype)
            y_BTN = y_BTGN.reshape(*y_BTGN.shape[:2], -1)
        adapter = _adapter(self.config, self.par, self.name, "w", shape, axes)
        if adapter is not None:
            y_BTN += _adapted_columns(x_GBTD, adapter, self.config.lora_scale)
        if self.with_bias:
            zeros = hk.initializers.Constant(0.0)
            y_BTN += param(self.par, "b", (self.columns,), ("mp",), zeros)
        return y_BTN


def t5_bucket(distance: Array) -> Array:
    """The T5 bucket (Raffel 2020) of how far back a key lies: exact to 15, then logarithmic.

    The 128 cases are tabulated: a logarithm in f32 would round differently by backend.
    """
    steps = np.arange(T5_MAX_DISTANCE)
    exact = T5_BUCKETS // 2
    ratio = np.log(np.maximum(steps, 1) / exact) / np.log(T5_MAX_DISTANCE / exact)
    far = np.minimum(exact + (ratio * (T5_BUCKETS - exact) + 1e-6).astype(int), T5_BUCKETS - 1)
    table = jnp.asarray(np.where(steps < exact, steps, far))
    return table[jnp.clip(distance, 0, T5_MAX_DISTANCE - 1)]


class RelativePosition(hk.Module):
    """T5's relative position bias: one table for all layers; causal, 32 buckets."""

    def __init__(self, config: Config, par: Parallel):
        super().__init__(name="relative")
        self.par = par
        self.heads = config.n_heads

    def __call__(self, positions_BT: Array, key_positions_BS: Array) -> Array:
        init = hk.initializers.TruncatedNormal(stddev=0.02)
        shape = (self.heads, T5_BUCKETS)
        table = param(self.par, "rel_embedding", shape, ("mp", None), init, decay=True)
        distance_BTS = positions_BT[:, :, None] - key_positions_BS[:, None, :]
        bias_HBTS = table.astype(jnp.float32)[:, t5_bucket(distance_BTS)]
        return jnp.moveaxis(bias_HBTS, 0, 1)


@jax.custom_vjp
def lookup(w_VD: Array, row_BT: Array) -> Array:
    """Rows of a table, whose gradient is summed in f32: a frequent row has thousands of terms."""
    return w_VD[row_BT]


def _lookup_forward(w_VD: Array, row_BT: Array) -> tuple[Array, tuple[Array, Array]]:
    return w_VD[row_BT], (w_VD, row_BT)


def _lookup_backward(saved: tuple[Array, Array], g_BTD: Array) -> tuple[Array, None]:
    w_VD, row_BT = saved
    sums_VD = jnp.zeros(w_VD.shape, jnp.float32).at[row_BT].add(g_BTD.astype(jnp.float32))
    return sums_VD.astype(w_VD.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


class Embedding(hk.Module):
    """Token rows, split by vocabulary over mp, and with pe=fixed learned positions."""

    def __init__(self, config: Config, par: Parallel):
        super().__init__(name="embedding")
        self.config = config
        self.par = par

    def __call__(self, tokens_BT: Array, positions_BT: Array) -> Array:
        c, par = self.config, self.par
        init = hk.initializers.TruncatedNormal(stddev=c.n_vocab**-0.5)
        w_VD = param(par, "w", (c.n_vocab, c.d_model), ("mp", None), init, decay=True)
        rows = w_VD.shape[0]
        row_BT = tokens_BT.astype(jnp.int32) - par.rank() * rows
        mine_BT = (row_BT >= 0) & (row_BT < rows)
        found_BTD = lookup(w_VD, jnp.clip(row_BT, 0, rows - 1))
        x_BTD = par.join(jnp.where(mine_BT[..., None], found_BTD, 0))
        x_BTD += param(par, "b", (c.d_model,), (None,), hk.initializers.Constant(0.0), summed=True)
        if c.pe == "fixed":
            init = hk.initializers.TruncatedNormal(stddev=0.02)
            table = param(par, "pos_embs", (c.seq, c.d_model), (None, "mp"), init, decay=True)
            x_BTD += par.own_positions(par.gather(table)[jnp.clip(positions_BT, 0, c.seq - 1)])
        return x_BTD


class TransformerLayer(hk.Module):
    """Attention and feed-forward side by side on one norm; one sum over mp for both.

    With a cache there is one new token a row; it is written at `context.slot_B` and sees the rest.
    Without, the tokens see each other.  Returns what the layer adds to the residual stream, and
    the cache, or the tokens' own keys and values.
    """

    def __init__(self, config: Config, par: Parallel):
        super().__init__(name="layer")
        self.config = config
        self.par = par
        self.heads = config.n_heads // par.mp

    def __call__(
        self, x_BTD: Array, context: Context, cache: LayerCache | None
    ) -> tuple[Array, LayerCache]:
        x_GBTD = Norm(self.config, self.par)(x_BTD)
        block = self._geglu if self.config.block == "geglu" else self._gptj
        y_BTD, cache = block(x_GBTD, context, cache)
        bias = hk.initializers.Constant(0.0)
        width = self.config.d_model
        y_BTD = self.par.join(y_BTD) + param(self.par, "b", (width,), (None,), bias, summed=True)
        return y_BTD, cache

    @hk.transparent
    def _gptj(
        self, x_GBTD: Array, context: Context, cache: LayerCache | None
    ) -> tuple[Array, LayerCache]:
        c, par = self.config, self.par
        width = c.n_heads * c.d_head

        def heads(name: str) -> Array:
            y_BTN = Linear(c, par, width, name, with_bias=False)(x_GBTD)
            return y_BTN.reshape(*y_BTN.shape[:2], self.heads, c.d_head)

        attended_BTHK, cache = self._attention(heads("q"), heads("k"), heads("v"), context, cache)
        attended_BTN = attended_BTHK.reshape(*attended_BTHK.shape[:2], -1)
        hidden_BTF = jax.nn.gelu(Linear(c, par, c.d_ff, "fc")(x_GBTD), approximate=True)
        attended_BTD = self._output("o", attended_BTN, (width,))
        return attended_BTD + self._output("out", hidden_BTF, (c.d_ff,)), cache

    @hk.transparent
    def _geglu(
        self, x_GBTD: Array, context: Context, cache: LayerCache | None
    ) -> tuple[Array, LayerCache]:
        """One matmul in, one out; stored by head group, so that no mesh changes their order."""
        c, par = self.config, self.par
        hidden = c.d_ff // c.n_heads
        columns, rows = 3 * c.d_head + 2 * hidden, c.d_head + hidden
        shape, axes = (c.d_model, c.n_heads, columns), (None, "mp", None)
        w_DHC = param(par, "fused_in", shape, axes, fan_in_init(c.d_model), decay=True)
        bias = hk.initializers.Constant(0.0)
        b_HC = param(par, "fused_in_b", (c.n_heads, columns), ("mp", None), bias)
        groups = x_GBTD.shape[0]
        if groups == 1:  # as in `Linear`
            y_BTHC = jnp.einsum("BTD,DHC->BTHC", x_GBTD[0], w_DHC) + b_HC
        else:
            w_DGHC = w_DHC.reshape(c.d_model, groups, -1, columns)
            y_BTGHC = jnp.einsum("GBTD,DGHC->BTGHC", x_GBTD, w_DGHC)
            y_BTHC = y_BTGHC.reshape(*y_BTGHC.shape[:2], -1, columns) + b_HC
        adapter = _adapter(c, par, "fused_in", "fused_in", shape, axes)
        if adapter is not None:
            y_BTHC += _adapted_columns(x_GBTD, adapter, c.lora_scale).reshape(y_BTHC.shape)
        edges = (c.d_head, 2 * c.d_head, 3 * c.d_head, 3 * c.d_head + hidden)
        q_BTHK, k_BTHK, v_BTHK, gate_BTHF, value_BTHF = jnp.split(y_BTHC, edges, axis=-1)
        attended_BTHK, cache = self._attention(q_BTHK, k_BTHK, v_BTHK, context, cache)
        hidden_BTHF = jax.nn.gelu(gate_BTHF, approximate=True) * value_BTHF
        joined_BTHC = jnp.concatenate((attended_BTHK, hidden_BTHF), axis=-1)
        return self._output("fused_out", joined_BTHC, (c.n_heads, rows)), cache

    @hk.transparent
    def _output(self, name: str, x: Array, inputs: tuple[int, ...]) -> Array:
        """A matmul into the residual stream, whose rows (the first axis of `inputs`) mp splits.

        x is [B, T, inputs]; what it gives is this program's part of a sum over mp.
        """
        c, par, axes = self.config, self.par, len(inputs)
        shape, split = (*inputs, c.d_model), ("mp", *(None,) * axes)
        y_BTD = jnp.tensordot(x, param(par, name, shape, split, _output_init(c), decay=True), axes)
        adapter = _adapter(c, par, name, name, shape, split)
        if adapter is None:
            return y_BTD
        low_BTR = jnp.tensordot(x, adapter[0], axes) * c.lora_scale
        return y_BTD + low_BTR @ adapter[1]

    def _attention(
        self,
        q_BTHK: Array,
        k_BTHK: Array,
        v_BTHK: Array,
        context: Context,
        cache: LayerCache | None,
    ) -> tuple[Array, LayerCache]:
        c, par = self.config, self.par
        q_BTHK, k_BTHK, v_BTHK = (
            par.shard(x, "dp", None, "mp", None) for x in (q_BTHK, k_BTHK, v_BTHK)
        )
        if c.pe == "rotary":
            q_BTHK = rotate(q_BTHK, context.positions_BT, c.d_rotary)
            k_BTHK = rotate(k_BTHK, context.positions_BT, c.d_rotary)
        new = LayerCache(jnp.moveaxis(k_BTHK, 1, 2), jnp.moveaxis(v_BTHK, 1, 2))
        if cache is None:
            cache = new
        else:
            assert context.slot_B is not None
            cache = write(cache, new, context.slot_B)
        if context.attend is not None:
            return context.attend(q_BTHK, cache.k_BHSK, cache.v_BHSK), cache
        assert context.bias_BHTS is not None
        return attend(q_BTHK, cache.k_BHSK, cache.v_BHSK, context.bias_BHTS), cache


class Projection(hk.Module):
    """The last norm, x_BTD to x_GBTD, and the head, that to f32 logits_BTV of this vocabulary."""

    def __init__(self, config: Config, par: Parallel):
        super().__init__(name="projection")
        self.config = config
        self.par = par

    def __call__(self, x: Array, *, norm: bool = True, head: bool = True) -> Array:
        """Both, or one of them alone."""
        if norm:
            x = Norm(self.config, self.par)(x)
        if head:
            x = Linear(self.config, self.par, self.config.n_vocab, "head", dtype=jnp.float32)(x)
        return x
