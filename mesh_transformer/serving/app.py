"""The HTTP interface: OpenAI's completions, the original server's, health, metrics and a page."""

import contextlib
import time
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mesh_transformer.serving.errors import ApiError
from mesh_transformer.serving.gate import Keys, read_json
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.requests import CompletionRequest, ContextRequest, parse
from mesh_transformer.serving.service import Completion, Service, unless_gone

PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)


def create_app(service: Service, keys: Keys, origins: list[str] | None = None) -> FastAPI:
    """The server's routes over a service, which starts and ends with it.

    Args:
      origins: of web pages elsewhere that may use the server.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        service.engine.close()

    # Their pages of documentation would load scripts from elsewhere.
    app = FastAPI(title="mesh-transformer", lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_pages(app, service)
    _add_completions(app, service, keys)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )

    app.add_middleware(Counted, metrics=service.metrics)
    return app


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
        super().__init__(completion.events(), media_type="text/event-stream")
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


def _add_pages(app: FastAPI, service: Service) -> None:
    page = resources.files("mesh_transformer.serving").joinpath("page.html").read_text("utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def index() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_POLICY})

    @app.get("/health")
    async def health() -> Response:
        failure = service.engine.failure
        if failure is not None:
            return JSONResponse({"status": "failed", "reason": str(failure)}, 503)
        return JSONResponse({"status": "ok", "model": service.name})

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
        return JSONResponse(await unless_gone(request, completion.whole(), completion))

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
