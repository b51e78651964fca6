"""The HTTP application: completions, health, metrics and a web page.

Completions are available through OpenAI's API, and through the endpoint /complete of the original
mesh-transformer-jax.
"""

import asyncio
import contextlib
import datetime
import functools
import ipaddress
import itertools
import json
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from importlib import resources
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tqdm import tqdm

from mesh_transformer.serving.embeddings import Embeddings, embeddings_of
from mesh_transformer.serving.errors import ApiError
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.requests import (
    ChatRequest,
    CompletionRequest,
    ContextRequest,
    EmbeddingRequest,
    Keys,
    SamplingRequest,
    read_json,
)
from mesh_transformer.serving.service import Completion, Service
from mesh_transformer.util import InputError, brief

if TYPE_CHECKING:
    from mesh_transformer.serving.batches import Batches

EVENTS = "text/event-stream"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"  # OpenAI's paths for conversations
EMBEDDINGS = "/v1/embeddings"
REQUEST_ID = "x-request-id"  # header of requests and responses
COMPLETION = "completion"  # key of a request's `Completion` or `Embeddings` in its state
EXIT_SECONDS = 1.0  # maximum time for the engine to stop after the last answer
PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)


def create_app(
    service: Service,
    keys: Keys,
    origins: list[str] | None = None,
    hosts: Collection[str] = (),
    log: TextIO | None = None,
    batches: "Batches | None" = None,
) -> FastAPI:
    """Return an ASGI application that serves completions from `service`.

    The service is started and stopped together with the application.

    Args:
      keys: the API keys that clients may use.
      origins: allowed CORS origins.
      hosts: names to accept in the Host header, in addition to those that `KnownHosts` always
        accepts.  The Host header is checked only if clients need no API key.
      log: where to write a line of JSON for each request; None for nowhere.
      batches: the files and batches that clients may create; None for none.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        if batches is not None:
            batches.start()
        yield
        if batches is not None:
            batches.close()
        service.close(EXIT_SECONDS)

    # No `openapi_url`: FastAPI's documentation pages would load scripts from other sites.
    app = FastAPI(title="mesh-transformer", lifespan=lifespan, openapi_url=None)
    _add_pages(app, service, keys)
    _add_completions(app, service, keys)
    if batches is not None:
        for method, path, answer in batches.endpoints():
            _add_endpoint(app, keys, method, path, answer, origins or ())
    else:
        for method, path in itertools.product(("GET", "POST"), ("/v1/files", "/v1/batches")):
            message = f"{method} {path}: not served; start the server with --batch-folder"
            _refuse(app, keys, path, message, method)
    _add_errors(app)
    if not keys.needed:
        app.add_middleware(KnownHosts, hosts=hosts)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )

    app.add_middleware(ShutdownResponses)
    app.add_middleware(CountResponses, metrics=service.metrics)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestLog, log=log)
    return app


class KnownHosts:
    """Middleware that refuses requests whose Host header is neither an IP address nor a local name.

    Local names are localhost, its subdomains and this machine's host name.  The check protects
    servers without API keys from DNS rebinding.  In such an attack, a web page's domain is changed
    to resolve to this machine, so that the page can use the server from a visitor's browser.

    Args:
      hosts: further names to accept in the Host header; "*" accepts all names.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()):
        self.app = app
        self._names = {"localhost", socket.gethostname().lower(), *map(str.lower, hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host")
            # Browsers always send a Host header; HTTP/1.0 health checks do not.
            if host is not None and not self._allows(name := self._name(host)):
                message = (
                    f"the Host header {name[:80]!r} is not allowed; start the server with "
                    "--allow-host NAME to allow a name"
                )
                await ApiError(421, message).response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    @staticmethod
    def _name(host: str) -> str:
        """Return the lower-case host name in the Host header `host`, without the port."""
        name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
        return name.strip().rstrip(".").lower()

    def _allows(self, name: str) -> bool:
        """Return whether `name` is an IP address, a local name or one of the accepted `hosts`."""
        if "*" in self._names or name in self._names or name.endswith(".localhost"):
            return True
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
            return True
        return False


class ShutdownResponses:
    """Middleware that sends an error to clients whose requests are cancelled at shutdown.

    The error is a response with status 503.  If an event stream has already begun, the error is
    sent as the stream's last event.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None

        async def watched(message: Message) -> None:
            nonlocal start
            start = message if message["type"] == "http.response.start" else start
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            error = ApiError(503, "the server has stopped")
            if start is None:
                await error.response()(scope, receive, send)
            elif Headers(raw=start["headers"]).get("content-type", "").startswith(EVENTS):
                event = f"data: {json.dumps(error.body())}\n\n".encode()
                await send({"type": "http.response.body", "body": event})
            else:
                raise  # closes the connection, because the response is incomplete


class HeadAsGet:
    """Middleware that answers HEAD as GET; the HTTP server leaves out the body."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


class CountResponses:
    """Middleware that counts responses by path and status in the server's metrics."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                # All paths without a route share one label, so that clients cannot create labels.
                path = getattr(scope.get("route"), "path", "other")
                self.metrics.answers.labels(path, message["status"]).inc()
            await send(message)

        await self.app(scope, receive, watched)


class RequestLog:
    """Middleware that gives each request an id, and writes a line about it when it ends.

    The id is that of the client's header X-Request-Id, or else a random one.  The response has it
    in the same header.  The line is a JSON object with the time of the request's arrival, its id,
    client, method, path and status, and its duration in seconds.  For an answer, it also has the
    number of tokens of the prompts and of what was generated.  The status is null if the request
    ended without a response.

    Args:
      log: where to write the lines; None for nowhere.
    """

    def __init__(self, app: ASGIApp, log: TextIO | None):
        self.app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get(REQUEST_ID, "")
        name = wanted if re.fullmatch(r"[!-~]{1,128}", wanted) else f"req-{secrets.token_hex(12)}"
        arrived, began, status = time.time(), time.perf_counter(), None
        # The endpoints add the `Completion` that answers the request.
        state = scope["state"] = dict(scope.get("state", {}))

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            if self._log is not None:
                completion = state.get(COMPLETION)
                when = datetime.datetime.fromtimestamp(arrived, datetime.UTC)
                line = {
                    "time": when.isoformat(timespec="milliseconds"),
                    "id": name,
                    "client": (scope.get("client") or [None])[0],
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(time.perf_counter() - began, 6),
                } | ({} if completion is None else completion.usage())
                with tqdm.external_write_mode(file=self._log):
                    print(json.dumps(line), file=self._log, flush=True)


class Events(StreamingResponse):
    """A response that streams a completion as server-sent events.

    If the client disconnects, the completion is cancelled.
    """

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
    """Add handlers that turn exceptions into error responses in OpenAI's format.

    Call this after all routes have been added, because the 404 response lists the routes.
    """
    served = ", ".join(
        f"{min(route.methods or ())} {route.path.replace(':path', '')}"
        for route in app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
    )

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(InputError)
    async def input_error(_: Request, error: InputError) -> Response:
        return ApiError(400, str(error)).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        headers = error.headers or {}
        problems = {
            404: f"not served, expected one of {served}",
            405: f"expected the method {headers.get('Allow')}",
        }
        problem = problems.get(error.status_code, error.detail)
        message = f"{brief(request.method)} {brief(request.url.path)}: {problem}"
        return ApiError(error.status_code, message, headers=headers).response()

    @app.exception_handler(ClientDisconnect)
    async def disconnected(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # only for the metrics, as there is no client to read it

    @app.exception_handler(Exception)
    async def server_error(_: Request, error: Exception) -> Response:
        return ApiError(500, f"the server failed: {type(error).__name__}").response()


def _add_pages(app: FastAPI, service: Service, keys: Keys) -> None:
    """Add the endpoints for the web page, health, the OpenAPI description and metrics."""
    page = resources.files("mesh_transformer.serving").joinpath("page.html").read_text("utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def index() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_POLICY})

    @app.get("/health")
    async def health() -> Response:
        if (health_problem := service.engine.health_problem) is not None:
            return JSONResponse({"status": "failed", "reason": health_problem}, 503)
        return JSONResponse({"status": "ok", "model": service.name})

    @app.get("/openapi.json")
    async def description(request: Request) -> Response:
        keys.check(request)
        return JSONResponse(app.openapi())

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_completions(app: FastAPI, service: Service, keys: Keys) -> None:
    """Add OpenAI's endpoints under /v1, and the original mesh-transformer-jax's /complete."""

    def model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "mesh-transformer",
            "context_window": service.context,
            "chat": service.template is not None,
            "thinking": service.template is not None and service.template.takes("enable_thinking"),
            "sampling": {
                "temperature" if key == "temp" else key: x for key, x in service.sampling.items()
            },
        }

    @app.get("/v1/models")
    async def models(request: Request) -> Any:
        keys.check(request)
        return {"object": "list", "data": [model(name) for name in service.names]}

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Any:
        keys.check(request)
        service.adapter(name)
        return model(name)

    def post(path: str, name: str, kind: type[BaseModel], *work: Any) -> None:
        """Add an endpoint whose requests `_answered` answers, with `work` as last arguments."""

        async def endpoint(request: Request) -> Response:
            keys.check(request)
            return await _answered(service, request, kind, *work)

        # The body's schema; FastAPI itself would also check bodies, with errors of its own.
        schema = {"content": {"application/json": {"schema": kind.model_json_schema()}}}
        described = {"requestBody": schema}
        app.add_api_route(path, endpoint, methods=["POST"], name=name, openapi_extra=described)

    post("/v1/completions", "completions", CompletionRequest, service.completion)
    if service.template is None:
        message = (
            f"{service.name} is a base model without a chat template; send a prompt to "
            "POST /v1/completions"
        )
        for path in (RESPONSES, CHAT):
            _refuse(app, keys, path, message, param="model", code="not_a_chat_model")
    else:
        _refuse(app, keys, RESPONSES, f"POST {RESPONSES}: not served; send messages to POST {CHAT}")
        post(CHAT, "chat", ChatRequest, service.chat)
    if service.engine.pooling is None:
        _refuse(
            app,
            keys,
            EMBEDDINGS,
            f"POST {EMBEDDINGS}: not served; start the server with --embeddings",
        )
    else:
        begin = functools.partial(embeddings_of, service)
        post(EMBEDDINGS, "embeddings", EmbeddingRequest, begin)
    post("/complete", "complete", ContextRequest, service.continuation, _original_response)


def _add_endpoint(
    app: FastAPI,
    keys: Keys,
    method: str,
    path: str,
    answer: Callable[[Request], Awaitable[Any]],
    origins: Collection[str],
) -> None:
    """Add an endpoint whose responses are `answer(request)`, a response or a JSON value.

    Args:
      origins: allowed CORS origins.  Browsers send forms from any page, without asking first, so
        that a server without keys must check where they come from.
    """

    async def endpoint(request: Request) -> Response:
        keys.check(request)
        origin = request.headers.get("origin")
        own = f"//{request.headers.get('host', '')}"
        if origin and not (keys.needed or origin in origins or origin.endswith(own)):
            message = f"{brief(origin)} may not send this; start the server with --allow-origin"
            raise ApiError(403, message)
        value = await answer(request)
        return value if isinstance(value, Response) else JSONResponse(value)

    app.add_api_route(path, endpoint, methods=[method], name=answer.__name__)


def _refuse(
    app: FastAPI,
    keys: Keys,
    path: str,
    message: str,
    method: str = "POST",
    **details: Any,
) -> None:
    """Add an endpoint that this server knows but does not serve."""

    async def endpoint(request: Request) -> Response:
        keys.check(request)
        raise ApiError(404, message, **details)

    app.add_api_route(path, endpoint, methods=[method], include_in_schema=False)


Body = TypeVar("Body", bound=BaseModel)
Answer = TypeVar("Answer", Completion, Embeddings)
Result = TypeVar("Result")


async def _json_response(_: BaseModel, answer: Completion | Embeddings, __: float) -> Response:
    """Return the complete answer as one JSON object."""
    return StreamingResponse(await answer.json_response(), media_type="application/json")


async def _original_response(
    body: ContextRequest, completion: Completion, began: float
) -> Response:
    """Return the complete answer as the original mesh-transformer-jax did."""
    text = await completion.text()
    seconds = time.perf_counter() - began
    return JSONResponse({"context": body.context, "completion": text, "time": seconds})


async def _answered(
    service: Service,
    request: Request,
    kind: type[Body],
    begin: Callable[[Body], Awaitable[Answer]],
    respond: Callable[[Body, Answer, float], Awaitable[Response]] = _json_response,
) -> Response:
    """Return the answer to a request, unless the client disconnects.

    Args:
      kind: the type of the request's body.
      begin: begins the answer to a body.
      respond: waits for the complete answer, and returns the response with it.  The last argument
        is when the request arrived, as a value of `time.perf_counter`.
    """
    began = time.perf_counter()
    content = await read_json(request, service.context)

    async def response() -> Response:
        body = await service.parsed(kind, content)
        answer = request.scope["state"][COMPLETION] = await begin(body)
        if isinstance(answer, Completion) and isinstance(body, SamplingRequest) and body.stream:
            return Events(answer)
        try:
            return await respond(body, answer, began)
        finally:
            answer.cancel()

    return await unless_disconnected(request, response())


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`, unless the client disconnects first, which cancels the work.

    Raises:
      ClientDisconnect: if the client disconnects first.
    """

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
