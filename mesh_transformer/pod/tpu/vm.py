"""`TpuVm`, a TPU that is created at the start of a `with` block and deleted at its end.

    with TpuVm(TpuSpec("pod", "europe-west4-a", "v3-32", tier="preemptible")) as tpu:
        tpu.start_ray("10.0.0.2:6379", ray_token())
        ...
        tpu.check()        # raises PreemptedError if the TPU was taken away
        tpu.recreate()

A TPU costs money until it is deleted.  The command that deletes it is therefore printed before the
TPU is requested, so that the user has this command even after a power cut.  The TPU is deleted at
the end of the block, even if the block ends with an error, Ctrl-C, SIGTERM or SIGHUP.  If the
deletion fails, the command is printed again.

Every TPU gets an ownership label, which identifies its creator.  A TPU that has the same name but
another ownership label is never deleted.
"""

import contextlib
import dataclasses
import math
import secrets
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TextIO

from tqdm import tqdm

from mesh_transformer.pod.tpu import install
from mesh_transformer.pod.tpu.api import (
    CapacityError,
    PreemptedError,
    QuotaError,
    TpuApi,
    name_in_use_error,
)
from mesh_transformer.pod.tpu.guard import locked_file, ownership_label
from mesh_transformer.pod.tpu.signals import Signals
from mesh_transformer.pod.tpu.spec import SshOptions, TpuSpec, deadline_script
from mesh_transformer.pod.tpu.ssh import Hosts
from mesh_transformer.util import HostError, InputError, StoppedError

if TYPE_CHECKING:
    from google.cloud import tpu_v2


OWNER = "mesh-transformer-owner"  # the key of a TPU's ownership label
DEADLINE_KEY = "startup-script"  # the metadata key of a TPU's `deadline_script`
# States of a TPU, and of its queued resource, in which the TPU will not become ready by itself.  In
# other states, `TpuVm` keeps waiting.
GONE = {"PREEMPTED", "TERMINATED", "DELETING", "STOPPING", "STOPPED", "HIDING", "HIDDEN"}
QUEUE_GONE = {"SUSPENDING", "SUSPENDED", "DELETING"}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Time limits of a `TpuVm`, in seconds.

    Attributes:
      queue: longest wait for a queued TPU to leave the queue.
      ready: longest wait for a TPU to become ready.
      capacity: for how long to retry creating a TPU if the zone has no capacity, or if the TPU is
        taken away before it is ready; 0 disables retries.
      capacity_again: the same as `capacity`, for a TPU that `TpuVm.recreate` creates again.
      smaller_after: for how long to request only the TPU itself, if `TpuVm` has been given smaller
        types.
      delete: longest wait for a TPU to be deleted.
      host_keys: longest wait for hosts to publish their SSH host keys.
      settle: longest wait for a TPU to appear before it is deleted, if the request to create the
        TPU was interrupted before the API answered.
      deadline_grace: time after `TpuSpec.max_hours` in which this process can still save a
        checkpoint and delete the TPU.  After this time, the hosts delete the TPU themselves.
      poll: the longest time between two polls of the API.
    """

    queue: float = 24 * 3600.0
    ready: float = 1800.0
    capacity: float = 0.0
    capacity_again: float = 6 * 3600.0
    smaller_after: float = 600.0
    delete: float = 600.0
    host_keys: float = 60.0
    settle: float = 15.0
    deadline_grace: float = 900.0
    poll: float = 10.0


class TpuVm:
    """One TPU and its hosts, as a context manager; see the example in the module's docstring.

    Args:
      client: the Cloud TPU API client (default: the result of `api.new_client`).
      adopt: if a TPU of this name exists, use it instead of creating one.  The TPU must have the
        spec's type, and must have been created with `adopt` by the same user on the same machine.
        Such a TPU remains, for example, after the process that created it was killed.
      keep: do not delete the TPU at the end of the `with` block.
      smaller: accelerator types to use instead, the first preferred, while the zone has no capacity
        for the TPU.  Types that the zone does not offer are skipped.

    Attributes:
      spec: the specification; its type is that of the smaller TPU while one is used.

    Raises:
      InputError: if the name, type or zone is invalid, if the quota does not allow the TPU, or if
        the credentials are missing.  Also if a TPU of this name exists and may not be used (see
        `adopt`), or if another process with `adopt` uses this name.
      CapacityError: if the zone has no capacity for the TPU.
      PreemptedError: if the TPU was taken away.
      UnavailableError: if the API gives no answer.
      StoppedError: if a time limit is exceeded.
    """

    def __init__(
        self,
        spec: TpuSpec,
        *,
        client: "tpu_v2.TpuClient | None" = None,
        limits: Limits | None = None,
        ssh: SshOptions | None = None,
        adopt: bool = False,
        keep: bool = False,
        smaller: Sequence[str] = (),
    ):
        self._ssh = ssh or SshOptions()
        # The key is read now, so that a missing key is reported before the TPU costs money.
        self._public_key = self._ssh.public_key()
        self._signals = Signals()
        self._api = TpuApi(spec, client, self._signals)
        self.spec = self._api.spec
        self._types = (spec.accelerator_type, *smaller)
        self.limits = limits or Limits()
        self._adopt, self._keep = adopt, keep
        self._ready_since: float | None = None  # when the first TPU became ready
        self._requesting = threading.RLock()  # held while a TPU is requested
        self._exited = False
        self._mark = secrets.token_hex(8)
        self._may_exist = False  # whether a TPU that we requested or took over may exist
        self._answered = True  # False while the request to create the TPU has no answer
        self._hosts: Hosts | None = None
        self._guard = contextlib.ExitStack()  # of signal handlers, and with `adopt` a lock

    def __enter__(self) -> Self:
        if self._adopt:
            self._guard.enter_context(locked_file(self.spec))
        # The handlers turn signals into exceptions, so that `with` blocks can delete the TPU.
        self._guard.callback(self._signals.uninstall)
        self._signals.install()
        try:
            if self._adopt:
                self._mark = ownership_label(self.spec)
            self._make(self.limits.capacity)
            self._ready_since = time.monotonic()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if not self._tear_down() and kind is None:
            command = self.spec.delete_command()
            raise StoppedError(f"TPU {self.spec.name!r} was not deleted; delete it with: {command}")

    def _tear_down(self) -> bool:
        """Delete the TPU, unless `keep` is set; close SSH connections and restore signal handlers.

        Returns:
          False if the deletion failed, so that the TPU may still exist and be billed; else True.
        """
        self._signals.discard_dropped()
        command = self.spec.delete_command()
        with self._requesting:  # another thread may be about to create the TPU again
            self._exited = True
        try:
            if self._keep and self._may_exist:
                _say(f"TPU {self.spec.name!r} was kept; delete it with: {command}")
            else:
                self.delete()
        except (InputError, StoppedError) as error:
            _say(f"error: {error}")
            _say(f"TPU {self.spec.name!r} may still exist; delete it with: {command}")
            return False
        except BaseException:
            _say(f"TPU {self.spec.name!r} may still exist; delete it with: {command}")
            raise
        finally:
            self._close_hosts()
            self._guard.close()
        return True

    def _make(self, capacity_seconds: float, retry_on: tuple[type[Exception], ...] = ()) -> None:
        """Create the TPU and wait until it is ready.

        The attempt is repeated for up to `capacity_seconds` if the zone has no capacity, if the TPU
        is taken away before it is ready, or if an exception of a type in `retry_on` is raised.  The
        attempts after `limits.smaller_after` seconds include the smaller types.
        """
        start, poll, smaller = time.monotonic(), self.limits.poll, self._types[1:]
        smaller_after = self.limits.smaller_after if smaller else 0.0
        pause = poll
        while True:
            late = time.monotonic() - start >= smaller_after
            failures: list[Exception] = []
            for kind in [self._types[0], *(self._offered(smaller) if late else [])]:
                # The request for the TPU itself has shown that nothing else is wrong with it.
                bad_type = () if kind == self._types[0] else (InputError,)
                try:
                    self._wait_ready(self._create(kind))
                    return
                except (CapacityError, PreemptedError, *bad_type, *retry_on) as error:
                    failures.append(error)
                self.delete()
            waited = time.monotonic() - start
            seconds = pause if late else min(pause, max(smaller_after - waited, poll))
            if late and waited + seconds > capacity_seconds:
                raise failures[0]
            _say(f"{'; '.join(map(str, failures))}; retrying in {seconds:g} s")
            time.sleep(seconds)
            pause = min(2 * pause, 300.0)

    def _offered(self, types: Sequence[str]) -> list[str]:
        """Return those of the types that the zone offers; if there are none, say why."""
        if not types:
            return []
        problem = f"the zone {self.spec.zone} offers none of {', '.join(types)}"
        try:
            if offered := self._api.offered(types):
                return offered
        except (InputError, StoppedError, HostError) as error:
            problem = str(error)
        _say(f"{problem}; requesting only {self._types[0]}")
        return []

    def _create(self, kind: str) -> str | None:
        """Request the TPU, and return the name of the API's long-running operation.

        If the TPU already exists, it is taken over instead, and the result is None.  A TPU that was
        taken over but will not become ready is deleted and requested again.
        """
        node, queued = self._api.node(), self._api.queued()
        if node is not None or queued is not None:
            self._take_over(node, queued)
            if self._will_be_ready(node, queued):
                return None
            self.delete()
        self._use(kind)
        name, user = self.spec.name, self._ssh.user
        command = self.spec.delete_command()
        _say(f"creating TPU {name!r}; it is deleted at the end, or manually with: {command}")
        metadata = {
            "ssh-keys": f"{user}:{self._public_key}",
            "enable-guest-attributes": "TRUE",  # where hosts publish their SSH keys
        }
        if self.spec.max_hours is not None:
            seconds = max(self._seconds_left(), 0.0) + self.limits.deadline_grace
            metadata[DEADLINE_KEY] = deadline_script(self.spec, seconds)
        with self._requesting:
            if self._exited:
                raise StoppedError(f"TPU {name!r} is not created: this process is ending")
            self._may_exist, self._answered = True, False
            try:
                operation = self._api.create({OWNER: self._mark}, metadata, self.limits.queue)
            except (InputError, CapacityError):
                self._may_exist = False  # the API refused
                raise
            self._answered = True
        return operation

    def _use(self, kind: str) -> None:
        """Set the accelerator type of `spec`."""
        self.spec = self._api.spec = dataclasses.replace(self.spec, accelerator_type=kind)

    def _take_over(
        self, node: "tpu_v2.Node | None", queued: "tpu_v2.QueuedResource | None"
    ) -> None:
        """Use an existing TPU, which may have no node yet; see the argument `adopt` of `TpuVm`.

        Raises:
          InputError: if `adopt` is not set, or if the TPU has another ownership label or type.
        """
        if queued is not None:
            node = node or queued.tpu.node_spec[0].node
        assert node is not None
        if not self._adopt or node.labels.get(OWNER) != self._mark:
            raise name_in_use_error(self.spec)
        if node.accelerator_type not in self._types:
            raise InputError(
                f"TPU {self.spec.name!r} of an earlier run exists as {node.accelerator_type}, not "
                f"{self._types[0]}; delete it: {self.spec.delete_command()}, or continue a run "
                "that used it with the flags with which you started it"
            )
        self._use(node.accelerator_type)
        self._may_exist = True
        _say(
            f"taking over TPU {self.spec.name!r}; it is deleted at the end, or manually with: "
            f"{self.spec.delete_command()}"
        )
        has_deadline = DEADLINE_KEY in node.metadata
        if has_deadline or self.spec.max_hours is not None:
            _say(
                f"TPU {self.spec.name!r}: its hosts keep the time limit from their creation "
                f"(--max-hours {'set' if has_deadline else 'not set'})"
            )

    @staticmethod
    def _will_be_ready(node: "tpu_v2.Node | None", queued: "tpu_v2.QueuedResource | None") -> bool:
        """Return whether an existing TPU is ready or will become ready by itself."""
        if queued is not None and queued.state.state.name in QUEUE_GONE | {"FAILED"}:
            return False
        return node is None or node.state.name not in GONE

    def _wait_ready(self, operation: str | None) -> None:
        if self.spec.queued:
            self._wait_queue()
            operation = None  # it ended when the request entered the queue
        seconds = self.limits.ready
        for bar in self._polls("getting ready", seconds, "see its state in the console, or retry"):
            if operation is not None and self._api.operation_done(operation):
                operation = None
            state = self.state()
            bar.set_postfix_str(state)
            if state == "READY":
                return
            # Until the operation ends, the TPU may not exist yet.
            if state in GONE or (state == "MISSING" and operation is None):
                raise self._preempted_error(state)

    def _preempted_error(self, state: str) -> PreemptedError:
        return PreemptedError(f"TPU {self.spec.name!r} was taken away ({state.lower()})")

    def _wait_queue(self) -> None:
        for bar in self._polls(
            "in the queue", self.limits.queue, "wait longer, or choose another zone or type"
        ):
            resource = self._api.queued()
            state = "MISSING" if resource is None else resource.state.state.name
            bar.set_postfix_str(state)
            if state == "ACTIVE":
                return
            if resource is not None and state == "FAILED":
                raise self._api.queued_error(resource)
            if resource is None or state in QUEUE_GONE:
                raise self._preempted_error(state)

    def _polls(self, what: str, seconds: float, advice: str) -> Iterator[tqdm]:
        """Yield a progress bar each time the caller should poll the API; sleep in between.

        Raises:
          StoppedError: that the TPU is still `what`, and `advice`, once `seconds` have passed.
        """
        start = time.monotonic()
        layout = "{desc} {elapsed}{postfix}"
        stream = _TolerantStream(sys.stderr)
        with tqdm(
            desc=f"TPU {self.spec.name} {what}", bar_format=layout, leave=False, file=stream
        ) as bar:
            while True:
                yield bar
                left = start + seconds - time.monotonic()
                if left <= 0:
                    raise StoppedError(
                        f"TPU {self.spec.name!r} is still {what} after {seconds:g} s; {advice}"
                    )
                waited = seconds - left
                time.sleep(min(self.limits.poll, left, 1.0 + waited / 10))

    def state(self) -> str:
        """Return the TPU's state, such as "READY", as named by the API.

        Returns "MISSING" if the TPU does not exist, and "UNHEALTHY" if it is ready but not healthy.
        """
        node = self._api.node()
        if node is None:
            return "MISSING"
        healthy = node.health.name in ("HEALTHY", "HEALTH_UNSPECIFIED")
        return "UNHEALTHY" if node.state.name == "READY" and not healthy else node.state.name

    def check(self) -> None:
        """Raise PreemptedError if the TPU was taken away; otherwise wait until it is ready."""
        self._wait_ready(None)

    def recreate(self) -> None:
        """Delete the TPU if it still exists, and create a new one.

        The hosts of the new TPU have other SSH host keys, and may have other addresses.

        Raises:
          StoppedError: if the spec's `max_hours` have passed.
        """
        self._close_hosts()
        self.delete()
        if self._seconds_left() <= 0:
            raise StoppedError(
                f"TPU {self.spec.name!r}: --max-hours {self.spec.max_hours:g} have passed, so the "
                "TPU is not created again; start the run again to resume it"
            )
        # The deleted TPU still counts towards the quota for a while.
        self._make(self.limits.capacity_again, (QuotaError,))

    def _seconds_left(self) -> float:
        """Return the seconds that are left of the spec's `max_hours`; infinity if it is None.

        The time counts from when the TPU first became ready; recreating the TPU does not reset it.
        """
        if self.spec.max_hours is None:
            return math.inf
        elapsed = 0.0 if self._ready_since is None else time.monotonic() - self._ready_since
        return 3600 * self.spec.max_hours - elapsed

    def delete(self) -> None:
        """Delete the TPU and wait until it is gone.

        A TPU of the same name with another creator's ownership label is not deleted.
        """
        if not self._may_exist:
            return
        settled = time.monotonic() + (0.0 if self._answered else self.limits.settle)
        command, outcome = self.spec.delete_command(), ""
        for bar in self._polls("being deleted", self.limits.delete, f"delete it with: {command}"):
            node, queued = self._api.node(), self._api.queued()
            if node is None and queued is None:
                if time.monotonic() < settled:
                    continue
                if not self._answered:
                    outcome = f"did not appear; if it does, delete it with: {command}"
                break
            if not self._is_ours(node, queued):
                outcome = "belongs to someone else; it was not deleted"
                break
            self._answered, settled = True, 0.0  # the TPU exists, so the request succeeded
            if queued is not None:
                state = queued.state.state.name
                if state != "DELETING":
                    self._api.delete_queued()
            else:
                assert node is not None
                state = node.state.name
                if state != "DELETING":
                    self._api.delete_node()
            bar.set_postfix_str(state)
        self._may_exist, self._answered = False, True
        if outcome:
            _say(f"TPU {self.spec.name!r} {outcome}")

    def _is_ours(self, node: "tpu_v2.Node | None", queued: "tpu_v2.QueuedResource | None") -> bool:
        """Return whether this object may delete the TPU, according to its ownership label.

        A TPU without any ownership label counts as this object's TPU if the API has answered this
        object's request to create a TPU.
        """
        nodes = [node] if node is not None else []
        if queued is not None:
            nodes += [spec.node for spec in queued.tpu.node_spec]
        marks = {item.labels[OWNER] for item in nodes if OWNER in item.labels}
        return marks == {self._mark} if marks else self._answered

    def hosts(self) -> list[str]:
        """Return the internal IP addresses of the hosts of a ready TPU, in the hosts' order."""
        node = self._api.node()
        if node is None:
            raise self._preempted_error("MISSING")
        return [endpoint.ip_address for endpoint in node.network_endpoints]

    def ssh(self) -> Hosts:
        """Return SSH connections to the hosts.

        A host that has published SSH host keys must present one of these keys.
        """
        if self._hosts is None:
            addresses = self.hosts()
            self._hosts = Hosts(addresses, self._ssh, self._published_keys(addresses))
        return self._hosts

    def _published_keys(self, addresses: list[str]) -> dict[str, list[tuple[str, str]]]:
        """Return {address: SSH host keys that the host has published, as (type, base64) pairs}.

        This waits for up to `limits.host_keys` seconds, because a new host publishes its keys while
        it starts.  The result has no entry for a host that has published no keys.
        """
        deadline = time.monotonic() + self.limits.host_keys
        keys = {}
        for host, address in enumerate(addresses):
            while not (published := self._api.host_keys(host)) and time.monotonic() < deadline:
                time.sleep(min(self.limits.poll, 5.0))
            if published:
                keys[address] = published
        missing = [address for address in addresses if address not in keys]
        if missing:
            pinned = ": the first key that each presents is pinned" if self._ssh.trust_first else ""
            _say(
                f"{len(missing)} of {len(addresses)} hosts published no SSH key "
                f"({missing[0]}, ...){pinned}"
            )
        return keys

    def run(self, command: str, *, seconds: float, show: bool = False) -> list[str]:
        """Run a bash command on all hosts, and return its output on each host; see `Hosts.run`."""
        return self.ssh().run(command, seconds=seconds, show=show)

    def copy_package(self) -> None:
        """Copy the package `mesh_transformer` to each host; see `install.copy_package`."""
        install.copy_package(self.ssh())

    def start_ray(
        self,
        address: str,
        token: str,
        *,
        seconds: float = 1800.0,
        only: Collection[str] | None = None,
    ) -> None:
        """Install and start Ray on all hosts, or on those in `only`; see `install.start_ray`."""
        hosts = self.ssh() if only is None else self.ssh().only(only)
        install.start_ray(hosts, address, token, seconds=seconds)

    def _close_hosts(self) -> None:
        if self._hosts is not None:
            self._hosts.close()
            self._hosts = None


class _TolerantStream:
    """A stream that ignores write errors.

    Otherwise, an error from writing a message to a closed terminal could prevent the deletion of a
    TPU.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _say(line: str) -> None:
    stream = _TolerantStream(sys.stderr)
    stream.write(f"{line}\n")
    stream.flush()
