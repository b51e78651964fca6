"""From tokens that come one by one to text in whole characters."""

from typing import Any


class TextStream:
    """The text of a growing list of tokens; what `add` and `end` give, joined, is all of it."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """The text that is certain now; empty after part of a character."""
        self._held.append(token)
        text = self._decoded()
        if text.endswith("\ufffd"):
            return ""
        self._held = []
        return text

    def end(self) -> str:
        """What was held back, though no whole character."""
        text, self._held = self._decoded(), []
        return text

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._held, clean_up_tokenization_spaces=False)
