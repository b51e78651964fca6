"""What a training step computes and exchanges as dp and mp grow, on paper: nothing is compiled.

Less exact than a plan, which counts in the compiled program, and so cheap that thousands of
settings can be put in order.
"""

import dataclasses

from mesh_transformer import flops
from mesh_transformer.config import Config
from mesh_transformer.flops import Hardware
from mesh_transformer.roofline import link_seconds, sent

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
    compute = tokens * flops.hardware_flops_per_token(config) / (hardware.peak * mp)
    return Paper(
        dp=dp,
        mp=mp,
        zero=zero,
        per_replica_batch=config.per_replica_batch,
        accumulation=accumulation,
        compute_seconds=compute,
        memory_seconds=_traffic(config, part, tokens, dp if zero else 1) / hardware.hbm,
        mp_bytes=mp_bytes,
        mp_seconds=link_seconds(mp_bytes, hardware)[1],
        dp_bytes=dp_bytes,
        dp_seconds=link_seconds(dp_bytes, hardware)[1],
        memory_bytes=_held(config, part, dp),
    )


def _mp_bytes(config: Config, tokens: int, mp: int) -> int:
    """An all-reduce of the activations a layer each way; the embedding's and the head's."""
    each = tokens * config.d_model * (F32 if config.dtype == "float32" else BF16)
    return (2 * config.layers + 2) * sent("all-reduce", each, mp)


def _dp_bytes(part: int, dp: int, zero: int, accumulation: int) -> int:
    """Gradients are summed in f32, once a step; with ZeRO 3 in every microbatch, with two gathers
    of the weights (the backward pass needs them again)."""
    if not zero:
        return sent("all-reduce", F32 * part, dp)
    scattered = sent("reduce-scatter", F32 * part // dp, dp)
    gathered = sent("all-gather", BF16 * part, dp)
    return accumulation * (2 * gathered + scattered) if zero == 3 else gathered + scattered


def _traffic(config: Config, part: int, tokens: int, split: int) -> int:
    """Bytes of memory that a step reads and writes, by rule of thumb.

    The weights three times a microbatch, the gradients' sums read and written, parameters and
    moments read and written once; of each token and layer some 24 arrays as wide as the model and
    what is split over mp: 12 as wide as d_ff and 8 of scores in f32.
    """
    microbatches = config.gradient_accumulation_steps * part * (3 * BF16 + 3 * F32)
    optimizer = 7 * F32 * part // split
    mp = config.cores_per_replica
    wide = BF16 * (24 * config.d_model + 12 * config.d_ff // mp)
    scores = 8 * F32 * config.n_heads * config.seq // mp
    return microbatches + optimizer + config.layers * tokens * (wide + scores)


def _held(config: Config, part: int, dp: int) -> int:
    """State, weights in the compute dtype, gradients' sums, and what the backward pass needs."""
    mp, zero = config.cores_per_replica, config.zero or 0
    state = (F32 + 2 * (BF16 if config.bf16_optimizer else F32)) * part // (dp if zero else 1)
    weights = 0 if zero == 3 else BF16 * part
    sums = F32 * part // (dp if zero == 3 else 1)
    if config.gradient_accumulation_steps == 1:
        sums = 0  # each is used up as it comes
    heads = config.n_heads * config.d_head
    saved = {
        "full": config.d_model,
        "dots": 3 * config.d_model + (3 * heads + config.d_ff) // mp,
        "none": 3 * config.d_model + (4 * heads + config.d_ff) // mp,
    }[config.remat]
    scores = config.n_heads * config.seq // mp if config.remat == "none" else 0
    tokens = config.per_replica_batch * config.seq
    if config.shard_activations:
        saved -= config.d_model - config.d_model // mp
    return state + weights + sums + config.layers * tokens * BF16 * (saved + scores)


def markdown(config: Config, generation: str) -> str:
    """Where each setting stops paying: tables by mp, by tokens of a replica, and by devices."""
    head = f"{flops.n_params(config) / 1e9:.1f}B parameters, sequence {config.seq}, "
    head += f"remat {config.remat}; seconds of the links over seconds of computing"
    return "\n\n".join(
        (
            f"{head}, for mp alone:",
            _table(("mp", *GENERATIONS), [_by_mp(config, mp) for mp in MP_SIZES]),
            "Tokens of a replica with which dp's links take as long as computing (a step's tokens "
            "with ZeRO 0 and 1, a microbatch's with ZeRO 3):",
            _table(("ZeRO", *GENERATIONS), [_break_even(config, zero) for zero in (0, 1, 3)]),
            f"{generation}, mp {config.cores_per_replica}, {sequences_a_step(config)} sequences a "
            "step on however many devices:",
            _table(
                (
                    "devices",
                    "dp",
                    "batch x micro",
                    "compute s",
                    "mp links s",
                    *(f"ZeRO {zero}: dp links s, GB sent" for zero in (0, 1, 3)),
                ),
                _by_devices(config, generation),
            ),
        )
    )


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _by_mp(config: Config, mp: int) -> list[str]:
    cells = [str(mp)]
    for generation in GENERATIONS:
        hardware = flops.hardware(generation)
        seconds = link_seconds(_mp_bytes(config, 1, mp), hardware)[1]
        computing = flops.hardware_flops_per_token(config) / (hardware.peak * mp)
        cells.append(f"{seconds / computing:.2f}")
    return cells


def _break_even(config: Config, zero: int) -> list[str]:
    """The limit for many replicas; it does not depend on mp, which splits both."""
    cells = [str(zero)]
    for generation in GENERATIONS:
        hardware = flops.hardware(generation)
        sent_bytes = {0: 2 * F32, 1: BF16 + F32, 3: 2 * BF16 + F32}[zero] * flops.n_params(config)
        seconds = link_seconds(sent_bytes, hardware)[1]
        cells.append(f"{seconds * hardware.peak / flops.hardware_flops_per_token(config):,.0f}")
    return cells


def sequences_a_step(config: Config) -> int:
    """Of all replicas, as the config stands."""
    assert config.tpu_size is not None
    replicas = config.tpu_size // config.cores_per_replica
    return config.per_replica_batch * replicas * config.gradient_accumulation_steps


def _by_devices(config: Config, generation: str) -> list[list[str]]:
    hardware, sequences = flops.hardware(generation), sequences_a_step(config)
    rows = []
    for devices in DEVICES:
        dp = devices // config.cores_per_replica
        own = sequences // max(dp, 1)  # of a replica
        if not dp or sequences % dp:
            continue
        batch = max(size for size in range(1, LARGEST_BATCH + 1) if own % size == 0)
        of_it = config.replace(
            tpu_size=devices, per_replica_batch=batch, gradient_accumulation_steps=own // batch
        )
        papers = [on_paper(of_it.replace(zero=zero), hardware, devices) for zero in (0, 1, 3)]
        rows.append(
            [
                str(devices),
                str(dp),
                f"{batch} x {own // batch}",
                f"{papers[0].compute_seconds:.2f}",
                f"{papers[0].mp_seconds:.2f}",
                *(f"{each.dp_seconds:.2f}, {each.dp_bytes / 1e9:,.1f}" for each in papers),
            ]
        )
    return rows
