"""Continuous batching: requests join and leave a running batch, a token at a time.

One worker thread drives the network.  Between two calls of `decode` it lets at most one call of
prefill (or of scoring) in, so that those who already have their prompt read wait for no more.
"""

import collections
import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from mesh_transformer.generation.sampling import SamplingOptions
from mesh_transformer.network import Batch, Network
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.util import bucket

ALTERNATIVES = 5  # likeliest tokens told to a request that asks for logprobs
PREFILL_SIZES = (4, 2, 1)  # prompts in one prefill call, the largest that fits; each is compiled
PREFILL_TOKENS = 512  # more in one call, padding included, only where one prompt alone has more
SHORTEST = 16  # the narrowest width that texts are padded to
STOPPING = "the server is stopping"
STALL_SECONDS = 60.0  # after which a call of the network counts as stuck

log = logging.getLogger(__name__)


class Token(NamedTuple):
    """A token and, where asked for, what the model thought of it, in nats."""

    number: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, best first


class Progress(NamedTuple):
    """News of a request.  `prompt`, where it is to be scored, comes once, ahead of all tokens."""

    tokens: Sequence[Token] = ()
    prompt: list[Token] | None = None
    ended: bool = False
    error: Exception | None = None


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt to continue.

    Attributes:
      prompt: token ids [T].
      length: how many tokens it may have; 0 only with `score`.
      deliver: takes each `Progress`, in the worker's thread; must return at once.
      stop: the token that ends the text early, itself included.
      logprobs: whether tokens come with their logprobs.
      score: whether the prompt's own tokens are told, with theirs.
    """

    prompt: np.ndarray
    length: int
    settings: SamplingOptions
    deliver: Callable[[Progress], None]
    stop: int | None = None
    logprobs: bool = False
    score: bool = False
    cancelled: bool = False
    began: float = dataclasses.field(default_factory=time.perf_counter)
    made: int = 0


class QueueFullError(Exception):
    """No room; `retry_after` is in whole seconds."""

    def __init__(self, waiting: int, retry_after: int):
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after} s")
        self.retry_after = retry_after


class StoppedEngineError(Exception):
    """The engine serves no more requests: it is closing, or its network has failed for good."""


class Engine:
    """Serves requests on a network, many at once.

    A request's tokens depend on its own prompt, settings and seed alone.

    Args:
      rows: how many requests run side by side; a multiple of the network's replicas.
      queue: how many more may wait.
      steps: tokens that each row advances between looks at the queue.
      stall_seconds: how long one turn (a prefill or scoring call and a decode call) may take
        before the engine counts as stalled.  Turns compile nothing after `warm_up`.
    """

    def __init__(
        self,
        network: Network,
        metrics: Metrics,
        *,
        rows: int = 16,
        queue: int = 256,
        steps: int = 4,
        stall_seconds: float = STALL_SECONDS,
    ):
        self.network = network
        self.rows = rows
        self.queue = queue
        self.steps = steps
        self.stall_seconds = stall_seconds
        self.failure: Exception | None = None
        self._metrics = metrics
        self._waiting: collections.deque[Request] = collections.deque()
        self._taken: list[Request] = []  # from those who waited, on their way to a row
        self._active: dict[int, Request] = {}
        self._finished: collections.deque[float] = collections.deque(maxlen=32)  # when
        self._turn_began: float | None = None  # while one is under way
        self._closing = False
        self._wake = threading.Condition()
        self._batch = self._new_batch()
        self._worker = threading.Thread(target=self._run, name="engine", daemon=True)
        metrics.watch(waiting=lambda: self.waiting, active=lambda: self.active)

    @property
    def waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Rows with a request."""
        return len(self._active)

    @property
    def trouble(self) -> str | None:
        """Why no answers can be expected at present, or None: a failed or a stalled network."""
        if self.failure is not None:
            return str(self.failure)
        began = self._turn_began
        seconds = 0.0 if began is None else time.monotonic() - began
        if seconds <= self.stall_seconds:
            return None
        return f"the network has not answered for {seconds:.0f} s (limit {self.stall_seconds:g} s)"

    def start(self) -> None:
        """Begins to serve."""
        self._worker.start()

    def warm_up(self) -> None:
        """Compiles what requests will need, so that none has to wait for it; ahead of them all."""
        config = self.network.config
        window = config.window
        widths = [min(SHORTEST * 2**n, window) for n in range(window.bit_length())]
        widths = list(dict.fromkeys(widths))
        for width in tqdm(widths, desc="compiling", unit="width", file=sys.stderr, leave=False):
            self._scored(np.zeros(min(width, config.seq), np.int32))
            # With pe fixed the first token of the answer needs a position too.
            prompt = np.zeros(width - (config.pe == "fixed"), np.int32)
            for size in PREFILL_SIZES:
                if size == 1 or (size <= self.rows and size * width <= PREFILL_TOKENS):
                    settings = SamplingOptions.stacked([SamplingOptions()] * size)
                    prompts, lengths = [prompt] * size, np.ones(size, np.int32)
                    self._batch.insert(
                        range(size), prompts, lengths, settings, alternatives=ALTERNATIVES
                    )
        for alternatives in (None, ALTERNATIVES):
            self._batch.decode(1, alternatives)

    def submit(self, requests: Sequence[Request]) -> None:
        """Takes all of the requests or none.

        Raises:
          QueueFullError: where not all of them find room.
          StoppedEngineError: where none will be served any more.
        """
        with self._wake:
            if self._closing or self.failure is not None:
                raise StoppedEngineError(STOPPING)
            free = self.rows - len(self._active) - len(self._taken)
            if len(self._waiting) + len(requests) > self.queue + max(free, 0):
                raise QueueFullError(len(self._waiting), self._retry_after())
            self._waiting.extend(requests)
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        """Lets a request go; nothing more of it is delivered after what is on its way."""
        with self._wake:
            request.cancelled = True
            if request in self._waiting:
                self._waiting.remove(request)

    def close(self, seconds: float | None = None) -> bool:
        """Takes no more requests and serves those it has taken to the end.

        Args:
          seconds: how long to wait for that (None: for ever).

        Returns:
          Whether the engine has ended.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._worker.is_alive():
            self._worker.join(seconds)
        return not self._worker.is_alive()

    def _retry_after(self) -> int:
        """About when a place is free, from how fast the last requests ended."""
        if len(self._finished) < 2:
            return 1
        rate = len(self._finished) / max(time.perf_counter() - self._finished[0], 1e-3)
        return min(max(round(1 / rate), 1), 60)

    def _new_batch(self) -> Batch:
        batch = self.network.batch(self.rows)
        batch.reserve(self.network.config.window)  # now, as growing would compile anew
        return batch

    def _run(self) -> None:
        while self.failure is None:
            with self._wake:
                while not (self._waiting or self._active or self._closing):
                    self._wake.wait()
                if self._closing and not (self._waiting or self._active):
                    return
                self._taken = self._take()
            self._turn_began = time.monotonic()
            try:
                self._turn()
            except Exception as error:  # whatever the device says, those who wait must hear
                log.exception("the network failed; the requests that it was serving end")
                self._turn_began = None  # compiling again may take its time
                self._end_running(error)
                if self._closing:
                    self._fail(error)
                else:
                    self._start_over()
            self._turn_began = None

    def _end_running(self, error: Exception) -> None:
        """Delivers an error to the requests that were being served."""
        served = set(self._taken) | set(self._active.values())
        self._taken = []
        self._active.clear()
        for request in served:
            self._deliver(request, Progress(ended=True, error=error))

    def _start_over(self) -> None:
        """Makes a new batch; the engine stops for good where that fails."""
        try:
            self._batch = self._new_batch()
            self.warm_up()  # hosts that started again know no program yet
        except Exception as failure:  # whatever the device says, those who wait must hear
            log.exception("no new batch can be made; the engine stops")
            self._fail(failure)

    def _fail(self, failure: Exception) -> None:
        """Stops the engine and refuses the requests that wait."""
        with self._wake:
            self.failure = failure
            waiting = list(self._waiting)
            self._waiting.clear()
        stopped = StoppedEngineError(STOPPING)
        stopped.__cause__ = failure
        for request in waiting:
            self._deliver(request, Progress(ended=True, error=stopped))

    def _deliver(self, request: Request, progress: Progress) -> None:
        if not request.cancelled:
            request.deliver(progress)

    def _take(self) -> list[Request]:
        """The first of those who wait: one to be scored, or as many as one prefill call takes."""
        if self._waiting and self._waiting[0].score:
            return [self._waiting.popleft()]
        free = sum(request.cancelled for request in self._active.values())
        free += self.rows - len(self._active)
        longest, fitting = 0, 0
        for request in self._waiting:
            longest = max(longest, len(request.prompt))
            crowded = fitting and longest * (fitting + 1) > PREFILL_TOKENS
            if request.score or crowded or fitting == free:
                break
            fitting += 1
        size = next((size for size in PREFILL_SIZES if size <= fitting), 0)
        return [self._waiting.popleft() for _ in range(size)]

    def _turn(self) -> None:
        for row in [row for row, request in self._active.items() if request.cancelled]:
            self._free(row)
        taken = self._taken
        if taken and taken[0].score:
            self._score(taken[0])
        elif taken:
            self._prefill(taken)
        self._taken = []
        if self._active:
            self._decode()

    def _score(self, request: Request) -> None:
        """Tells what the model thinks of a prompt, whose first token follows nothing."""
        found = self._scored(request.prompt)
        self._metrics.prompt_tokens(len(request.prompt))
        prompt = [Token(int(request.prompt[0])), *_tokens(found)]
        self._deliver(request, Progress(prompt=prompt, ended=request.length == 0))
        request.score = False
        if request.length and not request.cancelled:
            with self._wake:
                self._waiting.appendleft(request)  # it was the first

    def _scored(self, text: np.ndarray) -> Any:
        """What the network thinks of each token of a text but the first."""
        width = bucket(len(text) - 1, SHORTEST, self.network.config.seq)
        padded = np.zeros((1, width + 1), np.int32)
        padded[0, : len(text)] = text
        return _part(self.network.score(padded, ALTERNATIVES), (0, slice(len(text) - 1)))

    def _prefill(self, taken: list[Request]) -> None:
        began = time.perf_counter()
        rows = [row for row in range(self.rows) if row not in self._active][: len(taken)]
        chosen = self._batch.insert(
            rows,
            [request.prompt for request in taken],
            np.array([request.length for request in taken], np.int32),
            SamplingOptions.stacked([request.settings for request in taken]),
            alternatives=ALTERNATIVES,  # always: one program less for each width
        )
        now = time.perf_counter()
        self._metrics.prefill(now - began, sum(len(request.prompt) for request in taken))
        for at, (row, request) in enumerate(zip(rows, taken, strict=True)):
            self._metrics.first_token(now - request.began)
            self._active[row] = request
            self._advance(row, request, _tokens(_part(chosen, slice(at, at + 1))))

    def _decode(self) -> None:
        began = time.perf_counter()
        left = [request.length - request.made for request in self._active.values()]
        # With others waiting no row may stand idle for long.
        steps = min(self.steps, min(left) if self._waiting else max(left))
        wanted = any(request.logprobs for request in self._active.values())
        chosen = self._batch.decode(steps, ALTERNATIVES if wanted else None)
        self._metrics.decode(time.perf_counter() - began, steps)
        for row, request in list(self._active.items()):
            ahead = min(steps, request.length - request.made)
            self._advance(row, request, _tokens(_part(chosen, (row, slice(ahead)))))

    def _advance(self, row: int, request: Request, tokens: list[Token]) -> None:
        """Delivers a row's new tokens, and frees the row if it is done."""
        stops = [at for at, token in enumerate(tokens, 1) if token.number == request.stop]
        tokens = tokens[: min(stops, default=None)]
        request.made += len(tokens)
        ended = bool(stops) or request.made == request.length
        self._metrics.made(len(tokens))
        if ended:
            self._free(row)
            self._finished.append(time.perf_counter())
        if not request.logprobs:
            tokens = [Token(token.number) for token in tokens]
        self._deliver(request, Progress(tokens=tokens, ended=ended))

    def _free(self, row: int) -> None:
        """Makes a row idle: it takes no more tokens, and its settings delay no other row."""
        del self._active[row]
        self._batch.release([row])


def _part(chosen: Any, at: Any) -> Any:
    return type(chosen)(*(None if x is None else x[at] for x in chosen))


def _tokens(chosen: Any) -> list[Token]:
    """Tokens [M] with or without their logprobs [M] and alternatives [M, N]."""
    if chosen.logprob is None:
        return [Token(number) for number in chosen.token.tolist()]
    tops = zip(chosen.top_token.tolist(), chosen.top_logprob.tolist(), strict=True)
    return [
        Token(number, logprob, tuple(zip(*top, strict=True)))
        for number, logprob, top in zip(
            chosen.token.tolist(), chosen.logprob.tolist(), tops, strict=True
        )
    ]
