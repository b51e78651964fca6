"""The HTTP interface: OpenAI's completions, the original server's, health, metrics and a page."""

import asyncio
import contextlib
import ipaddress
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Collection
from importlib import resources
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.requests import (
    ApiError,
    CompletionRequest,
    ContextRequest,
    Keys,
    parse,
    read_json,
)
from mesh_transformer.serving.service import Completion, Service, unless_gone
from mesh_transformer.util import InputError

EVENTS = "text/event-stream"
EXIT_SECONDS = 1.0  # for the engine to end when the answers have
PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)


def create_app(
    service: Service,
    keys: Keys,
    origins: list[str] | None = None,
    hosts: Collection[str] = (),
) -> FastAPI:
    """The server's routes over a service, which starts and ends with it.

    Args:
      origins: of web pages elsewhere that may use the server.
      hosts: names by which clients may address a server without keys; see `KnownHosts`.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.close(EXIT_SECONDS)

    # Their pages of documentation would load scripts from elsewhere.
    app = FastAPI(title="mesh-transformer", lifespan=lifespan, openapi_url=None)
    _add_errors(app)
    _add_pages(app, service, keys)
    _add_completions(app, service, keys)
    if not keys.needed:
        app.add_middleware(KnownHosts, hosts=hosts)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )

    app.add_middleware(CutShort)
    app.add_middleware(Counted, metrics=service.metrics)
    return app


class KnownHosts:
    """Refuses requests whose Host is neither an address nor a name of this machine.

    Otherwise a web page whose name's address has been changed to this machine's (DNS rebinding)
    could use a server without keys from its visitor's browser.

    Args:
      hosts: further names to accept; "*" accepts all.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()):
        self.app = app
        self._names = {"localhost", socket.gethostname().lower(), *map(str.lower, hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host")
            # Browsers always send one; HTTP/1.0 health checks do not.
            if host is not None and not self._knows(name := self._name(host)):
                message = f"the Host {name[:80]!r} is not served; start it with --allow-host"
                await ApiError(421, message).response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    @staticmethod
    def _name(host: str) -> str:
        """A Host header without its port."""
        name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
        return name.strip().rstrip(".").lower()

    def _knows(self, name: str) -> bool:
        if "*" in self._names or name in self._names or name.endswith(".localhost"):
            return True
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
            return True
        return False


class CutShort:
    """Answers requests that are cancelled when the server ends: 503, or an error in a stream."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head: Message | None = None

        async def watched(message: Message) -> None:
            nonlocal head
            head = message if message["type"] == "http.response.start" else head
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            error = ApiError(503, "the server has ended")
            if head is None:
                await error.response()(scope, receive, send)
            elif Headers(raw=head["headers"]).get("content-type", "").startswith(EVENTS):
                event = f"data: {json.dumps(error.body())}\n\n".encode()
                await send({"type": "http.response.body", "body": event})
            else:
                raise  # the connection is closed: what was sent is not whole


class Counted:
    """Counts the answers by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Known paths alone: a client must not be able to make up labels.
                path = getattr(scope.get("route"), "path", "other")
                self.metrics.answers.labels(path, message["status"]).inc()
            await send(message)

        await self.app(scope, receive, watched)


class Events(StreamingResponse):
    """A completion as server-sent events; it ends when the client goes away."""

    def __init__(self, completion: Completion):
        super().__init__(completion.events(), media_type=EVENTS)
        self.headers["Cache-Control"] = "no-store"
        self._completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._completion.cancel()


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(InputError)
    async def wrong(_: Request, error: InputError) -> Response:
        return ApiError(400, str(error)).response()

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # for the metrics; nobody reads it

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return ApiError(500, f"the server failed: {type(error).__name__}").response()


def _add_pages(app: FastAPI, service: Service, keys: Keys) -> None:
    page = resources.files("mesh_transformer.serving").joinpath("page.html").read_text("utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def index() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_POLICY})

    @app.get("/health")
    async def health() -> Response:
        if (trouble := service.engine.trouble) is not None:
            return JSONResponse({"status": "failed", "reason": trouble}, 503)
        return JSONResponse({"status": "ok", "model": service.name})

    @app.get("/openapi.json")
    async def description(request: Request) -> Response:
        keys.check(request)
        return JSONResponse(app.openapi())

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_completions(app: FastAPI, service: Service, keys: Keys) -> None:
    def model() -> dict[str, Any]:
        config = service.engine.network.config
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "mesh-transformer",
            "context_window": config.window,
        }

    @app.get("/v1/models")
    async def models(request: Request) -> Any:
        keys.check(request)
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Any:
        keys.check(request)
        service.check_model(name)
        return model()

    @app.post("/v1/completions", openapi_extra=_body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        keys.check(request)
        asked = parse(CompletionRequest, await read_json(request))
        completion = await service.completion(asked)
        if asked.stream:
            return Events(completion)
        choices = await unless_gone(request, completion.whole(), completion)
        return StreamingResponse(choices, media_type="application/json")

    @app.post("/complete", openapi_extra=_body_of(ContextRequest))
    async def complete(request: Request) -> Response:
        keys.check(request)
        began = time.perf_counter()
        asked = parse(ContextRequest, await read_json(request))
        completion = await service.continuation(asked)
        text = await unless_gone(request, completion.text(), completion)
        seconds = time.perf_counter() - began
        return JSONResponse({"context": asked.context, "completion": text, "time": seconds})


def _body_of(kind: type[CompletionRequest] | type[ContextRequest]) -> dict[str, Any]:
    """What the server's own description says of a body."""
    return {"requestBody": {"content": {"application/json": {"schema": kind.model_json_schema()}}}}
