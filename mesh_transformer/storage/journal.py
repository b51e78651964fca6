"""Files of JSON lines that are made in any order, and that a killed run continues."""

import hashlib
import itertools
import json
import os
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tqdm import tqdm

from mesh_transformer.storage.locks import LocalLock
from mesh_transformer.util import InputError

NOTE_SECONDS = 1.0  # between two notes beside the progress bar


class Journal:
    """A file of numbered lines, in the order in which they were added.

    Each is flushed when it is added.  A line that a killed process has not completed is dropped, as
    is all that follows a damaged one.

    Attributes:
      places: {number: (offset, length) of its line in the file, without the number}.
    """

    def __init__(self, path: str):
        self._file = open(path, "a+b")  # noqa: SIM115
        self.path, self.places = path, dict[int, tuple[int, int]]()
        self._file.seek(0)
        self._end = 0
        for line in self._file:
            number, _, text = line.partition(b" ")
            if not number.isdigit() or not line.endswith(b"\n"):
                break
            self._add(int(number), len(number) + 1, len(text))
        self._file.truncate(self._end)

    def _add(self, number: int, head: int, length: int) -> None:
        self.places[number] = self._end + head, length
        self._end += head + length

    def add(self, number: int, value: Any) -> None:
        """Add the line `number` with a JSON value."""
        head, text = f"{number} ".encode(), f"{json.dumps(value, default=str)}\n".encode()
        self._file.write(head + text)
        self._file.flush()
        self._add(number, len(head), len(text))

    def publish(self, path: str) -> None:
        """Write the lines to the file `path` in the order of their numbers, and delete this one."""
        draft = f"{self.path}.ordered"
        with open(draft, "wb") as file:
            for _, (offset, length) in sorted(self.places.items()):
                self._file.seek(offset)
                file.write(self._file.read(length))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        os.unlink(self.path)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_vacant(path: str) -> None:
    """Raise InputError if `write_in_order` cannot create the file `path`."""
    if os.path.exists(path) or not path.endswith(".jsonl"):
        problem = "exists" if os.path.exists(path) else "does not end in .jsonl"
        raise InputError(f"{path} {problem}; choose another file")


def write_in_order(
    path: str,
    items: Sequence[Any],
    ask: Callable[[Any], Any],
    *,
    settings: Any,
    in_flight: int,
    size: Callable[[Any], float] = lambda _: 0,
    stop: Callable[[], object] = lambda: None,
    note: Callable[[int], str] = lambda _: "",
    unit: str = "answer",
    quiet: bool = False,
) -> None:
    """Write `ask(item)` of each item as a line of JSON, in order.

    The file appears when it is complete.  Until then, the lines are in a hidden file beside it,
    whose name has a digest of items and settings.  A further call with the same ones continues it.

    Args:
      items: JSON values.
      settings: JSON values on which the answers depend, besides the items.
      in_flight: number of threads that call `ask`.
      size: the larger it is, the earlier an item is asked; items of the same size are asked in
        order.
      stop: called if a call of `ask` fails, so that the other calls end.
      note: called at times with the number of lines so far; returns what the progress bar shows
        besides it.
      unit: the name of an item beside the progress bar.
      quiet: whether to show no progress bar.

    Raises:
      InputError: if the file exists already, is not called .jsonl or cannot be written, if another
        process writes it, or if `ask` raises it.
    """
    check_vacant(path)
    folder, name = os.path.split(path)
    digest = hashlib.sha256(json.dumps(settings, default=str).encode())
    for item in items:
        digest.update(json.dumps(item, default=str).encode() + b"\n")
    draft = os.path.join(folder, f".{name}.{digest.hexdigest()[:12]}.partial")
    with LocalLock(folder or ".", name):
        check_vacant(path)  # another process may just have completed it
        try:
            with Journal(draft) as journal:
                left = [n for n in range(len(items)) if n not in journal.places]
                left.sort(key=lambda n: -size(items[n]))
                done = len(journal.places)
                with tqdm(total=len(items), initial=done, unit=unit, disable=quiet) as bar:
                    _ask_all(left, lambda n: ask(items[n]), journal, in_flight, stop, note, bar)
                journal.publish(path)
        except OSError as error:
            raise InputError(
                f"{path} cannot be written ({error.strerror or error}); free space on its disk, or "
                "choose another file"
            ) from None


def _ask_all(
    numbers: Sequence[int],
    ask: Callable[[int], Any],
    journal: Journal,
    in_flight: int,
    stop: Callable[[], object],
    note: Callable[[int], str],
    bar: "tqdm[Any]",
) -> None:
    """Add `ask(number)` to the journal for each number; see `write_in_order` for the arguments."""
    pool, left, noted = ThreadPoolExecutor(in_flight), iter(numbers), 0.0
    finished = queue.SimpleQueue[tuple[int, Future[Any]]]()

    def begin(number: int) -> None:
        future = pool.submit(ask, number)
        future.add_done_callback(lambda done: finished.put((number, done)))

    try:
        for number in itertools.islice(left, in_flight):
            begin(number)
        for _ in numbers:
            number, future = finished.get()
            value = future.result()
            if (following := next(left, None)) is not None:
                begin(following)
            journal.add(number, value)
            bar.update()
            if time.monotonic() - noted > NOTE_SECONDS:
                noted = time.monotonic()
                bar.set_postfix_str(note(len(journal.places)), refresh=False)
    except BaseException:
        stop()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
