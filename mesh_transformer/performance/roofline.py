"""How fast a step could be at most, by what the hardware's data sheet says: an estimate."""

import dataclasses

from mesh_transformer.config import Config
from mesh_transformer.model import flops
from mesh_transformer.model.flops import Hardware

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
