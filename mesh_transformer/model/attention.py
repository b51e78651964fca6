"""Attention: rotary embedding, masks, softmax, the KV cache's write, and the fused kernels.

Over whole sequences `attention_backend` chooses once per program what computes it: the plain
softmax, blocks that never materialise the full T x S score matrix, splash attention (TPU) or cuDNN
(GPU); `attend_function` applies that backend to one batch.

Array names end in their shape: B batch, T query, S cache or key, H heads this program sees, K head
size, R rotated part of a head.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.config import Config
from mesh_transformer.mesh.parallel import Axes, Parallel
from mesh_transformer.util import InputError

# From q_BTHK, k_BHSK and v_BHSK to what each query reads, [B, T, H, K].
Attend = Callable[[Array, Array, Array], Array]
MASKED = -1e10  # not -inf: a fully masked row must stay finite
LANES = 128  # splash attention takes sequences in multiples of a TPU's lanes
# `blocks` cuts a sequence into so many: one pass is (1 + 1/8) / 2 of the work of `xla`'s, in an
# eighth of the memory; twice as many would save little more, and take as much again to compile.
BLOCKS = 8


# Writes [B, H, K] into a cache_BHSK; index_BHI is row and slot, for each head of each row.
_ONE_POSITION = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(2,),
    inserted_window_dims=(0, 2),
    scatter_dims_to_operand_dims=(0, 2),
    operand_batching_dims=(1,),
    scatter_indices_batching_dims=(1,),
)


class LayerCache(NamedTuple):
    """One layer's keys and values (or their layout), in the order that attention reads."""

    k_BHSK: Any
    v_BHSK: Any


def block_length(length: int) -> int:
    """Queries of one of `BLOCKS`; a short sequence has fewer blocks."""
    return max(-(-length // BLOCKS), LANES)


def rotate(x_BTHK: Array, positions_BT: Array, dims: int) -> Array:
    """Rotary embedding (Su 2021) on interleaved pairs of the first `dims` of each head, in f32."""
    frequency_R = 10000.0 ** (-np.arange(0, dims, 2) / dims)
    angle_BTR = positions_BT[..., None].astype(jnp.float32) * frequency_R.astype(np.float32)
    sin, cos = jnp.sin(angle_BTR)[:, :, None], jnp.cos(angle_BTR)[:, :, None]
    turned, rest = x_BTHK[..., :dims].astype(jnp.float32), x_BTHK[..., dims:]
    even, odd = turned[..., ::2], turned[..., 1::2]
    pairs = jnp.stack((even * cos - odd * sin, odd * cos + even * sin), axis=-1)
    return jnp.concatenate((pairs.reshape(turned.shape).astype(x_BTHK.dtype), rest), axis=-1)


def causal_bias(positions_BT: Array, key_positions_BS: Array, window: int) -> Array:
    """0 where a query sees a key, else `MASKED`; keys at negative positions are padding.

    Returns bias_BHTS with H = 1.
    """
    distance_BTS = positions_BT[:, :, None] - key_positions_BS[:, None, :]
    seen_BTS = (distance_BTS >= 0) & (distance_BTS < window) & (key_positions_BS >= 0)[:, None, :]
    return jnp.where(seen_BTS, 0.0, MASKED)[:, None].astype(jnp.float32)


def attend(q_BTHK: Array, k_BHSK: Array, v_BHSK: Array, bias_BHTS: Array) -> Array:
    """Softmax attention of T queries over S keys; heads are those this program holds.

    `bias` already holds the masks and any relative position term.  The logits and the softmax
    are f32, the matmuls' inputs in the compute dtype.
    """
    scale = q_BTHK.shape[-1] ** -0.5
    if q_BTHK.shape[1] == 1:  # without T: with it, XLA for CPUs transposes a single row's keys
        logits_BHS = jnp.einsum(
            "BHK,BHSK->BHS", q_BTHK[:, 0], k_BHSK, preferred_element_type=jnp.float32
        )
        logits_BHTS = logits_BHS[:, :, None]
    else:
        logits_BHTS = jnp.einsum(
            "BTHK,BHSK->BHTS", q_BTHK, k_BHSK, preferred_element_type=jnp.float32
        )
    weights_BHTS = jax.nn.softmax(logits_BHTS * scale + bias_BHTS).astype(v_BHSK.dtype)
    return jnp.einsum("BHTS,BHSK->BTHK", weights_BHTS, v_BHSK)


def write(cache: LayerCache, new: LayerCache, slot_B: Array) -> LayerCache:
    """The cache with one position a row (S = 1 in `new`) written at `slot_B`, in place."""
    if len(slot_B) == 1:
        # Twice the same: of a single update, as a row is where a device has one head, XLA for CPUs
        # makes one for which it copies the cache.
        new, slot_B = jax.tree.map(lambda x: jnp.concatenate((x, x)), (new, slot_B))
        rows_B = jnp.zeros(2, jnp.int32)
    else:
        rows_B = jnp.arange(len(slot_B))
    # Head by head: with a row's heads as one update TPUs hold the caches in another order, a copy
    # of all.  And H a batching dimension: were it an index, the compiler's own partitioning
    # (`Auto`) would gather what is to be written over mp.
    index_BI = jnp.stack((rows_B, slot_B), axis=-1)
    index_BHI = jnp.broadcast_to(index_BI[:, None], (*new.k_BHSK.shape[:2], 2))

    def written(cache_BHSK: Array, new_BHSK: Array) -> Array:
        new_BHK = new_BHSK[:, :, 0].astype(cache_BHSK.dtype)
        return jax.lax.scatter(cache_BHSK, index_BHI, new_BHK, _ONE_POSITION)

    return jax.tree.map(written, cache, new)


SPLASH_BLOCKS = (512, 256, LANES)  # of queries and of keys, the largest first
ATTENDED = "attended"  # the name, for remat, of what a kernel's backward pass reads
LONG = 2048  # tokens; of longer sequences the weights outgrow the rest of a layer
# Of q_BHTK, scaled, k_BHSK, v_BHSK, and which text each position is of, [B, T], or None.
Kernel = Callable[[Array, Array, Array, Array | None], Array]


class Device(Protocol):
    """What `chosen` reads of a `jax.Device`; a GPU also has a `compute_capability`."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...


def attention_backend(config: Config, device: Device) -> str:
    """How programs on such devices compute attention over a whole sequence.

    Raises:
      InputError: where `attention` names what cannot be had.
    """
    name = config.attention
    if name == "auto":
        names = ("splash", "cudnn", *(("blocks",) if config.seq > LONG else ()))
        return next((each for each in names if _obstacle(each, config, device) is None), "xla")
    obstacle = _obstacle(name, config, device)
    if obstacle:
        raise InputError(f"config: attention is {name!r}, which {obstacle}; set it to 'auto'")
    return name


def _obstacle(name: str, config: Config, device: Device) -> str | None:
    """Why attention cannot be computed so, or None."""
    if name == "xla":
        return None
    if config.pe == "t5":
        return "has no place for the relative positions of pe 't5'"
    if name == "cudnn":
        return _cudnn_obstacle(config, device)
    if name.startswith("splash") and config.seq % LANES:
        return f"takes sequences in multiples of {LANES}, and seq is {config.seq}"
    if name != "splash":
        return None
    if device.platform != "tpu":
        return f"needs a TPU, and the devices are {device.device_kind!r}"
    if device.device_kind in ("TPU v2", "TPU v3"):
        return f"needs a TPU v4 or later, and the devices are {device.device_kind!r}"
    return _dtype_obstacle(config)


def _cudnn_obstacle(config: Config, device: Device) -> str | None:
    capability = str(getattr(device, "compute_capability", ""))
    # An AMD GPU has a name there.
    if device.platform != "gpu" or not re.fullmatch(r"\d+\.\d+", capability):
        return f"needs an NVIDIA GPU, and the devices are {device.device_kind!r}"
    if float(capability) < 8:
        return f"needs compute capability 8.0, and {device.device_kind!r} has {capability}"
    largest = 256 if float(capability) >= 9 else 128
    if config.d_head > largest or config.d_head % 8:
        return (
            f"takes heads of a multiple of 8 up to {largest} on {device.device_kind!r}, and the "
            f"head size is {config.d_head}"
        )
    return _dtype_obstacle(config) or _cudnn_disagrees(config.d_head)


@functools.cache
def _cudnn_disagrees(head_size: int) -> str | None:
    """Why cuDNN's kernels here are not to be used: found by a small batch, forward and backward.

    Which of them a GPU has depends on its driver and on cuDNN's version.
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

        found, pull = jax.vjp(run, *inputs)
        return (found, *pull(g))

    try:
        found, wanted = both("cudnn", g, q, k, v), both("xla", g, q, k, v)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"cannot run here ({' '.join(str(error).split())[:200]})"
    # Numbers of order 1, rounded to 8 bits in other places.
    far = max(float(jnp.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
    return None if far < 0.1 else f"is off by {far:.2g} from XLA's attention here"


def _dtype_obstacle(config: Config) -> str | None:
    if config.dtype == "bfloat16":
        return None
    return f"multiplies bfloat16 alone, and dtype is {config.dtype!r}"


def attend_function(
    config: Config, par: Parallel, length: int, text_BT: Array | None
) -> Attend | None:
    """Attention of all of a sequence, causal and within the window; None: XLA's, by a bias.

    Where a kernel takes neither the length nor the texts, `auto` has the one that it has without.

    Args:
      length: of the sequence.
      text_BT: which text each position is of: they do not see each other.

    Raises:
      InputError: where `attention` names a kernel that does not keep texts apart.
    """
    name, blocks = par.attention, functools.partial(_blocks, config.window, text_BT)
    if name == "blocks":
        return blocks
    if name.startswith("splash") and length % LANES == 0:
        kernel = functools.partial(_splash, config.window, name == "splash_interpreted")
    elif name == "cudnn" and text_BT is None:
        kernel = functools.partial(_cudnn, config.window)
    elif name == "cudnn" and config.attention == "cudnn":
        raise InputError(
            "config: attention is 'cudnn', which does not keep the texts of packed records apart; "
            "set it to 'auto'"
        )
    else:
        return blocks if name != "xla" and length > LONG else None
    run = _differentiable(kernel, par)

    def attend_all(q_BTHK: Array, k_BHSK: Array, v_BHSK: Array) -> Array:
        # Exact where the head size is a power of 4, as GPT-J's 256; else q is rounded once more.
        q_BHTK = jnp.moveaxis(q_BTHK * config.d_head**-0.5, 2, 1)
        return jnp.moveaxis(run(q_BHTK, k_BHSK, v_BHSK, text_BT), 1, 2)

    return attend_all


def _differentiable(kernel: Kernel, par: Parallel) -> Kernel:
    """`kernel` on every device's heads, with the gradient that it has itself.

    What it saves for the backward pass comes as its vjp, whose arrays stay where they are.
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

        found = par.on_blocks(both, inputs, (heads, saved))(q_BHTK, k_BHSK, v_BHSK, text_BT)
        return jax.tree.map(lambda x: checkpoint_name(x, ATTENDED), found)

    def backward(vjp: Any, g_BHTK: Array) -> tuple[Array | None, ...]:
        pull = par.on_blocks(lambda vjp, g: vjp(g), (saved, heads), (heads,) * 3)
        return (*pull(vjp, g_BHTK), None)

    run.defvjp(forward, backward)
    return run


def _splash(
    window: int, interpret: bool, q_BHTK: Array, k_BHSK: Array, v_BHSK: Array, text_BT: Array | None
) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    _, heads, length, _ = q_BHTK.shape
    block = next(each for each in SPLASH_BLOCKS if length % each == 0)
    mask = (
        masks.CausalMask((length, length))
        if window >= length
        else masks.LocalMask((length, length), (window - 1, 0), offset=0)
    )
    run = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernels.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    texts = None if text_BT is None else kernels.SegmentIds(text_BT, text_BT)
    return jax.vmap(run)(q_BHTK, k_BHSK, v_BHSK, texts)


def _blocks(
    window: int, text_BT: Array | None, q_BTHK: Array, k_BHSK: Array, v_BHSK: Array
) -> Array:
    """One block of queries after the other, each against the keys that some of it sees."""
    length, dtype = q_BTHK.shape[1], q_BTHK.dtype
    block = block_length(length)
    position_1T = jnp.arange(length)[None]
    # In f32, or the gradients of the blocks would be summed in the compute dtype.
    k_BHSK, v_BHSK = k_BHSK.astype(jnp.float32), v_BHSK.astype(jnp.float32)

    @functools.partial(jax.checkpoint, static_argnums=0)  # a block's weights are made once more
    def one(begin: int, q_BTHK: Array, k_BHSK: Array, v_BHSK: Array) -> Array:
        queries = slice(begin, begin + block)
        keys = slice(max(0, begin - window + 1), begin + block)
        bias_BHTS = causal_bias(position_1T[:, queries], position_1T[:, keys], window)
        if text_BT is not None:
            apart_BTS = text_BT[:, queries, None] != text_BT[:, None, keys]
            bias_BHTS = jnp.where(apart_BTS[:, None], MASKED, bias_BHTS)
        k_BHSK, v_BHSK = (x[:, :, keys].astype(dtype) for x in (k_BHSK, v_BHSK))
        return attend(q_BTHK[:, queries], k_BHSK, v_BHSK, bias_BHTS)

    found = [one(begin, q_BTHK, k_BHSK, v_BHSK) for begin in range(0, length, block)]
    return jnp.concatenate(found, axis=1)


def _cudnn(window: int, q_BHTK: Array, k_BHSK: Array, v_BHSK: Array, _: Array | None) -> Array:
    length = q_BHTK.shape[2]
    found_BTHK = jax.nn.dot_product_attention(
        *(jnp.moveaxis(x, 1, 2) for x in (q_BHTK, k_BHSK, v_BHSK)),
        scale=1.0,
        is_causal=True,
        local_window_size=(window - 1, 0) if window < length else None,
        implementation="cudnn",
    )
    return jnp.moveaxis(found_BTHK, 1, 2)
