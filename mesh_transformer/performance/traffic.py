"""What the devices of a mesh exchange in one run of a compiled program, and where in it."""

import collections
import dataclasses
import math

from jax.sharding import Mesh

from mesh_transformer.config import Config
from mesh_transformer.performance import hlo
from mesh_transformer.performance.roofline import sent


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
