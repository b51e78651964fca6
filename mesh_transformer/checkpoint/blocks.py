"""Blocks of a sharded state, which the hosts of a pod keep in memory.

If a host fails, the state can be restored from these blocks on a mesh of any shape.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mesh_transformer.checkpoint.state_tree import Path, leaves, nested
from mesh_transformer.util import InputError

MOST_BYTES = 64 * 2**20  # of a block; larger ones are split along their first axis


class Block(NamedTuple):
    """A box-shaped part of one array of a state: a range of indices along each axis.

    Attributes:
      path: the array's keys in the nested dicts of the state, outermost first.
      start, stop: the first index along each axis, and the index after the last.
    """

    path: Path
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    def intersection(self, other: "Block") -> "Block":
        """Return the common part of this block and another of the same array; it may be empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(max, start, map(min, self.stop, other.stop)))
        return Block(self.path, start, stop)

    def slices_in(self, outer: "Block") -> tuple[slice, ...]:
        """Return the slices that select this block in an array with the values of `outer`."""
        return tuple(
            slice(start - origin, stop - origin)
            for start, stop, origin in zip(self.start, self.stop, outer.start, strict=True)
        )


Plan = dict[Block, dict[int, int]]  # of each block: {the process that keeps it: the one it's from}


def plan(state: Any, processes: int) -> Plan:
    """Decide which processes keep which blocks of a state in memory.

    If there are several processes, two of them keep each block, so that the state is still complete
    when one process is lost.  The two are chosen from the processes that have the block on their
    devices, so that all processes keep about the same number of bytes.  If only one process has
    the block on its devices, the process with the next index keeps the block too.

    Args:
      state: nested dicts of global arrays, or of `ShapeDtypeStruct`s with shardings.
      processes: number of processes of the mesh.

    Returns:
      {block: {process that keeps the block: process that sends it there}}.  The result is the same
      in all processes.
    """
    result: Plan = {}
    kept = [0] * processes  # bytes
    for path, leaf in leaves(state).items():
        owners: dict[Block, set[int]] = {}
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            block = _block(path, index, leaf.shape)
            owners.setdefault(block, set()).add(device.process_index)
        for whole, owning in owners.items():
            first, *others = sorted(owning, key=lambda process: (kept[process], process))
            second = others[0] if others else (first + 1) % processes
            senders = {first: first, second: second if others else first}
            for process in senders:
                kept[process] += leaf.dtype.itemsize * math.prod(whole.shape)
            for block in _split(whole, leaf.dtype.itemsize):
                result[block] = senders
    return result


def _block(path: Path, index: tuple[slice, ...], shape: tuple[int, ...]) -> Block:
    bounds = [part.indices(length)[:2] for part, length in zip(index, shape, strict=True)]
    return Block(path, tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds))


def _split(block: Block, itemsize: int) -> Iterator[Block]:
    """Split a block along its first axis into blocks of at most `MOST_BYTES` bytes.

    A block of a single index on the first axis is never split, even if it has more bytes.

    Args:
      itemsize: bytes per array entry.
    """
    if not block.shape:
        yield block
        return
    rows = max(1, MOST_BYTES // max(1, itemsize * math.prod(block.shape[1:])))
    for start in range(block.start[0], block.stop[0], rows):
        stop = min(start + rows, block.stop[0])
        yield Block(block.path, (start, *block.start[1:]), (stop, *block.stop[1:]))


def copied(state: Any, planned: Plan) -> list[tuple[Block, list[int], np.ndarray]]:
    """Copy from the devices the blocks that this process will send, to itself or to others.

    When this function has returned, the state may be donated.

    Args:
      state: nested dicts of global arrays.
      planned: the result of `plan` for this state.

    Returns:
      For each block, a tuple (block, processes to send it to, its values as uint8 bytes).
    """
    process = jax.process_index()
    of_leaf: dict[Path, list[tuple[Block, list[int]]]] = {}
    for block, keepers in planned.items():
        if here := [keeper for keeper, sender in keepers.items() if sender == process]:
            of_leaf.setdefault(block.path, []).append((block, here))
    shards: list[tuple[Block, Any, list[tuple[Block, list[int]]]]] = []
    for path, leaf in leaves(state).items():
        unique = {
            _block(path, shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards
        }
        for whole, data in unique.items():
            wanted = [
                (block, keepers)
                for block, keepers in of_leaf.get(path, [])
                if block.intersection(whole) == block
            ]
            if wanted:
                data.copy_to_host_async()
                shards.append((whole, data, wanted))
    return [
        (block, keepers, _bytes(np.asarray(data)[block.slices_in(whole)]))
        for whole, data, wanted in shards
        for block, keepers in wanted
    ]


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.frombuffer(x.tobytes(), np.uint8)


def assemble(
    template: Any,
    stored: Iterable[Block],
    read: Callable[[Sequence[Block]], Iterable[np.ndarray]],
) -> Any:
    """Make a state's global arrays from blocks, which may be from a mesh of another shape.

    Args:
      template: nested dicts of `ShapeDtypeStruct`s with shardings.
      stored: the blocks; together they contain every entry of every leaf of `template`.
      read: function that returns the values of some blocks as uint8 bytes, in the order of its
        argument.  It is called once per leaf, with the blocks that this process needs.

    Raises:
      InputError: if a leaf of `template` is not among the blocks.
    """
    of_leaf = {path: list(own) for path, own in itertools.groupby(sorted(stored), lambda b: b.path)}
    flat = {}
    for path, leaf in leaves(template).items():
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        parts = {
            own: np.empty(own.shape, leaf.dtype)
            for own in {_block(path, index, leaf.shape) for index in indices}
        }
        if path not in of_leaf:
            raise InputError(
                f"the state that was kept in memory has no leaf {'/'.join(path)}; use the config "
                "of the run that kept it"
            )
        needed = [
            block
            for block in of_leaf[path]
            if any(math.prod(block.intersection(own).shape) for own in parts)
        ]
        # Each process begins at another block, so that they do not all ask the same keeper.
        begin = jax.process_index() * len(needed) // jax.process_count()
        needed = needed[begin:] + needed[:begin]
        for block, content in zip(needed, read(needed), strict=True):
            values = content.view(leaf.dtype).reshape(block.shape)
            for own, part in parts.items():
                common = block.intersection(own)
                part[common.slices_in(own)] = values[common.slices_in(block)]

        def part_at(index: Any, path=path, shape=leaf.shape, parts=parts) -> np.ndarray:
            return parts[_block(path, index, shape)]

        flat[path] = jax.make_array_from_callback(leaf.shape, leaf.sharding, part_at)
    return nested(flat)
