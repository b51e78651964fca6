"""`HostCopies`: copies of a training run's state, kept in the memory of the run's hosts.

A restart after a host failure can resume from such a copy instead of an older checkpoint.  On each
host, a `Keeper` process holds a part of each copy.  This process keeps running when the model's
process on the same host fails.  All keepers end when the driver process ends.
"""

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray
from etils import epath
from ray import exceptions

from mesh_transformer.checkpoint.step_folders import committed_steps
from mesh_transformer.pod.hosts import Host, on
from mesh_transformer.pod.keeper import Copy, Keeper
from mesh_transformer.storage.access import local_path

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.blocks import Block

MOST_OFFERS = 2  # attempts to restore the same copy
SECONDS_TO_ANSWER = 30.0  # for a keeper to answer a call; one that takes longer counts as lost


class HostCopies:
    """Copies of one training run's state in its hosts' memory, for restarts after a host failure.

    Pass the same object to every `TPUCluster` of the run.  One `Keeper` process per host holds a
    part of each copy.  All copies are lost when the driver process ends.
    """

    def __init__(self) -> None:
        self.keepers: list[Any] = []  # of each host of the newest cluster
        self._nodes: list[str] = []  # Ray's node id of each keeper's machine
        self._moved: list[Any] = []  # keepers of earlier hosts, whose copies may still be needed
        self._kept: dict[int, tuple[int, dict[str, Any]]] = {}  # {number: (step, aux)}
        self._numbers = itertools.count()
        self._begun: int | None = None  # the newest copy
        self._complete: int | None = None  # the newest copy all of whose blocks have arrived
        self._offers = 0  # how often `_complete` was to be restored
        self._head = ""  # Ray's node id of the driver, which changes when Ray is started again

    def place(self, hosts: Sequence[Host]) -> None:
        """Start a `Keeper` process for each host that has none on its machine yet."""
        head = ray.get_runtime_context().get_node_id()
        if head != self._head:
            self.keepers, self._nodes, self._moved, self._kept = [], [], [], {}
            self._complete, self._head = None, head
        alive = set(self._answers(lambda keeper: keeper.pid.remote()))
        left = {
            keeper: node
            for keeper, node in zip(self.keepers, self._nodes, strict=True)
            if keeper in alive
        }
        self._nodes = [host.node for host in hosts]
        self.keepers = []
        remote: Any = ray.remote
        options = {"num_cpus": 0, "max_restarts": 0, "enable_task_events": False}
        for host in hosts:
            keeper = next((old for old, node in left.items() if node == host.node), None)
            if keeper is None:
                keeper = remote(**options, **on(host))(Keeper).remote()
            left.pop(keeper, None)
            self.keepers.append(keeper)
        self._moved = [keeper for keeper in (*self._moved, *left) if keeper in alive]

    def begin(self, step: int, aux: dict[str, Any]) -> int:
        """Begin a new copy; free all older copies except the newest complete one.

        Args:
          step: training step of the state that is copied.
          aux: the `aux` dict that a checkpoint of this state would have; JSON-serialisable.

        Returns:
          The number of the new copy, to pass to `NetworkRunner.keep` on all hosts.
        """
        self._begun, self._offers = next(self._numbers), 0
        self._kept = {n: kept for n, kept in self._kept.items() if n == self._complete}
        self._kept[self._begun] = step, json.loads(json.dumps(aux))
        for keeper in self.keepers:
            keeper.retain.remote(list(self._kept))
        return self._begun

    def complete(self) -> None:
        """Mark the newest copy as complete; call this once all hosts have sent their blocks."""
        if self._begun in self._kept:
            self._complete = self._begun
        self._moved = []  # Ray ends an actor that nothing refers to

    def newer_than_saved(self, folder: str) -> Copy | None:
        """Return the newest complete copy if it is newer than the newest checkpoint, else None.

        The same copy is returned at most `MOST_OFFERS` times, in case restoring that copy makes the
        hosts fail.

        Args:
          folder: the model folder that contains the checkpoints.
        """
        had_copies = bool(self._kept)
        copy = self.newest()
        if copy is None:
            if had_copies:
                _say("no complete copy is left in the hosts' memory")
            return None
        saved = max(committed_steps(epath.Path(local_path(folder))), default=None)
        if saved is not None and saved >= copy.step:
            return None
        self._offers += 1
        if self._offers > MOST_OFFERS:  # restoring it may be what fails
            _say(f"step {copy.step} in the hosts' memory is not restored a third time")
            return None
        there = "no checkpoint" if saved is None else f"step {saved}"
        _say(f"resuming from step {copy.step} in the hosts' memory ({folder} has {there})")
        return copy

    def newest(self) -> Copy | None:
        """Return the newest copy that running keepers still hold completely; None if there is none.

        All other copies are dropped.
        """
        totals: dict[int, int] = {}
        places: dict[int, dict[Block, list[Any]]] = {}
        for keeper, held in self._answers(lambda keeper: keeper.held.remote()).items():
            for number, (total, blocks) in held.items():
                totals[number] = total
                for block in blocks:
                    places.setdefault(number, {}).setdefault(block, []).append(keeper)
        whole = [n for n in self._kept if n in places and len(places[n]) == totals[n]]
        self._complete = number = max(whole, default=None)
        if number is None:
            self._kept = {}
            return None
        self._kept = {number: self._kept[number]}
        return Copy(number, *self._kept[number], places[number])

    def _answers(self, call: Callable[[Any], Any]) -> dict[Any, Any]:
        """Call every keeper, and return {keeper: result} for the keepers that answer in time.

        Args:
          call: function that starts a remote call on the keeper that is passed to it, and returns
            Ray's reference to the result.
        """
        refs = {keeper: call(keeper) for keeper in (*self._moved, *self.keepers)}
        if not refs:
            return {}
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=SECONDS_TO_ANSWER)
        answers = {}
        for keeper, ref in refs.items():
            try:
                answers[keeper] = ray.get(ref, timeout=0)
            except (exceptions.RayError, exceptions.GetTimeoutError):
                continue
        return answers


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
