"""A fake network for tests of the server, whose tokens are all known in advance."""

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.calls import Call
from mesh_transformer.generation.batch import Decode, Embed, Insert, NewBatch, Reserve, Score
from mesh_transformer.network import Network


class FakeChosen(NamedTuple):
    token: np.ndarray
    logprob: np.ndarray | None = None
    top_token: np.ndarray | None = None
    top_logprob: np.ndarray | None = None


class FakeNetwork(Network):
    """Generates `script`: with seed s, the n-th token after T prompt tokens is script[s + T + n].

    Attributes:
      calls: the calls of the engine, in order: ("insert", rows, width), ("chunk", rows, width) for
        prompts whose beginning is not computed, or ("decode", steps).
      allowed: while this event is cleared, calls wait until it is set again.
      adapters: larger than in any test.
      failures: exceptions that the next calls raise, or None for a call that succeeds.
    """

    @property
    def adapters(self) -> int:
        return 9

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
            "sliding_window": None,
            "exact": False,
            "paged_attention": "xla",
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

    def run(self, call: Call[Any]) -> Any:
        match call:
            case NewBatch():
                self.call("batch")
                return FakeBatch(self, call).run
            case Score():
                return self._scored(call)
            case Embed():
                return self._embedded(call)
        raise AssertionError(call)

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

    def _scored(self, call: Score) -> FakeChosen:
        self.call("score", call.tokens.shape[1], *[call.adapter] * bool(call.adapter))
        scored, row = call.tokens[:, 1:], self.logprobs()
        best = np.argsort(-row)[: call.alternatives]
        top = np.broadcast_to(best, (*scored.shape, call.alternatives))
        return FakeChosen(scored, row[scored], top, row[top])

    def _embedded(self, call: Embed) -> np.ndarray:
        """Return vectors with the numbers of tokens 0, 1, 2, 3 of each text."""
        own = [call.adapter] * bool(call.adapter)
        self.call("embed", call.tokens.shape[1], call.pooling, *own)
        texts = [row[:length] for row, length in zip(call.tokens, call.lengths, strict=True)]
        return np.array([np.bincount(text, minlength=4)[:4] for text in texts], np.float32)


def first_allowed(bits: np.ndarray | None, token: int) -> int:
    """Return the token, or the first one after it whose bit is set."""
    if bits is None:
        return token
    (tokens,) = np.nonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return int(tokens[np.searchsorted(tokens, token) % len(tokens)])


class FakeBatch:
    """Runs the calls of a batch of a `FakeNetwork`."""

    def __init__(self, network: FakeNetwork, call: NewBatch):
        self._network = network
        self._prompts: list[tuple[list[int], int]] = [([], 0)] * call.rows  # with their seeds
        self._made = np.zeros(call.rows, int)

    def run(self, call: Call[Any]) -> Any:
        match call:
            case Insert():
                return self._insert(call)
            case Decode():
                return self._decode(call)
            case Reserve():
                assert call.positions == self._network.config.window
        return None

    def _insert(self, call: Insert) -> FakeChosen:
        begin = 0 * call.length_P if call.chunks is None else call.chunks.begin_P
        width = int((call.length_P - begin).max())
        self._network.call("chunk" if begin.any() else "insert", len(call.row_P), width)
        self._network.settings = call.settings
        self._made[call.row_P] = 0
        prompts = zip(call.row_P, call.tokens_PT, call.length_P, call.settings.seed_B, strict=True)
        for row, tokens, length, seed in prompts:
            self._prompts[row] = tokens[:length].tolist(), int(seed)
        first = [self._next(int(row), 1, call.allowed)[0] for row in call.row_P]
        return self._network.chosen(np.array(first), call.alternatives)

    def _next(self, row: int, count: int, allowed: Any) -> list[int]:
        """Return the next `count` tokens of a row."""
        made = self._made[row]
        self._made[row] += count
        tokens = self._network.answer(*self._prompts[row], made + count)[made:]
        return [first_allowed((allowed or {}).get(row), token) for token in tokens]

    def _decode(self, call: Decode) -> tuple[FakeChosen, np.ndarray | None]:
        """Generate 1 token per row and step; by speculation all guesses but row's number."""
        self._network.call("decode", call.steps)
        tokens = np.full((len(call.left), call.steps * (1 + call.guesses)), 13)
        right = np.maximum(call.guesses - np.arange(len(tokens)), 0)
        made = np.minimum(call.left, call.steps * (1 + right))
        for row, count in enumerate(made.tolist()):
            if count:
                tokens[row, :count] = self._next(row, count, call.allowed)
        return self._network.chosen(tokens, call.alternatives), made if call.guesses else None
