"""A TPU for the length of a `with` block: made, waited for, made again, and deleted at its end.

    with TpuVm(TpuSpec("pod", "europe-west4-a", "v3-32", tier="preemptible")) as tpu:
        tpu.start_ray("10.0.0.2:6379", ray_token())
        ...
        tpu.check()        # PreemptedError when it was taken away
        tpu.make_again()

A TPU costs money until it is deleted.  So its delete command is printed as soon as it is asked
for, which even a power cut comes after; it is deleted however the block ends (errors, Ctrl-C,
SIGTERM, SIGHUP), and where that fails the command is printed once more.  What this program did
not make (another's TPU of that name) is never deleted: each carries its maker's mark as a label.
"""

import contextlib
import dataclasses
import fcntl
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, TextIO

from tqdm import tqdm

from mesh_transformer.pod.tpu import install
from mesh_transformer.pod.tpu.api import CapacityError, PreemptedError, QuotaError, TpuApi, taken
from mesh_transformer.pod.tpu.install import FOLDER
from mesh_transformer.pod.tpu.signals import Signals
from mesh_transformer.pod.tpu.spec import SshOptions, TpuSpec, deadline_script
from mesh_transformer.pod.tpu.ssh import Hosts
from mesh_transformer.util import InputError, StoppedError

if TYPE_CHECKING:
    from google.cloud import tpu_v2


class Guard:
    """While held, the process has taken `signals`, and is the only one that uses the TPU.

    `alone` keeps this user's other processes from holding a TPU of that name too.
    """

    def __init__(self, spec: TpuSpec, signals: Signals, *, alone: bool):
        self._spec, self._signals, self._alone = spec, signals, alone
        self._lock: IO[str] | None = None

    def hold(self) -> None:
        """Raises InputError where another process holds it."""
        if self._alone:
            self._lock = _locked(self._spec)
        self._signals.take()

    def release(self) -> None:
        """Gives back what `hold` took, as often as it is called."""
        self._signals.give_back()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _locked(spec: TpuSpec) -> IO[str]:
    """A file by the TPU's name, locked until it is closed; it tells who has locked it."""
    path = _file_of(spec, "lock")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}; give HOME a folder of yours, since it "
            "holds what keeps two runs from using one TPU"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        number = file.read().strip()
        file.close()
        raise InputError(
            f"TPU {spec.name!r} is in use by process {number} of yours; take another name, or end "
            "that first"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def kept_mark(spec: TpuSpec) -> str:
    """What this user of this machine marks TPUs of that name with, from run to run.

    The caller holds a `Guard` alone.
    """
    path = _file_of(spec, "owner")
    if not path.exists() or not path.read_text():
        path.write_text(secrets.token_hex(8))
    return path.read_text()


def _file_of(spec: TpuSpec, kind: str) -> Path:
    return Path.home() / FOLDER / f"{spec.project}.{spec.zone}.{spec.name}.{kind}"


OWNER = "mesh-transformer-owner"  # the label with its maker's mark
DEADLINE_KEY = "startup-script"  # of its metadata, where it has a deadline
# States of a TPU that will not become ready by itself; all others are waited for.
GONE = {"PREEMPTED", "TERMINATED", "DELETING", "STOPPING", "STOPPED", "HIDING", "HIDDEN"}
QUEUE_GONE = {"SUSPENDING", "SUSPENDED", "DELETING"}


@dataclasses.dataclass(frozen=True)
class Limits:
    """For how many seconds to wait: in the queue, till ready, for capacity, till deleted.

    `capacity` is how long a TPU that the zone cannot give, or takes back at once, is asked for
    anew; 0 takes the first no.  `settle` is how long a TPU is looked for whose request was cut
    off before its answer.  `poll` is the longest time between two looks.  `deadline_grace` is how
    long after `max_hours` the hosts leave the driver to save and delete.
    """

    queue: float = 24 * 3600.0
    ready: float = 1800.0
    capacity: float = 0.0
    capacity_again: float = 6 * 3600.0  # the same, when it is made again
    delete: float = 600.0
    host_keys: float = 60.0
    settle: float = 15.0
    deadline_grace: float = 900.0
    poll: float = 10.0


class TpuVm:
    """One TPU and its hosts; see the module's example.

    `adopt` takes over a TPU of that name and type which an earlier such run, of this user on this
    machine, left alive (the driver was killed), where otherwise the name is taken; while one runs,
    another cannot.  `keep` leaves it alive at the end.  `client` is a TpuClient in place
    of the real one.

    Raises InputError (name, quota, type, zone, credentials), CapacityError, PreemptedError,
    UnavailableError, and StoppedError where a time limit is over.
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
    ):
        self._ssh = ssh or SshOptions()
        # Says now, not when the TPU costs money, that it is missing.
        self._public_key = self._ssh.public_key()
        self._signals = Signals()
        self._api = TpuApi(spec, client, self._signals)
        self.spec = self._api.spec
        self.limits = limits or Limits()
        self._adopt, self._keep = adopt, keep
        self._ready_since: float | None = None  # the first of those that it makes
        self._asking = threading.RLock()  # held while one is asked for
        self._left = False
        self._mark = secrets.token_hex(8)
        self._may_exist = False  # a TPU of ours, made or asked for
        self._answered = True  # False while a request to make it has no answer
        self._hosts: Hosts | None = None
        self._guard = Guard(self.spec, self._signals, alone=adopt)

    def __enter__(self) -> Self:
        self._guard.hold()
        try:
            if self._adopt:
                self._mark = kept_mark(self.spec)
            self._make(self.limits.capacity)
            self._ready_since = time.monotonic()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if not self._leave() and kind is None:
            command = self.spec.delete_command()
            raise StoppedError(f"TPU {self.spec.name!r} is not deleted; do it by: {command}")

    def _leave(self) -> bool:
        """Ends what `__enter__` began; whether nothing is left that costs money unbidden."""
        self._signals.forget()
        with self._asking:  # another thread may be about to make it again
            self._left = True
        try:
            if self._keep and self._may_exist:
                _say(f"TPU {self.spec.name!r} is kept; delete it by: {self.spec.delete_command()}")
            else:
                self.delete()
        except (InputError, StoppedError) as error:
            _say(f"error: {error}")
            _say(f"TPU {self.spec.name!r} may be alive: {self.spec.delete_command()}")
            return False
        except BaseException:
            _say(f"TPU {self.spec.name!r} may be alive: {self.spec.delete_command()}")
            raise
        finally:
            self._close_hosts()
            self._guard.release()
        return True

    def _make(self, capacity_seconds: float, refusals: tuple[type[Exception], ...] = ()) -> None:
        """Makes the TPU and waits till it is ready; again, while the zone has none to give.

        `refusals` are further answers that may be others later.
        """
        deadline = time.monotonic() + capacity_seconds
        pause = self.limits.poll
        while True:
            try:
                operation = self._create()
                self._wait_ready(operation)
                return
            except (CapacityError, PreemptedError, *refusals) as error:
                if time.monotonic() + pause > deadline:
                    raise
                _say(f"{error}; asking again in {pause:g} s")
            self.delete()
            time.sleep(pause)
            pause = min(2 * pause, 300.0)

    def _create(self) -> str | None:
        """Asks for the TPU: the operation's name, None where one of ours can be taken over."""
        node, queued = self._api.node(), self._api.queued()
        if node is not None or queued is not None:
            self._take_over(node, queued)
            if self._is_coming(node, queued):
                return None
            self.delete()
        name, user = self.spec.name, self._ssh.user
        _say(f"making TPU {name!r}; deleted at the end, else by: {self.spec.delete_command()}")
        metadata = {
            "ssh-keys": f"{user}:{self._public_key}",
            "enable-guest-attributes": "TRUE",  # where hosts publish their SSH keys
        }
        if self.spec.max_hours is not None:
            seconds = max(self._seconds_left(), 0.0) + self.limits.deadline_grace
            metadata[DEADLINE_KEY] = deadline_script(self.spec, seconds)
        with self._asking:
            if self._left:
                raise StoppedError(f"TPU {name!r} is not made: this process is ending")
            self._may_exist, self._answered = True, False
            try:
                operation = self._api.create({OWNER: self._mark}, metadata, self.limits.queue)
            except (InputError, CapacityError):
                self._may_exist = False  # these are answers: no
                raise
            self._answered = True
        return operation

    def _take_over(
        self, node: "tpu_v2.Node | None", queued: "tpu_v2.QueuedResource | None"
    ) -> None:
        if queued is not None:
            node = node or queued.tpu.node_spec[0].node
        assert node is not None
        wanted = self.spec.accelerator_type
        if not self._adopt or node.labels.get(OWNER) != self._mark:
            raise taken(self.spec)
        if node.accelerator_type != wanted:
            raise InputError(
                f"TPU {self.spec.name!r} exists as {node.accelerator_type}, not {wanted}; take "
                f"another name, or delete it: {self.spec.delete_command()}"
            )
        self._may_exist = True
        _say(
            f"taking over TPU {self.spec.name!r}; deleted at the end, else by: "
            f"{self.spec.delete_command()}"
        )
        ends = DEADLINE_KEY in node.metadata
        if ends or self.spec.max_hours is not None:
            _say(
                f"TPU {self.spec.name!r}: its hosts keep the --max-hours that it was made with "
                f"({'some' if ends else 'none'})"
            )

    @staticmethod
    def _is_coming(node: "tpu_v2.Node | None", queued: "tpu_v2.QueuedResource | None") -> bool:
        """Whether what exists is ready, or becomes so."""
        if queued is not None and queued.state.state.name in QUEUE_GONE | {"FAILED"}:
            return False
        return node is None or node.state.name not in GONE

    def _wait_ready(self, operation: str | None) -> None:
        if self.spec.queued:
            self._wait_queue()
            operation = None  # it ended when the request was in the queue
        seconds = self.limits.ready
        for bar in self._polls("till ready", seconds, "see its state in the console, or retry"):
            if operation is not None and self._api.operation_done(operation):
                operation = None
            state = self.state()
            bar.set_postfix_str(state)
            if state == "READY":
                return
            # Until the operation ends, a TPU that is not there yet is no surprise.
            if state in GONE or (state == "MISSING" and operation is None):
                raise self._taken_away(state)

    def _taken_away(self, state: str) -> PreemptedError:
        return PreemptedError(f"TPU {self.spec.name!r} was taken away ({state.lower()})")

    def _wait_queue(self) -> None:
        for bar in self._polls(
            "in the queue", self.limits.queue, "wait longer, or take another zone or type"
        ):
            resource = self._api.queued()
            state = "MISSING" if resource is None else resource.state.state.name
            bar.set_postfix_str(state)
            if state == "ACTIVE":
                return
            if resource is not None and state == "FAILED":
                raise self._api.queued_error(resource)
            if resource is None or state in QUEUE_GONE:
                raise self._taken_away(state)

    def _polls(self, what: str, seconds: float, advice: str) -> Iterator[tqdm]:
        """Yields a progress bar at every poll, until the time is over: StoppedError."""
        start = time.monotonic()
        name = f"TPU {self.spec.name}"
        layout = "{desc} {elapsed}{postfix}"
        told = _Told(sys.stderr)
        with tqdm(desc=f"{name} {what}", bar_format=layout, leave=False, file=told) as bar:
            while True:
                yield bar
                left = start + seconds - time.monotonic()
                if left <= 0:
                    raise StoppedError(f"{name!r}: more than {seconds:g} s {what}; {advice}")
                waited = seconds - left
                time.sleep(min(self.limits.poll, left, 1.0 + waited / 10))

    def state(self) -> str:
        """The API's name of its state, "MISSING" where there is none, "UNHEALTHY" where so."""
        node = self._api.node()
        if node is None:
            return "MISSING"
        healthy = node.health.name in ("HEALTHY", "HEALTH_UNSPECIFIED")
        return "UNHEALTHY" if node.state.name == "READY" and not healthy else node.state.name

    def check(self) -> None:
        """Raises PreemptedError where the TPU was taken away; waits where it is being repaired."""
        self._wait_ready(None)

    def make_again(self) -> None:
        """Deletes what is left of it, and makes it anew; its addresses and keys are others then."""
        self._close_hosts()
        self.delete()
        if self._seconds_left() <= 0:
            raise StoppedError(
                f"TPU {self.spec.name!r}: --max-hours {self.spec.max_hours:g} are over, so that it "
                "is not made again; start again to resume"
            )
        # The quota of the one that was deleted is not free at once.
        self._make(self.limits.capacity_again, (QuotaError,))

    def _seconds_left(self) -> float:
        """Until `max_hours` after the first TPU was ready; infinite without."""
        if self.spec.max_hours is None:
            return math.inf
        gone = 0.0 if self._ready_since is None else time.monotonic() - self._ready_since
        return 3600 * self.spec.max_hours - gone

    def delete(self) -> None:
        """Deletes the TPU, if it is ours, and waits until it is gone."""
        if not self._may_exist:
            return
        settled = time.monotonic() + (0.0 if self._answered else self.limits.settle)
        command, outcome = self.spec.delete_command(), ""
        for bar in self._polls("being deleted", self.limits.delete, f"do it by: {command}"):
            node, queued = self._api.node(), self._api.queued()
            if node is None and queued is None:
                if time.monotonic() < settled:
                    continue
                if not self._answered:
                    outcome = f"did not appear; should it: {command}"
                break
            if not self._is_ours(node, queued):
                outcome = "is another's; it is left alone"
                break
            self._answered, settled = True, 0.0  # by its being there
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
        """A mark decides where there is one; without, an answer to our request to make it does."""
        labelled = [node] if node is not None else []
        if queued is not None:
            labelled += [wanted.node for wanted in queued.tpu.node_spec]
        marks = {each.labels[OWNER] for each in labelled if OWNER in each.labels}
        return marks == {self._mark} if marks else self._answered

    def hosts(self) -> list[str]:
        """The addresses of a ready TPU's hosts in its network, in the order of their numbers."""
        node = self._api.node()
        if node is None:
            raise self._taken_away("MISSING")
        return [endpoint.ip_address for endpoint in node.network_endpoints]

    def ssh(self) -> Hosts:
        """Connections to the hosts, which hold to the SSH keys that the hosts have published."""
        if self._hosts is None:
            addresses = self.hosts()
            self._hosts = Hosts(addresses, self._ssh, self._published_keys(addresses))
        return self._hosts

    def _published_keys(self, addresses: list[str]) -> dict[str, list[tuple[str, str]]]:
        """Each host's keys, waited for a while since a new host publishes them as it starts."""
        deadline = time.monotonic() + self.limits.host_keys
        keys = {}
        for host, address in enumerate(addresses):
            while not (found := self._api.host_keys(host)) and time.monotonic() < deadline:
                time.sleep(min(self.limits.poll, 5.0))
            if found:
                keys[address] = found
        missing = [address for address in addresses if address not in keys]
        if missing:
            _say(
                f"{len(missing)} of {len(addresses)} hosts published no SSH key "
                f"({missing[0]}, ...): the first one seen is held on to"
            )
        return keys

    def run(self, command: str, *, seconds: float, show: bool = False) -> list[str]:
        """A bash command's output on each host; see `Hosts.run`."""
        return self.ssh().run(command, seconds=seconds, show=show)

    def copy_package(self) -> None:
        install.copy_package(self.ssh())

    def start_ray(self, address: str, token: str, *, seconds: float = 1800.0) -> None:
        """Makes every host a worker of the Ray cluster at `address`; see `tpu_ray.start_ray`."""
        install.start_ray(self.ssh(), address, token, seconds=seconds)

    def _close_hosts(self) -> None:
        if self._hosts is not None:
            self._hosts.close()
            self._hosts = None


class _Told:
    """A stream that may have lost its reader: a TPU is deleted all the same."""

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


def _say(words: str) -> None:
    told = _Told(sys.stderr)
    told.write(f"{words}\n")
    told.flush()
