"""The HTTP server process: socket, uvicorn, time limits for clients, and a connection limit."""

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
from tqdm import tqdm
from uvicorn.protocols.http.h11_impl import H11Protocol

from mesh_transformer import status_lines
from mesh_transformer.serving.errors import ApiError
from mesh_transformer.util import InputError

HEAD_BYTES = 2**16  # maximum size of a request's head, unless all of it arrives at once
HEAD_SECONDS = 10.0  # maximum time for a request's head to arrive
# Maximum time between two requests on a connection.  Clients reuse connections for less time (httpx
# for 5 s), so none sends a request just as the server closes its connection.
IDLE_SECONDS = 75
# Maximum time for the rest of a request's body to arrive after the response has been sent.
UNREAD_SECONDS = 2.0
READ_SECONDS = 60.0  # maximum time for a client to read the data buffered for it
BACKLOG = 2048  # connections that may wait to be accepted
MOST_CONNECTIONS = 4096
SPARE_DESCRIPTORS = 32  # file descriptors reserved for uses other than connections


def listen(host: str, port: int) -> socket.socket:
    """Open and return a socket that listens on `host` and `port`.

    Clients can connect immediately, but are served only once a server runs on the socket.

    Raises:
      InputError: if the host or port is invalid or not available.
    """
    if not 0 <= port < 2**16:
        raise InputError(f"--port {port}: expected 0 to {2**16 - 1}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as close_on_error:
            listening = close_on_error.enter_context(socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
            close_on_error.pop_all()
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE
        reason = "the port is in use; give another --port"
        if not busy:
            reason = f"{error.strerror}; give an address of this machine, or 0.0.0.0 for all"
        raise InputError(f"--host {host} --port {port}: {reason}") from None
    return listening


def serve(app: ASGIApp, listening: socket.socket, drain_seconds: int) -> None:
    """Serve `app` until SIGTERM or Ctrl-C, then finish the running answers.

    Args:
      listening: the result of `listen`.
      drain_seconds: maximum time to finish the running answers.  Answers that take longer are cut
        off.
    """
    server = make_server(app, drain_seconds)

    def stop(*_: object) -> None:
        server.should_exit = True

    # SIGTERM may come before uvicorn handles it.  After shutdown, uvicorn raises it again, and the
    # default handler would then kill the process.
    signal.signal(signal.SIGTERM, stop)
    host, port = listening.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    others = ""
    if host in ("0.0.0.0", "::"):  # all addresses of this machine
        name, others = "127.0.0.1", f", from other machines at http://{socket.gethostname()}:{port}"
    with tqdm.external_write_mode():  # above the bar of the programs that are being compiled
        print(f"serving at http://{name}:{port}{others} (Ctrl-C stops)", flush=True)
    status_lines.end()
    server.run(sockets=[listening])


def make_server(app: ASGIApp, drain_seconds: int) -> uvicorn.Server:
    """Return a uvicorn server that logs only errors; start it with `run(sockets=...)`.

    Args:
      drain_seconds: maximum time to finish the running answers at shutdown.
    """
    config = uvicorn.Config(
        app,
        http=TimeoutProtocol,
        h11_max_incomplete_event_size=HEAD_BYTES,
        ws="none",
        access_log=False,
        log_level="error",  # a client's errors are reported only to that client
        server_header=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=drain_seconds,
        backlog=BACKLOG,
    )
    return uvicorn.Server(config)


def _most_connections() -> int:
    """Raise this process's limit on open files, and return the number of connections to allow."""
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


Awaited = Literal["next", "head", "body", "reading"] | None  # what the server waits for


class TimeoutProtocol(H11Protocol):
    """HTTP/1.1 protocol that closes the connections of clients that keep the server waiting.

    A client has limited time to begin the next request, to send a request's head, to read a
    response, and to send the rest of a body after the response.  If there are more than `most`
    connections, the one that has kept the server waiting longest is closed.

    Attributes:
      most: maximum number of connections; None until the first connection is made.
    """

    most: int | None = None
    _refused = False  # whether an error has been sent for what is no HTTP request
    _awaited: Awaited = None
    _since = 0.0  # when the server began to wait
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if TimeoutProtocol.most is None:
            TimeoutProtocol.most = _most_connections()
        if len(self.connections) > TimeoutProtocol.most:
            self._make_room()
        self._update_deadline()

    def data_received(self, data: bytes) -> None:
        # What follows an error, or the last request, is read only so that the client can read.
        if self._refused or self.conn.their_state is h11.MUST_CLOSE:
            return
        super().data_received(data)
        self._update_deadline()

    def send_400_response(self, msg: str) -> None:
        """Send an error for what is no HTTP request, and close the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            # What is wrong is the body of a request, which now ends as if its client had left.
            self.cycle.disconnected, self.cycle.waiting_for_100_continue = True, False
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # the response has begun
            return
        error = ApiError(400, "no valid HTTP request")
        if len(self.conn.trailing_data[0]) > HEAD_BYTES:
            error = ApiError(431, f"the head is longer than {HEAD_BYTES} bytes; send a shorter one")
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        # If the connection were closed while the client is sending, it could not read the error.
        self._refused = True
        self.transport.write_eof()
        self._expect("body", UNREAD_SECONDS)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect("reading", READ_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._expect(None, 0.0)
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None, 0.0)
        super().connection_lost(exc)

    def _update_deadline(self) -> None:
        """Set the deadline by which the client must send the next part of a request.

        If the server is not waiting for such a part, the deadline is removed.  A deadline for
        reading a response is left unchanged.
        """
        answered = self.cycle is not None and self.cycle.response_complete
        if self._awaited == "reading" or self._refused or self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE:
            if self.cycle is None or self.conn.trailing_data[0]:  # a part of the head
                self._expect("head", HEAD_SECONDS)
            else:
                self._expect("next", IDLE_SECONDS)
        elif answered and self.conn.their_state is h11.SEND_BODY:
            self._expect("body", UNREAD_SECONDS)
        else:
            self._expect(None, 0.0)

    def _expect(self, awaited: Awaited, seconds: float) -> None:
        """Set a deadline after which the connection is closed.

        Args:
          awaited: what the client must do before the deadline, or None to remove the deadline.  If
            the server is already waiting for the same thing, the current deadline is kept.
          seconds: time from now to the deadline.
        """
        if awaited == self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._awaited, self._since = awaited, time.monotonic()
        # A client that does not read never empties the buffer, and `close` would wait for that.
        end = self.transport.abort if awaited == "reading" else self.transport.close
        self._deadline = None if awaited is None else self.loop.call_later(seconds, end)

    def _make_room(self) -> None:
        """Close the connection that has kept the server waiting longest, if none this one."""
        waiting = [
            other for other in self.connections if getattr(other, "_awaited", None) is not None
        ]
        longest = min(waiting, key=lambda other: other._since, default=self)  # type: ignore[union-attr]
        self.connections.discard(longest)  # now, because uvicorn discards it only once it is closed
        longest.transport.abort()
