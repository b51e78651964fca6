"""`Keeper`, which holds a host's part of the copies in memory, and the transfer of blocks to it.

A keeper is a process that outlives the model's process on its host; see `host_copies`.
"""

import itertools
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.blocks import Block

MOST_MOVING = 4  # blocks on their way from or to one process, in Ray's object store
SECONDS_PER_BLOCK = 120.0  # for a block to arrive; a keeper that takes longer counts as lost


class Keeper:
    """Holds blocks of the newest two copies, by the copy's number; runs as a Ray actor."""

    def __init__(self) -> None:
        self._copies: dict[int, dict[Block, np.ndarray]] = {}
        self._totals: dict[int, int] = {}

    def pid(self) -> int:
        """Return the id of this process on its machine."""
        return os.getpid()

    def keep(self, number: int, total: int, block: "Block", content: np.ndarray) -> None:
        """Store a block of a copy that has `total` blocks."""
        # Copied, because the argument is in Ray's object store, where it ends with its sender.
        self._copies.setdefault(number, {})[block] = content.copy()
        self._totals[number] = total

    def retain(self, numbers: Collection[int]) -> None:
        """Free all copies but those with these numbers."""
        for other in self._copies.keys() - set(numbers):
            del self._copies[other], self._totals[other]

    def held(self) -> "dict[int, tuple[int, list[Block]]]":
        """Return for each copy how many blocks it has, and which of them are here."""
        return {number: (self._totals[number], list(own)) for number, own in self._copies.items()}

    def read(self, number: int, block: "Block") -> np.ndarray:
        """Return the content of a block of a copy."""
        return self._copies[number][block]


class Copy(NamedTuple):
    """A complete state that keepers hold.

    Attributes:
      number: the copy's number; every call of `HostCopies.begin` has its own.
      step: the state's step.
      aux: the entries that a checkpoint's `aux` would have; see `CausalTransformer.save`.
      keepers: the keepers of each block.
    """

    number: int
    step: int
    aux: dict[str, Any]
    keepers: "dict[Block, list[Any]]"


def send(
    number: int,
    total: int,
    blocks: "Iterable[tuple[Block, Sequence[int], np.ndarray]]",
    keepers: Sequence[Any],
) -> None:
    """Send blocks of a copy to keepers, and wait until all have arrived.

    Args:
      number: the copy's number.
      total: number of blocks of the whole state.
      blocks: the blocks, the ranks of the hosts whose keepers get each, and its content.
      keepers: the keeper of each host.
    """
    import ray

    moving: deque[Any] = deque()
    for block, ranks, content in blocks:
        shared = ray.put(content)
        for rank in ranks:
            if len(moving) == MOST_MOVING:
                ray.get(moving.popleft(), timeout=SECONDS_PER_BLOCK)
            moving.append(keepers[rank].keep.remote(number, total, block, shared))
    for call in moving:
        ray.get(call, timeout=SECONDS_PER_BLOCK)


def receive(copy: Copy, rank: int, blocks: "Iterable[Block]") -> Iterator[np.ndarray]:
    """Yield the contents of blocks of a copy; `rank` chooses among the keepers of a block."""
    import ray

    def request(place: int, block: "Block") -> Any:
        holding = copy.keepers[block]
        return holding[(rank + place) % len(holding)].read.remote(copy.number, block)

    calls = itertools.starmap(request, enumerate(blocks))
    moving = deque(itertools.islice(calls, MOST_MOVING))
    while moving:
        content: Any = ray.get(moving.popleft(), timeout=SECONDS_PER_BLOCK)
        moving.extend(itertools.islice(calls, 1))
        yield content
