"""`Batch`: rows that generate text in parallel, wherever the network runs; calls of generation."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from mesh_transformer.calls import ROW_KEYS, ROW_NUMBERS, ROWS, Call
from mesh_transformer.config import Config
from mesh_transformer.generation.decode import Chosen
from mesh_transformer.generation.pool import Chunks, Pool
from mesh_transformer.generation.prompts import (
    check_adapters,
    check_biases,
    check_rows,
    check_texts,
)
from mesh_transformer.generation.sampling_settings import SamplerSettings
from mesh_transformer.generation.stream import MOST_STEPS
from mesh_transformer.util import InputError, bucket, check_number

# Prompts are padded to this width times a power of two, so that few programs are compiled.
SMALLEST_PROMPT = 16

Run = Callable[[Call[Any]], Any]  # runs the calls of one batch


@dataclass(frozen=True)
class NewBatch(Call[Run]):
    """Create an idle batch, and return a function that runs its `BatchCall`s.

    Attributes:
      rows: number of rows per replica.
      pool, guesses: see `Network.batch`.
    """

    rows: int
    pool: Pool | None
    guesses: int


@dataclass(frozen=True)
class BadWeights(Call[str | None]):
    """Name the weights that are NaN or infinite; "" if there are none, and None for unknown."""


@dataclass(frozen=True, eq=False)
class Score(Call[Chosen]):
    """See `Network.score`."""

    tokens: np.ndarray = field(metadata=ROWS)
    alternatives: int
    beginning: np.ndarray | None
    adapter: int
    returns_rows: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Embed(Call[np.ndarray]):
    """See `Network.embed`."""

    tokens: np.ndarray = field(metadata=ROWS)
    lengths: np.ndarray = field(metadata=ROWS)
    pooling: str
    adapter: int
    returns_rows: ClassVar[bool] = True


class BatchCall(Call[Any]):
    """A call of a batch that `NewBatch` has created."""


@dataclass(frozen=True)
class Reserve(BatchCall):
    """See `Batch.reserve`."""

    positions: int


@dataclass(frozen=True, eq=False)
class Insert(BatchCall):
    """Put prompts into rows, and return a `Chosen` for them; see `Batch.insert`.

    Attributes:
      row_P: the index of the row for each of P prompts.
      tokens_PT: the prompts, followed by padding.
      length_P: number of tokens of each prompt.
      width: number of tokens that prompts are padded to.
      most: largest number of prompts of one replica.
      reach: length of the longest prompt, if tokens in the cache precede the tokens of `chunks`.
    """

    row_P: np.ndarray = field(metadata=ROW_NUMBERS)
    tokens_PT: np.ndarray = field(metadata=ROWS)
    length_P: np.ndarray = field(metadata=ROWS)
    settings: SamplerSettings = field(metadata=ROWS)
    chunks: Chunks | None = field(metadata=ROWS)
    allowed: Mapping[int, np.ndarray] | None = field(metadata=ROW_KEYS)
    alternatives: int | None
    width: int
    most: int
    reach: int | None
    returns_rows: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Decode(BatchCall):
    """Make decode steps in all rows; see `Batch.decode`.

    The result is a `Chosen`, and with `guesses` the number of tokens of each row, otherwise None.

    Attributes:
      left: maximum number of tokens for each row.
      guesses: number of tokens that a step guesses.
      positions: number of positions that each row must have in the cache.
    """

    left: np.ndarray = field(metadata=ROWS)
    allowed: Mapping[int, np.ndarray] | None = field(metadata=ROW_KEYS)
    steps: int
    alternatives: int | None
    guesses: int
    positions: int
    returns_rows: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class ReadPages(BatchCall):
    """See `Batch.read_pages`."""

    pages: np.ndarray


@dataclass(frozen=True, eq=False)
class WritePages(BatchCall):
    """See `Batch.write_pages`."""

    pages: np.ndarray
    contents: list[np.ndarray]


class Batch:
    """Rows that generate text in parallel, each with its own prompt, sampling settings and length.

    A row's tokens depend only on its own prompt, settings and seed.  If several processes use a
    `CausalTransformer`, all of them must make the same sequence of calls, each for its own rows.

    Attributes:
      rows: total number of rows, divided equally among the replicas.  In a `CausalTransformer` of
        several processes, these are the rows and replicas of this process.
      left: number of tokens that each row may still generate, int32 [rows].
    """

    def __init__(
        self,
        create: Callable[[NewBatch], Run],
        config: Config,
        rows: int,
        replicas: int,
        *,
        adapters: int,
        pool: Pool | None = None,
        guesses: int = 0,
    ):
        check_number("generate: rows", rows, 1)
        if rows % replicas:
            raise InputError(
                f"generate: the batch has {rows} rows, expected a positive multiple of "
                f"{replicas}, the number of replicas; add or remove rows"
            )
        self.rows = rows
        self.left = np.zeros(rows, np.int32)
        self._length = np.zeros(rows, np.int32)  # tokens in each row's cache
        self._config, self._size, self._adapters = config, rows // replicas, adapters
        self._has_pool, self._guesses = pool is not None, guesses
        self._run = create(NewBatch(self._size, pool, guesses))

    def reserve(self, positions: int) -> None:
        """Grow the KV cache so that each row can hold `positions` tokens, up to `config.window`.

        With a pool, nothing grows.

        A single process need not call this, because `insert` and `decode` grow the cache as needed.
        With several processes, the cache must have the same size in all of them.  Before each
        `insert` or `decode`, call `reserve` with the largest number of tokens that any row of any
        process needs.  In `decode`, an idle row needs one more than it holds.
        """
        self._run(Reserve(positions))

    def insert(
        self,
        rows: Sequence[int],
        prompts: Sequence[np.ndarray],
        lengths: ArrayLike,
        settings: SamplerSettings,
        *,
        alternatives: int | None = None,
        chunks: Chunks | None = None,
        allowed: Mapping[int, np.ndarray] | None = None,
        longest: int | None = None,
        most: int | None = None,
        reach: int | None = None,
        smallest: int = SMALLEST_PROMPT,
    ) -> Chosen:
        """Put prompts into `rows`, and choose the first token of each prompt's answer.

        The previous contents of these rows are discarded.

        A long prompt can be inserted in several calls, with other calls between them: its first
        chunk, then its first two with `chunks`, and so on.  In all calls but the last one the
        length is 1, and the chosen token is meaningless.

        Args:
          rows: the index of the row for each prompt.
          prompts: one array of token ids per prompt.  Only the last `config.window` tokens of a
            prompt are used.
          lengths: number of tokens to generate per prompt, including the first one, which this call
            chooses.
          settings: the sampling settings, with one value per prompt.
          alternatives: number of most likely tokens to return with their logprobs; the chosen
            tokens' logprobs are then returned too.  None returns no logprobs.
          chunks: which positions of each prompt to compute, and the row's pages of the pool.  None
            computes the whole prompts; a batch with a pool requires it.
          allowed: for some of the rows, the tokens that the answer may begin with, as bits [W] (see
            `sampling.choose`).  None, unlike an empty dict, selects a program without this
            argument, and must then be passed in all processes.
          longest: largest number of tokens of one prompt that any process computes.  Required only
            with several processes.  It may be larger than necessary.
          most: largest number of prompts that any process inserts into one replica.  Required only
            if the processes insert different numbers of prompts; some may then insert none.
          reach: length in tokens of the longest prompt in any process, if `chunks` begin after the
            first position in any process.  Required only with several processes.
          smallest: number of tokens that shorter prompts or chunks are padded to.

        Returns:
          A `Chosen` with the first token of each answer, as numpy arrays in the order of `prompts`.

        Raises:
          InputError: for an empty prompt, a row that is not in the batch or given twice, a length
            below 1, or a token or a biased token outside the vocabulary, or if `pe` is "fixed" and
            a prompt and its answer together have more than `seq` + 1 tokens.
        """
        window = self._config.window
        texts, length, left = check_texts(self._config, prompts, lengths)
        row_ids = check_rows(rows, len(texts), self.rows)
        check_biases(self._config, settings)
        check_adapters(settings.adapter_B, self._adapters)
        if self._has_pool and chunks is None:
            raise InputError("generate: the batch has a pool, so `chunks` must give the pages")
        begin = np.zeros_like(length) if chunks is None else chunks.begin_P
        longest = longest or int((length - begin).max())
        if reach is None and begin.any():
            reach = int(length.max())
        tokens = np.zeros((len(texts), length.max(initial=0)), np.uint32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        chosen = self._run(
            Insert(
                row_ids,
                tokens,
                length,
                settings,
                chunks,
                allowed,
                alternatives,
                width=bucket(min(longest, window), smallest, window),
                most=most or int(np.bincount(row_ids // self._size).max()),
                reach=reach,
            )
        )
        self._length[row_ids], self.left[row_ids] = length, left - 1
        return chosen

    def bad_weights(self) -> str | None:
        """Name the weights that are NaN or infinite; "" if there are none, and None for unknown.

        They are unknown if there are several processes, each with rows of its own.
        """
        return self._run(BadWeights())

    def release(self, rows: Sequence[int] | np.ndarray) -> None:
        """Make `rows` idle, so that they generate no more tokens."""
        self.left[np.asarray(rows, np.intp)] = 0

    def read_pages(self, pages: Sequence[int]) -> list[np.ndarray]:
        """Return copies of pages of the pool: of each array of the cache those with these numbers.

        The batch must have one replica, no layers with rings, and all its devices in one process.
        """
        return self._run(ReadPages(np.array(pages, np.int32)))

    def write_pages(self, pages: Sequence[int], contents: list[np.ndarray]) -> None:
        """Replace the contents of pages of the pool by what `read_pages` has returned for others.

        Negative page numbers stand for pages that are not written.
        """
        self._run(WritePages(np.array(pages, np.int32), contents))

    def decode(
        self,
        steps: int,
        alternatives: int | None = None,
        *,
        speculate: bool = False,
        allowed: Mapping[int, np.ndarray] | None = None,
    ) -> Chosen:
        """Make decode steps, each of which generates one token per row, or more by speculation.

        No row exceeds its limit in `left`, from which the generated tokens are subtracted.

        Args:
          steps: number of steps, from 1 to `MOST_STEPS` (32).
          alternatives: as for `insert`.
          speculate: whether to guess tokens, as many per step as the batch was made for.  A step
            then generates all tokens up to the first wrong guess.  The tokens are the same.  They
            are guessed by the generator's draft, or looked up in the row if there is none.
          allowed: as for `insert`.  Each of the rows in it generates one token.

        Returns:
          A `Chosen` with the new tokens, as numpy arrays [rows, M, ...], where M is the largest
          number of tokens that a row may have generated.  Values after a row's last token are
          meaningless.
        """
        check_number("generate: steps", steps, 1, MOST_STEPS)
        guesses = self._guesses if speculate else 0
        left, rows = self.left.copy(), list(allowed or ())
        left[rows] = np.minimum(left[rows], 1)
        # Rows that do not generate get a meaningless position after their last one.
        positions = int((self._length + np.clip(self.left, 1, steps * (1 + guesses))).max())
        call = Decode(left, allowed, steps, alternatives, guesses, positions)
        chosen, made = self._run(call)
        made = np.minimum(left, steps) if made is None else made
        self._length += made
        self.left -= made
        return chosen


def filled(tokens_BM: np.ndarray, ends: Collection[int], length: int) -> np.ndarray:
    """Return answers of `length` tokens, in which the first of `ends` repeats after it occurs.

    Args:
      tokens_BM: the tokens of each answer; fewer than `length` only if all have such a token.
    """
    is_end_BM = np.isin(tokens_BM, list(ends))
    first_B = np.where(is_end_BM.any(axis=1), is_end_BM.argmax(axis=1), length)[:, None]
    return np.take_along_axis(tokens_BM, np.minimum(np.arange(length), first_B), axis=1)
