"""What a command prints as lines of a log: progress bars as whole lines, and JSON if asked for.

`run_script` starts this for each command.  Progress bars, which rewrite their line, become whole
lines unless stderr is a terminal: the first after `FIRST` seconds, later ones after twice the time,
at most `MOST` seconds, for all open bars together.  The last state of a bar is always printed,
except for bars with `leave=False`.  The newest state is also printed before other text on stderr.

With `--log json`, or if the environment variable `MESH_TRANSFORMER_LOG` is `json`, commands that
train print each message of the process's Python code as a line with one JSON object, on the stream
where it would be text:

    time     when it was printed, in UTC
    level    "error" for the line or the traceback that ends a command or a thread, "warning" for
             other lines on stderr, "info" for lines on stdout, progress bars and status lines
    run      the model folder; null before it is known
    host     the name of the machine
    process  the index of the process in the mesh; null before it is known, and in pod's driver
    step     the last finished training step; null before training
    message  the text
"""

import contextlib
import datetime
import functools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TextIO

VARIABLE = "MESH_TRANSFORMER_LOG"
RUN_VARIABLE = "MESH_TRANSFORMER_RUN"  # the model folder, for the other processes of a run
FORMATS = ("text", "json")
FIRST, MOST = 3.0, 60.0  # seconds until the first line of a progress bar, and between two, at most
_ERROR = re.compile(
    r"(\S+( \S+)?: )?error: |(Exception in thread .*:\n)?Traceback \(most recent call last\)"
)
_STATUS = re.compile(r".* \.\.\. \d+ s$")  # status lines
_ANSI = re.compile(r"\x1b(?:[78]|\[[0-9;]*[A-Za-z])")  # what moves a terminal's cursor

_is_json = False
_facts: dict[str, int | None] = {"process": None, "step": None}
_lock = threading.RLock()  # a signal handler may print, too


def is_json() -> bool:
    """Return whether this process prints JSON."""
    return _is_json


def use(format_name: str | None = None) -> None:
    """Print in a format of `FORMATS` from now on, and let child processes do so.

    Args:
      format_name: the format (default: that of the environment variable, or text).

    Raises:
      ValueError: if there is no such format; the message is a line for the user.
    """
    global _is_json
    if format_name is not None:
        os.environ[VARIABLE] = format_name
    format_name = os.environ.get(VARIABLE) or FORMATS[0]
    if format_name not in FORMATS:
        raise ValueError(f"{VARIABLE} is {format_name!r}, expected {' or '.join(FORMATS)}")
    _is_json = format_name == "json"


def about(*, run: str | None = None, **facts: int) -> None:
    """Set what later JSON lines say about this process: `run`, `process` or `step`.

    `run` sets the environment variable `RUN_VARIABLE`, the others a dict of this module.
    """
    if run is not None:
        os.environ[RUN_VARIABLE] = run
    _facts.update(facts)


def variables() -> dict[str, str]:
    """Return the environment variables with which other processes of the run print JSON, too."""
    names = (VARIABLE, RUN_VARIABLE) if _is_json else ()
    return {name: os.environ[name] for name in names if name in os.environ}


@contextlib.contextmanager
def formatted() -> Iterator[None]:
    """Format what the process prints during the context."""
    with contextlib.ExitStack() as stack:
        for stream in {sys.stdout, sys.stderr} - {None}:  # one may be closed, or both the same
            lines = _Lines(stream)
            stack.callback(replace_write(stream, lines.write))
            stack.callback(lines.end)
        stack.callback(setattr, threading, "excepthook", threading.excepthook)
        threading.excepthook = functools.partial(_report_thread, threading.excepthook)
        yield


def _report_thread(
    report: Callable[[threading.ExceptHookArgs], Any], failed: threading.ExceptHookArgs
) -> None:
    """Print the exception that ended a thread as one JSON message, or leave it to `report`."""
    if not _is_json or sys.stderr is None or failed.exc_type is SystemExit:
        report(failed)
        return
    name = failed.thread.name if failed.thread else threading.get_ident()
    lines = traceback.format_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
    text = f"Exception in thread {name}:\n{''.join(lines)}"
    print(text, end="", file=sys.stderr, flush=True)


def replace_write(stream: TextIO, write: Callable[[str], int]) -> Callable[[], None]:
    """Replace the method `write` of a stream; return a function that undoes it.

    The stream stays the same object, because others keep, compare and redirect it.
    """
    before = vars(stream).get("write")
    stream.write = write  # type: ignore[method-assign]

    def undo() -> None:
        if before is None:
            del stream.write
        else:
            stream.write = before  # type: ignore[method-assign]

    return undo


class _Lines:
    """Formats what is written to a stream."""

    def __init__(self, stream: TextIO):
        self._stream, self._write = stream, stream.write
        self._is_stderr = stream is sys.stderr
        self._messages: dict[int, str] = {}  # JSON: unfinished messages by thread
        self._is_bar, self._is_new = False, True  # whether the last text was a bar; ended a line
        self._bar = ""  # the newest state of a progress bar, if it was not printed
        self._open = 0  # the number of open bars after the last text of a bar
        self._last, self._wait = time.monotonic(), FIRST  # of the lines of bars

    def write(self, text: str) -> int:
        """Write text, which may be a part of a line; see `TextIO.write`."""
        with _lock:
            # Bars are on stderr; on stdout, an answer of a model may begin so.
            is_filtered = _is_json or (self._is_stderr and not self._stream.isatty())
            if is_filtered and self._shows_bar(text):
                self._progress(_ANSI.sub("", text).strip())
                self._is_bar = True
            elif not is_filtered or not self._moves_bars(text):
                self._print_bar()
                self._is_bar = False
                self._print(text)
        return len(text)

    def end(self) -> None:
        """Print the last state of a bar that is open, and unfinished JSON messages."""
        with _lock:
            self._print_bar()
            for thread in list(self._messages):
                self._end_message(thread)

    def _print(self, text: str) -> None:
        if not _is_json:
            self._is_new = text.endswith("\n")
            self._write(text)
            return
        thread = threading.get_ident()
        self._messages[thread] = self._messages.get(thread, "") + text
        if text.endswith("\n"):
            self._end_message(thread)

    def _end_message(self, thread: int) -> None:
        if message := _ANSI.sub("", self._messages.pop(thread)).strip("\r\n"):
            level = "warning" if self._is_stderr and not _STATUS.match(message) else "info"
            is_error = self._is_stderr and _ERROR.match(message)
            self._write_object("error" if is_error else level, message)

    def _write_object(self, level: str, message: str) -> None:
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        place = {"run": os.environ.get(RUN_VARIABLE), "host": socket.gethostname()}
        line = {"time": when, "level": level} | place | _facts | {"message": message}
        self._write(f"{json.dumps(line)}\n")

    def _shows_bar(self, text: str) -> bool:
        """Return whether the text shows or erases a bar of tqdm."""
        # A bar that closes shows its last state after tqdm has removed it from the open bars.
        return text.startswith("\r") and "\n" not in text and (_open_bars() or self._open) > 0

    def _moves_bars(self, text: str) -> bool:
        """Return whether the text only places or ends a bar of tqdm."""
        is_part = threading.get_ident() in self._messages if _is_json else not self._is_new
        if _ANSI.sub("", text).strip("\r\n") or (text and is_part):
            return False
        return not text or self._is_bar or _open_bars() > 0

    def _progress(self, bar: str) -> None:
        """Print the state of a bar if it is time or its last; "" if the bar is erased."""
        now, count = time.monotonic(), _open_bars()
        if not self._open:
            self._last, self._wait = now, FIRST
        is_last, self._open, self._bar = count < self._open, count, bar
        if is_last:
            self._print_bar()
        elif bar and now - self._last >= self._wait:
            self._print_bar()
            self._last, self._wait = now, min(2 * self._wait, MOST)

    def _print_bar(self) -> None:
        if not self._bar:
            return
        if _is_json:
            self._write_object("info", self._bar)
        else:
            self._write(f"{self._bar}\n" if self._is_new else f"\n{self._bar}\n")
            self._is_new = True
        self._bar = ""
        self._stream.flush()


def _open_bars() -> int:
    """Return the number of open progress bars of tqdm."""
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)  # importing it would take time
    return len(getattr(tqdm, "_instances", ()))
