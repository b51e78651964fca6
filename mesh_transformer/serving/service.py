"""The asyncio service between the HTTP application and the engine.

The service turns parsed HTTP requests into requests to the engine, and the engine's updates into
HTTP responses.
"""

import asyncio
import functools
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel

from mesh_transformer.data.chat import ANSWERS, ChatTemplate
from mesh_transformer.data.reasoning import Reasoning, without_marks
from mesh_transformer.data.special_tokens import end_tokens, prompt_tokens
from mesh_transformer.generation.prompts import longest_text
from mesh_transformer.generation.sampling_settings import SamplingOptions
from mesh_transformer.serving import engine as engines
from mesh_transformer.serving.answer import EMPTY, Answer, Echo, Piece, TokenOffset, TokenTexts
from mesh_transformer.serving.delivery import Updates, submit
from mesh_transformer.serving.engine import Engine
from mesh_transformer.serving.errors import ApiError, invalid
from mesh_transformer.serving.grammar import Format, Formats
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.requests import (
    MOST_CHOICES,
    ChatRequest,
    CompletionRequest,
    ContextRequest,
    SamplingRequest,
    StreamOptions,
    answer_seed,
    parse,
    prompts_of,
)
from mesh_transformer.util import InputError

# Default number of tokens per answer of `POST /complete`, as in the original mesh-transformer-jax.
ORIGINAL_LENGTH = 512
SHORT_TEXT = 4096  # texts up to this many characters are tokenized in negligible time
SHORT_BODY = 2**14  # bodies up to this many bytes are parsed in negligible time
PART_CHARACTERS = 2**16  # characters per part of a long response

Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)


class Service:
    """Answers HTTP requests to one model, with an engine that generates the tokens.

    Args:
      names: the names that requests may choose, each with the number of its adapter, 0 for none.
        The first name is the default.
      most_tokens: maximum number of tokens per answer, as far as the engine has room for them.
      template: renders conversations; None for a model that cannot chat.
      any_name: whether all other names mean the model without an adapter.
      ends: {number of an adapter: the `end_tokens` of its config}, for those whose config has some.
      sampling: the settings of `SamplingOptions` for requests of OpenAI's API that leave them out.
    """

    def __init__(
        self,
        names: Mapping[str, int],
        engine: Engine,
        tokenizer: Any,
        metrics: Metrics,
        most_tokens: int,
        template: ChatTemplate | None = None,
        any_name: bool = False,
        ends: Mapping[int, Sequence[int]] = MappingProxyType({}),
        sampling: Mapping[str, float] = MappingProxyType({}),
    ):
        self.name, self.names = next(iter(names)), names
        self._any_name, self.sampling = any_name, sampling
        self.engine = engine
        self.metrics = metrics
        self.words = TokenTexts(tokenizer, engine.network.config)
        own = end_tokens(tokenizer, None)
        self.words.ends_of = {number: own | frozenset(ids) for number, ids in ends.items()}
        window, room = engine.network.config.window, engine.room
        self.context = window if room is None else min(window, room)
        self.most_tokens = most_tokens if room is None else min(most_tokens, room - 1)
        self.template = template
        if template is not None and template.thinks:
            self.words.special = without_marks(self.words.special)
        self.created = int(time.time())
        # For work that would block the event loop.  asyncio's default executor is not used, because
        # the event loop would wait for its threads at shutdown.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._formats = Formats(self.words, engine.network.config.n_vocab, self.run_in_thread)

    def start(self) -> None:
        """Start the engine."""
        self.engine.start()

    def close(self, seconds: float) -> None:
        """Close the engine, and wait at most `seconds` seconds for it to stop."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._formats.close()
        self.engine.close(seconds)

    async def run_in_thread(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread, so that the event loop can serve other clients meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def parsed(self, kind: type[Body], body: bytes) -> Body:
        """Parse a request's body; a long one is parsed in a thread, not on the event loop."""
        work = functools.partial(parse, kind, body)
        return work() if len(body) <= SHORT_BODY else await self.run_in_thread(work)

    async def prompts(
        self, value: Any, param: str = "prompt", most: int = MOST_CHOICES
    ) -> list[str | list[int]]:
        """Return the prompts in a field of a request (see `prompts_of`)."""
        work = functools.partial(prompts_of, value, param, most)
        return work() if isinstance(value, str) else await self.run_in_thread(work)

    def adapter(self, name: str | None) -> int:
        """Return the number of the adapter that a request chooses as its model; 0 for none.

        Raises:
          ApiError: with status 404, if `name` is neither None nor a model's name.
        """
        if name is None:
            return 0
        if name not in self.names and not self._any_name:
            raise ApiError(
                404,
                f"the model {name[:80]!r} does not exist; use {' or '.join(map(repr, self.names))}",
                param="model",
                code="model_not_found",
            )
        return self.names.get(name, 0)

    async def completion(self, body: CompletionRequest) -> "Completion":
        """Begin the answers to a `POST /v1/completions` request, as in OpenAI's API.

        Raises:
          ApiError: if the request is invalid for this model, or if the engine rejects the request.
        """
        self._check_request(body)
        count, length = body.n, body.max_tokens
        if body.best_of not in (None, count):
            raise invalid("best_of", body.best_of, f"the value of n ({count}), or no value")
        if not length and not body.echo:
            raise invalid("max_tokens", length, "at least 1 unless echo is true")
        self._check_length(length, "max_tokens")
        prompts = [await self.tokens(prompt, length) for prompt in await self.prompts(body.prompt)]
        completion = Completion(self, body, await self._formats.format(body.response_format))
        self._begin(completion, body, prompts, length)
        return completion

    async def chat(self, body: ChatRequest) -> "ChatCompletion":
        """Begin the answers to a `POST /v1/chat/completions` request, as in OpenAI's API.

        By default, an answer may fill the model's context.

        Raises:
          ApiError: if the request is invalid for this model, if the chat template refuses the
            messages, or if the engine rejects the request.
        """
        assert self.template is not None
        self._check_request(body)
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", body.top_logprobs, "no value unless logprobs is true")
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        length = body.max_completion_tokens or body.max_tokens
        self._check_length(length or 1, param)
        options = body.rendering(self.template.takes)
        render = functools.partial(self.template.prompt, body.messages, **options)
        try:
            text = await self.run_in_thread(render)
        except InputError as error:
            message = f"messages: {error}; change the messages"
            raise ApiError(400, message, param="messages") from None
        prompt = await self.tokens(text, length or 1, "messages", special=False)
        if length is None:
            longest = longest_text(self.engine.network.config) or self.context
            room = min(longest, self.context) - len(prompt)
            length = max(1, min(self.most_tokens, room))
        form = await self._formats.format(body.response_format)
        continued = body.messages[-1]["content"] if body.continue_final_message else ""
        new = functools.partial(self.template.reasoning, text, continued)
        completion = ChatCompletion(self, body, form, new_reasoning=new)
        self._begin(completion, body, [prompt], length)
        return completion

    def _check_request(self, body: SamplingRequest) -> None:
        """Raise ApiError if the request names another model or an unknown token."""
        self.adapter(body.model)
        n_vocab = self.engine.network.config.n_vocab
        if max(map(int, body.logit_bias or {}), default=0) >= n_vocab:
            raise invalid("logit_bias", body.logit_bias, f"token ids from 0 to {n_vocab - 1}")

    def _begin(
        self,
        completion: "Completion",
        body: SamplingRequest,
        prompts: Sequence[np.ndarray],
        length: int,
    ) -> None:
        """Begin `body.n` answers of at most `length` tokens to each prompt."""
        room, count = self.engine.rows + self.engine.queue, body.n
        if len(prompts) * count > room:
            most = f"at most {room // len(prompts)}, as the server has room for {room} answers"
            raise invalid("n", count, most)
        adapter = self.adapter(body.model)
        numbers = itertools.count()
        for prompt in prompts:
            seeds = [answer_seed(body.seed, next(numbers)) for _ in range(count)]
            options = [body.options(self.sampling, adapter=adapter, seed=seed) for seed in seeds]
            completion.add(prompt, length, options)
        completion.begin()

    async def continuation(self, body: ContextRequest) -> "Completion":
        """Begin the answer to a `POST /complete` request, as in the original mesh-transformer-jax.

        If the context is longer than the model's window, only the context's last tokens are used.

        Raises:
          ApiError: if the request is invalid for this model, or if the engine rejects the request.
        """
        length = body.length or min(ORIGINAL_LENGTH, self.most_tokens)
        self._check_length(length, "length")
        window = self.context
        if self.engine.room is not None:
            window = min(window, self.engine.room - length)
        tokens = await self._encoded(body.context[-window * self.words.longest :])
        prompt = self._checked(tokens[-window:], length)
        seed = answer_seed(body.seed, 0)
        options = SamplingOptions(body.top_p, body.top_k, body.temp, seed=seed)
        completion = Completion(self, CompletionRequest())
        completion.add(prompt, length, [options])
        completion.begin()
        return completion

    def _check_length(self, length: int, param: str) -> None:
        if length > self.most_tokens:
            raise invalid(param, length, f"at most {self.most_tokens}")

    async def tokens(
        self, prompt: str | list[int], length: int, param: str = "prompt", *, special: bool = True
    ) -> np.ndarray:
        """Return a prompt's token ids [T].

        Args:
          prompt: a text or a list of token ids.
          length: number of tokens to generate after the prompt.
          param: the field of the request that has the prompt, for error messages.
          special: whether to add the special tokens that the tokenizer puts before a text.

        Raises:
          ApiError: if a token id is invalid, if the prompt is longer than the model's window, or if
            it and its answer together are longer than the model allows (see `longest_text`).
        """
        window = self.engine.network.config.window
        # Such a text is refused without tokenizing it, which would take long.
        too_long = isinstance(prompt, str) and len(prompt) > window * self.words.longest
        tokens = prompt
        if isinstance(prompt, str) and not too_long:
            tokens = await self._encoded(prompt, special)
        if too_long or len(tokens) > window:
            raise ApiError(
                400,
                f"{param}: {len(tokens)} {'characters' if too_long else 'tokens'}, but the model's "
                f"context is {window} tokens; shorten the {param}",
                param=param,
                code="context_length_exceeded",
            )
        assert isinstance(tokens, list)
        return self._checked(tokens, length, param)

    async def _encoded(self, text: str, special: bool = True) -> list[int]:
        """Tokenize a text; a long text is tokenized in a thread, not on the event loop."""

        def encode() -> list[int]:
            words = self.words
            return prompt_tokens(words.tokenizer, text, whole=not special, first=words.first)

        if len(text) > SHORT_TEXT:
            return await self.run_in_thread(encode)
        tokens = encode()
        await asyncio.sleep(0)  # so that many short prompts do not block the others
        return tokens

    def _checked(self, tokens: Sequence[int], length: int, param: str = "prompt") -> np.ndarray:
        """Check the token ids of a prompt, and return them as an array [T]; see `tokens`."""
        config = self.engine.network.config
        outside = [token for token in tokens if not 0 <= token < config.n_vocab]
        if outside:
            raise ApiError(
                400,
                f"{param}: token id {str(outside[0])[:20]} is outside the vocabulary of "
                f"{config.n_vocab} tokens; use the model's own tokenizer",
                param=param,
            )
        limits = {
            "this model allows": longest_text(config),
            "the server's cache has room for": self.engine.room if length else None,
        }
        for whose, longest in limits.items():
            if longest is not None and len(tokens) + length > longest:
                raise ApiError(
                    400,
                    f"{param}: {len(tokens)} tokens and {length} for the answer, but {whose} at "
                    f"most {longest} together; shorten the {param} or the answer",
                    param=param,
                    code="context_length_exceeded",
                )
        return np.array(tokens, np.int32)


class Completion:
    """The answers to one HTTP request, which arrive from the engine in pieces.

    Args:
      body: the HTTP request.
      form: the format of the answers; None if they may be any text.
      new_reasoning: returns what separates the reasoning in an answer that has no format.
    """

    _prefix, _kind, _kind_of_chunk = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        service: Service,
        body: CompletionRequest | ChatRequest,
        form: Format | None = None,
        new_reasoning: Callable[[], Reasoning | None] = lambda: None,
    ):
        self._service = service
        self._new_reasoning = new_reasoning if form is None else lambda: None
        self._body = body
        self._form = form
        self._echo = isinstance(body, CompletionRequest) and body.echo
        self._with_logprobs = body.logprobs is not None and body.logprobs is not False
        self._alternatives = int(body.logprobs or 0)  # number of tokens besides the chosen one
        self._requests: list[engines.Request] = []  # of each answer; several may share one
        self._answers: list[Answer] = []  # their texts so far, once the engine has the requests
        self._updates = Updates[Sequence[int]]()  # each with the indices of its answers
        self._head = {
            "id": f"{self._prefix}-{secrets.token_hex(12)}",
            "object": self._kind,
            "created": int(time.time()),
            "model": body.model or service.name,
        }

    def add(self, prompt: np.ndarray, length: int, options: Sequence[SamplingOptions]) -> None:
        """Add one answer to a prompt per element of `options`; `begin` starts the answers.

        Args:
          prompt: token ids [T].
          length: maximum number of tokens to generate per answer.
          options: the sampling settings of each answer.
        """
        body, form, first = self._body, self._form, len(self._requests)
        indices = range(first, first + len(options))
        groups = [[index] for index in indices] if length else [list(indices)]
        score = self._echo and (self._with_logprobs or not length)
        whole = not (body.stream or body.stops)  # a stop sequence ends its request
        stop = self._service.words.ends_with(
            body.stops,
            ends=not body.ignore_eos,
            formatted=form is not None,
            adapter=options[0].adapter,
        )
        for group in groups:
            request = engines.Request(
                prompt,
                length,
                options[group[0] - first],
                self._updates.callback(group, whole=whole),
                stop=stop,
                logprobs=self._with_logprobs,
                score=score and group[0] == first,
                constraint=None if form is None else form.copy(),
            )
            self._requests += [request] * len(group)

    def begin(self) -> None:
        """Submit all answers to the engine.

        Raises:
          ApiError: if the engine's queue is full (status 429), or the engine has stopped (503).
        """
        submit(self._service.engine, list(dict.fromkeys(self._requests)))

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield (index of the answer, piece) for the pieces of all answers, as they are generated.

        Raises:
          ApiError: if the engine has stopped (status 503), or the model fails (500).
        """
        words, stops, echoes = self._service.words, self._body.stops, dict[int, Echo]()
        for request in self._requests:
            key, numbers = id(request.prompt), request.prompt.tolist()
            if self._echo and key not in echoes:
                work = functools.partial(Echo, words, numbers)
                echoes[key] = await self._service.run_in_thread(work)
            echo, reasoning = echoes.get(key), self._new_reasoning()
            self._answers.append(
                Answer(
                    words,
                    numbers,
                    stops,
                    request.stop,
                    echo,
                    reasoning,
                    with_offsets=self._with_logprobs,
                )
            )
        running = set(range(len(self._answers)))
        while running:
            indices, progress = await self._updates.next()
            for index in running.intersection(indices):
                piece = self._answers[index].feed(progress)
                if piece.finish is not None:
                    running.discard(index)
                    self._service.engine.cancel(self._requests[index])
                if piece != EMPTY:
                    yield index, piece

    def cancel(self) -> None:
        """Cancel the answers that are still running."""
        for request in self._requests:
            self._service.engine.cancel(request)

    async def text(self) -> str:
        """Wait for all answers, and return the concatenation of their texts."""
        return "".join([piece.text async for _, piece in self._pieces()])

    async def json_response(self) -> AsyncIterator[str]:
        """Wait for all answers, then return the response, which is JSON in OpenAI's format.

        Returns:
          An iterator over consecutive parts of the JSON text, because the text may be long.
        """
        joined = [Piece("", []) for _ in self._requests]
        async for index, piece in self._pieces():
            whole = joined[index]
            whole.text += piece.text
            whole.reasoning += piece.reasoning
            whole.token_offsets += piece.token_offsets
            whole.finish = piece.finish
        choices = (self._choice(index, piece) for index, piece in enumerate(joined))
        return json_parts(self._head, "choices", choices, {"usage": self.usage()})

    async def events(self) -> AsyncIterator[str]:
        """Yield the answers as server-sent events in OpenAI's format."""
        options = self._body.stream_options or StreamOptions()
        usage = options.include_usage

        def so_far() -> dict[str, Any]:
            if not usage:
                return {}
            return {"usage": self.usage() if options.continuous_usage_stats else None}

        head = self._head | {"object": self._kind_of_chunk}
        try:
            async for index, piece in self._pieces():
                yield _event(head | {"choices": [self._chunk(index, piece)]} | so_far())
        except ApiError as error:
            yield _event(error.body())
            return
        if usage:
            yield _event(head | {"choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.token_offsets),
            "finish_reason": piece.finish,
        }

    def _chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the choice in an event with a piece of an answer."""
        return self._choice(index, piece)

    def _logprobs(self, token_offsets: Sequence[TokenOffset]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        words, count = self._service.words, self._alternatives
        return {
            "tokens": [words[spot.token.number] for spot in token_offsets],
            "token_logprobs": [spot.token.logprob for spot in token_offsets],
            "top_logprobs": [_top(words, spot, count) for spot in token_offsets],
            "text_offset": [spot.offset for spot in token_offsets],
        }

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens of the prompts and of the answers so far, and their sum."""
        # A prompt with several answers is counted once, as in OpenAI's API.
        prompts = {id(request.prompt): len(request.prompt) for request in self._requests}
        cached = dict(prompts)
        for request in self._requests:
            name = id(request.prompt)
            cached[name] = min(cached[name], request.cached)
        prompt, completion = sum(prompts.values()), sum(answer.tokens for answer in self._answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }


class ChatCompletion(Completion):
    """The answers to a `POST /v1/chat/completions` request; see `Completion`."""

    _prefix, _kind, _kind_of_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest, form: Format | None, **options: Any):
        super().__init__(service, body, form, **options)
        self._alternatives = body.top_logprobs or 0
        self._streamed = set[int]()  # indices of the answers that have begun

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._part(index, piece, message={"role": ANSWERS, "refusal": None} | _texts(piece))

    def _chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        role = {} if index in self._streamed else {"role": ANSWERS}
        self._streamed.add(index)
        return self._part(index, piece, delta=role | _texts(piece))

    def _part(self, index: int, piece: Piece, **text: Any) -> dict[str, Any]:
        logprobs = self._logprobs(piece.token_offsets)
        return {"index": index, **text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _logprobs(self, token_offsets: Sequence[TokenOffset]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        tokens = [spot.token for spot in token_offsets]
        return {
            "content": [
                self._token(token.number, token.logprob)
                | {"top_logprobs": [self._token(*top) for top in token.top[: self._alternatives]]}
                for token in tokens
            ]
        }

    def _token(self, number: int, logprob: float | None) -> dict[str, Any]:
        word = self._service.words[number]
        return {"token": word, "logprob": logprob, "bytes": self._service.words.bytes_of(number)}


def _texts(piece: Piece) -> dict[str, Any]:
    reasoning = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
    return {"content": piece.text} | reasoning


def _top(words: TokenTexts, spot: TokenOffset, count: int) -> dict[str, float] | None:
    """Return {token text: logprob} for the token of `spot` and the `count` most likely tokens.

    Returns None if the token has no logprob, such as the first token of a prompt.
    """
    if spot.token.logprob is None:
        return None
    top = {words[number]: logprob for number, logprob in spot.token.top[:count]}
    return top | {words[spot.token.number]: spot.token.logprob}


async def json_parts(
    head: Mapping[str, Any], key: str, items: Iterable[Any], tail: Mapping[str, Any]
) -> AsyncIterator[str]:
    """Yield a JSON object in parts of about `PART_CHARACTERS` characters.

    Its keys are those of `head`, then `key` with a list of `items`, and those of `tail`.
    """
    part = json.dumps(head)[:-1] + f', "{key}": ['
    for index, item in enumerate(items):
        part += (", " if index else "") + json.dumps(item)
        if len(part) > PART_CHARACTERS:
            yield part
            part = ""
            await asyncio.sleep(0)  # so that one fast client cannot block the others
    yield f"{part}], {json.dumps(tail)[1:]}"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
