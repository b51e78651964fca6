"""`HostCopies`: copies of a run's state in the memory of its hosts, for restarts without storage.

Each host has a keeper: a process that outlives the model's process on that host, and that holds the
blocks which `checkpoint.blocks.plan` assigns to it.  The driver owns the keepers, so they end with
it.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray
from etils import epath
from ray import exceptions

from mesh_transformer.checkpoint.step_folders import committed_steps
from mesh_transformer.data.storage import local_path
from mesh_transformer.pod.hosts import Host, on
from mesh_transformer.pod.keeper import Copy, Keeper

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.blocks import Block

SECONDS_TO_ANSWER = 30.0  # for a keeper to answer a call; one that takes longer counts as lost


class HostCopies:
    """The copies of one run's state, and the hosts' keepers.

    Give the same object to every `TPUCluster` of the run.
    """

    def __init__(self) -> None:
        self.keepers: list[Any] = []  # of each host of the newest cluster
        self._nodes: list[str] = []  # Ray's node id of each keeper's machine
        self._moved: list[Any] = []  # keepers of earlier hosts, whose copies may still be needed
        self._aux: dict[int, dict[str, Any]] = {}  # by step
        self._complete: int | None = None  # the newest step all of whose blocks have arrived
        self._head = ""  # Ray's node id of the driver, which changes when Ray is started again

    def place(self, hosts: Sequence[Host]) -> None:
        """Give each host a keeper on its own machine; keepers that live there already stay."""
        head = ray.get_runtime_context().get_node_id()
        if head != self._head:
            self.keepers, self._nodes, self._moved, self._aux = [], [], [], {}
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

    def begin(self, step: int, aux: dict[str, Any]) -> None:
        """Prepare for the blocks of a step; call this before any host sends them.

        Frees all copies but the newest complete one.

        Args:
          aux: what belongs to the state of the step; a JSON-serialisable dict.
        """
        complete = self._complete
        self._aux = {number: self._aux[number] for number in self._aux if number == complete}
        self._aux[step] = json.loads(json.dumps(aux))
        # Waits for the answers, because the hosts' calls could overtake these.
        self._answers(lambda keeper: keeper.retain.remote(complete))

    def complete(self) -> None:
        """Note that all blocks of the newest step have arrived."""
        self._complete = max(self._aux)
        self._moved = []  # Ray ends an actor that nothing refers to

    def newer_than_saved(self, folder: str) -> Copy | None:
        """Return the newest complete copy if a model folder has no step that is as new, or None."""
        copy = self.newest()
        if copy is None:
            return None
        saved = max(committed_steps(epath.Path(local_path(folder))), default=None)
        if saved is not None and saved >= copy.step:
            return None
        there = "no checkpoint" if saved is None else f"step {saved}"
        print(
            f"resuming from step {copy.step} in the hosts' memory ({folder} has {there})",
            file=sys.stderr,
            flush=True,
        )
        return copy

    def newest(self) -> Copy | None:
        """Return the newest step of which the remaining keepers hold every block, or None."""
        totals: dict[int, int] = {}
        places: dict[int, dict[Block, Any]] = {}
        for keeper, held in self._answers(lambda keeper: keeper.held.remote()).items():
            for step, (total, blocks) in held.items():
                totals[step] = total
                places.setdefault(step, {}).update(dict.fromkeys(blocks, keeper))
        whole = [
            step
            for step, found in places.items()
            if len(found) == totals[step] and step in self._aux
        ]
        if not whole:
            return None
        self._complete = step = max(whole)
        return Copy(step, self._aux[step], places[step])

    def _answers(self, call: Callable[[Any], Any]) -> dict[Any, Any]:
        """Return the results of a call by keeper, without those of keepers that do not answer."""
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
