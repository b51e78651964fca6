"""Prefetching: an iterator whose items are produced ahead of time by a background thread."""

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
SECONDS_TO_END = 5.0


class Prefetch(Generic[Item]):
    """Iterator over the items of `items`, with up to `depth` of them produced in advance.

    An exception of `items` is raised in place of the item that it prevented, and again on every
    later call.  The thread ends when the object is closed or garbage-collected.
    """

    def __init__(self, items: Iterator[Item], depth: int):
        self._queue: queue.Queue[Item | _End] = queue.Queue(depth)
        self._end: _End | None = None
        stop = threading.Event()
        # The thread must not refer to this object, which could then never be garbage-collected.
        thread = threading.Thread(target=_fill, args=(self._queue, items, stop), daemon=True)
        thread.start()
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
    """Stop the thread and wait for it, but at most SECONDS_TO_END seconds.

    The thread may be blocked by a full queue, which is emptied here, or by a slow read, which is
    not interrupted.
    """
    stop.set()
    waited = 0.0
    while thread.is_alive() and waited < SECONDS_TO_END:
        try:
            ahead.get_nowait()
        except queue.Empty:
            thread.join(timeout=0.05)
            waited += 0.05
