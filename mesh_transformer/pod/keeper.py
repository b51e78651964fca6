"""`Keeper`, which holds a host's part of the copies in memory, and the transfer of blocks to it.

A keeper is a process that outlives the model's process on its host; see `host_copies`.
"""

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.blocks import Block

MOST_MOVING = 4  # blocks on their way from or to one process, in Ray's object store


class Keeper:
    """Holds blocks of the newest two kept steps; runs as a Ray actor."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[Block, np.ndarray]] = {}
        self._totals: dict[int, int] = {}

    def pid(self) -> int:
        """Return the id of this process on its machine."""
        return os.getpid()

    def keep(self, step: int, total: int, block: "Block", content: np.ndarray) -> None:
        """Store a block of a step whose state has `total` blocks."""
        # Copied, because the argument is in Ray's object store, where it ends with its sender.
        self._steps.setdefault(step, {})[block] = content.copy()
        self._totals[step] = total

    def retain(self, step: int | None) -> None:
        """Free all steps but `step`."""
        for other in self._steps.keys() - {step}:
            del self._steps[other], self._totals[other]

    def held(self) -> "dict[int, tuple[int, list[Block]]]":
        """Return for each step how many blocks its state has, and which of them are here."""
        return {step: (self._totals[step], list(own)) for step, own in self._steps.items()}

    def read(self, step: int, block: "Block") -> np.ndarray:
        """Return the content of a block."""
        return self._steps[step][block]


class Copy(NamedTuple):
    """A complete state that keepers hold.

    Attributes:
      step: the state's step.
      aux: the entries that a checkpoint's `aux` would have; see `CausalTransformer.save`.
      keepers: the keeper of each block.
    """

    step: int
    aux: dict[str, Any]
    keepers: "dict[Block, Any]"


def send(
    step: int,
    total: int,
    blocks: "Iterable[tuple[Block, Sequence[int], np.ndarray]]",
    keepers: Sequence[Any],
) -> None:
    """Send blocks of a step to keepers, and wait until all have arrived.

    Args:
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
                ray.get(moving.popleft())
            moving.append(keepers[rank].keep.remote(step, total, block, shared))
    ray.get(list(moving))


def receive(copy: Copy, blocks: "Iterable[Block]") -> Iterator[np.ndarray]:
    """Yield the contents of blocks of a copy."""
    import ray

    calls = (copy.keepers[block].read.remote(copy.step, block) for block in blocks)
    moving = deque(itertools.islice(calls, MOST_MOVING))
    while moving:
        content: Any = ray.get(moving.popleft())
        moving.extend(itertools.islice(calls, 1))
        yield content
