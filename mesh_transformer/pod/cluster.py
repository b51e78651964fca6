"""`TPUCluster`: a fleet with one Ray actor on each host of a mesh, led by the driver process.

If a host fails, all hosts are shut down and the driver raises one HostError.  `restarts.train` then
creates a new cluster and resumes from the newest saved state.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future
from typing import Any

import ray
from ray import exceptions

from mesh_transformer.config import Config
from mesh_transformer.pod.faults import LostError
from mesh_transformer.pod.fleet import Fleet
from mesh_transformer.pod.hosts import Host, kill_processes, start_process
from mesh_transformer.pod.ray_head import spill_disk_is_full
from mesh_transformer.pod.runner import MeshPlace, check_versions
from mesh_transformer.storage.access import local_path
from mesh_transformer.util import HostError, InputError, StoppedError, last_line

SECONDS_TO_START = 60.0  # for a new host process to answer its first call
STORE_FULL = (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError)


class ActorMember:
    """A Ray actor as a member of a fleet; see `fleet.Member`."""

    def __init__(self, rank: int, host: Host):
        self.name, self.disks = f"host {rank}", host.address
        self.actor = start_process(rank, host)

    def send(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """See `Member.send`."""

        def lost(error: exceptions.RayError) -> LostError:
            line = f"a call to the hosts was lost ({type(error).__name__})"
            # For example, a host whose version of this package cannot be imported.
            return LostError(line, permanent=getattr(error, "actor_init_failed", False))

        return RayResult(self.actor.call.remote(method, *arguments), lost)

    def ping(self) -> Future[Any]:
        """See `Member.ping`."""

        def lost(error: exceptions.RayError) -> LostError:
            at_start = getattr(error, "actor_init_failed", False)
            return LostError(f"died at its start: {last_line(error)}" if at_start else "died")

        pid = self.actor.pid.options(concurrency_group="health")
        return RayResult(pid.remote(), lost)


class RayResult(Future[Any]):
    """The result behind a Ray reference; its error is the one that the actor has raised.

    It completes in `TPUCluster._wait`: a callback of Ray's (`ref.future()`) runs in another thread,
    which costs every call to the hosts about a millisecond.

    Args:
      lost: makes an error from one of Ray's own.
    """

    def __init__(self, ref: Any, lost: Callable[[exceptions.RayError], LostError]):
        super().__init__()
        self.ref = ref
        self._lost = lost

    def complete(self) -> None:
        """Get the result, which is there."""
        try:
            self.set_result(ray.get(self.ref))
        except exceptions.RayTaskError as error:
            known = isinstance(error.cause, (InputError, StoppedError, *STORE_FULL))
            self.set_exception(error.cause if known else StoppedError(last_line(error)))
        except STORE_FULL as error:
            self.set_exception(error)
        except exceptions.RayError as error:
            self.set_exception(self._lost(error))


class TPUCluster(Fleet):
    """A fleet that runs on all `hosts`.

    Args:
      heartbeat: declare a host dead after this many silent seconds.
      patience: maximum seconds for one call to the hosts, including compilation.

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
    ):
        super().__init__(config, silence=heartbeat, patience=patience)
        self.hosts = list(hosts)
        self._pids: list[int] = []
        try:
            for rank, host in enumerate(self.hosts):
                self.members.append(ActorMember(rank, host))
            self._start(heartbeat)
        except BaseException:
            self.kill()
            raise

    def _start(self, heartbeat: int) -> None:
        """Wait for the host processes to start, and create one mesh over all of them.

        JAX's coordinator gets a new port in each cluster, because a process of an earlier cluster
        may still try to connect to the old port.
        """
        pids = self._submit("pid")
        self._wait(pids, SECONDS_TO_START)
        if not all(pid.done() for pid in pids):
            raise self.failure(fallback=f"host processes did not start in {SECONDS_TO_START:.0f} s")
        self._pids = self._results(pids)
        names = [f"host {rank} ({host.address})" for rank, host in enumerate(self.hosts)]
        check_versions(dict(zip(names, self.call("versions"), strict=True)))
        coordinator = self._coordinator()
        self.start(
            [
                MeshPlace(
                    address=host.address,
                    coordinator=coordinator,
                    processes=len(self.hosts),
                    heartbeat=heartbeat,
                    devices=host.devices,
                )
                for host in self.hosts
            ]
        )

    def _coordinator(self) -> str:
        """Return the address of a free port of host 0, for JAX's coordinator."""
        address = self.hosts[0].address
        (port,) = self._results([self.members[0].send("free_port", (address,))])
        return f"{address}:{port}"

    def members_path(self, path: str) -> str:
        """Return a path of the config as the hosts need it, which have other current folders."""
        return local_path(path)

    def _submit(self, method: str, *arguments: tuple[Any, ...]) -> list[Future[Any]]:
        try:
            return super()._submit(method, *arguments)
        except STORE_FULL:
            raise self._disk_full_error("this machine") from None

    def _wait(
        self, results: Sequence[Future[Any]], seconds: float, until: str = ALL_COMPLETED
    ) -> None:
        deadline = time.monotonic() + seconds
        left = {r.ref: r for r in results if isinstance(r, RayResult) and not r.done()}

        def is_over() -> bool:
            done = (result for result in results if result.done())
            return until == FIRST_EXCEPTION and any(result.exception() for result in done)

        while left and not is_over():
            try:
                values = ray.get([*left], timeout=max(deadline - time.monotonic(), 0.0))
            except exceptions.RayError as error:  # as soon as one of the results is an error
                came, _ = ray.wait([*left], num_returns=len(left), timeout=0)
                for ref in came:
                    left.pop(ref).complete()
                if isinstance(error, exceptions.GetTimeoutError):
                    return
            else:
                for result, value in zip(left.values(), values, strict=True):
                    result.set_result(value)
                return

    def _raised(
        self, failed: Sequence[Future[Any]], sent: Sequence[Future[Any]], agree: float
    ) -> Exception:
        if isinstance(failed[0].exception(), STORE_FULL):
            return self._disk_full_error("a host")
        return super()._raised(failed, sent, agree)

    def _shut_down(self, why: str) -> HostError:
        if spill_disk_is_full():  # a host on the same machine can die of it
            why += "; the disk that Ray's object store spills to (RAY_TMPDIR, else TMPDIR, else "
            why += "/tmp) is full"
        return super()._shut_down(why)

    def _disk_full_error(self, where: str) -> StoppedError:
        """Shut down all hosts; return an error that is no HostError: a restart would not help."""
        self.kill()
        return StoppedError(
            f"Ray's object store on {where} is full, and so is the disk that it spills to "
            "(RAY_TMPDIR, else TMPDIR, else /tmp); free space on this disk and start again"
        )

    def kill(self) -> None:
        """Kill every process of the mesh, even if it is suspended (SIGSTOP) or busy with a call."""
        if not self.ended:
            super().kill()
            kill_processes([member.actor for member in self.members], self._pids, self.hosts)
