"""Putting prompts into the rows of a batch: short ones together, long ones in chunks.

The keys and values of all rows are in the batch's pool of pages.  A prompt that begins with the
same tokens as an earlier one uses the pages of that one (see `serving.pages`).
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from mesh_transformer.generation.pool import (
    PAGE,
    USUAL_TOKENS,
    Chunks,
    most_slots,
    most_tokens,
    pages_behind,
    server_pool,
    storage,
)
from mesh_transformer.generation.sampling_settings import EVALUATION_DEFAULTS, SamplingOptions
from mesh_transformer.network import Network
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.pages import HostPages, NoPageError, Pages, Prompt, Row
from mesh_transformer.serving.progress import Request
from mesh_transformer.util import InputError, bucket

ALTERNATIVES = 20  # number of most likely tokens delivered with each logprob
# Allowed numbers of prompts per prefill call, each with its own compiled program.  A call uses the
# largest one for which there are enough prompts and free rows.
PREFILL_SIZES = (4, 2, 1)
# Maximum number of tokens, including padding, in a prefill call with several prompts.
PREFILL_TOKENS = 512
MIN_WIDTH = 16  # the smallest width that prompts are padded to
CHUNK = 256  # default maximum number of tokens of a prompt per prefill call
SHORTEST_CHUNK = 32  # to which chunks may shrink so that running requests do not wait long
# Where attention takes most of a chunk's time, chunks may become shorter.  With a window of at
# least `LONG_WINDOW` tokens there are programs for chunks that have fewer than `MIN_WIDTH`.
LONG_WINDOW, NARROWEST_CHUNK = 16384, 8
SMOOTHING = 0.2  # weight of the newest call in the average times of the chunks
# A short prompt is inserted alone, after its kept beginning, if this saves so many positions.
# Otherwise it may share a call with others.
SAVING = 64


def allowed_in(requests: Iterable[Request]) -> dict[int, np.ndarray]:
    """Return the argument `allowed` of `Batch.insert` and `Batch.decode` for requests with rows."""
    return {r.row: r.constraint.allowed for r in requests if r.constraint is not None}


class Prefiller:
    """Puts prompts into the rows of a new batch.

    Args:
      network: the network that creates the batch.
      rows: number of rows of the batch.
      chunk: maximum number of tokens of a prompt per prefill call.
      kept_tokens, cache_tokens: see `server_pool`; with 0 `kept_tokens`, nothing is kept.
      guesses: number of tokens that a decode step may guess (see `Batch.decode`).
      fixed_shapes: whether to compute each prompt alone, in chunks that are all padded to `chunk`
        tokens.  The tokens of an answer then do not depend, even by rounding, on other requests or
        on what is kept.
      host_bytes: bytes of host memory for evicted pages; 0 for none.
      warming_up: whether programs are being compiled in advance.  Prompts are then padded to a
        width whose program is compiled, if there is one, rather than wait for another program.

    Attributes:
      batch: the batch, whose rows have room for as many tokens as the window.
      pool: the size of each replica's pool.
      room: number of tokens that a prompt and its answer may have together; None for no limit.
    """

    def __init__(
        self,
        network: Network,
        metrics: Metrics,
        rows: int,
        *,
        chunk: int = CHUNK,
        kept_tokens: int | None = None,
        cache_tokens: int | None = None,
        fixed_shapes: bool = False,
        guesses: int = 0,
        host_bytes: int = 0,
        warming_up: Callable[[], bool] = lambda: False,
    ):
        window = network.config.window
        self._warming_up = warming_up
        # Of calls: the number of prompts, whether tokens precede them, and the width.
        self._compiled: set[tuple[int, bool, int]] = set()
        self._window, self._fixed, self._metrics = window, fixed_shapes, metrics
        self._guesses = guesses
        self._longest = min(chunk, window)
        self._narrowest = NARROWEST_CHUNK if window >= LONG_WINDOW else MIN_WIDTH
        widths = sorted({bucket(n, self._narrowest, window) for n in range(1, self._longest + 1)})
        self._widths = widths[-1:] if fixed_shapes else widths  # that chunks are padded to
        # The time of a chunk's call, on average, by width: of one with nothing before it, and what
        # is added to that per token before it, which its tokens attend to.
        self._seconds: dict[int, float] = {}
        self._slopes: dict[int, float] = {}
        self._rows, self._rows_per_replica = rows, rows // network.dp
        self.pool = pool = server_pool(
            network.config,
            self._rows_per_replica,
            guesses,
            tokens=cache_tokens or None,
            kept_tokens=kept_tokens,
            page=self._longest if fixed_shapes else None,
        )
        self.room = most_tokens(network.config, guesses, pool)
        slots, keep = most_slots(window, guesses, pool), kept_tokens != 0
        behind = pages_behind(network.config, pool.page) if pool.kept else 0
        self._pages = [Pages(pool, slots, keep=keep, behind=behind) for _ in range(network.dp)]
        self._host = HostPages(host_bytes) if host_bytes else None
        if host_bytes and (network.dp > 1 or storage(network.config, guesses, pool).ring_slots):
            raise InputError(
                "--host-cache supports neither several replicas nor layers that store a sliding "
                "window apart; leave it out"
            )
        if host_bytes and not keep:
            raise InputError("--host-cache needs kept beginnings; leave out --prefix-cache 0")
        self._together = max(CHUNK // pool.page, 1)  # pages that are copied to or from it together
        self._in_rows: dict[int, Row] = {}  # the pages of each row that is in use
        self.batch = network.batch(rows, pool, guesses)

    @property
    def capacity(self) -> str:
        """What the pools of all replicas have room for, as a sentence."""
        tokens, replicas = self.pool.pages * self.pool.page, len(self._pages)
        sizes = dict.fromkeys(min(size, self._window, tokens) for size in (USUAL_TOKENS, tokens))
        fits = [
            f"{min(replicas * (tokens // size), self._rows)} of {size:,} tokens" for size in sizes
        ]
        return (
            f"the cache has room for {replicas * tokens:,} tokens: requests that run together may "
            f"be {', or '.join(fits)}, each with its answer"
        )

    @property
    def used_tokens(self) -> int:
        """Number of tokens that the pages of all rows in use have room for."""
        return sum(pages.used * pages.pool.page for pages in self._pages)

    def programs(self) -> list[tuple[int, Callable[[], None]]]:
        """Return functions that each compile some of what `insert` and `insert_chunk` need.

        Each comes with the width of the prompts that need it.  Those that can be used for all
        prompts come first, with the width 0.  They may be called only while no row is in use.
        """
        widest = self._widths[-1]
        programs = [
            (
                0 if width == widest and size in (1, None) else width,
                functools.partial(self._compile, width, size),
            )
            for width in self._widths
            for size in (*reversed(PREFILL_SIZES), None)
            if size is None
            or (width >= MIN_WIDTH and self._fit_one_call(size, min(width, self._longest)))
        ]
        return programs if self._host is None else [(0, self._compile_copies), *programs]

    def _compile_copies(self) -> None:
        none = self._filled([])
        self.batch.write_pages(none, self.batch.read_pages(none))

    def _compile(self, width: int, size: int | None) -> None:
        """Compile the program for `size` prompts, or for chunks if it is None, and time chunks."""
        none, prompt = SamplingOptions(), Prompt(np.zeros(self._window, np.int32))
        count = min(width, self._longest)
        if size is not None:
            rows, ends = range(size), [count] * size
            self._insert(rows, [prompt] * size, ends, [1] * size, [none] * size, 0, width)
            return
        last = self._window - count
        if not last and self._guesses:  # the cache has more slots than the window
            last = min(PAGE, self._window - 1)
        first = min(PAGE, last)
        seconds = []
        for begin in (first, first, last) if last else ():  # the first call compiles
            began, end = time.perf_counter(), min(begin + count, self._window)
            self._insert([0], [prompt], [end], [1], [none], begin, width)
            seconds.append(time.perf_counter() - began)
        if seconds:
            self._seconds[width] = seconds[1]
            self._slopes[width] = max(seconds[2] - seconds[1], 0) / last

    def _fit_one_call(self, count: int, longest: int) -> bool:
        """Return whether `insert` may get `count` prompts at once, the longest of this length."""
        if count == 1:
            return True
        return not self._fixed and count <= self._rows and count * longest <= PREFILL_TOKENS

    def _can_be_inserted(self, lengths: Sequence[int]) -> bool:
        """Return whether `insert` may get prompts of these lengths at once, and that now."""
        count, longest = len(lengths), max(lengths)
        if not self._fit_one_call(count, longest):
            return False
        return count == 1 or not self._warming_up() or self._ready(count, 0, longest) is not None

    def _ready(self, count: int, begin: int, tokens: int) -> int | None:
        """Return the smallest width for so many tokens whose program is compiled, or None.

        Args:
          count: the number of prompts.
          begin: number of tokens before these in a prompt; any other than 0 has the same program.
        """
        least, call = self._width(begin, tokens), (count, begin > 0)
        widths = [width for *own, width in self._compiled if (*own,) == call and width >= least]
        return min(widths, default=None)

    def _width(self, begin: int, tokens: int) -> int:
        """Return the width of a call for so many tokens of each prompt, after `begin` others."""
        if self._fixed:
            return self._longest
        return bucket(tokens, self._narrowest if begin else MIN_WIDTH, self._window)

    def _padded(self, count: int, begin: int, tokens: int) -> int:
        """Return the width that a call is padded to; for the arguments, see `_ready`."""
        ready = self._ready(count, begin, tokens) if self._warming_up() else None
        return ready or self._width(begin, tokens)

    def in_chunks(self, request: Request) -> bool:
        """Return whether a prompt is for `insert_chunk`, as it is long or its beginning is kept."""
        prompt = self._used(request)
        if self._fixed or len(prompt) > self._longest:
            return True
        kept = max(self._kept(prompt, pages) for pages in self._pages)
        return self.cost(len(prompt)) - self.cost(len(prompt) - kept) >= SAVING

    def cost(self, tokens: int) -> int:
        """Return how many positions a call computes for this many tokens, with the padding."""
        return self._width(1, tokens)

    def chunk(self, seconds: float | None, begin: int = 0) -> int:
        """Return how many tokens the next chunks may have together.

        Args:
          seconds: the time that they should take at most, as running requests wait for them; None
            if there are none.
          begin: number of tokens before them.
        """
        if self._fixed or seconds is None:
            return self._longest
        fast = [width for width in self._widths if sum(self._cost(width, begin)) <= seconds]
        least = SHORTEST_CHUNK
        # Half as long chunks take half as long if most of their time is attention.
        while least > self._narrowest and (cost := self._cost(least, begin))[1] > cost[0]:
            least //= 2
        return min(max([*fast, least]), self._longest)

    def _cost(self, width: int, begin: int) -> tuple[float, float]:
        """Return the time of a chunk, and what attention to the tokens before it adds."""
        return self._seconds.get(width, 0.0), self._slopes.get(width, 0.0) * begin

    def place(self, requests: Sequence[Request], free: Sequence[int], *, chunks: bool) -> list[int]:
        """Give rows and pages to the first of some requests, and return these rows.

        Each request gets a row in a replica with enough free pages, if possible in the one that
        keeps most of its prompt's beginning.  The others must wait: those without room, and those
        that are too many for one call of `insert`.

        Args:
          free: the rows that are not in use.
          chunks: whether all of the requests are for `insert_chunk`; if not, all are for `insert`.
        """
        prompts = [self._used(request) for request in requests]
        positions = [
            len(prompt) + request.length + self._guesses
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        rows = self._rows_for(prompts, positions, free, chunks)
        if not chunks:  # before pages are taken, as that may give kept ones away
            lengths = [len(request.prompt) for request in requests]
            sizes = (n for n in PREFILL_SIZES if n <= len(rows))
            fitting = (n for n in sizes if self._can_be_inserted(lengths[:n]))
            del rows[next(fitting, 0) :]
        for index, row in enumerate(rows):
            pages = self._pages[self._replica(row)]
            try:
                new = pages.add_row(prompts[index], positions[index], use_kept=chunks)
            except NoPageError:  # an earlier request has taken a kept page that this was to share
                return rows[:index]
            self._in_rows[row] = new
            requests[index].row, requests[index].chunks = row, chunks
        return rows

    def _rows_for(
        self, prompts: list[Prompt], positions: list[int], free: Sequence[int], use_kept: bool
    ) -> list[int]:
        """Return rows for the first of some prompts, as many as there seems to be room for."""
        rows: list[int] = []
        available = [pages.available for pages in self._pages]
        for prompt, own in zip(prompts, positions, strict=True):
            needed = [pages.needed(prompt, own, use_kept=use_kept) for pages in self._pages]
            fits = [most >= count for most, count in zip(available, needed, strict=True)]
            fitting = [row for row in free if row not in rows and fits[self._replica(row)]]
            if not fitting:
                break
            row = max(fitting, key=lambda r: self._kept(prompt, self._pages[self._replica(r)]))
            rows.append(row)
            available[self._replica(row)] -= needed[self._replica(row)]
        return rows

    def release(self, rows: Sequence[int]) -> None:
        """Make rows idle, and give back their pages."""
        self.batch.release(rows)
        for row in rows:
            if row in self._in_rows:
                self._pages[self._replica(row)].remove_row(self._in_rows.pop(row))

    def insert(self, requests: Sequence[Request]) -> Any:
        """Put prompts into rows from `place`; choose the first token of each answer.

        See `Batch.insert`.
        """
        began = time.perf_counter()
        prompts = [self._used(request) for request in requests]
        for request in requests:
            own = self._in_rows[request.row]
            self._spill([*own.prompt_J.tolist(), *own.page_J.tolist()])
        chosen = self._insert(
            [request.row for request in requests],
            prompts,
            [len(prompt) for prompt in prompts],
            [request.length for request in requests],
            [request.settings for request in requests],
            0,
            self._padded(len(prompts), 0, max(map(len, prompts))),
            allowed_in(requests),
        )
        for request, prompt in zip(requests, prompts, strict=True):
            pages, own = self._pages[self._replica(request.row)], self._in_rows[request.row]
            pages.keep(own, prompt, 0, len(prompt))
            pages.end_prompt(own)
        self._metrics.prefill_seconds.observe(time.perf_counter() - began)
        self._metrics.prompt_tokens.inc(sum(map(len, prompts)))
        return chosen

    def share(self, request: Request) -> int:
        """Let a row from `place` use what is kept of its prompt; return how much the row holds."""
        own, pages = self._in_rows[request.row], self._pages[self._replica(request.row)]
        begin = pages.share(own, self._used(request), request.filled)
        self._metrics.cached_tokens.inc(begin - request.filled)
        request.cached += begin - request.filled
        request.filled = begin
        return begin

    def restore(self, request: Request) -> bool:
        """Copy the next pages of a prompt, up to `CHUNK` tokens, from host memory to its row.

        Returns:
          Whether there were any.
        """
        if self._host is None:
            return False
        own, prompt, size = self._in_rows[request.row], self._used(request), self.pool.page
        begin = self.share(request)
        if not own.shares or begin % size:
            return False
        first = begin // size
        last = min(first + self._together, (len(prompt) - 1) // size)
        keys = [prompt.key(place + 1, size) for place in range(first, last)]
        keys = list(itertools.takewhile(self._host.__contains__, keys))
        if not keys:
            return False
        contents = [self._host.get(key) for key in keys]
        pages = own.prompt_J[first : first + len(keys)].tolist()
        self._spill(pages)
        contents += contents[:1] * (self._together - len(keys))
        arrays = [np.stack(x) for x in zip(*contents, strict=True)]
        self.batch.write_pages(self._filled(pages), arrays)
        end = begin + len(keys) * size
        self._pages[0].keep(own, prompt, begin, end)
        self._metrics.restored_tokens.inc(end - begin)
        self._metrics.cached_tokens.inc(end - begin)
        request.filled, request.cached = end, request.cached + end - begin
        return True

    def _spill(self, pages: Sequence[int]) -> None:
        """Copy what is still kept in pages that will be written over to host memory."""
        if self._host is None:
            return
        evicted, together = self._pages[0].evicted, self._together
        keys = {page: evicted.pop(page) for page in pages if page in evicted}
        new = [page for page, key in keys.items() if key not in self._host]
        for part in (new[at : at + together] for at in range(0, len(new), together)):
            contents = self.batch.read_pages(self._filled(part))
            for at, page in enumerate(part):
                self._host.put(keys[page], [x[at].copy() for x in contents])
            self._metrics.spilled_tokens.inc(len(part) * self.pool.page)

    def _filled(self, pages: list[int]) -> list[int]:
        """Return page numbers for a program that copies as many as hold `CHUNK` tokens."""
        return pages + [-1] * (self._together - len(pages))

    def insert_chunk(self, request: Request, most: int) -> tuple[int, Any]:
        """Put the next chunk of a prompt, at most `most` tokens, into a row from `place`.

        Of the prompt, the last `config.window` tokens are used.

        Returns:
          The number of tokens that were computed, and the first token of the answer, which is None
          before the prompt's end.
        """
        began, row, settings = time.perf_counter(), request.row, request.settings
        prompt = self._used(request)
        unused = dataclasses.replace(EVALUATION_DEFAULTS, adapter=settings.adapter)
        own, pages = self._in_rows[row], self._pages[self._replica(row)]
        begin = self.share(request)
        end = min(begin + most, len(prompt))
        last, first = end == len(prompt), begin // self.pool.page
        width = self._padded(1, begin, end - begin)
        # With the last chunk, the row also gets the pages of its answer.
        stop = None if last else (begin + width) // self.pool.page + 1
        self._spill([*own.prompt_J[first:stop].tolist(), *(own.page_J.tolist() if last else ())])
        chosen = self._insert(
            [row],
            [prompt],
            [end],
            [request.length if last else 1],
            [settings if last else unused],
            begin,
            width,
            allowed_in([request] if last else []),
        )
        pages.keep(own, prompt, begin, end)
        if last:
            pages.end_prompt(own)
        took = time.perf_counter() - began
        self._metrics.prefill_seconds.observe(took)
        self._metrics.prompt_tokens.inc(end - begin)
        if begin:
            self._observe(width, took, begin)
        request.filled = end
        return end - begin, chosen if last else None

    def _observe(self, width: int, took: float, begin: int = 0) -> None:
        """Take account of the time that a chunk of `width` tokens took, after `begin` others."""
        known, added = self._cost(width, begin)
        self._seconds.setdefault(width, took)
        expected = known + added or took
        # Each part of the time changes in proportion to its share of it.
        change = SMOOTHING * (took / expected - 1)
        self._seconds[width] *= 1 + change * (1 - added / expected)
        if width in self._slopes:
            self._slopes[width] *= 1 + change * added / expected
        # Wider chunks take at most proportionally longer.  Without this limit, a width that was
        # slow once would not be used, and thus not be timed, for as long as requests run.
        for times in (self._seconds, self._slopes):
            for wider in times:
                if wider > width and times.get(width):
                    times[wider] = min(times[wider], times[width] * wider / width)

    def _insert(
        self,
        rows: Sequence[int],
        prompts: Sequence[Prompt],
        ends: Sequence[int],
        lengths: Sequence[int],
        settings: Sequence[SamplingOptions],
        begin: int,
        width: int,
        allowed: Mapping[int, np.ndarray] = MappingProxyType({}),
    ) -> Any:
        """Call `Batch.insert` for the positions of each prompt from `begin` to one of `ends`.

        Args:
          width: the number of positions that each of these is padded to.
          allowed: see `Batch.insert`.  All calls have this argument, so that one program suffices.
        """
        none = self._pages[0].no_row  # of rows that are not in use, when the programs are compiled
        chunks = [
            self._pages[self._replica(row)].insertion(
                self._in_rows.get(row, none), prompt, begin, end
            )
            for row, prompt, end in zip(rows, prompts, ends, strict=True)
        ]
        chosen = self.batch.insert(
            rows,
            [prompt.tokens[:end] for prompt, end in zip(prompts, ends, strict=True)],
            np.array(lengths, np.int32),
            SamplingOptions.stacked(settings),
            alternatives=ALTERNATIVES,  # even if unused: one program per width
            chunks=Chunks(*map(np.concatenate, zip(*chunks, strict=True))),
            allowed=dict(allowed),
            longest=width,
            smallest=self._narrowest if begin else MIN_WIDTH,
        )
        self._compiled.add((len(prompts), begin > 0, width))
        return chosen

    def _used(self, request: Request) -> Prompt:
        """Return the tokens of a request's prompt that are used, at most those of the window."""
        if request.used is None:
            tokens = request.prompt[-self._window :]
            request.used = Prompt(tokens, request.settings.adapter)
        return request.used

    def _kept(self, prompt: Prompt, pages: Pages) -> int:
        """Return how many of the prompt's first tokens a replica keeps."""
        return len(pages.find(prompt)) * pages.pool.page

    def _replica(self, row: int) -> int:
        return row // self._rows_per_replica
