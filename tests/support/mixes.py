"""Random mixes of requests to the engine, and their answers with and without its features."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.generation import decode
from mesh_transformer.generation.sampling import SamplingOptions
from mesh_transformer.network import Network
from mesh_transformer.serving.engine import Engine, Progress, Request, Token
from mesh_transformer.serving.metrics import Metrics

ROWS = 4
CHUNK = 16
GUESSES = 3
SECONDS = 300  # after which an answer counts as missing


class Features(NamedTuple):
    """The features of an engine that must not change any token.

    Attributes:
      kept_tokens: see `Engine`.
      lookup: whether guesses are looked up; otherwise all of them are token 0.
    """

    kept_tokens: int
    lookup: bool

    @staticmethod
    def random(rng: np.random.Generator) -> "Features":
        """Return a random combination; a few blocks are soon replaced."""
        kept = int(rng.choice([0, 3 * CHUNK, 40 * CHUNK]))
        return Features(kept, bool(rng.random() < 0.5))


PLAIN = Features(kept_tokens=0, lookup=False)


class Networks:
    """Two equal networks, of which only the first one looks guesses up.

    Args:
      make: creates a network.
    """

    def __init__(self, make: Callable[[], Network]):
        self.network, self._without = make(), make()

    @contextlib.contextmanager
    def with_features(self, features: Features) -> Iterator[Network]:
        """Return a context manager for a network; its programs must be compiled in such a context.

        The kept tokens are an argument of the engine.
        """
        with pytest.MonkeyPatch.context() as patch:
            if not features.lookup:
                patch.setattr(decode, "guess", lambda history, _, count: 0 * history[:, :count])
            yield self.network if features.lookup else self._without


def random_requests(rng: np.random.Generator, config: Config) -> list[dict[str, Any]]:
    """Return the arguments of 3 to 12 requests, many of which begin with the same tokens."""
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
            ),
            "stop": int(rng.integers(n_vocab)) if rng.random() < 0.3 else None,
            "logprobs": bool(rng.random() < 0.5),
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
    network: Network, requests: Sequence[dict[str, Any]], sizes: Sequence[int], **options: Any
) -> list[list[Token]]:
    """Return an engine's answers to requests that arrive in groups.

    Args:
      sizes: number of requests per group; each group arrives when the one before is being answered.
      options: further arguments of `Engine`.
    """
    engine = Engine(network, Metrics(ROWS), rows=ROWS, chunk=CHUNK, **options)
    engine.start()
    every = [Answer() for _ in requests]
    try:
        for begin, end in itertools.pairwise(np.cumsum([0, *sizes])):
            group = zip(requests[begin:end], every[begin:end], strict=True)
            engine.submit([Request(deliver=to.deliver, **request) for request, to in group])
            assert every[begin].begun.wait(SECONDS)
        return [answer.wait() for answer in every]
    finally:
        engine.close()


def random_sizes(rng: np.random.Generator, count: int) -> list[int]:
    """Return random group sizes of at least 1 whose sum is `count`."""
    ends = np.sort(rng.choice(np.arange(1, count), rng.integers(0, count - 1), replace=False))
    return np.diff([0, *ends, count]).tolist()


def compare(networks: Networks, seed: int) -> tuple[Features, int, int]:
    """Answer a random mix with random features, and without features one request at a time.

    Both engines have fixed shapes.

    Returns:
      The features, and how many answers differ in any token or logprob, of how many.
    """
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, networks.network.config)
    features, sizes = Features.random(rng), random_sizes(rng, len(requests))
    results = []
    for chosen, groups in ((features, sizes), (PLAIN, [1] * len(requests))):
        options = {"fixed_shapes": True, "speculate": GUESSES, "kept_tokens": chosen.kept_tokens}
        with networks.with_features(chosen) as network:
            results.append(answers(network, requests, groups, **options))
    different = sum(actual != expected for actual, expected in zip(*results, strict=True))
    return features, different, len(requests)
