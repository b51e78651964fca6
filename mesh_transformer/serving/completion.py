"""One answer as it grows: from the engine's tokens to text, stop sequences and logprobs."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from mesh_transformer.serving.engine import Progress, Token
from mesh_transformer.serving.text import TextStream

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

    def _word(self, number: int) -> str:
        word = self.tokenizer.decode([number], clean_up_tokenization_spaces=False)
        if "\ufffd" not in word and word:
            return word
        name = self.tokenizer.convert_ids_to_tokens(number)
        if name is None:  # the model's vocabulary may be larger than the tokenizer's
            return f"<|token_{number}|>"
        byte_of = _gpt2_bytes()
        if not all(letter in byte_of for letter in name):
            return name
        return PART + "".join(f"\\x{byte_of[letter]:02x}" for letter in name)


def _gpt2_bytes() -> dict[str, int]:
    """Which byte each letter of a GPT-2 token's name stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    # The unprintable bytes have letters from U+100 on.
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + at): byte for at, byte in enumerate(others)
    }


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
        self._words = words
        self._end = end
        self._stream = TextStream(words.tokenizer)
        self._stop = stop
        self._text = ""  # all that is known, of which so many characters and spots are given:
        self._given = 0
        self._spots: list[Spot] = []
        self._spots_given = 0
        self.tokens = 0  # generated, those of the stop sequence included
        self.finish: Finish | None = None
        if echo:
            for number in prompt:
                self._add(Token(number))
        self._begin = len(self._text)  # where stop sequences may begin

    def feed(self, progress: Progress) -> Piece:
        """Takes news from the engine; what follows a stop sequence is left out."""
        if progress.prompt is not None:
            offsets = [spot.offset for spot in self._spots]
            self._spots = list(map(Spot, progress.prompt, offsets))
        for token in progress.tokens:
            if self.finish is not None:
                break
            self.tokens += 1
            self._add(token)
            self._look_for_stop()
        if progress.ended and self.finish is None:
            self._text += self._stream.end()
            self._look_for_stop()
            self.finish = self.finish or "length"
        return self._piece()

    def _add(self, token: Token) -> None:
        before, word = len(self._text), self._words[token.number]
        if token.number == self._end and self.tokens:
            self._text += self._stream.end()
            self.finish = "stop"
            word = ""
        else:
            self._text += self._stream.add(token.number)
        # Parts of characters that led to none come out with the next token, but before it.
        offset = before if word.startswith(PART) else max(before, len(self._text) - len(word))
        self._spots.append(Spot(token, offset))

    def _look_for_stop(self) -> None:
        since = max(self._begin, self._given)
        found = [at for stop in self._stop if (at := self._text.find(stop, since)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self._spots = [spot for spot in self._spots if spot.offset < min(found)]
            self.finish = "stop"

    def _piece(self) -> Piece:
        certain = len(self._text)
        if self.finish is None:
            certain -= max((_overlap(self._text[self._begin :], s) for s in self._stop), default=0)
        text = self._text[self._given : certain]
        spots = self._spots[self._spots_given :]
        if self.finish is None:
            spots = [spot for spot in spots if spot.offset < certain]
        self._given = certain
        self._spots_given += len(spots)
        return Piece(text, spots, self.finish)


def _overlap(text: str, stop: str) -> int:
    """How many of the text's last characters may be the first of a stop sequence."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
