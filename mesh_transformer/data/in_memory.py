"""Training batches from NumPy arrays, datasets and iterables, instead of from record sets."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any, Literal

import numpy as np

from mesh_transformer.data.prefetch import Prefetch
from mesh_transformer.data.record_set import Row, plain_row
from mesh_transformer.util import InputError, brief, join_keys

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
        negative targets do not count in the loss; or a mapping: with `obs`, `target` and optionally
        `loss_mask` and `segment_ids` (see `CausalTransformer.train`), or, as for transformers, with
        `input_ids` of T + 1 token ids and optionally `labels`, where those below 0 do not count,
        and `attention_mask`, which is 0 for padding at the end and nowhere else.
      length: T, the number of positions per sequence, for a 1-D array.
      size_of: a function from the number of earlier batches to the shape of the next one, (A, B).
      seed: the random seed of windows and epochs.
      document_end: see `RecordSet`; for items that are arrays.
      columns: the sequences of each microbatch to return, by number; None for all.

    Raises:
      InputError: if the data are too few; from `get_samples` if an item has the wrong form.
    """

    def __init__(
        self,
        data: Any,
        length: int,
        size_of: Callable[[int], tuple[int, int]],
        seed: int,
        document_end: int | None = None,
        columns: Sequence[int] | np.ndarray | None = None,
    ):
        self._columns = slice(None) if columns is None else np.asarray(columns)
        self._row = functools.partial(_row, document_end=document_end)
        self._length, self._size_of, self._seed = length, size_of, seed % 2**64
        self._is_endless = True  # windows and epochs never end
        size = len(data) if hasattr(data, "__len__") else None
        self._fingerprint = f"{type(data).__name__} of {size}"
        self._rows_from = self._reader(data)
        self._next = self._batches = 0  # numbers of sequences and batches that were returned
        self._ahead: Prefetch[tuple[Row, int]] | None = None

    def _reader(self, data: Any) -> Callable[[int], Iterator[Any]]:
        """Return a function from the number of earlier items to an iterator over the next ones."""
        kind = _kind(data, self._length, "data")
        if kind == "text":
            return lambda number: self._windows(data, number)
        if kind == "items":
            return lambda number: self._epochs(data, number)
        self._is_endless = False
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
        try:
            batch, self._next = next(self._ahead)
        except StopIteration:
            if self._next:
                raise
            rows = "{} x {}".format(*self._size_of(self._batches))
            raise InputError(
                f"data has fewer sequences than a batch ({rows}); give more, or lower "
                "per_replica_batch"
            ) from None
        self._batches += 1
        return batch

    def _batches_from(self) -> Iterator[tuple[Row, int]]:
        """Yield (batch, number of sequences up to its end)."""
        rows, number = map(self._row, self._rows_from(self._next)), self._next
        for batches in count(self._batches):
            shape = self._size_of(batches)
            chunk = list(islice(rows, shape[0] * shape[1]))
            if len(chunk) < shape[0] * shape[1]:
                return
            number += len(chunk)
            batch = _stack(chunk, shape)
            yield {key: x[:, self._columns] for key, x in batch.items()}, number

    def fingerprint(self) -> str:
        """Return a text that is equal on hosts that have the same kind and number of data."""
        return self._fingerprint

    def state(self) -> dict[str, Any]:
        """Return the position after the last returned batch, as JSON values."""
        return {"sequence": self._next}

    def restore(self, state: dict[str, Any] | None, batches: int = 0) -> None:
        """Continue from a position that `state` returned.

        Args:
          state: the position.  None is the position after `batches` batches or, of an iterable, its
            beginning.
          batches: the number of batches before this position.

        Raises:
          InputError: if the position is one in a record set.
        """
        if state is not None and state.keys() != {"sequence"}:
            raise InputError(
                "the checkpoint is of a run on records, whose position says nothing about data in "
                "memory; give the records, or another folder"
            )
        self.close()
        self._batches = batches
        if state is not None:
            self._next = int(state["sequence"])
        else:
            earlier = range(batches if self._is_endless else 0)
            self._next = sum(a * b for a, b in map(self._size_of, earlier))

    def close(self) -> None:
        """Stop the background thread; the next call of `get_samples` starts a new one."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


class InOrder:
    """Validation batches from data in memory, once and in their order.

    The last batch may be smaller than the others.

    Args:
      data: as for `InMemoryTrainSet`, but no iterator, which could be read only once.  A 1-D array
        is divided into windows of T + 1 tokens, each of which begins with the last token of the one
        before.
      length: T, the number of positions per sequence, for a 1-D array.
      rows: B, the number of sequences per batch.
      document_end: as for `InMemoryTrainSet`.

    Raises:
      InputError: if the data cannot be used.
    """

    def __init__(self, data: Any, length: int, rows: int, document_end: int | None = None):
        kind, items = _kind(data, length, "val"), data
        if kind == "text":
            starts = range(0, len(data) - length, length)
            items = (data[start : start + length + 1] for start in starts)
        elif kind == "items":  # not iter(data): a torch dataset may lack an end
            items = (data[index] for index in range(len(data)))
        elif iter(data) is data:
            raise InputError(
                "val is an iterator, which can be read only once; give an iterable that can be "
                "iterated again, such as a list"
            )
        self._rows = map(functools.partial(_row, document_end=document_end), items)
        self._batch = rows

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


def _kind(data: Any, length: int, name: str) -> Literal["text", "items", "iterable"]:
    """Return which kind of data `InMemoryTrainSet` gets.

    Raises:
      InputError: if it is none of them, or too short for a sequence; `name` is its name.
    """
    is_sized = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if getattr(data, "ndim", None) == 1 and str(getattr(data, "dtype", "")) != "object":
        if len(data) <= length:
            raise InputError(f"{name} has {len(data)} tokens, expected more than seq ({length})")
        return "text"
    if is_sized and not isinstance(data, Mapping | str):
        if not len(data):
            raise InputError(f"{name} has no items, expected at least one sequence of tokens")
        return "items"
    if not isinstance(data, Iterable) or isinstance(data, Mapping | str):
        raise InputError(
            f"{name} is of type {type(data).__name__}, expected an array, a dataset or an iterable "
            "of sequences of tokens"
        )
    return "iterable"


def _row(item: Any, document_end: int | None) -> Row:
    """Convert an item of the data to the arrays of a sequence."""
    if isinstance(item, Mapping):  # such as a tokenizer's BatchEncoding
        row = {key: _array(item[key]) for key in item if item[key] is not None}
        if "input_ids" in row and "obs" not in row:
            row = _hugging_face_row(row)
    elif isinstance(item, tuple) and len(item) == 2:
        row = _masked(_array(item[0]), _array(item[1]))
    else:
        tokens = _array(item)
        row = plain_row(tokens, document_end) if tokens.ndim == 1 else {}
    if not {"obs", "target"} <= row.keys() or any(array.ndim != 1 for array in row.values()):
        shape = getattr(item, "shape", None)
        form = type(item).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
        keys = f"; found the keys {join_keys(item)}" if isinstance(item, Mapping) else ""
        raise InputError(f"an item of data is a {form}; {_EXPECTED}{keys}")
    if len({len(array) for array in row.values()}) > 1:
        lengths = ", ".join(f"{len(array)} ({name})" for name, array in row.items())
        raise InputError(f"an item of data has arrays of different lengths: {lengths}")
    return row


def _array(value: Any) -> np.ndarray:
    """Return the array of a sequence's tokens, or of what goes with them."""
    with contextlib.suppress(ValueError):
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            return array
    raise InputError(f"an item of data has {brief(repr(value))}; {_EXPECTED}")


def _masked(obs: np.ndarray, target: np.ndarray) -> Row:
    """Return a sequence in which targets below 0 do not count in the loss."""
    counts = (target >= 0).astype(np.uint8)
    return {"obs": obs, "target": np.maximum(target, 0), "loss_mask": counts}


def _hugging_face_row(item: Row) -> Row:
    """Return the sequence of an item with `input_ids` and, optionally, what goes with them."""
    # Unsigned integers have no -1, which marks what does not count.
    item = {
        name: array.astype(np.int64) if array.dtype.kind == "u" else array
        for name, array in item.items()
    }
    tokens, padding = item["input_ids"], item.get("attention_mask")
    for name in ("attention_mask", "labels"):
        if name in item and item[name].shape != tokens.shape:
            raise InputError(
                f"an item of data has {name} of shape {item[name].shape}, expected "
                f"{tokens.shape}, that of input_ids"
            )
    _check_meaning(item)
    if padding is None and "labels" not in item:
        return {"obs": tokens[:-1], "target": tokens[1:]}
    labels = item.get("labels", tokens)
    if padding is not None:
        _check_padding(labels, padding)
        labels = np.where(padding, labels, -1)
    return _masked(tokens[:-1], labels[1:])


# Keys beside `input_ids` that would change what is trained, each with what to give instead.
_UNUSED = {
    "loss_mask": "labels that are -100 where nothing counts",
    "completion_mask": "labels that are -100 before the completion",
    "assistant_masks": "labels that are -100 outside of the answers",
    "segment_ids": "obs, target and segment_ids",
}


def _check_meaning(item: Row) -> None:
    """Raise InputError if an item for transformers has a key whose meaning would be lost."""
    for name, instead in _UNUSED.items():
        if name in item:
            raise InputError(f"an item of data has input_ids and {name}; give {instead}")
    positions = item.get("position_ids")
    if positions is not None and not np.array_equal(positions, np.arange(positions.size)):
        raise InputError(
            "an item of data has position_ids that do not count from 0, as of several texts; give "
            "obs, target and segment_ids"
        )


def _check_padding(labels: np.ndarray, padding: np.ndarray) -> None:
    """Raise InputError if an attention mask is more than padding at the end of a sequence."""
    if padding.ndim != 1 or not padding.size:
        return
    if not np.isin(padding, (0, 1)).all():
        raise InputError("an item of data has an attention_mask with values other than 0 and 1")
    kept = padding.astype(bool)
    if not kept[0]:
        raise InputError("an item of data is padded at its start; pad at the end")
    end, counted = int(kept.sum()), labels >= 0
    if not kept[:end].all():
        at = int(np.argmin(kept))
        raise InputError(
            f"an item of data has an attention_mask that is 0 at position {at} and 1 after it; it "
            "may be 0 only for padding at the end"
        )
    if counted[end:].any() and not counted[1:end].any():
        raise InputError(
            f"an item of data has labels that count only from position {end} on, where its "
            "attention_mask is 0, which marks padding; set the mask to 1 there"
        )


def _stack(rows: list[Row], shape: tuple[int, ...]) -> Row:
    lengths = sorted({len(row["obs"]) for row in rows})
    if len(lengths) > 1:
        raise InputError(
            f"items of data have {lengths[0]} and {lengths[-1]} positions; give equal lengths"
        )
    keys = {tuple(sorted(row)) for row in rows}
    if len(keys) > 1:
        kinds = " and some ".join(", ".join(names) for names in sorted(keys))
        raise InputError(f"some items of data have {kinds}; give all the same")
    return {
        key: np.stack([row[key] for row in rows]).reshape(*shape, lengths[0]) for key in rows[0]
    }
