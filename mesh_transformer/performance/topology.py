"""Devices to plan for: TPU slices and GPUs, which need not be present, or this machine's devices.

The TPU compiler `libtpu` provides descriptions of a slice's devices, even on a machine without a
TPU.  GPUs that are not present are represented by a TPU slice of as many devices (`Gpus`).
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
from mesh_transformer.mesh.accelerators import GENERATIONS, GIB, GPU_MEMORY, Hardware
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
      platform: "tpu".
    """

    name: str
    generation: str
    grid: tuple[int, ...]
    slices: int = 1

    platform = "tpu"

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
        # Without this option, libtpu assumes the chips of a whole host, 2 x 2.
        has_hosts = all(size % 2 == 0 for size in self.grid[:2])
        one_per_host = {} if has_hosts else {"chips_per_host_bounds": (1, 1, 1)}
        try:
            return topologies.get_topology_desc(
                platform="tpu",
                topology_name=f"{self.generation}:{grid}",
                **dict(GENERATIONS[self.generation].options),
                **one_per_host,
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
                "plans for TPUs, and for GPUs that are not here, require the TPU compiler libtpu, "
                "which runs without TPUs; install it with `make libtpu`, or outside a checkout "
                f"with `{install}`"
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


# JAX's allocator takes this share of a GPU's memory, unless the environment variable
# XLA_PYTHON_CLIENT_MEM_FRACTION is set.
GPU_SHARE = 0.75
STAND_IN = "v5p"  # has the most memory of all TPU generations with one device per chip
# By how much more memory GPUs need than the stand-in: a share of its peak, and bytes.
GPU_MORE, GPU_EXTRA = 0.1, GIB
GPUS_PER_NODE = 8  # connected by NVLink
# GPUs of which only the memory is known are taken to be as fast as this one.
ASSUMED_GPU = "h100"
_GPU_MEMORY = re.compile(r"gpu:(\d+(?:\.\d+)?)GiB(?:x([1-9]\d*))?", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Gpus:
    """NVIDIA GPUs that need not be present.

    Their compiler is not available, so a step is compiled for TPUs in their place (`stand_in`), and
    its peak memory follows from that of the TPUs by rules (`peak_on`).

    Attributes:
      name: name in messages, such as 8xh100 or gpu:80GiBx8.
      model: name of the entry of `accelerators.HARDWARE` whose speed they have.
      memory: bytes of the whole memory of one GPU.
      devices: number of GPUs.
      is_assumed: whether `model` is an assumption.
      platform: "gpu".
      compute_capability: a lower bound, with which GPUs have bf16.
    """

    name: str
    model: str
    memory: int
    devices: int
    is_assumed: bool = False

    platform = "gpu"
    compute_capability = "8.0"

    @property
    def hbm(self) -> int:
        """Bytes that a program may use on one device, of JAX's allocator (`GPU_SHARE`)."""
        share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_SHARE))
        try:
            return int(float(share) * self.memory)
        except ValueError:
            raise InputError(
                f"the environment variable XLA_PYTHON_CLIENT_MEM_FRACTION is {share!r}, expected a "
                "number such as 0.95"
            ) from None

    @property
    def stand_in(self) -> Topology:
        """The TPU slice of as many devices that a step is compiled for."""
        grid = _grid(self.devices, GENERATIONS[STAND_IN].dimensions) or (1, 1, self.devices)
        return Topology(f"{STAND_IN}:{'x'.join(map(str, grid))}", STAND_IN, grid)

    def hardware(self, dtype: str) -> Hardware:
        """Return the peak FLOP/s and the bandwidths of one device, as `Topology.hardware` does."""
        hardware = accelerators.hardware(self.model, dtype)
        if not self.is_assumed:
            return hardware
        source = f"assumed to be as fast as an {hardware.kind}; {hardware.source}"
        return dataclasses.replace(hardware, source=source)

    def mesh(self, mp: int, cp: int = 1) -> Mesh:
        """Return a (dp, cp, mp) mesh of the stand-in's devices, as `Topology.mesh` does."""
        return self.stand_in.mesh(mp, cp)

    def distances(self, mesh: Mesh) -> Distances | None:
        """Return None: GPUs are not a grid."""


# Devices to plan for.
Slice = Topology | LocalDevices | Gpus


def peak_on(slice_: Slice, compiled: int) -> int:
    """Return the peak memory on a device of a program, given the compiler's in bytes.

    They differ on GPUs that are not present, by the rules `GPU_MORE` and `GPU_EXTRA`.
    """
    return int((1 + GPU_MORE) * compiled) + GPU_EXTRA if isinstance(slice_, Gpus) else compiled


def basis_of(slice_: Slice, *, on_paper: bool = False) -> str:
    """Return where the peak memory and the bytes of a plan come from, as a phrase.

    Args:
      on_paper: whether nothing was compiled.
    """
    basis = "on paper, not compiled"
    if not on_paper:
        compilers = {"tpu": "the compiler's, for TPUs", "gpu": "the compiler's, for this GPU"}
        basis = compilers.get(slice_.platform, "the compiler's, for CPUs")
    if not isinstance(slice_, Gpus):
        return basis
    if not on_paper:
        basis = f"those of the step compiled for TPUs ({slice_.stand_in.name}) in place of the GPUs"
    rules = f"the peak with {GPU_MORE:.0%} and {GPU_EXTRA / GIB:.0f} GiB more, as a rule for GPUs"
    beyond = "; all links taken for NVLink" if slice_.devices > GPUS_PER_NODE else ""
    return f"{basis}, {rules}{beyond}"


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
    """Return the devices called `name`.

    This is a TPU slice (see `Topology`), GPUs such as `8xH100` or `gpu:80GiBx8` (see `Gpus`), or
    `cpu`, `cpu-<N>` or `gpu` of this machine.

    Raises:
      InputError: if there are no devices of that name, or the machine does not have them.
    """
    return local_devices(name) or gpus_named(name) or topology(name)


def gpus_named(name: str) -> Gpus | None:
    """Return the GPUs named by such as `8xH100`, `h100` or `gpu:80GiBx8`; None for other names.

    After `gpu:`, the memory of each of them is given in GiB.
    """
    if match := _GPU_MEMORY.fullmatch(name):
        memory = int(float(match[1]) * GIB)
        return Gpus(name, ASSUMED_GPU, memory, int(match[2] or 1), is_assumed=True)
    match = re.fullmatch(r"(?:([1-9]\d*) *x *)?(\S+)", name.lower())
    if match is None or match[2] not in GPU_MEMORY:
        return None
    return Gpus(name, match[2], GPU_MEMORY[match[2]], int(match[1] or 1))


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
            f"GPUs such as 8xH100 (one of {', '.join(GPU_MEMORY)}) or gpu:80GiBx8, or this "
            "machine's cpu, cpu-8 or gpu"
        )
    layout = GENERATIONS[generation]
    chips, rest = divmod(int(match[2]), layout.units * layout.devices)
    grid = _grid(chips, layout.dimensions)
    if rest or grid is None:
        more = " or a multiple of 64 chips" if layout.dimensions == 3 else ""
        raise InputError(
            f"topology is {name!r}, but a size given as one number must be a power of two{more}; "
            "for another size, give the grid of chips, such as "
            f"{generation}:4x4{'x4' * (layout.dimensions - 2)}"
        )
    return Topology(name, generation, grid)


def _grid(chips: int, dimensions: int) -> tuple[int, ...] | None:
    """Return the grid of chips in a Google Cloud slice of `chips` chips, such as (4, 4).

    Returns None if there is no such slice: `chips` must be a power of two or, with three
    dimensions, a multiple of 64, whose grid consists of cubes of 4 x 4 x 4 chips.
    """
    if dimensions == 3 and chips > 0 and chips % 64 == 0:
        cubes = chips // 64
        sides = [n for n in range(1, cubes + 1) if cubes % n == 0]
        grids = [(a, b, cubes // a // b) for a in sides for b in sides if cubes // a % b == 0]
        ascending = [grid for grid in grids if grid[0] <= grid[1] <= grid[2]]
        a, b, c = min(ascending, key=sum)
        return 4 * a, 4 * b, 4 * c
    doublings = chips.bit_length() - 1
    if chips < 1 or chips != 2**doublings:
        return None
    if dimensions == 3 and doublings == 2:
        return (2, 2, 1)
    sizes = [2 ** ((doublings + axis) // dimensions) for axis in range(dimensions)]
    return tuple(sizes)
