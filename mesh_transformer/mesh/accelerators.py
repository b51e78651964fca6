"""What accelerators can do: their peaks, memory and links, and the generations of TPUs."""

import dataclasses
import functools
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer.util import InputError


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What one JAX device can: a core of a TPU v2, v3 or 7x (half a chip), else a chip.

    Attributes:
      kind: what its `device_kind` contains, from the beginning of a word on.
      peak: dense bf16 FLOP/s.
      hbm: bytes/s of its memory.
      interconnect: bytes/s that it can send over all its links together.
      links: how many those are; a ring of devices along one axis of a torus uses two of them.
      source: where the figures are from.
    """

    name: str
    kind: str
    peak: float
    hbm: float
    interconnect: float
    links: int
    source: str

    def part(self, count: int) -> "Hardware":
        """One of `count` devices that share it."""
        return dataclasses.replace(
            self,
            peak=self.peak / count,
            hbm=self.hbm / count,
            interconnect=self.interconnect / count,
        )


_DOCS = "cloud.google.com/tpu/docs"
_TRAINING = "Jouppi et al. 2020 (A domain-specific supercomputer for training neural networks)"
_NVIDIA = "NVIDIA's data sheet"
# A vendor's figure for links "in both directions" counts half.  The first kind that a device's
# name contains counts.
HARDWARE = (
    # 4 links of 496 and 656 Gbit/s a chip.
    Hardware("v2", "TPU v2", 22.5e12, 350e9, 124e9, 4, f"{_DOCS}/v2; links: {_TRAINING}"),
    Hardware("v3", "TPU v3", 61.5e12, 450e9, 164e9, 4, f"{_DOCS}/v3; links: {_TRAINING}"),
    Hardware("v4i", "TPU v4 lite", 138e12, 614e9, 100e9, 2, "Jouppi et al. 2021 (Ten lessons)"),
    # 6 links of 50 GB/s (Jouppi et al. 2023, TPU v4).
    Hardware("v4", "TPU v4", 275e12, 1228e9, 300e9, 6, f"{_DOCS}/v4"),
    Hardware("v5e", "TPU v5 lite", 197e12, 819e9, 200e9, 4, f"{_DOCS}/v5e"),
    Hardware("v5e", "TPU v5e", 197e12, 819e9, 200e9, 4, f"{_DOCS}/v5e"),
    Hardware("v5p", "TPU v5", 459e12, 2765e9, 600e9, 6, f"{_DOCS}/v5p"),
    Hardware("v6e", "TPU v6", 918e12, 1638e9, 400e9, 4, f"{_DOCS}/v6e"),
    Hardware("7x", "TPU7x", 1153.5e12, 3690e9, 300e9, 6, f"{_DOCS}/tpu7x"),
    Hardware("h100-pcie", "H100 PCIe", 756e12, 2000e9, 300e9, 2, _NVIDIA),
    Hardware("h100-nvl", "H100 NVL", 835e12, 3900e9, 300e9, 2, _NVIDIA),
    Hardware("h100", "H100", 989e12, 3350e9, 450e9, 2, _NVIDIA),
    # That with 96 GB; the one with 144 GB has other memory, and no row.
    Hardware("gh200", "GH200 480GB", 989e12, 4000e9, 450e9, 2, _NVIDIA),
    Hardware("h200", "H200", 989e12, 4800e9, 450e9, 2, _NVIDIA),
    Hardware("a100-40gb", "A100-SXM4-40GB", 312e12, 1555e9, 300e9, 2, _NVIDIA),
    Hardware("a100-40gb", "A100-PCIE-40GB", 312e12, 1555e9, 300e9, 2, _NVIDIA),
    Hardware("a100-pcie", "A100 80GB PCIe", 312e12, 1935e9, 300e9, 2, _NVIDIA),
    Hardware("a100", "A100", 312e12, 2039e9, 300e9, 2, _NVIDIA),
)


class Device(Protocol):
    """What `peak_flops` reads of a `jax.Device`."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...


def hardware(name: str, dtype: str = "bfloat16") -> Hardware:
    """The hardware of that name; `cpu` is this machine's, measured: its peak in `dtype`.

    Raises:
      InputError: for a name that is not in the table.
    """
    if name == "cpu":
        speed = _measured_copy()
        return Hardware("cpu", "cpu", _measured_flops(dtype), speed, speed, 2, "measured here")
    for each in HARDWARE:
        if each.name == name:
            return each
    known = ", ".join(dict.fromkeys(["cpu", *(each.name for each in HARDWARE)]))
    raise InputError(f"hardware is {name!r}, which is unknown; take one of {known}")


def hardware_of(device: Device) -> Hardware | None:
    """The row of the table for an accelerator; None for a kind it does not have, and for CPUs."""
    matching = (each for each in HARDWARE if re.search(rf"\b{each.kind}", device.device_kind))
    return None if device.platform == "cpu" else next(matching, None)


def peak_flops(device: Device, dtype: str = "bfloat16") -> float | None:
    """FLOP/s of one device; None for a kind that the table does not know.

    An accelerator's is its dense bf16 peak, whatever `dtype` is.  A CPU has no data sheet: the
    median of a few matmuls in `dtype` counts, run once per process, and the virtual devices of
    one host each get an equal part.
    """
    if device.platform == "cpu":
        return _measured_flops(dtype) / jax.local_device_count("cpu")
    found = hardware_of(device)
    return found.peak if found else None


def _run_seconds(function: Callable[[], Any], runs: int = 5, at_least: float = 0.0) -> list[float]:
    """Seconds of each of so many runs, or of more that together take `at_least`.

    One before them is left out.
    """
    function()
    seconds: list[float] = []
    while len(seconds) < runs or sum(seconds) < at_least:
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return seconds


@functools.cache
def _measured_flops(dtype: str) -> float:
    return matmul_flops(dtype)


def matmul_flops(dtype: str, sizes: Sequence[int] = (1024,), seconds: float = 0.05) -> float:
    """FLOP/s of all of this machine's cores together, measured now by matmuls in `dtype`.

    Square ones, of each size three at least and for so many seconds: the median one of the size
    that does best.
    """
    device = jax.local_devices(backend="cpu")[0]
    multiply = jax.jit(jnp.matmul)

    def measured(size: int) -> float:
        matrix = jax.device_put(jnp.ones((size, size), dtype), device)
        found = _run_seconds(lambda: multiply(matrix, matrix).block_until_ready(), 3, seconds)
        return 2 * size**3 / statistics.median(found)

    return max(map(measured, sizes))


@functools.cache
def _measured_copy(size: int = 2**28) -> float:
    """Bytes/s read and written as all cores together copy an array."""
    threads = os.cpu_count() or 1
    sources = [np.ones(size // threads, np.uint8) for _ in range(threads)]
    targets = [np.empty_like(part) for part in sources]
    with ThreadPoolExecutor(threads) as pool:
        return 2 * size / min(_run_seconds(lambda: list(pool.map(np.copyto, targets, sources))))


Tier = Literal["on_demand", "spot", "preemptible"]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What differs between generations of TPUs.

    `units` is what the number in an accelerator type counts for one JAX device: a v3 type counts
    cores, and each is a device; v4 and v5p count cores too, but a device has two.  `cheap` is the
    tier of a TPU that may be taken away; the older "preemptible" one ends after 24 hours.
    """

    runtime_version: str
    units: int
    cheap: Tier = "spot"


# Runtime versions: cloud.google.com/tpu/docs/runtimes, its table for JAX; tiers: .../docs/spot and
# .../docs/preemptible there.
GENERATIONS = {
    "v2": Generation("tpu-ubuntu2204-base", 1, "preemptible"),
    "v3": Generation("tpu-ubuntu2204-base", 1, "preemptible"),
    "v4": Generation("tpu-ubuntu2204-base", 2),
    "v5litepod": Generation("v2-alpha-tpuv5-lite", 1),
    "v5p": Generation("v2-alpha-tpuv5", 2),
    "v6e": Generation("v2-alpha-tpuv6e", 1),
}


def accelerator_type(generation: str, devices: int) -> str:
    """The API's name of a slice with that many JAX devices: ("v4", 8) is "v4-16"."""
    generation = {"v5e": "v5litepod"}.get(generation, generation)
    if generation not in GENERATIONS:
        known = ", ".join(GENERATIONS)
        raise InputError(f"TPU generation is {generation!r}, which is unknown; take one of {known}")
    return f"{generation}-{devices * GENERATIONS[generation].units}"


@dataclass(frozen=True)
class SliceGeneration:
    """What the compiler has to know of a generation of TPUs.

    Attributes:
      dimensions: of the grid that its chips are linked in.
      devices: JAX devices on a chip.
      hbm: bytes that a program may have on one device.
      options: libtpu's own.
    """

    dimensions: int
    devices: int
    hbm: int
    options: dict[str, str]


GIB = 2**30
# The memory is what the compiler itself enforces.
SLICES = {
    "v2": SliceGeneration(2, 2, int(7.48 * GIB), {}),
    "v3": SliceGeneration(2, 2, int(15.48 * GIB), {}),
    "v4": SliceGeneration(3, 1, int(30.75 * GIB), {"chip_config_name": "megacore"}),
    "v5e": SliceGeneration(2, 1, int(15.75 * GIB), {}),
    "v5p": SliceGeneration(3, 1, int(95.74 * GIB), {}),
    "v6e": SliceGeneration(2, 1, int(31.25 * GIB), {}),
}
