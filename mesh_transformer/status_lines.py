"""Status lines: what a command is doing, and for how long, while it prints nothing else.

`run_script` starts them.  After `SILENCE` seconds without output, a thread prints a line on stderr
or, if there are progress bars, refreshes these.  On a terminal, the line is updated each second and
removed before the next output.  In a file, the next line about the same follows after twice the
time of the last, so that an hour adds ten.  There are none if the environment variable
`MESH_TRANSFORMER_STATUS` is set but empty.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from mesh_transformer import log_lines

VARIABLE = "MESH_TRANSFORMER_STATUS"
SILENCE = 3.0  # seconds without output before the first status line
EVERY = 1.0  # seconds between updates on a terminal
# For terminals: save and restore the place of the cursor, and erase the line from there.
_SAVE, _RESTORE, _ERASE = "\x1b7", "\x1b8", "\x1b[K"

_doing: list[tuple[str, float]] = []  # what is being done and since when, innermost last
_watcher: "_Watcher | None" = None


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Print status lines during the context."""
    global _watcher
    is_nested = _watcher is not None  # a command that calls another's main
    if is_nested or sys.stderr is None or not os.environ.get(VARIABLE, "on"):
        yield
        return
    _watcher = _Watcher()
    try:
        yield
    finally:
        end()


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Name what is done during the context, such as "loading the weights", in status lines.

    In other threads than the main one, it has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    entry = (what, time.monotonic())
    _doing.append(entry)
    try:
        yield
    finally:
        _doing.remove(entry)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Print no status lines during the context: the user is to type, or another process prints."""
    watcher = _watcher
    if watcher is None:
        yield
        return
    with watcher.lock:  # no line is being printed
        watcher.paused = True
    try:
        yield
    finally:
        watcher.paused = False
        watcher.heard()


def end() -> None:
    """Print no further status lines, because the command now waits for others, as servers do."""
    global _watcher
    if _watcher is not None:
        _watcher.end()
    _watcher = None


class _Watcher:
    """Watches what the process prints on stdout and stderr, and prints status lines.

    Attributes:
      paused: whether to print no status lines.
      lock: held while a status line is printed or removed.
    """

    def __init__(self):
        self.paused = False
        self.lock = threading.RLock()  # as removing a line is an output, too
        self._undo: list[Callable[[], None]] = []
        self._shown = False  # whether the terminal shows a status line after the cursor
        self._began = time.monotonic()
        self._about, self._when = "", 0.0  # what the last status line was about, and its time
        self._end = ""  # the end of the last output; empty before the first
        self._ended = threading.Event()
        self.heard()
        for stream in {sys.stdout, sys.stderr} - {None}:  # stdout may be closed, or the same
            self._watch(stream)
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def heard(self) -> None:
        """Record that there was output just now."""
        self._last = time.monotonic()
        self._wait = SILENCE

    def end(self) -> None:
        self._ended.set()
        self._thread.join(1)  # longer only if it cannot print
        self._clear()
        for undo in self._undo:
            undo()

    def _watch(self, stream: TextIO) -> None:
        """Call `heard` before each output to a stream, except that of this thread."""
        write: Callable[[str], int] = stream.write

        def watched(text: str) -> int:
            if threading.current_thread() is not self._thread:
                self._clear()
                self.heard()
                self._end = text[-1:] or self._end
            return write(text)

        self._undo.append(log_lines.replace_write(stream, watched))

    @property
    def _is_terminal(self) -> bool:
        return sys.stderr.isatty() and not log_lines.is_json()

    def _clear(self) -> None:
        with self.lock:
            if self._shown:
                self._shown = False
                self._print(_ERASE)

    def _run(self) -> None:
        while not self._ended.wait(0.25):
            self.look()

    def look(self) -> None:
        """Print a status line if it is time."""
        now = time.monotonic()
        default = ("working", self._last) if self._end else ("starting", self._began)
        what, since = [default, *_doing][-1]  # a copy, as another thread changes it
        silence = now - self._last
        is_other = what != self._about and silence >= SILENCE and now - self._when >= SILENCE
        if (silence >= self._wait or is_other) and not self.paused:
            self._wait = silence + EVERY if self._is_terminal else 2 * silence
            self._about, self._when = what, now
            self._show(f"{what} ... {now - since:.0f} s")

    def _show(self, line: str) -> None:
        if self._bars():
            return
        with self.lock:
            if self.paused:
                return
            is_new = self._end in ("", "\n", "\r")  # not after a part of a line, as of an answer
            if self._is_terminal:
                self._shown = True
                self._print(f"{_SAVE}{'' if is_new else ' '}{line}{_ERASE}{_RESTORE}")
            else:
                self._print(f"{line}\n" if is_new else f"\n{line}\n")
                self._end = "\n"

    def _bars(self) -> bool:
        """Refresh the progress bars; return whether there are any."""
        # Importing it here would take time.
        tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if not getattr(tqdm, "_instances", None):
            return False
        with tqdm.get_lock():  # so that no bar is closed meanwhile
            bars = [bar for bar in tqdm._instances if not bar.disable]
            for bar in bars:
                bar.refresh(nolock=True)
        return bool(bars)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed stream
            sys.stderr.write(text)
            sys.stderr.flush()
