"""Devices to plan for: TPU slices, which need not be present, or this machine's own devices.

The TPU compiler `libtpu` provides descriptions of a slice's devices, even on a machine without a
TPU.
"""

import dataclasses
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from mesh_transformer.config import Config
from mesh_transformer.mesh import accelerators
from mesh_transformer.mesh.accelerators import GENERATIONS, Hardware
from mesh_transformer.mesh.device_order import Distances, arranged, axes_of, distances
from mesh_transformer.mesh.devices import use_virtual_devices
from mesh_transformer.util import InputError

# Where `make libtpu` installs libtpu.  It is not installed in site-packages, because JAX warns in
# every process if it finds libtpu there on a machine without a TPU.
LIBRARY = Path(sys.prefix) / "libtpu/libtpu/libtpu.so"
# Environment variables that libtpu reads when it is loaded.  Without them it would query a cloud
# metadata server.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    # Without a TPU, libtpu 0.0.42 aborts where it would let TPU7x's SparseCores do a collective.
    "LIBTPU_INIT_ARGS": " ".join(
        f"--xla_tpu_enable_sparse_core_collective_offload_{kind}=false"
        for kind in ("all_gather", "all_reduce", "reduce_scatter")
    ),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A TPU slice, or several equal ones that a data-centre network connects.

    Attributes:
      name: name in Google Cloud, such as v3-8 or v5e-256, or a grid of chips, such as v5p:16x16x24;
        after the number of slices and an x if there are several, such as 2xv5e-256.
      generation: TPU generation, such as v5e.
      grid: number of chips along each dimension of a slice.
      slices: number of slices.
    """

    name: str
    generation: str
    grid: tuple[int, ...]
    slices: int = 1

    @property
    def devices(self) -> int:
        """Number of JAX devices in all slices."""
        return self.slices * math.prod(self.grid) * GENERATIONS[self.generation].devices

    @property
    def hbm(self) -> int:
        """Bytes that a program may use on one device."""
        return GENERATIONS[self.generation].hbm

    def hardware(self, dtype: str) -> Hardware:
        """Return the peak FLOP/s and the bandwidths of one device.

        The peak is for bf16; `dtype` is ignored.
        """
        return accelerators.hardware(self.generation, dtype)

    def mesh(self, mp: int, cp: int = 1) -> Mesh:
        """Return a (dp, cp, mp) mesh of the slice's devices, in the order that training uses.

        As in `make_mesh`, it has no axis cp if cp is 1.  Programs can be compiled for these
        devices, but cannot run on them.
        """
        devices = arranged(self._describe(), mp, cp)
        return Mesh(devices, axes_of(devices))

    def distances(self, mesh: Mesh) -> Distances | None:
        """Return the distances between the devices of a mesh of this slice."""
        return distances(self._describe(), mesh.devices)

    def _describe(self) -> list[Any]:
        """Return JAX's descriptions of the slice's devices, which need not be present.

        Raises:
          InputError: if libtpu is missing or rejects the slice.
        """
        from jax.experimental import topologies

        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if LIBRARY.exists():
            os.environ.setdefault("TPU_LIBRARY_PATH", str(LIBRARY))
        grid = "x".join(map(str, self.grid))
        # Without this option, libtpu assumes the chips of a whole host, such as 2 x 2.
        single_chip = {"chips_per_host_bounds": (1, 1, 1)} if self.devices == self.slices else {}
        try:
            return topologies.get_topology_desc(
                platform="tpu",
                topology_name=f"{self.generation}:{grid}",
                **dict(GENERATIONS[self.generation].options),
                **single_chip,
                **({"num_slices": self.slices} if self.slices > 1 else {}),
            ).devices
        except Exception as error:  # libtpu's errors have no type of their own
            known = ("libtpu", "Unable to initialize", "TPU support not installed")
            if not any(part in str(error) for part in known):
                raise InputError(
                    f"topology {self.name}: {' '.join(str(error).split())[:200]}"
                ) from None
            install = f"pip install --no-deps --target {LIBRARY.parents[1]} libtpu"
            raise InputError(
                "plans for TPUs require the compiler libtpu, which runs without TPUs; install it "
                f"with `make libtpu`, or outside a checkout with `{install}`"
            ) from None


@dataclasses.dataclass(frozen=True)
class LocalDevices:
    """Devices of this machine, such as its GPUs, or its CPU divided into virtual devices.

    Attributes:
      name: name in messages, such as "cpu-8".
      platform: "cpu", "gpu" or "tpu".
      devices: number of JAX devices.
    """

    name: str
    platform: str
    devices: int

    @property
    def hbm(self) -> int:
        """Bytes that a program may use on one device.

        For a CPU, this is the machine's memory divided by the number of virtual devices.
        """
        if self.platform == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.devices
        stats = self._list()[0].memory_stats()
        if stats is None or "bytes_limit" not in stats:
            kind = self._list()[0].device_kind
            raise InputError(
                f"topology {self.name}: {kind} does not report how much memory a program may use "
                "(memory_stats); choose a TPU topology such as v3-8"
            )
        return stats["bytes_limit"]

    @property
    def compute_capability(self) -> str:
        """An NVIDIA GPU's CUDA compute capability, such as "7.5"; empty for other devices."""
        return str(getattr(self._list()[0], "compute_capability", ""))

    def hardware(self, dtype: str) -> Hardware:
        """Return the peak FLOP/s and the bandwidths of one device.

        For CPUs these figures are measured.

        Args:
          dtype: dtype of the matmuls that measure a CPU's peak; ignored for other devices.

        Raises:
          InputError: if a GPU or TPU is not in the table of accelerators.
        """
        if self.platform == "cpu":
            return accelerators.hardware("cpu", dtype).part(self.devices)
        hardware = accelerators.hardware_of(self._list()[0])
        if hardware is None:
            kind = self._list()[0].device_kind
            raise InputError(
                f"topology {self.name}: {kind} is not in the hardware table; choose a TPU topology "
                "such as v3-8, or add the device to accelerators.HARDWARE"
            )
        return hardware

    def mesh(self, mp: int, cp: int = 1) -> Mesh:
        """Return a (dp, cp, mp) mesh of these devices, as `Topology.mesh` does."""
        devices = arranged(self._list(), mp, cp)
        return Mesh(devices, axes_of(devices))

    def distances(self, mesh: Mesh) -> Distances | None:
        """Return the distances between the devices of a mesh; None except for TPUs."""
        return distances(self._list(), mesh.devices)

    def _list(self) -> list[Any]:
        return jax.local_devices(backend=self.platform)[: self.devices]


# Devices to plan for.
Slice = Topology | LocalDevices


def mesh_of(config: Config, slice_: Slice) -> Mesh:
    """Return a mesh of all devices of a slice, with the axes and sizes that training uses.

    mp is the config's `cores_per_replica`, cp its `context_parallel`, and dp is the number of
    devices divided by both.

    Raises:
      InputError: if the number of devices is not a multiple of mp times cp.
    """
    mp, cp = config.cores_per_replica, config.context_parallel
    if slice_.devices % (mp * cp):
        own = f"mp is {mp}" if cp == 1 else f"mp x cp is {mp} x {cp}"
        raise InputError(
            f"topology {slice_.name} has {slice_.devices} devices, but {own}; set "
            f"{'--mp' if cp == 1 else '--mp and --cp'} to a divisor of {slice_.devices}"
        )
    return slice_.mesh(mp, cp)


def format_mesh(dp: int, cp: int, mp: int) -> str:
    """Format the sizes of a mesh as text."""
    return f"dp {dp} x {f'cp {cp} x ' if cp > 1 else ''}mp {mp}"


def local_devices(name: str) -> LocalDevices | None:
    """Return the devices named by `cpu`, `cpu-<N>` or `gpu`; None for any other name.

    `cpu-<N>` is the CPU divided into N virtual devices.

    Raises:
      InputError: if the machine does not have these devices.
    """
    match = re.fullmatch(r"cpu(?:-([1-9]\d*))?|gpu", name)
    if match is None:
        return None
    if name == "gpu":
        try:
            return LocalDevices(name, "gpu", len(jax.local_devices(backend="gpu")))
        except RuntimeError:
            raise InputError(
                "topology is 'gpu', but JAX finds no GPU; choose cpu or a TPU such as v3-8"
            ) from None
    count = int(match[1] or 1)
    use_virtual_devices(count)
    available = len(jax.local_devices(backend="cpu"))
    if available < count:
        raise InputError(
            f"topology is {name!r}, but JAX has {available} CPU devices; choose cpu-{available}"
        )
    return LocalDevices(name, "cpu", count)


def this_machine() -> LocalDevices:
    """Return the devices that JAX uses on this machine; a CPU counts as one device."""
    platform = jax.default_backend()
    if platform == "cpu":
        return LocalDevices("cpu", "cpu", 1)
    return LocalDevices(platform, platform, jax.local_device_count())


def slice_named(name: str) -> Slice:
    """Return the devices called `name`: a TPU slice, or `cpu`, `cpu-<N>` or `gpu` of this machine.

    Raises:
      InputError: if there is no slice of that name, or the machine does not have these devices.
    """
    return local_devices(name) or topology(name)


def topology(name: str) -> Topology:
    """Return the TPU slice called `name` (see `Topology`).

    Raises:
      InputError: if there is no such slice.
    """
    several = re.fullmatch(r"([1-9]\d*)x(.+)", name)
    if several:
        return dataclasses.replace(topology(several[2]), name=name, slices=int(several[1]))
    explicit = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", name)
    if explicit and explicit[1] in GENERATIONS:
        return Topology(name, explicit[1], tuple(map(int, explicit[2].split("x"))))
    match = re.fullmatch(r"(v5litepod|\w+)-(\d+)", name)
    generation = match[1].replace("v5litepod", "v5e") if match else ""
    if match is None or generation not in GENERATIONS:
        examples = ", ".join(f"{known}-8" for known in GENERATIONS)
        raise InputError(
            f"topology is {name!r}, expected a name such as {examples}, v5p:16x16x24 or 2xv5e-256, "
            "or this machine's cpu, cpu-8 or gpu"
        )
    layout = GENERATIONS[generation]
    chips, rest = divmod(int(match[2]), layout.units * layout.devices)
    grid = _grid(chips, layout.dimensions)
    if rest or grid is None:
        raise InputError(
            f"topology is {name!r}, but a size given as one number must be a power of two; for "
            "another size, give the grid of chips, such as "
            f"{generation}:4x4{'x4' * (layout.dimensions - 2)}"
        )
    return Topology(name, generation, grid)


def _grid(chips: int, dimensions: int) -> tuple[int, ...] | None:
    """Return the grid of chips in a Google Cloud slice of `chips` chips, such as (4, 4).

    Returns None if `chips` is not a power of two.
    """
    doublings = chips.bit_length() - 1
    if chips < 1 or chips != 2**doublings:
        return None
    if dimensions == 3 and doublings == 2:
        return (2, 2, 1)
    sizes = [2 ** ((doublings + axis) // dimensions) for axis in range(dimensions)]
    return tuple(sizes)
