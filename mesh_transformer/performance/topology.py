"""Devices to plan for: TPU slices that nobody here owns, or what this machine has.

The slices are described by their compiler: `libtpu` alone, without a TPU.
"""

import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mesh_transformer.mesh import accelerators
from mesh_transformer.mesh.accelerators import GENERATIONS, SLICES, Hardware
from mesh_transformer.mesh.devices import use_virtual_devices
from mesh_transformer.util import InputError

# Where `make libtpu` puts it: apart, as it warns on every machine without a TPU if JAX finds it.
LIBRARY = Path(sys.prefix) / "libtpu/libtpu/libtpu.so"
# libtpu reads them as it is loaded; without them it asks a cloud's server where it is.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


@dataclass(frozen=True)
class Topology:
    """A slice by its name in the cloud, such as v3-8 or v5e-256."""

    name: str
    generation: str
    grid: tuple[int, ...]  # of chips

    @property
    def devices(self) -> int:
        """JAX devices of the slice."""
        return math.prod(self.grid) * SLICES[self.generation].devices

    @property
    def hbm(self) -> int:
        """Bytes that a program may have on one device."""
        return SLICES[self.generation].hbm

    def hardware(self, dtype: str) -> Hardware:
        """What one device can; the table's peak is that of bf16, whatever `dtype` is."""
        return accelerators.hardware(self.generation, dtype)

    def mesh(self, dp: int, mp: int) -> Mesh:
        """A (dp, mp) mesh of devices that programs can be compiled for, and do not run on."""
        return Mesh(_device_grid(self._describe(), (dp, mp)), ("dp", "mp"))

    def _describe(self) -> list[Any]:
        from jax.experimental import topologies

        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if LIBRARY.exists():
            os.environ.setdefault("TPU_LIBRARY_PATH", str(LIBRARY))
        grid = "x".join(map(str, self.grid))
        try:
            return topologies.get_topology_desc(
                platform="tpu",
                topology_name=f"{self.generation}:{grid}",
                **SLICES[self.generation].options,
            ).devices
        except Exception as error:  # what libtpu raises has no type of its own
            if "libtpu" not in str(error) and "Unable to initialize" not in str(error):
                raise InputError(
                    f"topology {self.name}: {' '.join(str(error).split())[:200]}"
                ) from None
            raise InputError(
                "the compiler for TPUs is missing; `make libtpu` installs it"
            ) from None


@dataclass(frozen=True)
class Present:
    """Devices that this machine has: its GPUs, or its CPU in parts."""

    name: str
    platform: str
    devices: int

    @property
    def hbm(self) -> int:
        """Bytes that a program may have on one device; of a CPU, its part of what there is."""
        if self.platform == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.devices
        told = self._list()[0].memory_stats()
        if told is None or "bytes_limit" not in told:
            kind = self._list()[0].device_kind
            raise InputError(
                f"topology {self.name}: {kind} does not tell how much memory a program may have "
                "(memory_stats); name a TPU"
            )
        return told["bytes_limit"]

    def hardware(self, dtype: str) -> Hardware:
        """What one device can."""
        if self.platform == "cpu":
            return accelerators.hardware("cpu", dtype).part(self.devices)
        found = accelerators.hardware_of(self._list()[0])
        if found is None:
            kind = self._list()[0].device_kind
            raise InputError(
                f"topology {self.name}: {kind} is not in the table of hardware; name a TPU, or add "
                "it to flops.HARDWARE"
            )
        return found

    def mesh(self, dp: int, mp: int) -> Mesh:
        """A (dp, mp) mesh of them."""
        return Mesh(np.asarray(self._list()).reshape(dp, mp), ("dp", "mp"))

    def _list(self) -> list[Any]:
        return jax.local_devices(backend=self.platform)[: self.devices]


Slice = Topology | Present


def present(name: str) -> Present | None:
    """The devices of this machine that `cpu`, `cpu-8` or `gpu` name; None for another name.

    Raises:
      InputError: where the machine has no such devices.
    """
    found = re.fullmatch(r"cpu(?:-([1-9]\d*))?|gpu", name)
    if found is None:
        return None
    if name == "gpu":
        try:
            return Present(name, "gpu", len(jax.local_devices(backend="gpu")))
        except RuntimeError:
            raise InputError("topology is 'gpu', but JAX finds none here; name a TPU") from None
    wanted = int(found[1] or 1)
    use_virtual_devices(wanted)
    there = len(jax.local_devices(backend="cpu"))
    if there < wanted:
        raise InputError(f"topology is {name!r}, but JAX shows {there} CPU devices; name no more")
    return Present(name, "cpu", wanted)


def _device_grid(devices: list[Any], shape: tuple[int, int]) -> np.ndarray:
    """The devices as a grid whose rows are neighbours."""
    from jax.experimental import mesh_utils

    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def slice_named(name: str) -> Slice:
    """The TPU slice of that name, or this machine's own devices."""
    return present(name) or topology(name)


def topology(name: str) -> Topology:
    """The slice of that name; a grid of chips may be given itself, as in v5p:16x16x24.

    Raises:
      InputError: for a name that no slice has.
    """
    given = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", name)
    if given and given[1] in SLICES:
        return Topology(name, given[1], tuple(map(int, given[2].split("x"))))
    found = re.fullmatch(r"(v5litepod|\w+)-(\d+)", name)
    generation = {"v5litepod": "v5e"}.get(found[1], found[1]) if found else ""
    if found is None or generation not in SLICES:
        example = ", ".join(f"{each}-8" for each in SLICES)
        raise InputError(f"topology is {name!r}, expected one such as {example} or v5p:16x16x24")
    known = SLICES[generation]
    units = GENERATIONS["v5litepod" if generation == "v5e" else generation].units
    chips, rest = divmod(int(found[2]), units * known.devices)
    grid = _grid(chips, known.dimensions)
    if rest or grid is None:
        raise InputError(
            f"topology is {name!r}: {generation} has slices of a power of two; for another grid "
            f"of chips give it itself, such as {generation}:4x4{'x4' * (known.dimensions - 2)}"
        )
    return Topology(name, generation, grid)


def _grid(chips: int, dimensions: int) -> tuple[int, ...] | None:
    """The grid of the cloud's slice with so many chips, a power of two."""
    doublings = chips.bit_length() - 1
    if chips < 1 or chips != 2**doublings:
        return None
    if dimensions == 3 and doublings == 2:
        return (2, 2, 1)
    sizes = [2 ** ((doublings + place) // dimensions) for place in range(dimensions)]
    return tuple(sizes)
