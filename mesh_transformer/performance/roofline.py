"""An upper bound of a step's speed, from the hardware's data sheet and the traffic of its HLO."""

import collections
import dataclasses
import math

from jax.sharding import Mesh

from mesh_transformer.config import Config
from mesh_transformer.mesh.accelerators import Hardware
from mesh_transformer.model import flops
from mesh_transformer.performance import hlo

FORMULA = (
    "compute = hardware FLOPs / peak; memory = bytes read and written / bandwidth; links = bytes "
    "sent / bandwidth, of n devices 2(n-1)/n of an all-reduced array, (n-1)/n of a gathered or "
    "scattered one; step = from the longest of the three with all links of a device busy (all "
    "overlap) to their sum with two links busy (nothing overlaps, a ring)"
)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bounds for one step on one device by `FORMULA`; nothing was run.

    Attributes:
      hbm_traffic_bytes: what the step reads and writes of the device's memory (`hlo_bytes`).
      link_bytes: what the device sends.
      link_seconds: with all of its links busy, and with two.
      step_seconds, tokens_per_second, mfu, hfu: at best, and if nothing overlaps; the tokens are
        those of all devices.
    """

    hardware: str
    peak_flops: float
    source: str
    compute_seconds: float
    hbm_traffic_bytes: int
    hbm_seconds: float
    link_bytes: int
    link_seconds: tuple[float, float]
    step_seconds: tuple[float, float]
    tokens_per_second: tuple[float, float]
    mfu: tuple[float, float]
    hfu: tuple[float, float]
    formula: str = FORMULA

    def lines(self) -> list[str]:
        """The same for people."""
        least, most = self.step_seconds
        return [
            f"estimate on {self.hardware}, peak {self.peak_flops / 1e12:,.4g} TFLOP/s a device "
            f"({self.source}): {self.formula}",
            f"  compute {self.compute_seconds:.4g} s, memory {self.hbm_seconds:.4g} s "
            f"({self.hbm_traffic_bytes / 1e9:,.1f} GB a device), links "
            f"{self.link_seconds[0]:.4g} to {self.link_seconds[1]:.4g} s "
            f"({self.link_bytes / 1e9:,.2f} GB sent a device)",
            f"  step {least:.4g} to {most:.4g} s, {self.tokens_per_second[1]:,.0f} to "
            f"{self.tokens_per_second[0]:,.0f} tokens/s, MFU {self.mfu[1]:.1%} to "
            f"{self.mfu[0]:.1%}, HFU {self.hfu[1]:.1%} to {self.hfu[0]:.1%}",
        ]


def sent(kind: str, size: int, devices: int) -> int:
    """Bytes that a device sends for a collective with a result of `size` bytes on each of several.

    By rings: an all-reduce is a reduce-scatter and an all-gather.
    """
    if kind == "collective-permute":
        return size
    if kind == "reduce-scatter":  # the result is the device's part
        return size * (devices - 1)
    passes = 2 if kind == "all-reduce" else 1
    return passes * size * (devices - 1) // devices


def link_seconds(sent_bytes: float, hardware: Hardware) -> tuple[float, float]:
    """With all links of a device busy, and with the two of a ring."""
    best = sent_bytes / hardware.interconnect
    return best, best * hardware.links / min(2, hardware.links)


def estimate(
    config: Config,
    hardware: Hardware,
    *,
    devices: int,
    tokens: int,
    hbm_traffic_bytes: int,
    link_bytes: int,
    attention: str = "xla",
) -> Estimate:
    """Bounds for a training step of so many tokens on all devices.

    Args:
      attention: what computes it, as `flash_attention.chosen` names it.
    """
    peak = hardware.peak * devices
    compute = tokens * flops.hardware_flops_per_token(config, attention) / peak
    memory = hbm_traffic_bytes / hardware.hbm
    links = link_seconds(link_bytes, hardware)
    steps = max(compute, memory, links[0]), compute + memory + links[1]
    speeds = tokens / steps[0], tokens / steps[1]
    return Estimate(
        hardware=hardware.name,
        peak_flops=hardware.peak,
        source=hardware.source,
        compute_seconds=compute,
        hbm_traffic_bytes=hbm_traffic_bytes,
        hbm_seconds=memory,
        link_bytes=link_bytes,
        link_seconds=links,
        step_seconds=steps,
        tokens_per_second=speeds,
        mfu=(flops.mfu(config, speeds[0], peak), flops.mfu(config, speeds[1], peak)),
        hfu=(
            flops.hfu(config, speeds[0], peak, attention),
            flops.hfu(config, speeds[1], peak, attention),
        ),
    )


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in one place.

    Attributes:
      axis: of the mesh, along which devices take part.
      place: "layer forward" and "layer backward" are in the loop over layers, "microbatch" in the
        loop over microbatches (where there are several), "loop" in another one.
      count: arrays a step.
      bytes: of the results on one device, in a step.
      sent: bytes that one device sends for them (`roofline.sent`).
    """

    kind: str
    axis: str
    dtype: str
    place: str
    count: int
    bytes: int
    sent: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What the devices exchange in one step: arrays, and their bytes on one device."""

    layer_forward: int  # activation all-reduces in the loop over layers, forward
    layer_backward: int
    bytes_by_kind: dict[str, int]  # in the whole step
    exchanges: list[Exchange]

    def lines(self) -> list[str]:
        """The same for people."""
        return [
            f"activation all-reduces a layer: {self.layer_forward} forward, "
            f"{self.layer_backward} backward",
            *(
                f"  {each.place}: {each.count} x {each.kind} over {each.axis}, {each.dtype}, "
                f"{each.bytes / 1e6:,.1f} MB a step and device"
                for each in self.exchanges
            ),
        ]


def traffic_of(text: str, config: Config, mesh: Mesh) -> Traffic:
    """What a compiled training step exchanges; of a combined collective each array counts."""
    whole = hlo.parse(text)
    activation = config.per_replica_batch * config.seq * config.d_model
    # Not the whole itself, which runs once, as a loop over a single layer does.
    inner = [loop for each in whole.loops for loop in each.all()]
    layers = [loop for loop in inner if _is_over_layers(loop, config)]
    reduced = [
        "transpose" in each.where
        for loop in layers
        for each in loop.collectives
        if each.kind == "all-reduce" and math.prod(each.shape) == activation and not each.is_alone
    ]
    exchanges = _exchanges(whole, config, mesh)
    return Traffic(reduced.count(False), reduced.count(True), _by_kind(exchanges), exchanges)


def decode_traffic(text: str, config: Config, mesh: Mesh) -> Traffic:
    """What one token in every row costs; generation has no loop over layers to count in."""
    whole = hlo.parse(text)
    exchanges = _exchanges(whole, config, mesh)
    activation = config.per_replica_batch * config.d_model
    reduced = sum(
        each.kind == "all-reduce" and math.prod(each.shape) == activation and not each.is_alone
        for each, _ in whole.runs()
    )
    return Traffic(reduced // config.layers, 0, _by_kind(exchanges), exchanges)


def _by_kind(exchanges: list[Exchange]) -> dict[str, int]:
    sums: collections.Counter[str] = collections.Counter()
    for each in exchanges:
        sums[each.kind] += each.bytes
    return dict(sums)


def _is_over_layers(loop: hlo.Loop, config: Config) -> bool:
    deeper = any(_is_over_layers(inner, config) for inner in loop.loops)
    return loop.trips == config.layers and not deeper


def _exchanges(whole: hlo.Loop, config: Config, mesh: Mesh) -> list[Exchange]:
    sums: dict[tuple[str, str, str, str], list[int]] = {}

    def walk(loop: hlo.Loop, times: int, around: str) -> None:
        for each in loop.collectives:
            axis, size = _along(each.groups, mesh)
            if size == 1:
                continue
            place = around
            if around == "layer":
                place = "layer backward" if "transpose" in each.where else "layer forward"
            total = sums.setdefault((place, each.kind, axis, each.dtype), [0, 0, 0])
            total[0] += times
            total[1] += times * each.bytes
            total[2] += times * sent(each.kind, each.bytes, size)
        for inner in loop.loops:
            walk(inner, times * (inner.trips or 1), _place(inner, around, config))

    walk(whole, 1, "step")
    return [
        Exchange(kind, axis, dtype, place, *total)
        for (place, kind, axis, dtype), total in sorted(sums.items())
    ]


def _place(loop: hlo.Loop, around: str, config: Config) -> str:
    if around == "layer" or _is_over_layers(loop, config):
        return "layer"
    if any(_is_over_layers(inner, config) for inner in loop.all()):
        return "microbatch"
    return around if around == "microbatch" else "loop"


def _along(groups: hlo.Groups, mesh: Mesh) -> tuple[str, int]:
    """The axes of the mesh that devices take part along, and how many take part together."""
    mp = mesh.shape["mp"]
    group = sorted(min(groups, key=min)) if groups else range(mesh.size)
    if len({device // mp for device in group}) == 1:
        return "mp", len(group)
    axes = "dp" if len({device % mp for device in group}) == 1 else "dp and mp"
    return axes, len(group)
