"""Processes that hold copies of a training state in the hosts' memory, and the data transfer.

Each host runs one such process, a `Keeper`.  The keeper keeps running when the model's process on
the same host fails; see `host_copies`.
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
    """Ray actor that holds blocks of the newest copies of a training state in a host's memory.

    A block is a part of one array.  Every copy has a number, which `HostCopies.begin` returns.
    """

    def __init__(self) -> None:
        self._copies: dict[int, dict[Block, np.ndarray]] = {}
        self._totals: dict[int, int] = {}

    def pid(self) -> int:
        """Return the process id (PID) of this actor."""
        return os.getpid()

    def keep(self, number: int, total: int, block: "Block", content: np.ndarray) -> None:
        """Store one block of a copy.

        Args:
          number: the copy's number.
          total: number of different blocks in the whole copy, over all keepers.
          block: the block's position in the state.
          content: the block's bytes (uint8).
        """
        # Copied, because the argument is in Ray's object store, where it ends with its sender.
        self._copies.setdefault(number, {})[block] = content.copy()
        self._totals[number] = total

    def retain(self, numbers: Collection[int]) -> None:
        """Keep only the blocks of the copies with these numbers, and free all other blocks."""
        for other in self._copies.keys() - set(numbers):
            del self._copies[other], self._totals[other]

    def held(self) -> "dict[int, tuple[int, list[Block]]]":
        """Return {copy number: (number of blocks in the whole copy, the blocks stored here)}."""
        return {number: (self._totals[number], list(own)) for number, own in self._copies.items()}

    def read(self, number: int, block: "Block") -> np.ndarray:
        """Return the bytes (uint8) of one block of the copy with this number."""
        return self._copies[number][block]


class Copy(NamedTuple):
    """A complete copy of a training state, which `Keeper` processes hold in memory.

    Attributes:
      number: unique number of the copy, from `HostCopies.begin`.
      step: training step of the state.
      aux: the same entries as in the `aux` dict of a checkpoint; see `CausalTransformer.restore`.
      keepers: for each block, the Ray actors of the keepers that hold it.
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
    """Send this process's blocks of a copy to keepers, and wait until all of them are stored.

    Args:
      number: the copy's number.
      total: number of different blocks in the whole copy, over all processes.
      blocks: for each block to send, a tuple of the block, the ranks of the hosts whose keepers
        store it, and its bytes (uint8).
      keepers: the Ray actor of each host's keeper, by rank.
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
    """Fetch blocks of a copy from the keepers, and yield each block's bytes (uint8) in order.

    Args:
      rank: rank of this process.  Processes of different ranks ask different keepers for the same
        block, which spreads the load.
      blocks: the blocks to fetch.
    """
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
