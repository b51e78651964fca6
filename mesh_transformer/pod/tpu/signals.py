"""Signals that would end the process, as exceptions, and kept away from code that these break."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Signals:
    """While taken, signals that would end the process raise: `with` blocks still end.

    SIGTERM and SIGHUP raise SystemExit where they would kill; Ctrl-C raises what it did before.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._busy = False
        self._late: list[int] = []
        self._hook: Any = None
        self._dropped: BaseException | None = None

    def take(self) -> None:
        if not _on_main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if callable(before) or before is signal.SIG_DFL:
                self._before[number] = before
                signal.signal(number, self._receive)
        if self._before and self._hook is None:
            self._hook, sys.unraisablehook = sys.unraisablehook, self._keep_dropped

    def give_back(self) -> None:
        """As often as it is called."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._hook is not None:
            self._hook, sys.unraisablehook = None, self._hook
        self.forget()

    def forget(self) -> None:
        """What Python dropped until now needs to end nothing any more."""
        self._dropped = None

    def _keep_dropped(self, unraisable: Any) -> None:
        """Python drops what is raised in a callback or a destructor, a signal's exception too."""
        if isinstance(unraisable.exc_value, (KeyboardInterrupt, SystemExit)):
            self._dropped = unraisable.exc_value
        else:
            self._hook(unraisable)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """What comes in here raises at the end of the block, and what was dropped at its start.

        For gRPC's calls: after one that an exception has broken off, its next one may crash, or
        hang until it times out.
        """
        if not _on_main_thread() or self._busy:
            yield
            return
        dropped, self._dropped = self._dropped, None
        if dropped is not None:
            raise dropped
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            late, self._late = self._late, []
            for number in late:
                self._act(number, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._busy:
            self._late.append(number)
        else:
            self._act(number, frame)

    def _act(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        else:
            raise SystemExit(128 + number)


def _on_main_thread() -> bool:
    """Python takes signals there alone."""
    return threading.current_thread() is threading.main_thread()
