"""Attention over whole sequences that never holds all of its weights at once.

The kernels are others': splash attention on TPUs, cuDNN's on GPUs.  `chosen` says once a program
what its devices compute, `attend` makes that of one batch.

Array names end in their shape: B batch, T query, S key, H heads this program sees, K head size.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.config import Config
from mesh_transformer.mesh.parallel import Axes, Parallel
from mesh_transformer.model.attention import LANES, MASKED, Attend, block_length, causal_bias
from mesh_transformer.model.attention import attend as plain
from mesh_transformer.util import InputError

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


def chosen(config: Config, device: Device) -> str:
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


def attend(config: Config, par: Parallel, length: int, text_BT: Array | None) -> Attend | None:
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
        return plain(q_BTHK[:, queries], k_BHSK, v_BHSK, bias_BHTS)

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
