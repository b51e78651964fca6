"""Tokens into text as they come: whole characters alone, and no further than a stop sequence."""

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # what decoders put for bytes that are no character, or not yet one
MOST_PENDING = 8  # tokens that one character is made of, at most: it has 4 bytes


class TextStream:
    """The text of a growing list of tokens, piece by piece.

    The pieces joined are the text of all tokens, up to the stop sequence that ends first, however
    the tokens came.  A token takes bounded time, whatever came before it.

    Args:
      decode: the text of a list of token ids, as a tokenizer's `decode`.
      stop: sequences that end the text; they are no part of it.

    Attributes:
      stopped: the stop sequence that ended the text, or None.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()):
        self.stopped: str | None = None
        self._decode = decode
        self._stop = [sequence for sequence in stop if sequence]
        # A decoder may treat the first token in its own way: it sees the last ones again.
        self._before: list[int] = []
        self._tokens: list[int] = []
        self._read = 0  # characters of `_tokens` that were taken
        self._held = ""  # read, but perhaps the beginning of a stop sequence

    def push(self, tokens: Sequence[int]) -> str:
        """The text that has become certain with these tokens; none once the text has stopped."""
        if self.stopped is not None:
            return ""
        self._tokens += map(int, tokens)
        text = self._pending()
        whole = text.removesuffix(INCOMPLETE)  # its last bytes may become another character
        piece, self._read = whole[self._read :], max(self._read, len(whole))
        if whole == text:
            self._before, self._tokens, self._read = self._tokens, [], 0
        elif len(self._tokens) > MOST_PENDING:
            self._shorten()
        return self._until_stop(piece)

    def _shorten(self) -> None:
        """Lets go of pending tokens whose text is certain: bytes that are part of no character."""
        text = self._pending()
        for cut in range(len(self._tokens) - 1, 0, -1):
            head, tail = self._tokens[:cut], self._tokens[cut:]
            certain = self._text_after(self._before, head)
            rest = self._text_after(head, tail)
            # With something after it, no byte of the head can belong to a later character.
            if rest and text == certain + rest and self._read >= len(certain):
                self._before, self._tokens = head[-MOST_PENDING:], tail
                self._read -= len(certain)
                return
        # Tokens without text of their own keep the bytes before them waiting for ever.
        spoken = [token for token in self._tokens if self._decode([token])]
        if self._text_after(self._before, spoken) == text:
            self._tokens = spoken

    def finish(self) -> str:
        """What was held back, when no token follows."""
        if self.stopped is not None:
            return ""
        piece = self._until_stop(self._pending()[self._read :])
        piece, self._held = piece + self._held, ""
        self._before, self._tokens, self._read = [], [], 0
        return piece

    def _pending(self) -> str:
        return self._text_after(self._before, self._tokens)

    def _text_after(self, before: list[int], tokens: list[int]) -> str:
        known = self._decode(before) if before else ""
        return self._decode(before + tokens)[len(known) :] if tokens else ""

    def _until_stop(self, piece: str) -> str:
        text = self._held + piece
        ends = [(at + len(s), -len(s), s) for s in self._stop if (at := text.find(s)) >= 0]
        if ends:
            # The one that ends first, so that it does not matter how the text was cut into pieces.
            end, length, self.stopped = min(ends)
            self._held = ""
            return text[: end + length]
        held = max((_overlap(text, sequence) for sequence in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, sequence: str) -> int:
    """How many characters at the end of `text` begin `sequence`."""
    longest = min(len(text), len(sequence) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(sequence[:n])), 0)
