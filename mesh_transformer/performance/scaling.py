"""Analytic estimates ("on paper") of a training step's compute, memory and communication.

Nothing is compiled.  The estimates are less exact than a plan, which counts in the compiled
program, but cheap enough to rank thousands of settings.
"""

import dataclasses
from collections.abc import Sequence

from mesh_transformer.config import Config
from mesh_transformer.mesh import accelerators
from mesh_transformer.mesh.accelerators import Hardware
from mesh_transformer.model import flops
from mesh_transformer.model.attention import attention_backend
from mesh_transformer.performance.roofline import link_seconds, sent
from mesh_transformer.util import InputError

F32, BF16 = 4, 2  # bytes per element
GENERATIONS = ("v3", "v4", "v5e", "v5p", "v6e")
MP_SIZES = (1, 2, 4, 8, 16, 32)
DEVICES = (8, 32, 128, 512, 2048, 6144)
LARGEST_BATCH = 4


@dataclasses.dataclass(frozen=True)
class Paper:
    """Estimate of one training step.  Seconds and bytes are per device.

    Attributes:
      mp_bytes, dp_bytes: sent over the links, by collectives over mp and over dp.
      mp_seconds, dp_seconds: to send these with the two links of a ring busy.
      memory_bytes: lower bound of the memory needed.
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
        """Seconds of the step if nothing overlaps."""
        return self.compute_seconds + self.memory_seconds + self.mp_seconds + self.dp_seconds

    @property
    def exchange(self) -> float:
        """Link time over compute time."""
        return (self.mp_seconds + self.dp_seconds) / self.compute_seconds


def on_paper(config: Config, hardware: Hardware, devices: int) -> Paper:
    """Estimate a config's training step on `devices` devices; its `cores_per_replica` is mp."""
    mp, zero = config.cores_per_replica, config.zero or 0
    dp, accumulation = devices // mp, config.gradient_accumulation_steps
    tokens = config.per_replica_batch * config.seq * accumulation  # per replica
    part = flops.n_params(config) // mp
    mp_bytes = _mp_bytes(config, tokens, mp)
    dp_bytes = _dp_bytes(part, dp, zero, accumulation)
    attention = attention_on(config, hardware)
    compute = tokens * flops.hardware_flops_per_token(config, attention) / (hardware.peak * mp)
    traffic = _traffic(config, part, tokens, dp if zero else 1, attention)
    return Paper(
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
        memory_bytes=_peak_memory(config, part, dp, attention),
    )


@dataclasses.dataclass(frozen=True)
class _Device:
    """The attributes of a device that `attention_backend` reads."""

    platform: str
    device_kind: str
    compute_capability: str


def attention_on(config: Config, hardware: Hardware) -> str:
    """Return the attention backend of such devices, as `attention_backend` names it.

    "xla" if the backend that the config names is not available on them, so that a table of
    several generations covers these devices too.
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
    """Return the bytes that a device sends over mp for so many tokens.

    Activations are all-reduced once per layer and direction, for the embedding, and for the head.
    """
    activations = tokens * config.d_model * _width(config)
    return (2 * config.layers + 2) * sent("all-reduce", activations, mp)


def _width(config: Config) -> int:
    """Return the bytes per element of the compute dtype."""
    return F32 if config.dtype == "float32" else BF16


def _dp_bytes(part: int, dp: int, zero: int, accumulation: int) -> int:
    """Return the bytes that a device sends over dp in a step.

    Gradients are summed in f32 once per step; with ZeRO 3 once per microbatch, with two
    all-gathers of the weights, which the backward pass needs again.

    Args:
      part: parameters per device, before ZeRO splits them.
    """
    if not zero:
        return sent("all-reduce", F32 * part, dp)
    scattered = sent("reduce-scatter", F32 * part // dp, dp)
    gathered = sent("all-gather", BF16 * part, dp)
    return accumulation * (2 * gathered + scattered) if zero == 3 else gathered + scattered


def _traffic(config: Config, part: int, tokens: int, split: int, attention: str) -> int:
    """Return the bytes that a step reads from and writes to memory, by a rule of thumb.

    Per microbatch: the weights three times, and the gradient sum read and written.  Per step:
    parameters and moments read and written once.  Per token and layer: 24 arrays of width d_model
    and, split over mp, 12 of width d_ff and, without an attention kernel, 8 of f32 scores.

    Args:
      part: parameters per device, before ZeRO splits them.
      tokens: tokens per replica and step.
      split: number of devices that ZeRO splits the optimizer state over.
    """
    microbatches = config.gradient_accumulation_steps * part * (3 * BF16 + 3 * F32)
    optimizer = 7 * F32 * part // split
    mp = config.cores_per_replica
    wide = BF16 * (24 * config.d_model + 12 * config.d_ff // mp)
    scores = 8 * _scores(config, attention) // mp
    return microbatches + optimizer + config.layers * tokens * (wide + scores)


def _scores(config: Config, attention: str) -> int:
    """Return the bytes of a token's f32 attention scores in a layer, for all heads.

    0 for kernels, which never write them to memory.
    """
    if attention not in ("xla", "blocks"):
        return 0
    return F32 * config.n_heads * flops.attended_pairs(config, attention) // config.seq


def _peak_memory(config: Config, part: int, dp: int, attention: str) -> int:
    """Return the larger of the memory at the end of the forward pass and before the update.

    Both include the state.  The forward pass ends with the weights in the compute dtype and
    everything saved for the backward pass; the update begins with the gradients in f32.  With
    several microbatches the gradient sums are also held during the forward pass.

    Args:
      part: parameters per device, before ZeRO splits them.
    """
    zero = config.zero or 0
    state = (F32 + 2 * (BF16 if config.bf16_optimizer else F32)) * part // (dp if zero else 1)
    is_copied = zero == 1 or (zero == 0 and config.dtype == "bfloat16")
    weights = _width(config) * part if is_copied else 0
    sums = F32 * part // (dp if zero == 3 else 1)
    tokens = config.per_replica_batch * config.seq
    forward = weights + config.layers * tokens * kept_of_a_layer(config, attention)
    if config.gradient_accumulation_steps > 1:
        return state + sums + forward
    return state + max(sums, forward)


def kept_of_a_layer(config: Config, attention: str) -> int:
    """Return the bytes per token that a device saves for the backward pass of a layer.

    `remat` "full" saves only the layer's input.  "dots" adds the outputs of the input matmuls:
    q, k, v and the feed-forward's hidden activations.  "none" adds the attention scores and the
    heads' outputs, or for a kernel its three inputs, its output twice and a sum per row; with
    sharded activations also the gathered input, so that it is not gathered again.
    """
    mp, width = config.cores_per_replica, _width(config)
    kept = config.d_model // (mp if config.shard_activations else 1) * width
    if config.remat == "full":
        return kept
    heads = config.n_heads * config.d_head
    fused = config.block == "geglu"
    hidden = config.d_ff * (2 if fused else 1)
    if config.remat == "dots":
        return kept + (3 * heads + hidden) * width // mp
    if config.shard_activations:
        kept += config.d_model * width
    if attention in ("xla", "blocks"):
        return kept + ((4 * heads + hidden) * width + _scores(config, attention)) // mp
    # The output of a fused matmul is saved as a whole, with q, k and v once more.
    own = (5 + 3 * fused) * heads + hidden
    return kept + (own * width + F32 * config.n_heads) // mp


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Communication compared with compute, for growing mp and dp.

    Attributes:
      generation, mp, sequences: TPU generation, mp and sequences per step of `steps`, the same
        for every number of devices.
      mp_shares: link time of mp over compute time, per generation for each of `mp_sizes`.
      break_even_tokens: tokens per replica at which dp's links take as long as computing, per
        generation for each of `zeros`: per step with ZeRO 0 and 1, per microbatch with ZeRO 3.
        They assume many replicas.  mp does not matter, as it divides both times.
      steps: for each number of devices, one step per entry of `zeros`.
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
    steps: list[list[Paper]]

    def table(self) -> str:
        """Format Markdown tables: by mp, by tokens per replica, and by number of devices."""
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
                _table(columns, [_step_cells(papers) for papers in self.steps]),
            )
        )


def scaling_of(config: Config, generation: str, sequences: int) -> Scaling:
    """Compare communication with compute for a config with `sequences` sequences per step.

    Args:
      config: its `cores_per_replica` is mp.
      generation: TPU generation of the table by devices.
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
    """Format a table with one row per size and one column per TPU generation."""
    rows = [
        [str(size), *(format(column[index], form) for column in values.values())]
        for index, size in enumerate(sizes)
    ]
    return _table([name, *values], rows)


def _step_cells(papers: list[Paper]) -> list[str]:
    """Format the table's row for one number of devices."""
    first = papers[0]
    return [
        str(first.dp * first.mp),
        str(first.dp),
        f"{first.per_replica_batch} x {first.accumulation}",
        f"{first.compute_seconds:.2f}",
        f"{first.mp_seconds:.2f}",
        *(f"{paper.dp_seconds:.2f}, {paper.dp_bytes / 1e9:,.1f}" for paper in papers),
    ]


def _mp_share(config: Config, generation: str, mp: int) -> float:
    """Return mp's link time over compute time."""
    hardware = accelerators.hardware(generation)
    seconds = link_seconds(_mp_bytes(config, 1, mp), hardware)[1]
    return seconds * hardware.peak * mp / _flops_per_token(config, hardware)


def _break_even(config: Config, generation: str, zero: int) -> float:
    """Return the tokens per replica at which dp's links take as long as computing."""
    hardware = accelerators.hardware(generation)
    sent_bytes = {0: 2 * F32, 1: BF16 + F32, 3: 2 * BF16 + F32}[zero] * flops.n_params(config)
    seconds = link_seconds(sent_bytes, hardware)[1]
    return seconds * hardware.peak / _flops_per_token(config, hardware)


def _flops_per_token(config: Config, hardware: Hardware) -> int:
    """Return the FLOPs that a training step executes per token."""
    return flops.hardware_flops_per_token(config, attention_on(config, hardware))


def sequences_a_step(config: Config) -> int:
    """Return the number of sequences per step on all replicas of a config."""
    assert config.tpu_size is not None
    replicas = config.tpu_size // config.cores_per_replica
    return config.per_replica_batch * replicas * config.gradient_accumulation_steps


def _by_devices(
    config: Config, generation: str, sequences: int, zeros: Sequence[int]
) -> list[list[Paper]]:
    """Estimate a step with each of `zeros`, for all `DEVICES` whose dp divides `sequences`."""
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
        steps.append([on_paper(changed.replace(zero=zero), hardware, devices) for zero in zeros])
    return steps
