"""Requests: their checks (key, size, pace of the body), their fields, and their errors."""

import asyncio
import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse

from mesh_transformer.generation.sampling import OPENAI, PYTHON, RANGES
from mesh_transformer.util import InputError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What the client is told, and how."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body(), self.status, dict(self.headers or {}))


BODY_BYTES = 2**21
BODY_SECONDS = 20.0
DRAINED_BYTES = 2**26  # of a body that is too long, so that its sender lives to read the answer


class Keys:
    """The API keys of a file, one a line; without a file everyone may come in."""

    def __init__(self, path: str | None):
        self._digests: list[bytes] | None = None
        if path is None:
            return
        try:
            lines = Path(path).read_text("utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--api-key-file {path}: cannot be read ({error})") from None
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise InputError(f"--api-key-file {path}: holds no key, expected one a line")
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def needed(self) -> bool:
        """Whether clients have to send a key."""
        return self._digests is not None

    def check(self, request: Request) -> None:
        """Raises ApiError 401 without one of the keys; takes as long whichever it is."""
        if self._digests is None:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        # Header values are Latin-1 to starlette, whatever bytes they were.
        found = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(found, digest) for digest in self._digests]
        if kind.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "a valid API key is missing: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def read_json(request: Request) -> bytes:
    """The body of a request that says it is JSON.

    Raises:
      ApiError: 415 for another type, 413 or 408 for too long a body, in bytes or in seconds.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        # A web page of another origin may send other types without asking, but not this one.
        raise ApiError(415, "expected the header Content-Type: application/json")
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= BODY_BYTES:
                    body += part
                elif size > DRAINED_BYTES:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS:.0f} seconds") from None
    if size > BODY_BYTES:
        raise ApiError(413, f"the body is longer than {BODY_BYTES} bytes")
    return bytes(body)


MOST_STOPS = 16
LONGEST_STOP = 256  # characters
MOST_CHOICES = 128

PENALTY = RANGES["repetition_penalty"]
TOP_K = RANGES["top_k"]
Number = Annotated[float, Field(allow_inf_nan=False)]
# What OpenAI's clients send but this model does not do: only the value that changes nothing.
Zero = Annotated[float, Field(ge=0, le=0)]
Asked = TypeVar("Asked", bound=BaseModel)
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class _Asked(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Asked):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class CompletionRequest(_Asked):
    """The body of `POST /v1/completions`; `top_k`, `repetition_penalty`, `ignore_eos` are ours."""

    model: str | None = None
    prompt: Any = "<|endoftext|>"
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = OPENAI.temp
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = OPENAI.top_p
    top_k: Annotated[int, Field(ge=TOP_K.least, le=TOP_K.most)] = 0
    repetition_penalty: Annotated[Number, Field(ge=PENALTY.least, le=PENALTY.most)] = 1.0
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = 1
    best_of: int | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    user: str | None = None
    suffix: Literal[""] | None = None
    presence_penalty: Zero | None = 0.0
    frequency_penalty: Zero | None = 0.0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def stops(self) -> list[str]:
        """The stop sequences, as many as there are."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ContextRequest(_Asked):
    """The body of `POST /complete`: the original's three keys, of which two now have defaults."""

    context: str
    top_p: Annotated[Number, Field(ge=0, le=1)] = PYTHON.top_p
    temp: Annotated[Number, Field(ge=0, le=100)] = PYTHON.temp
    top_k: Annotated[int, Field(ge=TOP_K.least, le=TOP_K.most)] = 0
    length: Annotated[int, Field(ge=1)] | None = None  # the original's 512, or what is allowed
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None


def parse(kind: type[Asked], body: bytes) -> Asked:
    """A body of JSON as what it should be.

    Raises:
      ApiError: 400, about the first thing that is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as errors:
        first = errors.errors(include_url=False, include_context=False, include_input=False)[0]
        # Only the key: what follows it are the names of pydantic's own alternatives.
        key = str(first["loc"][0]) if first["loc"] else None
        raise ApiError(400, f"{key or 'the body'}: {first['msg']}"[:300], param=key) from None


def prompts_of(asked: Any) -> list[str | list[int]]:
    """The prompts of OpenAI's four shapes: a text, token ids, or a list of either.

    Raises:
      ApiError: 400, for anything else.
    """
    prompts = [asked] if isinstance(asked, str) or _all(asked, int) else asked
    if isinstance(prompts, list) and prompts and len(prompts) <= MOST_CHOICES:
        if _all(prompts, str):
            return prompts
        if all(_all(prompt, int) for prompt in prompts):
            return prompts
    raise ApiError(
        400,
        "prompt: expected a text, a list of token ids, or a list of 1 to "
        f"{MOST_CHOICES} of either, none of the token lists empty",
        param="prompt",
    )


def _all(values: Any, kind: type) -> bool:
    """Whether it is a list, not empty, of values of exactly that type (true is no number)."""
    return isinstance(values, list) and bool(values) and all(type(v) is kind for v in values)
