"""Estimate of a training step's speed from hardware data sheets, and the collectives in its HLO."""

import collections
import dataclasses
import math

from jax.sharding import Mesh

from mesh_transformer.config import Config
from mesh_transformer.mesh.accelerators import Hardware
from mesh_transformer.mesh.device_order import slice_of
from mesh_transformer.mesh.program import Layout
from mesh_transformer.model import flops
from mesh_transformer.performance import hlo
from mesh_transformer.performance.groups import axes_of

FORMULA = (
    "compute = hardware FLOPs / peak; memory = bytes read and written / bandwidth; links = bytes "
    "sent / bandwidth, where each of n devices sends 2(n-1)/n of an all-reduced array, (n-1)/n of "
    "a gathered or scattered one and, counted once per link of a ring, n/4 of one in an all-to-all "
    "and twice one for the next device alone; step = between the longest of these with all links "
    "of a device busy (full overlap) and their sum with two links busy (no overlap, a ring)"
)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bounds on a training step's time and speed, computed by `FORMULA` without running the step.

    The bytes are counted in the compiled step (`performance.plan`), or on paper
    (`performance.analytic`).  Bytes, FLOP/s and seconds are per device; tokens per second are for
    all devices together.

    Attributes:
      peak_bytes: peak memory.
      hbm_traffic_bytes: bytes that the step reads from and writes to memory (see `hlo.Program`).
      link_bytes: bytes that the step sends, counted once per link that they cross on a ring.
      link_seconds: the times for sending `link_bytes` with all links of the device busy, and with
        only two links busy.
      slice_bytes: bytes that the step sends to other slices.
      slice_seconds: the time for sending `slice_bytes`; None, and left out of the step's time, if
        the bandwidth is unknown.
      host_bytes: bytes that the step moves from host memory to the device, and back.
      host_seconds: the times for moving `host_bytes` in both directions at once, and in one after
        the other; None, and left out of the step's time, if the bandwidth is unknown.
      bound: the part that takes longest if the step uses two links: "compute", "memory", "links",
        "network" or "host memory".
      step_seconds, tokens_per_second, mfu, hfu: two values each.  The first assumes that compute,
        memory and links overlap fully; the second assumes no overlap.
      attention_waste: share of the FLOPs of attention for padded heads and copied keys and values
        (see `flops.attention_waste`).
      source: where the hardware's figures come from.
    """

    hardware: str
    peak_flops: float
    source: str
    peak_bytes: int
    compute_seconds: float
    hbm_traffic_bytes: int
    hbm_seconds: float
    link_bytes: int
    link_seconds: tuple[float, float]
    slice_bytes: int
    slice_seconds: float | None
    host_bytes: tuple[int, int]
    host_seconds: tuple[float, float] | None
    bound: str
    step_seconds: tuple[float, float]
    tokens_per_second: tuple[float, float]
    mfu: tuple[float, float]
    hfu: tuple[float, float]
    attention_waste: float = 0.0
    formula: str = FORMULA

    def lines(self) -> list[str]:
        """Format the estimate as lines of readable text."""
        least, most = self.step_seconds
        between = []
        if self.slice_bytes:
            time = "unknown time" if self.slice_seconds is None else f"{self.slice_seconds:.4g} s"
            between = [f"  to other slices: {self.slice_bytes / 1e9:,.2f} GB per device, {time}"]
        if any(self.host_bytes):
            time = "unknown time"
            if self.host_seconds is not None:
                time = f"{self.host_seconds[0]:.4g} to {self.host_seconds[1]:.4g} s"
            read, written = (f"{count / 1e9:,.2f} GB" for count in self.host_bytes)
            between.append(f"  host memory: {read} read and {written} written per device, {time}")
        if self.attention_waste:
            between.append(
                f"  {self.attention_waste:.1%} of the FLOPs of attention are for padded heads or "
                "copied keys and values, as mp does not divide the heads"
            )
        # The peak of a CPU is only measured, and a program can exceed it.
        shares = (
            f", MFU {self.mfu[1]:.1%} to {self.mfu[0]:.1%} (model FLOPs), HFU "
            f"{self.hfu[1]:.1%} to {self.hfu[0]:.1%} (executed FLOPs)"
        )
        return [
            f"estimate on {self.hardware}, peak {self.peak_flops / 1e12:,.4g} TFLOP/s per device "
            f"({self.source}): {self.formula}",
            f"  compute {self.compute_seconds:.4g} s, memory {self.hbm_seconds:.4g} s "
            f"({self.hbm_traffic_bytes / 1e9:,.1f} GB per device), links "
            f"{self.link_seconds[0]:.4g} to {self.link_seconds[1]:.4g} s "
            f"({self.link_bytes / 1e9:,.2f} GB on links per device): bound by {self.bound}",
            *between,
            f"  step {least:.4g} to {most:.4g} s, {self.tokens_per_second[1]:,.0f} to "
            f"{self.tokens_per_second[0]:,.0f} tokens/s{'' if self.hardware == 'cpu' else shares}",
        ]


def bytes_sent(kind: str, size: int, devices: int) -> int:
    """Return the bytes that each device sends in a collective over a ring.

    An all-reduce counts as a reduce-scatter followed by an all-gather.

    Args:
      kind: kind of collective, such as "all-reduce".
      size: size in bytes of the result on one device; between slices, of what it contributes.
      devices: number of devices that take part; between slices, of slices.
    """
    if kind.endswith(hlo.BETWEEN_SLICES):
        whole = size if kind.startswith("all-reduce") else size * devices
        return bytes_sent(kind.removesuffix(hlo.BETWEEN_SLICES), whole, devices)
    if kind == "collective-permute":
        return size
    if kind == "reduce-scatter":  # the result is only the device's shard
        return size * (devices - 1)
    passes = 2 if kind == "all-reduce" else 1
    return passes * size * (devices - 1) // devices


def bytes_on_links(kind: str, size: int, devices: int) -> int:
    """Return the bytes that each device sends, counted once per link that they cross on a ring.

    What is sent to other slices crosses no link.  Only an all-to-all sends to devices that are no
    neighbours: a part of the array to each, in the shorter direction.  What is sent to the next
    device alone counts twice, as it leaves one of the ring's two links idle.  The arguments are
    those of `bytes_sent`.
    """
    if kind.endswith(hlo.BETWEEN_SLICES):
        return 0
    if kind == "collective-permute":
        return 2 * size
    if kind != "all-to-all":
        return bytes_sent(kind, size, devices)
    distances = devices**2 // 4  # sum of min(d, devices - d) over all other devices
    return size * distances // devices


def link_seconds(sent_bytes: float, hardware: Hardware) -> tuple[float, float]:
    """Return the shortest and the longest time to send `sent_bytes` from one device, in seconds.

    The shortest time uses all links of the device.  The longest uses only two, as a ring does.
    """
    best = sent_bytes / hardware.interconnect
    return best, best * hardware.links / min(2, hardware.links)


def compute_seconds(config: Config, hardware: Hardware, attention: str) -> float:
    """Return the time for a training step's FLOPs per token on one device, at its peak FLOP/s.

    Args:
      attention: attention backend, as `attention_backend` returns it.
    """
    in_int8 = flops.int8_flops_per_token(config)
    others = flops.hardware_flops_per_token(config, attention) - in_int8
    return (others + in_int8 / hardware.int8) / hardware.peak


def estimate(
    config: Config,
    hardware: Hardware,
    *,
    devices: int,
    tokens: int,
    peak_bytes: int,
    hbm_traffic_bytes: int,
    link_bytes: int,
    slice_bytes: int = 0,
    host_bytes: tuple[int, int] = (0, 0),
    attention: str = "xla",
    teacher_flops: int = 0,
) -> Estimate:
    """Estimate the time and speed of a training step.

    Args:
      tokens: tokens per step of all devices together.
      peak_bytes, hbm_traffic_bytes, link_bytes, slice_bytes, host_bytes: bytes per device in one
        step; see `Estimate`.
      attention: attention backend, as `attention_backend` returns it.
      teacher_flops: FLOPs per token of a teacher.  MFU and HFU do not count them.
    """
    peak = hardware.peak * devices
    of_token = compute_seconds(config, hardware, attention) + teacher_flops / hardware.peak
    compute = tokens / devices * of_token
    memory = hbm_traffic_bytes / hardware.hbm
    links = link_seconds(link_bytes, hardware)
    known = slice_bytes == 0 or hardware.network is not None
    network = slice_bytes / (hardware.network or math.inf)
    host = hardware.host or math.inf
    hosts = max(host_bytes) / host, sum(host_bytes) / host
    steps = (
        max(compute, memory, links[0], network, hosts[0]),
        compute + memory + links[1] + network + hosts[1],
    )
    parts = {"compute": compute, "memory": memory, "links": links[1], "network": network}
    parts["host memory"] = hosts[0]
    speeds = tokens / steps[0], tokens / steps[1]
    return Estimate(
        hardware=hardware.name,
        peak_flops=hardware.peak,
        source=hardware.source,
        peak_bytes=peak_bytes,
        compute_seconds=compute,
        hbm_traffic_bytes=hbm_traffic_bytes,
        hbm_seconds=memory,
        link_bytes=link_bytes,
        link_seconds=links,
        slice_bytes=slice_bytes,
        slice_seconds=network if known else None,
        host_bytes=host_bytes,
        host_seconds=hosts if hardware.host or not any(host_bytes) else None,
        bound=max(parts, key=parts.__getitem__),
        step_seconds=steps,
        tokens_per_second=speeds,
        mfu=(flops.mfu(config, speeds[0], peak), flops.mfu(config, speeds[1], peak)),
        hfu=(
            flops.hfu(config, speeds[0], peak, attention),
            flops.hfu(config, speeds[1], peak, attention),
        ),
        attention_waste=flops.attention_waste(config, attention),
    )


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Totals over a step's collectives that have the same kind, mesh axis, dtype and place.

    Attributes:
      kind: kind of collective, such as "all-reduce" or "all-reduce between slices".
      axis: mesh axis or axes that the collectives run over, as `axes_of` returns them; "slices" for
        what is sent to other slices.
      place: where in the step they run: "layer forward" or "layer backward" in the loop over
        layers, "microbatch" in the loop over microbatches, "loop" in any other loop, and "step"
        outside of all loops.
      count: number of arrays exchanged per step.
      bytes: bytes per step of the results on one device.
      sent: bytes per step that one device sends; see the function `bytes_sent`.
      on_links: the same, counted once per link that they cross; see the function `bytes_on_links`.
      beside_loops: those of `sent` that are sent while a loop runs, such as that of ring attention.
    """

    kind: str
    axis: str
    dtype: str
    place: str
    count: int
    bytes: int
    sent: int
    on_links: int
    beside_loops: int = 0

    def line(self) -> str:
        """Format the exchange as one line of text."""
        share = f", {self.beside_loops / self.sent:.0%} beside a loop" if self.beside_loops else ""
        return (
            f"  {self.place}: {self.count} x {self.kind} over {self.axis}, {self.dtype}, "
            f"{self.bytes / 1e6:,.1f} MB per step and device{share}"
        )


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one training or decode step.

    Attributes:
      layer_forward: number of all-reduces of activations per layer in the forward pass.  With a
        `virtual_mesh`, each of them consists of an all-to-all and an all-gather.  In a program for
        several slices the passes may not be told apart, so that only both together are reported.
      layer_backward: number of all-reduces of activations per layer in the backward pass; 0 in a
        decode step.
      bytes_by_kind: for each kind of collective, the size in bytes of its results on one device,
        summed over one step.
      exchanges: one `Exchange` for each combination of kind, mesh axis, dtype and place in the
        step.
    """

    layer_forward: int
    layer_backward: int
    bytes_by_kind: dict[str, int]
    exchanges: list[Exchange]

    @property
    def sent(self) -> int:
        """Bytes that each device sends in one step."""
        return sum(exchange.sent for exchange in self.exchanges)

    @property
    def between_slices(self) -> int:
        """Bytes that each device sends to other slices in one step."""
        return sum(exchange.sent for exchange in self.exchanges if exchange.axis == "slices")

    @property
    def on_links(self) -> int:
        """Bytes sent in one step, counted once per link of a ring that they cross."""
        return sum(exchange.on_links for exchange in self.exchanges)

    def lines(self) -> list[str]:
        """Format the collectives as lines of readable text."""
        parts = " (all-to-all and all-gather)" if "all-to-all" in self.bytes_by_kind else ""
        counts = f"{self.layer_forward} forward, {self.layer_backward} backward"
        if self.between_slices:
            counts = f"{self.layer_forward + self.layer_backward} forward and backward together"
        return [
            f"activation all-reduces{parts} per layer: {counts}",
            *(exchange.line() for exchange in self.exchanges),
        ]


def traffic_of(text: str, layout: Layout) -> Traffic:
    """Return the collectives of a compiled training step, given its HLO text.

    A collective that combines several arrays counts once per array.
    """
    program, config, mesh = hlo.parse(text), layout.config, layout.mesh
    rows = config.per_replica_batch * config.virtual_replicas(mesh.shape["dp"])
    size = rows * config.seq // config.context_parallel * config.d_model
    # The program itself is also a `Loop`, with one iteration.  It is left out, because it would be
    # taken for the loop over layers if the model has only one layer.
    inner = [loop for outer in program.loops for loop in outer.all()]
    layers = [loop for loop in inner if _is_over_layers(loop, config)]
    reduced = {False: 0, True: 0}  # elements, in the forward and the backward pass
    for loop in layers:
        for collective in loop.collectives:
            reduced[loop.is_backward] += _all_reduced(collective, size, mesh)
    exchanges = _exchanges(program, layout)
    forward, backward = (elements // size for elements in reduced.values())
    return Traffic(forward, backward, _by_kind(exchanges), exchanges)


def decode_traffic(text: str, layout: Layout, width: int = 1) -> Traffic:
    """Return the collectives of a compiled decode step, given its HLO text.

    The layers are unrolled, so the number of activation all-reduces per layer is computed as the
    number in the whole program divided by the number of layers.

    Args:
      width: number of tokens of each row that the step computes.
    """
    program, config, mesh = hlo.parse(text), layout.config, layout.mesh
    exchanges = _exchanges(program, layout)
    size = config.per_replica_batch * width * config.d_model
    count = sum(_all_reduced(collective, size, mesh) for collective, _ in program.runs()) // size
    return Traffic(count // config.layers, 0, _by_kind(exchanges), exchanges)


def _all_reduced(collective: hlo.Collective, size: int, mesh: Mesh) -> int:
    """Return the number of elements of an array with `size` that a collective all-reduces.

    This is 0 if it does something else, works on another array, or is not over mp: over dp, the
    gradient of a parameter may have the same size.
    """
    if axes_of(collective.kind, collective.groups, mesh.shape)[0] != "mp":
        return 0
    elements = math.prod(collective.shape)
    # An all-reduce of a virtual mesh begins with an all-to-all.  For CPUs, this has one array per
    # device.
    sizes = {"all-reduce": (size,), "all-to-all": (size, size // mesh.shape["mp"])}
    matches = elements in sizes.get(collective.kind, ()) and not collective.is_alone
    return elements if matches else 0


def _by_kind(exchanges: list[Exchange]) -> dict[str, int]:
    """Return the sum of `Exchange.bytes` for each kind of collective."""
    sums: collections.Counter[str] = collections.Counter()
    for exchange in exchanges:
        sums[exchange.kind] += exchange.bytes
    return dict(sums)


def _is_over_layers(loop: hlo.Loop, config: Config) -> bool:
    """Whether a loop is the loop over layers.

    This is a loop with one iteration per layer.  If one such loop is nested directly in another,
    only the inner one is the loop over layers.
    """
    deeper = any(_is_over_layers(inner, config) for inner in loop.loops)
    return loop.trips == config.layers and not deeper


def _exchanges(program: hlo.Loop, layout: Layout) -> list[Exchange]:
    """Group a program's collectives by place, kind, axis and dtype, and add up each group.

    Collectives whose groups consist of a single device exchange no data and are left out.
    """
    sums: dict[tuple[str, str, str, str], list[int]] = {}
    config, mesh = layout.config, layout.mesh

    def walk(loop: hlo.Loop, times: int, outer: str) -> None:
        for collective in loop.collectives:
            axis, size = axes_of(collective.kind, collective.groups, mesh.shape)
            if collective.kind.endswith(hlo.BETWEEN_SLICES):
                axis, size = "slices", len({slice_of(device) for device in mesh.devices.flat})
            if size == 1:
                continue
            place = outer
            if outer == "layer":
                place = "layer backward" if loop.is_backward else "layer forward"
            key = place, collective.kind, axis, collective.dtype
            sent = bytes_sent(collective.kind, collective.bytes, size)
            on_links = bytes_on_links(collective.kind, collective.bytes, size)
            own = 1, collective.bytes, sent, on_links, sent * collective.beside_loop
            total = sums.setdefault(key, [0] * len(own))
            total[:] = (old + times * new for old, new in zip(total, own, strict=True))
        for inner in loop.loops:
            walk(inner, times * (inner.trips or 1), _place(inner, outer, config))

    walk(program, 1, "step")
    return [
        Exchange(kind, axis, dtype, place, *total)
        for (place, kind, axis, dtype), total in sorted(sums.items())
    ]


def _place(loop: hlo.Loop, outer: str, config: Config) -> str:
    """Return where in the step the collectives of a loop in the place `outer` run.

    This is "layer", "microbatch" or "loop".
    """
    if outer == "layer" or _is_over_layers(loop, config):
        return "layer"
    if any(_is_over_layers(inner, config) for inner in loop.all()):
        return "microbatch"
    return outer if outer == "microbatch" else "loop"
