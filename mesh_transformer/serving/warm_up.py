"""The programs that a server compiles before requests need them."""

import collections
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm


class WarmUp:
    """The programs that are compiled before requests need them, and their progress bar."""

    def __init__(self):
        self._left: collections.deque[Callable[[], Any]] = collections.deque()
        self._bar = tqdm(disable=True)

    @property
    def left(self) -> int:
        """Number of programs that are not compiled yet."""
        return len(self._left)

    def begin(self, now: Sequence[Callable[[], Any]], later: Sequence[Callable[[], Any]]) -> None:
        """Call the functions `now`, which each compile a program, and keep `later` for later."""
        self.end()
        total = len(now) + len(later)
        self._left.extend((*now, *later))
        self._bar = tqdm(
            total=total, desc="compiling", unit="program", file=sys.stderr, leave=False
        )
        try:
            for _ in now:
                self.compile_next()
        except BaseException:
            self.end()
            raise

    def compile_next(self) -> None:
        """Compile the next program."""
        self._left[0]()
        self._left.popleft()  # only now, as `left` counts the one that is being compiled
        self._bar.update()
        if not self._left:
            self.end()

    def end(self) -> None:
        """Compile nothing more in advance, and remove the progress bar."""
        self._left.clear()
        self._bar.close()
