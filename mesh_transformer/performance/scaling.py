"""Analytic estimates of a training step's compute time, memory and communication.

Nothing is compiled.  The estimates are less exact than those of `performance.plan`, which compiles
the step, but they are fast enough to rank thousands of settings.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

from mesh_transformer.config import Config
from mesh_transformer.mesh import accelerators
from mesh_transformer.mesh.accelerators import Hardware
from mesh_transformer.model import flops, transformer
from mesh_transformer.model.attention import attention_backend
from mesh_transformer.performance.roofline import bytes_sent, compute_seconds, link_seconds
from mesh_transformer.training.optimizer import Optimizer
from mesh_transformer.util import InputError

F32, BF16 = 4, 2  # bytes per element
GENERATIONS = ("v3", "v4", "v5e", "v5p", "v6e")
MP_SIZES = (1, 2, 4, 8, 16, 32)
DEVICES = (8, 32, 128, 512, 2048, 6144)
LARGEST_BATCH = 4


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """Analytic estimate of one training step.  Seconds and bytes are per device.

    Attributes:
      dp, mp: number of data-parallel replicas, and of devices per replica.
      accumulation: number of microbatches per step.
      compute_seconds: time for the FLOPs of the step at the hardware's peak.
      memory_seconds: time for the step's memory traffic at the full memory bandwidth.
      mp_bytes, dp_bytes: bytes that the device sends in collectives over mp, and in those over dp.
      mp_seconds, dp_seconds: time to send these bytes over the two links that a ring uses.
      memory_bytes: peak memory; see the function `memory_bytes`.
    """

    dp: int
    mp: int
    zero: int
    per_replica_batch: int
    accumulation: int
    compute_seconds: float
    memory_seconds: float
    mp_bytes: int
    mp_seconds: float
    dp_bytes: int
    dp_seconds: float
    memory_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of the step if computation, memory traffic and communication do not overlap."""
        return self.compute_seconds + self.memory_seconds + self.mp_seconds + self.dp_seconds

    @property
    def exchange(self) -> float:
        """Time of all communication between devices, divided by the compute time."""
        return (self.mp_seconds + self.dp_seconds) / self.compute_seconds


def estimate_step(config: Config, hardware: Hardware, devices: int) -> StepEstimate:
    """Estimate the time and memory of a config's training step on `devices` devices.

    mp is the config's `cores_per_replica`, and dp is the number of devices divided by mp.
    """
    mp, zero = config.cores_per_replica, config.zero or 0
    dp, accumulation = devices // mp, config.gradient_accumulation_steps
    tokens = config.per_replica_batch * config.seq * accumulation  # per replica
    part = flops.n_params(config) // mp
    mp_bytes = _mp_bytes(config, tokens, mp)
    dp_bytes = _dp_bytes(part, dp, zero, accumulation)
    attention = attention_on(config, hardware)
    compute = tokens / mp * compute_seconds(config, hardware, attention)
    traffic = _traffic(config, part, tokens, dp if zero else 1, attention)
    return StepEstimate(
        dp=dp,
        mp=mp,
        zero=zero,
        per_replica_batch=config.per_replica_batch,
        accumulation=accumulation,
        compute_seconds=compute,
        memory_seconds=traffic / hardware.hbm,
        mp_bytes=mp_bytes,
        mp_seconds=link_seconds(mp_bytes, hardware)[1],
        dp_bytes=dp_bytes,
        dp_seconds=link_seconds(dp_bytes, hardware)[1],
        memory_bytes=memory_bytes(config, devices, attention),
    )


@dataclasses.dataclass(frozen=True)
class _Device:
    """Stand-in for a JAX device, with the attributes that `attention_backend` reads."""

    platform: str
    device_kind: str
    compute_capability: str


def attention_on(config: Config, hardware: Hardware) -> str:
    """Return the name of the attention backend that the config selects on `hardware`.

    The result is "xla" if the config names a backend that the hardware does not support, so that
    one table can compare all TPU generations.
    """
    platform = "tpu" if hardware.kind.startswith("TPU") else "gpu"
    if hardware.kind == "cpu":
        platform = "cpu"
    capability = "8.0" if hardware.kind.startswith("A100") else "9.0"
    try:
        return attention_backend(config, _Device(platform, hardware.kind, capability))
    except InputError:
        return "xla"


def _mp_bytes(config: Config, tokens: int, mp: int) -> int:
    """Return the bytes that a device sends over the mesh axis mp for its replica's `tokens` tokens.

    Activations are all-reduced twice per layer (forward and backward), once for the embedding, and
    once for the output head.  If they are sharded, the backward pass gathers a layer's inputs once
    more unless `remat` is none.
    """
    activations = tokens * config.d_model * _width(config)
    again = config.layers if config.shard_activations and config.remat != "none" else 0
    return (2 * config.layers + 2) * bytes_sent("all-reduce", activations, mp) + (
        again * bytes_sent("all-gather", activations, mp)
    )


def _width(config: Config) -> int:
    """Return the bytes per element of the config's compute dtype."""
    return F32 if config.dtype == "float32" else BF16


def _dp_bytes(part: int, dp: int, zero: int, accumulation: int) -> int:
    """Return the bytes that a device sends over the mesh axis dp in a step.

    Without ZeRO, the f32 gradients are all-reduced once per step.  With ZeRO 1, the f32 gradients
    are reduce-scattered and the bf16 weights are all-gathered, once per step.  With ZeRO 3 both
    happen for every microbatch, with a second all-gather of the weights for the backward pass.

    Args:
      part: parameters per device, before ZeRO splits them.
      zero: ZeRO stage: 0 (none), 1 or 3.
      accumulation: number of microbatches per step.
    """
    if not zero:
        return bytes_sent("all-reduce", F32 * part, dp)
    scattered = bytes_sent("reduce-scatter", F32 * part // dp, dp)
    gathered = bytes_sent("all-gather", BF16 * part, dp)
    return accumulation * (2 * gathered + scattered) if zero == 3 else gathered + scattered


def _traffic(config: Config, part: int, tokens: int, split: int, attention: str) -> int:
    """Estimate the bytes that a device reads from and writes to memory in a step.

    This is a rule of thumb.  It counts:

    * per microbatch: the bf16 weights three times, and three f32 arrays of the same shape, to add
      the gradients to the gradient sum.
    * per step: f32 arrays of the parameters' shape, to read the gradients and to read and write the
      parameters and the optimizer's moments.  With Adam, these are seven.
    * per token and layer: 24 vectors of length d_model, and 12 vectors of length d_ff, which are
      split over mp.
    * per token and layer, unless attention uses a kernel: the f32 attention scores eight times,
      split over mp.

    Args:
      part: parameters per device, before ZeRO splits them.
      tokens: tokens per replica in one step.
      split: number of devices that ZeRO splits the optimizer state over.
      attention: attention backend, as `attention_backend` returns it.
    """
    microbatches = config.gradient_accumulation_steps * part * (3 * BF16 + 3 * F32)
    optimizer = F32 * int((3 + 2 * moments_per_parameter(config)) * part) // split
    mp = config.cores_per_replica
    wide = BF16 * (24 * config.d_model + 12 * config.d_ff // mp)
    scores = 8 * _scores(config, attention) // mp
    return microbatches + optimizer + config.layers * tokens * (wide + scores)


def _scores(config: Config, attention: str) -> int:
    """Return the bytes of one token's f32 attention scores in one layer, for all heads together.

    The result is 0 for attention kernels, which never write the scores to memory.
    """
    if attention not in ("xla", "blocks"):
        return 0
    return F32 * config.n_heads * flops.attended_pairs(config, attention) // config.seq


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

    * The backward pass adds the weights in the compute dtype, everything saved for it, the
      gradients of all layers (`_gradient_bytes`) and what it has in memory for a short time
      (`_transient_bytes`).  With several microbatches, it also adds the f32 gradient sum.  With
      ZeRO 3, weights and sum are split over dp.
    * The update adds the f32 gradients, and those of the largest parameter in the compute dtype.

    What `offload` keeps in host memory is not counted.  With LoRA, the state consists of the frozen
    weights in the compute dtype; adapters are not counted.

    Args:
      devices: number of devices; mp is the config's `cores_per_replica`.
      attention: attention backend, as `attention_backend` returns it.
    """
    mp, zero = config.cores_per_replica, config.zero or 0
    dp, part = devices // mp, flops.n_params(config) // mp
    tokens = config.per_replica_batch * config.seq
    activations = config.layers * tokens * saved_activation_bytes(config, attention)
    activations += _transient_bytes(config, attention)
    if config.lora_rank:
        return _width(config) * part + activations
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
    backward = weights + activations + _gradient_bytes(config, dp)
    if config.gradient_accumulation_steps > 1:
        return state + sums + backward
    largest = config.layers * config.d_model * config.d_ff // mp
    update = sums + (0 if zero else _width(config) * largest)
    return state + max(update, backward)


def _gradient_bytes(config: Config, dp: int) -> int:
    """Return the bytes of one microbatch's gradients of all layers on one device.

    They are in the compute dtype, or with ZeRO 3 in f32 and split over the `dp` replicas.
    """
    ends = (1 if config.tie_head else 2) * config.n_vocab * config.d_model
    part = (flops.n_params(config) - ends) // config.cores_per_replica
    return F32 * part // dp if config.zero == 3 else _width(config) * part


def _transient_bytes(config: Config, attention: str) -> int:
    """Estimate the bytes that the backward pass has in memory only for a short time.

    This is a rule of thumb.  While a layer's gradients are computed, these are per token three
    vectors of length d_model and five of length d_ff, the latter split over mp, and unless
    attention uses a kernel, the f32 attention scores.  ZeRO 3 adds the layer's weights
    and their gradients in the compute dtype.  Afterwards, ZeRO 3 has two f32 gradients and one copy
    of the embedding in memory before they are split over dp.
    """
    mp, width = config.cores_per_replica, _width(config)
    vectors = width * (3 * config.d_model + 5 * config.d_ff // mp)
    scores = _scores(config, attention) // mp
    layer = config.per_replica_batch * config.seq * (vectors + scores)
    if config.zero != 3:
        return layer
    layer += 2 * _gradient_bytes(config.replace(zero=0), 1) // config.layers
    return max(layer, (2 * F32 + width) * config.n_vocab * config.d_model // mp)


def saved_activation_bytes(config: Config, attention: str) -> int:
    """Return the bytes per token that a device saves for the backward pass of one layer.

    The saved arrays depend on the config's `remat`:

    * "full": the layer's input, and in a sequential block also the input of the feed-forward.
    * "dots": as "full", and q, k, v and the hidden activations of the feed-forward block.
    * "none" without an attention kernel: all of "dots", the attention scores and the outputs of the
      heads.
    * "none" with an attention kernel: all of "dots", the kernel's output twice and one f32 sum per
      head.  In a fused block also q, k and v a second time.

    With sharded activations, "none" also saves the inputs after their all-gather, so that the
    backward pass need not gather them again.
    """
    mp, width = config.cores_per_replica, _width(config)
    block, columns = config.layer_kind, flops.input_columns(config)
    inputs = 2 if block.arrangement == "sequential" else 1
    kept = inputs * config.d_model // (mp if config.shard_activations else 1) * width
    if config.remat == "full":
        return kept
    heads = config.n_heads * config.d_head
    if config.remat == "dots":
        return kept + columns * width // mp
    if config.shard_activations:
        kept += inputs * config.d_model * width
    if attention in ("xla", "blocks"):
        return kept + ((columns + heads) * width + _scores(config, attention)) // mp
    # The output of a fused matmul is saved as a whole, in addition to q, k and v.
    own = columns + (2 + 3 * block.fused) * heads
    return kept + (own * width + F32 * config.n_heads) // mp


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Communication time compared with compute time, for growing mp and dp.

    mp is the number of devices per replica, and dp the number of replicas.

    Attributes:
      generation, mp, sequences: TPU generation, mp and sequences per step that all estimates in
        `steps` share.
      mp_shares: maps each TPU generation to one value per entry of `mp_sizes`: the time of
        communication over mp, divided by the compute time.
      zeros: ZeRO stages.
      break_even_tokens: maps each TPU generation to one value per entry of `zeros`: the number of
        tokens per replica for which communication over dp takes as long as computation.  Tokens are
        counted per step for ZeRO 0 and 1, and per microbatch for ZeRO 3.  The values assume many
        replicas.  They do not depend on mp.
      steps: one list per number of devices, with one estimate per entry of `zeros`.
    """

    parameters: int
    seq: int
    remat: str
    generation: str
    mp: int
    sequences: int
    mp_sizes: tuple[int, ...]
    mp_shares: dict[str, list[float]]
    zeros: tuple[int, ...]
    break_even_tokens: dict[str, list[float]]
    steps: list[list[StepEstimate]]

    def table(self) -> str:
        """Format the results as three Markdown tables.

        The first table gives the communication time for each mp, the second gives the break-even
        tokens for each ZeRO stage, and the third gives the estimates for each number of devices.
        """
        head = f"{self.parameters / 1e9:.1f}B parameters, sequence {self.seq}, "
        head += f"remat {self.remat}; link time over compute time"
        columns = ["devices", "dp", "batch x micro", "compute s", "mp links s"]
        columns += [f"ZeRO {zero}: dp links s, GB sent" for zero in self.zeros]
        return "\n\n".join(
            (
                f"{head}, for mp only:",
                _by_generation("mp", self.mp_sizes, self.mp_shares, ".2f"),
                "Tokens per replica at which dp's links take as long as computing (per step with "
                "ZeRO 0 and 1, per microbatch with ZeRO 3):",
                _by_generation("ZeRO", self.zeros, self.break_even_tokens, ",.0f"),
                f"{self.generation}, mp {self.mp}, {self.sequences} sequences per step on any "
                "number of devices:",
                _table(columns, [_step_cells(estimates) for estimates in self.steps]),
            )
        )


def scaling_of(config: Config, generation: str, sequences: int) -> Scaling:
    """Estimate communication and compute times of a config on several TPU generations.

    Args:
      config: its `cores_per_replica` is the mp of `Scaling.steps`.
      generation: TPU generation of `Scaling.steps`.
      sequences: sequences per step in `Scaling.steps`, for any number of devices.
    """
    zeros = (0, 1, 3)
    steps = _by_devices(config, generation, sequences, zeros)
    return Scaling(
        parameters=flops.n_params(config),
        seq=config.seq,
        remat=config.remat,
        generation=generation,
        mp=config.cores_per_replica,
        sequences=sequences,
        mp_sizes=MP_SIZES,
        mp_shares={name: [_mp_share(config, name, mp) for mp in MP_SIZES] for name in GENERATIONS},
        zeros=zeros,
        break_even_tokens={
            name: [_break_even(config, name, zero) for zero in zeros] for name in GENERATIONS
        },
        steps=steps,
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _by_generation(
    name: str, sizes: Sequence[int], values: dict[str, list[float]], form: str
) -> str:
    """Format a Markdown table with one row per size and one column per TPU generation.

    Args:
      name: title of the column of sizes.
      values: for each TPU generation, one value per size.
      form: format specification of the values, such as ".2f".
    """
    rows = [
        [str(size), *(format(column[index], form) for column in values.values())]
        for index, size in enumerate(sizes)
    ]
    return _table([name, *values], rows)


def _step_cells(estimates: list[StepEstimate]) -> list[str]:
    """Format the table cells for one number of devices.

    Args:
      estimates: the estimates for this number of devices, one per ZeRO stage.
    """
    first = estimates[0]
    return [
        str(first.dp * first.mp),
        str(first.dp),
        f"{first.per_replica_batch} x {first.accumulation}",
        f"{first.compute_seconds:.2f}",
        f"{first.mp_seconds:.2f}",
        *(f"{estimate.dp_seconds:.2f}, {estimate.dp_bytes / 1e9:,.1f}" for estimate in estimates),
    ]


def _mp_share(config: Config, generation: str, mp: int) -> float:
    """Return the estimated time of communication over mp, divided by the compute time."""
    hardware = accelerators.hardware(generation)
    seconds = link_seconds(_mp_bytes(config, 1, mp), hardware)[1]
    return seconds * mp / compute_seconds(config, hardware, attention_on(config, hardware))


def _break_even(config: Config, generation: str, zero: int) -> float:
    """Return the tokens per replica for which communication over dp takes as long as computation.

    See `Scaling.break_even_tokens`.
    """
    hardware = accelerators.hardware(generation)
    sent_bytes = {0: 2 * F32, 1: BF16 + F32, 3: 2 * BF16 + F32}[zero] * flops.n_params(config)
    seconds = link_seconds(sent_bytes, hardware)[1]
    return seconds / compute_seconds(config, hardware, attention_on(config, hardware))


def sequences_per_step(config: Config) -> int:
    """Return a config's number of sequences per step, on all replicas together."""
    assert config.tpu_size is not None
    replicas = config.tpu_size // config.cores_per_replica
    return config.per_replica_batch * replicas * config.gradient_accumulation_steps


def _by_devices(
    config: Config, generation: str, sequences: int, zeros: Sequence[int]
) -> list[list[StepEstimate]]:
    """Estimate a step for each number of devices in `DEVICES` and each ZeRO stage in `zeros`.

    Numbers of devices for which dp does not divide `sequences` are left out.

    Returns:
      One list per number of devices, with one estimate per ZeRO stage.
    """
    hardware = accelerators.hardware(generation)
    steps = []
    for devices in DEVICES:
        dp = devices // config.cores_per_replica
        share = sequences // max(dp, 1)  # per replica
        if not dp or sequences % dp:
            continue
        batch = max(size for size in range(1, LARGEST_BATCH + 1) if share % size == 0)
        changed = config.replace(
            tpu_size=devices, per_replica_batch=batch, gradient_accumulation_steps=share // batch
        )
        steps.append(
            [estimate_step(changed.replace(zero=zero), hardware, devices) for zero in zeros]
        )
    return steps
