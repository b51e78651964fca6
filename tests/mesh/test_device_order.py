"""The order of TPU devices in a mesh, on grids of made devices."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from mesh_transformer.mesh.device_order import Grid, Hops, arranged, distances


@dataclasses.dataclass(frozen=True, order=True)
class Chip:
    """One device of a made TPU; chips of a host are 2 x 2, as on most TPUs."""

    coords: tuple[int, ...]
    core_on_chip: int
    process_index: int
    slice_index: int
    device_kind: str
    platform: str = "tpu"


def chips(sizes, cores=1, kind="TPU v4", slice_index=0):
    """Return the devices of a slice, host by host, as JAX lists them."""
    places = [place[::-1] for place in itertools.product(*(range(size) for size in sizes[::-1]))]
    hosts = sorted({(x // 2, y // 2, *rest) for x, y, *rest in places}, key=lambda host: host[::-1])
    devices = [
        Chip(
            place,
            core,
            hosts.index((place[0] // 2, place[1] // 2, *place[2:])),
            slice_index,
            kind,
        )
        for place in places
        for core in range(cores)
    ]
    return sorted(devices, key=lambda device: device.process_index)


def hops(devices, mesh):
    """Return the hops of a mesh, and of the devices' own order."""
    result = distances(devices, mesh)
    assert result is not None
    return result.chosen, result.plain


SLICES = [  # sizes, cores per chip, kind
    ((2, 2), 2, "TPU v3"),
    ((8, 16), 2, "TPU v3"),
    ((2, 4), 1, "TPU v5 lite"),
    ((16, 16), 1, "TPU v5 lite"),
    ((2, 2, 1), 1, "TPU v4"),
    ((4, 4, 8), 1, "TPU v4"),
    ((4, 4, 4), 1, "TPU v5"),
    ((2, 2, 4), 1, "TPU v5"),
]


@pytest.mark.parametrize(
    ("sizes", "cores", "kind", "mp"),
    [
        (sizes, cores, kind, mp)
        for sizes, cores, kind in SLICES
        for mp in (1, 2, 4, 8, 16)
        if math.prod(sizes) * cores % mp == 0
    ],
)
def test_neighbours_follow_each_other(sizes, cores, kind, mp):
    devices = chips(sizes, cores, kind)
    mesh = arranged(devices, mp)
    assert sorted(mesh.flat) == sorted(devices)
    # JAX finds the memories of TPUs that are not present only through a device of the first host.
    assert mesh.flat[0].process_index == 0
    chosen, plain = hops(devices, mesh)
    for axis in ("dp", "mp"):
        assert chosen[axis].ring <= plain[axis].ring
        assert chosen[axis].most <= plain[axis].most
    if mp >= 2 * cores:  # the chips of a replica are a ring of neighbours
        assert chosen["mp"].ring == mp // cores
        assert chosen["mp"].most == 1
    hosts = [len({device.process_index for device in row}) for row in mesh]
    assert max(hosts) == max(1, mp // (4 * cores))


@pytest.mark.parametrize(
    ("sizes", "kind", "cp", "mp"),
    [
        ((2, 4), "TPU v5 lite", 8, 1),
        ((2, 4), "TPU v5 lite", 4, 2),
        ((16, 16), "TPU v5 lite", 16, 4),
        ((8, 8), "TPU v5 lite", 4, 4),
        ((4, 4, 4), "TPU v5", 8, 4),
        ((4, 4, 2), "TPU v5", 8, 1),
        ((4, 4, 2), "TPU v5", 2, 8),
    ],
)
def test_the_devices_that_split_a_sequence_are_a_ring(sizes, kind, cp, mp):
    """Along cp, the next device is as near as blocks of mp devices allow, and so is the first."""
    devices = chips(sizes, kind=kind)
    mesh = arranged(devices, mp, cp)
    assert mesh.shape == (math.prod(sizes) // (cp * mp), cp, mp)
    assert sorted(mesh.flat) == sorted(devices)
    chosen, plain = hops(devices, mesh)
    assert chosen["mp"] == hops(devices, arranged(devices, mp))[0]["mp"]  # mp comes first
    assert chosen["cp"].ring <= plain["cp"].ring
    if mp == 1:
        assert chosen["cp"] == Hops(cp, 1)
    else:  # a block of 2 or 4 devices is 2 chips long, one of 8 devices 4
        assert chosen["cp"].most <= max(mp // 2, 2)


def test_hops_count_the_links_of_a_ring():
    """Four chips in a row, of which the last is linked to the first only in a full torus."""
    for kind, sizes, wraps, ring in (("TPU v4", (4, 4, 4), True, 4), ("TPU v3", (4, 1), False, 6)):
        grid = Grid.of(chips(sizes, kind=kind))
        assert grid is not None
        assert set(grid.wraps) == {wraps}
        row = grid.chips[(slice(None), *[0] * len(sizes[1:]))].reshape(1, 4)
        assert grid.hops(row)["mp"] == Hops(ring, 1 if wraps else 3)


@pytest.mark.parametrize("mp", [1, 4, 8])
def test_slices_follow_each_other(mp):
    devices = [chip for index in (1, 0) for chip in chips((4, 4, 4), slice_index=index)]
    mesh = arranged(devices, mp)
    slices = np.array([[device.slice_index for device in row] for row in mesh])
    np.testing.assert_array_equal(slices, np.repeat([0, 1], 64 // mp)[:, None] * np.ones(mp))
    one = arranged(chips((4, 4, 4)), mp)
    assert [device.coords for device in mesh[: 64 // mp].flat] == [d.coords for d in one.flat]
    assert hops(devices, mesh)[0] == hops(chips((4, 4, 4)), one)[0]


def test_other_devices_stay_in_their_order():
    @dataclasses.dataclass(frozen=True)
    class Gpu:
        number: int
        coords: tuple[int, int, int] = (0, 0, 0)
        platform: str = "gpu"

    for devices in (
        [Gpu(number) for number in range(8)],
        chips((2, 4))[:-2],  # not a whole grid
        chips((3, 2), cores=2),  # replicas of 3 devices would be one chip and a half
        chips((2, 1)) + chips((2, 1), slice_index=1),  # a replica of both slices
    ):
        mp = {12: 3, 4: 4}.get(len(devices), 2)
        assert list(arranged(devices, mp).flat) == devices


def test_every_size_of_grid_has_a_ring():
    for sizes in itertools.product(range(1, 5), repeat=3):
        devices = chips(sizes, kind="TPU v5 lite")
        mesh = arranged(devices, math.prod(sizes))
        assert sorted(mesh.flat) == sorted(devices)
        chosen, _ = hops(devices, mesh)
        several = sum(size > 1 for size in sizes)
        if several > 1 and math.prod(sizes) % 2 == 0:
            assert chosen["mp"] == Hops(math.prod(sizes), 1)
