"""Log-probabilities of a teacher's tokens, as a server with OpenAI's API sent them with answers.

`completion-records --teacher-tokens` stores them in records, for the config's `teacher` "records".
"""

from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.data.inputs import BadInputError
from mesh_transformer.data.tokenizer import token_bytes

TEACHER_KEYS = ("teacher_ids", "teacher_logprobs")  # of records and batches; see `Alternatives`
Tokens = list[tuple[bytes, dict[bytes, float]]]  # see `_sent`


class Alternatives(NamedTuple):
    """The tokens that a teacher finds most likely at each position of a text, K per position.

    Attributes:
      ids: their ids, i64 [T, K].
      logprobs: log p of each, f32 [T, K], descending; minus infinity where there are fewer, or
        where the teacher's probabilities are not known.
    """

    ids: np.ndarray
    logprobs: np.ndarray


class TeacherTokens:
    """Finds the teacher's tokens in texts that are tokenised for a student.

    Args:
      tokenizer: the student's.
      most: K.

    Attributes:
      counted: the number of tokens that count in the loss.
      known: the number of these for which the teacher's probabilities are known.
    """

    def __init__(self, tokenizer: Any, most: int):
        self._texts = token_bytes(tokenizer)
        # Of tokens with the same text, the last one counts: those for single bytes come first.
        self._ids = {self._texts[number]: number for number in sorted(self._texts)}
        self._most = most
        self.counted = self.known = 0

    def alternatives(
        self, tokens: list[int], has_loss: list[bool], logprobs: Any, where: str
    ) -> Alternatives:
        """Return what the teacher says of the last answer of a text.

        A token is known if the server's answer has a token of the same text at the same place.

        Args:
          tokens: the text's tokens, T of them.
          has_loss: for each token, whether it is part of an answer.
          logprobs: the `logprobs` that the server sent with its last answer.
          where: the place of the text, for error messages.

        Raises:
          BadInputError: if `logprobs` is something else.
        """
        try:
            sent = _sent(logprobs)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise BadInputError(
                "no log-probabilities",
                f"{where}: expected `logprobs` with the most likely tokens, as `answers "
                "--top-logprobs` stores them",
            ) from None
        start = len(tokens)
        while start and has_loss[start - 1]:
            start -= 1
        own = _places([self._texts.get(token, b"") for token in tokens[start:]])
        shape = (len(tokens), self._most)
        result = Alternatives(np.zeros(shape, np.int64), np.full(shape, -np.inf, np.float32))
        places, first = _places([text for text, _ in sent]), _offset(sent, own)
        top_of = dict(zip(places, (top for _, top in sent), strict=True))
        if first is not None:
            for at, (place, text) in enumerate(own, start):
                self._fill(result, at, top_of.get((place - first, text), {}))
        self.counted += sum(has_loss[1:])
        self.known += int(np.isfinite(result.logprobs[1:, 0]).sum())
        return result

    def _fill(self, result: Alternatives, at: int, top: dict[bytes, float]) -> None:
        """Store the most likely tokens of position `at`, of those that the student has."""
        likely = sorted(
            ((logprob, self._ids[text]) for text, logprob in top.items() if text in self._ids),
            reverse=True,
        )
        for n, (logprob, number) in enumerate(likely[: self._most]):
            result.ids[at, n], result.logprobs[at, n] = number, logprob


def _offset(sent: Tokens, own: list[tuple[int, bytes]]) -> int | None:
    """Return the place in a text at which the server's answer begins; None if it is not there.

    A chat template may strip or add white space, and end the answer in another way.
    """
    whole = b"".join(text for _, text in own)
    for tokens in (sent, sent[:-1]):
        answer = b"".join(text for text, _ in tokens)
        if (place := whole.find(answer.strip())) >= 0:
            return place - (len(answer) - len(answer.lstrip()))
    return None


def _places(texts: list[bytes]) -> list[tuple[int, bytes]]:
    """Return (place in the joined text, text) for each text."""
    places, place = [], 0
    for text in texts:
        places.append((place, text))
        place += len(text)
    return places


def _sent(logprobs: Any) -> Tokens:
    """Return the text of each token of an answer, and {text: log p} of it and the most likely."""
    if "content" in logprobs:  # of a conversation
        return [
            (_text(one), {_text(x): float(x["logprob"]) for x in (*one["top_logprobs"], one)})
            for one in logprobs["content"]
        ]
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [
        (
            _of_string(word),
            {_of_string(x): float(p) for x, p in (top | {word: logprob}).items()},
        )
        for word, logprob, top in zip(*columns, strict=True)
    ]


def _text(token: dict[str, Any]) -> bytes:
    value = token.get("bytes")
    return _of_string(token["token"]) if value is None else bytes(value)


def _of_string(word: str) -> bytes:
    """Return the bytes of a token; one that is part of a character is written `bytes:\\x..`."""
    if word.startswith("bytes:\\x"):
        return bytes(int(byte, 16) for byte in word.split("\\x")[1:])
    return word.encode()
