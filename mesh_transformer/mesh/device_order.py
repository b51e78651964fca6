"""The order of devices in a mesh, by the links between TPU chips.

The chips of a TPU slice are a grid of two or three dimensions, each linked to its neighbours.  JAX
lists them by host.  In the order of this module, the devices of a replica are a small block of the
grid, in an order in which each is a neighbour of the next one; so are the blocks.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mesh_transformer.mesh.accelerators import GENERATIONS, hardware_of

Sizes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Hops:
    """How far apart the devices of a mesh are whose data is summed over one axis.

    Attributes:
      ring: number of links on the way from each device to the next one, and from the last one to
        the first, added up; on average over the groups.
      most: the largest number of links between two that follow each other.
    """

    ring: float
    most: int


@dataclasses.dataclass(frozen=True)
class Distances:
    """The hops of a mesh, and those of JAX's order of the same devices, for each axis."""

    chosen: dict[str, Hops]
    plain: dict[str, Hops]

    def line(self) -> str:
        """Format the distances as one line of text."""
        parts = [
            f"{axis} {chosen.ring:.0f}, at most {chosen.most} to the next ({plain.ring:.0f} and "
            f"{plain.most} in JAX's order)"
            for axis, chosen in self.chosen.items()
            if (plain := self.plain[axis])
        ]
        return f"links round the devices of an axis: {'; '.join(parts)}"


class Grid:
    """The chips of one TPU slice.

    Attributes:
      sizes: number of chips along each dimension.
      chips: the devices of each chip, an array [*sizes, devices per chip].
      wraps: for each dimension, whether its last chip is linked to its first one.
    """

    def __init__(self, sizes: Sizes, chips: np.ndarray):
        self.sizes = sizes
        self.chips = chips
        hardware = hardware_of(chips.flat[0])
        generation = GENERATIONS.get(hardware.name) if hardware else None
        self.wraps = generation.wraps(sizes) if generation else (False,) * len(sizes)

    @classmethod
    def of(cls, devices: Sequence[Any]) -> "Grid | None":
        """Return the grid of these devices; None if they are not all devices of a TPU grid."""
        slices = {slice_of(device) for device in devices}
        on_tpu = all(getattr(device, "platform", None) == "tpu" for device in devices)
        if not on_tpu or len(slices) > 1 or not hasattr(devices[0], "coords"):
            return None
        chips: dict[tuple[int, ...], list[Any]] = {}
        for device in sorted(devices, key=lambda device: getattr(device, "core_on_chip", 0)):
            chips.setdefault(tuple(device.coords), []).append(device)
        first, last = np.min(list(chips), axis=0), np.max(list(chips), axis=0)
        sizes = tuple(int(size) for size in last - first + 1)
        count = len(devices) // len(chips)
        is_full = len(chips) == math.prod(sizes) and {len(own) for own in chips.values()} == {count}
        if not is_full:
            return None
        array = np.empty((*sizes, count), object)
        for place, own in chips.items():
            array[tuple(np.subtract(place, first))] = own
        return cls(sizes, array)

    def arranged(self, replica: Sizes, block: Sizes) -> np.ndarray:
        """Return the devices in an order in which each block of a size is a ring.

        So are the blocks of each replica, and the replicas.

        Args:
          replica: chips of a replica along each dimension.
          block: chips along each dimension of the devices that share a part of the positions.
        """
        chips = np.zeros((1, len(self.sizes)), int)
        for outer, inner in ((self.sizes, replica), (replica, block), (block, (1,) * len(block))):
            places = np.array(_ring(tuple(np.floor_divide(outer, inner)))) * inner
            chips = (chips[:, None] + places).reshape(-1, len(self.sizes))
        index: tuple[Any, ...] = tuple(chips.T)
        return self.chips[index].reshape(-1)

    def hops(self, devices: np.ndarray) -> dict[str, Hops]:
        """Return the hops over each axis of a mesh with these devices, [dp, mp] or [dp, cp, mp]."""
        coords = [device.coords for device in devices.flat]
        places = np.array(coords).reshape(*devices.shape, -1)
        sizes = np.array(self.sizes)
        result = {}
        for axis, name in enumerate(axes_of(devices)):
            away = np.abs(places - np.roll(places, -1, axis))
            away = np.where(self.wraps, np.minimum(away, sizes - away), away).sum(axis=-1)
            result[name] = Hops(float(away.sum(axis=axis).mean()), int(away.max()))
        return result


def first_devices(count: int) -> list[Any] | None:
    """Return the first of JAX's devices, or None if this is their number."""
    return None if count == jax.device_count() else jax.devices()[:count]


def axes_of(devices: np.ndarray) -> tuple[str, ...]:
    """Return the names of the axes of a mesh with these devices, [dp, mp] or [dp, cp, mp]."""
    return ("dp", "mp") if devices.ndim == 2 else ("dp", "cp", "mp")


def arranged(devices: Sequence[Any], mp: int, cp: int = 1) -> np.ndarray:
    """Return devices as an array for a mesh, such that neighbours follow each other.

    Of all sizes of blocks, the ones are chosen whose replicas have the fewest hosts, then the
    fewest hops over mp, then over cp, then over dp.  Devices that are not a grid of TPUs stay in
    their order.  Several slices follow each other along dp.

    Returns:
      [dp, mp] or, if cp is not 1, [dp, cp, mp].
    """
    shape = (-1, mp) if cp == 1 else (-1, cp, mp)
    parts = [
        [device for device in devices if slice_of(device) == number]
        for number in sorted(set(map(slice_of, devices)))
    ]
    if len(parts) > 1 and all(len(part) % (mp * cp) == 0 for part in parts):
        return np.concatenate([arranged(part, mp, cp) for part in parts])
    grid = Grid.of(devices)
    plain = np.array(devices, object).reshape(shape)
    if grid is None:
        return plain
    choices = [
        grid.arranged(replica, block).reshape(shape)
        for replica in _blocks(grid, grid.sizes, mp * cp)
        for block in _blocks(grid, replica, mp)
    ]

    def cost(choice: np.ndarray) -> tuple[float, ...]:
        rows = choice.reshape(-1, mp * cp)
        hosts = np.mean([len({device.process_index for device in row}) for row in rows])
        hops = grid.hops(choice)
        along_cp = (hops["cp"].ring, hops["cp"].most) if cp > 1 else ()
        return float(hosts), hops["mp"].ring, hops["mp"].most, *along_cp, hops["dp"].ring

    return min([*choices, plain], key=cost)


def distances(devices: Sequence[Any], chosen: np.ndarray) -> Distances | None:
    """Return the distances of a mesh; None if its devices are not TPUs of a whole slice.

    With several slices, these are the distances within the first one.

    Args:
      devices: the devices in JAX's order.
      chosen: the same devices in the order of the mesh, [dp, mp] or [dp, cp, mp].
    """
    first = min(map(slice_of, devices))
    devices = [device for device in devices if slice_of(device) == first]
    chosen = chosen[[slice_of(row.flat[0]) == first for row in chosen]]
    grid = Grid.of(devices)
    if grid is None or chosen.size != len(devices):
        return None
    plain = np.array(devices, object).reshape(chosen.shape)
    return Distances(grid.hops(chosen), grid.hops(plain))


def slice_of(device: Any) -> int:
    """Return the number of the TPU slice that a device belongs to."""
    return getattr(device, "slice_index", 0) or 0


def _blocks(grid: Grid, whole: Sizes, count: int) -> Iterator[Sizes]:
    """Yield the sizes of blocks of `count` devices that divide `whole`, a block of a grid.

    A block of one chip may have more devices.
    """
    per_chip = grid.chips.shape[-1]
    if count % per_chip and per_chip % count:
        return
    chips = max(count // per_chip, 1)
    divisors = [[n for n in range(1, size + 1) if size % n == 0] for size in whole]
    for block in itertools.product(*divisors):
        if math.prod(block) == chips:
            yield block


def _ring(sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the cells of a grid in an order in which each is a neighbour of the next one.

    The last one is a neighbour of the first one too, if the grid has two dimensions or more with
    several cells, and an even number of cells.
    """
    order = sorted(range(len(sizes)), key=lambda axis: (sizes[axis] % 2, sizes[axis] == 1))
    # Along `first`, which has an even number of cells if any dimension has, the cells are in rows.
    first, rest = order[0], order[1:]
    row = _snake(tuple(sizes[axis] for axis in rest))
    if sizes[first] % 2 or len(row) == 1:
        cells = [(at, *cell) for at, cell in _turning(range(sizes[first]), row)]
    else:
        # Back and forth through all but the first cell of each row, then back through these.
        there = [(at, *cell) for at, cell in _turning(range(sizes[first]), row[1:])]
        back = [(at, *row[0]) for at in reversed(range(sizes[first]))]
        cells = [back[-1], *there, *back[:-1]]
    places = np.argsort([first, *rest])
    return [tuple(cell[place] for place in places) for cell in cells]


def _snake(sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the cells of a grid in an order in which each is a neighbour of the next one."""
    if not sizes:
        return [()]
    return [(at, *cell) for at, cell in _turning(range(sizes[0]), _snake(sizes[1:]))]


def _turning(rows: Sequence[int], row: list[tuple[int, ...]]) -> Iterator[tuple[int, Any]]:
    """Yield the cells of all rows, every second row in reverse."""
    for number in rows:
        for cell in reversed(row) if number % 2 else row:
            yield number, cell
