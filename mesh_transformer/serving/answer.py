"""One answer as it grows: from the engine's tokens to text, stop sequences and logprobs."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from mesh_transformer.data.tokenizer import byte_letters
from mesh_transformer.generation.text_stream import TextStream
from mesh_transformer.serving.engine import Progress, Token

PART = "bytes:"  # begins the name of a token that is only part of a character, as at OpenAI
Finish = Literal["stop", "length"]


class Words:
    """The tokenizer's tokens as strings, for people and for the keys of `top_logprobs`."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.end: int | None = tokenizer.eos_token_id
        self.longest = max(map(len, tokenizer.get_vocab()))  # characters in one token, at most
        self._known: dict[int, str] = {}

    def __getitem__(self, number: int) -> str:
        """A token's text, `bytes:\\x..` where it is only part of a character, as OpenAI has it."""
        if number not in self._known:
            self._known[number] = self._word(number)
        return self._known[number]

    def text(self, numbers: Sequence[int]) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(numbers, clean_up_tokenization_spaces=False)

    def _word(self, number: int) -> str:
        word = self.text([number])
        if "\ufffd" not in word and word:
            return word
        name = self.tokenizer.convert_ids_to_tokens(number)
        if name is None:  # the model's vocabulary may be larger than the tokenizer's
            return f"<|token_{number}|>"
        byte_of = byte_letters()
        if not all(letter in byte_of for letter in name):
            return name
        return PART + "".join(f"\\x{byte_of[letter]:02x}" for letter in name)


class Spot(NamedTuple):
    """A token at its place in an answer's text, in characters."""

    token: Token
    offset: int


@dataclasses.dataclass
class Piece:
    """What has become certain of an answer; pieces joined are the answer."""

    text: str
    spots: list[Spot]
    finish: Finish | None = None


class Offsets:
    """Where the tokens of a text begin in it, in characters."""

    def __init__(self, words: Words, start: int = 0):
        self._words = words
        self._stream = TextStream(words.text)  # which holds back unfinished characters
        self._known = start

    def push(self, number: int) -> int:
        """The next token's offset."""
        before, word = self._known, self._words[number]
        self._known += len(self._stream.push([number]))
        if word.startswith(PART):
            return before
        # Parts of characters that led to none come out with the next token, but before it.
        return max(before, self._known - len(word))

    def finish(self) -> int:
        """The text's length."""
        self._known += len(self._stream.finish())
        return self._known


class Echo:
    """A prompt as part of the answers to it: computed once, however many there are.

    It takes time in proportion to the prompt's length.
    """

    def __init__(self, words: Words, prompt: Sequence[int]):
        offsets = Offsets(words)
        self.spots = [Spot(Token(number), offsets.push(number)) for number in prompt]
        self.length = offsets.finish()
        self.text = words.text(prompt)

    def score(self, tokens: Sequence[Token]) -> None:
        """Takes the prompt's tokens with their logprobs."""
        if self.spots and self.spots[-1].token is not tokens[-1]:
            offsets = [spot.offset for spot in self.spots]
            self.spots = list(map(Spot, tokens, offsets))


class Answer:
    """The text of one request of the engine.

    Args:
      stop: texts that end it; they are not part of it.
      end: the token that ends it without being text.
      echo: the prompt, where it is part of the answer.  It is read with the first news, as other
        answers may bring its score.
    """

    def __init__(self, words: Words, stop: Sequence[str], end: int | None, echo: Echo | None):
        self.tokens = 0  # generated, those of a stop sequence included
        self.finish: Finish | None = None
        self._end = end
        self._echo = echo
        self._given = 0  # characters of the answer so far
        self._spots: list[Spot] = []  # not given yet
        self._offsets = Offsets(words, echo.length if echo else 0)
        self._stream = TextStream(words.text, stop)

    def feed(self, progress: Progress) -> Piece:
        """Takes news from the engine; what follows a stop sequence is left out."""
        text, echo, self._echo = "", self._echo, None
        if echo is not None:
            if progress.prompt is not None:
                echo.score(progress.prompt)
            text, self._spots = echo.text, list(echo.spots)
        for token in progress.tokens:
            if self.finish is None:
                self.tokens += 1
                text += self._add(token)
        if progress.ended and self.finish is None:
            text += self._stream.finish()
            self.finish = "length" if self._stream.stopped is None else "stop"
        self._given += len(text)
        if self._stream.stopped is not None:
            self._spots = [spot for spot in self._spots if spot.offset < self._given]
        certain = [spot for spot in self._spots if self.finish or spot.offset < self._given]
        del self._spots[: len(certain)]
        return Piece(text, certain, self.finish)

    def _add(self, token: Token) -> str:
        """The text that has become certain with one token more."""
        if token.number == self._end:
            self.finish = "stop"
            self._spots.append(Spot(token, self._offsets.finish()))
            return self._stream.finish()
        self._spots.append(Spot(token, self._offsets.push(token.number)))
        text = self._stream.push([token.number])
        if self._stream.stopped is not None:
            self.finish = "stop"
        return text
