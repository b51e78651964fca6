"""A sharded state as blocks of bytes, which hosts keep in memory for a later mesh of any shape."""

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
    """A box of positions in one array of a state.

    Attributes:
      path: the array's keys, outermost first.
      start, stop: the first position along each axis, and the position after the last.
    """

    path: Path
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    def intersection(self, other: "Block") -> "Block":
        """Return the positions that both blocks contain; the result may be empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(max, start, map(min, self.stop, other.stop)))
        return Block(self.path, start, stop)

    def slices_in(self, outer: "Block") -> tuple[slice, ...]:
        """Return the index of this block in an array that holds `outer`."""
        return tuple(
            slice(start - origin, stop - origin)
            for start, stop, origin in zip(self.start, self.stop, outer.start, strict=True)
        )


Plan = dict[Block, dict[int, int]]  # of each block: {the process that keeps it: the one it's from}


def plan(state: Any, processes: int) -> Plan:
    """Decide which processes keep which blocks of a state.

    Each block is kept by two processes, so that the state is still complete when one is lost.
    These are the two that keep the fewest bytes so far, of those that have the block on their
    devices.  If only one process has it, the next process is the other.  All blocks of a device's
    part of an array are kept by the same processes, because they are copied from the device
    together.  The result is the same in all processes.

    Args:
      state: nested dicts of global arrays, or of `ShapeDtypeStruct`s with shardings.
      processes: number of processes of the mesh.
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
    """Yield blocks of at most `MOST_BYTES`, if one position along the first axis is not larger."""
    if not block.shape:
        yield block
        return
    rows = max(1, MOST_BYTES // max(1, itemsize * math.prod(block.shape[1:])))
    for start in range(block.start[0], block.stop[0], rows):
        stop = min(start + rows, block.stop[0])
        yield Block(block.path, (start, *block.start[1:]), (stop, *block.stop[1:]))


def copied(state: Any, planned: Plan) -> list[tuple[Block, list[int], np.ndarray]]:
    """Copy from the devices what this process keeps or sends; the state may then be donated.

    Returns:
      The blocks, the processes that keep each, and its content as bytes (uint8).
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
    """Make a state's global arrays from blocks that may have been cut for another mesh.

    Args:
      template: nested dicts of `ShapeDtypeStruct`s with shardings.
      stored: the blocks; together they contain every position of every leaf of `template`.
      read: function that returns the bytes (uint8) of blocks, in their order.  It is called once
        per leaf, for the blocks that this process needs.

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
                f"the copy in memory has no {'/'.join(path)}; use the config that it was kept with"
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
