"""The reasoning of an answer, which models such as Qwen 3 put between marks before the content."""

OPEN, CLOSE = "<think>", "</think>"


def without_marks(special: dict[int, str]) -> dict[int, str]:
    """Return special tokens, {id: name}, without the marks, which are part of an answer's text."""
    return {number: name for number, name in special.items() if name not in (OPEN, CLOSE)}


class Reasoning:
    """Separates an answer's reasoning from its content, piece by piece.

    Line ends at both ends of the reasoning, and white space before the content, are left out.  Text
    that may be part of a mark, or white space that may be left out, is held back.

    Args:
      is_open: whether the prompt already holds the opening mark.
    """

    def __init__(self, is_open: bool = False):
        self._place = "reasoning" if is_open else "start"
        self._held = ""
        self._begun = False  # whether a part of the reasoning was returned

    @property
    def thinks(self) -> bool:
        """Whether the answer is in its reasoning."""
        return self._place == "reasoning"

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Add a piece of the answer; return the new parts of its reasoning and of its content.

        Args:
          last: whether the answer ends with this piece, so that nothing is held back.
        """
        held, self._held, reasoning = self._held + text, "", ""
        if self._place == "start":
            begin = held.lstrip()
            if not last and len(begin) < len(OPEN) and OPEN.startswith(begin):
                self._held = held
                return "", ""
            self._place = "reasoning" if begin.startswith(OPEN) else "content"
            held = begin.removeprefix(OPEN) if self._place == "reasoning" else held
        if self._place == "reasoning":
            held = held if self._begun else held.lstrip("\r\n")
            reasoning, mark, after = held.partition(CLOSE)
            end = len(reasoning) if last or mark else len(reasoning) - _length_of_part(reasoning)
            end = len(reasoning[:end].rstrip())
            self._begun |= end > 0
            if not mark:
                self._held = "" if last else reasoning[end:]
                return reasoning[:end], ""
            reasoning, held, self._place = reasoning[:end], after, "gap"
        if self._place == "gap":
            held = held.lstrip()
            self._place = "content" if held else "gap"
        return reasoning, held


def _length_of_part(text: str) -> int:
    """Return how many characters at the end of a text may be the beginning of the closing mark."""
    return next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
