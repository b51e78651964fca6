"""A fake network for tests of the server, whose tokens are all known in advance."""

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.generation.sampling import SamplerSettings


class FakeChosen(NamedTuple):
    token: np.ndarray
    logprob: np.ndarray | None = None
    top_token: np.ndarray | None = None
    top_logprob: np.ndarray | None = None


class FakeNetwork:
    """Generates `script`: with seed s, the n-th token after T prompt tokens is script[s + T + n].

    Attributes:
      calls: the calls of the engine, in order: ("insert", rows, width), ("chunk", rows, width) for
        prompts whose beginning is not computed, or ("decode", steps).
      allowed: while this event is cleared, calls wait until it is set again.
      failures: exceptions that the next calls raise, or None for a call that succeeds.
    """

    def __init__(
        self, script: Sequence[int], n_vocab: int = 50400, window: int = 64, **config: Any
    ):
        self.script = list(script)
        defaults = {
            "end_tokens": None,
            "n_vocab": n_vocab,
            "window": window,
            "seq": window,
            "pe": "rotary",
            "d_model": 4,
        }
        self.dp = 1
        self.config: Any = SimpleNamespace(**defaults | config)
        self.calls: list[tuple[Any, ...]] = []
        self.allowed = threading.Event()
        self.allowed.set()
        self.settings: Any = None  # of the last prompts
        self.waits = False  # whether a call is waiting
        self.failures: list[Exception | None] = []
        self.seconds = 0.0  # duration of each call

    def batch(self, rows: int, pool: Any = None, guesses: int = 0) -> "FakeBatch":
        self.call("batch")
        return FakeBatch(self, rows, guesses)

    def call(self, *what: Any) -> None:
        self.waits = not self.allowed.is_set()
        self.allowed.wait()
        self.waits = False
        time.sleep(self.seconds)
        self.calls.append(what)
        if self.failures and (failure := self.failures.pop(0)):
            raise failure

    def answer(self, prompt: Sequence[int], seed: int, length: int) -> list[int]:
        begin = seed + len(prompt)
        return [self.script[(begin + at) % len(self.script)] for at in range(length)]

    def chosen(self, tokens: np.ndarray, alternatives: int | None) -> FakeChosen:
        """Return tokens with logprobs -1 - number / n_vocab and the alternatives 0, 1, 2, ..."""
        if alternatives is None:
            return FakeChosen(tokens)
        top = np.broadcast_to(np.arange(alternatives), (*tokens.shape, alternatives))
        return FakeChosen(tokens, -1 - tokens / self.config.n_vocab, top, -0.1 * (1 + top))

    def logprobs(self) -> np.ndarray:
        """Return the logprobs [V] that `score` gives to the tokens, regardless of the context."""
        row = np.random.default_rng(0).normal(size=self.config.n_vocab)
        return row - np.log(np.exp(row).sum())

    def score(self, tokens: np.ndarray, alternatives: int, *, adapter: int = 0) -> FakeChosen:
        self.call("score", tokens.shape[1], *[adapter] * bool(adapter))
        scored, row = tokens[:, 1:], self.logprobs()
        top = np.broadcast_to(np.argsort(-row)[:alternatives], (*scored.shape, alternatives))
        return FakeChosen(scored, row[scored], top, row[top])

    def embed(
        self, tokens: np.ndarray, lengths: np.ndarray, pooling: str, adapter: int = 0
    ) -> np.ndarray:
        """Return vectors with the numbers of tokens 0, 1, 2, 3 of each text."""
        self.call("embed", tokens.shape[1], pooling, *[adapter] * bool(adapter))
        texts = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        return np.array([np.bincount(text, minlength=4)[:4] for text in texts], np.float32)


def first_allowed(bits: np.ndarray | None, token: int) -> int:
    """Return the token, or the first one after it whose bit is set."""
    if bits is None:
        return token
    (tokens,) = np.nonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return int(tokens[np.searchsorted(tokens, token) % len(tokens)])


class FakeBatch:
    def __init__(self, network: FakeNetwork, rows: int, guesses: int):
        self.rows = rows
        self._network = network
        self._texts: list[list[int]] = [[] for _ in range(rows)]
        self._made = [0] * rows
        self._guesses = guesses

    def reserve(self, positions: int) -> None:
        assert positions == self._network.config.window

    def insert(
        self,
        rows: Sequence[int],
        prompts: Sequence[np.ndarray],
        lengths: Any,
        settings: SamplerSettings,
        *,
        alternatives: int | None = None,
        chunks: Any = None,
        allowed: Any = None,
        longest: int | None = None,
    ) -> FakeChosen:
        begin = np.zeros(len(rows), int) if chunks is None else chunks.begin_P
        width = longest or max(len(x) - int(at) for x, at in zip(prompts, begin, strict=True))
        self._network.call("chunk" if begin.any() else "insert", len(rows), width)
        self._network.settings = settings
        requests = zip(
            rows, prompts, np.broadcast_to(lengths, len(rows)), settings.seed_B, strict=True
        )
        for row, prompt, length, seed in requests:
            answer = self._network.answer(prompt.tolist(), int(seed), int(length))
            answer[0] = first_allowed(allowed.get(row), answer[0])
            self._texts[row], self._made[row] = answer, 1
        first = np.array([self._texts[row][0] for row in rows])
        return self._network.chosen(first, alternatives)

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._texts[row] = []

    @property
    def left(self) -> np.ndarray:
        pairs = zip(self._texts, self._made, strict=True)
        return np.array([max(len(text) - made, 0) for text, made in pairs])

    def decode(
        self,
        steps: int,
        alternatives: int | None = None,
        *,
        speculate: bool = False,
        allowed: Any = None,
    ) -> FakeChosen:
        """Generate 1 token per row and step; by speculation all guesses but row's number."""
        self._network.call("decode", steps)
        tokens = np.full((self.rows, steps * (1 + self._guesses * speculate)), 13)
        for row, (text, made) in enumerate(zip(self._texts, self._made, strict=True)):
            right = max(self._guesses - row, 0) if speculate else 0
            most = 1 if row in allowed else steps * (1 + right)
            new = text[made : made + most]
            if new and row in allowed:
                text[made] = new[0] = first_allowed(allowed[row], new[0])
            tokens[row, : len(new)] = new
            self._made[row] += len(new)
        return self._network.chosen(tokens, alternatives)
