"""A fleet of processes that all run the same command, without a driver; process 0 leads.

    process 0                           process 1
    training.loop.train
    EveryHost: calls      -- TCP -->    follow: runs them in order
    devices               <-- JAX -->   devices

Process 0 also runs the calls itself, on its own devices.  If a process ends, all others end too.
This is what they print on stderr, and their exit status; LINE is "error: ..." with what happened,
and ADVICE says to start all processes again:

    what happens                          process 0 prints   the others print   status
    the run ends, or calls sys.exit(N)    nothing            nothing            0, or N
    an exception in process 0:
      HostError                           LINE; ADVICE       LINE; ADVICE       1
      with a line (`util.error_line`)     LINE               nothing            `exit_status`
      KeyboardInterrupt                   nothing            LINE; ADVICE       130
      any other                           a traceback        LINE; ADVICE       1
    a call raises an error in process 1   `Fleet._raised` raises it, or another one, in process 0
    process 1 ends without notice         LINE; ADVICE       LINE; ADVICE       1
    process 1 does not answer             LINE; ADVICE       LINE; ADVICE       1
    process 0 ends without notice                            LINE; ADVICE       1
    JAX aborts one, for another reason    LINE; ADVICE       LINE; ADVICE       1
    a signal reaches process 1            process 0 handles it as if it had reached process 0:
                                          training saves, and the run ends; otherwise process 0 ends
"""

import contextlib
import ctypes
import dataclasses
import itertools
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn

from mesh_transformer import status_lines
from mesh_transformer.config import Config
from mesh_transformer.mesh.jax_versions import detect_cluster
from mesh_transformer.pod.faults import LostError
from mesh_transformer.pod.fleet import Fleet
from mesh_transformer.pod.meeting import (
    Connection,
    Peer,
    Place,
    accept_others,
    connect_to_leader,
    free_port,
)
from mesh_transformer.pod.runner import MeshPlace, NetworkRunner, versions
from mesh_transformer.pod.train_set import ClusterTrainSet
from mesh_transformer.util import (
    HostError,
    InputError,
    StoppedError,
    error_line,
    exit_now,
    exit_status,
    print_traceback,
    start_thread,
    stop_signals,
)

MOST_SECONDS = 1e7  # for one call: it may take as long as it needs
SECONDS_TO_SEND = 1.0  # for an earlier message to make way for a ping or an end
SECONDS_AT_ABORT = 1.0  # for the other processes to answer a ping when JAX aborts this one
SECONDS_TO_REPORT = 2.0  # for the reason of an abort to arrive
WAIT_SECONDS = 0.5  # longest time until a signal is handled while the main thread waits
ADVICE = "start all processes again to resume from the newest checkpoint"


class OwnMember:
    """This process as a member of its own fleet; see `fleet.Member`.

    A thread runs the calls, so that the main thread learns of errors of other members while its own
    devices wait for theirs.
    """

    def __init__(self, name: str, runner: NetworkRunner):
        self.name = self.disks = name
        self._runner, self._thread = runner, ThreadPoolExecutor(1)

    def send(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """See `Member.send`."""
        return self._thread.submit(self._runner.call, method, *arguments)

    def ping(self) -> Future[Any]:
        """See `Member.ping`."""
        answer: Future[Any] = Future()
        answer.set_result(os.getpid())
        return answer


class ConnectedMember:
    """Another process as a member of the fleet; see `fleet.Member`.

    Args:
      fleet: the fleet, which handles the signals and the end of the process.
    """

    def __init__(self, name: str, connection: Connection, fleet: "EveryHost"):
        self.name = self.disks = name
        self._connection, self._fleet = connection, fleet
        self._numbers = itertools.count()
        self._results: dict[int, Future[Any]] = {}
        self._has_ended = False
        start_thread(self._listen, name=name)

    def send(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """See `Member.send`."""
        return self._ask(["call", next(self._numbers), method, arguments], -1)

    def ping(self) -> Future[Any]:
        """See `Member.ping`."""
        return self._ask(["ping", next(self._numbers)], SECONDS_TO_SEND)

    def _ask(self, message: list[Any], seconds: float) -> Future[Any]:
        self._results[message[1]] = result = Future()
        try:
            # Raised if another message is on its way to a process that does not read.
            with contextlib.suppress(BlockingIOError):
                self._connection.send(message, seconds)
        except OSError:
            self._has_ended = True
        if self._has_ended:
            self._handle_end()
        return result

    def end(self, line: str, status: int, *, together: bool = False) -> None:
        """Let the process end with an exit status; see `follow`."""
        with contextlib.suppress(OSError):
            self._connection.send(["end", line, status, together], SECONDS_TO_SEND)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                kind, *content = self._connection.receive()
                if kind == "signal":
                    self._fleet.receive_signal(*content)
                    continue
                number, value, error = content
                result = self._results.pop(number)
                if error is None:
                    result.set_result(value)
                else:
                    result.set_exception(error)
        self._has_ended = True
        self._handle_end()

    def _handle_end(self) -> None:
        """Complete the results that can no longer come, and end the fleet."""
        line = "has ended without notice"
        with contextlib.suppress(KeyError):
            while True:
                self._results.popitem()[1].set_exception(LostError(line))
        self._fleet.end_all(f"{self.name} {line}")


class EveryHost(Fleet):
    """A fleet of processes that run the same command; this process leads it, and is a member.

    Args:
      peers: the other processes.
      ids: the local devices that this process uses; None for all.
      heartbeat: seconds after which a silent process counts as dead.
    """

    def __init__(
        self, config: Config, peers: Sequence[Peer], ids: Sequence[int] | None, heartbeat: int
    ):
        super().__init__(config, silence=heartbeat, patience=MOST_SECONDS)
        self._peers, self._heartbeat = peers, heartbeat
        self._ending = threading.Lock()  # held once the others have been asked to end
        names = _names([socket.gethostname(), *[peer.host for peer in peers]])
        self.members.append(OwnMember(names[0], NetworkRunner(0, name=names[0], device_ids=ids)))
        for name, peer in zip(names[1:], peers, strict=True):
            self.members.append(ConnectedMember(name, peer.connection, self))

    def connect(self, place: Place, address: str) -> None:
        """Create one mesh over the devices of all processes.

        Args:
          place: the place of this process, which is process 0.
          address: IP address at which the others reach it.
        """
        assert self.config.tpu_size is not None
        devices, rest = divmod(self.config.tpu_size, place.count)
        bind = place.bind_host
        own = MeshPlace(
            address=address,
            coordinator=f"{place.address.rpartition(':')[0]}:{free_port(bind)}",
            processes=place.count,
            heartbeat=self._heartbeat,
            devices=None if rest else devices,
            bind=f"[{bind}]" if ":" in bind else bind,
        )
        if place.count > 1:
            _report_aborts(self._name_silent)
        others = [dataclasses.replace(own, address=peer.address) for peer in self._peers]
        self.start([own, *others])

    def open_train_set(self) -> ClusterTrainSet:
        """Open the config's training set, of which each process reads its own rows.

        Raises:
          InputError: also if the processes do not all see the same record files.
        """
        return ClusterTrainSet(self)

    def end(self, line: str, status: int, *, together: bool = False) -> None:
        """Let all other processes end with an exit status; see `follow`."""
        self.ended = True
        if self._ending.acquire(blocking=False):
            for member in self.members[1:]:
                member.end(line, status, together=together)

    def receive_signal(self, number: int) -> None:
        """Handle a signal that another process has received like one of this process.

        It ends this process unless training handles signals, or has handled one.
        """
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        if not self.signals and signal.getsignal(number) in defaults:
            os.kill(os.getpid(), number)
        else:
            self.signals.append(number)

    def end_all(self, line: str) -> None:
        """End all processes with an error, unless they are about to end anyway."""
        if self._ending.acquire(blocking=False):
            for member in self.members[1:]:
                member.end(line, 1)
            print(f"\nerror: {line}; {ADVICE}", file=sys.stderr, flush=True)
            exit_now("", 1)

    def _name_silent(self) -> None:
        """If a process does not answer, end all with a line that names it."""
        pings = [member.ping() for member in self.members]
        wait(pings, SECONDS_AT_ABORT)
        pairs = zip(self.members, pings, strict=True)
        if silent := [member.name for member, ping in pairs if not ping.done()]:
            verb = "does" if len(silent) == 1 else "do"
            self.end_all(f"{' and '.join(silent[:3])} {verb} not answer")


FLAGS = ("--coordinator", "--process-count", "--process-index")


def find_place(
    coordinator: str | None, count: int | None, index: int | None, seconds: float
) -> tuple[Place, list[int] | None]:
    """Return the place of this process, and the ids of the local devices that it uses.

    If `count` and `index` are None, JAX detects the cluster.  The ids are None for all devices.

    Args:
      coordinator: "HOST:PORT" of process 0 (default: the variable JAX_COORDINATOR_ADDRESS).
      seconds: time limit for looking up the host of process 0.

    Raises:
      InputError: if values are missing or contradict each other, or no cluster is detected.
    """
    chosen = (coordinator, count, index)
    ids = [int(i) for i in os.environ.get("JAX_LOCAL_DEVICE_IDS", "").split(",") if i] or None
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if chosen == (None, None, None):
        try:
            coordinator, count, index, ids = detect_cluster(coordinator, ids, int(seconds))
        except Exception as error:  # each kind of cluster raises its own exceptions
            text = " ".join(str(error).split())[:300]
            raise InputError(
                f"--every-host: JAX cannot detect the cluster ({type(error).__name__}: {text}); "
                f"give {', '.join(FLAGS)}"
            ) from None
    values = zip(FLAGS, (coordinator, count, index), strict=True)
    if missing := [flag for flag, value in values if value is None]:
        raise InputError(
            f"--every-host requires {', '.join(missing)}; give all of {', '.join(FLAGS)}, or none "
            "of them where JAX detects the cluster (Slurm, Open MPI, Cloud TPUs, Kubernetes)"
        )
    assert coordinator is not None
    assert count is not None
    assert index is not None
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"--coordinator is {coordinator}, expected HOST:PORT")
    if not 0 <= index < count:
        raise InputError(
            f"--process-index is {index}, expected 0 to {count - 1} (--process-count is {count})"
        )
    return Place(coordinator, count, index), ids


@contextlib.contextmanager
def leading(
    config: Config,
    place: Place,
    ids: Sequence[int] | None,
    flags: dict[str, Any],
    *,
    seconds: float,
    heartbeat: int,
) -> Iterator[EveryHost]:
    """Connect this process to the others; in process 0, yield a network over all their devices.

    Another process follows process 0, and then exits.  If the context ends with an exception, all
    processes exit.  Only process 0 prints, apart from errors.

    Args:
      place: the place of this process, from `find_place`.
      ids: the local devices that it uses, from `find_place`.
      flags: further values, by name, that must be equal in all processes.
      seconds: time limit for all processes to connect.
      heartbeat: seconds after which a process that does not answer counts as dead.

    Raises:
      InputError: if the processes cannot connect, or differ in their config, flags or versions.
    """
    keys = {f"config key {key}": value for key, value in config.as_dict().items()}
    facts = keys | flags | versions()
    if place.index:
        connection, hosts = connect_to_leader(place, facts, seconds=seconds, heartbeat=heartbeat)
        names = _names(hosts)
        _report_aborts(lambda: None)
        status_lines.end()
        runner = NetworkRunner(place.index, name=names[place.index], device_ids=ids)
        try:
            status = follow(connection, runner, names[0])
        except Exception as error:
            print_traceback(error)
            exit_now("", 1)  # does not wait for the others, as JAX would
        sys.exit(status)
    address, peers = accept_others(place, facts, seconds=seconds, heartbeat=heartbeat)
    fleet = EveryHost(config, peers, ids, heartbeat)
    try:
        fleet.connect(place, address)
        yield fleet
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else bool(error.code)
        fleet.end("", status, together=True)
        raise
    except BaseException as error:
        _end_with(error, fleet)
    fleet.end("", 0, together=True)


def _names(hosts: Sequence[str]) -> list[str]:
    return [f"process {index} ({host})" for index, host in enumerate(hosts)]


def _end_with(error: BaseException, fleet: EveryHost) -> NoReturn:
    """Report an error in process 0, and end all processes."""
    # Others print no line if process 0 says all that is to be said.
    status, others = exit_status(error), ""
    if isinstance(error, HostError):
        others = str(error)
        print(f"error: {others}; {ADVICE}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        status, others = 130, f"{fleet.members[0].name}: interrupted by Ctrl-C"
    elif isinstance(error, Exception) and (line := error_line(error)):
        print(f"error: {line}", file=sys.stderr)
    else:
        text = " ".join(str(error).split())[:300]
        others = f"{fleet.members[0].name}: {type(error).__name__}: {text}"
        print_traceback(error)
    fleet.end(others, status)
    exit_now("", status)


def follow(connection: Connection, runner: NetworkRunner, leader: str) -> int:
    """Run the calls of process 0 until all processes end; return the exit status of this one.

    Signals that this process receives are passed on to process 0.  If process 0 ends alone, or
    without notice, this process exits at once.

    Args:
      leader: name of process 0.
    """
    calls: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def listen() -> None:
        line, status, together = f"{leader} has ended without notice", 1, False
        with contextlib.suppress(OSError):
            while True:
                kind, *content = connection.receive()
                if kind == "end":
                    line, status, together = content
                    break
                if kind == "ping":
                    connection.send(["result", *content, os.getpid(), None])
                else:
                    calls.put([kind, *content])
        if not together:
            if line:
                print(f"error: {line}; {ADVICE}", file=sys.stderr, flush=True)
            exit_now("", status)
        calls.put(["end", status])

    listening = start_thread(listen, name="listen")
    with stop_signals([]) as received:
        is_signal_sent = False
        while True:
            try:
                if received and not is_signal_sent:
                    connection.send(["signal", received[0]])
                    is_signal_sent = True
                # Python handles a signal that arrives just before a wait only when that wait ends.
                kind, *content = calls.get(timeout=WAIT_SECONDS)
                if kind == "end":
                    return content[0]
                number, method, arguments = content
                result, raised = None, None
                try:
                    result = runner.call(method, *arguments)
                except (InputError, StoppedError) as error:
                    raised = error
                connection.send(["result", number, result, raised])
            except queue.Empty:
                continue
            except OSError:
                listening.join()


def _report_aborts(name_silent: Callable[[], None]) -> None:
    """When JAX aborts this process, print one line after JAX's own report, and exit.

    JAX's client aborts the process when process 0 is gone, or when a process has not answered for
    some seconds.  Python's own signal handlers never run in that case, because they would run only
    after the abort.

    Args:
      name_silent: called first; it may exit with a line that names the process that is silent.
    """

    def report(number: int) -> None:
        name_silent()
        time.sleep(SECONDS_TO_REPORT)  # another thread may learn the reason, and exit
        line = f"error: JAX has lost another process, or failed (see above); {ADVICE}"
        print(line, file=sys.stderr, flush=True)
        exit_now("", 1)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(report)
    _handlers.append(handler)
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


_handlers: list[Any] = []  # kept, because the operating system holds only their addresses
