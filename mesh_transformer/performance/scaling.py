"""What a training step computes and exchanges as dp and mp grow, on paper: nothing is compiled.

Less exact than a plan, which counts in the compiled program, and so cheap that thousands of
settings can be put in order.
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

F32, BF16 = 4, 2
GENERATIONS = ("v3", "v4", "v5e", "v5p", "v6e")
MP_SIZES = (1, 2, 4, 8, 16, 32)
DEVICES = (8, 32, 128, 512, 2048, 6144)
LARGEST_BATCH = 4


@dataclasses.dataclass(frozen=True)
class Paper:
    """One step of one device, in seconds and in bytes sent.

    Attributes:
      mp_seconds, dp_seconds: with the two links of a ring busy.
      memory_bytes: what it has to hold at least.
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
        """Of the step, where nothing overlaps."""
        return self.compute_seconds + self.memory_seconds + self.mp_seconds + self.dp_seconds

    @property
    def exchange(self) -> float:
        """Seconds of the links over seconds of computing."""
        return (self.mp_seconds + self.dp_seconds) / self.compute_seconds


def on_paper(config: Config, hardware: Hardware, devices: int) -> Paper:
    """The config's step on so many devices; its `cores_per_replica` is mp."""
    mp, zero = config.cores_per_replica, config.zero or 0
    dp, accumulation = devices // mp, config.gradient_accumulation_steps
    tokens = config.per_replica_batch * config.seq * accumulation  # of a replica
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
        memory_bytes=_held(config, part, dp, attention),
    )


@dataclasses.dataclass(frozen=True)
class _Device:
    """What `flash_attention.chosen` reads of a device."""

    platform: str
    device_kind: str
    compute_capability: str


def attention_on(config: Config, hardware: Hardware) -> str:
    """How such devices compute attention, as `flash_attention.chosen` names it.

    Where they cannot have what the config names, as some of a table of generations: XLA's.
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
    """An all-reduce of the activations a layer each way; the embedding's and the head's."""
    each = tokens * config.d_model * _width(config)
    return (2 * config.layers + 2) * sent("all-reduce", each, mp)


def _width(config: Config) -> int:
    """Bytes of a number in the compute dtype."""
    return F32 if config.dtype == "float32" else BF16


def _dp_bytes(part: int, dp: int, zero: int, accumulation: int) -> int:
    """Gradients are summed in f32, once a step; with ZeRO 3 in every microbatch, with two gathers
    of the weights (the backward pass needs them again)."""
    if not zero:
        return sent("all-reduce", F32 * part, dp)
    scattered = sent("reduce-scatter", F32 * part // dp, dp)
    gathered = sent("all-gather", BF16 * part, dp)
    return accumulation * (2 * gathered + scattered) if zero == 3 else gathered + scattered


def _traffic(config: Config, part: int, tokens: int, split: int, attention: str) -> int:
    """Bytes of memory that a step reads and writes, by rule of thumb.

    The weights three times a microbatch, the gradients' sums read and written, parameters and
    moments read and written once; of each token and layer some 24 arrays as wide as the model and
    what is split over mp: 12 as wide as d_ff and, without a kernel, 8 of scores in f32.
    """
    microbatches = config.gradient_accumulation_steps * part * (3 * BF16 + 3 * F32)
    optimizer = 7 * F32 * part // split
    mp = config.cores_per_replica
    wide = BF16 * (24 * config.d_model + 12 * config.d_ff // mp)
    scores = 8 * _scores(config, attention) // mp
    return microbatches + optimizer + config.layers * tokens * (wide + scores)


def _scores(config: Config, attention: str) -> int:
    """Bytes of one token's scores of all heads in a layer, f32; a kernel never writes them."""
    if attention not in ("xla", "blocks"):
        return 0
    return F32 * config.n_heads * flops.attended_pairs(config, attention) // config.seq


def _held(config: Config, part: int, dp: int, attention: str) -> int:
    """The larger of what the forward pass ends with and what the update begins with.

    The one has the weights in the compute dtype and all that the backward pass needs, the other
    the gradients in f32; both have the state.  Of several microbatches the gradients' sums are
    there beside the forward pass as well.
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
    """Bytes of each token that one device keeps of a layer for its backward pass (`remat`).

    Always its input, once more where that is gathered and no word is to be said twice; then what
    the matrices gave: q, k, v and the feed-forward's; then attention's scores and what the heads
    attended to.  A kernel keeps its three inputs, what it gave (twice) and a sum of each row.
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
    # Of a fused matrix q, k and v cannot be dropped by themselves.
    own = (5 + 3 * fused) * heads + hidden
    return kept + (own * width + F32 * config.n_heads) // mp


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Where each setting of a config stops paying.

    Attributes:
      generation, mp, sequences: of `steps`; so many sequences a step, whatever the devices.
      mp_shares: seconds of mp's links over those of computing, on each generation for each of
        `mp_sizes`.
      break_even_tokens: of a replica, with which dp's links take as long as computing, on each
        generation for each of `zeros`: a step's with ZeRO 0 and 1, a microbatch's with ZeRO 3.
        They are those of many replicas; mp splits both, and does not matter.
      steps: for each number of devices a step with each of `zeros`.
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
        """Tables in Markdown: by mp, by tokens of a replica, and by devices."""
        head = f"{self.parameters / 1e9:.1f}B parameters, sequence {self.seq}, "
        head += f"remat {self.remat}; seconds of the links over seconds of computing"
        columns = ["devices", "dp", "batch x micro", "compute s", "mp links s"]
        columns += [f"ZeRO {zero}: dp links s, GB sent" for zero in self.zeros]
        return "\n\n".join(
            (
                f"{head}, for mp alone:",
                _by_generation("mp", self.mp_sizes, self.mp_shares, ".2f"),
                "Tokens of a replica with which dp's links take as long as computing (a step's "
                "tokens with ZeRO 0 and 1, a microbatch's with ZeRO 3):",
                _by_generation("ZeRO", self.zeros, self.break_even_tokens, ",.0f"),
                f"{self.generation}, mp {self.mp}, {self.sequences} sequences a step on however "
                "many devices:",
                _table(columns, [_step_cells(papers) for papers in self.steps]),
            )
        )


def scaling_of(config: Config, generation: str, sequences: int) -> Scaling:
    """Of a config whose `cores_per_replica` is mp, with so many sequences a step."""
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
        mp_shares={each: [_mp_share(config, each, mp) for mp in MP_SIZES] for each in GENERATIONS},
        zeros=zeros,
        break_even_tokens={
            each: [_break_even(config, each, zero) for zero in zeros] for each in GENERATIONS
        },
        steps=steps,
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _by_generation(
    name: str, sizes: Sequence[int], values: dict[str, list[float]], form: str
) -> str:
    rows = [
        [str(size), *(format(of_one[place], form) for of_one in values.values())]
        for place, size in enumerate(sizes)
    ]
    return _table([name, *values], rows)


def _step_cells(papers: list[Paper]) -> list[str]:
    """Of one number of devices."""
    one = papers[0]
    return [
        str(one.dp * one.mp),
        str(one.dp),
        f"{one.per_replica_batch} x {one.accumulation}",
        f"{one.compute_seconds:.2f}",
        f"{one.mp_seconds:.2f}",
        *(f"{each.dp_seconds:.2f}, {each.dp_bytes / 1e9:,.1f}" for each in papers),
    ]


def _mp_share(config: Config, generation: str, mp: int) -> float:
    hardware = accelerators.hardware(generation)
    seconds = link_seconds(_mp_bytes(config, 1, mp), hardware)[1]
    return seconds * hardware.peak * mp / _computing(config, hardware)


def _break_even(config: Config, generation: str, zero: int) -> float:
    hardware = accelerators.hardware(generation)
    sent_bytes = {0: 2 * F32, 1: BF16 + F32, 3: 2 * BF16 + F32}[zero] * flops.n_params(config)
    seconds = link_seconds(sent_bytes, hardware)[1]
    return seconds * hardware.peak / _computing(config, hardware)


def _computing(config: Config, hardware: Hardware) -> int:
    """FLOPs of a token."""
    return flops.hardware_flops_per_token(config, attention_on(config, hardware))


def sequences_a_step(config: Config) -> int:
    """Of all replicas, as the config stands."""
    assert config.tpu_size is not None
    replicas = config.tpu_size // config.cores_per_replica
    return config.per_replica_batch * replicas * config.gradient_accumulation_steps


def _by_devices(
    config: Config, generation: str, sequences: int, zeros: Sequence[int]
) -> list[list[Paper]]:
    hardware = accelerators.hardware(generation)
    steps = []
    for devices in DEVICES:
        dp = devices // config.cores_per_replica
        own = sequences // max(dp, 1)  # of a replica
        if not dp or sequences % dp:
            continue
        batch = max(size for size in range(1, LARGEST_BATCH + 1) if own % size == 0)
        of_it = config.replace(
            tpu_size=devices, per_replica_batch=batch, gradient_accumulation_steps=own // batch
        )
        steps.append([on_paper(of_it.replace(zero=zero), hardware, devices) for zero in zeros])
    return steps
