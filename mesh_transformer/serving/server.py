"""The process: a socket, uvicorn on it, and a quiet end."""

import asyncio
import contextlib
import errno
import signal
import socket

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from mesh_transformer.util import InputError

HEADER_SECONDS = 10.0  # for a request's head to come in
BACKLOG = 2048  # connections that may wait to be taken


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
            found = unless_taken.enter_context(socket.socket(family, kind, protocol))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(BACKLOG)
            unless_taken.pop_all()
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE
        remedy = "another program has it; give another --port" if busy else str(error)
        raise InputError(f"--host {host} --port {port}: {remedy}") from None
    return found


def serve(app: ASGIApp, on: socket.socket, drain_seconds: int) -> None:
    """Serves until SIGTERM or Ctrl-C; answers that are under way then are finished first.

    What is not finished `drain_seconds` later is cut off.
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
        log_level="error",  # of what clients send wrong they alone hear
        server_header=False,
        timeout_graceful_shutdown=drain_seconds,
        backlog=BACKLOG,
    )
    return uvicorn.Server(config)


class PromptProtocol(H11Protocol):
    """HTTP that closes a connection on which the head of a request does not come to its end."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._forget_head()
        elif self._deadline is None:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _forget_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
