"""Connections between the processes of a run that no driver has started.

    process 0: `accept_others`     process 1: `connect_to_leader`
    Connection   <---- TCP ---->   Connection

Process 0 waits until all other processes have connected to it, and compares what must be equal in
all of them.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from mesh_transformer.pod.wire import decode, encode
from mesh_transformer.util import HostError, InputError, brief

MOST_BYTES = 1 << 20  # in the first message of a process; longer ones are not from one of ours
HELLO_SECONDS = 5.0  # for a new connection to say who it is
RETRY_SECONDS = 0.2  # between two attempts to connect
REFUSE_SECONDS = 5.0  # process 0 waits this long for others, to tell them why the run cannot start
PROBES = 3  # unanswered keep-alive probes after which a connection counts as lost


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process in its run.

    Attributes:
      address: "HOST:PORT" where process 0 listens.
      count: number of processes.
      index: index of this process.
    """

    address: str
    count: int
    index: int

    @property
    def host(self) -> str:
        """The host in `address`, without the brackets of an IPv6 address."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port in `address`."""
        return int(self.address.rpartition(":")[2])

    @property
    def bind_host(self) -> str:
        """The address at which process 0 listens; "" for all of its addresses.

        It is the host part of `JAX_COORDINATOR_BIND_ADDRESS`, if that is set.  A host name might
        be resolved to a loopback address on its own machine, so it is replaced by all addresses.
        """
        if chosen := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
            host = chosen.rpartition(":")[0].strip("[]")
            return "" if host in ("::", "0.0.0.0") else host
        if self.host == "localhost":
            return "127.0.0.1"
        with contextlib.suppress(OSError):
            socket.getaddrinfo(self.host, None, flags=socket.AI_NUMERICHOST)
            return self.host
        return ""


class Connection:
    """Messages to and from another process; they are values as in `wire`."""

    def __init__(self, connection: socket.socket, heartbeat: int):
        """Use a TCP connection; it is lost if the other machine is silent for `heartbeat` s."""
        _set_options(connection, heartbeat)
        self._socket = connection
        self._content = connection.makefile("rb")
        self._sending = threading.Lock()  # one message at a time

    def send(self, message: Any, seconds: float = -1) -> None:
        """Send a message.

        Raises:
          BlockingIOError: if another message is on its way for so many seconds (default: no limit).
          OSError: if the connection is lost.
          TypeError: if the message contains what no message can contain.
        """
        content = encode(message)
        if not self._sending.acquire(timeout=seconds):
            raise BlockingIOError("another message is on its way")
        try:
            self._socket.sendall(len(content).to_bytes(8, "big") + content)
        finally:
            self._sending.release()

    def receive(self, most: int | None = None) -> Any:
        """Return the next message, of at most `most` bytes.

        Raises:
          OSError: if the connection is lost or closed, or what arrives is not a message.
        """
        size = int.from_bytes(self._read(8), "big")
        if most is not None and size > most:
            raise OSError("a message is too long")
        try:
            return decode(self._read(size))
        except ValueError as error:
            raise OSError(str(error)) from None

    def _read(self, size: int) -> bytes:
        content = b""
        with contextlib.suppress(ValueError):  # if this process has closed the connection
            content = self._content.read(size)
        if len(content) < size:
            raise OSError("the connection is closed")
        return content

    def limit(self, seconds: float | None) -> None:
        """Let `receive` raise OSError after this many seconds without data."""
        self._socket.settimeout(seconds)

    @property
    def address(self) -> str:
        """IP address of this process, at which the other one reaches it."""
        return _address(self._socket.getsockname())

    @property
    def peer(self) -> str:
        """IP address of the other process."""
        return _address(self._socket.getpeername())

    def is_closed(self) -> bool:
        """Return whether the other process has closed the connection."""
        self._socket.setblocking(False)
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._socket.setblocking(True)

    def close(self) -> None:
        """Close the connection; a thread that is in `receive` gets OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._content.close()
        self._socket.close()


class Peer(NamedTuple):
    """Another process, as process 0 sees it.

    Attributes:
      host: name of its machine.
      address: IP address at which other processes reach it.
    """

    connection: Connection
    host: str
    address: str


def accept_others(
    place: Place, facts: dict[str, Any], *, seconds: float, heartbeat: int
) -> tuple[str, list[Peer]]:
    """Wait for all other processes, in process 0.

    Args:
      facts: values by name, which must be equal in all processes.
      seconds: time limit for all processes to connect.
      heartbeat: seconds after which a machine that does not answer counts as vanished.

    Returns:
      The IP address at which other processes reach this one, and the other processes.

    Raises:
      InputError: in all processes, if they do not all connect in time, two have the same index, or
        a fact differs.
    """
    return _Acceptance(place, facts, seconds, heartbeat).run()


def connect_to_leader(
    place: Place, facts: dict[str, Any], *, seconds: float, heartbeat: int
) -> tuple[Connection, list[str]]:
    """Connect to process 0; return the connection, and the machine's name of each process.

    The arguments and errors are those of `accept_others`.
    """
    deadline = time.monotonic() + seconds
    connection = _connected(place, seconds, heartbeat)
    hello = {"count": place.count, "index": place.index, "host": socket.gethostname()}
    answer: dict[str, Any] = {}
    try:
        connection.send(hello | {"facts": facts})
        connection.limit(max(deadline - time.monotonic(), 0) + 2 * HELLO_SECONDS)
        answer = dict(connection.receive())
        connection.limit(None)
    except TimeoutError:
        answer = {
            "refused": f"process 0 at {place.address} has not begun the run within "
            f"{seconds:.0f} s; see its output, or increase --start-seconds"
        }
    except (OSError, TypeError, ValueError):
        pass
    if "hosts" not in answer:
        connection.close()
        lost = f"process 0 at {place.address} ended before all processes were connected"
        raise InputError(answer.get("refused") or f"{lost}; see its output")
    return connection, answer["hosts"]


class _Acceptance:
    """The processes that have connected to process 0 so far; see `accept_others`."""

    def __init__(self, place: Place, facts: dict[str, Any], seconds: float, heartbeat: int):
        self._place, self._facts, self._seconds = place, _json(facts), seconds
        self._heartbeat = heartbeat
        self._deadline = time.monotonic() + seconds
        self._listener = _listener(place)
        self._connections: dict[int, Connection] = {}
        self._hosts: dict[int, str] = {}
        self._refused = 0  # number of processes that were refused besides those in `_connections`

    def run(self) -> tuple[str, list[Peer]]:
        """Return the result of `accept_others`."""
        if (problem := self._assemble()) is not None:
            self._refuse_all(problem)
            raise InputError(problem)
        self._listener.close()
        others = range(1, self._place.count)
        hosts = [socket.gethostname(), *[self._hosts[index] for index in others]]
        connections = [self._connections[index] for index in others]
        own = [connection.address for connection in connections]
        # A process on this machine may have used a loopback address.
        address = max(own, key=lambda address: (not _is_loopback(address), address), default="")
        peers = []
        for connection, host in zip(connections, hosts[1:], strict=True):
            at = connection.peer
            peers.append(Peer(connection, host, address if _is_loopback(at) else at))
            with contextlib.suppress(OSError):  # whoever waits for it will see that it is lost
                connection.send({"hosts": hosts})
        return address, peers

    def _assemble(self) -> str | None:
        """Accept all processes; return a line if the run cannot start, else None."""
        place = self._place
        while missing := self._missing():
            self._listener.settimeout(max(self._deadline - time.monotonic(), 0.001))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                verb = "has" if len(missing) == 1 else "have"
                return (
                    f"{_processes(missing)} of {place.count} {verb} not connected to "
                    f"{place.address} within {self._seconds:.0f} s; start the same command once "
                    "for each index, where this address can be reached"
                )
            if problem := self._admit(Connection(connection, self._heartbeat)):
                return problem
        return None

    def _missing(self) -> list[int]:
        """Return the processes that have not connected, or have ended since."""
        for index, connection in list(self._connections.items()):
            if connection.is_closed():
                connection.close()
                del self._connections[index]
        return sorted(set(range(1, self._place.count)) - self._connections.keys())

    def _refuse_all(self, problem: str) -> None:
        """Tell all processes why the run cannot start, also those that connect soon."""
        for connection in self._connections.values():
            _refuse(connection, problem)
        deadline = min(self._deadline, time.monotonic() + REFUSE_SECONDS)
        with self._listener, contextlib.suppress(OSError):
            while len(self._connections) + self._refused < self._place.count - 1:
                self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
                connection, _ = self._listener.accept()
                _refuse(Connection(connection, self._heartbeat), problem)
                self._refused += 1

    def _admit(self, connection: Connection) -> str | None:
        """Add a process that has connected; return a line if it does not fit the run, else None.

        Connections that are not from a process of this library are closed.
        """
        connection.limit(HELLO_SECONDS)
        try:
            hello = connection.receive(MOST_BYTES)
            index, count, host = int(hello["index"]), int(hello["count"]), str(hello["host"])
            facts = _json(dict(hello["facts"]))
        except (OSError, LookupError, TypeError, ValueError, OverflowError):
            connection.close()
            return None
        connection.limit(None)
        self._missing()  # forgets a process that was started again
        problem = self._difference(index, count, facts)
        if index in self._connections or index == 0:
            self._refused += 1
            _refuse(connection, problem or "")
        else:
            self._connections[index], self._hosts[index] = connection, host
        return problem

    def _difference(self, index: int, count: int, facts: dict[str, Any]) -> str | None:
        """Describe how a process differs from process 0; return None if it fits the run."""
        if count != self._place.count:
            return (
                f"process {index} was started as one of {count} processes, process 0 as one of "
                f"{self._place.count}; give all processes the same --process-count"
            )
        if index in self._connections or index == 0:
            return (
                f"two processes were started with index {index}; give each process its own "
                "--process-index"
            )
        for name in self._facts | facts:
            actual, value = facts.get(name), self._facts.get(name)
            if actual != value:
                return (
                    f"{name} is {brief(json.dumps(actual))} in process {index}, but "
                    f"{brief(json.dumps(value))} in process 0; start all processes with the same "
                    "config, flags and versions"
                )
        return None


def _json(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as they are after the way through JSON.

    Raises:
      TypeError, ValueError: if they are no JSON values.
    """
    return json.loads(json.dumps(values, allow_nan=False))


def _refuse(connection: Connection, problem: str) -> None:
    with contextlib.suppress(OSError):
        connection.send({"refused": problem})
    connection.close()


def _processes(indices: Sequence[int]) -> str:
    """Return "process 3", or "processes 1, 3"; of many indices, only the first few."""
    shown = ", ".join(map(str, indices[:5])) + (", ..." if len(indices) > 5 else "")
    return f"process{'es' if len(indices) > 1 else ''} {shown}"


def _listener(place: Place) -> socket.socket:
    """Return a socket that listens at the address of process 0."""
    host = place.bind_host
    try:
        if host or not socket.has_dualstack_ipv6():
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, place.port), family=family, backlog=1024)
        return socket.create_server(
            ("", place.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    except OSError as error:
        raise InputError(
            f"process 0 cannot listen at {host or '*'}:{place.port}: {error.strerror}; choose "
            "another port or host for --coordinator"
        ) from None


def free_port(host: str) -> int:
    """Return a free TCP port at an address of this machine; "" stands for all addresses."""
    with _bound(host, 0) as free:
        return free.getsockname()[1]


def check_free(host: str, port: int) -> None:
    """Check that JAX's coordinator can listen at a port, because jaxlib would crash if not.

    Raises:
      HostError: if another program has taken the port since it was chosen.
    """
    try:
        _bound(host, port).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise HostError(
            f"port {port} at {host or '*'}, which JAX's coordinator was to use, has been taken by "
            "another program"
        ) from None


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def _connected(place: Place, seconds: float, heartbeat: int) -> Connection:
    """Return a connection to process 0, which may start later than this process.

    Raises:
      InputError: if process 0 cannot be reached within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            remaining = max(deadline - time.monotonic(), 0.001)
            connection = socket.create_connection((place.host, place.port), remaining)
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS < deadline:
                time.sleep(RETRY_SECONDS)
                continue
            raise InputError(
                f"process 0 cannot be reached at {place.address} within {seconds:.0f} s "
                f"({error.strerror or error}); check the address, the firewall, and that process 0 "
                "is running"
            ) from None
        return Connection(connection, heartbeat)


def _set_options(connection: socket.socket, heartbeat: int) -> None:
    """Send messages at once, and close the connection if the other machine vanishes."""
    if connection.family == getattr(socket, "AF_UNIX", None):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(heartbeat // (PROBES + 1), 1)
    # Not every operating system has all of these options.
    for name, value in (
        ("TCP_KEEPIDLE", pause),
        ("TCP_KEEPINTVL", pause),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", 1000 * heartbeat),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _address(name: Any) -> str:
    """Return the IP address in the name of a socket; "" if it is not one of TCP."""
    return name[0].removeprefix("::ffff:") if isinstance(name, tuple) else ""


def _is_loopback(address: str) -> bool:
    """Return whether only processes on the same machine can use an address; also for ""."""
    return not address or ipaddress.ip_address(address).is_loopback
