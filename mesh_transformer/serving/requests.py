"""Checks of HTTP requests: API keys, limits on size and time, body fields, and error responses."""

import asyncio
import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse

from mesh_transformer.generation.sampling import OPENAI_DEFAULTS, PYTHON_DEFAULTS, RANGES
from mesh_transformer.util import InputError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An exception that is sent to the client as an error response in OpenAI's format.

    Attributes:
      status: the HTTP status code.
      param: the name of the invalid field, or None.
      code: OpenAI's error code, or None.
      headers: further HTTP headers of the response.
    """

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
        """Return the JSON body of the response."""
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
        """Return the complete HTTP response."""
        return JSONResponse(self.body(), self.status, dict(self.headers or {}))


BODY_BYTES = 2**21  # maximum size of a body
BODY_SECONDS = 20.0  # maximum time for a body to arrive
# A body larger than `BODY_BYTES` is still read up to this size, and discarded.  If the connection
# were closed while the client is still sending, the client could not read the error.
DRAINED_BYTES = 2**26


class Keys:
    """The API keys that clients may use.

    Args:
      path: a file with one key per line, or None if clients need no key.

    Raises:
      InputError: at construction, if the file cannot be read or contains no key.
    """

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
            raise InputError(f"--api-key-file {path}: contains no key, expected one per line")
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def needed(self) -> bool:
        """Whether clients must send a key."""
        return self._digests is not None

    def check(self, request: Request) -> None:
        """Raise ApiError 401 unless the request has one of the keys.

        The time of the check does not depend on the key that was sent.
        """
        if self._digests is None:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        # starlette decodes all header values as Latin-1, so this recovers their bytes.
        sent = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(sent, digest) for digest in self._digests]
        if kind.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "missing or invalid API key; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def read_json(request: Request) -> bytes:
    """Return the body of a request whose content type is JSON.

    Raises:
      ApiError: 415 for another content type, 413 for a body of more than `BODY_BYTES`, or 408 for a
        body that takes longer than `BODY_SECONDS` to arrive.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        # A web page of another origin can send some content types without a CORS preflight, but
        # not JSON.
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
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from None
    if size > BODY_BYTES:
        raise ApiError(413, f"the body is longer than {BODY_BYTES} bytes")
    return bytes(body)


MOST_STOPS = 16
LONGEST_STOP = 256  # characters
MOST_CHOICES = 128

PENALTY = RANGES["repetition_penalty"]
TOP_K = RANGES["top_k"]
Number = Annotated[float, Field(allow_inf_nan=False)]
# The type of OpenAI's parameters that are not supported.  It accepts only 0, their default.
Zero = Annotated[float, Field(ge=0, le=0)]
Body = TypeVar("Body", bound=BaseModel)
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_StrictModel):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class CompletionRequest(_StrictModel):
    """The body of `POST /v1/completions`.

    `top_k`, `repetition_penalty` and `ignore_eos` are extensions of OpenAI's API.
    """

    model: str | None = None
    prompt: Any = "<|endoftext|>"
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = OPENAI_DEFAULTS.temp
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = OPENAI_DEFAULTS.top_p
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
        """The stop sequences as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ContextRequest(_StrictModel):
    """The body of `POST /complete`.

    In the original mesh-transformer-jax, the keys are `context`, `top_p` and `temp`, all of which
    are required.  Here, only `context` is required.
    """

    context: str
    top_p: Annotated[Number, Field(ge=0, le=1)] = PYTHON_DEFAULTS.top_p
    temp: Annotated[Number, Field(ge=0, le=100)] = PYTHON_DEFAULTS.temp
    top_k: Annotated[int, Field(ge=TOP_K.least, le=TOP_K.most)] = 0
    # Default: 512, as in the original mesh-transformer-jax, or the server's maximum if it is lower.
    length: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None


def parse(kind: type[Body], body: bytes) -> Body:
    """Parse a JSON body as a request of type `kind`.

    Raises:
      ApiError: 400, for the first error found.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as errors:
        first = errors.errors(include_url=False, include_context=False, include_input=False)[0]
        # Only the first item of the location is a key that the client sent.  The other items are
        # pydantic's names for the alternatives of a union.
        key = str(first["loc"][0]) if first["loc"] else None
        raise ApiError(400, f"{key or 'the body'}: {first['msg']}"[:300], param=key) from None


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """Return the prompts in a `prompt` field as a list.

    As in OpenAI's API, the field is one prompt or a list of prompts.  A prompt is a text or a list
    of token ids; a list of prompts has only one of these kinds.

    Raises:
      ApiError: 400, for anything else.
    """
    prompts = [prompt] if isinstance(prompt, str) or _all(prompt, int) else prompt
    if isinstance(prompts, list) and prompts and len(prompts) <= MOST_CHOICES:
        if _all(prompts, str):
            return prompts
        if all(_all(tokens, int) for tokens in prompts):
            return prompts
    raise ApiError(
        400,
        "prompt: expected a text, a non-empty list of token ids, or a list of 1 to "
        f"{MOST_CHOICES} texts or token id lists",
        param="prompt",
    )


def _all(values: Any, kind: type) -> bool:
    """Whether `values` is a non-empty list whose items are all of type `kind`.

    Subclasses of `kind` do not match, so that a bool is not an int.
    """
    return isinstance(values, list) and bool(values) and all(type(v) is kind for v in values)
