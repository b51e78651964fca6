"""`TPUCluster`: a fleet with one Ray actor on each host of a mesh, led by the driver process.

If a host fails, all hosts are shut down and the driver raises one HostError.  `restarts.train` then
creates a new cluster and resumes from the newest saved state.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from ray import exceptions

from mesh_transformer.config import Config
from mesh_transformer.pod.faults import LostError, last_line
from mesh_transformer.pod.fleet import Fleet
from mesh_transformer.pod.hosts import Host, kill_processes, start_process
from mesh_transformer.pod.ray_head import spill_disk_is_full
from mesh_transformer.pod.runner import MeshPlace, check_versions
from mesh_transformer.storage.access import local_path
from mesh_transformer.util import HostError, InputError, StoppedError

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

        return _result(self.actor.call.remote(method, *arguments), lost)

    def ping(self) -> Future[Any]:
        """See `Member.ping`."""

        def lost(error: exceptions.RayError) -> LostError:
            at_start = getattr(error, "actor_init_failed", False)
            return LostError(f"died at its start: {last_line(error)}" if at_start else "died")

        pid = self.actor.pid.options(concurrency_group="health")
        return _result(pid.remote(), lost)


def _result(ref: Any, lost: Callable[[exceptions.RayError], LostError]) -> Future[Any]:
    """Return the result behind a Ray reference; its error is the one that the actor has raised.

    Args:
      lost: makes an error from one of Ray's own.
    """
    result: Future[Any] = Future()

    def complete(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            result.set_result(done.result())
        elif isinstance(error, exceptions.RayTaskError):
            known = isinstance(error.cause, (InputError, StoppedError, *STORE_FULL))
            result.set_exception(error.cause if known else StoppedError(last_line(error)))
        elif isinstance(error, exceptions.RayError) and not isinstance(error, STORE_FULL):
            result.set_exception(lost(error))
        else:
            result.set_exception(error)

    ref.future().add_done_callback(complete)
    return result


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
        if wait(pids, SECONDS_TO_START).not_done:
            raise self.failed(fallback=f"host processes did not start in {SECONDS_TO_START:.0f} s")
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

    def _raised(
        self, failed: Sequence[Future[Any]], sent: Sequence[Future[Any]], agree: float
    ) -> Exception:
        if isinstance(failed[0].exception(), STORE_FULL):
            return self._disk_full_error("a host")
        return super()._raised(failed, sent, agree)

    def _lost(self, why: str) -> HostError:
        if spill_disk_is_full():  # a host on the same machine can die of it
            why += "; the disk that Ray's object store spills to (RAY_TMPDIR, else TMPDIR, else "
            why += "/tmp) is full"
        return super()._lost(why)

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
        if not self.ended:
            super().kill()
            kill_processes([member.actor for member in self.members], self._pids, self.hosts)
