"""Signals that end a training run after a save."""

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import Any


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
