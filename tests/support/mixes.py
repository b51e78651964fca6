"""Random mixes of requests to the engine, and their answers with and without its features."""

import contextlib
import copy
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.generation import decode
from mesh_transformer.generation.generator import Generator
from mesh_transformer.generation.sampling import SamplingOptions
from mesh_transformer.generation.speculation import draft_config
from mesh_transformer.model.lora import Adapter
from mesh_transformer.network import Network
from mesh_transformer.serving.engine import Engine, Progress, Request, Token
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.training.step import StateLayout, init_state
from mesh_transformer.transformer_shard import CausalTransformer

ROWS = 4
CHUNK = 16
GUESSES = 3
# Where guesses come from: nowhere (all of them are token 0), earlier text, a draft with random
# weights, or the model itself as its own draft.
GUESSERS = ("nothing", "lookup", "draft", "itself")
# The keys of the draft's config that differ from the model's.
DRAFT = {"layers": 1, "d_model": 32, "n_heads": 4, "block": "geglu", "seed": 7}
SECONDS = 300  # after which an answer counts as missing


class Features(NamedTuple):
    """The features of an engine that must not change any token.

    Attributes:
      kept_tokens: see `Engine`.
      windows: room in the cache of each replica, in windows; None for enough.
      guesser: one of `GUESSERS`.
    """

    kept_tokens: int
    windows: float | None
    guesser: str

    @staticmethod
    def random(rng: np.random.Generator) -> "Features":
        """Return a random combination; a few blocks are soon replaced."""
        kept = int(rng.choice([0, 3 * CHUNK, 40 * CHUNK]))
        # A row has at most the window and one chunk, which holds the guesses.
        windows = None if rng.random() < 0.5 else float(rng.uniform(1.5, 2.5))
        return Features(kept, windows, str(rng.choice(GUESSERS)))


PLAIN = Features(kept_tokens=0, windows=None, guesser="nothing")


class Networks:
    """Equal networks, each of which guesses in another way.

    Args:
      config: their config.
      devices: number of devices of each.
      adapters: number of adapters of each, with random factors.
    """

    def __init__(self, config: Config, devices: int, adapters: int):
        self.adapters = adapters
        drafts = {
            # A window of its own, shorter than the model's.
            "draft": config.replace(**DRAFT, attention_window=config.window // 2),
            "itself": config,
        }

        def make(guesser: str) -> CausalTransformer:
            network = CausalTransformer(config, devices=jax.devices()[:devices])
            own = StateLayout(network.config, network.mesh), network._rows
            draft = None
            if guesser in drafts:
                smaller = draft_config(drafts[guesser], config, guesser)
                guessing = CausalTransformer(smaller, devices=jax.devices()[:devices])
                guessing.only_generate()
                draft = guessing._generator
            network._generator = Generator(*own, random_adapters(config, adapters), draft)
            return network

        self.by_guesser = {guesser: make(guesser) for guesser in GUESSERS}

    @contextlib.contextmanager
    def with_features(self, features: Features) -> Iterator[Network]:
        """Return a context manager for a network; its programs must be compiled in such a context.

        The kept tokens and the room in the cache are arguments of the engine.
        """
        with pytest.MonkeyPatch.context() as patch:
            if features.guesser == "nothing":
                patch.setattr(decode, "guess", lambda history, _, count: 0 * history[:, :count])
            yield self.by_guesser[features.guesser]


class Limits:
    """A constraint that allows a few random tokens at each position, and some number of tokens."""

    def __init__(self, seed: int, n_vocab: int):
        self._rng, self._n_vocab = np.random.default_rng(seed), n_vocab
        self._left = int(self._rng.integers(1, 15))
        self._next()

    def _next(self) -> None:
        self._tokens = self._rng.permutation(self._n_vocab)[: self._rng.choice([1, 2, 20])]
        self.allowed = bits_of(self._tokens, self._n_vocab)

    def add(self, token: int) -> bool:
        assert token in self._tokens
        self._left -= 1
        self._next()
        return self._left == 0


def bits_of(tokens: np.ndarray, n_vocab: int) -> np.ndarray:
    """Return a set of token ids as bits of uint32 words (see `sampling.choose`)."""
    bits = np.zeros(-(-n_vocab // 32) * 32, np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def random_adapters(config: Config, count: int) -> list[Adapter]:
    """Return adapters with random factors, of ranks 1, 2, ..."""
    adapters = []
    for number in range(1, count + 1):
        own = config.replace(lora_rank=number, lora_alpha=3.0, lora_targets=["q", "fc", "out"])
        shapes = jax.eval_shape(lambda own=own: init_state(own, jax.random.key(0)))["params"]
        rng = np.random.default_rng(number)
        factors = jax.tree.map(
            lambda x, rng=rng: jnp.asarray(rng.normal(scale=0.2, size=x.shape), jnp.float32), shapes
        )
        adapters.append(Adapter(own, factors))
    return adapters


def random_requests(
    rng: np.random.Generator, config: Config, adapters: int = 0
) -> list[dict[str, Any]]:
    """Return the arguments of 3 to 12 requests, many of which begin with the same tokens.

    Args:
      adapters: number of the network's adapters.
    """
    n_vocab, window = config.n_vocab, config.window
    shared = [rng.integers(0, n_vocab, window, dtype=np.int32) for _ in range(2)]

    def prompt() -> np.ndarray:
        tail = rng.integers(0, n_vocab, rng.integers(1, 20), dtype=np.int32)
        begin = shared[rng.integers(2)][: rng.integers(0, window - 20)]
        if rng.random() < 0.3:
            tail = np.tile(tail[:3], 6)  # soon guessed
        return np.concatenate((begin, tail))

    return [
        {
            "prompt": prompt(),
            "length": int(rng.integers(1, 30)),
            "settings": SamplingOptions(
                temp=float(rng.choice([0.0, 0.7, 1.0])),
                top_p=float(rng.choice([0.5, 1.0])),
                top_k=int(rng.choice([0, 5])),
                repetition_penalty=float(rng.choice([1.0, 1.2])),
                frequency_penalty=float(rng.choice([0.0, 0.5])),
                seed=int(rng.integers(2**32)),
                adapter=int(rng.integers(adapters + 1)),
            ),
            "stop": frozenset([int(rng.integers(n_vocab))] if rng.random() < 0.3 else []),
            "logprobs": bool(rng.random() < 0.5),
            "constraint": Limits(rng.integers(99), n_vocab) if rng.random() < 0.3 else None,
        }
        for _ in range(rng.integers(3, 13))
    ]


class Answer:
    """The tokens of one answer, as they are delivered."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.error: Exception | None = None
        self.begun, self.ended = threading.Event(), threading.Event()

    def deliver(self, progress: Progress) -> None:
        self.tokens += progress.tokens
        self.error = progress.error
        self.begun.set()
        if progress.ended:
            self.ended.set()

    def wait(self) -> list[Token]:
        """Return all tokens, or raise the error that has ended the answer."""
        assert self.ended.wait(SECONDS)
        if self.error is not None:
            raise self.error
        return self.tokens


def answers(
    network: Network,
    requests: Sequence[dict[str, Any]],
    sizes: Sequence[int],
    metrics: Metrics | None = None,
    **options: Any,
) -> list[list[Token]]:
    """Return an engine's answers to requests that arrive in groups.

    Args:
      metrics: the engine's metrics; None for new ones.
      sizes: number of requests per group; each group arrives when the one before is being answered.
      options: further arguments of `Engine`.
    """
    engine = Engine(network, metrics or Metrics(ROWS), rows=ROWS, chunk=CHUNK, **options)
    engine.start()
    every = [Answer() for _ in requests]
    try:
        for begin, end in itertools.pairwise(np.cumsum([0, *sizes])):
            group = zip(requests[begin:end], every[begin:end], strict=True)
            # A copy, because constraints change.
            engine.submit(
                [Request(deliver=to.deliver, **copy.deepcopy(request)) for request, to in group]
            )
            assert every[begin].begun.wait(SECONDS)
        return [answer.wait() for answer in every]
    finally:
        engine.close()


def random_sizes(rng: np.random.Generator, count: int) -> list[int]:
    """Return random group sizes of at least 1 whose sum is `count`."""
    ends = np.sort(rng.choice(np.arange(1, count), rng.integers(0, count - 1), replace=False))
    return np.diff([0, *ends, count]).tolist()


def compare(networks: Networks, seed: int, guesser: str | None = None) -> tuple[Features, int, int]:
    """Answer a random mix with random features, and without features one request at a time.

    Both engines have fixed shapes.

    Args:
      guesser: one of `GUESSERS`; None for a random one.

    Returns:
      The features, and how many answers differ in any token or logprob, of how many.
    """
    rng = np.random.default_rng(seed)
    config = networks.by_guesser["nothing"].config
    requests = random_requests(rng, config, networks.adapters)
    features, sizes = Features.random(rng), random_sizes(rng, len(requests))
    features = features._replace(guesser=guesser or features.guesser)
    results = []
    for chosen, groups in ((features, sizes), (PLAIN, [1] * len(requests))):
        options = {"fixed_shapes": True, "speculate": GUESSES, "kept_tokens": chosen.kept_tokens}
        if chosen.windows is not None:
            options["cache_tokens"] = int(chosen.windows * config.window)
        with networks.with_features(chosen) as network:
            results.append(answers(network, requests, groups, **options))
    different = sum(actual != expected for actual, expected in zip(*results, strict=True))
    return features, different, len(requests)
