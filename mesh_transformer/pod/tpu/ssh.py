"""Run commands and write files on all hosts of a TPU at once, over SSH.

A host can publish its SSH host keys through the Cloud TPU API (guest attributes).  If a host has
published keys, only these keys are accepted.  Otherwise, the first key that the host presents is
accepted, and in later connections the host must present the same key.  With `trust_first=False`, a
host without published keys is rejected.

The user's known_hosts file is neither read nor written, because new TPUs have new keys but reuse
the addresses of deleted TPUs.
"""

import base64
import contextlib
import copy
import functools
import logging
import os
import shlex
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from mesh_transformer.pod.tpu.spec import SshOptions
from mesh_transformer.util import HostError, InputError, StoppedError, brief

if TYPE_CHECKING:
    from fabric import Connection

Result = TypeVar("Result")

SHOWN_LINES = 40  # last lines to print from each output stream of a failing command
KEEPALIVE_SECONDS = 15  # time between two keepalive messages
WAIT_SECONDS = 0.5  # a signal that arrives just before the main thread waits is handled after this
SILENCE_SECONDS = 60  # time after which a host that does not respond counts as lost
PUT_SECONDS = 300.0  # time limit per file
CONNECT_SECONDS = 30  # time limit of each stage of an attempt: TCP, SSH banner, login
RECONNECT_SECONDS = 60.0  # time limit for reconnecting to a host, which may no longer exist
KILLED_STATUS = 137  # a shell's exit status if SIGKILL ended its command
# Exit statuses of the shell command `timeout` when its time limit is exceeded.  Other programs may
# use the same statuses.
TIMEOUT_STATUSES = (124, KILLED_STATUS)
# A host's clock may run faster than this machine's.  A time limit of S seconds on the host can
# therefore end after only this fraction of S seconds on this machine's clock.
MIN_CLOCK_RATIO = 0.99


class Hosts:
    """SSH connections to all hosts of a TPU, opened on first use.

    Every method works on all hosts in parallel, with one thread per host; see also `only`.

    Args:
      addresses: the hosts' IP addresses, in the order of the hosts' numbers in the TPU.
      options: how to log in to the hosts.
      host_keys: the SSH host keys that the hosts have published: {address: (type, base64) pairs}.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        options: SshOptions,
        host_keys: Mapping[str, Sequence[tuple[str, str]]] | None = None,
    ):
        self.addresses = list(addresses)
        self._numbers = list(range(len(self.addresses)))  # of the hosts that the methods work on
        self.options = options
        self._keys = {address: list(keys) for address, keys in (host_keys or {}).items()}
        self._key = options.private_key()
        self._connections: dict[int, Connection] = {}
        self._seen: set[int] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def only(self, addresses: Collection[str]) -> "Hosts":
        """Return a `Hosts` object whose methods work only on the hosts at `addresses`."""
        chosen = copy.copy(self)  # with the same connections and host keys
        chosen._numbers = [
            number for number in self._numbers if self.addresses[number] in addresses
        ]
        return chosen

    def run(self, command: str, *, seconds: float, show: bool = False, what: str = "") -> list[str]:
        """Run a bash command on all hosts, and return its standard output on each host.

        Args:
          command: the command.  Other users of a host can see the command line, so write secrets to
            a file with `put_secret` instead.
          seconds: time limit, in seconds.
          show: print output line by line as it arrives.
          what: the command's purpose, for messages (default: the command itself).

        Raises:
          StoppedError: if the command fails or exceeds its time limit.  Without `show`, the last
            lines of the failing host's output are printed first.
          HostError: if a host cannot be reached, or the connection to it is lost.
        """
        what = what or command
        run = functools.partial(self._run, command=command, seconds=seconds, show=show, what=what)
        return self._on_all(run, what, seconds + SILENCE_SECONDS)

    def _run(self, host: int, command: str, seconds: float, show: bool, what: str) -> str:
        from invoke.exceptions import CommandTimedOut

        # Each stream has its own object.  In a shared one, many lines of one stream would displace
        # the last lines of the other.
        streams = output, errors = [_Output(self._label(host), show) for _ in range(2)]
        # `timeout` ends the command on the host.  The longer limit below is for a host that does
        # not answer.
        limited = f"timeout --kill-after=10 {seconds:g} bash -c {shlex.quote(command)}"
        connection = self._connect(host)
        began = time.monotonic()
        try:
            result = connection.run(
                limited,
                warn=True,
                hide=True,
                in_stream=False,
                out_stream=output,
                err_stream=errors,
                timeout=seconds + 20,
            )
        except CommandTimedOut as error:
            raise self._lost(host, what, f"gave no answer for {seconds:g} s") from error
        except _connection_errors() as error:
            raise self._lost(host, what, f"was cut off ({_described(error)})") from error
        for stream in streams:
            stream.end()
        if result.exited == 0:
            return result.stdout
        if not show:
            for stream in streams:
                stream.print_last()
        late = time.monotonic() - began > MIN_CLOCK_RATIO * seconds
        too_long = f"took more than {seconds:g} s"
        if result.exited < 0:  # also if `timeout` sends SIGKILL, which kills `timeout` itself too
            cut = "was cut off or killed (the connection closed)"
            raise self._lost(host, what, too_long if late else cut)
        if late and result.exited in TIMEOUT_STATUSES:
            raise self._failed(host, what, too_long)
        if result.exited == KILLED_STATUS:
            raise self._failed(host, what, "was killed; is the host out of memory?")
        last = errors.last or output.last
        detail = f": {last}" if last else ""
        raise self._failed(host, what, f"exited with status {result.exited}{detail}")

    def _failed(self, host: int, what: str, how: str) -> StoppedError:
        return StoppedError(f"host {self._label(host)}: {brief(what)!r} {how}")

    def _lost(self, host: int, what: str, how: str) -> HostError:
        return HostError(str(self._failed(host, what, how)))

    def _label(self, host: int) -> str:
        return f"{host} ({self.addresses[host]})"

    def put(self, content: bytes, remote: str, mode: int = 0o644) -> None:
        """Write `content` to the file `remote` on each host, replacing an old file atomically."""
        put = functools.partial(self._put, content=content, remote=remote, mode=mode)
        self._on_all(put, f"copy {remote}", PUT_SECONDS)

    def put_secret(self, text: str, remote: str) -> None:
        """Write `text` to the file `remote` on each host, with mode 0600.

        The mode is set before any content is written, so that other users cannot read the text.
        """
        self.put(text.encode(), remote, 0o600)

    def _put(self, host: int, content: bytes, remote: str, mode: int) -> None:
        temporary = f"{remote}.{os.urandom(6).hex()}"
        try:
            sftp = self._connect(host).sftp()
            with contextlib.suppress(OSError):  # the folder already exists
                sftp.mkdir(os.path.dirname(remote), 0o700)
            with sftp.open(temporary, "wx") as file:
                file.chmod(mode)
                file.set_pipelined(True)
                file.write(content)
            sftp.posix_rename(temporary, remote)
        except _connection_errors() as error:
            raise self._lost(host, f"copy {remote}", f"failed ({_described(error)})") from error

    def _on_all(self, function: Callable[[int], Result], what: str, seconds: float) -> list[Result]:
        """Call `function` with each host's number, in parallel, and return the results in order.

        If a call fails, all connections are closed, which ends the other calls.  The error of the
        failed call is then raised.  Connecting has a time limit of its own, besides `seconds`.
        """
        count = len(self._numbers)
        self._stopping.clear()
        pool = ThreadPoolExecutor(max_workers=max(1, count))
        bar = tqdm(total=count, desc=brief(what), unit="host", leave=False, disable=count < 2)
        end = True
        try:
            futures = [pool.submit(function, host) for host in self._numbers]
            for future in futures:
                future.add_done_callback(lambda _: bar.update())
            limit = seconds + self.options.connect_seconds + CONNECT_SECONDS
            deadline, pending = time.monotonic() + limit, futures
            while pending and (left := deadline - time.monotonic()) > 0:
                done, pending = wait(futures, min(left, WAIT_SECONDS), FIRST_EXCEPTION)
                for future in done:
                    future.result()
            if pending:
                silent = self._numbers[min(futures.index(future) for future in pending)]
                raise self._lost(silent, what, f"gave no answer for {limit:g} s")
            return [future.result() for future in futures]
        except BaseException as error:
            # Ctrl-C may interrupt `wait` while it holds a future's lock.  That lock is then never
            # released, and the call's thread waits for it forever.
            end = isinstance(error, Exception)
            self._stopping.set()
            self.close()  # ends the calls in the other threads
            raise
        finally:
            pool.shutdown(wait=end, cancel_futures=True)
            bar.close()

    def _connect(self, host: int) -> "Connection":
        """Return the open connection to a host; open a new connection if there is none."""
        with self._lock:
            existing = self._connections.get(host)
        if existing is not None and existing.is_connected:
            return existing
        limit = self.options.connect_seconds
        connection = self._open(
            host, min(limit, RECONNECT_SECONDS) if host in self._seen else limit
        )
        with self._lock:
            self._connections[host] = connection
            self._seen.add(host)
        return connection

    def _open(self, host: int, seconds: float) -> "Connection":
        """Open a connection to a host; failed attempts are retried for up to `seconds` seconds.

        Retries are needed because a new host takes some time until it accepts SSH connections with
        the user's key.
        """
        from paramiko.ssh_exception import AuthenticationException, BadHostKeyException

        options, label = self.options, self._label(host)
        deadline = time.monotonic() + seconds
        while True:
            connection = self._new_connection(host)
            try:
                connection.open()
                assert connection.transport is not None
                connection.transport.set_keepalive(KEEPALIVE_SECONDS)
                # Without this option, a connection whose keepalives are not acknowledged is closed
                # only after a quarter of an hour.
                sock: Any = connection.transport.sock
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_SECONDS)
                return connection
            except (BadHostKeyException, _UntrustedError) as error:
                raise StoppedError(
                    f"host {label}: its SSH host key is not the expected one, so another machine "
                    "may be answering at this address; nothing was sent to it"
                ) from error
            except _connection_errors() as error:
                connection.close()
                if time.monotonic() < deadline:
                    if self._stopping.wait(min(2.0, options.connect_seconds / 10)):
                        raise HostError(
                            f"host {label}: not connected, because another host failed"
                        ) from None
                    continue
                if isinstance(error, AuthenticationException):
                    raise InputError(
                        f"host {label}: user {options.user!r} with key {options.key_path} was "
                        "rejected; check that the key belongs to this user, and that OS Login is "
                        "off for the project"
                    ) from error
                raise HostError(
                    f"host {label}: SSH on port {options.port} did not answer for "
                    f"{seconds:g} s ({_described(error)}); check that this machine is in the TPU's "
                    "network, and that a firewall rule allows the connection"
                ) from error

    def _new_connection(self, host: int) -> "Connection":
        from fabric import Config, Connection

        # Without a handler, paramiko prints a traceback for every connection that is retried.
        logging.getLogger("paramiko").addHandler(logging.NullHandler())
        address, options = self.addresses[host], self.options
        connection = Connection(
            address,
            user=options.user,
            port=options.port,
            config=Config(overrides={"load_ssh_configs": False}, lazy=True),
            connect_timeout=CONNECT_SECONDS,
            connect_kwargs={
                "pkey": self._key,
                "allow_agent": False,
                "look_for_keys": False,
                "banner_timeout": CONNECT_SECONDS,
                "auth_timeout": CONNECT_SECONDS,
            },
        )
        client: Any = connection.client
        self._trust(client, address)
        return connection

    def _trust(self, client: Any, address: str) -> None:
        """Set which host keys a paramiko SSH client accepts, as the module's docstring says."""
        from paramiko import MissingHostKeyPolicy, PKey

        hosts, known, may_pin = self, self._keys.get(address, []), self.options.trust_first
        name = address if self.options.port == 22 else f"[{address}]:{self.options.port}"
        for kind, text in known:
            with contextlib.suppress(Exception):  # a key type that paramiko does not know
                key = PKey.from_type_string(kind, base64.b64decode(text))
                client.get_host_keys().add(name, kind, key)

        class Pin(MissingHostKeyPolicy):
            def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
                if known or not may_pin:
                    raise _UntrustedError
                hosts._keys[address] = [(key.get_name(), key.get_base64())]

        client.set_missing_host_key_policy(Pin())

    def close(self) -> None:
        with self._lock:
            connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            with contextlib.suppress(*_connection_errors()):
                connection.close()


class _UntrustedError(Exception):
    """A host presented an SSH host key that is not accepted; see `Hosts._trust`."""


def _connection_errors() -> tuple[type[Exception], ...]:
    """Return the types of the exceptions for a connection that cannot be opened or was lost."""
    from invoke.exceptions import ThreadException
    from paramiko.ssh_exception import NoValidConnectionsError, SSHException

    return (SSHException, NoValidConnectionsError, ThreadException, OSError, EOFError)


class _Output:
    """A file-like object to which fabric writes one output stream of a command on a host.

    The object keeps the last `SHOWN_LINES` lines.  If `show` is set, each line is also printed as
    soon as it is complete.
    """

    def __init__(self, label: str, show: bool):
        self._label = label
        self._show = show
        self._lines: deque[str] = deque(maxlen=SHOWN_LINES)
        self._rest = ""

    def write(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._lines.append(line.rstrip())
            if self._show:
                self._print(line.rstrip())

    def flush(self) -> None:
        """Do nothing: `write` already prints each line once the line is complete."""

    def end(self) -> None:
        if self._rest:
            self.write("\n")

    def print_last(self) -> None:
        for line in self._lines:
            self._print(line)

    def _print(self, line: str) -> None:
        tqdm.write(f"[host {self._label}] {line}", file=sys.stderr)

    @property
    def last(self) -> str:
        """The last line that is not blank; an empty string if there is none."""
        return next((line for line in reversed(self._lines) if line.strip()), "")


def _described(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
