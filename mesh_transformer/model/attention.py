"""Attention: rotary embedding, masks, softmax attention and fused kernels.

For attention over whole sequences, `attention_backend` selects one of these backends:

* `xla`: plain softmax attention.
* `blocks`: softmax attention in blocks, whose memory is linear in the length (`block_attention`).
* `splash`: splash attention (TPU).
* `cudnn`: cuDNN's fused attention (GPU).

`attend_function` then returns a function that computes attention with the selected backend.

Array names end in their shape: B batch, T query, S cache or key, H heads, K head size, R rotated
part of a head.  H is the number of heads of one device (with `Manual`) or of the whole model (with
`Auto`); see `Parallel`.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.config_model import Model
from mesh_transformer.mesh.accelerators import Device
from mesh_transformer.mesh.parallel import Axes, Parallel
from mesh_transformer.model.block_attention import ATTENDED, MASKED, attend_in_blocks, capped
from mesh_transformer.model.cache import LayerCache
from mesh_transformer.model.heads import Heads, query_heads
from mesh_transformer.model.layer_values import frequencies
from mesh_transformer.util import InputError

# (q_BTHK, k_BSJK, v_BSJK, the keys of `drop_probs` or None) -> attended_BTHK; J key heads are kept
# for H query heads (see `Heads`).
Attend = Callable[[Array, Array, Array, Array | None], Array]
LANES = 128  # TPU vector lanes; splash attention requires sequences in multiples of this


def rotate(
    x_BTHK: Array,
    positions_BT: Array,
    dims: int,
    *,
    halves: bool = False,
    frequency_R: Any = None,
    scale: Any = None,
) -> Array:
    """Apply rotary embedding (Su 2021) to the first `dims` entries of each head, in f32.

    As in GPT-J, adjacent entries are rotated together: entries 0 and 1, 2 and 3, and so on.  With
    `halves`, entry i is rotated together with entry i + dims / 2, as in GPT-NeoX.

    Args:
      frequency_R: the angle per position of each pair, f32; None for those of GPT-J.  Negative ones
        rotate backward, as nanochat does (`layer_values` makes them so).
      scale: a factor of sine and cosine; None for 1.
    """
    if frequency_R is None:
        frequency_R = frequencies(dims)[0].astype(np.float32)
    angle_BTR = positions_BT[..., None].astype(jnp.float32) * frequency_R
    sin, cos = jnp.sin(angle_BTR)[:, :, None], jnp.cos(angle_BTR)[:, :, None]
    if scale is not None:
        sin, cos = sin * scale, cos * scale
    rotary, rest = x_BTHK[..., :dims].astype(jnp.float32), x_BTHK[..., dims:]
    if halves:
        one, other = jnp.split(rotary, 2, axis=-1)
        rotated = jnp.concatenate((one * cos - other * sin, other * cos + one * sin), axis=-1)
    else:
        even, odd = rotary[..., ::2], rotary[..., 1::2]
        pairs = jnp.stack((even * cos - odd * sin, odd * cos + even * sin), axis=-1)
        rotated = pairs.reshape(rotary.shape)
    return jnp.concatenate((rotated.astype(x_BTHK.dtype), rest), axis=-1)


def causal_bias(positions_BT: Array, key_positions_BS: Array, window: int) -> Array:
    """Return the f32 bias_BHTS, with H = 1: 0 where a query may attend to a key, else -1e10.

    A query attends to its own position and the `window` - 1 positions before it.  Keys at negative
    positions are padding, to which no query attends.
    """
    distance_BTS = positions_BT[:, :, None] - key_positions_BS[:, None, :]
    seen_BTS = (distance_BTS >= 0) & (distance_BTS < window) & (key_positions_BS >= 0)[:, None, :]
    return jnp.where(seen_BTS, 0.0, MASKED)[:, None].astype(jnp.float32)


def attend(
    q_BTHK: Array,
    cache: LayerCache,
    bias_BHTS: Array,
    drop: Callable[[Array], Array] | None = None,
    cap: float | None = None,
) -> Array:
    """Compute softmax attention of T queries over S keys, and return it as [B, T, H, K].

    Scores and softmax are computed in f32; the inputs of both matmuls are in the compute dtype.

    Args:
      cache: the keys and values; scores and probabilities are multiplied by its scales.
      bias_BHTS: the mask plus any relative position bias, added to the scores.
      drop: applied to the probabilities, for dropout.
      cap: see `capped`.
    """
    probs_BHTS = jax.nn.softmax(scores_of(q_BTHK, cache, cap) + bias_BHTS)
    return _weighted_sum(probs_BHTS, cache, q_BTHK.dtype, drop)


def attend_to_cache(
    q_BTHK: Array, cache: LayerCache, bias_BHTS: Array, cap: float | None = None
) -> Array:
    """Compute `attend` over a cache, whose masked keys may be NaN (see `LayerCache.like`)."""

    def run(q_BTHK: Array) -> Array:
        probs_BHTS = jax.nn.softmax(masked(scores_of(q_BTHK, cache, cap), bias_BHTS))
        return _weighted_sum(probs_BHTS, cache, q_BTHK.dtype)

    return on_matrix_unit(run, q_BTHK)


def on_matrix_unit(run: Callable[[Array], Array], q_BTHK: Array) -> Array:
    """Return run(q_BTHK), an array like `q_BTHK`; on TPUs, compute a single query twice.

    For a single one, their compiler uses no matrix unit, but converts the keys and values to f32.
    """
    if q_BTHK.shape[1] > 1:
        return run(q_BTHK)
    return jax.lax.platform_dependent(
        q_BTHK, tpu=lambda q_BTHK: run(jnp.repeat(q_BTHK, 2, axis=1))[:, :1], default=run
    )


def masked(scores_BHTS: Array, bias_BHTS: Array) -> Array:
    """Return the sum of scores and bias; where the bias masks a score, even NaN, the bias alone."""
    return jnp.where(bias_BHTS > MASKED / 2, scores_BHTS + bias_BHTS, bias_BHTS)


def _weighted_sum(
    probs_BHTS: Array,
    cache: LayerCache,
    dtype: jnp.dtype,
    drop: Callable[[Array], Array] | None = None,
) -> Array:
    """Return the sums of a cache's values, multiplied by probabilities, as [B, T, H, K]."""
    if cache.v_scale_BHS1 is not None:
        probs_BHTS *= jnp.swapaxes(cache.v_scale_BHS1, 2, 3)
    probs_BHTS = probs_BHTS.astype(dtype)
    if drop is not None:
        probs_BHTS = drop(probs_BHTS)
    v_BHSK = cache.v_BHSK.astype(dtype)
    if probs_BHTS.shape[2] < v_BHSK.shape[2]:
        # In the order BTHK, einsum would swap the operands, which is slower on CPUs.
        return jnp.moveaxis(jnp.einsum("BHTS,BHSK->BHTK", probs_BHTS, v_BHSK), 1, 2)
    return jnp.einsum("BHTS,BHSK->BTHK", probs_BHTS, v_BHSK)


def scores_of(q_BTHK: Array, cache: LayerCache, cap: float | None = None) -> Array:
    """Return the scores of T queries for S keys without a bias, `capped`, f32 [B, H, T, S]."""
    scale: Any = q_BTHK.shape[-1] ** -0.5
    k_BHSK = cache.k_BHSK.astype(q_BTHK.dtype)
    if cache.k_scale_BHS1 is not None:
        scale *= jnp.swapaxes(cache.k_scale_BHS1, 2, 3)
    if q_BTHK.shape[1] == 1:
        # Axis T is dropped, because with it XLA on CPUs transposes the keys of a one-row batch.
        scores_BHS = jnp.einsum(
            "BHK,BHSK->BHS", q_BTHK[:, 0], k_BHSK, preferred_element_type=jnp.float32
        )
        scores_BHTS = scores_BHS[:, :, None]
    elif q_BTHK.shape[1] < k_BHSK.shape[2] and q_BTHK.dtype == jnp.float32:
        # A chunk of a prompt, or a step with guesses.  The keys come first, because XLA on CPUs
        # transposes the second operand.  It cannot compute this product in bfloat16 (jaxlib 0.10).
        scores_BHST = jnp.einsum(
            "BHSK,BTHK->BHST", k_BHSK, q_BTHK, preferred_element_type=jnp.float32
        )
        scores_BHTS = jnp.swapaxes(scores_BHST, 2, 3)
    else:
        scores_BHTS = jnp.einsum(
            "BTHK,BHSK->BHTS", q_BTHK, k_BHSK, preferred_element_type=jnp.float32
        )
    return capped(scores_BHTS * scale, cap)


def attend_after(
    q_BTHK: Array,
    before_1HSK: LayerCache,
    own_BHTK: LayerCache,
    bias_BHTS: Array,
    cap: float | None = None,
) -> Array:
    """Compute softmax attention of rows that all follow the same text, as [B, T, H, K].

    This is `attend` over the text's keys followed by the row's own keys, but the text's keys are
    not copied for each row.

    Args:
      before_1HSK: the keys and values of the text, without scales.
      own_BHTK: the keys and values of the rows, without scales.
      bias_BHTS: as for `attend`; here S is the sum of both numbers of keys.
    """
    scale = q_BTHK.shape[-1] ** -0.5
    k_HSK, v_HSK = before_1HSK.k_BHSK[0], before_1HSK.v_BHSK[0]
    before = k_HSK.shape[1]
    kind: Any = {"preferred_element_type": jnp.float32}
    scores_BHTS = jnp.concatenate(
        (
            jnp.einsum("BTHK,HSK->BHTS", q_BTHK, k_HSK, **kind),
            jnp.einsum("BTHK,BHSK->BHTS", q_BTHK, own_BHTK.k_BHSK, **kind),
        ),
        axis=-1,
    )
    scores_BHTS = capped(scores_BHTS * scale, cap)
    probs_BHTS = jax.nn.softmax(scores_BHTS + bias_BHTS).astype(v_HSK.dtype)
    y_BTHK = jnp.einsum("BHTS,HSK->BTHK", probs_BHTS[..., :before], v_HSK, **kind)
    y_BTHK += jnp.einsum("BHTS,BHSK->BTHK", probs_BHTS[..., before:], own_BHTK.v_BHSK, **kind)
    return y_BTHK.astype(v_HSK.dtype)


SPLASH_BLOCKS = (512, 256, LANES)  # block sizes for queries and keys, in order of preference
LONG = 2048  # tokens; beyond this, attention scores take more memory than the rest of a layer
# (q_BHTK already scaled, k_BHSK, v_BHSK, text_BT or None) -> attended_BHTK; positions with equal
# numbers in text_BT belong to the same text.
Kernel = Callable[[Array, Array, Array, Array | None], Array]


def attention_backend(config: Model, device: Device, cp: int = 1) -> str:
    """Select the backend for attention over whole sequences on devices like `device`.

    If keys go round devices (`is_ring`), it is `blocks`.

    Raises:
      InputError: if `config.attention` names a backend that this config or device does not support.
    """
    if cp > 1 and is_ring(config, device, cp):
        return "blocks"
    name = _whole_backend(config, device)
    return "blocks" if cp > 1 and name == "xla" else name


def is_ring(config: Model, device: Device, cp: int) -> bool:
    """Return whether attention over positions split over cp exchanges keys, not heads.

    `config.context_attention` chooses.  By default, heads are exchanged if there is a kernel for
    whole sequences, and if cp divides the heads of each shard.
    """
    if config.context_attention is not None:
        return config.context_attention == "ring"
    heads = query_heads(config, config.shards)
    return heads % cp > 0 or _whole_backend(config, device) in ("xla", "blocks")


def _whole_backend(config: Model, device: Device) -> str:
    """Return `attention_backend` for devices that have whole sequences."""
    name = "xla" if config.exact else config.attention
    if name == "auto":
        names = ("splash", "cudnn", *(("blocks",) if config.seq > LONG else ()))
        return next((name for name in names if _obstacle(name, config, device) is None), "xla")
    obstacle = _obstacle(name, config, device)
    if obstacle:
        raise InputError(f"config: attention is {name!r}, which {obstacle}; set it to 'auto'")
    return name


def _obstacle(name: str, config: Model, device: Device) -> str | None:
    """Return the reason why the backend `name` cannot be used, or None if it can.

    The reason is a phrase to follow the backend's name, such as "requires a TPU, ...".
    """
    if name == "xla":
        return None
    if config.pe == "t5":
        return "does not support the relative position bias of pe 't5'"
    if config.dropout_attention and name != "blocks":
        return "does not support dropout_attention"
    if name == "cudnn":
        if config.score_cap is not None:
            return "does not support score_cap"
        return _cudnn_obstacle(config, device)
    if name.startswith("splash") and config.seq % LANES:
        return f"requires seq to be a multiple of {LANES}, but seq is {config.seq}"
    return tpu_obstacle(config, device) if name == "splash" else None


def tpu_obstacle(config: Model, device: Device) -> str | None:
    """Return the reason why JAX's Pallas kernels for TPUs cannot be used, or None if they can."""
    if device.platform != "tpu":
        return f"requires a TPU, but the devices are {device.device_kind!r}"
    if device.device_kind in ("TPU v2", "TPU v3"):
        return f"requires a TPU v4 or later, but the devices are {device.device_kind!r}"
    return _dtype_obstacle(config)


def _cudnn_obstacle(config: Model, device: Device) -> str | None:
    capability = str(getattr(device, "compute_capability", ""))
    # On AMD GPUs `compute_capability` is a name such as "gfx942", not a number.
    if device.platform != "gpu" or not re.fullmatch(r"\d+\.\d+", capability):
        return f"requires an NVIDIA GPU, but the devices are {device.device_kind!r}"
    if float(capability) < 8:
        return (
            f"requires compute capability 8.0 or later, but {device.device_kind!r} has {capability}"
        )
    largest = 256 if float(capability) >= 9 else 128
    if config.d_head > largest or config.d_head % 8:
        return (
            f"requires a head size that is a multiple of 8 up to {largest} on "
            f"{device.device_kind!r}, but the head size is {config.d_head}"
        )
    return _dtype_obstacle(config) or _cudnn_disagrees(config.d_head)


@functools.cache
def _cudnn_disagrees(head_size: int) -> str | None:
    """Return the reason why cuDNN's attention cannot be used on this machine, or None.

    This compares the outputs and gradients of cuDNN and XLA on a small batch, because the kernels
    that are available depend on the GPU, its driver and cuDNN's version.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (1, LANES, 2, head_size)
    q, k, v, g = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)

    @functools.partial(jax.jit, static_argnums=0)
    def both(
        implementation: Literal["cudnn", "xla"], g: Array, *inputs: Array
    ) -> tuple[Array, ...]:
        def run(q: Array, k: Array, v: Array) -> Array:
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation=implementation
            )

        output, pull = jax.vjp(run, *inputs)
        return (output, *pull(g))

    try:
        actual, expected = both("cudnn", g, q, k, v), both("xla", g, q, k, v)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"fails on this machine ({' '.join(str(error).split())[:200]})"
    # The values are of order 1, and cuDNN and XLA round to bf16's 8 bits at different points.
    difference = max(float(jnp.abs(a - b).max()) for a, b in zip(actual, expected, strict=True))
    return None if difference < 0.1 else f"differs from 'xla' by {difference:.2g} on this machine"


def _dtype_obstacle(config: Model) -> str | None:
    if config.dtype == "bfloat16":
        return None
    return f"supports only bfloat16, but dtype is {config.dtype!r}"


def attend_function(
    config: Model,
    par: Parallel,
    length: int,
    text_BT: Array | None,
    window: int | None = None,
) -> Attend | None:
    """Return a function that computes causal attention over whole sequences.

    The backend is `par.attention`.  If that backend does not support `length` or packed texts,
    `blocks` is used for sequences of more than 2048 (`LONG`) tokens, and `xla` for shorter ones.

    Args:
      length: the number of tokens in a sequence.
      text_BT: for sequences that pack several texts, the index of the text that each position
        belongs to; otherwise None.  A position attends only to positions of the same text.
      window: the number of positions that a query may attend to, including its own;
        None for the config's `window`.

    Returns:
      An `Attend` function.  For the backend `xla`, None: the caller must then call `attend` with a
      bias.

    Raises:
      InputError: if texts are packed and `config.attention` is "cudnn", which cannot separate them.
    """
    name, cap = par.attention, config.score_cap
    window = config.window if window is None else window
    exchange = par.cp > 1 and not par.ring
    own = par.with_whole_positions() if exchange else par

    def blocks(q_BTHK: Array, k_BSJK: Array, v_BSJK: Array, key_BH: Array | None) -> Array:
        run = attend_in_blocks(window, cap, config.dropout_attention, own)
        k_BJSK, v_BJSK = (jnp.moveaxis(x, 1, 2) for x in (k_BSJK, v_BSJK))
        return run(q_BTHK, k_BJSK, v_BJSK, text_BT, key_BH)

    attend = blocks
    if name.startswith("splash") and length % LANES == 0:
        kernel = functools.partial(_splash, window, cap, name == "splash_interpreted")
        attend = _with_kernel(kernel, config, own, text_BT)
    elif name == "cudnn" and text_BT is None:
        attend = _with_kernel(functools.partial(_cudnn, window), config, own, None)
    elif name == "cudnn" and config.attention == "cudnn":
        raise InputError(
            "config: attention is 'cudnn', which does not support packed records (segment_ids) and "
            "separate_documents; set it to 'auto'"
        )
    elif name != "blocks" and par.cp == 1 and (name == "xla" or length <= LONG):
        return None
    heads = Heads(config, par)

    def run(q_BTHK: Array, k_BSJK: Array, v_BSJK: Array, key_BH: Array | None) -> Array:
        if heads.copied:
            k_BSJK, v_BSJK = map(heads.of_queries, (k_BSJK, v_BSJK))
        if not exchange:
            return attend(q_BTHK, k_BSJK, v_BSJK, key_BH)
        divisible = (heads.divisible(x, par.cp) for x in (k_BSJK, v_BSJK))
        q_BTHK, k_BSJK, v_BSJK = map(par.heads_for_positions, (q_BTHK, *divisible))
        if key_BH is not None:
            key_BH = par.own_heads(key_BH)
        return par.positions_for_heads(attend(q_BTHK, k_BSJK, v_BSJK, key_BH))

    return run


def _with_kernel(kernel: Kernel, config: Model, par: Parallel, text_BT: Array | None) -> Attend:
    """Return an `Attend` function that runs `kernel`."""
    run = _differentiable(kernel, par)

    def attend(q_BTHK: Array, k_BSJK: Array, v_BSJK: Array, _: Array | None) -> Array:
        group = q_BTHK.shape[2] // k_BSJK.shape[2]
        k_BHSK, v_BHSK = (
            jnp.moveaxis(jnp.repeat(x, group, axis=2) if group > 1 else x, 1, 2)
            for x in (k_BSJK, v_BSJK)
        )
        # This scaling is exact if the head size is a power of 4, such as GPT-J's 256.  Otherwise it
        # rounds q once more.
        q_BHTK = jnp.moveaxis(q_BTHK * config.d_head**-0.5, 2, 1)
        return jnp.moveaxis(run(q_BHTK, k_BHSK, v_BHSK, text_BT), 1, 2)

    return attend


def _differentiable(kernel: Kernel, par: Parallel) -> Kernel:
    """Wrap `kernel` to run on each device's heads and to use the kernel's own gradient.

    The wrapper is a `jax.custom_vjp`.  The forward pass saves the kernel's vjp function as a pytree
    of residuals; each residual stays on the device that computed it.
    """
    heads: Axes = (None, "mp")
    saved: Axes = ("mp",)
    inputs = (heads, heads, heads, ())

    @jax.custom_vjp
    def run(q_BHTK: Array, k_BHSK: Array, v_BHSK: Array, text_BT: Array | None) -> Array:
        return par.on_blocks(kernel, inputs, heads)(q_BHTK, k_BHSK, v_BHSK, text_BT)

    def forward(
        q_BHTK: Array, k_BHSK: Array, v_BHSK: Array, text_BT: Array | None
    ) -> tuple[Array, Any]:
        def both(q: Array, k: Array, v: Array, text: Array | None) -> tuple[Array, Any]:
            return jax.vjp(lambda q, k, v: kernel(q, k, v, text), q, k, v)

        results = par.on_blocks(both, inputs, (heads, saved))(q_BHTK, k_BHSK, v_BHSK, text_BT)
        return jax.tree.map(lambda x: checkpoint_name(x, ATTENDED), results)

    def backward(vjp: Any, g_BHTK: Array) -> tuple[Array | None, ...]:
        pull = par.on_blocks(lambda vjp, g: vjp(g), (saved, heads), (heads,) * 3)
        return (*pull(vjp, g_BHTK), None)

    run.defvjp(forward, backward)
    return run


def _splash(
    window: int,
    cap: float | None,
    interpret: bool,
    q_BHTK: Array,
    k_BHSK: Array,
    v_BHSK: Array,
    text_BT: Array | None,
) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, heads, length, _ = q_BHTK.shape
    block = next(size for size in SPLASH_BLOCKS if length % size == 0)
    mask = (
        splash.CausalMask((length, length))
        if window >= length
        else splash.LocalMask((length, length), (window - 1, 0), offset=0)
    )
    run = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=cap,
        interpret=interpret,
    )
    texts = None if text_BT is None else splash.SegmentIds(text_BT, text_BT)
    return jax.vmap(run)(q_BHTK, k_BHSK, v_BHSK, texts)


def _cudnn(window: int, q_BHTK: Array, k_BHSK: Array, v_BHSK: Array, _: Array | None) -> Array:
    length = q_BHTK.shape[2]
    attended_BTHK = jax.nn.dot_product_attention(
        *(jnp.moveaxis(x, 1, 2) for x in (q_BHTK, k_BHSK, v_BHSK)),
        scale=1.0,
        is_causal=True,
        local_window_size=(window - 1, 0) if window < length else None,
        implementation="cudnn",
    )
    return jnp.moveaxis(attended_BTHK, 1, 2)
