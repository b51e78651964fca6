"""Incremental decoding of tokens to text: complete characters only, up to a stop sequence."""

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # what decoders output for bytes of an invalid or incomplete character
MOST_BYTES = 3  # of an incomplete character; some decoders output `INCOMPLETE` for each of them
MOST_PENDING = 8  # an upper bound on the tokens of one character, which has at most 4 bytes
CONTEXT = 64  # tokens of a prompt that are enough to decode what follows, special ones included


class TextStream:
    """Converts a growing list of tokens to text, piece by piece.

    The concatenated pieces are the text of all tokens, up to a stop sequence if one occurs.  If
    several occur, the text is cut at the one that ends first.  The concatenated text does not
    depend on how the tokens are divided among calls of `push`.  The time per token does not grow
    with the length of the text.

    Args:
      decode: function from a list of token ids to their text, such as a tokenizer's `decode`.
      stop: stop sequences: strings that end the text and are not included in it.
      before: the tokens that precede the text, such as a prompt's; their text is not returned.

    Attributes:
      stopped: the stop sequence that ended the text, or None.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: Sequence[str] = (),
        before: Sequence[int] = (),
    ):
        self.stopped: str | None = None
        self._decode = decode
        self._stop = [sequence for sequence in stop if sequence]
        # The last tokens already converted to text.  They are decoded again together with
        # `_tokens`, because a decoder may treat the first token of a list differently.
        self._known: tuple[list[int], str] = ([], "")  # `_before` and its text
        self._before = self._last([int(token) for token in before])
        while self._text(self._before).endswith(INCOMPLETE):
            self._before.pop()
        self._tokens: list[int] = []  # pending tokens, whose text may still change
        self._read = 0  # number of characters in the text of `_tokens` that have been processed
        self._held = ""  # processed text that may be the beginning of a stop sequence

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens, and return the new text that later tokens can no longer change.

        After a stop sequence, the result is empty.
        """
        if self.stopped is not None:
            return ""
        self._tokens += map(int, tokens)
        piece = self._settle()
        text = self._pending()
        whole = text[: len(text) - _incomplete(text)]  # later tokens may complete the rest
        piece += whole[self._read :]
        self._read = max(self._read, len(whole))
        if len(self._tokens) > MOST_PENDING:
            self._shorten()
        return self._until_stop(piece)

    def _settle(self) -> str:
        """Return the new text of the pending tokens up to the last that ends with a character.

        These are then no longer pending.
        """
        for end in range(len(self._tokens), max(0, len(self._tokens) - MOST_BYTES - 1), -1):
            tokens = self._tokens[:end]
            text = self._text_after(self._before, tokens)
            if not text.endswith(INCOMPLETE):
                # Tokens without text of their own must not displace the text before them.
                if text or not self._text(self._before):
                    self._before = self._last(self._before + tokens)
                piece, self._tokens = text[self._read :], self._tokens[end:]
                self._read = max(0, self._read - len(text))
                return piece
        return ""

    def _last(self, tokens: list[int]) -> list[int]:
        """Return the last tokens, about `MOST_PENDING`, from the start of a character on."""
        first = max(0, len(tokens) - MOST_PENDING)
        for start in range(first, len(tokens)):
            text = self._text(tokens[start:])
            if not text.startswith(INCOMPLETE):
                self._known = (tokens[start:], text)
                return tokens[start:]
        return tokens[first:]

    def _shorten(self) -> None:
        """Shorten the list of pending tokens by removing those whose text is final.

        This bounds the length of the list if the tokens' bytes never form a valid character.
        """
        text = self._pending()
        for cut in range(len(self._tokens) - 1, 0, -1):
            head, tail = self._tokens[:cut], self._tokens[cut:]
            head_text = self._text_after(self._before, head)
            tail_text = self._text_after(head, tail)
            # If the tail has text of its own, no byte of the head belongs to a later character.
            if tail_text and text == head_text + tail_text and self._read >= len(head_text):
                self._before, self._tokens = head[-MOST_PENDING:], tail
                self._read -= len(head_text)
                return
        # Tokens without text of their own would keep the bytes before them pending forever.
        visible = [token for token in self._tokens if self._decode([token])]
        if self._text_after(self._before, visible) == text:
            self._tokens = visible

    def finish(self) -> str:
        """Return the rest of the text; call this after the last token.

        The rest may be an incomplete character or the possible beginning of a stop sequence.
        """
        if self.stopped is not None:
            return ""
        piece = self._until_stop(self._pending()[self._read :])
        piece, self._held = piece + self._held, ""
        self._before, self._tokens, self._read = [], [], 0
        return piece

    def _pending(self) -> str:
        """Return the text of the pending tokens; later tokens may still change it."""
        return self._text_after(self._before, self._tokens)

    def _text_after(self, before: list[int], tokens: list[int]) -> str:
        """Return the text that `tokens` add to the text of the preceding tokens `before`."""
        prefix, text = self._text(before), self._text(before + tokens)
        # Some decoders output no character of a run of bytes while its last one is incomplete.
        return text[len(prefix) :] if text.startswith(prefix) else self._text(tokens)

    def _text(self, tokens: list[int]) -> str:
        if tokens == self._known[0]:
            return self._known[1]
        return self._decode(tokens) if tokens else ""

    def _until_stop(self, piece: str) -> str:
        """Return the text held back by earlier calls, then `piece`, up to a stop sequence.

        If the end of this text may be the beginning of a stop sequence, that end is held back.
        """
        text = self._held + piece
        ends = [(start + len(s), -len(s), s) for s in self._stop if (start := text.find(s)) >= 0]
        if ends:
            # Take the sequence that ends first, so that the result does not depend on how the text
            # is divided into pieces.
            end, length, self.stopped = min(ends)
            self._held = ""
            return text[: end + length]
        held = max((_overlap(text, sequence) for sequence in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _incomplete(text: str) -> int:
    """Return how many characters at the end of a text may be bytes of one incomplete character."""
    end = text[-MOST_BYTES:]
    return len(end) - len(end.rstrip(INCOMPLETE))


def _overlap(text: str, sequence: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `sequence`."""
    longest = min(len(text), len(sequence) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(sequence[:n])), 0)
