"""The groups of devices in a collective's HLO, and the mesh axes over which they exchange data."""

import functools
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

Groups = frozenset[frozenset[int]]


def groups_of(text: str) -> Groups:
    """Parse the groups of devices (`replica_groups`) in a line of HLO text.

    All three notations of HLO are supported.  A sender and its receiver (`source_target_pairs`) are
    a group.  The result is empty if the line has no groups, and if its groups are of replicas of a
    whole program: a program of JAX has one replica, of which all devices are a part.
    """
    rows: Any = ()
    if listed := re.search(r"(?:replica_groups|target_pairs)=\{(\{[\d,{}]*\})\}", text):
        rows = [row.split(",") for row in re.findall(r"\{([\d,]+)\}", listed[1])]
    elif named := re.search(
        r"replica_groups=mesh\[([^]]*)\](?:, *device_ids=\((.*?)\))? *\{([^}]*)\}", text
    ):
        rows = _named_groups(*named.groups())
    elif iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        rows = _iota(iota[2], iota[3]).reshape(_sizes(iota[1]))
    groups = frozenset(frozenset(map(int, row)) for row in rows)
    of_replicas = "channel_id=" in text and "use_global_device_ids=true" not in text
    return frozenset() if of_replicas and groups == {frozenset({0})} else groups


def _named_groups(axes: str, devices: str | None, over: str) -> np.ndarray:
    """Return the groups along the axes `over` of a mesh, as an array [group, device].

    Args:
      axes: names and sizes of the mesh's axes, such as "'a'=2,'b'=4".
      devices: the devices in the mesh's order, such as "0,2,1,3" or "[2,2]T(1,0)"; None if they are
        in ascending order.
      over: names of axes, such as "'a'", or parts of axes: "'b':(2)2" are the two devices that
        follow when b is split into two parts first.
    """
    chosen = re.findall(r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", over)
    sizes: list[int] = []
    along: list[int] = []  # indices of `sizes`
    for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", axes):
        parts = [
            (int(a or 1), int(a or 1) * int(n or size)) for axis, a, n in chosen if axis == name
        ]
        for low, high in itertools.pairwise(sorted({1, int(size), *itertools.chain(*parts)})):
            if any(first <= low and high <= last for first, last in parts):
                along.append(len(sizes))
            sizes.append(high // low)
    ids = np.arange(math.prod(sizes))
    if devices is not None:
        iota = re.fullmatch(r"\[([\d,]+)\]T\(([\d,]+)\)", devices)
        ids = _iota(iota[1], iota[2]).reshape(-1) if iota else np.array(_sizes(devices))
    return _along(ids.reshape(sizes), along)


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Return the numbers from 0 in an array of these sizes, with its axes in another order."""
    ids = np.arange(math.prod(_sizes(sizes))).reshape(_sizes(sizes))
    return ids.transpose(_sizes(order)) if order else ids


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _along(ids: np.ndarray, axes: list[int]) -> np.ndarray:
    """Return the groups of entries of an array that differ only in some of its axes, as rows."""
    ids = np.moveaxis(ids, axes, range(-len(axes), 0))
    return ids.reshape(-1, math.prod(ids.shape[ids.ndim - len(axes) :]))


def axes_of(kind: str, groups: Groups, mesh: Mapping[str, int]) -> tuple[str, int]:
    """Return the mesh axes that a collective runs over, and the number of devices per group.

    These are the axes along which the devices of any group differ, such as "mp" or "dp and mp".  If
    the groups are not exactly those of a collective over these axes, the name begins with "part
    of": it runs over only some of an axis's devices, over devices on a diagonal, or over groups of
    different sizes.  Sizes of arrays do not matter.  It is "" if no data is exchanged.

    Args:
      kind: kind of collective, such as "all-reduce".  What a collective-permute sends from one
        device to another is never only a part.
      groups: those of `groups_of`.
      mesh: names and sizes of the mesh's axes.
    """
    return _axes_of(kind == "collective-permute", groups, tuple(mesh.items()))


@functools.cache
def _axes_of(
    is_permute: bool, groups: Groups, mesh: tuple[tuple[str, int], ...]
) -> tuple[str, int]:
    ids = np.arange(math.prod(size for _, size in mesh)).reshape([size for _, size in mesh])
    if not groups and not is_permute:
        groups = frozenset({frozenset(map(int, ids.flat))})
    places = [np.unravel_index(list(group), ids.shape) for group in groups]
    differing = [
        axis for axis in range(len(mesh)) if any(len(set(place[axis])) > 1 for place in places)
    ]
    if not differing:
        return "", 1
    name = " and ".join(mesh[axis][0] for axis in differing)
    whole = frozenset(frozenset(map(int, row)) for row in _along(ids, differing))
    part = "" if is_permute or groups == whole else "part of "
    return part + name, max(map(len, groups))
