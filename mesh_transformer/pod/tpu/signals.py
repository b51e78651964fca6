"""Signal handlers that raise exceptions, deferred in code that must not be interrupted."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Signals:
    """Handlers of SIGINT, SIGTERM and SIGHUP that raise exceptions, so that `with` blocks exit.

    If a signal already has a Python handler, that handler is called; for Ctrl-C, Python's own
    handler raises KeyboardInterrupt.  If the signal would have killed the process, SystemExit is
    raised.  Ignored signals stay ignored.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._blocked = False
        self._deferred: list[int] = []
        self._hook: Any = None
        self._dropped: BaseException | None = None

    def install(self) -> None:
        """Install the handlers; does nothing outside the main thread."""
        if not _on_main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if callable(before) or before is signal.SIG_DFL:
                self._before[number] = before
                signal.signal(number, self._receive)
        if self._before and self._hook is None:
            self._hook, sys.unraisablehook = sys.unraisablehook, self._keep_dropped

    def uninstall(self) -> None:
        """Restore the previous handlers; further calls do nothing."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._hook is not None:
            self._hook, sys.unraisablehook = None, self._hook
        self.discard_dropped()

    def discard_dropped(self) -> None:
        """Discard an exception that Python has dropped, so that `defer` does not raise it later."""
        self._dropped = None

    def _keep_dropped(self, unraisable: Any) -> None:
        """Store a signal handler's exception that Python drops, so that `defer` raises it later.

        This method is a `sys.unraisablehook`.  If a signal arrives during a destructor or some
        callbacks, Python drops the exception that the signal's handler raises and calls the hook.
        """
        if isinstance(unraisable.exc_value, (KeyboardInterrupt, SystemExit)):
            self._dropped = unraisable.exc_value
        else:
            self._hook(unraisable)

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Defer signals that arrive during the `with` block until the block ends.

        Use this around gRPC calls.  After an exception has interrupted a gRPC call, the next gRPC
        call may crash, or hang until its time limit.  If Python has dropped the exception of an
        earlier signal (see `_keep_dropped`), that exception is raised before the block runs.
        """
        if not _on_main_thread() or self._blocked:
            yield
            return
        dropped, self._dropped = self._dropped, None
        if dropped is not None:
            raise dropped
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False
            deferred, self._deferred = self._deferred, []
            for number in deferred:
                self._act(number, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._blocked:
            self._deferred.append(number)
        else:
            self._act(number, frame)

    def _act(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        else:
            raise SystemExit(128 + number)


def _on_main_thread() -> bool:
    """Return whether this is the main thread, the only one that handles signals in Python."""
    return threading.current_thread() is threading.main_thread()
