"""Text generation on the devices of a mesh: weights, compiled functions and running batches.

Callers pass and receive token ids and row numbers.  This module places the arrays on the devices.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer.calls import Call
from mesh_transformer.generation import decode, programs, texts
from mesh_transformer.generation.batch import (
    SMALLEST_PROMPT,
    BadWeights,
    Batch,
    Decode,
    Embed,
    Insert,
    NewBatch,
    ReadPages,
    Reserve,
    Run,
    Score,
    WritePages,
)
from mesh_transformer.generation.decode import Chosen, DecodeState, Prompts
from mesh_transformer.generation.finite import blaming, check_finite, describe_bad_weights
from mesh_transformer.generation.pool import Pool, check_kernel, most_slots, storage
from mesh_transformer.generation.prompts import check_adapters
from mesh_transformer.generation.speculation import check_guesses, within_window
from mesh_transformer.generation.stream import MOST_STEPS
from mesh_transformer.generation.weights import DRAFT, Weights, weight_layout
from mesh_transformer.mesh.placement import Rows
from mesh_transformer.mesh.program import Layout
from mesh_transformer.model.lora import Adapter
from mesh_transformer.util import InputError, bucket, check_number

# The number of cache slots is also rounded up to this times a power of two, because every new
# number of slots compiles a new program.
SMALLEST_CACHE = 256
# Maximum number of tokens that a replica processes in one prefill call, unless a single prompt has
# more.  Attention memory grows with this number times the width that the prompts are padded to.
PREFILL_TOKENS = 4096


class Generator:
    """The compiled functions that generate text on a mesh, and the weights that they use.

    The weights are a copy of the model's parameters, converted for generation.  LoRA adapters that
    the model has are merged in, and with `weight_bits` the matrices are quantized.  The dtype is
    f32 on CPUs, where bf16 matmuls are slow, and `config.dtype` on other devices.

    Args:
      layout: the layout of the model's parameters.
      adapters: further adapters, one of which each text may choose.
      draft: the generator of a smaller model on the same mesh, with cached weights, which guesses
        tokens in batches that are made with `guesses`; None to look guesses up.

    Raises:
      InputError: if the adapters' ranks sum to more than the model's width, or as `WeightLayout`.
    """

    def __init__(
        self,
        layout: Layout,
        rows: Rows,
        adapters: Sequence[Adapter] = (),
        draft: "Generator | None" = None,
    ):
        self._source = layout
        self.adapters, self.draft = adapters, draft
        configs = tuple(adapter.config for adapter in adapters)
        self.layout = weight_layout(layout, configs)
        self.config = self.layout.config
        self.rows = rows
        self._weights = programs.compile_weights(layout, self.layout, configs)
        # The parameters' arrays (None after `cache_weights`), and the weights computed from them.
        self._made: tuple[list[Array] | None, Weights] | None = None
        self._scorer = functools.cache(functools.partial(programs.compile_score, self.layout))
        self._embedder = functools.cache(functools.partial(programs.compile_embed, self.layout))
        self._before = programs.compile_before(self.layout)
        # The last beginning that `score` got, and its keys and values.
        self._begun: tuple[tuple[bytes, int], texts.Before] | None = None
        # The arrays that `bad_weights` got last, and its result.
        self._searched: tuple[list[weakref.ref[Array]], str] | None = None
        self.empty = self._cached(programs.compile_empty)
        self.grow = self._cached(programs.compile_grow)
        self.prefill = self._cached(programs.compile_prefill)
        self.decode = self._cached(programs.compile_decode)

    def with_draft(self, draft: "Generator") -> "Generator":
        """Return the same generator with another draft, and with the weights of this one."""
        result = Generator(self._source, self.rows, self.adapters, draft)
        result._made = self._made
        return result

    def of_next_params(self) -> "Generator":
        """Return the generator for parameters that replace the present ones.

        It has the same draft, but no adapters, which belong to the parameters they were trained on.
        """
        self._made = self._begun = None
        return Generator(self._source, self.rows, (), self.draft) if self.adapters else self

    def _cached(self, compile_program: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that compiles programs for a batch's state, each of them once.

        Its argument `drafts` says whether the draft guesses tokens in the batch; the others are
        those of `compile_program`.
        """

        @functools.cache
        def program(drafts: bool, *args: Any) -> Any:
            draft = None
            if self.draft is not None and drafts:
                draft = within_window(self.draft.config, self.config)
            return compile_program(self.layout, *args, draft=draft)

        return lambda *args, drafts=False: program(drafts, *args)

    def weights(self, params: Any | None) -> Weights:
        """Return the weights for generation, computed from `params`.

        The result is cached.  It is computed again only if `params` contains other array objects
        than in the previous call.  If `params` is None, the cached weights are returned.

        Raises:
          InputError: if `params` is None and no weights are cached.
        """
        if params is None:
            if self._made is None:
                raise InputError("the model has no weights yet; call init, restore or load")
            return self._made[1]
        arrays = jax.tree.leaves(params)
        if self._made is None or not _identical(self._made[0], arrays):
            # Free the old weights first, so that only one copy is in memory.
            self._made = self._begun = None
            factors = [adapter.params for adapter in self.adapters]
            self._made = (arrays, self._weights(params, factors))
        return self._made[1]

    def cache_weights(self, params: Any) -> None:
        """Convert `params` to the weights for generation, and keep only the converted copy.

        The caller can then free the memory of `params`.  The copy is kept until `weights` or
        `cache_weights` is called with parameters, or `of_next_params` is.
        """
        self._made = (None, self.weights(params))

    def init_weights(self, init: Callable[[Array], Any]) -> None:
        """Make weights for generation from new parameters, which are never in memory as a whole.

        Args:
          init: a function from a PRNG key to parameters.
        """
        self._made = self._begun = None
        make = jax.jit(lambda key: self._weights(init(key), []))
        self._made = (None, make(jax.random.key(self.config.seed)))

    def drop_weights(self) -> None:
        """Drop the cached weights and free their memory; call this before the parameters change.

        Weights that were cached by `cache_weights` are kept.
        """
        if self._made is not None and self._made[0] is not None:
            self._made = self._begun = None

    def run(self, params: Any | None, call: Call[Any]) -> Any:
        """Run a call; its batch rows are those of this process.

        Args:
          params: the model's parameters, or None to use the cached weights.
        """
        match call:
            case Score():
                return self._score(self.weights(params), call)
            case Embed():
                return self._embed(self.weights(params), call)
            case NewBatch():
                return self.new_batch(params, call)
            case BadWeights():
                return self.bad_weights(self.weights(params))
        raise TypeError(f"a network does not run {type(call).__name__}")

    def _score(self, weights: Weights, call: Score) -> Chosen:
        tokens, alternatives = call.tokens, call.alternatives
        if tokens.shape[1] < 2:
            raise InputError(
                f"score: tokens has shape {tokens.shape}, expected at least 2 tokens per row"
            )
        check_number("score: alternatives", alternatives, 0, self.config.n_vocab)
        check_adapters(call.adapter, len(self.adapters))
        beginning, first = call.beginning, 0
        if beginning is not None and self.config.exact:  # keys in the slots of their positions
            first, repeated = len(beginning), np.tile(beginning, (len(tokens), 1))
            tokens, beginning = np.concatenate((repeated, tokens), axis=1), None
        placed = self.rows.place(self.rows.pad(tokens), P("dp"))
        number = np.array([call.adapter], np.int32)
        text = None if beginning is None else self._text(weights, beginning, number)
        # The program needs the most likely token itself.
        compute = self._scorer(max(alternatives, 1), text is not None)
        scored = compute(weights, placed[:, :-1], placed[:, 1:], text, number)
        scored = jax.tree.map(
            lambda x: np.asarray(self.rows.fetch(x, len(tokens)))[:, first:], scored
        )
        with blaming(lambda: self.cause(weights)):
            check_finite((scored.logprob, scored.top_logprob), "logits")
        return scored._replace(
            top_token=scored.top_token[..., :alternatives],
            top_logprob=scored.top_logprob[..., :alternatives],
        )

    def _embed(self, weights: Weights, call: Embed) -> np.ndarray:
        check_adapters(call.adapter, len(self.adapters))
        rows = [self.rows.place(self.rows.pad(x), P("dp")) for x in (call.tokens, call.lengths)]
        vectors = self._embedder(call.pooling)(weights, *rows, np.array([call.adapter], np.int32))
        result = np.asarray(self.rows.fetch(vectors, len(call.tokens)))
        with blaming(lambda: self.cause(weights)):
            check_finite((result,), "vectors")
        return result

    def bad_weights(self, weights: Any) -> str:
        """Name the first of some arrays with NaN or infinite values; see `describe_bad_weights`.

        The same arrays are searched only once.  All processes of the mesh must call this.
        """
        arrays = jax.tree.leaves(weights)
        if self._searched is None or not _identical([x() for x in self._searched[0]], arrays):
            result = describe_bad_weights(weights, self.layout.mesh)
            self._searched = [weakref.ref(x) for x in arrays], result
        return self._searched[1]

    def cause(self, weights: Any) -> str | None:
        """Return why results are not finite, for `blaming`: the result of `bad_weights`.

        None stands for unknown, as other processes may have other rows, and finite results.
        """
        return self.bad_weights(weights) if self.rows.alone else None

    def _text(self, weights: Weights, tokens: np.ndarray, adapter: np.ndarray) -> texts.Before:
        """Return the keys and values of the text that all rows follow, token ids [T]."""
        name = tokens.tobytes(), int(adapter[0])
        if self._begun is None or self._begun[0] != name:
            self._begun = None  # freed first, so that memory never holds two texts
            width = bucket(len(tokens), SMALLEST_PROMPT, self.config.seq)
            padded = np.zeros((1, width), np.uint32)
            padded[0, : len(tokens)] = tokens
            self._begun = name, self._before(weights, padded, np.int32(len(tokens)), adapter)
        return self._begun[1]

    def new_batch(self, params: Any, call: NewBatch) -> Run:
        """Create an idle batch in this process.

        Args:
          params: the model's parameters, or None to use the cached weights.

        Raises:
          InputError: if the number of guesses is not smaller than the window.
        """
        check_guesses(call.guesses, self.config.window)
        weights = self.weights(params)
        if call.guesses and self.draft is not None:
            weights = weights | {DRAFT: self.draft.weights(None)}
        return DeviceBatch(self, weights, call).run

    def batch(self, params: Any, rows: int, pool: Pool | None = None) -> Batch:
        """Return an idle `Batch` with `rows` rows in this process."""
        create = functools.partial(self.new_batch, params)
        replicas = len(self.rows.replicas)
        adapters = len(self.adapters)
        return Batch(create, self.config, rows, replicas, adapters=adapters, pool=pool)


def _identical(one: Sequence[Array | None] | None, other: list[Array]) -> bool:
    """Return whether two lists contain the same array objects; False if `one` is None."""
    return one is not None and list(map(id, one)) == list(map(id, other))


def check_memory(state: Any, tokens: int, mesh: Mesh) -> None:
    """Check that the devices have memory for a batch, if they say how much they have.

    Args:
      state: the shapes of the batch's arrays.
      tokens: number of tokens that each replica's pool has room for.

    Raises:
      InputError: if they have not; it says how many tokens fit.
    """
    memory = mesh.local_devices[0].memory_stats() or {}
    if not {"bytes_limit", "bytes_in_use"} <= memory.keys():
        return
    free = memory["bytes_limit"] - memory["bytes_in_use"]
    parts = mesh.size // mesh.shape.get("cp", 1)  # devices along cp hold the same
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / parts
    if needed > free:
        raise InputError(
            f"a cache of {tokens:,} tokens needs {needed / 2**30:.2f} GiB per device, and "
            f"{free / 2**30:.2f} are free, which about {int(tokens * free / needed):,} tokens fit "
            "in; lower --cache-tokens"
        )


class DeviceBatch:
    """The rows of a `Batch` in this process, and their keys and values on the devices."""

    def __init__(self, generator: Generator, weights: Weights, call: NewBatch):
        self._generator = generator
        self._weights = weights
        self._replicas = len(generator.rows.replicas)
        self._size, self._pool, self._guesses = call.rows, call.pool, call.guesses
        self._drafts = DRAFT in weights
        window, pool = generator.config.window, call.pool
        self._storage = storage(generator.config, call.guesses, pool)
        self._most_slots = most_slots(window, call.guesses, pool)
        if pool is not None:
            check_kernel(generator.config, generator.layout.mesh, call.rows, call.guesses, pool)
        slots = bucket(1, SMALLEST_CACHE, self._most_slots) if pool is None else self._most_slots
        empty = generator.empty(self._storage, drafts=self._drafts)
        create = functools.partial(empty, self._size * generator.rows.dp, slots, pool)
        if pool is not None:
            check_memory(jax.eval_shape(create), pool.pages * pool.page, generator.layout.mesh)
        self._state: DecodeState = create()

    def run(self, call: Call[Any]) -> Any:
        """Run a call of the batch; its rows are those of this process."""
        match call:
            case Decode():
                return self._decode(call)
            case Insert():
                return self._insert(call)
            case Reserve():
                return self._reserve(call.positions)
            case BadWeights():
                return self._generator.cause(self._weights)
            case ReadPages():
                caches = self._state.caches, self._state.draft_caches
                return [
                    np.asarray(x) for x in jax.tree.leaves(programs.read_pages(caches, call.pages))
                ]
            case WritePages():
                caches = self._state.caches, self._state.draft_caches
                contents = jax.tree.unflatten(jax.tree.structure(caches), call.contents)
                own, draft = programs.write_pages(caches, call.pages, contents)
                self._state = self._state._replace(caches=own, draft_caches=draft)
                return None
        raise TypeError(f"a batch does not run {type(call).__name__}")

    def _reserve(self, positions: int) -> None:
        """Grow the KV cache so that each row can hold `positions` tokens."""
        slots = bucket(positions + self._guesses, SMALLEST_CACHE, self._most_slots)
        if slots > self._state.slots:
            self._state = self._generator.grow(self._storage, drafts=self._drafts)(
                self._state, slots
            )

    def _insert(self, call: Insert) -> Chosen:
        slots = call.width
        if call.reach is not None:  # some prompts attend to tokens that the cache holds
            self._reserve(max(call.reach, slots))
            slots = self._state.slots
        self._reserve(slots)
        # The last row is a dummy prompt.  The index -1 in a group (see `_groups`) selects it.
        count, longest = call.tokens_PT.shape
        tokens = np.zeros((count + 1, slots), np.uint32)
        tokens[:count, :longest] = call.tokens_PT
        begin = np.zeros(count, np.int32)
        pages = [np.full((count + 1, 0), -1, np.int32)] * 4
        if call.chunks is not None:
            begin, *given = call.chunks
            if self._pool is not None:
                if self._storage.keeps and any(x is None for x in given):
                    raise InputError(
                        "generate: the model has layers with a sliding window, so `chunks` must "
                        "have restored_PG and kept_PG"
                    )
                pages = [
                    none if x is None else np.pad(x, ((0, 1), (0, 0)), constant_values=-1)
                    for x, none in zip(given, pages, strict=True)
                ]
                pages[-1] = pages[-1][:, : call.width // self._pool.page + 1]
        with_dummy = Prompts(
            tokens,
            np.append(call.length_P, np.int32(1)),
            # The last one is out of range, so that it is not written.
            np.append(call.row_P % self._size, np.int32(self._size * self._replicas)),
            np.append(begin, np.int32(0)),
            *pages,
            settings=jax.tree.map(lambda x, idle: np.r_[x, idle[None]], call.settings, decode.IDLE),
            allowed_PW=self._bits([*call.row_P, -1], call.allowed),
        )
        groups = self._groups(call.row_P, call.width, call.most)
        results = [self._prefill(group, with_dummy, call) for group in groups]
        places = np.concatenate(groups)
        order = np.argsort(places)[np.count_nonzero(places < 0) :]
        return jax.tree.map(lambda *parts: np.concatenate(parts)[order], *results)

    def _groups(self, rows: np.ndarray, width: int, most: int) -> list[np.ndarray]:
        """Divide the prompts among prefill calls; see `Insert`.

        Returns:
          One array of prompt indices per prefill call.  Each array has the same number of entries
          for every replica, in the order of the replicas.  Unused entries are -1.
        """
        queues = [np.flatnonzero(rows // self._size == r) for r in range(self._replicas)]
        size = bucket(most, 1, max(PREFILL_TOKENS // width, 1))
        places = np.full((self._replicas, -(-most // size) * size), -1)
        for place, queue in zip(places, queues, strict=True):
            place[: len(queue)] = queue
        return [part.reshape(-1) for part in np.split(places, places.shape[1] // size, axis=1)]

    def _prefill(self, group: np.ndarray, prompts: Prompts, call: Insert) -> Chosen:
        """Insert the prompts whose indices are in `group`, in one prefill call."""
        generator = self._generator
        placed = generator.rows.place(jax.tree.map(lambda x: x[group], prompts), P("dp"))
        options = call.alternatives, call.width, self._storage, call.allowed is not None
        run = generator.prefill(*options, drafts=self._drafts)
        self._state, chosen = run(self._weights, self._state, placed)
        return self._fetched(chosen)

    def _decode(self, call: Decode) -> tuple[Chosen, np.ndarray | None]:
        self._reserve(call.positions)
        run = self._generator.decode(
            call.alternatives,
            MOST_STEPS,
            self._storage,
            call.guesses,
            call.allowed is not None,
            drafts=self._drafts,
        )
        bits = self._bits(range(len(call.left)), call.allowed)
        placed = self._generator.rows.place((call.left, bits), P("dp"))
        self._state, chosen, made = run(
            self._weights, self._state, placed[0], np.int32(call.steps), placed[1]
        )
        made = self._fetched(made) if call.guesses else None
        most = call.steps * (1 + call.guesses)
        return jax.tree.map(lambda x: x[:, :most], self._fetched(chosen)), made

    def _bits(
        self, rows: Iterable[int], allowed: Mapping[int, np.ndarray] | None
    ) -> np.ndarray | None:
        """Return the tokens that each of `rows` may generate, as bits [rows, W]."""
        if allowed is None:
            return None
        every = np.full(-(-self._generator.config.n_vocab // 32), 2**32 - 1, np.uint32)
        return np.stack([allowed.get(row, every) for row in rows])

    def _fetched(self, tree: Any) -> Any:
        """Return this process's rows of the arrays in `tree` as numpy arrays."""
        rows = self._generator.rows

        def fetched(x: Array) -> np.ndarray:
            return np.asarray(rows.fetch(x, len(x) // rows.dp * self._replicas))

        return jax.tree.map(fetched, tree)
