"""What the engine delivers: tokens, with logprobs, in updates on running requests."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np


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
