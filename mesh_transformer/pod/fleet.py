"""`Fleet`: a model on the devices of several processes, of which one leads.

    leader                         member 0 (NetworkRunner)    member 1
    train(step n+1)  -- rows -->   queued                      queued
                                   device runs step n   <-->   device runs step n
    float(loss n)    <-- loss --

The leader alone runs the training loop or the server, and decides.  The members run its calls in
the order in which it sends them, and the leader sends the next step's batch while they still run
the current step.  A fleet ends if a member fails.
"""

import dataclasses
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import Any, Protocol

import numpy as np

from mesh_transformer.calls import Call, Result, joined, split
from mesh_transformer.config import Config
from mesh_transformer.data.loader import open_train_set
from mesh_transformer.generation.batch import BadWeights, NewBatch
from mesh_transformer.generation.finite import blaming
from mesh_transformer.network import (
    AddAdapters,
    Claim,
    Init,
    Load,
    Restore,
    Save,
    Trace,
    Train,
    TrainableNetwork,
    TrainSet,
    Wait,
)
from mesh_transformer.pod.faults import LostError, PermanentError, RaisedError
from mesh_transformer.pod.runner import MeshPlace, StepReport, marker_in
from mesh_transformer.pod.train_set import READ_ON_HOSTS, ClusterTrainSet
from mesh_transformer.storage.access import is_uri
from mesh_transformer.training.objectives import head_of
from mesh_transformer.training.step import MEASURED
from mesh_transformer.util import HostError, InputError, NonFiniteError

SECONDS_TO_ANSWER = 2.0  # for a member to answer a health check after a failure
SECONDS_TO_AGREE = 5.0  # for the other members to report the same bad input
MOST_UNREAD = 4  # maximum steps in flight; the transport holds the batch and the results of each
METRICS = (*MEASURED, "learning_rate", "skipped")


class Member(Protocol):
    """A process of a fleet, in which a `NetworkRunner` runs the leader's calls.

    Attributes:
      name: its name in messages, such as "host 1".
      disks: members with an equal value share all local folders.
    """

    name: str
    disks: str

    def send(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Send a call of a `NetworkRunner` method, and return its result, which comes later.

        Members run calls one by one, in the order in which they are sent.  The result of a member
        that has ended is a LostError.
        """
        ...

    def ping(self) -> Future[Any]:
        """Return a result that comes at once from a member that responds, also during a call."""
        ...


@dataclasses.dataclass
class DispatchedStep:
    """A training step that `Fleet.train` has dispatched to the hosts.

    Attributes:
      step: number of the step.
      dispatched: the results of the `Train` calls, one per host, which come later.
      values: metrics of the step; None until `Fleet.read` has fetched them.
      error: the error of the step, if it has failed.
      finished: whether all hosts have reported that the step has finished.
    """

    step: int
    dispatched: list[Future[Any]]
    values: dict[str, float] | None = None
    error: Exception | None = None
    finished: bool = False


class PendingMetric:
    """One metric of a training step; `float(metric)` waits until the step has finished."""

    def __init__(
        self, read: Callable[[DispatchedStep], dict[str, float]], reading: DispatchedStep, name: str
    ):
        self._read, self._reading, self._name = read, reading, name

    def __float__(self) -> float:
        return self._read(self._reading)[self._name]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(float(self), dtype)

    def __format__(self, form: str) -> str:
        return format(float(self), form)

    def is_ready(self) -> bool:
        """Return whether the step is known to have finished.

        A finished step may give False until metrics of this step or an earlier one are read.
        """
        return self._reading.finished or self._reading.values is not None


class Fleet(TrainableNetwork):
    """A model that runs on all `members`, with the methods of `CausalTransformer`.

    The methods take and return the batch rows of all replicas.

    Args:
      silence: seconds without an answer after which the members' health is checked.
      patience: maximum seconds for one call to the members, including compilation.

    Attributes:
      members: the members, in the order of their ranks.
      ended: whether the members have been shut down.

    Raises:
      HostError: from every method, if a member dies, hangs or fails.  All members are then shut
        down.
    """

    def __init__(self, config: Config, *, silence: float = 10, patience: float = 3600.0):
        self.config = config
        self.silence = silence
        self.patience = patience
        self.members: list[Any] = []
        self.step = 0
        self.notice = ""  # names the member that received SIGTERM, if one did
        self.ended = False
        self._why = ""  # " (FAILURE)" once a failure has shut down the members
        self._save_failed = False  # whether a member has reported that the last save failed
        self._unread: deque[DispatchedStep] = deque()
        self._shared: set[str] = set()  # folders that all members are known to share
        self._adapters = 0
        self._batches = 0  # number of batches that were created; the members hold the newest

    def start(self, places: Sequence[MeshPlace]) -> None:
        """Create one mesh over the devices of all members, which have these places in it."""
        config = self.config.as_dict()
        facts = self.call("start", *[(config, place) for place in places])
        self.replicas: list[list[int]] = [fact["replicas"] for fact in facts]  # of each member
        self.dp = facts[0]["dp"]
        self.batch_size = facts[0]["batch_size"]
        self.noise_batches = facts[0]["noise_batches"]
        self.peak_flops = facts[0]["peak_flops"]
        machines = [fact["machine"] for fact in facts]
        self._first_ranks = tuple(map(machines.index, dict.fromkeys(machines)))  # one per machine

    @property
    def adapters(self) -> int:
        """Number of LoRA adapters that each text may choose from."""
        return self._adapters

    @property
    def save_failed(self) -> bool:
        """Whether a member has reported that the last save has failed in the background."""
        return self._save_failed

    def open_train_set(self) -> TrainSet:
        """Open the config's training set.

        If the config sets `hosts_read`, the members read the records; otherwise this process does.
        """
        if self.config.hosts_read:
            return ClusterTrainSet(self)
        return open_train_set(self.config, self.batch_size)

    def members_path(self, path: str) -> str:
        """Return a path of the config as the members need it."""
        return path

    def train(self, sample: dict[str, np.ndarray]) -> dict[str, Any]:
        """Dispatch a training step; see `TrainableNetwork.train`.

        Args:
          sample: `READ_ON_HOSTS` to train on the next batch that the members have read themselves
            (see `ClusterTrainSet`).

        Returns:
          Also the step's duration in seconds on each member, as `host_seconds/<rank>`.  Each value
          is a `PendingMetric`.
        """
        return self.run(Train(None)) if sample is READ_ON_HOSTS else super().train(sample)

    def read(self, reading: DispatchedStep) -> dict[str, float]:
        """Wait until the step `reading` has finished on all members, and return its metrics.

        Unread metrics of earlier steps are fetched first.
        """
        while reading.values is None:
            if reading.error is not None:
                raise reading.error
            oldest = self._unread.popleft()
            try:
                results = self._results([*oldest.dispatched, *self._submit("metrics")])
            except Exception as error:
                oldest.error = error
                raise
            measured = results[len(self.members) :]
            oldest.values = self._merge_reports(oldest.step, measured)
            self._save_failed |= any(report.save_failed for report in measured)
            noticed = [rank for rank, report in enumerate(measured) if report.notice]
            if noticed:
                self.notice = f"{self.members[noticed[0]].name} received SIGTERM"
            for later in itertools.islice(
                self._unread, min(report.finished for report in measured)
            ):
                later.finished = True
        return reading.values

    def _merge_reports(self, step: int, measured: list[StepReport]) -> dict[str, float]:
        """Return a step's metrics, and its seconds on each member as `host_seconds/<rank>`.

        Raises:
          HostError: if the members' metrics are not bit-identical, or not those of `step`.
        """
        texts = [repr((report.step, report.numbers)) for report in measured]  # NaN equals NaN
        if len(set(texts)) > 1 or measured[0].step != step:
            details = ", ".join(
                f"{member.name} is at step {report.step} with loss {report.numbers['loss']!r}"
                for member, report in zip(self.members, measured, strict=True)
            )
            raise self.failure(f"the hosts disagree after step {step}: {details}")
        seconds = {f"host_seconds/{rank}": report.seconds for rank, report in enumerate(measured)}
        return measured[0].numbers | seconds

    def run(self, call: Call[Any]) -> Any:
        """Run a call on all members, each of which gets the rows of its replicas."""
        match call:
            case Train():
                return self._train(call)
            case Save() | Wait():
                return self._save(call)
            case Claim(room=False) | Restore():  # the check for room follows these
                self._check_shared(call.folder)
            case Trace():
                call = dataclasses.replace(call, ranks=self._first_ranks)
        result = self._run(call)
        match call:
            case NewBatch():
                self._batches += 1
                return functools.partial(self._run_in_batch, self._batches, call.rows)
            case Init() | Load() | Restore():
                self._adapters = 0  # the new weights have none yet
            case AddAdapters():
                self._adapters = len(call.paths)
        return result

    def _train(self, call: Train) -> dict[str, Any]:
        """Dispatch a step, and return its metrics and its seconds on each member."""
        if call.batch is not None and (count := call.batch["obs"].shape[1]) % self.dp:
            raise InputError(
                f"train: a microbatch has {count} sequences, expected a multiple of {self.dp}, the "
                "number of replicas"
            )
        if len(self._unread) >= MOST_UNREAD:
            self.read(self._unread[0])
        self.step += 1
        calls, _ = split(call, self.replicas)
        reading = DispatchedStep(self.step, self._submit("run", *zip(calls)))
        self._unread.append(reading)
        seconds = [f"host_seconds/{rank}" for rank in range(len(self.members))]
        names = (*METRICS, *self._objective_metrics, *seconds)
        return {name: PendingMetric(self.read, reading, name) for name in names}

    @functools.cached_property
    def _objective_metrics(self) -> tuple[str, ...]:
        head = head_of(self.config)
        return () if head is None else head.names

    def _save(self, call: Save | Wait) -> None:
        if isinstance(call, Save) and call.folder not in self._shared:
            self._check_shared(call.folder)
        self._save_failed = False
        self._run(call, agree=self.patience)  # others may be writing when one raises an error

    def _run(
        self, call: Call[Result], size: int | None = None, agree: float = SECONDS_TO_AGREE
    ) -> Result:
        """Run a call on all members.

        Args:
          size: number of rows per replica in the call's batch, if it has one.
          agree: see `_results`.
        """
        calls, places = split(call, self.replicas, size)
        # One member knows why a result is not finite.  Of several, some may have finite rows.
        several = len(self.members) > 1
        with blaming(lambda: self._run(BadWeights()) if several else None):
            results = self.call("run", *zip(calls), agree=agree)
        try:
            return joined(call, results, places)
        except HostError as error:
            raise self.failure(str(error)) from None

    def _run_in_batch(self, number: int, size: int, call: Call[Result]) -> Result:
        if number != self._batches:
            raise InputError("a newer batch has replaced this one on the hosts; use the newer one")
        return self._run(call, size)

    def _check_shared(self, folder: str) -> None:
        """Raise InputError if `folder` is a local folder that the members do not share.

        Without a shared folder, a save would wait forever for the files of the other members.
        """
        if is_uri(folder) or len({member.disks for member in self.members}) == 1:
            return
        path, first = marker_in(folder), self.members[0]
        self._results([first.send("create_marker", (path,))])
        seen = self.call("marker_exists", *[(path,)] * len(self.members))
        self._results([first.send("delete_marker", (path,))])
        if not all(seen):
            self.kill()
            raise InputError(
                f"{folder}: {self.members[seen.index(False)].name} does not see a file of "
                f"{first.name} in this folder; give a folder that all hosts share, such as "
                "gs://bucket/model"
            )
        self._shared.add(folder)

    def close(self) -> None:
        """Wait for the last save, then shut down all members.

        Does nothing if they have already been shut down.
        """
        if self.ended:
            return
        try:
            self.call("close")
        finally:
            self.kill()

    def kill(self) -> None:
        """Shut down all members, even if they are busy with a call."""
        self.ended = True

    def call(
        self, method: str, *arguments: tuple[Any, ...], agree: float = SECONDS_TO_AGREE
    ) -> list[Any]:
        """Call a method of every member's `NetworkRunner`, and return one result per member.

        Args:
          arguments: one tuple of arguments per member; may be omitted if the method takes none.
          agree: see `_results`.
        """
        return self._results(self._submit(method, *arguments), agree)

    def _submit(self, method: str, *arguments: tuple[Any, ...]) -> list[Future[Any]]:
        """Send a call to every member, as `call`, but return results for which `_results` waits."""
        if self.ended:
            raise HostError(f"the hosts have been shut down{self._why}; create a new cluster")
        own: Sequence[tuple[Any, ...]] = arguments or [()] * len(self.members)
        try:
            return [member.send(method, own) for member, own in zip(self.members, own, strict=True)]
        except BaseException:  # some members got the call and would wait for the rest
            self.kill()
            raise

    def _results(self, sent: Sequence[Future[Any]], agree: float = SECONDS_TO_AGREE) -> list[Any]:
        """Wait for the results of calls that `_submit` has sent to the members, and return them.

        If a call fails on a member, the error is raised and all members are shut down.  They keep
        running only if the error is an InputError and all other members finish or fail the same
        call within `agree` seconds.
        """
        deadline = time.monotonic() + self.patience
        while True:
            self._wait(sent, self.silence, FIRST_EXCEPTION)
            done = [result for result in sent if result.done()]
            if failed := [result for result in done if result.exception()]:
                raise self._raised(failed, sent, agree) from None
            if len(done) == len(sent):
                return [result.result() for result in sent]
            if gone := self._unresponsive(self.silence):
                raise self._shut_down("; ".join(gone))
            if time.monotonic() > deadline:
                raise self.failure(
                    f"a call to the hosts took more than {self.patience:.0f} s; if the hosts are "
                    "only slow, increase --patience"
                )

    def _wait(
        self, results: Sequence[Future[Any]], seconds: float, until: str = ALL_COMPLETED
    ) -> None:
        """Wait for results, at most `seconds`; `until` is the condition of `futures.wait`."""
        wait(results, seconds, until)

    def _raised(
        self, failed: Sequence[Future[Any]], sent: Sequence[Future[Any]], agree: float
    ) -> Exception:
        """Return the exception to raise in the leader for those that members have raised.

        Shuts down the members or lets them keep running; see `_results`, also for the arguments.

            raised by members                  raised in the leader            do they keep running?
            LostError                          HostError, PermanentError       no
            anything, while a member is silent HostError that names it         no
            InputError only, others agree      InputError (`_joint_error`)     yes
            InputError, others do not answer   InputError                      no
            PermanentError, RaisedError        the same                        no
            another StoppedError               HostError with its text         no
        """
        error = failed[0].exception()
        assert isinstance(error, Exception)
        if isinstance(error, LostError):
            lost = self.failure(fallback=str(error))
            return PermanentError(str(lost)) if error.permanent else lost
        if isinstance(error, InputError):
            if gone := self._wait_for_agreement(sent, agree):
                return self._shut_down("; ".join(gone))
            errors = [result.exception() if result.done() else None for result in sent]
            others = [error for error in errors if not isinstance(error, InputError | None)]
            if not others:
                return self._joint_error(errors)
            error = others[0]
            assert isinstance(error, Exception)
        line = self.failure(str(error))
        # If another member has died, that is the cause.
        is_cause = isinstance(error, PermanentError | RaisedError) and str(line) == str(error)
        return error if is_cause else line

    def _wait_for_agreement(self, sent: Sequence[Future[Any]], agree: float) -> list[str]:
        """Wait until all members have finished or failed a call that is bad input to one of them.

        A member that does not within `agree` seconds may be waiting for one that has raised the
        error, so all members are then shut down.

        Returns:
          A line for each member that does not respond, which is then the cause of the error.
        """
        # If a member dies during a read or a save, the others report it as bad input.
        gone = self._unresponsive(SECONDS_TO_ANSWER)
        deadline = time.monotonic() + agree
        while not gone and (left := deadline - time.monotonic()) > 0:
            self._wait(sent, min(left, self.silence))
            if all(result.done() for result in sent):
                return []
            gone = self._unresponsive(self.silence)
        if not gone and not all(result.done() for result in sent):
            self.kill()
        return gone

    def _joint_error(self, errors: Sequence[BaseException | None]) -> InputError:
        """Return the error that the leader raises for a call that is bad input to some members.

        Its line names the member if the others have no such error.  `errors` has an error or None
        for each result.
        """
        index, error = next((index, error) for index, error in enumerate(errors) if error)
        assert isinstance(error, InputError)
        line, *rest = error.args
        if None in errors[-len(self.members) :] and not isinstance(error, NonFiniteError):
            line = f"{self.members[index % len(self.members)].name}: {line}"
        return type(error)(line, *rest)

    def _unresponsive(self, seconds: float) -> list[str]:
        """Return a line such as "host 1 died" for each member that does not respond in time."""
        pings = {member.name: member.ping() for member in self.members}
        self._wait([*pings.values()], seconds)
        problems = []
        for name, ping in pings.items():
            if not ping.done():
                problems.append(f"{name} does not answer")
            elif error := ping.exception():
                problems.append(f"{name} {error}")
        return problems

    def failure(self, message: str = "", *, fallback: str = "") -> HostError:
        """Shut down all members and return a HostError for the caller to raise.

        The text of the error begins with a list of the members that do not respond.

        Args:
          message: text that follows this list.
          fallback: text of the error if there is no `message` and all members respond.
        """
        gone = self._unresponsive(SECONDS_TO_ANSWER)
        return self._shut_down("; ".join([*gone, message] if message else gone or [fallback]))

    def _shut_down(self, why: str) -> HostError:
        """Shut down all members and return a HostError; later calls raise one that repeats it."""
        self._why = f" ({why})"
        self.kill()
        return HostError(why)
