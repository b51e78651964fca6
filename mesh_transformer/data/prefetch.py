"""Prefetching: an iterator whose items are produced ahead of time by a background thread."""

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

from mesh_transformer.util import start_thread

Item = TypeVar("Item")
SECONDS_TO_END = 5.0


class Prefetch(Generic[Item]):
    """Iterator over `items`; a background thread produces up to `depth` items in advance.

    If `items` raises an exception, `next` raises it after all earlier items have been returned, and
    again on every later call.  The thread ends when this object is closed or garbage-collected.
    """

    def __init__(self, items: Iterator[Item], depth: int):
        self._queue: queue.Queue[Item | _End] = queue.Queue(depth)
        self._end: _End | None = None
        stop = threading.Event()
        # The thread must not refer to this object, or the object would never be garbage-collected.
        thread = start_thread(_fill, self._queue, items, stop, name="prefetch")
        self.close = weakref.finalize(self, _end_thread, thread, self._queue, stop)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._end is None:
            item = self._queue.get()
            if not isinstance(item, _End):
                return item
            self._end = item
        raise self._end.error


class _End:
    def __init__(self, error: Exception):
        self.error = error


def _fill(ahead: queue.Queue, items: Iterator, stop: threading.Event) -> None:
    error: Exception = StopIteration()
    try:
        for item in items:
            ahead.put(item)
            if stop.is_set():
                return
    except Exception as caught:
        error = caught
    ahead.put(_End(error))


def _end_thread(thread: threading.Thread, ahead: queue.Queue, stop: threading.Event) -> None:
    """Ask a `Prefetch` thread to stop, and wait up to `SECONDS_TO_END` seconds until it ends.

    A thread that is blocked by a full queue is unblocked by emptying the queue.  A slow read in the
    thread is not interrupted.
    """
    stop.set()
    if thread is threading.current_thread():  # it has dropped the last reference, and ends
        return
    waited = 0.0
    while thread.is_alive() and waited < SECONDS_TO_END:
        try:
            ahead.get_nowait()
        except queue.Empty:
            thread.join(timeout=0.05)
            waited += 0.05
