"""One answer as it grows: from the engine's tokens to text, stop sequences and logprobs."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from mesh_transformer.serving.engine import Progress, Token
from mesh_transformer.text_stream import TextStream, byte_letters

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


class Answer:
    """The text of one request of the engine.

    Args:
      stop: texts that end it; they are not part of it.
      echo: whether the prompt is part of it.
      end: the token that ends it without being text.
    """

    def __init__(
        self, words: Words, prompt: Sequence[int], stop: Sequence[str], echo: bool, end: int | None
    ):
        self.tokens = 0  # generated, those of a stop sequence included
        self.finish: Finish | None = None
        self._words = words
        self._end = end
        self._known = 0  # characters of all tokens, of which so many are given:
        self._given = 0
        self._spots: list[Spot] = []  # not given yet
        self._all = TextStream(words.text)  # for offsets, which count held text too
        self._prompt = ""
        if echo:
            self._spots = [self._spot(Token(number)) for number in prompt]
            self._known += len(self._all.finish())
            self._prompt = words.text(prompt)
            self._all = TextStream(words.text)
        self._stream = TextStream(words.text, stop)

    def feed(self, progress: Progress) -> Piece:
        """Takes news from the engine; what follows a stop sequence is left out."""
        if progress.prompt is not None:
            offsets = [spot.offset for spot in self._spots]
            self._spots = list(map(Spot, progress.prompt, offsets))
        text, self._prompt = self._prompt, ""
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
        """What is certain of the text with one token more."""
        if token.number == self._end:
            self.finish = "stop"
            self._known += len(self._all.finish())
            self._spots.append(Spot(token, self._known))
            return self._stream.finish()
        self._spots.append(self._spot(token))
        text = self._stream.push([token.number])
        if self._stream.stopped is not None:
            self.finish = "stop"
        return text

    def _spot(self, token: Token) -> Spot:
        before, word = self._known, self._words[token.number]
        self._known += len(self._all.push([token.number]))
        if word.startswith(PART):
            return Spot(token, before)
        # Parts of characters that led to none come out with the next token, but before it.
        return Spot(token, max(before, self._known - len(word)))
