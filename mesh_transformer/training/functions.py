"""The model as pure functions of a network's parameters, for programs of one's own.

Each function takes `Parameters`, such as `network.params`, which carry their config and mesh, so
that a program is written as for one device.  `jax.jit`, `jax.grad`, `jax.vmap`, `jax.export` and so
on apply to all of them, and gradients have the layout of the parameters.  Dropout is not applied.

With LoRA, `params` are the adapters, and each function needs the other parameters, too: `frozen`,
such as `network.frozen`.

Array names end in their shape: B rows, T tokens, S slots, D model, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from mesh_transformer.config import Config
from mesh_transformer.config_model import Model
from mesh_transformer.generation.forward import context_of, forward, full_logits, own_logits
from mesh_transformer.generation.programs import compile_weights
from mesh_transformer.generation.weights import weight_layout
from mesh_transformer.mesh.declaration import combine
from mesh_transformer.mesh.host_memory import device_copies
from mesh_transformer.mesh.parallel import Parallel
from mesh_transformer.model import ring, transformer
from mesh_transformer.model.cache import LayerCache
from mesh_transformer.model.loss import loss_weights, losses, train_loss
from mesh_transformer.training.step import StateLayout
from mesh_transformer.util import InputError

ROWS = P("dp")  # the layout of an array [B, ...]
# The config keys that the functions read, besides those of `Model`.
KEYS = {"version", "partitioning", "tpu_size", "cores_per_replica", "context_parallel", "zero"}
KEYS |= {"virtual_mesh", "early_collect", "shard_activations", "offload", "early_cast"}
KEYS |= {"weight_bits", "int8_weights", "int8_cache"}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tree"], meta_fields=["layout"])
@dataclass(frozen=True, eq=False)
class Parameters:
    """Parameters of a network, or arrays like them such as gradients: a pytree.

    Attributes:
      tree: nested dicts, {part: {module: {name: array}}}.
      layout: the network's config, and its layout on the mesh.
    """

    tree: transformer.Params
    layout: StateLayout

    def __getitem__(self, part: str) -> Any:
        """Return a part of the parameters, such as "embed"."""
        return self.tree[part]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tree"], meta_fields=["layout"])
@dataclass(frozen=True, eq=False)
class GenerationWeights:
    """The result of `generation_weights`: a pytree, as `Parameters` are."""

    tree: Any
    layout: Any  # their config, and their layout on the mesh


class Cache(NamedTuple):
    """The keys and values of texts, to which `decode_step` adds those of further tokens."""

    layers: tuple[Any, ...]  # one `LayerCache` per layer
    length_B: Any  # the number of tokens of each row


@functools.partial(jax.jit, static_argnames="layers")
def hidden(
    params: Parameters,
    tokens: ArrayLike,
    layers: int | None = None,
    *,
    segments: ArrayLike | None = None,
    frozen: Parameters | None = None,
) -> Array:
    """Return the residual stream [B, T, D] after the first layers, before the final norm.

    Args:
      tokens: token ids [B, T].
      layers: the number of layers, from 0; None for all.
      segments: see `apply`.
    """
    stop = _checked_layers(params, layers)
    _check_shapes(jnp.asarray(tokens), 2, segments=(segments, 2))

    def compute(whole: Any, rows: Any, config: Config, par: Parallel) -> Array:
        tokens_BT, segments_BT = rows
        part = transformer.Part(0, stop)
        own = transformer.residual_stream(whole, tokens_BT, config, par, segments_BT, part=part)
        return par.whole(own)

    return _forward(compute, params, frozen, jnp.asarray(tokens), segments)


@functools.partial(jax.jit, static_argnames="layers")
def logits_from(
    params: Parameters,
    stream: Array,
    layers: int,
    *,
    segments: ArrayLike | None = None,
    frozen: Parameters | None = None,
) -> Array:
    """Return the logits f32 [B, T, V] that follow from a residual stream, which may be changed.

    `logits_from(params, hidden(params, tokens, n), n)` is `apply(params, tokens)`.

    Args:
      stream: the residual stream [B, T, D] after the first `layers` layers.
      segments: see `apply`.
    """

    _checked_layers(params, layers)
    _check_shapes(stream, 3, segments=(segments, 2))

    def compute(whole: Any, rows: Any, config: Config, par: Parallel) -> Array:
        stream_BTD, segments_BT = rows
        none_BT = jnp.zeros(stream_BTD.shape[:2], jnp.int32)
        part = transformer.Part(layers, config.layers, par.cut(stream_BTD))
        own = transformer.residual_stream(whole, none_BT, config, par, segments_BT, part=part)
        return _logits(whole, own, config, par)

    return _forward(compute, params, frozen, stream, segments)


@jax.jit
def apply(
    params: Parameters,
    tokens: ArrayLike,
    *,
    segments: ArrayLike | None = None,
    frozen: Parameters | None = None,
) -> Array:
    """Return the logits f32 [B, T, V] of the token after each of `tokens`.

    Args:
      tokens: token ids [B, T].
      segments: a number per token [B, T], if rows hold several texts; see
        `model.transformer.logits`.
    """
    _check_shapes(jnp.asarray(tokens), 2, segments=(segments, 2))

    def compute(whole: Any, rows: Any, config: Config, par: Parallel) -> Array:
        tokens_BT, segments_BT = rows
        own = transformer.residual_stream(whole, tokens_BT, config, par, segments_BT)
        return _logits(whole, own, config, par)

    return _forward(compute, params, frozen, jnp.asarray(tokens), segments)


@jax.jit
def log_probs(
    params: Parameters,
    tokens: ArrayLike,
    targets: ArrayLike,
    *,
    segments: ArrayLike | None = None,
    frozen: Parameters | None = None,
) -> Array:
    """Return the log-probability f32 [B, T], in nats, of each of `targets` after its token.

    The logits of only `loss_chunk` tokens of each row are in memory at a time.

    Args:
      tokens: token ids [B, T].
      targets: token ids [B, T], as a rule those of the tokens that follow.
      segments: see `apply`.
    """

    def compute(whole: Any, rows: Any, config: Config, par: Parallel) -> Array:
        (tokens_BT, targets_BT), segments_BT = rows
        return -losses(whole, tokens_BT, targets_BT, config, par, segments_BT).loss_BT

    pair = jnp.asarray(tokens), jnp.asarray(targets)
    _check_shapes(pair[0], 2, targets=(targets, 2), segments=(segments, 2))
    return _forward(compute, params, frozen, pair, segments)


@jax.jit
def loss(
    params: Parameters,
    tokens: ArrayLike,
    targets: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    segments: ArrayLike | None = None,
    frozen: Parameters | None = None,
) -> Array:
    """Return the mean loss, a scalar, which `network.train` minimises without an objective.

    It is the cross entropy in nats, and the config's z-loss.  As in `log_probs`, the logits of only
    `loss_chunk` tokens of each row are in memory at a time.

    Args:
      tokens: token ids [B, T].
      targets: token ids [B, T].
      mask: 1 where a target counts in the loss, else 0, [B, T]; None if all count.
      segments: see `apply`.
    """
    pair = jnp.asarray(tokens), jnp.asarray(targets)
    _check_shapes(pair[0], 2, targets=(targets, 2), mask=(mask, 2), segments=(segments, 2))
    if mask is None and len(pair[0]) % _replicas(params.layout):
        mask = jnp.ones(pair[0].shape, jnp.int32)  # so that added rows do not count

    def compute(whole: Any, rows: Any, config: Config, par: Parallel) -> Array:
        (tokens_BT, targets_BT, mask_BT), segments_BT = rows
        weights = None if mask_BT is None else loss_weights(mask_BT, par, segments_BT)
        own, _ = train_loss(whole, tokens_BT, targets_BT, config, par, weights, segments_BT)
        return par.mean_over_dp(own)

    mask = None if mask is None else jnp.asarray(mask)
    return _run(compute, params, frozen, ((*pair, mask), segments), params.layout.config, P())


@jax.jit
def generation_weights(
    params: Parameters, *, frozen: Parameters | None = None
) -> GenerationWeights:
    """Convert parameters once for many calls of `decode_step`, which would each convert them.

    The weights are in the dtype of generation: f32 on CPUs, else the config's.  LoRA adapters are
    merged, and `weight_bits` applies.
    """
    layout, whole = weight_layout(params.layout), combine(_fixed(params, frozen), params.tree)
    return GenerationWeights(compile_weights(params.layout, layout)(whole, ()), layout)


@functools.partial(jax.jit, static_argnames="slots")
def prefill(
    params: Parameters | GenerationWeights,
    tokens: ArrayLike,
    lengths: ArrayLike,
    slots: int,
    *,
    frozen: Parameters | None = None,
) -> tuple[Array, Cache]:
    """Return the logits f32 [B, V] of the token that follows each text, and the texts' cache.

    Args:
      params: parameters, or the result of `generation_weights`, here and in `decode_step`.
      tokens: token ids [B, T], one left-aligned text per row; B must be a multiple of the number of
        replicas.
      lengths: the number of tokens of each text [B], from 1 to T.
      slots: the number of tokens of the longest row, with those that are added later.
    """
    tokens, lengths = jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32)
    _check_shapes(tokens, 2, lengths=(lengths, 1))
    if slots < tokens.shape[1]:
        raise InputError(f"prefill: slots is {slots}, but the texts have {tokens.shape[1]} tokens")

    def compute(weights: Any, rows: Any, config: Config, par: Parallel) -> tuple[Array, Cache]:
        tokens_BT, length_B = rows
        positions_1T = jnp.arange(tokens_BT.shape[1])[None]
        none = jnp.zeros(1, jnp.int32)
        context = context_of(weights, positions_1T, None, None, config, par, none)
        x_BTD, layers = forward(weights, tokens_BT, context, None, config, par)

        def stored(layer: Any) -> LayerCache:
            def padded(x: Array) -> Array:
                return jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0)))

            return jax.tree.map(padded, layer.in_8_bits() if config.int8_cache else layer)

        last_B1D = jnp.take_along_axis(x_BTD, (length_B - 1)[:, None, None], axis=1)
        logits_BV = full_logits(own_logits(weights, last_B1D, config, par), config, par)
        return logits_BV, Cache(tuple(stored(layer) for layer in layers), length_B)

    return _generate(compute, params, frozen, (tokens, lengths), lambda specs: (ROWS, ROWS))


@jax.jit
def decode_step(
    params: Parameters | GenerationWeights,
    cache: Cache,
    tokens: ArrayLike,
    *,
    frozen: Parameters | None = None,
) -> tuple[Array, Cache]:
    """Return the logits f32 [B, V] that follow from one more token per row, and the new cache.

    When a row's slots are full, its oldest token is overwritten.

    Args:
      cache: the result of `prefill` or of this function.
      tokens: token ids [B].
    """

    def compute(weights: Any, rows: Any, config: Config, par: Parallel) -> tuple[Array, Cache]:
        (layers, length_B), token_B = rows
        at_B1, slots = length_B[:, None], layers[0].k_BHSK.shape[2]
        keys_BS = ring.held(at_B1, slots)
        none = jnp.zeros(1, jnp.int32)
        context = context_of(weights, at_B1, keys_BS, at_B1 % slots, config, par, none)
        x_B1D, layers = forward(weights, token_B[:, None], context, layers, config, par)
        logits_BV = full_logits(own_logits(weights, x_B1D, config, par), config, par)
        return logits_BV, Cache(layers, length_B + 1)

    rows = cache, jnp.asarray(tokens)
    return _generate(compute, params, frozen, rows, lambda specs: (specs, ROWS))


def _logits(whole: Any, stream_BTD: Array, config: Config, par: Parallel) -> Array:
    """Return the logits [B, T, V] of all positions, from the residual stream of this device's."""
    return par.gather(transformer.head(whole, stream_BTD, config, par))[..., : config.n_vocab]


def _checked_layers(params: Parameters, layers: int | None) -> int:
    """Return the number of layers to run, by default all; raise InputError if there are fewer."""
    most = params.layout.config.layers
    if layers is not None and not 0 <= layers <= most:
        raise InputError(f"layers is {layers}, expected 0 to {most}")
    return most if layers is None else layers


def functions_layout(layout: StateLayout) -> StateLayout:
    """Return a layout without the config keys that the functions do not read.

    Parameters of two runs that differ only in those, such as `lr`, are then alike for JAX.
    """
    config, names = layout.config, {field.name for field in dataclasses.fields(Model)}
    kept = {name: getattr(config, name) for name in names | KEYS}
    return layout.of(Config(**kept))


def _replicas(layout: StateLayout) -> int:
    """Return the number that divides the number of rows of a batch."""
    return layout.config.replicas(layout.par.dp)


def _forward(
    compute: Callable[..., Array],
    params: Parameters,
    frozen: Parameters | None,
    rows: Any,
    segments: ArrayLike | None,
) -> Array:
    """Run a function whose result has a row for each row of its inputs; see `_run`."""
    config = params.layout.config.for_inference()
    count = len(jax.tree.leaves(rows)[0])
    return _run(compute, params, frozen, (rows, segments), config, ROWS)[:count]


def _run(
    compute: Callable[..., Array],
    params: Parameters,
    frozen: Parameters | None,
    rows: Any,
    config: Config,
    out_specs: P,
) -> Array:
    """Run a function of all parameters and of rows, partitioned over the mesh.

    Args:
      compute: called with the parameters as `par.compute_copy` returns them, with rows, and with
        the keyword arguments `config` and `par`.
      rows: a tree of arrays [B, ...]; zeros are added until the replicas divide B.
    """
    layout = params.layout.of(config)
    multiple = _replicas(layout)

    def padded(x: ArrayLike) -> Array:
        x = jnp.asarray(x)
        return jnp.pad(x, [(0, -len(x) % multiple)] + [(0, 0)] * (x.ndim - 1))

    def program(own: Any, fixed: Any, rows: Any, *, config: Config, par: Parallel) -> Array:
        trained = transformer.trained(config)
        own = par.mark_varying(par.compute_copy(own, trained, config.dtype), trained)
        fixed = par.compute_copy(fixed, transformer.frozen(config), config.dtype)
        return compute(combine(fixed, own), rows, config=config, par=par)

    specs = layout.specs["params"], layout.specs["frozen"], ROWS
    run = layout.partitioned(program, specs, out_specs, **layout.attention_choices)
    own = device_copies(params.tree, layout.optimizer.declared, config, config.dtype)
    return run(own, _fixed(params, frozen), jax.tree.map(padded, rows))


def _generate(
    compute: Callable[..., tuple[Array, Cache]],
    params: Parameters | GenerationWeights,
    frozen: Parameters | None,
    rows: Any,
    row_specs: Callable[[Cache], Any],
) -> tuple[Array, Cache]:
    """Run a function of the weights that generation uses and of rows, partitioned over the mesh.

    Args:
      row_specs: a function from the PartitionSpecs of the cache to those of `rows`.
    """
    if isinstance(params, Parameters):
        params = generation_weights(params, frozen=frozen)
    layout, count = params.layout, len(rows[-1])
    if count % layout.par.dp:
        raise InputError(f"{count} rows are not a multiple of the {layout.par.dp} replicas")
    heads, config = P("dp", "mp"), layout.config
    layer = LayerCache(*(heads,) * (4 if config.int8_cache else 2))
    specs = Cache((layer,) * config.layers, ROWS)
    run = layout.partitioned(compute, (layout.specs, row_specs(specs)), (ROWS, specs))
    return run(params.tree, rows)


def _check_shapes(array: Array, axes: int, **others: tuple[Any, int]) -> None:
    """Raise InputError unless other arrays have the shape of an array of tokens.

    Args:
      axes: the number of axes that the array must have.
      others: for each array, by name, how many axes of the shape it must have; None is ignored.
    """
    if array.ndim < axes:
        raise InputError(f"tokens have the shape {array.shape}, expected {axes} axes")
    for name, (other, shared) in others.items():
        if other is not None and jnp.shape(other) != array.shape[:shared]:
            raise InputError(
                f"{name} have the shape {jnp.shape(other)}, expected {array.shape[:shared]}"
            )


def _fixed(params: Parameters, frozen: Parameters | None) -> transformer.Params:
    """Return the parameters that are not trained."""
    if not params.layout.config.lora_rank:
        return {}
    if frozen is None:
        raise InputError("the parameters are LoRA adapters; also pass frozen=network.frozen")
    return frozen.tree
