"""Values of the virtual devices that one real device stands for, and collectives on them.

A sum over a mesh axis adds in a binary tree over the index of the virtual devices, whatever the
real mesh.  A real device adds the subtree of its block, and the rest of the tree follows across
devices.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from mesh_transformer.mesh.equations import AXES, axis_names

Axes = tuple[str, ...]  # mesh axes, in the order of `AXES`


def ordered(axes: Iterable[Any]) -> Axes:
    """Return the mesh axes among `axes`, in the order of `AXES`."""
    present = set(axes)
    return tuple(axis for axis in AXES if axis in present)


class Value(NamedTuple):
    """A value on each of the virtual devices of a real device.

    Attributes:
      array: the values, [*blocks, *shape], with one axis of blocks for each of `axes`.
      axes: the mesh axes along which the virtual devices may differ.
    """

    array: Any
    axes: Axes


class Blocks:
    """The block of virtual devices that a real device stands for.

    Args:
      blocks: the number of virtual devices per real device, along each mesh axis.
      devices: the number of real devices along each mesh axis.
    """

    def __init__(self, blocks: dict[str, int], devices: dict[str, int]):
        self.blocks, self.devices = blocks, devices

    def split(self, x: Array, spec: P) -> Value:
        """Split this device's part of a global array, whose layout is `spec`, into blocks."""
        axes = ordered(spec)
        for axis in reversed(axes):
            at = tuple(spec).index(axis) + len(axes) - 1 - axes.index(axis)
            x = jnp.moveaxis(_unmerged(x, at, self.blocks[axis]), at, 0)
        return Value(x, axes)

    def join(self, value: Value, spec: P) -> Array:
        """Undo `split`."""
        axes = ordered(spec)
        x = self.spread(value, axes)
        for axis in axes:
            at = tuple(spec).index(axis) + len(axes) - 1 - axes.index(axis)
            x = _merged(jnp.moveaxis(x, 0, at), at)
        return x

    def spread(self, value: Value, axes: Axes) -> Array:
        """Return the array of a value, repeated along those of `axes` that it does not have."""
        assert set(value.axes) <= set(axes), (value.axes, axes)
        x = value.array
        for at, axis in enumerate(axes):
            if axis not in value.axes:
                x = jnp.repeat(jnp.expand_dims(x, at), self.blocks[axis], at)
        return x

    def sum(self, value: Value, axes: Axes) -> Value:
        """Sum a value over mesh axes."""
        for axis in reversed(axes):
            rest = ordered({*value.axes} - {axis})
            if axis in value.axes:
                own = _tree(value.array, value.axes.index(axis))
                value = Value(self._sum_across(own, axis), rest)
            else:  # equal on all virtual devices, so that each level of the tree doubles it
                size = self.blocks[axis] * self.devices[axis]
                value = Value(value.array * size, rest)
        return value

    def _sum_across(self, x: Array, axis: str) -> Array:
        """Sum x over the real devices along a mesh axis.

        Each device adds one part of x, which it receives from all devices, and the parts are
        gathered.  This sends as many bytes as a ring.
        """
        devices = self.devices[axis]
        if devices == 1:
            return x
        if x.size < devices:
            return _tree(lax.all_gather(x, axis), 0)
        parts = jnp.pad(x.reshape(-1), (0, -x.size % devices)).reshape(devices, -1)
        own = _tree(lax.all_to_all(parts, axis, 0, 0, tiled=True), 0)
        return lax.all_gather(own, axis, tiled=True)[: x.size].reshape(x.shape)

    def extreme(self, value: Value, axes: Axes, *, largest: bool) -> Value:
        """Return the elementwise maximum or minimum over mesh axes."""
        x = value.array
        for at, axis in reversed(list(enumerate(value.axes))):
            if axis in axes:
                x = x.max(at) if largest else x.min(at)
        across = tuple(axis for axis in axes if self.devices[axis] > 1)
        x = (lax.pmax if largest else lax.pmin)(x, across) if across else x
        return Value(x, ordered({*value.axes} - {*axes}))

    def gather(self, value: Value, params: dict[str, Any]) -> Value:
        """Run the primitive `all_gather`."""
        (axis,) = axis_names(params)
        axes = ordered({*value.axes, axis})
        at = len(axes) - 1 + params["all_gather_dimension"]
        x = jnp.moveaxis(self.spread(value, axes), axes.index(axis), at)
        x = _merged(x, at) if params["tiled"] else x
        if self.devices[axis] > 1:
            x = lax.all_gather(x, axis, axis=at, tiled=True)
        return Value(x, ordered({*axes} - {axis}))

    def scatter(self, value: Value, params: dict[str, Any]) -> Value:
        """Run the primitive `reduce_scatter`, which sums and splits an array."""
        (axis,) = axis_names(params)
        assert params["tiled"]
        axes = ordered({*value.axes, axis})
        at, devices = len(axes) - 1 + params["scatter_dimension"], self.devices[axis]
        x = _tree(self.spread(value, axes), axes.index(axis))
        if devices > 1:
            x = lax.all_to_all(_unmerged(x, at, devices), axis, at, at, tiled=True)
            x = _tree(x, at)
        return Value(jnp.moveaxis(_unmerged(x, at, self.blocks[axis]), at, axes.index(axis)), axes)

    def shift(self, value: Value, params: dict[str, Any]) -> Value:
        """Run the primitive `ppermute`, for the pairs of `Positions.shift`."""
        (axis,), pairs = axis_names(params), params["perm"]
        size, devices = self.blocks[axis], self.devices[axis]
        distance = pairs[0][1] - pairs[0][0]
        assert {(to - of - distance) % (size * devices) for of, to in pairs} == {0}
        if axis not in value.axes:  # equal on all virtual devices
            return value
        at, (far, near) = value.axes.index(axis), divmod(distance % (size * devices), size)

        def across(x: Array, distance: int) -> Array:
            if distance % devices == 0:
                return x
            to = [(device, (device + distance) % devices) for device in range(devices)]
            return lax.ppermute(x, axis, to)

        rest, passed = jnp.split(value.array, [size - near], axis=at)
        parts = ([across(passed, far + 1)] if near else []) + [across(rest, far)]
        return Value(jnp.concatenate(parts, axis=at), value.axes)

    def exchange(self, value: Value, params: dict[str, Any]) -> Value:
        """Run the primitive `all_to_all`, which splits one array axis and concatenates another."""
        (axis,) = axis_names(params)
        assert params["tiled"]
        axes = ordered({*value.axes, axis})
        at, of = axes.index(axis), len(axes) + params["split_axis"]
        x, size = self.spread(value, axes), self.blocks[axis]
        # The device and the virtual device that each part is for.
        x = _unmerged(_unmerged(x, of, self.devices[axis]), of + 1, size)
        if self.devices[axis] > 1:  # afterwards, the device that it comes from
            x = lax.all_to_all(x, axis, of, of, tiled=True)
        order = [i for i in range(x.ndim) if i not in (at, of, of + 1)]
        order.insert(at, of + 1)
        to = len(axes) + params["concat_axis"]
        order[to:to] = [of, at]
        x = x.transpose(order)
        return Value(_merged(_merged(x, to), to), axes)


def _unmerged(x: Array, at: int, parts: int) -> Array:
    """Split the array axis `at` into two, of which the first has the size `parts`."""
    return x.reshape(*x.shape[:at], parts, x.shape[at] // parts, *x.shape[at + 1 :])


def _merged(x: Array, at: int) -> Array:
    """Merge the array axes `at` and `at` + 1."""
    return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])


def _tree(x: Array, at: int) -> Array:
    """Sum x over an array axis, whose size is a power of two, in a binary tree."""
    while x.shape[at] > 1:
        even, odd = (lax.slice_in_dim(x, first, None, 2, at) for first in (0, 1))
        x = _add(even, odd)
    return jnp.squeeze(x, at)


def _add(x: Array, y: Array) -> Array:
    """Add two arrays and round each sum to their dtype, even if the compiler would rather not."""
    if x.dtype != jnp.bfloat16:
        return x + y
    total = x.astype(jnp.float32) + y.astype(jnp.float32)
    return lax.reduce_precision(total, 8, 7).astype(jnp.bfloat16)
