"""What a command prints as lines of a log: progress bars as whole lines, and JSON if asked for.

`run_script` starts this for each command.  Progress bars, which rewrite their line, become whole
lines unless stderr is a terminal: the first after `FIRST` seconds, later ones after twice the time,
at most `MOST` seconds, and the last one always.

With `--log json`, or if the environment variable `MESH_TRANSFORMER_LOG` is `json`, commands that
train print each message as a line with one JSON object, on the stream where it would be text:

    time     when it was printed, in UTC
    level    "error" for the line or the traceback that ends a command, "warning" for other lines on
             stderr, "info" for lines on stdout, progress bars and status lines
    run      the model folder; null before it is known
    host     the name of the machine
    process  the index of the process in the mesh; null before it is known, and in pod's driver
    step     the last finished training step; null before training
    message  the text
"""

import contextlib
import datetime
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

VARIABLE = "MESH_TRANSFORMER_LOG"
RUN_VARIABLE = "MESH_TRANSFORMER_RUN"  # the model folder, for the other processes of a run
FORMATS = ("text", "json")
FIRST, MOST = 3.0, 60.0  # seconds until the first line of a progress bar, and between two, at most
_ERROR = re.compile(r"(\S+( \S+)?: )?error: |Traceback \(most recent call last\)")
_STATUS = re.compile(r".* \.\.\. \d+ s$")  # status lines
_ANSI = re.compile(r"\x1b(?:[78]|\[[0-9;]*[A-Za-z])")  # what moves a terminal's cursor

_is_json = False
_facts: dict[str, int | None] = {"process": None, "step": None}
_lock = threading.RLock()  # a signal handler may print, too


def is_json() -> bool:
    """Return whether this process prints JSON."""
    return _is_json


def use(form: str | None = None) -> None:
    """Print in a format of `FORMATS` from now on, and let child processes do so.

    Args:
      form: the format (default: that of the environment variable, or text).

    Raises:
      ValueError: if there is no such format; the message is a line for the user.
    """
    global _is_json
    if form is not None:
        os.environ[VARIABLE] = form
    form = os.environ.get(VARIABLE) or FORMATS[0]
    if form not in FORMATS:
        raise ValueError(f"{VARIABLE} is {form!r}, expected {' or '.join(FORMATS)}")
    _is_json = form == "json"


def about(*, run: str | None = None, **facts: int) -> None:
    """Set what later JSON lines say about this process: `run`, `process` or `step`."""
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
        yield


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
        self._message = ""  # JSON: the part of a message that was written
        self._is_bar, self._is_new = False, True  # whether the last text was a bar, or ended a line
        self._bar = ""  # the newest state of a progress bar, if it was not printed
        self._last, self._wait = time.monotonic(), FIRST  # of a bar's lines

    def write(self, text: str) -> int:
        """Write text, which may be a part of a line; see `TextIO.write`."""
        with _lock:
            # Bars are on stderr; on stdout, an answer of a model may begin so.
            is_filtered = _is_json or (self._is_stderr and not self._stream.isatty())
            if is_filtered and text.startswith("\r"):
                self._progress(_ANSI.sub("", text).strip())
                self._is_bar = self._is_new = True
            elif not is_filtered or not self._moves_bars(text):
                self._is_bar, self._is_new = False, text.endswith("\n")
                self._print(text)
        return len(text)

    def _print(self, text: str) -> None:
        if not _is_json:
            self._write(text)
            return
        self._message += text
        if text.endswith("\n"):
            self.end()

    def end(self) -> None:
        """Print the part of a JSON message that was written."""
        message, self._message = _ANSI.sub("", self._message).strip("\r\n"), ""
        if message:
            level = "warning" if self._is_stderr and not _STATUS.match(message) else "info"
            self._write_object("error" if _ERROR.match(message) else level, message)

    def _write_object(self, level: str, message: str) -> None:
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        place = {"run": os.environ.get(RUN_VARIABLE), "host": socket.gethostname()}
        line = {"time": when, "level": level} | place | _facts | {"message": message}
        self._write(f"{json.dumps(line)}\n")

    def _progress(self, bar: str) -> None:
        """Print the state of a progress bar if it is time; "" if the bar is erased."""
        self._bar, now = bar, time.monotonic()
        if bar and now - self._last >= self._wait:
            self._print_bar()
            self._last, self._wait = now, min(2 * self._wait, MOST)

    def _moves_bars(self, text: str) -> bool:
        """Return whether the text only places or ends a bar of tqdm; print a bar that ends."""
        if _ANSI.sub("", text).strip("\n") or not (self._is_bar or self._is_new) or not text:
            return not text
        tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
        is_open = len(getattr(tqdm, "_instances", ())) > 0  # a bar, whose place may be elsewhere
        if self._is_bar and not is_open:
            self._print_bar()
            self._last, self._wait = time.monotonic(), FIRST
        return self._is_bar or is_open

    def _print_bar(self) -> None:
        if self._bar and _is_json:
            self._write_object("info", self._bar)
        elif self._bar:
            self._write(f"{self._bar}\n")
        self._bar = ""
        self._stream.flush()
