"""What a training step moves, sends and keeps in memory, counted on paper.

`performance.plan` counts the same in the compiled step, and the time follows from either count by
`roofline.estimate`.  A count on paper is less exact, but fast enough to rank thousands of settings.
"""

import dataclasses
import functools
import math
from typing import Self

import jax

from mesh_transformer.config import Config
from mesh_transformer.mesh.accelerators import Hardware
from mesh_transformer.mesh.declaration import is_declaration
from mesh_transformer.model import flops, transformer
from mesh_transformer.model.attention import LANES, attention_backend, is_ring
from mesh_transformer.model.block_attention import block_length, block_pairs
from mesh_transformer.model.heads import key_heads, query_heads
from mesh_transformer.model.matrices import GROUP
from mesh_transformer.performance.roofline import Estimate, bytes_on_links, bytes_sent, estimate
from mesh_transformer.training.optimizer import Optimizer
from mesh_transformer.util import InputError

F32, BF16 = 4, 2  # bytes per element
LEAST_POSITIONS = 4096  # per device; with fewer, positions are not split


def estimate_step(config: Config, hardware: Hardware, devices: int) -> Estimate:
    """Estimate the time and memory of a config's training step on `devices` devices.

    mp is the config's `cores_per_replica`, cp its `context_parallel`, and dp is the number of
    devices divided by both.  What `offload` moves between devices and hosts is not counted.
    """
    dp, attention = devices // config.replica_devices, attention_on(config, hardware)
    tokens = tokens_per_replica(config)
    own = tokens // config.context_parallel
    links = mp_bytes(config, own, config.cores_per_replica) + dp_bytes(config, dp)
    return estimate(
        config,
        hardware,
        devices=dp * config.replica_devices,
        tokens=dp * tokens,
        peak_bytes=memory_bytes(config, devices, attention),
        hbm_traffic_bytes=_traffic(config, own, dp, attention),
        link_bytes=links + cp_bytes(config, own, _rings_on(config, hardware)),
        attention=attention,
    )


def tokens_per_replica(config: Config) -> int:
    """Return the number of tokens that a replica trains on in a step."""
    return config.per_replica_batch * config.seq * config.gradient_accumulation_steps


@dataclasses.dataclass(frozen=True)
class _Device:
    """Stand-in for a JAX device, with the attributes that `attention_backend` reads."""

    platform: str
    device_kind: str
    compute_capability: str

    @classmethod
    def of(cls, hardware: Hardware) -> Self:
        """Return the stand-in for a device of some hardware."""
        platform = "tpu" if hardware.kind.startswith("TPU") else "gpu"
        if hardware.kind == "cpu":
            platform = "cpu"
        capability = "8.0" if hardware.kind.startswith("A100") else "9.0"
        return cls(platform, hardware.kind, capability)


def attention_on(config: Config, hardware: Hardware) -> str:
    """Return the name of the attention backend that the config selects on `hardware`.

    The result is "xla" if the config names a backend that the hardware does not support, so that
    one table can compare all TPU generations.
    """
    try:
        return attention_backend(config, _Device.of(hardware), config.context_parallel)
    except InputError:
        return "xla"


def _rings_on(config: Config, hardware: Hardware) -> bool:
    try:
        return is_ring(config, _Device.of(hardware), config.context_parallel)
    except InputError:
        return True


def mp_bytes(config: Config, tokens: int, mp: int) -> int:
    """Return the bytes that a device sends over the mesh axis mp for its `tokens` tokens.

    Activations are all-reduced twice per layer (forward and backward), or four times if attention
    and feed-forward are sequential, once for the embedding, and once for the output head.  If they
    are sharded, the backward pass gathers a layer's inputs once more unless `remat` is none.
    """
    activations = tokens * config.d_model * _width(config)
    sums = config.layers * (2 if config.layer_kind.arrangement == "sequential" else 1)
    again = sums if config.shard_activations and config.remat != "none" else 0
    return (2 * sums + 2) * bytes_sent("all-reduce", activations, mp) + (
        again * bytes_sent("all-gather", activations, mp)
    )


def cp_bytes(config: Config, tokens: int, ring: bool) -> int:
    """Return the bytes that a device sends over the mesh axis cp for its `tokens` tokens in a step.

    They are counted once per link (`bytes_on_links`).  With a ring, keys and values go to every
    other device that needs them in each layer, in the forward and in the backward pass.  In the
    latter, their f32 gradients go with them, and then home in the compute dtype.  Without, heads of
    queries, keys, values and results are exchanged in the forward pass, and twice as many in the
    backward pass, which recomputes it.  The f32 gradients of the weights are summed once per
    microbatch.
    """
    cp, width = config.context_parallel, _width(config)
    if cp == 1:
        return 0
    queries, keys = query_heads(config, config.shards), key_heads(config, config.shards)
    keys = queries if config.copies_key_heads else keys
    if ring:
        block = block_length(config.seq, cp)
        shifts = [len(block_pairs(config.seq, block, w, cp)) - 1 for w in flops.windows(config)]
        passes = (2 * width + F32) * sum(shifts) + width * sum(map(bool, shifts))
        sent = bytes_on_links("collective-permute", 2 * tokens * keys * config.d_head * passes, cp)
    else:
        repeated = min(keys * cp // math.gcd(keys, cp), queries)
        moved = 2 * tokens * (queries + repeated) * config.d_head * width
        sent = bytes_on_links("all-to-all", 3 * config.layers * moved, cp)
    trained = 0 if config.lora_rank else F32 * _part(config) * config.gradient_accumulation_steps
    return sent + bytes_sent("all-reduce", trained, cp)


def _width(config: Config) -> int:
    """Return the bytes per element of the config's compute dtype."""
    return F32 if config.dtype == "float32" else BF16


def dp_bytes(config: Config, dp: int) -> int:
    """Return the bytes that a device sends over the mesh axis dp in a step.

    Without ZeRO, the f32 gradients are all-reduced once per step.  With ZeRO 1, the f32 gradients
    are reduce-scattered and the bf16 weights are all-gathered, once per step.  With ZeRO 3 both
    happen for every microbatch, with a second all-gather of the weights for the backward pass.
    """
    part, accumulation = _part(config), config.gradient_accumulation_steps
    if not config.zero:
        return bytes_sent("all-reduce", F32 * part, dp)
    scattered = bytes_sent("reduce-scatter", F32 * part // dp, dp)
    gathered = bytes_sent("all-gather", BF16 * part, dp)
    if config.zero == 1:
        return gathered + scattered
    return accumulation * (2 * gathered + scattered)


def _part(config: Config, ends: bool = True) -> int:
    """Return the parameters per device, before ZeRO splits them, without adapters.

    Unless `ends`, those of the embedding and the output head are left out.
    """
    declared = transformer.declarations(config)
    own = declared if ends else declared["layers"]
    return sum(
        math.prod(d.padded(config.shards)) // (config.cores_per_replica if "mp" in d.spec else 1)
        for d in jax.tree.leaves(own, is_leaf=is_declaration)
        if not d.adapter
    )


def _traffic(config: Config, tokens: int, dp: int, attention: str) -> int:
    """Estimate the bytes that a device reads from and writes to memory in a step.

    The step has `tokens` tokens per device.  This is a rule of thumb.  It counts:

    * per microbatch: the bf16 weights three times, and three f32 arrays of the same shape, to add
      the gradients to the gradient sum.
    * per step: f32 arrays of the parameters' shape, to read the gradients and to read and write the
      parameters and the optimizer's moments.  With Adam, these are seven.
    * per token and layer: 24 vectors of length d_model, and 12 vectors of length d_ff, which are
      split over mp.
    * per token and layer, unless attention uses a kernel: the f32 attention scores eight times,
      split over mp.
    """
    part, split = _part(config), dp if config.zero else 1
    microbatches = config.gradient_accumulation_steps * part * (3 * BF16 + 3 * F32)
    optimizer = F32 * int((3 + 2 * moments_per_parameter(config)) * part) // split
    mp = config.cores_per_replica
    wide = BF16 * (24 * config.d_model + 12 * config.d_ff // mp)
    scores = 8 * _scores(config, attention) // mp
    return microbatches + optimizer + config.layers * tokens * (wide + scores)


def _scores(config: Config, attention: str) -> int:
    """Return the bytes of one token's f32 attention scores in one layer, for all heads together.

    This is the mean over the layers, whose windows may differ.  The result is 0 for attention
    kernels, which never write the scores to memory.
    """
    if attention not in ("xla", "blocks"):
        return 0
    pairs = flops.attended_pairs(config, attention) // config.layers
    return F32 * config.n_heads * pairs // config.seq


@functools.lru_cache(maxsize=1)  # called twice per estimate
def moments_per_parameter(config: Config) -> float:
    """Return the number of entries in all of the optimizer's moments, divided by the parameters'.

    This is 2 for Adam.
    """
    config = config.merged()
    moments = Optimizer(config, transformer.declarations(config)).moments()
    entries = sum(math.prod(moment.shape) for moment in jax.tree.leaves(moments))
    return entries / flops.n_params(config)


def memory_bytes(config: Config, devices: int, attention: str) -> int:
    """Estimate the peak memory of a step in bytes per device.

    The peak is either in the backward pass or right before the update, whichever needs more
    memory.  Both include the parameters and the optimizer state.

    * The backward pass adds the weights in the compute dtype and everything saved for it.  It
      begins with the logits of a loss chunk (`_logit_bytes`).  The gradients of all layers
      (`_gradient_bytes`) and what it has in memory for a short time (`_transient_bytes`) take their
      place.  With several microbatches, it also adds the f32 gradient sum.  With ZeRO 3, weights
      and sum are split over dp.
    * The update adds the f32 gradients, and those of the largest parameter in the compute dtype.

    What `offload` keeps in host memory is not counted.  With LoRA, the state consists of the frozen
    weights in the compute dtype or with `frozen_bits`; adapters are not counted.

    Args:
      devices: number of devices; mp and cp are the config's.
      attention: attention backend, as `attention_backend` returns it.
    """
    mp, zero = config.cores_per_replica, config.zero or 0
    dp, part = devices // config.replica_devices, _part(config)
    tokens = config.per_replica_batch * config.seq // config.context_parallel
    activations = config.layers * tokens * saved_activation_bytes(config, attention)
    logits, transient = _logit_bytes(config), _transient_bytes(config, attention)
    if config.lora_rank:
        frozen = _width(config) * part
        if bits := config.frozen_bits:
            scales = BF16 / GROUP if bits == 4 else 0
            frozen -= int((_width(config) - bits / 8 - scales) * _part(config, ends=False))
        return frozen + activations + max(logits, transient)
    per_parameter = 0.0
    if config.offload != "params":
        per_parameter += BF16 if config.early_cast else F32
    if config.offload == "none":
        moment = BF16 if config.bf16_optimizer else F32
        per_parameter += moment * moments_per_parameter(config)
    state = int(per_parameter * part) // (dp if zero else 1)
    own = part // (dp if zero == 3 else 1)
    is_copied = zero == 1 or config.dtype == "bfloat16"
    weights, sums = _width(config) * own if is_copied else 0, F32 * own
    backward = weights + activations + max(logits, transient + _gradient_bytes(config, dp))
    if config.gradient_accumulation_steps > 1:
        return state + sums + backward
    largest = config.layers * config.d_model * config.d_ff // mp
    update = sums + (0 if zero else _width(config) * largest)
    return state + max(update, backward)


def _logit_bytes(config: Config) -> int:
    """Return the bytes of a loss chunk's f32 logits, and of their gradients in compute dtype."""
    own = config.seq // config.context_parallel
    positions = config.per_replica_batch * min(own, config.loss_chunk)
    return (F32 + _width(config)) * positions * config.n_vocab // config.cores_per_replica


def _gradient_bytes(config: Config, dp: int) -> int:
    """Return the bytes of one microbatch's gradients of all layers on one device.

    They are in the compute dtype, or with ZeRO 3 in f32 and split over the `dp` replicas.
    """
    part = _part(config, ends=False)
    return F32 * part // dp if config.zero == 3 else _width(config) * part


def _transient_bytes(config: Config, attention: str) -> int:
    """Estimate the bytes that the backward pass has in memory only for a short time.

    This is a rule of thumb.  While a layer's gradients are computed, these are per token three
    vectors of length d_model and five of length d_ff, the latter split over mp, and with the
    attention backend `xla` the f32 attention scores.  ZeRO 3 adds the layer's weights
    and their gradients in the compute dtype.  Afterwards, ZeRO 3 has two f32 gradients and one copy
    of the embedding in memory before they are split over dp.
    """
    mp, width = config.cores_per_replica, _width(config)
    vectors = width * (3 * config.d_model + 5 * config.d_ff // mp)
    scores = _scores(config, attention) // mp if attention == "xla" else 0
    tokens = config.per_replica_batch * config.seq // config.context_parallel
    layer = tokens * (vectors + scores)
    if config.zero != 3:
        return layer
    layer += 2 * _gradient_bytes(config.replace(zero=0), 1) // config.layers
    return max(layer, (2 * F32 + width) * config.n_vocab * config.d_model // mp)


def saved_activation_bytes(config: Config, attention: str) -> int:
    """Return the bytes per token that a device saves for the backward pass of one layer.

    The saved arrays depend on the config's `remat`:

    * "full": the layer's input, and in a sequential block also the input of the feed-forward.
    * "dots": as "full", and q, k, v and the hidden activations of the feed-forward block.
    * "none" without an attention kernel: all of "dots", the outputs of the heads, and the attention
      scores or, with `blocks`, one f32 sum per head.
    * "none" with an attention kernel: all of "dots", with k and v repeated for each head, the
      kernel's output twice and one f32 sum per head.  In a fused block also q, k and v a second
      time, and with `qk_norm` q and k before it.  Arrays of heads are padded on TPUs.

    With sharded activations, "none" also saves the inputs after their all-gather, so that the
    backward pass need not gather them again.
    """
    mp, width = config.cores_per_replica, _width(config)
    block, columns = config.layer_kind, flops.input_columns(config)
    inputs = 2 if block.arrangement == "sequential" else 1
    inputs += 2 * (config.norm_place != "before")  # the inputs of the norms after
    kept = inputs * config.d_model // (mp if config.shard_activations else 1) * width
    if config.remat == "full":
        return kept
    heads = config.shards * query_heads(config, config.shards) * config.d_head
    if config.remat == "dots":
        return kept + columns * width // mp
    if config.shard_activations:
        kept += inputs * config.d_model * width
    if attention == "xla":
        return kept + ((columns + heads) * width + _scores(config, attention)) // mp
    if attention == "blocks":
        return kept + ((columns + heads) * width + F32 * config.n_heads) // mp
    keys = config.shards * key_heads(config, config.shards) * config.d_head
    of_heads = 5 * heads + (heads + keys) * (config.qk_norm != "none")
    # The output of a fused matmul is saved as a whole, in addition to q, k and v.
    own = columns + of_heads - (0 if block.fused else heads + 2 * keys)
    if attention == "splash":  # a TPU stores the entries of a head in whole lanes
        own += of_heads // config.d_head * (-config.d_head % LANES)
    return kept + (own * width + F32 * config.n_heads) // mp


def context_sizes(seq: int, devices: int) -> list[int]:
    """Return the numbers of devices that are worth splitting the positions of a sequence over."""
    most = min(seq // LEAST_POSITIONS, devices)
    return [1, *(2**n for n in range(1, most.bit_length()))]


def sequences_per_step(config: Config) -> int:
    """Return a config's number of sequences per step, on all replicas together."""
    assert config.tpu_size is not None
    replicas = config.tpu_size // config.replica_devices
    return config.per_replica_batch * replicas * config.gradient_accumulation_steps
