"""`TPUCluster`: a model on all hosts of a mesh, with one Ray actor per host.

    driver                         host 0 (NetworkRunner)      host 1
    train(step n+1)  -- rows -->   queued                      queued
                                   device runs step n   <-->   device runs step n
    float(loss n)    <-- loss --

The driver (the process that creates the cluster) sends the batch of the next step while the hosts
still run the current step.  If a host fails, all hosts are shut down and the driver raises one
HostError.  `restarts.train` then creates a new cluster and resumes from the newest saved state.
"""

import functools
import itertools
import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray import exceptions

from mesh_transformer.calls import Call, Result, joined, split
from mesh_transformer.config import Config
from mesh_transformer.data.loader import TFRecordNewInputs, open_train_set
from mesh_transformer.generation.batch import BadWeights, NewBatch, Run
from mesh_transformer.generation.finite import blaming
from mesh_transformer.network import (
    AddAdapters,
    Claim,
    Init,
    Load,
    Restore,
    Save,
    Train,
    TrainableNetwork,
    Wait,
)
from mesh_transformer.pod.faults import PermanentError, RaisedError, last_line
from mesh_transformer.pod.host_copies import HostCopies
from mesh_transformer.pod.hosts import Host, kill_processes, start_process
from mesh_transformer.pod.ray_head import spill_disk_is_full
from mesh_transformer.pod.runner import check_versions
from mesh_transformer.pod.steps import DispatchedStep, PendingMetric, StepReport
from mesh_transformer.pod.train_set import READ_ON_HOSTS, ClusterTrainSet
from mesh_transformer.storage.access import is_uri
from mesh_transformer.training.step import MEASURED
from mesh_transformer.util import HostError, InputError, StoppedError

SECONDS_TO_START = 60.0  # for a new host process to answer its first call
SECONDS_TO_ANSWER = 2.0  # for a host to answer a health check after a failure
SECONDS_TO_AGREE = 5.0  # for the other hosts to report the same bad input
MOST_UNREAD = 4  # maximum steps in flight; Ray holds the batch and the results of each
STORE_FULL = (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError)
METRICS = (*MEASURED, "learning_rate", "skipped")


class TPUCluster(TrainableNetwork):
    """A model that runs on all `hosts`, with the methods of `CausalTransformer`.

    The methods take and return the batch rows of all replicas.

    Args:
      heartbeat: declare a host dead after this many silent seconds.
      patience: maximum seconds for one call to the hosts, including compilation.
      copies: the `HostCopies` that hold the copies made by `keep`; None disables `keep`.

    Raises:
      HostError: from every method, if a host dies, hangs or fails.  All hosts are then shut down.
    """

    def __init__(
        self,
        config: Config,
        hosts: Sequence[Host],
        *,
        heartbeat: int = 10,
        patience: float = 3600.0,
        copies: HostCopies | None = None,
    ):
        self.config = config
        self.hosts = list(hosts)
        self.heartbeat = heartbeat
        self.patience = patience
        self.step = 0
        self._save_failed = False  # whether a host has reported that the last save failed
        self.copies = copies
        self._keeping: list[Any] | None = None  # Ray references to the last `keep` calls
        self.notice = ""  # names the host that received SIGTERM, if one did
        self._unread: deque[DispatchedStep] = deque()
        self._pids: list[int] = []
        self._actors: list[Any] = []
        self.ended = False  # whether the hosts have been shut down
        self._why = ""  # " (FAILURE)" once a failure has shut down the hosts
        self._adapters = 0
        self._batches = 0  # number of batches that were created; the hosts hold the newest
        try:
            if copies is not None:
                copies.place(self.hosts)
            for rank, host in enumerate(self.hosts):
                self._actors.append(start_process(rank, host))
            host_info = self._start()
        except BaseException:
            self.kill()
            raise
        self.replicas: list[list[int]] = [host["replicas"] for host in host_info]  # of each host
        self.dp = host_info[0]["dp"]
        self.batch_size = host_info[0]["batch_size"]
        self.noise_batches = host_info[0]["noise_batches"]
        self.peak_flops = host_info[0]["peak_flops"]

    def _start(self) -> list[dict[str, Any]]:
        """Wait for the host processes to start, and create one mesh over all of them.

        JAX's coordinator gets a new port in each cluster, because a process of an earlier cluster
        may still try to connect to the old port.

        Returns:
          The result of `NetworkRunner.start` on each host.
        """
        pids = self._submit("pid")
        if ray.wait(pids, num_returns=len(pids), timeout=SECONDS_TO_START)[1]:
            raise self.failed(fallback=f"host processes did not start in {SECONDS_TO_START:.0f} s")
        self._pids = self._results(pids)
        names = [f"host {rank} ({host.address})" for rank, host in enumerate(self.hosts)]
        check_versions(dict(zip(names, self.call("versions"), strict=True)))
        coordinator = self._coordinator()
        refs = [
            actor.start.remote(
                self.config.as_dict(),
                address=host.address,
                coordinator=coordinator,
                processes=len(self.hosts),
                heartbeat=self.heartbeat,
                devices=host.devices,
            )
            for actor, host in zip(self._actors, self.hosts, strict=True)
        ]
        return self._results(refs)

    def _coordinator(self) -> str:
        """Return the address of a free port of host 0, for JAX's coordinator."""
        address = self.hosts[0].address
        (port,) = self._results([self._actors[0].free_port.remote(address)])
        return f"{address}:{port}"

    @property
    def adapters(self) -> int:
        """Number of LoRA adapters that each text may choose from."""
        return self._adapters

    @property
    def save_failed(self) -> bool:
        """Whether a host has reported that the last save has failed in the background."""
        return self._save_failed

    def open_train_set(self) -> TFRecordNewInputs | ClusterTrainSet:
        """Open the config's training set.

        If the config sets `hosts_read`, the hosts read the records; otherwise this process does.
        """
        if self.config.hosts_read:
            return ClusterTrainSet(self)
        return open_train_set(self.config, self.batch_size)

    def train(self, sample: dict[str, np.ndarray]) -> dict[str, Any]:
        """Dispatch a training step; see `TrainableNetwork.train`.

        Args:
          sample: `READ_ON_HOSTS` to train on the next batch that the hosts have read themselves
            (see `ClusterTrainSet`).

        Returns:
          Also the step's duration in seconds on each host, as `host_seconds/<rank>`.  Each value is
          a `PendingMetric`.
        """
        return self.run(Train(None)) if sample is READ_ON_HOSTS else super().train(sample)

    def read(self, reading: DispatchedStep) -> dict[str, float]:
        """Wait until the step `reading` has finished on all hosts, and return its metrics.

        Unread metrics of earlier steps are fetched first.
        """
        while reading.values is None:
            oldest = self._unread.popleft()
            results = self._results([*oldest.dispatched, *self._submit("metrics")])
            measured = results[len(self.hosts) :]
            oldest.values = self._merge_reports(oldest.step, measured)
            self._save_failed |= any(host.save_failed for host in measured)
            noticed = [rank for rank, host in enumerate(measured) if host.notice]
            if noticed:
                self.notice = f"host {noticed[0]} received SIGTERM"
            for later in itertools.islice(self._unread, min(host.ended for host in measured)):
                later.ended = True
        return reading.values

    def _merge_reports(self, step: int, measured: list[StepReport]) -> dict[str, float]:
        """Merge the hosts' reports about one step into a dict of metrics.

        The dict has the metrics, which must be the same on all hosts, and the duration of the step
        in seconds on each host as `host_seconds/<rank>`.

        Raises:
          HostError: if the hosts' metrics are not bit-identical, or not those of `step`.
        """
        texts = [repr((host.step, host.numbers)) for host in measured]  # NaN equals NaN
        if len(set(texts)) > 1 or measured[0].step != step:
            details = ", ".join(
                f"host {rank} is at step {host.step} with loss {host.numbers['loss']!r}"
                for rank, host in enumerate(measured)
            )
            raise self.failed(f"the hosts disagree after step {step}: {details}")
        seconds = {f"host_seconds/{rank}": host.seconds for rank, host in enumerate(measured)}
        return measured[0].numbers | seconds

    def run(self, call: Call[Any]) -> Any:
        """Run a call on all hosts, each of which gets the rows of its replicas."""
        result = self._dispatch(call)
        match call:
            case AddAdapters():
                self._adapters = len(call.paths)
            case Init() | Load() | Restore():
                self._adapters = 0  # the new weights have none yet
        return result

    @functools.singledispatchmethod
    def _dispatch(self, call: Call[Any]) -> Any:
        return self._run(call)

    @_dispatch.register
    def _new_batch(self, call: NewBatch) -> Run:
        self._run(call)
        self._batches += 1
        return functools.partial(self._run_in_batch, self._batches, call.rows)

    @_dispatch.register
    def _train(self, call: Train) -> dict[str, Any]:
        """Dispatch a step, and return its metrics and its seconds on each host."""
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
        seconds = [f"host_seconds/{rank}" for rank in range(len(self.hosts))]
        return {name: PendingMetric(self.read, reading, name) for name in (*METRICS, *seconds)}

    @_dispatch.register
    def _claim(self, call: Claim) -> None:
        self._check_shared(call.folder)
        self._run(call)

    @_dispatch.register
    def _save(self, call: Save | Wait) -> None:
        self._save_failed = False
        self._run(call, agree=self.patience)  # other hosts may be writing when one raises an error

    @_dispatch.register
    def _restore(self, call: Restore) -> tuple[int, dict[str, Any] | None]:
        self._check_shared(call.folder)
        copy = None if self.copies is None else self.copies.newer_than_saved(call.folder)
        if copy is None:
            return self._run(call)
        self.call("restore_copy", *[(copy, call.base)] * len(self.hosts))
        return copy.step, copy.aux | {"unsaved": True}

    def _run(
        self, call: Call[Result], size: int | None = None, agree: float = SECONDS_TO_AGREE
    ) -> Result:
        """Run a call on all hosts.

        Args:
          size: number of rows per replica in the call's batch, if it has one.
          agree: see `_results`.
        """
        calls, places = split(call, self.replicas, size)
        # One host knows why a result is not finite.  Of several, some may have finite rows.
        with blaming(lambda: self._run(BadWeights()) if len(self.hosts) > 1 else None):
            results = self.call("run", *zip(calls), agree=agree)
        try:
            return joined(call, results, places)
        except HostError as error:
            raise self.failed(str(error)) from None

    def _run_in_batch(self, number: int, size: int, call: Call[Result]) -> Result:
        if number != self._batches:
            raise InputError("a newer batch has replaced this one on the hosts; use the newer one")
        return self._run(call, size)

    def keep(self, aux: dict[str, Any]) -> str:
        """Start copying the state to the hosts' memory, where a later `restore` can find it.

        Waits for the previous copy first.  Every part of the state is kept on two hosts, in
        processes that outlive this cluster.  Does nothing if the cluster has no `copies`.

        Args:
          aux: a JSON-serialisable dict whose entries `restore` returns.

        Returns:
          The error that stopped the previous copy; "" if that copy is complete or there was none.
        """
        if self.copies is None:
            return ""
        problem = ""
        if self._keeping is not None:
            results = self._results([*self._keeping, *self._submit("wait_for_copies")])
            problem = next(filter(None, results), "")
            if problem:
                self.copies.place(self.hosts)
            else:
                self.copies.complete()
        number = self.copies.begin(self.step, self.call("own_aux")[0] | aux)
        self._keeping = self._submit("keep", *[(number, self.copies.keepers)] * len(self.hosts))
        return problem

    def _check_shared(self, folder: str) -> None:
        """Raise InputError if `folder` is a local folder that the hosts do not share.

        Without a shared folder, a save would wait forever for the files of the other hosts.
        """
        if is_uri(folder) or len({host.address for host in self.hosts}) == 1:
            return
        path = os.path.join(folder, f".{secrets.token_hex(8)}.shared")
        self._results([self._actors[0].create_marker.remote(path)])
        seen = self._results([actor.marker_exists.remote(path) for actor in self._actors])
        self._results([self._actors[0].delete_marker.remote(path)])
        if not all(seen):
            self.kill()
            raise InputError(
                f"{folder}: host {seen.index(False)} does not see a file of host 0 in this folder; "
                "give a folder that all hosts share, such as gs://bucket/model"
            )

    def close(self) -> None:
        """Wait for the last save, then shut down all hosts.

        Does nothing if the hosts have already been shut down.
        """
        if self.ended:
            return
        try:
            self.call("close")
        finally:
            self.kill()

    def call(
        self, method: str, *arguments: tuple[Any, ...], agree: float = SECONDS_TO_AGREE
    ) -> list[Any]:
        """Call a method of every host's `NetworkRunner`, and return one result per host.

        Args:
          arguments: one tuple of arguments per host; may be omitted if the method takes none.
          agree: see `_results`.
        """
        return self._results(self._submit(method, *arguments), agree)

    def _submit(self, method: str, *arguments: tuple[Any, ...]) -> list[Any]:
        """Send a call to every host without waiting, and return Ray references to the results.

        The arguments are the same as for `call`.  `_results` waits for the results.
        """
        if self.ended:
            raise HostError(f"the hosts have been shut down{self._why}; create a new cluster")
        per_host = arguments or [()] * len(self._actors)
        try:
            return [
                getattr(actor, method).remote(*own)
                for actor, own in zip(self._actors, per_host, strict=True)
            ]
        except STORE_FULL:
            raise self._disk_full_error("this machine") from None
        except KeyboardInterrupt:  # some hosts got the call and would wait for the rest
            self.kill()
            raise

    def _results(self, refs: list[Any], agree: float = SECONDS_TO_AGREE) -> list[Any]:
        """Wait for the calls that `_submit` has sent to the hosts, and return their results.

        If a call fails on a host, the error is raised and all hosts are shut down.  The hosts keep
        running only if the error is an InputError and all other hosts finish or fail the same call
        within `agree` seconds.
        """
        deadline = time.monotonic() + self.patience
        while True:
            try:
                return ray.get(refs, timeout=self.heartbeat)
            except exceptions.GetTimeoutError:
                if gone := self._unresponsive_hosts(self.heartbeat):
                    raise self._lost("; ".join(gone)) from None
                if time.monotonic() > deadline:
                    raise self.failed(
                        f"a call to the hosts took more than {self.patience:.0f} s; if the hosts "
                        "are only slow, increase --patience"
                    ) from None
            except exceptions.RayTaskError as error:
                raise self._translate_error(error, refs, agree) from None
            except exceptions.RayError as error:
                lost = f"a call to the hosts was lost ({type(error).__name__})"
                failed = self.failed(fallback=lost)
                # For example, a host whose version of this package cannot be imported.
                permanent = getattr(error, "actor_init_failed", False)
                raise PermanentError(str(failed)) if permanent else failed from None

    def _translate_error(
        self, error: exceptions.RayTaskError, refs: list[Any], agree: float
    ) -> Exception:
        """Return the exception to raise on the driver for an exception that a host has raised.

        Shuts down the hosts if necessary; see `_results`, also for `refs` and `agree`.
        """
        cause = error.cause
        if isinstance(cause, STORE_FULL):
            return self._disk_full_error("a host")
        if isinstance(cause, InputError):
            # If a host dies during a read or a save, the other hosts report it as bad input.
            if gone := self._unresponsive_hosts(SECONDS_TO_ANSWER):
                return self._lost("; ".join(gone))
            # All hosts should report the same bad input.  A host that has not done so may be
            # waiting for one that has already raised the error.
            if ray.wait(refs, num_returns=len(refs), timeout=agree)[1]:
                self.kill()
            return type(cause)(*cause.args)
        failed = self.failed(str(cause) if isinstance(cause, StoppedError) else last_line(error))
        # If another host has died, that is the cause.
        is_cause = isinstance(cause, PermanentError | RaisedError) and str(failed) == str(cause)
        return cause if is_cause else failed

    def _unresponsive_hosts(self, seconds: float) -> list[str]:
        """Return a line such as "host 1 died" for each host that does not respond in time."""
        pings = [actor.pid.options(concurrency_group="health").remote() for actor in self._actors]
        ray.wait(pings, num_returns=len(pings), timeout=seconds)
        problems = []
        for rank, ping in enumerate(pings):
            try:
                ray.get(ping, timeout=0)
            except exceptions.GetTimeoutError:
                problems.append(f"host {rank} does not answer")
            except exceptions.RayError as error:
                at_start = getattr(error, "actor_init_failed", False)
                cause = f" at its start: {last_line(error)}" if at_start else ""
                problems.append(f"host {rank} died{cause}")
        return problems

    def failed(self, message: str = "", *, fallback: str = "") -> HostError:
        """Shut down all hosts and return a HostError for the caller to raise.

        The text of the error begins with a list of the hosts that do not respond.

        Args:
          message: text that follows this list.
          fallback: text of the error if there is no `message` and all hosts respond.
        """
        gone = self._unresponsive_hosts(SECONDS_TO_ANSWER)
        return self._lost("; ".join([*gone, message] if message else gone or [fallback]))

    def _lost(self, why: str) -> HostError:
        """Shut down all hosts and return a HostError with the text `why`.

        All later calls raise a HostError that repeats `why`.
        """
        if spill_disk_is_full():  # a host on the same machine can die of it
            why += "; the disk that Ray's object store spills to (RAY_TMPDIR, else TMPDIR, else "
            why += "/tmp) is full"
        self._why = f" ({why})"
        self.kill()
        return HostError(why)

    def _disk_full_error(self, where: str) -> StoppedError:
        """Shut down all hosts and return a StoppedError that says that a disk is full.

        The error is not a HostError, because a restart would not help.

        Args:
          where: the machine whose disk is full.
        """
        self.kill()
        return StoppedError(
            f"Ray's object store on {where} is full, and so is the disk that it spills to "
            "(RAY_TMPDIR, else TMPDIR, else /tmp); free space on this disk and start again"
        )

    def kill(self) -> None:
        """Kill every process of the mesh, even if it is suspended (SIGSTOP) or busy with a call."""
        if self.ended:
            return
        self.ended = True
        kill_processes(self._actors, self._pids, self.hosts)
