"""From a checked request to the engine and back, in asyncio."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request

from mesh_transformer.generation.sampling import OPENAI, SamplingOptions
from mesh_transformer.serving import engine as engines
from mesh_transformer.serving.answer import Answer, Echo, Piece, Spot, Words
from mesh_transformer.serving.engine import Engine, QueueFullError, StoppedEngineError
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.requests import (
    ApiError,
    CompletionRequest,
    ContextRequest,
    prompts_of,
)

ORIGINAL_LENGTH = 512
SHORT_TEXT = 4096  # characters that the tokenizer takes no noticeable time for
PART_CHARACTERS = 2**16  # of a long answer that are written at once

Result = TypeVar("Result")


class Service:
    """A model that answers requests.

    Args:
      name: the model's, as clients ask for it.
      most_tokens: that one answer may have.
    """

    def __init__(
        self, name: str, engine: Engine, tokenizer: Any, metrics: Metrics, most_tokens: int
    ):
        self.name = name
        self.engine = engine
        self.metrics = metrics
        self.words = Words(tokenizer)
        self.most_tokens = most_tokens
        self.created = int(time.time())
        # For what would keep the event loop busy: not asyncio's own, which exit waits for.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="text")

    def start(self) -> None:
        """Begins to answer."""
        self.engine.start()

    def close(self, seconds: float) -> None:
        """Ends the engine; gives up after so many seconds."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.engine.close(seconds)

    async def beside(self, work: Callable[[], Result]) -> Result:
        """Runs `work` in a thread, while the event loop serves others."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a name that is not this model's."""
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"the model {name[:80]!r} is not here; {self.name!r} is",
                param="model",
                code="model_not_found",
            )

    async def completion(self, asked: CompletionRequest) -> "Completion":
        """Begins OpenAI's completion.

        Raises:
          ApiError: where the request asks for what cannot be done, or there is no room for it.
        """
        self.check_model(asked.model)
        count = asked.n or 1
        if asked.best_of not in (None, count):
            raise ApiError(400, f"best_of: expected n ({count}), or nothing", param="best_of")
        length = 16 if asked.max_tokens is None else asked.max_tokens
        if not length and not asked.echo:
            raise ApiError(400, "max_tokens: 0 goes with echo alone", param="max_tokens")
        self._check_length(length, "max_tokens")
        prompts = [await self._tokens(prompt, length) for prompt in prompts_of(asked.prompt)]
        if len(prompts) * count > self.engine.rows + self.engine.queue:
            raise ApiError(
                400, f"n: {count} answers to {len(prompts)} prompts never find room", param="n"
            )
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        options = SamplingOptions(
            top_p=OPENAI.top_p if asked.top_p is None else asked.top_p,
            top_k=asked.top_k,
            temp=OPENAI.temp if asked.temperature is None else asked.temperature,
            repetition_penalty=asked.repetition_penalty,
        )
        completion = Completion(self, asked)
        seeds = [(seed + number) % 2**32 for number in range(count)]
        for prompt in prompts:
            completion.add(prompt, length, [dataclasses.replace(options, seed=s) for s in seeds])
        completion.begin()
        return completion

    async def continuation(self, asked: ContextRequest) -> "Completion":
        """Begins what the original's server did: of a long context its end is used."""
        length = asked.length or min(ORIGINAL_LENGTH, self.most_tokens)
        self._check_length(length, "length")
        window = self.engine.network.config.window
        tokens = await self._encoded(asked.context[-window * self.words.longest :])
        prompt = self._checked(tokens[-window:], length)
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        options = SamplingOptions(asked.top_p, asked.top_k, asked.temp, seed=seed)
        completion = Completion(self, CompletionRequest())
        completion.add(prompt, length, [options])
        completion.begin()
        return completion

    def _check_length(self, length: int, param: str) -> None:
        if length > self.most_tokens:
            raise ApiError(
                400, f"{param}: {length}, expected at most {self.most_tokens}", param=param
            )

    async def _tokens(self, prompt: str | list[int], length: int) -> np.ndarray:
        """A prompt's tokens, all of which the model can see."""
        window = self.engine.network.config.window
        # Before the tokenizer, which a text of this length would keep busy.
        too_long = isinstance(prompt, str) and len(prompt) > window * self.words.longest
        tokens = prompt
        if isinstance(prompt, str) and not too_long:
            tokens = await self._encoded(prompt)
        if too_long or len(tokens) > window:
            raise ApiError(
                400,
                f"prompt: {len(tokens)} {'characters' if too_long else 'tokens'}, but the model's "
                f"context is {window} tokens; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )
        assert isinstance(tokens, list)
        return self._checked(tokens, length)

    async def _encoded(self, text: str) -> list[int]:
        def encode() -> list[int]:
            return self.words.tokenizer(text)["input_ids"]

        tokens = encode() if len(text) <= SHORT_TEXT else await self.beside(encode)
        # A model of text starts at an end of text: an empty prompt is one.
        return tokens or [self.words.end or 0]

    def _checked(self, tokens: Sequence[int], length: int) -> np.ndarray:
        config = self.engine.network.config
        outside = [token for token in tokens if not 0 <= token < config.n_vocab]
        if outside:
            raise ApiError(
                400,
                f"prompt: token id {str(outside[0])[:20]} is outside the vocabulary of "
                f"{config.n_vocab}",
                param="prompt",
            )
        if config.pe == "fixed" and len(tokens) + length > config.seq:
            raise ApiError(
                400,
                f"prompt: {len(tokens)} + {length} tokens, but the model has positions for "
                f"{config.seq}",
                param="prompt",
                code="context_length_exceeded",
            )
        return np.array(tokens, np.int32)


@dataclasses.dataclass
class _Choice:
    """One of a completion's answers; `answer` is made when the engine has taken its request."""

    prompt: np.ndarray
    request: engines.Request
    answer: Answer | None = None


class Completion:
    """The answers to one request of a client, as the engine makes them."""

    def __init__(self, service: Service, asked: CompletionRequest):
        self._service = service
        self._asked = asked
        self._choices: list[_Choice] = []
        self._news: asyncio.Queue[tuple[Sequence[int], engines.Progress]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }

    def add(self, prompt: np.ndarray, length: int, options: Sequence[SamplingOptions]) -> None:
        """One more answer per options, all to one prompt, to be begun with the others.

        The prompt is scored once; answers of no tokens are one request.
        """
        asked, first = self._asked, len(self._choices)
        indices = range(first, first + len(options))
        groups = [[index] for index in indices] if length else [list(indices)]
        score = bool(asked.echo) and (asked.logprobs is not None or not length)
        for group in groups:
            request = engines.Request(
                prompt,
                length,
                options[group[0] - first],
                functools.partial(self._deliver, group),
                stop=None if asked.ignore_eos else self._service.words.end,
                logprobs=asked.logprobs is not None,
                score=score and group[0] == first,
            )
            self._choices += [_Choice(prompt, request) for _ in group]

    def _deliver(self, indices: Sequence[int], progress: engines.Progress) -> None:
        # The loop is closed where the server was made to end before its requests did.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._news.put_nowait, (indices, progress))

    def begin(self) -> None:
        """Hands all answers to the engine; raises ApiError where it does not take them."""
        requests = {id(choice.request): choice.request for choice in self._choices}
        try:
            self._service.engine.submit(list(requests.values()))
        except QueueFullError as error:
            headers = {"Retry-After": str(error.retry_after)}
            raise ApiError(429, str(error), code="queue_full", headers=headers) from None
        except StoppedEngineError as error:
            raise _stopped(error) from None

    async def _answers(self) -> list[Answer]:
        """An answer per choice; what a prompt's echo takes to compute is done beside the loop."""
        words, echoes = self._service.words, dict[int, Echo]()
        for choice in self._choices:
            key = id(choice.prompt)
            if self._asked.echo and key not in echoes:
                numbers = choice.prompt.tolist()
                echoes[key] = await self._service.beside(functools.partial(Echo, words, numbers))
            choice.answer = Answer(words, self._asked.stops, choice.request.stop, echoes.get(key))
        return [choice.answer for choice in self._choices if choice.answer is not None]

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(index, piece) of all answers, as they come."""
        answers = await self._answers()
        running = set(range(len(answers)))
        while running:
            indices, progress = await self._news.get()
            if isinstance(progress.error, StoppedEngineError):
                raise _stopped(progress.error) from progress.error
            if progress.error is not None:
                raise ApiError(500, "the model failed while it answered") from progress.error
            for index in running.intersection(indices):
                piece = answers[index].feed(progress)
                if piece.finish is not None:
                    running.discard(index)
                    self._service.engine.cancel(self._choices[index].request)
                if piece.text or piece.spots or piece.finish is not None:
                    yield index, piece

    def cancel(self) -> None:
        """Ends what is still running of it."""
        for choice in self._choices:
            self._service.engine.cancel(choice.request)

    async def text(self) -> str:
        """All of the text; of several answers, joined."""
        return "".join([piece.text async for _, piece in self._pieces()])

    async def whole(self) -> AsyncIterator[str]:
        """OpenAI's answer as one JSON object, once it is complete: in parts, as it may be long."""
        joined = [Piece("", []) for _ in self._choices]
        async for index, piece in self._pieces():
            whole = joined[index]
            whole.text += piece.text
            whole.spots += piece.spots
            whole.finish = piece.finish
        return self._parts(joined)

    async def _parts(self, joined: Sequence[Piece]) -> AsyncIterator[str]:
        part = json.dumps(self._head)[:-1] + ', "choices": ['
        for index, piece in enumerate(joined):
            part += (", " if index else "") + json.dumps(self._choice(index, piece))
            if len(part) > PART_CHARACTERS:
                yield part
                part = ""
                await asyncio.sleep(0)  # a client that reads fast must not keep others waiting
        yield part + f'], "usage": {json.dumps(self._usage())}}}'

    async def events(self) -> AsyncIterator[str]:
        """OpenAI's answer as server-sent events."""
        usage = self._asked.stream_options and self._asked.stream_options.include_usage
        more = {"usage": None} if usage else {}
        try:
            async for index, piece in self._pieces():
                yield _event(self._head | {"choices": [self._choice(index, piece)]} | more)
        except ApiError as error:
            yield _event(error.body())
            return
        if usage:
            yield _event(self._head | {"choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.spots),
            "finish_reason": piece.finish,
        }

    def _logprobs(self, spots: Sequence[Spot]) -> dict[str, Any] | None:
        count = self._asked.logprobs
        if count is None:
            return None
        words = self._service.words
        return {
            "tokens": [words[spot.token.number] for spot in spots],
            "token_logprobs": [spot.token.logprob for spot in spots],
            "top_logprobs": [_top(words, spot, count) for spot in spots],
            "text_offset": [spot.offset for spot in spots],
        }

    def _usage(self) -> dict[str, int]:
        # A prompt that is answered several times counts once, as at OpenAI.
        prompts = {id(choice.prompt): len(choice.prompt) for choice in self._choices}
        prompt = sum(prompts.values())
        completion = sum(choice.answer.tokens for choice in self._choices if choice.answer)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def _stopped(error: StoppedEngineError) -> ApiError:
    return ApiError(503, str(error), headers={"Retry-After": "10"})


def _top(words: Words, spot: Spot, count: int) -> dict[str, float] | None:
    """The likeliest tokens, and the token itself besides where it is none of them."""
    if spot.token.logprob is None:
        return None
    top = {words[number]: logprob for number, logprob in spot.token.top[:count]}
    return top | {words[spot.token.number]: spot.token.logprob}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


async def unless_gone(
    request: Request, work: Coroutine[Any, Any, Any], completion: Completion
) -> Any:
    """What `work` returns; a completion that ends early, as when the client leaves, is cancelled.

    Raises:
      ClientDisconnect: where there is nobody to answer.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        completion.cancel()
