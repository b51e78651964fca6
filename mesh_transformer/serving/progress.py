"""Requests to the engine, and what it delivers: tokens, with logprobs, in updates on requests."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mesh_transformer.generation.sampling_settings import SamplingOptions
from mesh_transformer.serving.pages import Prompt


class Token(NamedTuple):
    """A token and, if requested, its logprob and the most likely tokens at its position.

    Attributes:
      number: the token's id.
      logprob: the token's log probability; None if not requested, and for a prompt's first token.
      top: (token id, logprob) pairs of the most likely tokens, most likely first.
    """

    number: int
    logprob: float | None = None  # in nats
    top: tuple[tuple[int, float], ...] = ()  # tokens and their logprobs, most likely first


class Progress(NamedTuple):
    """An update on a running request, delivered by the engine.

    Attributes:
      tokens: newly generated tokens.
      prompt: the prompt's tokens with their logprobs.  None if the request does not set `score`,
        and in all updates but the first.
      vector: the prompt's vector, f32 [D], if the request sets `embed`.
      ended: whether this is the last update of the request.
      complete: whether the request's constraint lets no token follow.
      error: the exception that has ended the request, or None.
    """

    tokens: Sequence[Token] = ()
    prompt: list[Token] | None = None
    vector: np.ndarray | None = None
    ended: bool = False
    complete: bool = False
    error: Exception | None = None


class Constraint(Protocol):
    """Which tokens may come next in an answer.

    Attributes:
      allowed: the tokens that may come next, as bits of uint32 words [W]: for token t, bit t mod 32
        of word t // 32.
    """

    allowed: np.ndarray

    def add(self, token: int) -> bool:
        """Add a token to the answer, and return whether no token may follow.

        Raises:
          ConstraintError: if the answer cannot be continued.
        """
        ...


class ConstraintError(Exception):
    """The constraint of an answer cannot be met."""


@dataclasses.dataclass(eq=False)
class Request:
    """A request to continue one prompt, to score it, or both; or to return its vector.

    Attributes:
      prompt: token ids [T].
      length: maximum number of tokens to generate; 0 is allowed only if `score` or `embed` is true.
      settings: the sampling settings of the answer.
      deliver: callback that the engine's worker thread calls with each `Progress`; must not block.
      stop: the ids of the tokens that end the answer early.  Such a token is also delivered.
      logprobs: whether generated tokens are delivered with logprobs.
      score: whether the prompt's tokens are delivered too, with logprobs.
      embed: whether the prompt's vector is delivered, and nothing else.
      constraint: what limits the answer's tokens, or None.
      cancelled: whether `Engine.cancel` has been called for this request.
      began: when the request was created, as a value of `time.perf_counter`.
      generated: number of tokens generated so far.
      row: the request's batch row, once it has one.
      chunks: whether the prompt is inserted in chunks, once it has a row.
      filled: number of prompt tokens in the row's cache.
      cached: number of prompt tokens whose keys and values were not computed for this request.
      used: the tokens of the prompt that `Prefiller` puts into a row, once it has seen the request.
    """

    prompt: np.ndarray
    length: int
    settings: SamplingOptions
    deliver: Callable[[Progress], None]
    stop: frozenset[int] = frozenset()
    logprobs: bool = False
    score: bool = False
    embed: bool = False
    constraint: Constraint | None = None
    cancelled: bool = False
    began: float = dataclasses.field(default_factory=time.perf_counter)
    generated: int = 0
    row: int = -1
    chunks: bool = False
    filled: int = 0
    cached: int = 0
    used: Prompt | None = None

    @property
    def reads_only(self) -> bool:
        """Whether the next call for this request reads its prompt, and needs no batch row."""
        return self.score or self.embed


def part_of(chosen: Any, index: Any) -> Any:
    """Return a `Chosen` tuple with `x[index]` in place of each array x of `chosen`."""
    return type(chosen)(*(None if x is None else x[index] for x in chosen))


def tokens_of(chosen: Any) -> list[Token]:
    """Convert a `Chosen` tuple of arrays [M] or [M, N] to a list of M `Token` objects."""
    if chosen.logprob is None:
        return [Token(number) for number in chosen.token.tolist()]
    tops = zip(chosen.top_token.tolist(), chosen.top_logprob.tolist(), strict=True)
    numbers, logprobs = chosen.token.tolist(), chosen.logprob.tolist()
    return [
        Token(number, logprob, tuple(zip(*top, strict=True)))
        for number, logprob, top in zip(numbers, logprobs, tops, strict=True)
    ]
