"""Training batches from NumPy arrays, datasets and iterables, instead of from record sets."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np

from mesh_transformer.data.prefetch import Prefetch
from mesh_transformer.data.record_set import Row
from mesh_transformer.util import InputError

BATCHES_AHEAD = 2
_EXPECTED = (
    "expected an array of seq + 1 token ids, a pair (obs, target), or a dict with obs and target, "
    "or with input_ids"
)


class InMemoryTrainSet:
    """A stream of training batches from data in memory; its methods are a `network.TrainSet`'s.

    Args:
      data: one of these:

        * A 1-D array of token ids, such as a `numpy.memmap`.  Each sequence is a window of T + 1
          tokens that begins at a random place.
        * An object with `__len__` and `__getitem__`, such as a list, an array of sequences or a
          torch dataset.  Its items are shuffled in every epoch.
        * Any other iterable.  Its items are used once, in their order.

        An item is an array of T + 1 token ids; a pair (obs, target) of T token ids each, where
        negative targets do not count in the loss; or a dict with `obs`, `target` and optionally
        `loss_mask` and `segment_ids` (see `CausalTransformer.train`), or with `input_ids` of T + 1
        token ids.
      length: T, the number of positions per sequence, for a 1-D array.
      size_of: a function from the number of earlier batches to the shape of the next one, (A, B).
      seed: the random seed of windows and epochs.

    Raises:
      InputError: if the data are too few; from `get_samples` if an item has the wrong form.
    """

    def __init__(
        self, data: Any, length: int, size_of: Callable[[int], tuple[int, int]], seed: int
    ):
        self._length, self._size_of, self._seed = length, size_of, seed
        self._rows_from = self._reader(data)
        self._next = self._batches = 0  # numbers of sequences and batches that were returned
        self._ahead: Prefetch[tuple[Row, int]] | None = None

    def _reader(self, data: Any) -> Callable[[int], Iterator[Any]]:
        """Return a function from the number of earlier items to an iterator over the next ones."""
        if _is_text(data):
            if len(data) <= self._length:
                raise InputError(
                    f"data has {len(data)} tokens, expected more than seq ({self._length})"
                )
            return lambda number: self._windows(data, number)
        if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, dict):
            if not len(data):
                raise InputError("data has no items, expected at least one sequence of tokens")
            return lambda number: self._epochs(data, number)
        if not isinstance(data, Iterable) or isinstance(data, dict | str):
            raise InputError(
                f"data is of type {type(data).__name__}, expected an array, a dataset or an "
                "iterable of sequences of tokens"
            )
        return _OnceInOrder(data)

    def _windows(self, tokens: np.ndarray, number: int) -> Iterator[np.ndarray]:
        for sample in count(number):
            rng = np.random.default_rng((self._seed, sample))
            start = int(rng.integers(len(tokens) - self._length))
            yield tokens[start : start + self._length + 1]

    def _epochs(self, items: Any, number: int) -> Iterator[Any]:
        first, at = divmod(number, len(items))
        for epoch in count(first):
            order = np.random.default_rng((self._seed, epoch)).permutation(len(items))
            for index in order[at if epoch == first else 0 :]:
                yield items[int(index)]

    def get_samples(self) -> Row:
        """Return the next batch, arrays of shape [A, B, T].

        Raises:
          StopIteration: if the data are an iterable that has ended.
        """
        if self._ahead is None:
            self._ahead = Prefetch(self._batches_from(), BATCHES_AHEAD)
        batch, self._next = next(self._ahead)
        self._batches += 1
        return batch

    def _batches_from(self) -> Iterator[tuple[Row, int]]:
        """Yield (batch, number of sequences up to its end)."""
        rows, number = map(_row, self._rows_from(self._next)), self._next
        for batches in count(self._batches):
            shape = self._size_of(batches)
            chunk = list(islice(rows, shape[0] * shape[1]))
            if len(chunk) < shape[0] * shape[1]:
                return
            number += len(chunk)
            yield _stack(chunk, shape), number

    def state(self) -> dict[str, Any]:
        """Return the position after the last returned batch, as JSON values."""
        return {"sequence": self._next}

    def restore(self, state: dict[str, Any] | None, batches: int = 0) -> None:
        """Continue from a position that `state` returned; None is the beginning.

        Args:
          batches: the number of batches before this position.
        """
        self.close()
        self._next, self._batches = 0 if state is None else int(state["sequence"]), batches

    def close(self) -> None:
        """Stop the background thread; the next call of `get_samples` starts a new one."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


class InOrder:
    """Validation batches from data in memory, once and in their order.

    The last batch may be smaller than the others.

    Args:
      data: as for `InMemoryTrainSet`; a 1-D array is divided into windows of T + 1 tokens, each of
        which begins with the last token of the one before.
      length: T, the number of positions per sequence, for a 1-D array.
      rows: B, the number of sequences per batch.
    """

    def __init__(self, data: Any, length: int, rows: int):
        if _is_text(data):
            starts = range(0, len(data) - length, length)
            data = [data[start : start + length + 1] for start in starts]
        self._rows, self._batch = map(_row, iter(data)), rows

    def __iter__(self) -> Iterator[Row]:
        """Yield batches, arrays of shape [B, T]."""
        while chunk := list(islice(self._rows, self._batch)):
            yield _stack(chunk, (len(chunk),))

    def close(self) -> None:
        """Do nothing; there is nothing to close."""


class _OnceInOrder:
    """The items of an iterable, in their order."""

    def __init__(self, items: Iterable[Any]):
        self._items, self._used = items, False

    def __call__(self, number: int) -> Iterator[Any]:
        """Return an iterator over the items after the first `number`."""
        iterator = iter(self._items)
        if iterator is self._items and self._used:
            raise InputError(
                "data is an iterator, which cannot go back; give an iterable that can be iterated "
                "again, such as a list"
            )
        self._used = True
        return islice(iterator, number, None)


def _is_text(data: Any) -> bool:
    """Return whether data is a 1-D array of tokens, of whatever library."""
    return getattr(data, "ndim", None) == 1 and str(getattr(data, "dtype", "")) != "object"


def _row(item: Any) -> Row:
    """Convert an item of the data to the arrays of a sequence."""
    if isinstance(item, dict):
        row = {key: np.asarray(item[key]) for key in item}
        if "input_ids" in row and "obs" not in row:
            return _row(row["input_ids"])
    elif isinstance(item, tuple) and len(item) == 2:
        target = np.asarray(item[1])
        counts = (target >= 0).astype(np.uint8)
        row = {"obs": np.asarray(item[0]), "target": np.maximum(target, 0), "loss_mask": counts}
    else:
        tokens = np.asarray(item)
        row = {"obs": tokens[:-1], "target": tokens[1:]} if tokens.ndim == 1 else {}
    if not {"obs", "target"} <= row.keys() or any(array.ndim != 1 for array in row.values()):
        shape = getattr(item, "shape", None)
        found = type(item).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
        raise InputError(f"an item of data is a {found}; {_EXPECTED}")
    return row


def _stack(rows: list[Row], shape: tuple[int, ...]) -> Row:
    lengths = sorted({len(row["obs"]) for row in rows})
    if len(lengths) > 1:
        raise InputError(
            f"items of data have {lengths[0]} and {lengths[-1]} positions; give equal lengths"
        )
    return {
        key: np.stack([row[key] for row in rows]).reshape(*shape, lengths[0]) for key in rows[0]
    }
