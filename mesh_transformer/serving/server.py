"""The process: a socket, uvicorn on it, and limits on how long a client may keep it waiting."""

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import time
from typing import Literal

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from mesh_transformer.util import InputError

HEAD_SECONDS = 10.0  # for a request's head to come in
UNREAD_SECONDS = 2.0  # for the rest of a body whose request has been answered already
READ_SECONDS = 60.0  # for a client to take what waits in its connection's buffer
BACKLOG = 2048  # connections that may wait to be taken
MOST_CONNECTIONS = 4096
SPARE_DESCRIPTORS = 32  # left free for everything else that opens files


def listen(host: str, port: int) -> socket.socket:
    """A socket on that address; connections wait until a server has it.

    Raises:
      InputError: where the address cannot be had.
    """
    if not 0 <= port < 2**16:
        raise InputError(f"--port {port}: expected 0 to {2**16 - 1}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as unless_taken:
            listening = unless_taken.enter_context(socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
            unless_taken.pop_all()
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE
        remedy = "another program has it; give another --port" if busy else str(error)
        raise InputError(f"--host {host} --port {port}: {remedy}") from None
    return listening


def serve(app: ASGIApp, on: socket.socket, drain_seconds: int) -> None:
    """Serves until SIGTERM or Ctrl-C, then finishes the answers under way.

    Answers that take more than `drain_seconds` are cut off.
    """
    # uvicorn raises the signal again once it has ended; for SIGTERM that is as it should be.
    signal.signal(signal.SIGTERM, lambda *_: None)
    host, port = on.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    print(f"serving at http://{name}:{port} (Ctrl-C ends)", flush=True)
    make_server(app, drain_seconds).run(sockets=[on])


def make_server(app: ASGIApp, drain_seconds: int) -> uvicorn.Server:
    """uvicorn with little to say, for `run(sockets=...)`."""
    config = uvicorn.Config(
        app,
        http=PromptProtocol,
        ws="none",
        access_log=False,
        log_level="error",  # a client's mistakes are reported to that client only
        server_header=False,
        timeout_graceful_shutdown=drain_seconds,
        backlog=BACKLOG,
    )
    return uvicorn.Server(config)


def _most_connections() -> int:
    """How many connections this process can hold, less some descriptors for other files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    try:
        in_use = len(os.listdir("/dev/fd"))
    except OSError:
        in_use = soft // 2
    return max(min(soft - in_use - SPARE_DESCRIPTORS, MOST_CONNECTIONS), 1)


class PromptProtocol(H11Protocol):
    """HTTP that closes connections whose client keeps the server waiting.

    That is a request head that does not come to its end, a body that goes on after its request
    has been answered, and an answer that is not read.  When there are too many connections, a new
    one takes the place of the one that has kept the server waiting longest.
    """

    most: int | None = None  # connections; found out when the first one comes
    _owes: Literal["head", "body", "reading"] | None = None  # what the client is waited for
    _since = 0.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if PromptProtocol.most is None:
            PromptProtocol.most = _most_connections()
        if len(self.connections) > PromptProtocol.most:
            self._make_room()
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect("reading", READ_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._expect(None, 0.0)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None, 0.0)
        super().connection_lost(exc)

    def _look(self) -> None:
        """Sets the deadline for what the client owes at present, if anything."""
        answered = self.cycle is not None and self.cycle.response_complete
        if self._owes == "reading" or self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE:
            self._expect("head", HEAD_SECONDS)
        elif answered and self.conn.their_state is h11.SEND_BODY:
            self._expect("body", UNREAD_SECONDS)
        else:
            self._expect(None, 0.0)

    def _expect(self, owes: Literal["head", "body", "reading"] | None, seconds: float) -> None:
        if owes == self._owes:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._owes, self._since = owes, time.monotonic()
        # `abort`, as `close` would wait for the buffer of a client that does not read.
        late = self.transport.abort if owes == "reading" else self.transport.close
        self._deadline = None if owes is None else self.loop.call_later(seconds, late)

    def _make_room(self) -> None:
        waiting = [each for each in self.connections if getattr(each, "_owes", None) is not None]
        longest = min(waiting, key=lambda each: each._since, default=self)  # type: ignore[union-attr]
        self.connections.discard(longest)  # at once: its end is only reported later
        longest.transport.abort()
