"""Validation of HTTP requests: API key, size, arrival time and fields."""

import asyncio
import contextlib
import functools
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import from_json
from starlette.requests import Request

from mesh_transformer.generation.sampling_settings import (
    BIAS,
    MOST_BIASES,
    OPENAI_DEFAULTS,
    PYTHON_DEFAULTS,
    RANGES,
    SamplingOptions,
)
from mesh_transformer.serving.errors import ApiError, absent, invalid, shown, unknown_key
from mesh_transformer.serving.messages import conversation
from mesh_transformer.serving.prefill import ALTERNATIVES
from mesh_transformer.util import InputError, brief

# Maximum size of a body: this, or so many bytes per token of the context if that is more.
BODY_BYTES, TOKEN_BYTES = 2**21, 16
BODY_SECONDS = 20.0  # maximum time for a body to arrive
# Maximum number of texts, lists and objects in a body.  Making more of them takes long, and stops
# all other threads.
MOST_VALUES = 2**15
# A larger body than allowed is still read up to this size, and discarded.  If the connection
# were closed while the client is still sending, the client could not read the error.
DRAINED_BYTES = 2**26


class Keys:
    """The API keys that clients may use.

    Args:
      path: a file with one key per line, or None if clients need no key.  Lines that begin with #
        are ignored.

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
            raise InputError(
                f"--api-key-file {path} cannot be read ({error}); give a text file with one key "
                "per line"
            ) from None
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise InputError(f"--api-key-file {path} contains no key; write one key per line")
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def needed(self) -> bool:
        """Whether clients must send a key."""
        return self._digests is not None

    def check(self, request: Request) -> None:
        """Raise ApiError with status 401 if clients need a key and the request has no valid key.

        The check takes the same time for every key, so its duration reveals nothing about the
        valid keys.
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


async def read_json(request: Request, context: int) -> bytes:
    """Return the raw body of a request with the content type application/json.

    Args:
      context: number of tokens of the model's context.

    Raises:
      ApiError: with status 415 for another content type, 413 for a body that is too large, or 408
        for one that takes longer than `BODY_SECONDS` to arrive.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        # A web page of another origin can send some content types without a CORS preflight, but
        # not JSON.
        raise ApiError(
            415,
            f"Content-Type: found {brief(media) or 'none'}, expected application/json",
        )
    return await read_body(request, max(BODY_BYTES, TOKEN_BYTES * context), BODY_SECONDS)


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """Return the raw body of a request of at most `most` bytes; see `read_json` for the errors."""
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    body += part
                elif size > max(DRAINED_BYTES, 2 * most):
                    break
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {seconds:.0f} seconds; send the request again",
        ) from None
    if size > most:
        raise ApiError(413, f"the body is longer than {most} bytes; send a shorter one")
    return bytes(body)


MOST_STOPS = 16
LONGEST_STOP = 256  # characters
MOST_CHOICES = 128

PENALTY = RANGES["repetition_penalty"]
PRESENCE, FREQUENCY = RANGES["presence_penalty"], RANGES["frequency_penalty"]
MIN_P = RANGES["min_p"]
TYPICAL_P = RANGES["typical_p"]
TOP_K = RANGES["top_k"]
LOGIT_BIAS = (
    f"an object of at most {MOST_BIASES} token ids, each with a number from {BIAS.least:g} to "
    f"{BIAS.most:g}"
)
# Tokens are checked by the service, which knows the vocabulary.
PROMPT = "a text, a non-empty list of token ids, or a list of 1 to {} texts or token id lists"
MOST_INPUTS = 2048  # texts in a request for embeddings
BOOLEAN = "true or false"
TEXT = "a text"
MOST_MESSAGES = 1024
MOST_KEYS = 64  # of an object
FORMAT = (
    "an object whose type is text, json_object, or json_schema with the key json_schema, an object "
    "with a name and a schema"
)
MESSAGES = f"a list of 1 to {MOST_MESSAGES} messages, each an object with a role and a content"
NO_TOOLS = "no tools, as they are not supported"
MOST_TOOLS = 128
TOOLS = f"a list of at most {MOST_TOOLS} objects"


def _field(default: Any, expected: str, **limits: Any) -> Any:
    """Return a pydantic field; `expected` describes the field's valid values in error messages."""
    return Field(default=default, description=expected, **limits)


def _number(default: float, least: float, most: float) -> Any:
    expected = f"a number from {least:g} to {most:g}"
    return _field(default, expected, ge=least, le=most, allow_inf_nan=False)


def _few_keys(value: Any, most: int = MOST_KEYS) -> Any:
    """Raise ValueError for an object of more than `most` keys, else return the value.

    pydantic itself would describe what is wrong with each of the keys, which takes long.
    """
    if isinstance(value, dict) and len(value) > most:
        raise ValueError
    return value


Body = TypeVar("Body", bound=BaseModel)
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=BIAS.least, le=BIAS.most, allow_inf_nan=False)]
Biases = Annotated[
    dict[TokenId, Bias],
    Field(max_length=MOST_BIASES),
    BeforeValidator(functools.partial(_few_keys, most=MOST_BIASES)),
]


class _StrictModel(BaseModel):
    """An object of a request, whose keys are known.  A null is the same as no value.

    Validation takes bounded time: the number of keys is limited, and so is the number of items of
    each list, of which no more is checked after a wrong one.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _limited(cls, value: Any) -> Any:
        if not isinstance(_few_keys(value), dict):
            return value
        return {key: item for key, item in value.items() if item is not None}


class StreamOptions(_StrictModel):
    """The value of the field `stream_options`, as in OpenAI's API and vLLM's."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool = False


class JsonSchema(_StrictModel):
    """The key `json_schema` of the field `response_format`, as in OpenAI's API."""

    name: Annotated[str, Field(max_length=64)]
    content: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_StrictModel):
    """The value of the field `response_format`, as in OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_for_its_type(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError
        return self


class SamplingRequest(_StrictModel):
    """The fields that `CompletionRequest` and `ChatRequest` have in common.

    They are those of OpenAI's API, and five more: `top_k`, `min_p`, `typical_p`,
    `repetition_penalty` and `ignore_eos`, which continues an answer after the end-of-text token.
    """

    model: str | None = _field(None, TEXT)
    temperature: float = _number(OPENAI_DEFAULTS.temp, 0, 100)
    top_p: float = _number(OPENAI_DEFAULTS.top_p, 0, 1)
    top_k: int = _field(TOP_K.default, str(TOP_K), ge=TOP_K.least, le=TOP_K.most)
    min_p: float = _number(MIN_P.default, MIN_P.least, MIN_P.most)
    typical_p: float = _number(TYPICAL_P.default, 0, 1)
    repetition_penalty: float = _number(PENALTY.default, PENALTY.least, PENALTY.most)
    presence_penalty: float = _number(PRESENCE.default, PRESENCE.least, PRESENCE.most)
    frequency_penalty: float = _number(FREQUENCY.default, FREQUENCY.least, FREQUENCY.most)
    logit_bias: Biases | None = _field(None, LOGIT_BIAS)
    n: int = _field(1, f"a whole number from 1 to {MOST_CHOICES}", ge=1, le=MOST_CHOICES)
    seed: int | None = _field(
        None, "a whole number from -2**63 to 2**64 - 1", ge=-(2**63), lt=2**64
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = (
        _field(
            None,
            f"a text of 1 to {LONGEST_STOP} characters, or a list of at most {MOST_STOPS} of them",
        )
    )
    stream: bool = _field(False, BOOLEAN)
    stream_options: StreamOptions | None = _field(
        None,
        "an object whose keys include_usage and continuous_usage_stats are true or false, and "
        "include_obfuscation false",
    )
    ignore_eos: bool = _field(False, BOOLEAN)
    response_format: ResponseFormat | None = _field(None, FORMAT)
    user: str | None = _field(None, TEXT)
    safety_identifier: str | None = _field(None, TEXT)
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = _field(
        None, "auto, default, flex, scale or priority"
    )

    @property
    def stops(self) -> list[str]:
        """The stop sequences as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def options(self, defaults: Mapping[str, float], **others: Any) -> SamplingOptions:
        """Return the sampling settings.

        Args:
          defaults: settings for the fields that the request leaves out.
          others: settings that are no fields here, such as the seed of one answer.
        """
        sent = {"temp" if name == "temperature" else name for name in self.model_fields_set}
        values: dict[str, Any] = {
            "top_p": self.top_p,
            "top_k": self.top_k,
            "temp": self.temperature,
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
        }
        values |= {key: x for key, x in defaults.items() if key not in sent}
        return SamplingOptions(**values | others)  # once, as its checks take long


class CompletionRequest(SamplingRequest):
    """The body of `POST /v1/completions`."""

    prompt: Any = _field("", PROMPT.format(MOST_CHOICES))  # the beginning of a text
    max_tokens: int = _field(16, "a whole number of at least 0", ge=0)
    best_of: int | None = _field(None, "the value of n, or no value")
    logprobs: int | None = _field(None, "a whole number from 0 to 5", ge=0, le=5)
    echo: bool = _field(False, BOOLEAN)
    suffix: Literal[""] | None = _field(None, "no text, as suffixes are not supported")


class ChatRequest(SamplingRequest):
    """The body of `POST /v1/chat/completions`.

    `max_completion_tokens` is a newer name of `max_tokens`, and `continue_final_message`,
    `add_generation_prompt` and `chat_template_kwargs` are as in vLLM.  The chat template gets the
    `tools`; calls in the answer are part of its text.  Of the last fields, many clients send the
    values that change nothing.
    """

    messages: list[Any] = _field(..., MESSAGES, min_length=1, max_length=MOST_MESSAGES)
    add_generation_prompt: bool | None = _field(None, BOOLEAN)
    continue_final_message: bool = _field(False, BOOLEAN)
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_few_keys)] | None = _field(
        None, "an object with the values of variables of the chat template"
    )
    max_tokens: int | None = _field(None, "a whole number of at least 1", ge=1)
    max_completion_tokens: int | None = _field(None, "a whole number of at least 1", ge=1)
    logprobs: bool = _field(False, BOOLEAN)
    top_logprobs: int | None = _field(
        None, f"a whole number from 0 to {ALTERNATIVES}", ge=0, le=ALTERNATIVES
    )
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = (
        _field(None, TOOLS)
    )
    functions: list[Any] | None = _field(None, NO_TOOLS, max_length=0)
    tool_choice: Literal["none", "auto"] | None = _field(None, "none or auto")
    function_call: Literal["none", "auto"] | None = _field(None, "none or auto")
    parallel_tool_calls: bool | None = _field(None, BOOLEAN)
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = (
        _field(None, "a list of no item but text")
    )
    store: Literal[False] | None = _field(None, "false, as nothing is stored")
    metadata: dict[str, Any] | None = _field(None, "no values, as nothing is stored", max_length=0)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = _field(
        None, "none, minimal, low, medium, high or xhigh"
    )
    verbosity: Literal["low", "medium", "high"] | None = _field(None, "low, medium or high")
    prompt_cache_key: str | None = _field(None, TEXT)
    prompt_cache_retention: str | None = _field(None, TEXT)

    @field_validator("messages", mode="after")
    @classmethod
    def _conversation(cls, values: list[Any]) -> list[Any]:
        return conversation(values)

    def rendering(self, takes: Callable[[str], bool]) -> dict[str, Any]:
        """Return the options of `ChatTemplate.prompt`.

        Args:
          takes: whether the chat template has a variable, by its name.

        Raises:
          ApiError: with status 400, if they contradict each other, the messages or the template.
        """
        tools = {"tools": self.tools} if self.tools and self.tool_choice != "none" else {}
        values = tools | (self.chat_template_kwargs or {})
        for name, value in values.items():
            if not takes(name):
                where = name if name == "tools" else f"chat_template_kwargs.{brief(name)}"
                raise invalid(where, value, "no value, as the chat template has no such variable")
        unfinished, add = self.continue_final_message, self.add_generation_prompt
        if unfinished and add:
            expected = "no value or false if continue_final_message is true"
            raise invalid("add_generation_prompt", add, expected)
        if unfinished and not (text := self.messages[-1]["content"]).strip():
            raise invalid(f"messages[{len(self.messages) - 1}].content", text, "a text to continue")
        return {
            "add": not unfinished if add is None else add,
            "unfinished": unfinished,
            "values": values,
        }


class EmbeddingRequest(_StrictModel):
    """The body of `POST /v1/embeddings`."""

    input: Any = _field(..., PROMPT.format(MOST_INPUTS))
    model: str | None = _field(None, TEXT)
    encoding_format: Literal["float", "base64"] = _field("float", "float or base64")
    dimensions: int | None = _field(None, "the model's d_model, or no value")
    user: str | None = _field(None, TEXT)


class ContextRequest(_StrictModel):
    """The body of `POST /complete`.

    The original mesh-transformer-jax requires `context`, `top_p` and `temp`, and has no other keys.
    Here, only `context` is required.
    """

    context: str = _field(..., TEXT)
    top_p: float = _number(PYTHON_DEFAULTS.top_p, 0, 1)
    temp: float = _number(PYTHON_DEFAULTS.temp, 0, 100)
    top_k: int = _field(TOP_K.default, str(TOP_K), ge=TOP_K.least, le=TOP_K.most)
    # Default: 512, as in the original mesh-transformer-jax, or the server's maximum if it is lower.
    length: int | None = _field(None, "a whole number of at least 1", ge=1)
    seed: int | None = _field(None, str(RANGES["seed"]), ge=0, lt=2**32)

    @field_validator("top_p", "temp", mode="before")
    @classmethod
    def _number_in_text(cls, value: Any) -> Any:
        """Return a text such as "0.9" as a number, as the original mesh-transformer-jax did."""
        with contextlib.suppress(ValueError):
            return float(value) if isinstance(value, str) else value
        return value


def parse(kind: type[Body], body: bytes) -> Body:
    """Parse a JSON body as a request of type `kind`.

    A key whose value is null is the same as no key.

    Raises:
      ApiError: with status 400, if the body is invalid; the message describes the first error.
    """
    values = _json_object(kind, body)
    fields = kind.model_fields
    if len(values) > MOST_KEYS:
        actual, expected = f"{len(values)} keys", f"at most {MOST_KEYS} in an object"
        raise ApiError(400, f"the body: found {actual}, expected {expected}")
    try:
        return kind.model_validate(values)
    except ValidationError as errors:
        first = errors.errors(include_url=False, include_context=False, include_input=False)[0]
    # Only the first item of the location is always a key that the client sent.  The other items may
    # be pydantic's names for the alternatives of a union.
    key = str(first["loc"][0])
    if key not in fields:
        raise unknown_key(key, fields)
    if key not in values:
        raise absent(key, str(fields[key].description))
    raise invalid(key, values[key], str(fields[key].description))


def _json_object(kind: type[BaseModel], body: bytes) -> dict[str, Any]:
    """Parse a request body; raise ApiError with status 400 if it is not a JSON object."""
    expected = f"a JSON object such as {json.dumps(EXAMPLES[kind])}"
    if not _few_values(body):
        actual = f"more than {MOST_VALUES} texts, lists and objects"
        raise ApiError(400, f"the body: found {actual}, expected {expected}")
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        position = re.search(r"line \d+ column \d+$", str(error))
        where = f" at {position[0]}" if position else ""
        actual = "JSON nested too deeply" if "recursion" in str(error) else "no valid JSON"
        raise ApiError(400, f"the body: found {actual}{where}, expected {expected}") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"the body: found {shown(values)}, expected {expected}")
    return values


def _few_values(body: bytes) -> bool:
    """Return whether a body in JSON has at most `MOST_VALUES` texts, lists and objects.

    This takes time in proportion to its length, during most of which other threads can run.
    """
    if body.count(b'"') // 2 + body.count(b"[") + body.count(b"{") <= MOST_VALUES:
        return True
    characters = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    quotes = characters == ord('"')
    opening = (characters == ord("[")) | (characters == ord("{"))
    opening &= ~np.logical_xor.accumulate(quotes)  # those inside a text
    return int(np.count_nonzero(quotes)) // 2 + int(np.count_nonzero(opening)) <= MOST_VALUES


EXAMPLES = {
    CompletionRequest: {"prompt": "Hello", "max_tokens": 16},
    ChatRequest: {"messages": [{"role": "user", "content": "Hello"}]},
    EmbeddingRequest: {"input": "Hello"},
    ContextRequest: {"context": "Hello", "top_p": 0.9, "temp": 0.75},
}


def answer_seed(seed: int | None, number: int) -> int:
    """Return the seed of an answer, so that no two answers to a request have the same.

    Args:
      seed: the seed of the request; None for a random one per answer.
      number: the answer's index among all answers to the request.
    """
    return secrets.randbits(32) if seed is None else (seed + number) % 2**32


def prompts_of(prompt: Any, key: str = "prompt", most: int = MOST_CHOICES) -> list[str | list[int]]:
    """Return the prompts in the field `key` as a list.

    As in OpenAI's API, the field is one prompt or a list of prompts.  A prompt is a text or a list
    of token ids.  All prompts in a list must be of the same kind.

    Raises:
      ApiError: with status 400, for any other value, or for more than `most` prompts.
    """
    prompts = [prompt] if isinstance(prompt, str) or _all(prompt, int) else prompt
    if isinstance(prompts, list) and prompts and len(prompts) <= most:
        if _all(prompts, str):
            return prompts
        if all(_all(tokens, int) for tokens in prompts):
            return prompts
    raise invalid(key, prompt, PROMPT.format(most))


def _all(values: Any, kind: type) -> bool:
    """Return whether `values` is a non-empty list of items of this very type: a bool is no int."""
    return isinstance(values, list) and bool(values) and all(type(v) is kind for v in values)
