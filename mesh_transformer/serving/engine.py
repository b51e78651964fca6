"""Continuous batching: requests join and leave a batch while its other requests are running.

One worker thread runs the network for all requests.  Between two decode calls, the thread makes at
most one prefill or scoring call, which limits the delay for the requests that are already in the
batch.  A long prompt is inserted in chunks, one per call.  Chunks and the prompts of other requests
take turns.

A request joins the batch once the pool has enough pages for its prompt and answer.
"""

import collections
import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mesh_transformer.generation.finite import NO_TOKEN
from mesh_transformer.network import Network
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.prefill import (
    ALTERNATIVES,
    CHUNK,
    MIN_WIDTH,
    PREFILL_SIZES,
    Prefiller,
    allowed_in,
)
from mesh_transformer.serving.progress import Constraint as Constraint  # public in this module
from mesh_transformer.serving.progress import (
    ConstraintError,
    Progress,
    Request,
    Token,
    part_of,
    tokens_of,
)
from mesh_transformer.serving.speculation import Speculation
from mesh_transformer.serving.warm_up import WarmUp
from mesh_transformer.util import InputError, NonFiniteError, bucket, start_thread

STOPPING = "the server is stopping"
# While requests run, chunks take at most this share of a decode call's time, as far as possible,
# and the decode calls between them make half as many steps.
CHUNK_SHARE = 0.75
STALL_SECONDS = 60.0  # default time after which a turn of the engine counts as stalled
READ_TOKENS = 8192  # up to so many, programs that score or embed a text are compiled in advance
# Time after a request in which no program is compiled in advance, as the next message of a
# conversation should not wait for it.
QUIET_SECONDS = 30.0
COMPILING = 10  # how many times as long a turn may take while some programs are not compiled

log = logging.getLogger(__name__)


class QueueFullError(Exception):
    """The engine's queue has no room for the submitted requests.

    Attributes:
      retry_after: estimated time until the queue has room, in whole seconds.
    """

    def __init__(self, waiting: int, retry_after: int):
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after} s")
        self.retry_after = retry_after


class StoppedEngineError(Exception):
    """The engine accepts no more requests: it is closing, or its network has failed permanently."""


class Engine:
    """A worker thread that runs a network for many requests at once.

    A request's tokens depend only on its own prompt, settings and seed.

    Args:
      rows: maximum number of requests in the batch; a multiple of the network's number of replicas.
      queue: maximum number of waiting requests.
      steps: maximum number of tokens per row in a decode call.  New requests join the batch only
        between decode calls.
      speculate: number of tokens to guess per decode step (see `Batch.decode`); 0 for none.  While
        guesses do not save time, most calls make none; with `fixed_shapes`, all calls do.  If the
        network has a draft, the draft guesses.
      chunk: maximum number of tokens of a prompt per prefill call.
      kept_tokens: number of kept prompt tokens that each replica has room for; None for 4 windows.
      cache_tokens: number of tokens, of rows and kept prompts together, that each replica has room
        for; None lets every row have as many as the window.
      fixed_shapes: whether to compute each prompt alone, in equal chunks, so that an answer does
        not depend on other requests even by rounding.
      host_bytes: bytes of host memory for kept prompts that no longer fit in the devices' memory.
      pooling: how a prompt's vector is made (see `Network.embed`); None: no request may
        set `embed`.
      stall_seconds: time after which `health_problem` reports that a turn (a prefill or scoring
        call, then a decode call) has stalled.  Until `warm_up` has compiled all programs, a turn
        may include compilations, and the limit is 10 times as high.

    Attributes:
      failure: the exception that has stopped the engine permanently, or None.
    """

    def __init__(
        self,
        network: Network,
        metrics: Metrics,
        *,
        rows: int = 16,
        queue: int = 256,
        steps: int = 4,
        speculate: int = 0,
        chunk: int = CHUNK,
        kept_tokens: int | None = None,
        cache_tokens: int | None = None,
        fixed_shapes: bool = False,
        host_bytes: int = 0,
        pooling: str | None = None,
        stall_seconds: float = STALL_SECONDS,
    ):
        self.network = network
        self.rows = rows
        self.queue = queue
        self.steps = steps
        self.pooling = pooling
        self.stall_seconds = stall_seconds
        self._fixed = fixed_shapes
        self._speculation = Speculation(speculate, metrics, always=fixed_shapes)
        self._new_prefiller = functools.partial(
            Prefiller,
            network,
            metrics,
            rows,
            chunk=chunk,
            kept_tokens=kept_tokens,
            cache_tokens=cache_tokens,
            fixed_shapes=fixed_shapes,
            guesses=speculate,
            host_bytes=host_bytes,
            warming_up=lambda: self._warm_up.left > 0,
        )
        self._prefiller = self._new_prefiller()
        self.failure: Exception | None = None
        self._bad_weights: str | None = None  # "" if they are finite; None if nobody has looked
        self._metrics = metrics
        self._waiting: collections.deque[Request] = collections.deque()
        self._admitted: list[Request] = []  # taken from the queue, but not yet in a row
        self._filling: collections.deque[Request] = collections.deque()  # inserted in chunks
        self._active: dict[int, Request] = {}  # the requests that generate, by row
        self._chunks_first = False  # whether chunks have precedence over new requests
        self._step_seconds = 0.0  # the time of a decode step, in the most recent call
        self._finished: collections.deque[float] = collections.deque(maxlen=32)  # recent times
        self._turn_began: float | None = None  # None between turns
        self._last_turn = -math.inf  # when the last one ended
        self._warm_up = WarmUp()
        self._closing = False
        # Guards `_waiting`, `failure` and `_closing`.  The worker alone changes the requests that
        # it serves; `submit` only counts them, and may be wrong by those of the present turn.
        self._wake = threading.Condition()
        self._worker: threading.Thread | None = None
        metrics.waiting.set_function(lambda: self.waiting)
        metrics.active.set_function(lambda: self.active)
        metrics.used_tokens.set_function(lambda: self._prefiller.used_tokens)

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Number of batch rows with a request."""
        return len(self._active) + len(self._filling)

    @property
    def room(self) -> int | None:
        """Number of tokens that a prompt and its answer may have together; None for no limit."""
        return self._prefiller.room

    @property
    def capacity(self) -> str:
        """See `Prefiller.capacity`."""
        return self._prefiller.capacity

    @property
    def health_problem(self) -> str | None:
        """Why the network cannot answer now (it failed, stalls or is not finite), or None."""
        if self.failure is not None or self._bad_weights:
            return str(self.failure or self._bad_weights)
        began = self._turn_began
        seconds = 0.0 if began is None else time.monotonic() - began
        limit = self.stall_seconds * (COMPILING if self._warm_up.left else 1)
        if seconds <= limit:
            return None
        return f"the network has not answered for {seconds:.0f} s (limit {limit:g} s)"

    def start(self) -> None:
        """Start the worker thread."""
        self._worker = start_thread(self._run, name="engine", failed=self._fail)

    def warm_up(self, *, wait: bool = True) -> None:
        """Compile the programs that requests will need, with a progress bar.

        Call this before `start`.

        Args:
          wait: whether to compile all programs now.  If not, only those that every request needs
            are compiled now, and the worker thread compiles the others one by one while it has had
            no requests for `QUIET_SECONDS`: first those that can be used for all prompts, then
            those for short ones.
        """
        now, later = self._decode_programs(), self._other_programs()
        if wait:
            now, later = [*now, *later], []
        self._warm_up.begin(now, later)

    def _decode_programs(self) -> list[Callable[[], Any]]:
        """Return functions that each compile a program for decode calls."""
        batch = self._prefiller.batch
        # In fixed shapes, a request for logprobs must not change the program of the others.
        return [
            functools.partial(batch.decode, 1, alternatives, speculate=speculate, allowed={})
            for alternatives in ((ALTERNATIVES,) if self._fixed else (None, ALTERNATIVES))
            for speculate in self._speculation.choices
        ]

    def _other_programs(self) -> list[Callable[[], Any]]:
        """Return functions that each compile a program for prompts, for short ones first."""
        seq = self.network.config.seq
        # Longer texts are rarely read at once, and would make new requests wait too long.
        widths = sorted({bucket(n, MIN_WIDTH, seq) for n in range(1, min(seq, READ_TOKENS) + 1)})
        read = [self._score_text] if self.pooling is None else [self._score_text, self._vector]
        programs = [
            *self._prefiller.programs(),
            *((width, functools.partial(self._try_to, f, width)) for width in widths for f in read),
        ]
        return [compile_program for _, compile_program in sorted(programs, key=lambda p: p[0])]

    def _try_to(self, read: Callable[[np.ndarray], Any], width: int) -> None:
        """Compile the program with which `read` reads a text of this width.

        Weights that are not finite are logged once; then requests get the error.
        """
        if self._bad_weights:
            return
        try:
            read(np.zeros(width, np.int32))
        except NonFiniteError:
            log.error("%s; requests will get this error", self._not_finite())

    def submit(self, requests: Sequence[Request]) -> None:
        """Put all of the requests in the queue, or none of them.

        Raises:
          InputError: if the cache has no room for one of them even alone.
          NonFiniteError: if the weights are known to be NaN or infinite.
          QueueFullError: if there is no room for all of the requests.
          StoppedEngineError: if the engine accepts no more requests.
        """
        if self._bad_weights:
            raise self._not_finite()
        for request in requests:
            tokens = min(len(request.prompt), self.network.config.window) + request.length
            if request.length and self.room is not None and tokens > self.room:
                raise InputError(
                    f"a prompt and its answer have {tokens} tokens, but the cache has room for "
                    f"{self.room}; shorten them, or raise --cache-tokens"
                )
        with self._wake:
            if self._closing or self.failure is not None:
                raise StoppedEngineError(STOPPING)
            free = self.rows - self.active - len(self._admitted)
            if len(self._waiting) + len(requests) > self.queue + max(free, 0):
                raise QueueFullError(len(self._waiting), self._retry_after())
            self._waiting.extend(requests)
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        """Cancel a request, so that no more updates on the request are delivered.

        An update whose delivery has already begun may still arrive after this call.
        """
        with self._wake:
            request.cancelled = True
            if request in self._waiting:
                self._waiting.remove(request)

    def close(self, seconds: float | None = None) -> bool:
        """Accept no more requests, and wait until those accepted so far have finished.

        Args:
          seconds: maximum time to wait; None waits without a limit.

        Returns:
          Whether the worker thread has ended.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._worker is not None:
            self._worker.join(seconds)
        return self._worker is None or not self._worker.is_alive()

    def _retry_after(self) -> int:
        """Estimate the seconds until the queue has room from the rate of finished requests."""
        if len(self._finished) < 2:
            return 1
        rate = len(self._finished) / max(time.perf_counter() - self._finished[0], 1e-3)
        return min(max(round(1 / rate), 1), 60)

    def _run(self) -> None:
        while self.failure is None:
            with self._wake:
                while not (self._waiting or self.active or self._closing or self._rest() == 0):
                    self._wake.wait(self._rest())
                is_idle = not (self._waiting or self.active)
                if self._closing and is_idle:
                    break
                self._drop_cancelled()
                self._admitted = self._next_requests()
            self._turn_began = time.monotonic()
            try:
                if is_idle:
                    self._warm_up.compile_next()
                else:
                    self._turn()
                    self._last_turn = time.monotonic()
            except Exception as error:  # any error must be reported to the waiting clients
                log.exception("the network failed; ending the requests that were being served")
                self._turn_began = None  # compiling again takes long, but is not a stall
                self._end_running(error)
                if self._closing:
                    self._fail(error)
                else:
                    self._start_over()
            self._turn_began = None
        self._warm_up.end()

    def _rest(self) -> float | None:
        """Return the seconds until a program is compiled in advance; None if all are."""
        if not self._warm_up.left:
            return None
        return max(self._last_turn + QUIET_SECONDS - time.monotonic(), 0.0)

    def _end_running(self, error: Exception) -> None:
        """End all requests of the current turn, with `error` as their last update."""
        served = {*self._admitted, *self._filling, *self._active.values()}
        self._admitted = []
        self._filling.clear()
        self._active.clear()
        for request in served:
            self._deliver(request, Progress(ended=True, error=error))

    def _start_over(self) -> None:
        """Create a new batch and compile all programs; on failure, stop the engine permanently."""
        try:
            del self._prefiller.batch  # the devices may not have memory for two
            self._prefiller = self._new_prefiller()
            self.warm_up()  # restarted hosts have no compiled programs
        except Exception as failure:  # any error must be reported to the waiting clients
            log.exception("cannot make a new batch; stopping the engine")
            self._fail(failure)

    def _fail(self, failure: Exception) -> None:
        """Stop the engine permanently because of `failure`; end all requests with an error."""
        with self._wake:
            self.failure = failure
            waiting = list(self._waiting)
            self._waiting.clear()
        stopped = StoppedEngineError(STOPPING)
        stopped.__cause__ = failure
        for request in waiting:
            self._deliver(request, Progress(ended=True, error=stopped))
        self._end_running(failure)

    def _deliver(self, request: Request, progress: Progress) -> None:
        if not request.cancelled:
            request.deliver(progress)

    def _next_requests(self) -> list[Request]:
        """Remove the next turn's requests from the front of the queue, and return them.

        The result is either one request to score or embed, requests to insert in chunks, or the
        requests for one prefill call, which have rows then.  The result is empty if no request is
        waiting, if no row or too few pages are free, or if it is the turn of the chunks.
        """
        if not self._waiting or (self._filling and self._chunks_first):
            return []
        if self._waiting[0].reads_only:
            return [self._waiting.popleft()]
        in_chunks = self._prefiller.in_chunks
        chunks = in_chunks(self._waiting[0])
        first = itertools.islice(self._waiting, PREFILL_SIZES[0])
        alike = list(
            itertools.takewhile(lambda r: not r.reads_only and in_chunks(r) == chunks, first)
        )
        used = {*self._active, *(request.row for request in self._filling)}
        free = [row for row in range(self.rows) if row not in used]
        rows = self._prefiller.place(alike, free, chunks=chunks)
        return [self._waiting.popleft() for _ in rows]

    def _turn(self) -> None:
        """Prefill or read new requests, then decode."""
        admitted = self._admitted
        if admitted and admitted[0].embed:
            self._embed(admitted[0])
        elif admitted and admitted[0].score:
            self._score(admitted[0])
        elif admitted and not admitted[0].chunks:
            self._prefill(admitted)
        else:
            self._filling.extend(admitted)
            admitted = self._admitted = []  # they count as active now
            self._fill()
        self._chunks_first = bool(admitted)  # after other requests it is the turn of the chunks
        self._admitted = []
        if self._active:
            self._decode()

    def _score(self, request: Request) -> None:
        """Deliver the prompt's tokens with their logprobs; the first token has no logprob.

        A request that must also generate tokens is put back at the front of the queue.
        """
        self._metrics.prompt_tokens.inc(len(request.prompt))
        try:
            scores = self._score_text(request.prompt, request.settings.adapter)
        except NonFiniteError:
            self._deliver(request, Progress(ended=True, error=self._not_finite()))
            return
        prompt = [Token(int(request.prompt[0])), *tokens_of(scores)]
        self._deliver(request, Progress(prompt=prompt, ended=request.length == 0))
        request.score = False
        if request.length and not request.cancelled:
            with self._wake:
                self._waiting.appendleft(request)  # to the front, where it was before

    def _embed(self, request: Request) -> None:
        """Deliver the prompt's vector."""
        self._metrics.prompt_tokens.inc(len(request.prompt))
        vector, error = None, None
        try:
            vector = self._vector(request.prompt, request.settings.adapter)
        except NonFiniteError:
            error = self._not_finite()
        self._finished.append(time.perf_counter())
        self._deliver(request, Progress(vector=vector, ended=True, error=error))

    def _vector(self, text: np.ndarray, adapter: int = 0) -> np.ndarray:
        """Return the vector of token ids [T], f32 [D]."""
        assert self.pooling is not None
        padded = np.zeros((1, bucket(len(text), MIN_WIDTH, self.network.config.seq)), np.int32)
        padded[0, : len(text)] = text
        return self.network.embed(padded, np.array([len(text)]), self.pooling, adapter)[0]

    def _score_text(self, text: np.ndarray, adapter: int = 0) -> Any:
        """Return the logprobs of token ids `text[1:]` as a `Chosen` tuple; `text` is [T]."""
        width = bucket(len(text) - 1, MIN_WIDTH, self.network.config.seq)
        padded = np.zeros((1, width + 1), np.int32)
        padded[0, : len(text)] = text
        scored = self.network.score(padded, ALTERNATIVES, adapter=adapter)
        return part_of(scored, (0, slice(len(text) - 1)))

    def _prefill(self, admitted: list[Request]) -> None:
        """Put requests into free batch rows, and deliver the first token of each answer."""
        chosen = self._prefiller.insert(admitted)
        for index, request in enumerate(admitted):
            self._begin_answer(request, tokens_of(part_of(chosen, slice(index, index + 1))))

    def _fill(self) -> None:
        """Insert the next chunks of prompts; after a prompt's last one, deliver its first token."""
        seconds = CHUNK_SHARE * self._step_seconds * self.steps if self._active else None
        left = 1.0  # share of these seconds
        for _ in range(min(len(self._filling), PREFILL_SIZES[0])):
            request = self._filling[0]
            if self._prefiller.restore(request):
                self._filling.rotate(-1)
                break
            most = self._prefiller.chunk(seconds, self._prefiller.share(request))
            computed, chosen = self._prefiller.insert_chunk(request, max(int(left * most), 1))
            left -= self._prefiller.cost(computed) / most
            self._filling.popleft()
            if chosen is None:
                self._filling.append(request)
            else:
                self._begin_answer(request, tokens_of(chosen))
            if left <= 0:
                break

    def _begin_answer(self, request: Request, tokens: list[Token]) -> None:
        """Let a request whose prompt is in its row generate, and deliver its first token."""
        self._metrics.first_token_seconds.observe(time.perf_counter() - request.began)
        self._active[request.row] = request
        self._advance(request.row, request, tokens)

    def _decode(self) -> None:
        """Make one decode call, and deliver the new tokens of all active rows."""
        began, batch = time.perf_counter(), self._prefiller.batch
        left = [request.length - request.generated for request in self._active.values()]
        # All calls have this argument, so that one program suffices.
        allowed = allowed_in(self._active.values())
        # If requests are waiting, decode only until the first row is free for one of them.
        most = (self.steps + 1) // 2 if self._filling else self.steps
        # Rows with constraints generate one token per call.
        steps = 1 if allowed else min(most, min(left) if self._waiting else max(left))
        logprobs = self._fixed or any(request.logprobs for request in self._active.values())
        speculate, before = self._speculation.next(), batch.left.copy()
        chosen = batch.decode(
            steps, ALTERNATIVES if logprobs else None, speculate=speculate, allowed=allowed
        )
        seconds, made = time.perf_counter() - began, before - batch.left
        self._step_seconds = seconds / steps
        # A row whose answer ends within the call makes fewer tokens, with guesses or without.
        full = [int(made[row]) for row in self._active if batch.left[row] and row not in allowed]
        self._speculation.observe(speculate, seconds, steps, full)
        self._metrics.step_seconds.observe(self._step_seconds)
        for row, request in list(self._active.items()):
            self._advance(row, request, tokens_of(part_of(chosen, (row, slice(made[row])))))

    def _advance(self, row: int, request: Request, tokens: list[Token]) -> None:
        """Deliver a row's new tokens, and free the row if its request has ended."""
        ends = [end for end, token in enumerate(tokens, 1) if token.number in request.stop]
        tokens = tokens[: min(ends, default=None)]
        error: Exception | None = None
        complete = False
        if any(token.number == NO_TOKEN for token in tokens):
            tokens, error = [], self._not_finite()
        request.generated += len(tokens)
        if request.constraint is not None and not ends:
            try:
                for token in tokens:
                    complete = request.constraint.add(token.number)
            except ConstraintError as caught:  # which does not matter after the last token
                error = caught if request.generated < request.length else None
        ended = bool(ends or error) or complete or request.generated == request.length
        self._metrics.generated(len(tokens))
        if ended:
            self._free(row)
            self._finished.append(time.perf_counter())
        if not request.logprobs:
            tokens = [Token(token.number) for token in tokens]
        self._deliver(request, Progress(tokens, ended=ended, complete=complete, error=error))

    def _not_finite(self) -> NonFiniteError:
        """Return the error of a request for which the network's results are not finite."""
        if self._bad_weights is None:
            self._bad_weights = self._prefiller.batch.bad_weights() or ""
        cause = self._bad_weights or "an activation has overflowed; change the prompt"
        return NonFiniteError(f"the model's results are NaN or infinite: {cause}")

    def _free(self, row: int) -> None:
        """Remove the request from a batch row, and make the row idle so that it can be reused."""
        del self._active[row]
        self._prefiller.release([row])

    def _drop_cancelled(self) -> None:
        """Free the rows of cancelled requests."""
        for row in [row for row, request in self._active.items() if request.cancelled]:
            self._free(row)
        self._prefiller.release([request.row for request in self._filling if request.cancelled])
        self._filling = collections.deque(r for r in self._filling if not r.cancelled)
