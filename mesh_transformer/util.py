"""Helpers shared by all modules: user-facing errors, types of values and size buckets.

Every command imports this module, so it imports no package that takes long to import.
"""

import atexit
import contextlib
import difflib
import errno
import functools
import gc
import importlib
import math
import operator
import os
import re
import select
import signal
import sys
import threading
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TextIO

from mesh_transformer import extras, log_lines, old_names, status_lines


def cache_folder() -> Path:
    """Return the folder for the user's cached files (default: ~/.cache/mesh-transformer)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mesh-transformer"


class InputError(ValueError):
    """Invalid input from the user; the message is one line that says what to do.

    Scripts print the message and exit with status 2 (see `run_script`).
    """


class DamagedError(InputError):
    """The files of a checkpoint are damaged: they do not contain the data that were saved.

    Attributes:
      step: the path of the damaged checkpoint's folder, which is named step_N.
      previous: the folder name of the newest complete checkpoint before the damaged one, such as
        step_90; None if there is no such checkpoint.
    """

    def __init__(self, message: str, step: str, previous: str | None):
        super().__init__(message, step, previous)
        self.step, self.previous = step, previous

    def __str__(self) -> str:
        return self.args[0]


class UnreachableError(InputError):
    """Storage could not be reached; a restart may help."""


class NonFiniteError(InputError, ArithmeticError):
    """The model's results are NaN or infinite, as a rule because its weights are."""


class UncountedWarning(UserWarning):
    """No target of a training batch counts in the loss, so that its update is skipped."""


class InterruptedWorkError(Exception):
    """A signal has ended work that a resumed run does again."""


class StoppedError(RuntimeError):
    """A run cannot continue although its input is valid; see `exit_status`."""


class DivergedError(StoppedError):
    """A run would stop at the same step again: losses are not finite, or updates are skipped."""


class HostError(StoppedError):
    """One of several hosts failed; a restart from the newest checkpoint may succeed."""


def brief(text: str, most: int = 60) -> str:
    """Return `text` for an error message: on one line, printable, and at most `most` characters."""
    start = " ".join(text[: 4 * most].split())
    start = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in start)
    return start if len(start) <= most and len(text) <= 4 * most else start[: most - 3] + "..."


def join_keys(keys: Iterable[Any]) -> str:
    """Return the keys of a mapping, for an error message."""
    return brief(", ".join(map(str, keys)), 200) or "none"


def first_line(error: Exception) -> str:
    """Return the first line of the message of another package's exception."""
    return str(error).strip().partition("\n")[0]


def last_line(error: BaseException) -> str:
    """Return the last line of an exception's text, which in Ray's states the cause."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()[:300]


def describe(value: Any) -> str:
    """Format a value with its type for an error line, such as `int 3`."""
    return f"{type(value).__name__} {value!r}"


def without_paths(value: Any) -> Any:
    """Convert a path object to a string; in a dict, convert all keys and values."""
    if isinstance(value, dict):
        return {without_paths(k): without_paths(v) for k, v in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else value


FULL = (errno.ENOSPC, errno.EDQUOT)  # of a file system
NO_MEMORY = re.compile(r"RESOURCE_EXHAUSTED: .*(out of memory|alloc)", re.IGNORECASE)  # of devices


class Named(str):
    """The name of a function of the user's, MODULE:NAME, in the annotation of a config key."""


def is_named(value: object) -> bool:
    """Return whether a config value names an object of the user's, as MODULE:NAME."""
    return isinstance(value, str) and bool(re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value))


def load_named(name: str, key: str) -> Any:
    """Return the object that a config value MODULE:NAME names.

    Args:
      name: the module, which may be a file in the current folder, and the object's name in it.
      key: the config key, for error messages.

    Raises:
      InputError: if the module cannot be imported, or has no such object.
    """
    module, _, attribute = name.partition(":")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's code may raise any
        raise InputError(
            f"{key} is {name!r}, which cannot be loaded ({type(error).__name__}: "
            f"{first_line(error)}); expected MODULE:NAME of an installed module, or of a file in "
            "the current folder"
        ) from error


def name_of(value: Any, key: str) -> str:
    """Return MODULE:NAME of a function, with which `load_named` returns it.

    Raises:
      InputError: if there is no such name, as for a function inside of another one, or if the
        module is private.
    """
    module = getattr(value, "__module__", None) or ""
    name = f"{module}:{getattr(value, '__qualname__', '')}"
    if module != "__main__" and any(part.startswith("_") for part in module.split(".")):
        raise InputError(
            f"{key} is {name}, of a private module; give its public name, as MODULE:NAME"
        )
    if not is_named(name) or load_named(name, key) is not value:
        raise InputError(
            f"{key} is {value!r}, which has no name in a module, so that a checkpoint could not "
            "name it; define a function at the top of a file"
        )
    return name


def mismatch(value: Any, annotation: Any) -> str | None:
    """Return None if a value matches a type annotation, otherwise a text such as "expected int".

    The text ends with a hint if the mistake is a common one.
    """
    if _matches(value, annotation):
        return None
    hint = ""
    if isinstance(value, str) and "Literal" in str(annotation):
        options = [a for a in _literals(annotation) if isinstance(a, str)]
        close = difflib.get_close_matches(value, options, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
    elif isinstance(value, str) and _matches(0.5, annotation) and _is_number(value):
        hint = (
            "; remove the quotes; in YAML a number with an exponent needs a decimal point: 1.0e-4"
        )
    return f"expected {_format_type(annotation)}{hint}"


def _matches(value: Any, annotation: Any) -> bool:
    """Return whether a JSON value matches a type annotation.

    An int is accepted as a float, but a bool is not accepted as an int or a float.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, option) for option in arguments)
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in arguments)
    if origin is list:
        return isinstance(value, list) and all(_matches(v, arguments[0]) for v in value)
    if origin is dict:
        pairs = value.items() if isinstance(value, dict) else [(None, None)]
        return all(_matches(k, arguments[0]) and _matches(v, arguments[1]) for k, v in pairs)
    if annotation is Named:
        return is_named(value)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _format_type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_format_type(a) for a in arguments)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in arguments)
    if origin in (list, dict):
        return f"{origin.__name__} of {', '.join(_format_type(a) for a in arguments)}"
    names = {type(None): "null", Named: "MODULE:NAME"}
    return names.get(annotation) or annotation.__name__


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _literals(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    return [a for option in typing.get_args(annotation) for a in _literals(option)]


def check_number(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise InputError unless `value` is a whole number, at least `least` and at most `most`."""
    expected = f"at least {least}" if most is None else f"{least} to {most}"
    try:
        operator.index(value)
    except TypeError:
        raise InputError(
            f"{name} is {brief(repr(value))}, expected a whole number, {expected}"
        ) from None
    if value < least or (most is not None and value > most):
        raise InputError(f"{name} is {value}, expected {expected}")


def bucket(size: int, smallest: int, largest: int | None = None) -> int:
    """Round `size` up to `smallest` times a power of two; the result is at most `largest`."""
    rounded = smallest * 2 ** math.ceil(math.log2(max(size / smallest, 1)))
    return rounded if largest is None else min(rounded, largest)


def exit_status(error: BaseException) -> int:
    """Return the exit status of a command that an error ends.

    It is 5 if a disk is full, 4 if memory is, 3 for a DivergedError, 2 for invalid input and for a
    package that is missing, and 1 otherwise: then a restart may help.
    """
    if isinstance(error, HostError | UnreachableError):
        return 1
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    for cause in causes:
        text = str(cause)
        if getattr(cause, "errno", None) in FULL or any(os.strerror(n) in text for n in FULL):
            return 5
        if isinstance(cause, MemoryError) or NO_MEMORY.search(text):
            return 4
    if isinstance(error, DivergedError):
        return 3
    is_missing = isinstance(error, ImportError) and extras.missing(error)
    return 2 if isinstance(error, InputError) or is_missing else 1


def error_line(error: Exception) -> str | None:
    """Return the line to print about an error that ends a command; None to print a traceback."""
    if isinstance(error, InputError | StoppedError):
        return str(error)
    remedies = {
        4: "memory is exhausted; reduce the model, batch or length, or use more devices",
        5: "make room, and start again",
    }
    if (status := exit_status(error)) in remedies:
        return f"{first_line(error)[:300] or type(error).__name__}; {remedies[status]}"
    return extras.missing(error) if isinstance(error, ImportError) else None


def run_script(main: Callable[[], int | None]) -> None:
    """Call a script's `main` and exit with the status that it returns.

    Errors of the user's input, of the machine, and missing packages that an extra brings are one
    line on stderr (see `error_line`), and have a status of their own (see `exit_status`).  A
    KeyboardInterrupt (Ctrl-C) that `main` does not handle exits immediately with status 130 and no
    traceback, also while `main` imports modules.  If the reader of its output is gone, as after
    `| head`, the command ends without a message, with status 141 as after SIGPIPE.
    """
    report = sys.unraisablehook

    def repeat_interrupt(unraisable: Any) -> None:
        """Raise a KeyboardInterrupt again if it came in a callback of Python's import system.

        There, Python would only print it and continue.
        """
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            main_thread = threading.main_thread().ident
            # Later, because Python also only prints what this function raises.
            threading.Timer(0.1, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
        else:
            report(unraisable)

    sys.unraisablehook = repeat_interrupt
    # At its end, Python would look for cycles among all objects, which takes seconds.
    atexit.register(gc.freeze)
    with log_lines.formatted():
        try:
            with status_lines.watching():
                result = main()
            if sys.stdout is not None:
                sys.stdout.flush()
            sys.exit(result)
        except KeyboardInterrupt:
            exit_now("", 130)  # does not wait for threads that may still be writing to a slow disk
        except Exception as error:
            out = sys.stdout
            if isinstance(error, BrokenPipeError) and out is not None and _has_no_reader(out):
                # Python writes what is left at the exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
                sys.exit(128 + signal.SIGPIPE)
            if line := error_line(error):
                print(f"error: {line}", file=sys.stderr)
            elif log_lines.is_json():  # Python would print it later, as text
                print_traceback(error)
            else:
                raise
            sys.exit(exit_status(error))


def print_traceback(error: BaseException) -> None:
    """Print an error with its traceback to stderr, as one message (see `log_lines`)."""
    print("".join(traceback.format_exception(error)), end="", file=sys.stderr, flush=True)


def _has_no_reader(stream: TextIO) -> bool:
    """Return whether a stream is a pipe whose other end is closed."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # it is closed, or no file
        return False


@contextlib.contextmanager
def stop_signals(received: list[int]) -> Iterator[list[int]]:
    """Append the numbers of SIGTERM, SIGINT and SIGHUP signals to a list, and yield this list.

    After the first signal, the previous handlers of SIGTERM and SIGINT (Ctrl-C) are restored.  A
    second Ctrl-C therefore raises KeyboardInterrupt, so that callers can still clean up, for
    example delete a TPU.  Interrupting a save is safe: the previous checkpoint stays intact.
    """
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python handles signals only on its main thread.
        return
    stops: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
    handlers: dict[int, Any] = {n: signal.getsignal(n) for n in (*stops, signal.SIGHUP)}
    if handlers[signal.SIGHUP] is signal.SIG_IGN:  # as under nohup
        del handlers[signal.SIGHUP]

    def restore(numbers: Iterable[int]) -> None:
        for number in numbers:
            signal.signal(number, handlers[number])

    def receive(number: int, frame: object) -> None:
        received.append(number)
        restore(stops)  # not SIGHUP: a closing terminal may send it twice

    for number in handlers:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        restore(handlers)


def main_of(module: str) -> Callable[..., int | None]:
    """Return a function that imports a module and calls its `main`.

    Scripts pass it to `run_script`, so that Ctrl-C is handled while the module is imported.
    """
    return lambda *args: importlib.import_module(module).main(*args)


def exit_now(message: str, status: int) -> NoReturn:
    """Exit without waiting for other threads; a nonempty message is printed to stderr first."""
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_running(process: int) -> bool:
    """Return whether a process with the id `process` exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        pass
    return True


def start_thread(
    function: Callable[..., object],
    *args: Any,
    name: str,
    failed: Callable[[Exception], object] | None = None,
) -> threading.Thread:
    """Start a daemon thread that calls `function(*args)`, and return the thread.

    If the function raises an exception, its traceback is printed, and `failed` is called with the
    exception.  By default this process then exits, because others may be waiting for the thread.
    """

    def run() -> None:
        try:
            function(*args)
        except Exception as error:
            print_traceback(error)
            if failed is not None:
                failed(error)
                return
            text = brief(f"{type(error).__name__}: {error}", 200)
            line = f"error: the thread {name!r} has failed ({text}); see the traceback above"
            print(line, file=sys.stderr, flush=True)
            exit_now("", 1)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


if not TYPE_CHECKING:  # A type checker should know only the names that exist.
    # Finds the names that the original mesh-transformer-jax defined here.
    __getattr__ = functools.partial(old_names.find, __name__)
