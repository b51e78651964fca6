"""The model as pure functions of its parameters.

In each function, `par` is the `Parallel` that partitions the computation over the mesh.

Parameters are nested dicts, {part: {module: {name: array}}}.  The arrays of the part "layers" are
stacked over all layers on a first axis L.  The first table lists all parameters.  X/mp is an axis
of size X that is split over mp.  A parameter with an entry in the last column exists only with this
config key or attribute of the config's block (see `families.Block`), with this entry in it, or (!=)
without this value.  The second table lists the scale and offset of each kind of norm, as "shape:
initial value".  The third table lists the initial values of matrices by the name in the block's
`initial`: normal(s) is a normal distribution with standard deviation s, and truncated(s) the same,
truncated at two s.

    parameter                        shape           initial value       if
    embed/embedding/w                V/mp, D         embedding
    embed/embedding/b                D               0                   biased_ends=True
    embed/embedding/pos_embs         T, D/mp         positions           pe=fixed
    embed/embedding/norm/*           ...             see below           embed_norm=True
    layers/layer/norm/*              L, ...          see below           norm_place!=after
    layers/layer/ff_norm/*           L, ...          see below       ff_norm=True  norm_place!=after
    layers/layer/norm_after/*        L, ...          see below           norm_place!=before
    layers/layer/ff_norm_after/*     L, ...          see below           norm_place!=before
    layers/layer/q/w                 L, D, H*K/mp    inputs              fused=False
    layers/layer/q/b                 L, H*K/mp       0                   biases=q
    layers/layer/q_norm/scale        L, K            1                   qk_norm=head
    layers/layer/q_norm/scale        L, H*K/mp       1                   qk_norm=projection
    layers/layer/k/w                 L, D, J*K/mp    inputs              fused=False
    layers/layer/k/b                 L, J*K/mp       0                   biases=k
    layers/layer/k_norm/scale        L, K            1                   qk_norm=head
    layers/layer/k_norm/scale        L, J*K/mp       1                   qk_norm=projection
    layers/layer/v/w                 L, D, J*K/mp    inputs              fused=False
    layers/layer/v/b                 L, J*K/mp       0                   biases=v
    layers/layer/o                   L, H*K/mp, D    outputs             fused=False
    layers/layer/o_b                 L, D            0                   biases=o
    layers/layer/gate/w              L, D, F/mp      inputs              gated=True
    layers/layer/gate/b              L, F/mp         0                   biases=gate
    layers/layer/fc/w                L, D, F/mp      inputs              fused=False
    layers/layer/fc/b                L, F/mp         0                   biases=fc
    layers/layer/out                 L, F/mp, D      outputs             fused=False
    layers/layer/out_b               L, D            0                   biases=out
    layers/layer/fused_in            L, D, H/mp, I   inputs              fused=True
    layers/layer/fused_in_b          L, H/mp, I      0                   biases=fused_in
    layers/layer/fused_out           L, H/mp, O, D   outputs             fused=True
    layers/layer/b                   L, D            0                   joint_bias=True
    proj/projection/norm/*           ...             see below
    proj/projection/head/w           D, V/mp         inputs              tie_head=False
    proj/projection/head/b           V/mp            0                   biased_ends=True
    relative/relative/rel_embedding  H/mp, 32        truncated(0.02)     pe=t5

    norm                             scale           offset
    layernorm                        D: 1            D: 0
    layernorm-nobias                 D: 1
    layernorm-desync                 mp/mp, D: 1     mp/mp, D: 0
    rmsnorm                          D: D**0.5
    rmsnorm-bias                     D: D**0.5       D: 0
    scalenorm                        (): D**0.5
    scalenorm-bias                   (): D**0.5      (): 0
    rms                              D: 1
    rms-plus-one                     D: 0
    rms-plain

    name  embedding             positions             inputs                outputs
    gptj  truncated(V**-0.5)    truncated(0.02)       truncated(D**-0.5)    truncated(2/L/D**0.5)
    gpt2  normal(0.02)          normal(0.02)          normal(0.02)          normal(0.02/(2*L)**0.5)
    neox  normal((2/5/D)**0.5)  normal((2/5/D)**0.5)  normal((2/5/D)**0.5)  normal(2/L/D**0.5)

The sizes are V n_vocab, D d_model, T seq, L layers, H n_heads, J key_heads, K head_size, F ff_size
and R lora_rank.  If mp does not divide J < H, the parameters of k and v are not split.  The scales
of q_norm and k_norm have the norm's initial value, or do not exist, as the table of norms says.
In a fused block, I = 3 K + 2 F / H and O = K + F / H.  A LoRA adapter of a weight
w [inputs, outputs] adds two parameters: w_lora_a [inputs, R], initially truncated(inputs**-0.5),
and w_lora_b [R, outputs], initially 0.  Trained parameters are in f32 or, with early_cast, in bf16.
Frozen parameters are in the compute dtype, but with frozen_bits the matrices of the layers are
quantized (see `matrices`).

In the code, array names end in their shape: B batch, T query, S key, D model, H heads, V
vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mesh_transformer.config_model import Model
from mesh_transformer.mesh import haiku as hk
from mesh_transformer.mesh.declaration import (
    Declaration,
    combine,
    map_declared,
    partition,
    record_declarations,
)
from mesh_transformer.mesh.parallel import GATHERED, Auto, Parallel
from mesh_transformer.model import matrices
from mesh_transformer.model.attention import (
    ATTENDED,
    MASKED,
    Attend,
    attend_function,
    causal_bias,
)
from mesh_transformer.model.dropout import Dropout
from mesh_transformer.model.ends import Embedding, Projection, RelativePosition
from mesh_transformer.model.layer_values import LayerValues, stacked
from mesh_transformer.model.layers import MIDDLE, Context, TransformerLayer
from mesh_transformer.model.matrices import ROUNDED

Params = dict[str, Any]  # parameters as nested dicts, in the structure of `declarations`
# The inputs of one layer that a scan over layers divides: weights, number, and other values.
LayerInputs = tuple[Params, Array | None, LayerValues | None]
HEAD = "projection/head"  # the module of the output head


def transforms(config: Model, par: Parallel) -> dict[str, hk.Transformed]:
    """Return the model's parts, such as "embed", as pairs of pure init and apply functions."""
    parts: dict[str, Callable[..., Any]] = {
        "embed": lambda *inputs: Embedding(config, par)(*inputs),
        "layers": lambda x, context, cache: TransformerLayer(config, par)(x, context, cache),
        "proj": lambda x, **parts: Projection(config, par)(x, **parts),
    }
    if config.pe == "t5":
        parts["relative"] = lambda query, key: RelativePosition(config, par)(query, key)
    return {name: hk.without_apply_rng(hk.transform(part)) for name, part in parts.items()}


def init(config: Model, key: Array) -> Params:
    """Return newly initialised f32 parameters, as global arrays without padding.

    To create the arrays already sharded, call this under `jit` with `out_shardings`.
    """
    return _without_tied_head(_init(config, key), config)


def _init(config: Model, key: Array) -> Params:
    """Return the result of `init`, with the head's matrix also if it is tied."""
    parts = transforms(config, Auto())
    keys = dict(zip(sorted(parts), jax.random.split(key, len(parts)), strict=True))
    tokens = jnp.zeros((1, 1), jnp.int32)
    x_BTD = jnp.zeros((1, 1, config.d_model), jnp.float32)
    bias_BHTS = jnp.zeros((1, 1, 1, 1))
    context = Context(tokens, bias_BHTS, sliding_bias_BHTS=bias_BHTS)

    params = {
        "embed": parts["embed"].init(keys["embed"], tokens, tokens),
        "layers": jax.vmap(lambda k: parts["layers"].init(k, x_BTD, context, None))(
            jax.random.split(keys["layers"], config.layers)
        ),
        "proj": parts["proj"].init(keys["proj"], x_BTD),
    }
    if config.pe == "t5":
        params["relative"] = parts["relative"].init(keys["relative"], tokens, tokens)
    return {name: {m: dict(leaves) for m, leaves in part.items()} for name, part in params.items()}


@functools.cache
def _declared(config: Model) -> Params:
    """Return the result of `declarations`, with the head's matrix also if it is tied."""
    with record_declarations() as declared:
        shapes = jax.eval_shape(lambda: _init(config, jax.random.key(0)))  # needs no device

    def declaration(part: str, d: Declaration) -> Declaration:
        d = dataclasses.replace(d, frozen=config.lora_rank > 0 and not d.adapter)
        return d.stack(config.layers) if part == "layers" else d

    return {
        part: {
            module: {name: declaration(part, declared[module][name]) for name in leaves}
            for module, leaves in modules.items()
        }
        for part, modules in shapes.items()
    }


def declarations(config: Model) -> Params:
    """Return the `Declaration` (shape, layout and role) of every parameter, as nested dicts.

    The declarations of the part "layers" describe arrays that are stacked over all layers.
    """
    return _without_tied_head(_declared(config.model), config)


def _without_tied_head(tree: Params, config: Model) -> Params:
    """Return a tree of parameters, without the head's matrix if it is the embedding."""
    if not config.tie_head:
        return tree
    proj = dict(tree["proj"])
    rest = {name: leaf for name, leaf in proj.pop(HEAD).items() if name != "w"}
    return tree | {"proj": proj | ({HEAD: rest} if rest else {})}


def projection_params(params: Params) -> Params:
    """Return the parameters of the part "proj", in which a tied head is the transposed embedding.

    Args:
      params: all parameters, or at least the parts "embed" and "proj".
    """
    proj = params["proj"]
    head = proj.get(HEAD, {})
    if "w" in head:
        return proj
    return proj | {HEAD: head | {"w": params["embed"]["embedding"]["w"].T}}


def declared_projection(config: Model) -> Params:
    """Return the declarations of the arrays that `projection_params` returns."""
    return _declared(config.model)["proj"]


def collect_projection(params: Params, config: Model, par: Parallel) -> Params:
    """Return `projection_params` in the compute dtype; see `Parallel.collect`."""
    declared = declared_projection(config)
    return par.collect(projection_params(params), declared, config.dtype)


def trained(config: Model) -> Params:
    """Return the declarations of the trained parameters.

    These are all parameters or, if the config sets `lora_rank`, only the adapters.
    """
    declared = declarations(config)
    return partition(declared, declared)[0]


def frozen(config: Model) -> Params:
    """Return the declarations of the arrays that hold the frozen parameters; see `quantized`."""
    declared = declarations(config)
    fixed = partition(declared, declared)[1]
    if config.frozen_bits is None:
        return fixed
    return fixed | {"layers": matrices.stored(fixed["layers"], config.frozen_bits)}


def stored(config: Model) -> Params:
    """Return the declarations of the arrays that hold all parameters in training."""
    return combine(frozen(config), trained(config))


def quantized(params: Params, config: Model) -> Params:
    """Return frozen parameters, in which the matrices of the layers have `frozen_bits`."""
    if config.frozen_bits is None:
        return params
    declared = declarations(config)
    fixed = partition(declared, declared)[1]["layers"]
    return params | {"layers": matrices.quantize(params["layers"], fixed, config.frozen_bits)}


def _remat(run: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """Wrap `run` so that the backward pass recomputes what the remat policy does not save.

    Even the policy "none" recomputes the operations between matmuls, because writing their results
    to memory and reading them back would take longer.  However, this policy recomputes no matmul
    and no collective over mp.  Every policy saves the residual stream that a norm reads.
    """
    policies = jax.checkpoint_policies
    dots = policies.dots_with_no_batch_dims_saveable
    stream = policies.save_only_these_names(MIDDLE)
    products = policies.save_only_these_names(MIDDLE, ROUNDED)  # of matmuls that are no dots
    policy = {
        "full": stream,
        "dots": policies.save_from_both_policies(dots, products),
        "none": policies.save_from_both_policies(
            policies.dots_saveable,
            policies.save_only_these_names(GATHERED, ATTENDED, MIDDLE, ROUNDED),
        ),
    }[remat]
    # `prevent_cse=False` is safe because `run` is called in a scan, where the compiler cannot merge
    # the recomputation with the forward pass.
    return jax.checkpoint(run, policy=policy, prevent_cse=False)


def segment_runs(segments: Array) -> tuple[Array, Array]:
    """Find the runs of equal segment numbers along the last axis.

    Returns:
      (runs, positions), of shape [..., T] each: for each token, the index of its run, and the
      token's position within that run.  Both count from 0.
    """
    index_T = jnp.arange(segments.shape[-1])
    begins = jnp.diff(segments, axis=-1, prepend=segments[..., :1]) != 0
    starts = jax.lax.cummax(jnp.where(begins, index_T, 0), axis=segments.ndim - 1)
    return jnp.cumsum(begins, axis=-1), index_T - starts


class Part(NamedTuple):
    """Some consecutive layers.

    Attributes:
      start, stop: the first layer, and the one after the last.
      x_BTD: the residual stream before `start`, at this device's positions; None: the embedding.
    """

    start: int
    stop: int
    x_BTD: Array | None = None


def residual_stream(
    params: Params,
    tokens_BT: Array,
    config: Model,
    par: Parallel,
    segments_BT: Array | None,
    dropout: Dropout | None = None,
    part: Part | None = None,
) -> Array:
    """Return the residual stream x_BTD before the last norm, at this device's positions.

    Args:
      tokens_BT: the tokens of whole sequences (see `Positions.cut`).
      segments_BT: see `logits`.
      dropout: the microbatch's random numbers; None for no dropout.
      part: the layers to run; None for all.
    """
    parts, declared = transforms(config, par), stored(config)
    positions_BT, run_BT = jnp.arange(tokens_BT.shape[-1])[None], None
    if segments_BT is not None:
        run_BT, in_text_BT = segment_runs(segments_BT)
        if config.packed_positions == "restart":
            positions_BT = in_text_BT
    length = tokens_BT.shape[-1]
    tokens_BT, own_positions_BT = par.cut(tokens_BT), par.cut(positions_BT)

    def apply(part: str, *args: Any) -> Any:
        whole = par.collect(params[part], declared[part], config.dtype)
        return parts[part].apply(whole, *args)

    def seen(window: int) -> tuple[Attend | None, Array | None]:
        attend = attend_function(config, par, length, run_BT, window)
        if attend is not None:
            return attend, None
        bias_BHTS = causal_bias(positions_BT, positions_BT, window)
        if config.pe == "t5":
            bias_BHTS += apply("relative", positions_BT, positions_BT)
        if run_BT is not None:
            differ_BHTS = (run_BT[:, :, None] != run_BT[:, None, :])[:, None]
            bias_BHTS = jnp.where(differ_BHTS, MASKED, bias_BHTS)
        return None, bias_BHTS

    attend, bias_BHTS = seen(config.window)
    context = Context(own_positions_BT, bias_BHTS, attend=attend)
    if config.sliding_window is not None:
        attend, bias_BHTS = seen(min(config.sliding_window, config.window))
        context = context._replace(sliding_attend=attend, sliding_bias_BHTS=bias_BHTS)
    one_layer = map_declared(lambda d: d.unstack(), declared["layers"])

    def run(layer: LayerInputs, x_BTD: Array) -> Array:
        layer_params, number, values = layer
        whole = par.collect(layer_params, one_layer, config.dtype)
        whole = matrices.dequantized(whole, config.dtype)
        own = None if dropout is None or number is None else dropout.of_layer(number)
        in_layer = context._replace(dropout=own, values=values)
        return parts["layers"].apply(whole, x_BTD, in_layer, None)[0]

    def body(x_BTD: Array, layer: LayerInputs) -> tuple[Array, None]:
        return par.by_rows(jnp.add)(x_BTD, _remat(run, config.remat)(layer, x_BTD)), None

    if dropout is None:
        numbers, outside = None, None
    else:
        numbers, outside = jnp.arange(config.layers), dropout.of_layer(config.layers)
    inputs = params["layers"], numbers, stacked(config)
    if part is not None:
        inputs = jax.tree.map(lambda x: x[part.start : part.stop], inputs)
    if part is not None and part.x_BTD is not None:
        x_BTD = part.x_BTD
    else:
        x_BTD = apply("embed", tokens_BT, own_positions_BT, outside)
    return jax.lax.scan(body, x_BTD, inputs)[0]


def logits(
    params: Params,
    tokens_BT: Array,
    config: Model,
    par: Parallel,
    segments_BT: Array | None = None,
) -> Array:
    """Return next-token logits_BTV in f32, split over mp along the vocabulary, with its padding.

    Args:
      segments_BT: a segment number per position, for sequences that pack several texts.  Each run
        of equal numbers is one text.  Positions start at 0 in each text, unless the config's
        `packed_positions` is "continue", and tokens attend only to tokens of the same text.
    """
    return head(params, residual_stream(params, tokens_BT, config, par, segments_BT), config, par)


def head(params: Params, x_BTD: Array, config: Model, par: Parallel) -> Array:
    """Return the result of `logits`, from that of `residual_stream`."""
    whole = collect_projection(params, config, par)
    return par.whole(transforms(config, par)["proj"].apply(whole, x_BTD))
