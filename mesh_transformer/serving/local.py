"""Requests to a service, or to replicas, from this process, answered by the code of a server."""

import asyncio
import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from starlette.types import ASGIApp, Message

from mesh_transformer.serving.app import CHAT, EMBEDDINGS, EXIT_SECONDS, create_app
from mesh_transformer.serving.errors import ApiError, invalid
from mesh_transformer.serving.requests import Keys
from mesh_transformer.serving.service import Service
from mesh_transformer.storage.journal import write_in_order
from mesh_transformer.util import InputError, StoppedError, start_thread

COMPLETIONS = "/v1/completions"
URLS = (COMPLETIONS, CHAT, EMBEDDINGS)  # of the lines of a batch
ATTEMPTS = 3  # of a request during which the network fails
CHARACTERS = 4  # of a token, about
BUSY_SECONDS = 0.5  # between two attempts while the queue is full
REPLICA_SECONDS = 600.0  # maximum time for a request to wait for a replica in place of a dead one

log = logging.getLogger(__name__)


async def response_to(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Return the status and the body of an application's response to `POST path`."""
    status, parts, unread = 0, list[bytes](), [body]

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()  # the client stays until it has the response
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    try:
        await app(scope, receive, send)
    except Exception:  # after a response with status 500, if the application could send one
        log.exception("POST %s failed", path)
        error = ApiError(500, "the server failed; its log has the error")
        return error.status, json.dumps(error.body()).encode()
    return status, b"".join(parts)


class LocalRequests:
    """Sends requests to an application from other threads than that of its event loop.

    At the end of its `with` block, the requests are stopped.

    Args:
      app: the application of a service, or of the address of several replicas.
      loop: the event loop, which is running.
      service: the service; None if there are replicas.
    """

    def __init__(
        self, app: ASGIApp, loop: asyncio.AbstractEventLoop, service: Service | None = None
    ):
        self._app, self._loop, self._service = app, loop, service
        self._stopped = threading.Event()
        self._sent = set[Future[Any]]()

    @classmethod
    def of(cls, service: Service, loop: asyncio.AbstractEventLoop) -> "LocalRequests":
        """Return the requests to a service with its usual application."""
        return cls(create_app(service, Keys(None)), loop, service)

    def __enter__(self) -> "LocalRequests":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let the requests that are running, and those that are sent later, raise StoppedError."""
        self._stopped.set()
        for sent in self._sent.copy():
            sent.cancel()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Return the status and the JSON value of the response to `POST path`.

        Requests that find the queue full, or during which the network fails or a replica dies, are
        sent again.

        Raises:
          StoppedError: if the service has stopped, its network fails permanently, or no replica
            answers.
        """
        content, failures = json.dumps(body, default=str).encode(), 0
        down_since: float | None = None  # when no replica answered first
        while not self._stopped.is_set():
            response = response_to(self._app, path, content)
            try:
                sent = asyncio.run_coroutine_threadsafe(response, self._loop)
            except RuntimeError:  # the loop is closed
                response.close()
                break
            self._sent.add(sent)
            if self._stopped.is_set():
                sent.cancel()
            try:
                status, text = sent.result()
            except CancelledError:
                break
            finally:
                self._sent.discard(sent)
            if status == 429:
                self._stopped.wait(BUSY_SECONDS)
                down_since = None
                continue
            problem = None
            if self._service is not None:
                problem = self._service.engine.health_problem if status >= 500 else None
            elif status == 503:
                down_since = down_since or time.monotonic()
                if time.monotonic() < down_since + REPLICA_SECONDS:
                    self._stopped.wait(BUSY_SECONDS)
                    continue
                problem = f"no replica has answered for {REPLICA_SECONDS:.0f} s"
            else:
                down_since = None
            failures += status >= 500
            if problem is not None:
                raise StoppedError(f"the model cannot answer: {problem}; run the command again")
            if status < 500 or failures == ATTEMPTS:
                return status, json.loads(text)
        raise StoppedError("the requests were stopped; run the command again to continue")


@contextlib.contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a thread; requests that are left at the end are cancelled."""
    ended, ready = asyncio.Event(), threading.Event()
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        ready.set()
        await ended.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(wait())

    thread = start_thread(run, name="requests")
    ready.wait()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(EXIT_SECONDS)


@contextlib.contextmanager
def running(service: Service) -> Iterator[LocalRequests]:
    """Start a service that is not served over HTTP, and stop it at the end."""
    try:
        with running_loop() as loop, LocalRequests.of(service, loop) as requests:
            service.start()
            yield requests
    finally:
        service.close(EXIT_SECONDS)


def is_batch_line(row: Any) -> bool:
    """Return whether a row has the keys of a line of OpenAI's batch format, and no prompt."""
    keys = set(row) if isinstance(row, dict) else set()
    return {"custom_id", "url", "body"} <= keys and not keys & {"prompt", "messages"}


def size_of(row: Any) -> int:
    """Return a number that grows with the time that the request in a line of a batch takes."""
    body = row.get("body") if isinstance(row, dict) else None
    body = body if isinstance(body, dict) else {}
    lengths = [body.get("max_tokens"), body.get("max_completion_tokens")]
    most = max([length for length in lengths if isinstance(length, int)], default=0)
    return len(json.dumps(body, default=str)) + CHARACTERS * most


def check_lines(rows: Sequence[tuple[str, Any]]) -> None:
    """Raise InputError if two lines of a batch have the same `custom_id`."""
    places = dict[str, str]()
    for where, row in rows:
        name = row.get("custom_id") if isinstance(row, dict) else None
        if isinstance(name, str) and places.setdefault(name, where) != where:
            raise InputError(
                f"{where}: the custom_id {name!r} is also that of {places[name]}; change one"
            )


def write_lines(
    rows: Sequence[tuple[str, Any]],
    path: str,
    requests: LocalRequests,
    seed: int,
    *,
    settings: Any,
    **options: Any,
) -> None:
    """Write the results of the lines of a batch; see `write_in_order` and `answered_line`."""
    write_in_order(
        path,
        [(number, row) for number, (_, row) in enumerate(rows)],
        lambda item: answered_line(item[0], item[1], seed, requests.post),
        settings=[settings, seed],
        size=lambda item: size_of(item[1]),
        stop=requests.stop,
        **options,
    )


def answered_line(
    number: int, row: Any, seed: int, post: Callable[[str, Any], tuple[int, Any]]
) -> dict[str, Any]:
    """Return the line of results for the line `number` of a batch, in OpenAI's format.

    It depends only on the arguments: ids are those of the line, `created` is 0, and the number of
    tokens that the server had already is left out.

    Args:
      seed: a request without a seed gets one that follows from this one and from the line.
      post: sends a request; see `LocalRequests.post`.
    """
    row = row if isinstance(row, dict) else {}
    text = json.dumps([seed, number, row], sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    try:
        status, body = post(*_request_of(row, int(name[:8], 16)))
    except ApiError as error:
        status, body = error.status, error.body()
    if isinstance(body.get("usage"), dict):
        body["usage"].pop("prompt_tokens_details", None)
    if "created" in body:
        body |= {"id": f"{body['id'].partition('-')[0]}-{name}", "created": 0}
    response = {"status_code": status, "request_id": f"req-{name}", "body": body}
    line = {"id": f"batch_req_{name}", "custom_id": row.get("custom_id"), "response": response}
    return line | {"error": None}


def _request_of(row: dict[str, Any], seed: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of the request in a line of a batch.

    Raises:
      ApiError: with status 400, if the line has none.
    """
    url, body = row.get("url"), row.get("body")
    if not isinstance(row.get("custom_id"), str):
        raise invalid("custom_id", row.get("custom_id"), "a text")
    if row.get("method", "POST") != "POST":
        raise invalid("method", row["method"], "POST")
    if url not in URLS:
        raise invalid("url", url, f"one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise invalid("body", body, "a JSON object")
    if body.get("stream"):
        raise invalid("stream", body["stream"], "false in a batch")
    if url != EMBEDDINGS and body.get("seed") is None:
        body = body | {"seed": seed}
    return url, body
