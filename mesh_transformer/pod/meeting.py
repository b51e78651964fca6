"""`Meeting`: messages between the processes of a run that has no driver.

    process 0                     process 1
    Meeting -- socket pair --.    Meeting
                             hub -- TCP --'

Process 0 runs a hub, to which every process is connected.  The hub sends each message to all
processes in one order, so all of them learn of all events in the same order.  A process that ends
without leaving the meeting is noticed at once, because the operating system closes its connection.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mesh_transformer.util import HostError, InputError, brief, start_thread

MOST_BYTES = 1 << 20  # in one message; longer ones are not from a process of ours
HELLO_SECONDS = 5.0  # for a new connection to say who it is
RETRY_SECONDS = 0.2  # between two attempts to connect
LEAVE_SECONDS = 5.0  # process 0 waits this long for the others, which lose their hub when it ends
PROBES = 3  # unanswered keep-alive probes after which a connection counts as lost

Message = dict[str, Any]


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


class Meeting:
    """The connection of one process to the other processes of its run.

    Attributes:
      place: the place of this process in the run.
      address: IP address of this process, at which the others can reach it.
      coordinator: "HOST:PORT" of a free port of process 0, for JAX's coordinator.
      hosts: the host name of each process.
    """

    def __init__(self, place: Place, facts: dict[str, Any], *, seconds: float, heartbeat: int):
        """Connect to the other processes, and compare the facts that must be equal in all.

        Args:
          facts: JSON values by name.
          seconds: time limit for all processes to connect.
          heartbeat: seconds after which a machine that does not answer counts as vanished.

        Raises:
          InputError: in all processes, if they do not all connect in time, two have the same index,
            or a fact differs.
        """
        self.place = place
        self._left = False
        self._hub: _Hub | None = None
        deadline = time.monotonic() + seconds
        if place.index == 0:
            listener = _listener(place)
            self._socket, other = socket.socketpair()
            self._hub = _Hub(place, listener, other, seconds, heartbeat)
        else:
            self._socket = _connected(place, seconds, heartbeat)
        self._lines = _Lines(self._socket)
        facts = json.loads(json.dumps(facts))
        hello = {"count": place.count, "index": place.index, "host": socket.gethostname()}
        self._send(hello | {"facts": facts})
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 0) + 2 * HELLO_SECONDS)
            answer = next(self._lines.read(), {})
            self._socket.settimeout(None)
        except OSError:
            answer = {}
        if "welcome" not in answer:
            if self._hub is not None:
                self._hub.join(LEAVE_SECONDS)
            self._socket.close()
            lost = f"process 0 at {place.address} ended before all processes were connected"
            raise InputError(answer.get("refused") or f"{lost}; see its output")
        own = _address(self._socket)
        self.address: str = answer["welcome"]["address"] if _is_loopback(own) else own
        self.coordinator: str = answer["welcome"]["coordinator"]
        self.hosts: list[str] = answer["welcome"]["hosts"]

    def name(self, index: int) -> str:
        """Return a name for a process in messages, such as "process 1 (node7)"."""
        return f"process {index} ({self.hosts[index]})"

    def listen(self, receive: Callable[[Message], None]) -> None:
        """Start a thread that calls `receive` with each message from the hub.

        A message is one of:

        * {"news": content, "number": n, "sender": index}: what a process has announced.  News are
          numbered from 0.
        * {"gathered": values, "key": key}: the value of each process.
        * {"lost": index}: a process has ended without leaving.
        * {"refused": line}: the hub has failed.
        """

        def listen() -> None:
            with contextlib.suppress(OSError):
                for message in self._lines.read():
                    receive(message)
            self._socket.close()
            if not self._left:
                receive({"lost": 0})

        start_thread(listen, name="meeting")

    def announce(self, content: Message) -> None:
        """Send news to all processes, this one included."""
        self._send({"news": content})

    def gather(self, key: str, value: Any) -> None:
        """Contribute a JSON value; once all processes have done so, all receive all values.

        Args:
          key: a name for the values, which is equal in all processes and is not used again.
        """
        self._send({"gather": key, "value": value})

    def silent(self, key: str) -> list[int]:
        """Return the processes that have not contributed to the values `key`; for process 0."""
        assert self._hub is not None
        return self._hub.silent(key)

    def leave(self) -> None:
        """Leave the meeting; process 0 waits some seconds for the others to leave too."""
        self._left = True
        self._send({"leave": True})
        if self._hub is not None:
            self._hub.join(LEAVE_SECONDS)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread that listens

    def _send(self, message: Message) -> None:
        # The thread that listens reports a lost connection.
        with contextlib.suppress(OSError):
            self._socket.sendall(_encode(message))


class _Lines:
    """Messages received from a socket, each a line of JSON."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._received = b""

    def read(self) -> Iterator[Message]:
        """Yield messages until the connection is closed.

        Raises:
          OSError: if the connection fails, or what arrives is not a message.
        """
        while True:
            yield from self.pending()
            more = self._connection.recv(1 << 16)
            if not more:
                return
            self._received += more

    def receive(self) -> bool:
        """Receive once, for `pending`; return whether the connection is still open."""
        more = self._connection.recv(1 << 16)
        self._received += more
        return bool(more)

    def pending(self) -> Iterator[Message]:
        """Yield the complete messages that have been received.

        Raises:
          OSError: if a message is damaged or too long.
        """
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                raise OSError("not a message")
            yield message
        if len(self._received) > MOST_BYTES:
            raise OSError("a message is too long")


class _Hub:
    """Runs in process 0: accepts the other processes, and passes their messages on to all."""

    def __init__(
        self,
        place: Place,
        listener: socket.socket,
        own: socket.socket,
        seconds: float,
        heartbeat: int,
    ):
        self._place, self._seconds, self._heartbeat = place, seconds, heartbeat
        self._deadline = time.monotonic() + seconds
        self._listener = listener
        self._members: dict[int, tuple[socket.socket, _Lines]] = {}
        self._hellos: dict[int, Message] = {}
        self._refused = 0  # number of processes that were refused besides the members
        self._own = own
        self._news = 0  # number of the next news
        self._gathered: dict[str, dict[int, Any]] = {}
        self._thread = start_thread(self._run, name="hub", failed=self._report)

    def join(self, seconds: float) -> None:
        """Wait until all processes have left, at most for `seconds`."""
        self._thread.join(seconds)

    def _report(self, error: Exception) -> None:
        self._members.setdefault(0, (self._own, _Lines(self._own)))
        text = brief(f"{type(error).__name__}: {error}", 200)
        self._refuse(f"process 0 can no longer pass on messages between processes ({text})")

    def _run(self) -> None:
        if (problem := self._assemble()) is not None:
            self._refuse(problem)
            return
        self._listener.close()
        port = free_port(self._place.bind_host)
        hosts = [self._hellos[index]["host"] for index in range(self._place.count)]
        coordinator = f"{self._place.address.rpartition(':')[0]}:{port}"
        reached = [_address(connection) for connection, _ in self._members.values()]
        address = max(reached, key=lambda address: (not _is_loopback(address), address))
        welcome = {"coordinator": coordinator, "hosts": hosts, "address": address}
        self._broadcast({"welcome": welcome})
        self._relay()

    def _assemble(self) -> str | None:
        """Accept all processes; return a line if the run cannot start, else None."""
        place = self._place
        if problem := self._admit(self._own):
            return problem
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
            if problem := self._admit(connection):
                return problem
        return None

    def _missing(self) -> list[int]:
        """Return the processes that have not connected, or have ended since."""
        for index, (connection, _) in list(self._members.items()):
            if _is_closed(connection):
                connection.close()
                del self._members[index]
        return sorted(set(range(self._place.count)) - self._members.keys())

    def _refuse(self, problem: str) -> None:
        """Tell all processes why the run cannot start, also those that connect soon."""
        message = {"refused": problem}
        self._broadcast(message)
        deadline = min(self._deadline, time.monotonic() + LEAVE_SECONDS)
        with self._listener, contextlib.suppress(OSError):
            while len(self._members) + self._refused < self._place.count:
                self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
                connection, _ = self._listener.accept()
                with connection:
                    connection.sendall(_encode(message))
                self._refused += 1
        for connection, _ in self._members.values():
            connection.close()

    def _admit(self, connection: socket.socket) -> str | None:
        """Add a process that has connected; return a line if it does not fit the run, else None.

        Connections that are not from a process of this library are closed.
        """
        lines = _Lines(connection)
        connection.settimeout(HELLO_SECONDS)
        try:
            hello = next(lines.read(), {})
            index, count, facts = int(hello["index"]), int(hello["count"]), dict(hello["facts"])
            str(hello["host"])
        except (OSError, KeyError, TypeError, ValueError):
            connection.close()
            return None
        _set_options(connection, self._heartbeat)
        connection.settimeout(None)
        self._missing()  # forgets a process that was started again
        problem = self._difference(index, count, facts)
        if index in self._members:
            self._refused += 1
            with contextlib.suppress(OSError), connection:
                connection.sendall(_encode({"refused": problem}))
        else:
            self._members[index], self._hellos[index] = (connection, lines), hello
        return problem

    def _difference(self, index: int, count: int, facts: dict[str, Any]) -> str | None:
        """Describe how a process differs from process 0; return None if it fits the run."""
        if 0 not in self._hellos:
            return None
        if count != self._place.count:
            return (
                f"process {index} was started as one of {count} processes, process 0 as one of "
                f"{self._place.count}; give all processes the same --process-count"
            )
        if index in self._members:
            return (
                f"two processes were started with index {index}; give each process its own "
                "--process-index"
            )
        expected = self._hellos[0]["facts"]
        for name in expected | facts:
            actual, value = facts.get(name), expected.get(name)
            if actual != value:
                return (
                    f"{name} is {brief(json.dumps(actual))} in process {index}, but "
                    f"{brief(json.dumps(value))} in process 0; start all processes with the same "
                    "config, flags and versions"
                )
        return None

    def _relay(self) -> None:
        """Pass messages on until all processes have left."""
        connections = [connection for connection, _ in self._members.values()]
        selector = selectors.DefaultSelector()
        for index, (connection, lines) in self._members.items():
            selector.register(connection, selectors.EVENT_READ, (index, lines))
            self._handle(index, lines)  # what came with its first message
        while self._members:
            for key, _ in selector.select():
                index, lines = key.data
                try:
                    is_open = lines.receive()
                    self._handle(index, lines)
                except OSError:
                    is_open = False
                if not is_open:
                    selector.unregister(key.fileobj)
                    if self._members.pop(index, None) is not None:
                        self._broadcast({"lost": index})
        for connection in connections:
            connection.close()

    def _handle(self, index: int, lines: _Lines) -> None:
        for message in lines.pending():
            if "news" in message:
                self._broadcast({"news": message["news"], "number": self._news, "sender": index})
                self._news += 1
            elif "gather" in message:
                values = self._gathered.setdefault(message["gather"], {})
                values[index] = message["value"]
                if len(values) == self._place.count:
                    del self._gathered[message["gather"]]
                    in_order = [values[member] for member in range(self._place.count)]
                    self._broadcast({"gathered": in_order, "key": message["gather"]})
            else:  # it leaves
                self._members.pop(index, None)

    def silent(self, key: str) -> list[int]:
        return sorted(set(range(self._place.count)) - self._gathered.get(key, {}).keys())

    def _broadcast(self, message: Message) -> None:
        line = _encode(message)
        for connection, _ in list(self._members.values()):
            with contextlib.suppress(OSError):  # `_relay` will see that it is lost
                connection.sendall(line)


def _encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


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


def _connected(place: Place, seconds: float, heartbeat: int) -> socket.socket:
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
        _set_options(connection, heartbeat)
        return connection


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


def _address(connection: socket.socket) -> str:
    """Return the IP address of this end of a connection; "" if it is not a TCP connection."""
    name = connection.getsockname()
    return name[0].removeprefix("::ffff:") if isinstance(name, tuple) else ""


def _is_loopback(address: str) -> bool:
    """Return whether only processes on the same machine can use an address; also for ""."""
    return not address or ipaddress.ip_address(address).is_loopback


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the other end of a connection is closed."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.setblocking(True)
