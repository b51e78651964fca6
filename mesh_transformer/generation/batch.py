"""A running batch of prompts on a mesh, for callers that know tokens and rows but no arrays."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpy.typing import ArrayLike

from mesh_transformer.config import Config
from mesh_transformer.generation import decode
from mesh_transformer.generation.decode import Chosen, DecodeState, Prompts, Weights
from mesh_transformer.generation.prompts import check_prompts, check_texts
from mesh_transformer.generation.sampling import SamplerSettings, sampler_settings
from mesh_transformer.mesh.devices import named
from mesh_transformer.mesh.placement import Rows
from mesh_transformer.mesh.program import compiled
from mesh_transformer.model.attention import LayerCache
from mesh_transformer.util import InputError, bucket


def decode_specs(config: Config) -> decode.DecodeState:
    """The layout of a running batch: rows over dp, heads over mp."""
    rows, cache = P("dp"), P("dp", "mp")
    settings = SamplerSettings(*(rows,) * len(SamplerSettings._fields))
    caches = (LayerCache(cache, cache),) * config.layers
    return decode.DecodeState(caches, rows, rows, rows, rows, settings)


def compile_weights(config: Config, mesh: Mesh) -> Callable[[Any], Any]:
    """A function from params, in any layout, to the weights of the functions below."""
    return jax.jit(
        functools.partial(decode.weights_of, config=config),
        out_shardings=named(mesh, decode.weight_specs(config)),
    )


def compile_empty(config: Config, mesh: Mesh) -> Callable[[int, int], decode.DecodeState]:
    """(rows, slots) -> a batch of idle rows."""
    return jax.jit(
        functools.partial(decode.empty, config),
        static_argnums=(0, 1),
        out_shardings=named(mesh, decode_specs(config)),
    )


def compile_grow(config: Config, mesh: Mesh) -> Callable[..., decode.DecodeState]:
    """(batch, slots) -> the same batch with more slots."""
    layout = named(mesh, decode_specs(config))
    return jax.jit(decode.grow, static_argnums=1, out_shardings=layout)


def compile_score(config: Config, mesh: Mesh, alternatives: int) -> Callable[..., Any]:
    """(weights, tokens, following) -> what the model thinks of what follows each token."""
    rows = P("dp")
    function = functools.partial(decode.score, alternatives=alternatives)
    specs = (decode.weight_specs(config), rows, rows)
    return compiled(function, config, mesh, specs, rows)


def compile_prefill(config: Config, mesh: Mesh, alternatives: int | None) -> Callable[..., Any]:
    """(weights, batch, prompts) -> (batch, what was chosen); the old batch's memory is reused."""
    rows, state = P("dp"), decode_specs(config)
    prompts = decode.Prompts(rows, rows, rows, state.settings)
    function = functools.partial(decode.prefill, alternatives=alternatives)
    specs = (decode.weight_specs(config), state, prompts)
    return compiled(function, config, mesh, specs, (state, rows), donate_argnums=1)


def compile_decode(
    config: Config, mesh: Mesh, alternatives: int | None, most: int
) -> Callable[..., Any]:
    """(weights, batch, left, steps) -> (batch, chosen); the old batch's memory is reused."""
    state = decode_specs(config)
    function = functools.partial(decode.decode, alternatives=alternatives, most=most)
    specs = (decode.weight_specs(config), state, P("dp"), P())
    return compiled(function, config, mesh, specs, (state, P("dp")), donate_argnums=1)


SMALLEST_PROMPT = 16  # prompts are padded to this width times a power of two: few compilations
SMALLEST_CACHE = 256  # as for a prompt; a cache that grows is a new compilation each time
MOST_STEPS = 32  # in one call of the device
PREFILL_TOKENS = 4096  # in one call, on one replica: attention's memory is their number times T


class Generator:
    """The compiled functions of generation on a mesh, and the weights that they read.

    The weights are made once from the parameters, in the dtype that is fast here: f32 on CPUs,
    whose bf16 matmuls are slow, else `config.dtype`.
    """

    def __init__(self, config: Config, mesh: Mesh, rows: Rows):
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        # Weights are whole but for mp, whatever ZeRO makes of the state.
        own = config.replace(zero=0, dtype="float32" if on_cpu else config.dtype)
        self._weights = compile_weights(own, mesh)
        self.config = own.merged()
        self.mesh = mesh
        self.rows = rows
        self._made: tuple[Any, Weights] | None = None
        self.empty = compile_empty(self.config, mesh)
        self.grow = compile_grow(self.config, mesh)
        self._score = functools.cache(functools.partial(compile_score, self.config, mesh))
        self.prefill = functools.cache(functools.partial(compile_prefill, self.config, mesh))
        self.decode = functools.cache(functools.partial(compile_decode, self.config, mesh))

    def weights(self, params: Any | None) -> Weights:
        """What generation reads of `params`, kept until others are asked for; None: what is kept.

        Raises:
          InputError: where there is neither.
        """
        if params is None and self._made is None:
            raise InputError("the model has no weights yet; restore or load a checkpoint first")
        if self._made is None or (params is not None and self._made[0] is not params):
            self._made = None  # first, so that no memory holds two
            self._made = (params, self._weights(params))
        return self._made[1]

    def keep(self, params: Any) -> None:
        """Makes the weights of `params` and does not hold on to `params` themselves."""
        self._made = (None, self.weights(params))

    def forget(self) -> None:
        """Lets the weights of parameters go that are about to change, and their memory."""
        if self._made is not None and self._made[0] is not None:
            self._made = None

    def score(self, params: Any, tokens: np.ndarray, alternatives: int) -> Chosen:
        """See `CausalTransformer.score`."""
        if tokens.shape[1] < 2:
            raise InputError(f"score: tokens is {tokens.shape}, expected 2 or more in each row")
        placed = self.rows.place(self.rows.pad(tokens), P("dp"))
        scored = self._score(alternatives)(self.weights(params), placed[:, :-1], placed[:, 1:])
        return jax.tree.map(lambda x: np.asarray(self.rows.fetch(x, len(tokens))), scored)

    def batch(self, params: Any, rows: int) -> "Batch":
        """A batch of `rows` idle rows of this process, a multiple of its replicas."""
        if rows < 1 or rows % len(self.rows.replicas):
            raise InputError(
                f"generate: a batch of {rows} rows, expected a multiple of the "
                f"{len(self.rows.replicas)} replicas here"
            )
        return Batch(self, self.weights(params), rows)

    def generate(
        self,
        params: Any,
        ctx: ArrayLike,
        ctx_length: ArrayLike,
        gen_length: int,
        options: dict[str, Any],
    ) -> np.ndarray:
        """See `CausalTransformer.generate`."""
        tokens, length = check_prompts(ctx, ctx_length, gen_length)
        count = len(tokens)
        settings = sampler_settings(options, count)
        prompts = [row[len(row) - n :] for row, n in zip(tokens, length, strict=True)]
        replicas = len(self.rows.replicas)
        batch = self.batch(params, replicas * bucket(-(-count // replicas), 1))
        longest = None
        if not self.rows.alone:
            # What is compiled follows from the longest: all processes know it from their T alone.
            longest = tokens.shape[1]
            batch.reserve(longest + gen_length)
        first = batch.insert(range(count), prompts, gen_length, settings, longest=longest)
        found, made = [first.token[:, None]], 1
        while made < gen_length:
            found.append(batch.decode(min(gen_length - made, MOST_STEPS)).token[:count])
            made += found[-1].shape[1]
        return np.concatenate(found, axis=1)


class Batch:
    """Rows that generate side by side; each has its own prompt, settings and end.

    A row's tokens depend on its own prompt, settings and seed alone.  Several processes make the
    same calls, each for its own rows.

    Attributes:
      rows: how many rows there are here, as many of each replica.
      left: how many tokens each row may still have.
    """

    def __init__(self, generator: Generator, weights: Weights, rows: int):
        self.rows = rows
        self.left = np.zeros(rows, np.int32)
        self._length = np.zeros(rows, np.int32)  # tokens in each row's cache
        self._generator = generator
        self._weights = weights
        self._replicas = len(generator.rows.replicas)
        window = generator.config.window
        slots = bucket(1, SMALLEST_CACHE, window)
        self._state: DecodeState = generator.empty(
            rows // self._replicas * generator.rows.dp, slots
        )

    def reserve(self, positions: int) -> None:
        """Makes room for so many positions in each row, the window at most.

        It happens by itself as rows fill, except where other processes' rows decide too.
        """
        slots = bucket(positions, SMALLEST_CACHE, self._generator.config.window)
        if slots > self._state.slots:
            self._state = self._generator.grow(self._state, slots)

    def insert(
        self,
        rows: Sequence[int],
        prompts: Sequence[np.ndarray],
        lengths: ArrayLike,
        settings: SamplerSettings,
        *,
        alternatives: int | None = None,
        longest: int | None = None,
        most: int | None = None,
    ) -> Chosen:
        """Puts prompts into `rows`, in place of what is there, and chooses a token for each.

        Args:
          prompts: token ids, one array each; of more than `config.window` the last are used.
          lengths: how many tokens each may have, the one that is chosen now included.
          settings: one value a prompt.
          alternatives: how many of the likeliest tokens to tell, with logprobs (None: neither).
          longest: of several processes, the longest prompt that any of them gives.
          most: of several processes, how many prompts any of them gives to one replica at most;
            one may give none (default: all give as many to each replica).

        Returns:
          One token a prompt, as numpy arrays.

        Raises:
          InputError: for an empty prompt, tokens outside the vocabulary, or with pe fixed for
            more tokens than it has positions.
        """
        window = self._generator.config.window
        texts, length, left = check_texts(self._generator.config, prompts, lengths)
        width = bucket(min(longest or length.max(), window), SMALLEST_PROMPT, window)
        self.reserve(width)
        # The last is no prompt: it stands in the places that have none.
        tokens = np.zeros((len(texts) + 1, width), np.uint32)
        for row, text in zip(tokens, texts, strict=False):
            row[: len(text)] = text
        local = np.asarray(rows, np.int32) % (self.rows // self._replicas)
        given = Prompts(
            tokens,
            np.append(length, np.int32(1)),
            np.append(local, np.int32(self.rows)),  # beyond all rows: nowhere
            jax.tree.map(lambda x: np.append(x, x.dtype.type(1)), settings),
        )
        groups = self._groups(rows, width, most)
        found = [self._prefill(group, given, alternatives) for group in groups]
        self._length[list(rows)], self.left[list(rows)] = length, left - 1
        places = np.concatenate(groups)
        order = np.argsort(places)[np.count_nonzero(places < 0) :]
        return jax.tree.map(lambda *each: np.concatenate(each)[order], *found)

    def release(self, rows: Sequence[int] | np.ndarray) -> None:
        """Makes rows idle whose texts have ended early: they take no more tokens."""
        self.left[np.asarray(rows, np.intp)] = 0

    def _groups(self, rows: Sequence[int], width: int, most: int | None) -> list[np.ndarray]:
        """Which prompts each call takes, as many places for each replica; -1: an empty place."""
        replica = np.asarray(rows) // (self.rows // self._replicas)
        queues = [np.flatnonzero(replica == r) for r in range(self._replicas)]
        most = most or max(map(len, queues))
        size = bucket(most, 1, max(PREFILL_TOKENS // width, 1))
        places = np.full((self._replicas, -(-most // size) * size), -1)
        for place, queue in zip(places, queues, strict=True):
            place[: len(queue)] = queue
        return [part.reshape(-1) for part in np.split(places, places.shape[1] // size, axis=1)]

    def _prefill(self, group: np.ndarray, given: Prompts, alternatives: int | None) -> Chosen:
        taken = jax.tree.map(lambda x: x[group], given)
        generator = self._generator
        placed = generator.rows.place(taken, P("dp"))
        self._state, chosen = generator.prefill(alternatives)(self._weights, self._state, placed)
        return self._fetched(chosen)

    def decode(self, steps: int, alternatives: int | None = None) -> Chosen:
        """`steps` more tokens in every row that has so many left, at most `MOST_STEPS`.

        Returns:
          As numpy arrays [rows, steps, ...]; what stands beyond a row's end means nothing.
        """
        if not 1 <= steps <= MOST_STEPS:
            raise InputError(f"generate: decode of {steps} tokens, expected 1 to {MOST_STEPS}")
        ahead = np.minimum(self.left, steps)
        self.reserve(int((self._length + ahead).max()))
        run = self._generator.decode(alternatives, MOST_STEPS)
        left = self._generator.rows.place(self.left.copy(), P("dp"))  # which may not copy it
        self._state, chosen = run(self._weights, self._state, left, np.int32(steps))
        self._length += ahead
        self.left -= ahead
        return jax.tree.map(lambda x: x[:, :steps], self._fetched(chosen))

    def _fetched(self, chosen: Chosen) -> Chosen:
        rows = self._generator.rows
        here = chosen.token.shape[0] // rows.dp * self._replicas
        return jax.tree.map(lambda x: np.asarray(rows.fetch(x, here)), chosen)
