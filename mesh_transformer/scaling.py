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
    mp_bytes = _mp_bytes(config, tokens)
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


def _mp_bytes(config: Config, tokens: int) -> int:
    """An all-reduce of the activations a layer each way; the embedding's and the head's."""
    each = tokens * config.d_model * (F32 if config.dtype == "float32" else BF16)
    return (2 * config.layers + 2) * sent("all-reduce", each, config.cores_per_replica)


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
        "none": 2 * config.d_model + (3 * heads + 3 * config.d_ff) // mp,
    }[config.remat]
    scores = 3 * config.n_heads * config.seq // mp if config.remat == "none" else 0
    tokens = config.per_replica_batch * config.seq
    if config.shard_activations:
        saved -= config.d_model - config.d_model // mp
    return state + weights + sums + config.layers * tokens * BF16 * (saved + scores)
