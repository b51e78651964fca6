"""The transformer layer, a Haiku module; see `ends` for what is before and after the layers.

The same code runs on every mesh; `Parallel` supplies the collectives.  Arrays are either one mp
shard (`Manual`) or global over mp (`Auto`).  Axes that are split over mp, such as H and V,
therefore have either their local or their global size.

Array names end in their shape: B batch, T query, S cache or key, D model, H heads, K head size,
R rank of an adapter, F feed-forward, C columns (or rows) of one head in the fused weights of the
geglu block, N columns of a projection, V vocabulary, L layers.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.config_model import Model
from mesh_transformer.mesh import haiku as hk
from mesh_transformer.mesh.jax_versions import erfc
from mesh_transformer.mesh.parallel import Parallel, param
from mesh_transformer.model import attention, lora, paged, ring
from mesh_transformer.model.cache import LayerCache, rows_of, write, write_chunk
from mesh_transformer.model.dropout import (
    ATTENTION,
    FEED_FORWARD,
    Dropout,
    drop_entries,
    drop_probs,
)
from mesh_transformer.model.exact import attend_exactly
from mesh_transformer.model.heads import Heads
from mesh_transformer.model.layer_values import LayerValues, layer_values
from mesh_transformer.model.matrices import add_bias, project_in, project_out
from mesh_transformer.model.norms import Norm, ProjectionNorm
from mesh_transformer.util import is_named, load_named

# checkpoint_name of the residual stream between attention and feed-forward, if the latter reads it
MIDDLE = "middle"


class Context(NamedTuple):
    """Inputs that all layers share: the positions of the tokens, the mask and the cache slots."""

    positions_BT: Array
    bias_BHTS: Array | None  # None if `attend` is given, which applies the mask itself
    slots: Array | None = None  # cache slots of the new keys and values, [B, T], or of the first
    rows: Array | None = None  # the rows of the cache that the batch rows stand for; None for all
    table: paged.Table | None = None  # if the cache is in pages: those of each row
    part: ring.Part | None = None  # of prompts, if the cache is a `RingCache`
    attend: attention.Attend | None = None  # used instead of `attention.attend` and `bias_BHTS`
    dropout: Dropout | None = None  # the layer's random numbers; None without dropout
    lora_scale: lora.Scale | None = None  # used instead of `config.lora_scale`
    values: LayerValues | None = None  # those of the layer; None if all layers have the same
    # Used instead of `bias_BHTS` and `attend` in layers with the config's `sliding_window`.
    sliding_bias_BHTS: Array | None = None
    sliding_attend: attention.Attend | None = None


def initialiser(
    c: Model, role: Literal["embedding", "positions", "inputs", "outputs"]
) -> hk.Initializer:
    """Return the initialiser of a matrix with a role in `families.InitialValues`."""
    values = c.layer_kind.initial_values
    normal = hk.TruncatedNormal if values.truncated else hk.RandomNormal
    return normal(getattr(values, role)(c))


class Linear(hk.Module):
    """A linear layer whose columns are split over mp.

    The matmul's result is rounded once, to `dtype` (default: the dtype of the inputs).

    Args:
      columns: global number of columns.
      unit: see `Declaration.unit`.
      copied: heads whose `Heads.kept` picks each shard's columns, if mp does not split them.
    """

    def __init__(
        self,
        config: Model,
        par: Parallel,
        columns: int,
        name: str,
        with_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        unit: int = 1,
        copied: Heads | None = None,
    ):
        super().__init__(name=name)
        self.config = config
        self.par = par
        self.columns = columns
        self.copied = copied
        self.with_bias = with_bias
        self.dtype = dtype
        self.unit = unit

    def __call__(self, x_BTD: Array, lora_scale: lora.Scale | None = None) -> Array:
        """Return [B, T, columns].

        Args:
          lora_scale: used instead of `config.lora_scale`.
        """
        copied = self.copied
        axis = "mp" if copied is None else None
        shape, axes = (x_BTD.shape[-1], self.columns), (None, axis)
        kind: Any = {"unit": self.unit, "fanned_out": copied is not None}

        def own(w: Any) -> Any:
            return w if copied is None else jax.tree.map(copied.kept, w)

        init = initialiser(self.config, "inputs")
        w_DN = own(param(self.par, "w", shape, axes, init, decay=True, **kind))
        rounded = self.config.int8_matmuls if self.dtype is None else ()  # not in the head
        y_BTN = project_in(x_BTD, w_DN, self.dtype, rounded)
        adapter = lora.factors(self.config, self.par, self.name, "w", shape, axes, self.unit)
        if adapter is not None:
            scale, (a_DR, b_RN) = lora.scale_of(self.config, lora_scale), adapter
            y_BTN += lora.adapted_columns(x_BTD, (a_DR, own(b_RN)), scale)
        if self.with_bias:
            zeros = hk.Constant(0.0)
            b_N = param(self.par, "b", (self.columns,), (axis,), zeros, **kind)
            y_BTN = add_bias(y_BTN, own(b_N))
        return y_BTN


class TransformerLayer(hk.Module):
    """Attention and feed-forward, as described by the config's block in `families.BLOCKS`.

    If the two are parallel, their outputs are added before they are summed over mp, so that one sum
    over mp suffices.

    If the module is called with a KV cache, the tokens' keys and values are written to the cache at
    `context.slots`, and the tokens attend to all cached positions that `context.bias_BHTS` does not
    mask. With `context.rows`, the batch rows are these rows of the cache. If `context.slots` is
    None, the cache holds a text that all rows follow, and stays as it is. Without a cache, tokens
    attend to each other.

    Returns:
      The layer's contribution to the residual stream, [B, T, D], and a cache: the updated cache or,
      if no cache was given, the keys and values of the tokens.
    """

    def __init__(self, config: Model, par: Parallel):
        super().__init__(name="layer")
        self.config = config
        self.par = par
        self.block = config.layer_kind
        self.heads = Heads(config, par)

    def __call__(
        self, x_BTD: Array, context: Context, cache: ring.Cache | None
    ) -> tuple[Array, Any]:
        par, block = self.par, self.block
        parallel = block.arrangement == "parallel"

        def rows(function: Callable[..., Any], *args: Any) -> Any:
            """Call a method whose result for a row depends on this row alone."""

            def own(positions_BT: Array, scale: lora.Scale | None, *args: Any) -> Any:
                with_own = context._replace(positions_BT=positions_BT, lora_scale=scale)
                return function(with_own, *args)

            return par.by_rows(own)(context.positions_BT, context.lora_scale, *args)

        # Two norms of one stream share a fan-out, so that the backward pass sums over mp only once.
        if parallel and block.ff_norm:
            x_BTD = par.fan_out(x_BTD)
        normed_BTD, gates, qkv = rows(self._inputs, x_BTD)
        q_BTHK, k_BTHK, v_BTHK = qkv
        attended_BTHK, cache = self._attention(q_BTHK, k_BTHK, v_BTHK, context, cache)
        if block.fused:
            y_BTD = rows(self._fused_output, attended_BTHK, gates)
        else:
            hidden_BTF = None
            if parallel:
                hidden_BTF = rows(self._hidden, x_BTD if block.ff_norm else normed_BTD)
            y_BTD = rows(self._outputs, attended_BTHK, hidden_BTF)
        y_BTD = par.join(y_BTD)
        if parallel:
            return rows(self._biased, y_BTD), cache
        y_BTD = rows(functools.partial(self._added, "o", ATTENTION, "norm_after"), y_BTD)
        hidden_BTF = rows(self._hidden_after, x_BTD, y_BTD)
        out_BTD = par.join(rows(self._outputs, None, hidden_BTF))
        return rows(self._end, y_BTD, out_BTD), cache

    @hk.transparent
    def _normed(self, name: str, x_BTD: Array) -> Array:
        c = self.config
        if c.norm_place == "after":
            return self.par.fan_out(x_BTD)
        shared = self.block.arrangement == "parallel" and self.block.ff_norm
        return Norm(c, self.par, name, fanned_out=shared)(x_BTD)

    @hk.transparent
    def _inputs(self, context: Context, x_BTD: Array) -> tuple[Array, Any, tuple[Array, ...]]:
        """Return the normed x_BTD, the inputs of a fused feed-forward, and q, k and v."""
        normed_BTD = self._normed("norm", x_BTD)
        gates = None
        if self.block.fused:
            *qkv, gate_BTHF, value_BTHF = self._fused_inputs(context, normed_BTD)
            gates = gate_BTHF, value_BTHF
        else:
            qkv = self._queries_keys_values(context, normed_BTD)
        return normed_BTD, gates, self._ready(context, *qkv)

    @hk.transparent
    def _outputs(
        self, context: Context, attended_BTHK: Array | None, hidden_BTF: Array | None
    ) -> Array:
        """Return the outputs of attention and feed-forward, or of one, without the sum over mp."""
        c, y_BTD = self.config, None
        if attended_BTHK is not None:
            attended_BTN = attended_BTHK.reshape(*attended_BTHK.shape[:2], -1)
            heads = (c.n_heads * c.d_head,)
            y_BTD = self._output("o", attended_BTN, heads, ATTENTION, context, c.d_head)
        if hidden_BTF is not None:
            out_BTD = self._output("out", hidden_BTF, (c.d_ff,), FEED_FORWARD, context)
            y_BTD = out_BTD if y_BTD is None else y_BTD + out_BTD
        assert y_BTD is not None
        return y_BTD

    @hk.transparent
    def _biased(self, context: Context, y_BTD: Array) -> Array:
        """Add the biases of parallel attention and feed-forward to their sum over mp."""
        if self.config.has_bias("o"):
            y_BTD += self._bias("o_b", ATTENTION, context)
        if self.config.has_bias("out"):
            y_BTD += self._bias("out_b", FEED_FORWARD, context)
        if self.block.joint_bias:
            y_BTD += self._bias("b", FEED_FORWARD, context, summed=True)
        return y_BTD

    @hk.transparent
    def _hidden_after(self, context: Context, x_BTD: Array, y_BTD: Array) -> Array:
        return self._hidden(context, checkpoint_name(x_BTD + y_BTD, MIDDLE))

    @hk.transparent
    def _end(self, context: Context, y_BTD: Array, out_BTD: Array) -> Array:
        """Return what attention and the feed-forward after it add to the stream."""
        y_BTD += self._added("out", FEED_FORWARD, "ff_norm_after", context, out_BTD)
        if self.block.joint_bias:
            y_BTD += self._bias("b", FEED_FORWARD, context, summed=True)
        return y_BTD

    @hk.transparent
    def _added(self, name: str, place: int, norm: str, context: Context, y_BTD: Array) -> Array:
        """Return what attention or a feed-forward after it adds to the stream, from its sum."""
        c = self.config
        if c.has_bias(name):
            y_BTD += self._bias(f"{name}_b", place, context)
        if c.norm_place != "before":
            # Saved, so that the backward pass need not sum it over mp again.
            y_BTD = Norm(c, self.par, norm, after=True)(checkpoint_name(y_BTD, MIDDLE))
        return _times(y_BTD, c.residual_scale)

    @hk.transparent
    def _queries_keys_values(self, context: Context, x_BTD: Array) -> list[Array]:
        c = self.config
        assert c.key_heads is not None

        def heads(name: str, number: int, copied: Heads | None) -> Array:
            columns, biased = number * c.d_head, c.has_bias(name)
            linear = Linear(c, self.par, columns, name, biased, unit=c.d_head, copied=copied)
            y_BTN = linear(x_BTD, context.lora_scale)
            if c.qk_norm == "projection" and name != "v":
                y_BTN = ProjectionNorm(c, self.par, f"{name}_norm", columns, copied)(y_BTN)
            return y_BTN.reshape(*y_BTN.shape[:2], -1, c.d_head)

        copied = self.heads if self.heads.copied else None
        q_BTHK = heads("q", c.n_heads, None)
        return [q_BTHK, *(heads(name, c.key_heads, copied) for name in ("k", "v"))]

    @hk.transparent
    def _hidden(self, context: Context, x_BTD: Array) -> Array:
        """Return the hidden activations of the feed-forward, [B, T, F].

        Args:
          x_BTD: the residual stream or, if the feed-forward has no norm of its own, normed.
        """
        ready_BTD = self._normed("ff_norm", x_BTD) if self.block.ff_norm else x_BTD

        def columns(name: str) -> Array:
            biased = self.config.has_bias(name)
            linear = Linear(self.config, self.par, self.config.d_ff, name, biased)
            return linear(ready_BTD, context.lora_scale)

        if self.block.gated:
            return self._activated(columns("gate")) * columns("fc")
        return self._activated(columns("fc"))

    def _drop(self, x_BTD: Array, place: int, context: Context) -> Array:
        """Apply dropout to activations of all positions; `place` is as for `Dropout.kept`."""
        rate = self.config.dropout_residual
        if context.dropout is None or not rate:
            return x_BTD
        _, length, width = x_BTD.shape
        kept_BTD = context.dropout.kept(place, rate, length * self.par.cp, width)
        return drop_entries(x_BTD, self.par.cut(kept_BTD), rate)

    def _activated(self, x: Array) -> Array:
        if is_named(self.config.activation):
            return load_named(str(self.config.activation), "activation")(x)
        if self.config.activation == "silu":
            return jax.nn.silu(x)
        if self.config.activation == "relu2":
            return jnp.square(jax.nn.relu(x))
        if self.config.activation == "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        return 0.5 * x * erfc(-x * np.sqrt(0.5).astype(x.dtype))

    def _bias(self, name: str, place: int, context: Context, *, summed: bool = False) -> Array:
        """Return a bias that is added after the sum over mp, [D] or, with dropout, [B, T, D]."""
        width, init = self.config.d_model, hk.Constant(0.0)
        b_D = param(self.par, name, (width,), (None,), init, summed=summed)
        if context.dropout is None or not self.config.dropout_residual:
            return b_D
        shape = (len(context.dropout.key_B), context.positions_BT.shape[1], width)
        return self.par.own_positions(self._drop(jnp.broadcast_to(b_D, shape), place, context))

    @hk.transparent
    def _fused_inputs(self, context: Context, x_BTD: Array) -> list[Array]:
        """Compute the inputs of attention and of a gated feed-forward with one matmul.

        This weight and that of `_fused_output` have an axis H (heads).  For each head, the input
        weight contains the columns of q, k and v, and a share of 1/H of the columns of the
        feed-forward gate and value.  The output weight contains the matching rows.  The order of
        the weights' entries therefore does not depend on the mesh.
        """
        c, par = self.config, self.par
        hidden = c.d_ff // c.n_heads
        columns = 3 * c.d_head + 2 * hidden
        shape, axes = (c.d_model, c.n_heads, columns), (None, "mp", None)
        w_DHC = param(par, "fused_in", shape, axes, initialiser(c, "inputs"), decay=True)
        y_BTHC = project_in(x_BTD, w_DHC, None, c.int8_matmuls)
        if c.has_bias("fused_in"):
            zeros = hk.Constant(0.0)
            y_BTHC += param(par, "fused_in_b", (c.n_heads, columns), ("mp", None), zeros)
        adapter = lora.factors(c, par, "fused_in", "fused_in", shape, axes)
        if adapter is not None:
            scale = lora.scale_of(c, context.lora_scale)
            y_BTHC += lora.adapted_columns(x_BTD, adapter, scale)
        edges = (c.d_head, 2 * c.d_head, 3 * c.d_head, 3 * c.d_head + hidden)
        return jnp.split(y_BTHC, edges, axis=-1)

    @hk.transparent
    def _fused_output(
        self, context: Context, attended_BTHK: Array, gates: tuple[Array, Array]
    ) -> Array:
        """Return the output of attention and feed-forward, without the sum over mp."""
        c, (gate_BTHF, value_BTHF) = self.config, gates
        hidden_BTHF = self._activated(gate_BTHF) * value_BTHF
        joined_BTHC = jnp.concatenate((attended_BTHK, hidden_BTHF), axis=-1)
        inputs = (c.n_heads, c.d_head + c.d_ff // c.n_heads)
        return self._output("fused_out", joined_BTHC, inputs, FEED_FORWARD, context)

    @hk.transparent
    def _output(
        self,
        name: str,
        x: Array,
        inputs: tuple[int, ...],
        place: int,
        context: Context,
        unit: int = 1,
    ) -> Array:
        """Project x, [B, T, *inputs], to [B, T, D], and apply dropout, without the sum over mp.

        The result is a partial sum, which the caller must sum over mp.

        Args:
          inputs: the global sizes of the input axes.  The first of these axes is split over mp.
          place: as for `Dropout.kept`.
          unit: see `Declaration.unit`.
        """
        c, par, axes = self.config, self.par, len(inputs)
        shape, split = (*inputs, c.d_model), ("mp", *(None,) * axes)
        w = param(par, name, shape, split, initialiser(c, "outputs"), decay=True, unit=unit)
        y_BTD = project_out(x, w, c.int8_matmuls)
        adapter = lora.factors(c, par, name, name, shape, split, unit)
        if adapter is not None:
            scale = lora.scale_of(c, context.lora_scale)
            y_BTD += lora.scaled(jnp.tensordot(x, adapter[0], axes), scale) @ adapter[1]
        return self._drop(y_BTD, place, context)

    @hk.transparent
    def _ready(
        self, context: Context, q_BTHK: Array, k_BTHK: Array, v_BTHK: Array
    ) -> tuple[Array, ...]:
        """Return queries, keys and values as attention uses them: with positions and scale."""
        c, par = self.config, self.par
        q_BTHK = par.shard(q_BTHK, "dp", None, "mp", None)
        k_BTHK, v_BTHK = (par.shard(x, "dp", None, "mp", None) for x in (k_BTHK, v_BTHK))
        values = context.values or layer_values(c)[0]
        q_BTHK, k_BTHK = (
            self._positioned(name, x, context, values) for name, x in (("q", q_BTHK), ("k", k_BTHK))
        )
        assert c.attention_scale is not None
        return _times(q_BTHK, c.attention_scale / c.d_head**-0.5), k_BTHK, v_BTHK

    @hk.transparent
    def _attention(
        self,
        q_BTHK: Array,
        k_BTHK: Array,
        v_BTHK: Array,
        context: Context,
        cache: ring.Cache | None,
    ) -> tuple[Array, Any]:
        """Return the attention's result of each head, [B, T, H, K], and the cache."""
        c, par, split = self.config, self.par, self.heads
        values = context.values or layer_values(c)[0]

        def cached(*keys_and_values: Array) -> LayerCache:
            own = (par.shard(x, "dp", None, "mp", None) for x in keys_and_values)
            return LayerCache(*(jnp.moveaxis(x, 1, 2) for x in own))

        new = cached(k_BTHK, v_BTHK)
        if par.exact is not None:
            if context.sliding_bias_BHTS is not None:
                assert context.bias_BHTS is not None
                biases = context.sliding_bias_BHTS, context.bias_BHTS
                context = context._replace(bias_BHTS=jnp.where(values.is_sliding, *biases))
            return self._cached_attention(q_BTHK, new, context, cache)
        if cache is not None:
            if values.is_sliding:
                context = context._replace(bias_BHTS=context.sliding_bias_BHTS)
            return self._cached_attention(q_BTHK, new, context, cache)
        key_BH, drop = None, None
        if context.dropout is not None and c.dropout_attention:
            key_BH = context.dropout.head_keys(q_BTHK.shape[2], par)
            drop = functools.partial(drop_probs, key_BH=key_BH, rate=c.dropout_attention)

        def attended(attend: attention.Attend | None, bias_BHTS: Array | None) -> Array:
            if attend is not None:
                return attend(q_BTHK, k_BTHK, v_BTHK, key_BH)
            assert bias_BHTS is not None
            each = cached(*map(split.of_queries, (k_BTHK, v_BTHK)))
            return attention.attend(q_BTHK, each, bias_BHTS, drop, c.score_cap)

        usual = functools.partial(attended, context.attend, context.bias_BHTS)
        sliding = functools.partial(attended, context.sliding_attend, context.sliding_bias_BHTS)
        if c.sliding_window is None:
            return usual(), new
        if isinstance(values.is_sliding, np.bool_):
            return (sliding() if values.is_sliding else usual()), new
        return lax.cond(values.is_sliding, sliding, usual), new

    @hk.transparent
    def _positioned(self, name: str, x_BTHK: Array, context: Context, values: LayerValues) -> Array:
        """Return queries or keys at their positions, and normed if each head has a norm."""
        c = self.config
        if c.qk_norm == "head":
            x_BTHK = Norm(c, self.par, f"{name}_norm", fanned_out=True)(x_BTHK)
        if c.pe == "rotary":
            x_BTHK = attention.rotate(
                x_BTHK,
                context.positions_BT,
                c.d_rotary,
                halves=c.rotary_pairs != "neighbours",
                frequency_R=values.frequency_R,
                scale=values.rotary_scale,
            )
        elif is_named(c.pe):
            x_BTHK = load_named(str(c.pe), "pe")(x_BTHK, context.positions_BT)
        if c.qk_norm == "rotated":
            x_BTHK = Norm(c, self.par, f"{name}_norm", fanned_out=True)(x_BTHK)
        return x_BTHK

    def _cached_attention(
        self, q_BTHK: Array, new: LayerCache, context: Context, cache: ring.Cache | None
    ) -> tuple[Array, ring.Cache]:
        """Attend to new and older keys and values, after writing the new ones to the cache.

        Queries of heads that share keys attend like those of further positions.
        """
        group, bias_BHTS = self.config.group, context.bias_BHTS
        if group == 1:
            return self._attended_to_cache(q_BTHK, new, context, cache)
        assert bias_BHTS is not None
        q_BTGHK = jnp.swapaxes(self.heads.by_key(q_BTHK), 2, 3)
        B, T, _, H, K = q_BTGHK.shape
        context = context._replace(bias_BHTS=jnp.repeat(bias_BHTS, group, axis=2))
        q_BTHK = q_BTGHK.reshape(B, T * group, H, K)
        attended_BTHK, cache = self._attended_to_cache(q_BTHK, new, context, cache)
        attended_BTGHK = attended_BTHK.reshape(B, T, group, H, K)
        return self.heads.by_query(jnp.swapaxes(attended_BTGHK, 2, 3)), cache

    def _attended_to_cache(
        self, q_BTHK: Array, new: LayerCache, context: Context, cache: ring.Cache | None
    ) -> tuple[Array, ring.Cache]:
        bias_BHTS, table, cap = context.bias_BHTS, context.table, self.config.score_cap
        exact, first_BT = self.par.exact, jnp.zeros((1, 1), jnp.int32)
        if cache is None:  # several texts may follow each other; see `transformer.logits`
            index_T = jnp.arange(context.positions_BT.shape[1])
            first_BT = jnp.repeat(index_T - context.positions_BT, self.config.group, axis=1)
        assert bias_BHTS is not None

        def attended(rows: LayerCache) -> Array:
            if exact is not None:
                return attend_exactly(q_BTHK, rows, bias_BHTS, first_BT, cap, exact)
            return attention.attend_to_cache(q_BTHK, rows, bias_BHTS, cap)

        if cache is None:
            return attended(new), new
        if isinstance(cache, ring.RingCache):
            new = new.like(cache.rows)
            if context.part is not None:
                rows = ring.joined(cache, new, context.part)
                return attended(rows), ring.written(cache, rows, context.part, cache.slots)
            assert context.slots is not None
            cache = cache._replace(rows=write(cache.rows, new, context.slots))
            if table is None:
                return attended(cache.rows), cache
            return paged.attend_to_rows(q_BTHK, cache.rows, table.used_B, bias_BHTS, cap), cache
        if context.slots is None:
            return attention.attend_after(q_BTHK, cache, new, bias_BHTS, cap), new
        new = new.like(cache)
        if table is not None and table.copied_BJ is not None:
            cache = paged.write_part(cache, new, table.page_BJ, context.slots)
            # Read after all is written, so that the cache need not be copied.
            cache = paged.copy_pages(cache, table.page_BJ, table.copied_BJ)
            if exact is not None:
                return attended(paged.rows_in_pages(cache, table.page_BJ)), cache
            return paged.attend(q_BTHK, cache, table, self._chunk_bias(context), cap), cache
        if table is not None and self.config.paged_attention == "pallas":
            return paged.write_and_attend(q_BTHK, cache, new, context.slots, table, self.par, cap)
        if table is not None:
            cache = paged.write(cache, new, table.page_BJ, context.slots)
            if exact is not None:
                return attended(paged.rows_in_pages(cache, table.page_BJ)), cache
            # The compiler can split rows over dp together, but not one after the other.
            by_rows = self.par.dp == 1 or "dp" in self.par.axes
            y_BTHK = paged.attend(q_BTHK, cache, table, bias_BHTS, cap, by_rows=by_rows)
            return y_BTHK, cache
        if context.rows is not None:
            cache = write_chunk(cache, new, context.rows, context.slots)
            # The rows are read after they were written, so that the cache need not be copied.
            return attended(rows_of(cache, context.rows)), cache
        cache = write(cache, new, context.slots)
        return attended(cache), cache

    def _chunk_bias(self, context: Context) -> Array | Callable[[Array], Array]:
        """Return the bias of a chunk of a prompt, for `paged.attend`; slot s holds position s."""
        c = self.config
        if c.pe == "t5":
            assert context.bias_BHTS is not None
            return context.bias_BHTS
        window = c.window
        if (
            c.sliding_window is not None
            and context.values is not None
            and context.values.is_sliding
        ):
            window = min(c.sliding_window, window)
        positions_BT = jnp.repeat(context.positions_BT, c.group, axis=1)
        return lambda slot_1S: attention.causal_bias(positions_BT, slot_1S, window)


def _times(x: Array, factor: float) -> Array:
    """Return x times a number, which is not rounded to the dtype of x."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)
