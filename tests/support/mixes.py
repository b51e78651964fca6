"""Random mixes of requests to the engine, and their answers with and without its features."""

import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.generation.sampling import SamplingOptions
from mesh_transformer.network import Network
from mesh_transformer.serving.engine import Engine, Progress, Request, Token
from mesh_transformer.serving.metrics import Metrics

ROWS = 4
CHUNK = 16
SECONDS = 300  # after which an answer counts as missing


class Features(NamedTuple):
    """The features of an engine that must not change any token."""

    kept_tokens: int

    @staticmethod
    def random(rng: np.random.Generator) -> "Features":
        """Return a random combination; a few blocks are soon replaced."""
        return Features(int(rng.choice([0, 3 * CHUNK, 40 * CHUNK])))


PLAIN = Features(kept_tokens=0)


def random_requests(rng: np.random.Generator, n_vocab: int, window: int) -> list[dict[str, Any]]:
    """Return the arguments of 3 to 12 requests, many of which begin with the same tokens."""
    shared = [rng.integers(0, n_vocab, window, dtype=np.int32) for _ in range(2)]

    def prompt() -> np.ndarray:
        tail = rng.integers(0, n_vocab, rng.integers(1, 20), dtype=np.int32)
        begin = shared[rng.integers(2)][: rng.integers(0, window - 20)]
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
    network: Network,
    requests: Sequence[dict[str, Any]],
    features: Features,
    sizes: Sequence[int],
    **options: Any,
) -> list[list[Token]]:
    """Return an engine's answers to requests that arrive in groups.

    Args:
      sizes: number of requests per group; each group arrives when the one before is being answered.
      options: further arguments of `Engine`.
    """
    options = {"rows": ROWS, "chunk": CHUNK, **features._asdict(), **options}
    engine = Engine(network, Metrics(ROWS), **options)
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
