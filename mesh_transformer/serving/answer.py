"""Conversion of generated tokens to an answer's text, with stop sequences and logprobs."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from mesh_transformer.config import Config
from mesh_transformer.data.reasoning import Reasoning
from mesh_transformer.data.special_tokens import BYTE_TOKEN, beginning, end_tokens, special_tokens
from mesh_transformer.data.tokenizer import byte_decoder
from mesh_transformer.generation.text_stream import CONTEXT, TextStream
from mesh_transformer.serving.engine import Progress, Token

# A token that is only part of a character is written as this prefix and its bytes, as in OpenAI's
# API.
PART = "bytes:"
Finish = Literal["stop", "length"]


class TokenTexts:
    """Maps token ids to the strings that represent them in a response's logprobs.

    Attributes:
      end: the id of the end-of-text token or, if the tokenizer has none, of another special token
        that ends an answer; None if no such token does.
      ends: the ids of all tokens that end an answer.
      ends_of: {number of an adapter: the ids of those that end its answers}, where they differ.
      special: {id: name} of the special tokens, which are no part of an answer's text.
      first: the ids of the special tokens that the tokenizer puts before a text.
      longest: length of the longest token with a space, which may not be a part of it.
    """

    def __init__(self, tokenizer: Any, config: Config | None = None):
        """Args: config: the model's config, which may name more tokens that end an answer."""
        self.tokenizer = tokenizer
        self.ends = end_tokens(tokenizer, config)
        self.ends_of: dict[int, frozenset[int]] = {}
        self.special, self.first = special_tokens(tokenizer), beginning(tokenizer)
        self.end: int | None = tokenizer.eos_token_id
        if self.end is None:
            self.end = min(self.ends & self.special.keys(), default=None)
        self.longest = max(map(len, tokenizer.get_vocab())) + 1
        self._cache: dict[int, str] = {}
        # What a tokenizer of the package transformers calls after checks that take far longer.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        # A token with text.  Decoders may leave out the space at the start of a text.
        self._other = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]

    def __getitem__(self, number: int) -> str:
        """Return the string that represents the token with the id `number`.

        This is usually the token's text after another token.  A token that is only part of a
        character is represented as `bytes:\\x..`, as in OpenAI's API.
        """
        if number not in self._cache:
            self._cache[number] = self._word(number)
        return self._cache[number]

    def bytes_of(self, number: int) -> list[int]:
        """Return the bytes, in UTF-8, of the token with the id `number`."""
        word = self[number]
        if word.startswith(PART):
            return [int(byte, 16) for byte in word.removeprefix(PART).split("\\x")[1:]]
        return list(word.encode())

    def text(self, numbers: Sequence[int]) -> str:
        """Return the text of a list of token ids."""
        if self._backend is not None:
            return self._backend.decode(numbers, skip_special_tokens=False)
        return self.tokenizer.decode(numbers, clean_up_tokenization_spaces=False)

    def ends_with(
        self, stop: Sequence[str], *, ends: bool, formatted: bool = False, adapter: int = 0
    ) -> frozenset[int]:
        """Return the ids of the tokens that end an answer with the stop sequences `stop`.

        A stop sequence that is a special token's name never occurs in the text; the token does.

        Args:
          ends: whether the tokens that usually end an answer do.
          formatted: whether the answer has a format, in which ordinary tokens are always text.
          adapter: the number of the answer's adapter; 0 for none.
        """
        named = frozenset(number for number, name in self.special.items() if name in stop)
        if formatted:
            return named | (self.ends & self.special.keys())
        return named | (self.ends_of.get(adapter, self.ends) if ends else frozenset())

    def _word(self, number: int) -> str:
        word = self.text([*self._other, number])[len(self.text(self._other)) :]
        if "\ufffd" not in word and word:
            return word
        name = self.tokenizer.convert_ids_to_tokens(number)
        if name is None:  # the model's vocabulary may be larger than the tokenizer's
            return f"<|token_{number}|>"
        if byte := BYTE_TOKEN.fullmatch(name):
            return f"{PART}\\x{byte[1].lower()}"
        byte_of = byte_decoder()
        if not all(letter in byte_of for letter in name):
            return name
        return PART + "".join(f"\\x{byte_of[letter]:02x}" for letter in name)


class TokenOffset(NamedTuple):
    """A token and its offset in an answer's text, in characters."""

    token: Token
    offset: int


@dataclasses.dataclass
class Piece:
    """A piece of an answer, ready to be sent to the client.

    All pieces together, in order, are the complete answer.

    Attributes:
      text: the piece's text, without reasoning.
      token_offsets: the piece's tokens, with their offsets in the complete answer.
      finish: for the last piece, why the answer has ended ("stop" or "length"); else None.
      reasoning: the piece's reasoning, which comes before the text.
    """

    text: str
    token_offsets: list[TokenOffset]
    finish: Finish | None = None
    reasoning: str = ""


EMPTY = Piece("", [])


class Offsets:
    """Computes the offset of each token in a text, in characters, one token at a time.

    Args:
      words: the tokenizer's token texts.
      start: offset of the first token.
      before: the tokens that precede the text.

    Attributes:
      length: length of the text so far that is not held back.
    """

    def __init__(self, words: TokenTexts, start: int = 0, before: Sequence[int] = ()):
        self._words = words
        self._stream = TextStream(words.text, (), before)  # holds back unfinished characters
        self.length = start

    def push(self, number: int) -> int:
        """Add the token with the id `number`, and return the token's offset."""
        before, word = self.length, self._words[number]
        self.length += len(self._stream.push([number]))
        if word.startswith(PART):
            return before
        # If earlier bytes turn out to form no character, their text becomes final together with the
        # text of this token, and precedes it.
        return max(before, self.length - len(word))

    def finish(self) -> int:
        """Return the length of the complete text, in characters; call this after the last token."""
        self.length += len(self._stream.finish())
        return self.length


class Echo:
    """A prompt that answers repeat at their beginning (the field `echo` in OpenAI's API).

    Special tokens that the tokenizer puts before a text have no text in it.

    All answers to the prompt share one instance, which holds the prompt's text, tokens and token
    offsets.  Construction takes time proportional to the prompt's length.

    Args:
      prompt: token ids [T].
    """

    def __init__(self, words: TokenTexts, prompt: Sequence[int]):
        offsets, first = Offsets(words), len(words.first)
        added = first if list(prompt[:first]) == words.first else 0
        self.token_offsets = [TokenOffset(Token(number), 0) for number in prompt[:added]]
        for number in prompt[added:]:
            self.token_offsets.append(TokenOffset(Token(number), offsets.push(number)))
        self.length = offsets.finish()
        self.text = words.text(prompt[added:])

    def score(self, tokens: Sequence[Token]) -> None:
        """Add logprobs to the prompt's tokens.

        Calling this again with the same list changes nothing.

        Args:
          tokens: the prompt's tokens, with logprobs.
        """
        if self.token_offsets and self.token_offsets[-1].token is not tokens[-1]:
            offsets = [spot.offset for spot in self.token_offsets]
            self.token_offsets = list(map(TokenOffset, tokens, offsets))


class Answer:
    """The text of a request's answer, built from the engine's updates.

    The text of the prompt and that of the answer together are the text of all of their tokens: an
    answer may begin with a space where the tokens alone would not.

    Args:
      prompt: the prompt's token ids.
      stop: stop sequences: strings that end the answer and are not part of the text.
      ends: the ids of the tokens that end the answer and are not part of the text.
      echo: the prompt, if the answer begins with the prompt, else None.  Logprobs may be added to
        `echo` until the first call of `feed`.
      reasoning: separates the reasoning in the answer; None if there is none.
      with_offsets: whether the pieces have their tokens, which takes most of the time.

    Attributes:
      tokens: number of generated tokens, including one of `ends` and those of a stop sequence.
      finish: why the answer has ended, or None if it has not.
    """

    def __init__(
        self,
        words: TokenTexts,
        prompt: Sequence[int],
        stop: Sequence[str],
        ends: frozenset[int],
        echo: Echo | None,
        reasoning: Reasoning | None = None,
        *,
        with_offsets: bool = True,
    ):
        self.tokens = 0
        self._all_at_once = not (with_offsets or stop)
        self._reasoning = reasoning
        self.finish: Finish | None = None
        self._ends, self._special = ends, words.special
        self._echo = echo
        self._length = 0  # number of characters returned so far
        self._token_offsets: list[TokenOffset] = []  # tokens not returned yet
        before = [number for number in prompt[-CONTEXT:] if number not in words.special]
        self._offsets = Offsets(words, echo.length if echo else 0, before)
        self._stream = TextStream(words.text, stop, before)

    def feed(self, progress: Progress) -> Piece:
        """Add the engine's next update, and return the next piece of the answer.

        Text that later tokens could still change, or that may be the beginning of a stop sequence,
        is held back for a later piece.
        """
        text, echo, self._echo = "", self._echo, None
        if echo is not None:
            if progress.prompt is not None:
                echo.score(progress.prompt)
            text, self._token_offsets = echo.text, list(echo.token_offsets)
        if self._all_at_once:
            text += self._add_all(progress.tokens)
        for token in () if self._all_at_once else progress.tokens:
            if self.finish is None:
                self.tokens += 1
                text += self._add(token)
        if progress.ended and self.finish is None:
            text += self._stream.finish()
            stopped = progress.complete or self._stream.stopped is not None
            self.finish = "stop" if stopped else "length"
        self._length += len(text)
        if self._stream.stopped is not None:
            self._token_offsets = [
                spot for spot in self._token_offsets if spot.offset < self._length
            ]
        final = [spot for spot in self._token_offsets if self.finish or spot.offset < self._length]
        del self._token_offsets[: len(final)]
        if self._reasoning is None:
            return Piece(text, final, self.finish)
        reasoning, text = self._reasoning.push(text, last=self.finish is not None)
        return Piece(text, final, self.finish, reasoning)

    def _add_all(self, tokens: Sequence[Token]) -> str:
        """Add tokens without their offsets to an answer without stop sequences; see `_add`."""
        numbers = [token.number for token in tokens] if self.finish is None else []
        end = next((at for at, number in enumerate(numbers) if number in self._ends), None)
        self.tokens += len(numbers) if end is None else end + 1
        text = self._stream.push([n for n in numbers[:end] if n not in self._special])
        if end is None:
            return text
        self.finish = "stop"
        return text + self._stream.finish()

    def _add(self, token: Token) -> str:
        """Add a token, and return the new text that later tokens can no longer change."""
        if token.number in self._ends:
            self.finish = "stop"
            self._token_offsets.append(TokenOffset(token, self._offsets.finish()))
            return self._stream.finish()
        if token.number in self._special:  # as `skip_special_tokens` does in transformers
            self._token_offsets.append(TokenOffset(token, self._offsets.length))
            return ""
        self._token_offsets.append(TokenOffset(token, self._offsets.push(token.number)))
        text = self._stream.push([token.number])
        if self._stream.stopped is not None:
            self.finish = "stop"
        return text
