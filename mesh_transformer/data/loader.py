"""Indexes of TFRecords to batches, with a position exact to the record."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.config import Config
from mesh_transformer.data.prefetch import Prefetch
from mesh_transformer.data.record_set import Position, RecordSet, Row, random
from mesh_transformer.util import InputError

BATCHES_AHEAD = 4
DRAWN_TOGETHER = 4096  # choices of a set


class TFRecordNewInputs:
    """Batches of token records, endlessly or (`repeat=False`) once.

    A batch is what a network trains on: `obs` and `target`, uint32 [*batch_size, T], and, where a
    set's records tell which tokens bear loss, `loss_mask` (uint8, 1 = bears loss), or which of
    several texts each is of, `segment_ids` (int32).  Records come in the index's order, or shuffled
    (see `RecordSet`); those left at a file's end begin the next batch with the next file's (and
    epoch's), so any batch size gives the same sequence of records.  A background thread reads a
    few batches ahead.  Raises InputError for whatever is wrong with the files, here or when a
    record is reached.

    Args:
      index_path: an index; or indexes and their weights, which set each record is drawn from.
        A set of a mixture that has been read begins again, whatever the others do.
      sample_size: T.
      partial: whether, where `repeat` is False, records too few for a batch make a shorter one, of
        a batch size that is one number.
      columns: which of the sequences along the last number of the batch size are wanted; records
        of the others are read, but not looked at.
      shuffle_buffer: 0 for the index's order, else the records that are shuffled together.
      seed: what mixture and shuffle are drawn from.
    """

    def __init__(
        self,
        index_path: str | Mapping[str, float],
        batch_size: Sequence[int] | int,
        sample_size: int,
        *,
        n_vocab: int | None = None,
        repeat: bool = True,
        partial: bool = False,
        columns: Sequence[int] | None = None,
        shuffle_buffer: int = 0,
        seed: int = 0,
        restore_state: dict | None = None,
    ):
        self._shape = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        weights = {index_path: 1.0} if isinstance(index_path, str) else dict(index_path)
        wanted = np.arange(int(np.prod(self._shape))).reshape(self._shape)
        self._wanted = wanted if columns is None else wanted[..., list(columns)]
        self._once = (index_path, batch_size, sample_size, n_vocab)
        sets = [
            RecordSet(path, sample_size, n_vocab, shuffle=shuffle_buffer, seed=seed)
            for path in weights
        ]
        if len(sets) == 1 and not partial:
            sets[0].require(wanted.size)
        self._mixture = Mixture(sets, list(weights.values()), seed)
        self._repeat, self._partial = repeat, partial
        self._place = self._mixture.beginning
        self._ahead: Prefetch[tuple[Row, Place]] | None = None
        if restore_state is not None:
            self.restore(restore_state)

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        return self.get_samples()

    def get_samples(self) -> Row:
        """The next batch; StopIteration after the last one where `repeat` is False."""
        if self._ahead is None:
            self._ahead = Prefetch(self._batches(), BATCHES_AHEAD)
        batch, self._place = next(self._ahead)
        return batch

    def _batches(self) -> Iterator[tuple[Row, "Place"]]:
        """Full batches, each with the place after it."""
        records = self._mixture.records(self._place, repeat=self._repeat)
        count = int(np.prod(self._shape))
        while chunk := list(islice(records, count)):
            if len(chunk) < count and not self._partial:
                return
            wanted = self._wanted if len(chunk) == count else np.arange(len(chunk))
            rows = [chunk[at][0]() for at in wanted.flat]
            batch = {
                key: np.stack([row[key] for row in rows]).reshape(*wanted.shape, -1)
                for key in rows[0]
            }
            yield batch, chunk[-1][1]

    def sample_once(self) -> "TFRecordNewInputs":
        """A fresh iterator over one epoch of the same records in their order, for validation."""
        index_path, batch_size, sample_size, n_vocab = self._once
        return TFRecordNewInputs(index_path, batch_size, sample_size, n_vocab=n_vocab, repeat=False)

    def state(self) -> dict[str, Any]:
        """The place after the last batch handed out, as JSON-able numbers and strings.

        It counts records, so a loader with another batch size continues at the same record.
        """
        return self._mixture.state(self._place)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was taken; refuses another index's state."""
        self.close()
        self._place = self._mixture.checked_place(state)

    def close(self) -> None:
        """End the reading thread; the next batch, if asked for, starts it again."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None


def open_train_set(
    config: Config, batch_size: int, columns: Sequence[int] | None = None
) -> TFRecordNewInputs:
    """What a config trains on, [A, batch_size, T] at a time; for `columns` see there."""
    assert config.train_set is not None
    return TFRecordNewInputs(
        config.train_set,
        (config.gradient_accumulation_steps, batch_size),
        config.seq,
        n_vocab=config.n_vocab,
        columns=columns,
        shuffle_buffer=config.shuffle_buffer,
        seed=config.seed,
    )


class Place(NamedTuple):
    """Where a mixture is: how many records were drawn, and the position in each of its sets."""

    drawn: int
    positions: tuple[Position, ...]


class Mixture:
    """Records drawn from several sets by weight; from one, simply its records."""

    def __init__(self, sets: Sequence[RecordSet], weights: Sequence[float], seed: int):
        self.sets, self.seed = sets, seed
        self.extras = frozenset[str]().union(*(each.extras for each in sets))
        total = sum(weights)
        if total <= 0 or min(weights) < 0:  # no set at all has a total of 0
            raise InputError(
                f"train_set: the weights are {list(weights)}, expected none below 0 and one above"
            )
        self.shares = np.cumsum(np.array(weights) / total)
        self.shares[-1] = 1.0  # whatever the sum was rounded to
        self.beginning = Place(0, (Position(),) * len(sets))

    def records(self, place: Place, *, repeat: bool) -> Iterator[tuple[Callable[[], Row], Place]]:
        """What gives the row of each record from a place on, and the place after it."""
        drawn, positions = place.drawn, list(place.positions)
        sources = [
            each.records(position, repeat=repeat)
            for each, position in zip(self.sets, positions, strict=True)
        ]
        for chosen in self._choices(drawn):
            found = next(sources[chosen], None)
            if found is None:
                return
            record, positions[chosen] = found
            drawn += 1
            row = functools.partial(self.sets[chosen].row, record, self.extras)
            yield row, Place(drawn, tuple(positions))

    def _choices(self, drawn: int) -> Iterator[int]:
        """Which set each record comes from, the one after `drawn` others first."""
        while True:
            block, past = divmod(drawn, DRAWN_TOGETHER)
            numbers = random(self.seed, "sets", block).random(DRAWN_TOGETHER)
            yield from np.searchsorted(self.shares, numbers[past:], side="right").tolist()
            drawn += DRAWN_TOGETHER - past

    def state(self, place: Place) -> dict[str, Any]:
        """A place as JSON-able numbers and strings; of one set it is that set's state."""
        states = [each.state(at) for each, at in zip(self.sets, place.positions, strict=True)]
        return states[0] if len(states) == 1 else {"drawn": place.drawn, "sets": states}

    def checked_place(self, state: dict[str, Any]) -> Place:
        """The place in a saved state, if the state is of these sets."""
        states = state.get("sets", [state])
        drawn = state.get("drawn", 0)
        if len(states) != len(self.sets) or not isinstance(drawn, int) or drawn < 0:
            raise InputError(
                f"the data's position was saved in a mixture of {len(states)} sets, train_set now "
                f"has {len(self.sets)}; restore its lines, or start anew in another model folder"
            )
        found = (
            each.checked_position(saved) for each, saved in zip(self.sets, states, strict=True)
        )
        return Place(drawn, tuple(found))
