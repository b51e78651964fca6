"""The one address of several replicas of a server: routing, retries, limits, health and metrics."""

import asyncio
import contextlib
import json
from collections.abc import Collection, Sequence
from typing import Any, TextIO

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mesh_transformer.serving.app import (
    EVENTS,
    KnownHosts,
    RequestLog,
    ShutdownResponses,
    unless_disconnected,
)
from mesh_transformer.serving.errors import ApiError
from mesh_transformer.serving.limits import KeyLimits
from mesh_transformer.serving.metrics import FrontMetrics, merged
from mesh_transformer.serving.requests import Keys, read_json

TRIES = 3  # replicas that a request is sent to, one after the other, if they die
REPLICA_SECONDS = 5.0  # maximum time for a replica's health or metrics
PROMPTS = ("model", "tools", "messages", "prompt", "context", "input")  # keys that begin prompts
# Lengths of the beginnings by which requests are routed, in characters; each is about 1/8 longer.
LENGTHS = [round(64 * 1.125**power) for power in range(83)]


def create_front(
    replicas: Any,
    keys: Keys,
    context: int,
    origins: list[str] | None = None,
    hosts: Collection[str] = (),
    log: TextIO | None = None,
    limits: KeyLimits | None = None,
) -> ASGIApp:
    """Return an ASGI application that sends requests to replicas of the application of `app.py`.

    Args:
      replicas: a `pod.replicas.Replicas`, which this module may not import.
      keys, origins, hosts, log: see `app.create_app`.
      context: number of tokens of the model's context.
      limits: the limits on the requests of each key.
    """
    app: ASGIApp = Front(replicas, keys, context, limits or KeyLimits())
    if not keys.needed:
        app = KnownHosts(app, hosts)
    if origins:
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return RequestLog(ShutdownResponses(app), log)


class Front:
    """An ASGI application that sends requests to replicas; see `create_front`."""

    def __init__(self, replicas: Any, keys: Keys, context: int, limits: KeyLimits):
        self._replicas, self._keys, self._limits = replicas, keys, limits
        self._context = context
        self._metrics = FrontMetrics(lambda: len(replicas.names()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request, state = Request(scope, receive), _State(send)
        pages = {"/health": self._health, "/metrics": self._text}
        try:
            if scope["path"] in pages and scope["method"] in ("GET", "HEAD"):
                await (await pages[scope["path"]]())(scope, receive, send)
            elif scope["method"] == "POST":
                self._keys.check(request)
                with self._limits.request(request.headers.get("authorization", "")):
                    body = await read_json(request, self._context)
                    work = self._forward(scope, body, prefixes_of(body), state)
                    await unless_disconnected(request, work)
            else:
                await self._forward(scope, b"", (), state)
        except ApiError as error:
            self._metrics.refused.labels(error.status).inc()
            await error.response()(scope, receive, send)
        except ClientDisconnect:
            pass

    async def _forward(
        self, scope: Scope, body: bytes, prefixes: Sequence[int], state: "_State"
    ) -> None:
        """Send a replica's response; if the replica dies before it has begun, that of another one.

        Raises:
          ApiError: with status 503, if `TRIES` replicas have died.
        """
        for _ in range(TRIES):
            state.head = None
            try:
                async with contextlib.aclosing(
                    self._replicas.ask(scope, body, prefixes)
                ) as batches:
                    async for batch in batches:
                        for message in batch:
                            await state.send(message)
            except ConnectionError:
                pass
            if state.complete:
                return
            if state.begun:
                self._metrics.interrupted.inc()
                await state.interrupt(ApiError(503, "the replica of the server has died"))
                return
            self._metrics.retried.inc()
        raise ApiError(503, "the replicas of the server have died; try again later")

    async def _each(self, path: str) -> dict[str, tuple[int, bytes]]:
        """Return {name of a replica: status and body of its response to GET `path`}.

        A replica that does not answer has status 503 and no body.
        """

        async def get(name: str) -> tuple[int, bytes]:
            status, body = 503, b""
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(REPLICA_SECONDS):
                    scope = {"path": path, "raw_path": path.encode()}
                    async for batch in self._replicas.ask(scope, replica=name):
                        for message in batch:
                            status = message.get("status", status)
                            body += message.get("body", b"")
            return status, body

        names = self._replicas.names()
        return dict(zip(names, await asyncio.gather(*map(get, names)), strict=True))

    async def _health(self) -> Response:
        """Return whether a replica can answer, and the health of each."""
        states = {
            name: json.loads(body) if body else {"status": "failed", "reason": "no answer"}
            for name, (_, body) in (await self._each("/health")).items()
        }
        healthy = [state for state in states.values() if state["status"] == "ok"]
        if not healthy:
            reason = "no replica can answer"
            return JSONResponse({"status": "failed", "reason": reason, "replicas": states}, 503)
        return JSONResponse({**healthy[0], "replicas": states})

    async def _text(self) -> Response:
        """Return the metrics of all replicas, with the label `replica`, and of this address."""
        texts = await self._each("/metrics")
        replicas = {name: body.decode() for name, (status, body) in texts.items() if status == 200}
        text = self._metrics.text().decode() + merged(replicas)
        return PlainTextResponse(text, media_type=FrontMetrics.media_type)


class _State:
    """What has been sent to a client.

    Attributes:
      head: the beginning of the response, which is sent with the first part of the body, so that
        another replica can answer until then.
      begun, complete: whether the beginning and the end of the response have been sent.
    """

    def __init__(self, send: Send):
        self._send = send
        self.head: Message | None = None
        self.begun = self.complete = self._streams = False

    async def send(self, message: Message) -> None:
        """Send a message of a response."""
        if message["type"] == "http.response.start":
            self.head = message
            return
        if self.head is not None:
            kinds = [value for name, value in self.head["headers"] if name == b"content-type"]
            self._streams = kinds[:1] and kinds[0].startswith(EVENTS.encode())
            self.begun = True
            await self._send(self.head)
            self.head = None
        self.complete = not message.get("more_body", False)
        await self._send(message)

    async def interrupt(self, error: ApiError) -> None:
        """End a response that cannot be completed with an error, if it is a stream of events.

        Of another response, the connection is closed, so that the client does not take it for
        complete.
        """
        if not self._streams:
            raise asyncio.CancelledError
        event = f"data: {json.dumps(error.body())}\n\n".encode()
        await self._send({"type": "http.response.body", "body": event})


def prefixes_of(body: bytes) -> list[int]:
    """Return hashes of the beginnings of a request's prompt, the shortest one first.

    Prompts with an equal beginning, and requests of the same model, have their first hashes in
    common.  The last hash is that of the whole prompt.
    """
    try:
        value = json.loads(body)
    except ValueError:
        return []
    if not isinstance(value, dict):
        return []
    text = json.dumps([value[key] for key in PROMPTS if key in value], ensure_ascii=False)
    hashes, last, start = [], 0, 0
    for end in [*(length for length in LENGTHS if length < len(text)), len(text)]:
        last = hash((last, text[start:end]))
        hashes.append(last)
        start = end
    return hashes
