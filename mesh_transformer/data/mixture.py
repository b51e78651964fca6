"""Mixtures of record sets, with weights that may change during training."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.config import Weight
from mesh_transformer.data.record_set import Position, Record, RecordSet, Row, random
from mesh_transformer.util import InputError, brief

# Each random generator chooses the record sets of this many consecutive records.
CHOICES_PER_BLOCK = 4096


def _points(weight: Weight) -> tuple[list[float], list[float]]:
    """Return numbers of updates, and the weights after them."""
    if isinstance(weight, (int, float)):
        return [0.0], [float(weight)]
    times = [pair[0] for pair in weight if len(pair) == 2]
    if not times or len(times) < len(weight) or times != sorted(set(times)) or times[0] < 0:
        raise InputError(
            f"train_set: the weight {brief(repr(weight))} changes, expected pairs of a number of "
            "updates and a weight, such as [[0, 0.1], [9000, 0.5]], in ascending order"
        )
    return times, [float(pair[1]) for pair in weight]


class MixturePosition(NamedTuple):
    """A position in a `Mixture`, from which reading can resume.

    Attributes:
      drawn: the number of records read so far, summed over all record sets.
      positions: the position in each record set.
    """

    drawn: int
    positions: tuple[Position, ...]


class Drawn(NamedTuple):
    """A record that was drawn from a mixture.

    Attributes:
      extras: the keys that its row must have; see `RecordSet.row`.
    """

    record_set: RecordSet
    record: Record
    extras: frozenset[str]

    def row(self) -> Row:
        """Parse the record; see `RecordSet.row`."""
        return self.record_set.row(self.record, self.extras)


class Mixture:
    """The records of one or several record sets, interleaved at random.

    The probability that the next record comes from a record set is proportional to the set's
    weight.  Within a record set, the records are in the order of `RecordSet.records`.

    Attributes:
      changes: whether the weights change.
      most_ahead: see `RecordSet`.

    Raises:
      InputError: at construction, if a weight is negative, or all weights are 0 at some time.
    """

    def __init__(self, sets: Sequence[RecordSet], weights: Sequence[Weight], seed: int):
        self.sets, self.seed = sets, seed
        self.extras = frozenset[str]().union(*(record_set.extras for record_set in sets))
        self.most_ahead = min((record_set.most_ahead for record_set in sets), default=0)
        self._weights = [_points(weight) for weight in weights]
        times = sorted({time for own, _ in self._weights for time in own})
        for time in times or [0.0]:
            values = self._at(time)
            # The sum is 0 also if there are no sets, and NaN if a weight is.
            if not 0 < sum(values) < math.inf or min(values) < 0:
                where = f" in update {time:g}" if len(times) > 1 else ""
                raise InputError(
                    f"train_set: the weights{where} are {values}, expected finite ones, none "
                    "below 0 and at least one above 0"
                )
        self._constant = self._shares(0) if len(times) == 1 else None
        self.changes = self._constant is None
        self.beginning = MixturePosition(0, (Position(),) * len(sets))

    def _at(self, update: float) -> list[float]:
        """Return the weights after a number of updates."""
        return [float(np.interp(update, times, values)) for times, values in self._weights]

    def _shares(self, update: int) -> np.ndarray:
        """Return the cumulative probabilities of the record sets after a number of updates."""
        weights = self._at(update)
        shares = np.cumsum(np.array(weights) / sum(weights))
        shares[-1] = 1.0  # the sum may differ from 1 by rounding
        return shares

    def records(
        self, place: MixturePosition, update: Callable[[], int], *, repeat: bool
    ) -> Iterator[tuple[Drawn, MixturePosition]]:
        """Yield (record, next position) for each record, starting at the position `place`.

        Args:
          update: returns the number of updates before that of the next record.
        """
        drawn, positions = place.drawn, list(place.positions)
        sources = [
            record_set.records(position, repeat=repeat)
            for record_set, position in zip(self.sets, positions, strict=True)
        ]
        for chosen in self._choices(drawn, update):
            drawn_record = next(sources[chosen], None)
            if drawn_record is None:
                return
            record, positions[chosen] = drawn_record
            drawn += 1
            result = Drawn(self.sets[chosen], record, self.extras)
            yield result, MixturePosition(drawn, tuple(positions))

    def _choices(self, drawn: int, update: Callable[[], int]) -> Iterator[int]:
        """Yield the index in `sets` of each record's set, endlessly, after `drawn` records."""
        before, shares = -1, self._constant
        while True:
            block, past = divmod(drawn, CHOICES_PER_BLOCK)
            numbers = random(self.seed, "sets", block).random(CHOICES_PER_BLOCK)[past:]
            if self._constant is not None:
                yield from np.searchsorted(self._constant, numbers, side="right").tolist()
            else:
                for number in numbers:
                    if shares is None or update() != before:
                        before = update()
                        shares = self._shares(before)
                    yield int(np.searchsorted(shares, number, side="right"))
            drawn += CHOICES_PER_BLOCK - past

    def state(self, place: MixturePosition) -> dict[str, Any]:
        """Return the position `place` as a JSON-serialisable dict, which `checked_place` reads.

        For a single record set, this is the dict that `RecordSet.state` returns.
        """
        states = [
            record_set.state(position)
            for record_set, position in zip(self.sets, place.positions, strict=True)
        ]
        return states[0] if len(states) == 1 else {"drawn": place.drawn, "sets": states}

    def checked_place(self, state: dict[str, Any]) -> MixturePosition:
        """Return the position that is stored in a dict returned by the method `state`.

        Raises:
          InputError: if the dict is damaged, or was saved with other indexes or shuffle settings.
        """
        if not isinstance(state, dict) or "file_idx" in state:
            raise InputError(
                f"the data position is {brief(repr(state))}, expected what `state` has returned; "
                "positions of the original mesh-transformer-jax cannot be continued from"
            )
        states = state.get("sets", [state])
        drawn = state.get("drawn", 0)
        if len(states) != len(self.sets) or not isinstance(drawn, int) or drawn < 0:
            raise InputError(
                f"the checkpoint's data position is for a mixture of {len(states)} sets, but "
                f"train_set now has {len(self.sets)}; change train_set back, or start over in "
                "another model folder"
            )
        positions = (
            record_set.checked_position(saved)
            for record_set, saved in zip(self.sets, states, strict=True)
        )
        return MixturePosition(drawn, tuple(positions))
