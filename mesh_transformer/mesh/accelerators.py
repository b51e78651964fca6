"""Accelerator specifications: peak FLOP/s, memory and link bandwidth, and TPU generations."""

import dataclasses
import functools
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

from mesh_transformer.util import InputError


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Specifications of one JAX device.

    A device is one chip, except on TPU v2, v3 and 7x, where it is one core (half a chip).

    Attributes:
      name: short name, such as "v5e"; the argument of the function `hardware`.
      kind: text in JAX's `device_kind` that identifies the hardware, such as "TPU v5 lite".  It
        must start at a word boundary.
      peak: peak FLOP/s of dense matmuls, in bf16 except for CPUs.
      hbm: memory bandwidth in bytes/s.
      interconnect: bytes/s that the device can send over all its interconnect links together.
      links: number of interconnect links.  A ring along one axis of a torus uses two of them.  For
        GPUs and CPUs the value is 2, because a ring can use their full bandwidth.
      source: where the figures come from.
      int8: speed of dense matmuls of 8-bit integers, in multiples of `peak`.
      network: bytes/s over the data centre's network, from each device to other slices; None if it
        is not documented.
      host: bytes/s between the device and its host's memory, in each direction; None if it is not
        known.
    """

    name: str
    kind: str
    peak: float
    hbm: float
    interconnect: float
    links: int
    source: str
    int8: float = 1.0
    network: float | None = None
    host: float | None = None

    def part(self, count: int) -> "Hardware":
        """Return the specifications of one of `count` equal parts of this device.

        For example, a CPU can be divided into `count` virtual devices.
        """
        return dataclasses.replace(
            self,
            peak=self.peak / count,
            hbm=self.hbm / count,
            interconnect=self.interconnect / count,
        )


_DOCS = "cloud.google.com/tpu/docs"
_TRAINING = "Jouppi et al. 2020 (A domain-specific supercomputer for training neural networks)"
_NVIDIA = "NVIDIA's data sheet"
# What Austin et al. 2025 (How to Scale Your Model) give for a v6e chip; Google documents no figure.
_PCIE = 15e9
# Where vendors give bidirectional link bandwidths, this table has half of them.  `hardware_of`
# selects the first row whose kind matches the device, so more specific kinds come first.
HARDWARE = (
    # Each chip has 4 links of 496 Gbit/s (v2) or 656 Gbit/s (v3); a device has half the bandwidth.
    Hardware(
        "v2", "TPU v2", 22.5e12, 350e9, 124e9, 4, f"{_DOCS}/v2; links: {_TRAINING}", host=_PCIE / 2
    ),
    Hardware(
        "v3", "TPU v3", 61.5e12, 450e9, 164e9, 4, f"{_DOCS}/v3; links: {_TRAINING}", host=_PCIE / 2
    ),
    Hardware("v4i", "TPU v4 lite", 138e12, 614e9, 100e9, 2, "Jouppi et al. 2021 (Ten lessons)"),
    # Each chip has 6 links of 50 GB/s (Jouppi et al. 2023, TPU v4).
    Hardware("v4", "TPU v4", 275e12, 1228e9, 300e9, 6, f"{_DOCS}/v4", host=_PCIE),
    # The network of a pod of 256 chips has 6.4 Tbit/s.
    Hardware(
        "v5e", "TPU v5 lite", 197e12, 819e9, 200e9, 4, f"{_DOCS}/v5e", 2.0, 3.125e9, host=_PCIE
    ),
    Hardware("v5e", "TPU v5e", 197e12, 819e9, 200e9, 4, f"{_DOCS}/v5e", 2.0, 3.125e9, host=_PCIE),
    Hardware("v5p", "TPU v5", 459e12, 2765e9, 600e9, 6, f"{_DOCS}/v5p", 2.0, 6.25e9, host=_PCIE),
    Hardware("v6e", "TPU v6", 918e12, 1638e9, 400e9, 4, f"{_DOCS}/v6e", 2.0, host=_PCIE),
    Hardware("tpu7x", "TPU7x", 1153.5e12, 3690e9, 300e9, 6, f"{_DOCS}/tpu7x", host=_PCIE / 2),
    Hardware("h100-pcie", "H100 PCIe", 756e12, 2000e9, 300e9, 2, _NVIDIA, 2.0, host=64e9),
    Hardware("h100-nvl", "H100 NVL", 835e12, 3900e9, 300e9, 2, _NVIDIA, 2.0, host=64e9),
    Hardware("h100", "H100", 989e12, 3350e9, 450e9, 2, _NVIDIA, 2.0, host=64e9),
    # The model with 96 GB of HBM; the 144 GB model has different memory and is not listed.
    Hardware("gh200", "GH200 480GB", 989e12, 4000e9, 450e9, 2, _NVIDIA, 2.0, host=450e9),
    Hardware("h200", "H200", 989e12, 4800e9, 450e9, 2, _NVIDIA, 2.0, host=64e9),
    Hardware("a100-40gb", "A100-SXM4-40GB", 312e12, 1555e9, 300e9, 2, _NVIDIA, 2.0, host=32e9),
    Hardware("a100-40gb", "A100-PCIE-40GB", 312e12, 1555e9, 300e9, 2, _NVIDIA, 2.0, host=32e9),
    Hardware("a100-pcie", "A100 80GB PCIe", 312e12, 1935e9, 300e9, 2, _NVIDIA, 2.0, host=32e9),
    Hardware("a100", "A100", 312e12, 2039e9, 300e9, 2, _NVIDIA, 2.0, host=32e9),
)
# Bytes of the memory of the GPUs in `HARDWARE`, by name: as CUDA reports them in XLA's target
# configurations, or else the data sheet's GB.
GPU_MEMORY = {
    "h100-pcie": 84_942_979_072,
    "h100-nvl": 94 * 10**9,
    "h100": 84_942_979_072,
    "gh200": 96 * 10**9,
    "h200": 141 * 10**9,
    "a100-40gb": 42_331_013_120,
    "a100-pcie": 79_050_250_240,
    "a100": 85_100_068_864,
}


class Device(Protocol):
    """The attributes of `jax.Device` that identify the hardware.

    GPUs also have a `compute_capability`, such as "9.0".
    """

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...


def hardware(name: str, dtype: str = "bfloat16") -> Hardware:
    """Return the specifications of an accelerator, or of this machine's CPUs.

    The specifications of CPUs are measured, once per process.

    Args:
      name: "cpu", or the name of an entry of the table `HARDWARE`, such as "v5e".
      dtype: dtype of the matmuls that measure the peak FLOP/s of CPUs.  It is ignored for
        accelerators, whose peak is always for bf16.

    Raises:
      InputError: if the name is unknown.
    """
    if name == "cpu":
        speed = _measured_copy()
        return Hardware("cpu", "cpu", _measured_flops(dtype), speed, speed, 2, "measured here")
    for row in HARDWARE:
        if row.name == name:
            return row
    known = ", ".join(dict.fromkeys(["cpu", *(row.name for row in HARDWARE)]))
    raise InputError(f"hardware is {name!r}, expected one of {known}")


# Per core of a CPU, as measured in f32 on some, and the memory bandwidth.
_CORE_FLOPS, _WIDE_CORE_FLOPS, _CORE_BANDWIDTH = 50e9, 100e9, 10e9


def assumed_cpu() -> Hardware:
    """Return rough specifications of this machine's CPUs, whatever else runs on them.

    They follow from the number of cores and from whether these have AVX-512.  `hardware` measures
    them instead.
    """
    cores = os.cpu_count() or 1
    try:
        wide = "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        wide = False
    flops, bandwidth = _WIDE_CORE_FLOPS if wide else _CORE_FLOPS, cores * _CORE_BANDWIDTH
    return Hardware("cpu", "cpu", cores * flops, bandwidth, bandwidth, 2, "by number of cores")


def hardware_of(device: Device) -> Hardware | None:
    """Return the entry of the table `HARDWARE` for a JAX device, or None if there is no entry.

    CPUs and MIG instances (parts of an NVIDIA GPU) have no entry.
    """
    matching = (row for row in HARDWARE if re.search(rf"\b{row.kind}", device.device_kind))
    whole = device.platform != "cpu" and not re.search(r"\bMIG\b", device.device_kind)
    return next(matching, None) if whole else None


def _run_seconds(function: Callable[[], Any], runs: int = 5, at_least: float = 0.0) -> list[float]:
    """Call `function` repeatedly, and return how many seconds each call takes.

    `function` is called at least `runs` times, and until all calls together have taken at least
    `at_least` seconds.  An untimed call before them serves as warm-up.
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
    """Measure the FLOP/s that all CPU cores of this machine together reach in matmuls.

    Args:
      dtype: dtype of the matrices.
      sizes: sizes n of the n x n matrices to multiply.
      seconds: minimum time to spend on each size.  At least three matmuls of each size are timed.

    Returns:
      The FLOP/s of the fastest size, computed from its median time.
    """
    import jax
    import jax.numpy as jnp

    device = jax.local_devices(backend="cpu")[0]
    multiply = jax.jit(jnp.matmul)

    def measured(size: int) -> float:
        matrix = jax.device_put(jnp.ones((size, size), dtype), device)
        times = _run_seconds(lambda: multiply(matrix, matrix).block_until_ready(), 3, seconds)
        return 2 * size**3 / statistics.median(times)

    return max(map(measured, sizes))


@functools.cache
def _measured_copy() -> float:
    """Measure memory bandwidth in bytes/s (reads plus writes) by copying on all CPU cores."""
    import numpy as np

    size, threads = 2**28, os.cpu_count() or 1  # bytes of all threads together
    sources = [np.ones(size // threads, np.uint8) for _ in range(threads)]
    targets = [np.empty_like(part) for part in sources]
    with ThreadPoolExecutor(threads) as pool:
        return 2 * size / min(_run_seconds(lambda: list(pool.map(np.copyto, targets, sources))))


# Price tier of a TPU; all but "on_demand" can be taken away at any time.
Tier = Literal["on_demand", "spot", "preemptible"]


GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Generation:
    """A TPU generation: its properties on Google Cloud, and those needed to compile for it.

    Attributes:
      cloud_name: first part of Google Cloud's accelerator types, such as "v5litepod" in
        "v5litepod-8".
      runtime_version: the TPU software version to use with JAX; empty if Google's TPU API has no
        TPUs of this generation, so that there can only be plans for them.
      units: the number at the end of an accelerator type, divided by the number of JAX devices.  It
        is 2 on v4 and v5p, where that number counts cores and a JAX device has two cores.
      dimensions: number of dimensions of the grid of chips in a slice: 2 or 3.
      devices: JAX devices per chip.
      hbm: bytes of memory available to a program on one device; the compiler enforces this limit.
      cheap_tier: the discounted price tier.  Google may reclaim TPUs of this tier at any time.
        TPUs of the older tier "preemptible" are also stopped after 24 hours.
      full: number of chips along a dimension that make it a ring, or a multiple of it.
      options: additional libtpu options for compiling without a TPU, as (name, value) pairs.
    """

    cloud_name: str
    runtime_version: str
    units: int
    dimensions: int
    devices: int
    hbm: int
    full: int
    cheap_tier: Tier = "spot"
    options: tuple[tuple[str, str], ...] = ()

    def wraps(self, sizes: Sequence[int]) -> tuple[bool, ...]:
        """Return for each dimension of a slice whether its last chip is linked to its first one.

        In three dimensions, all or none are.

        Args:
          sizes: number of chips along each dimension.
        """
        full = [size % self.full == 0 for size in sizes]
        return (all(full),) * len(sizes) if self.dimensions == 3 else tuple(full)


# Runtime versions are from the JAX table of cloud.google.com/tpu/docs/runtimes, tiers from
# cloud.google.com/tpu/docs/spot and cloud.google.com/tpu/docs/preemptible.
GENERATIONS = {
    "v2": Generation("v2", "tpu-ubuntu2204-base", 1, 2, 2, int(7.48 * GIB), 16, "preemptible"),
    "v3": Generation("v3", "tpu-ubuntu2204-base", 1, 2, 2, int(15.48 * GIB), 32, "preemptible"),
    "v4": Generation(
        "v4",
        "tpu-ubuntu2204-base",
        2,
        3,
        1,
        int(30.75 * GIB),
        4,
        options=(("chip_config_name", "megacore"),),
    ),
    "v5e": Generation("v5litepod", "v2-alpha-tpuv5-lite", 1, 2, 1, int(15.75 * GIB), 16),
    "v5p": Generation("v5p", "v2-alpha-tpuv5", 2, 3, 1, int(95.74 * GIB), 4),
    "v6e": Generation("v6e", "v2-alpha-tpuv6e", 1, 2, 1, int(31.25 * GIB), 16),
    "tpu7x": Generation("tpu7x", "", 1, 3, 2, int(94.75 * GIB), 4),
}
CLOUD_GENERATIONS = {row.cloud_name: row for row in GENERATIONS.values() if row.runtime_version}


def accelerator_type(generation: str, devices: int) -> str:
    """Return Google Cloud's accelerator type of a TPU slice.

    For example, the accelerator type for ("v4", 8) is "v4-16".

    Args:
      generation: TPU generation, such as "v5e", or Google Cloud's name for it, such as "v5litepod".
      devices: number of JAX devices in the slice.

    Raises:
      InputError: if the generation is unknown.
    """
    known = CLOUD_GENERATIONS | GENERATIONS
    if generation not in known:
        names = ", ".join(CLOUD_GENERATIONS)
        raise InputError(f"TPU generation is {generation!r}, expected one of {names}")
    return f"{known[generation].cloud_name}-{devices * known[generation].units}"
