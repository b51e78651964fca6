"""The records that an index lists, in their order or shuffled, from any position on."""

import dataclasses
import functools
import hashlib
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.data.tfrecords import features, frames, read_index, resolve, size
from mesh_transformer.util import InputError

DTYPES = {"loss_mask": np.uint8, "segment_ids": np.int32}
# What is drawn, each from a stream of its own.
STREAMS = ("files", "records", "sets")
# obs, target: uint32 [T]; maybe loss_mask: uint8 [T], 1 = bears loss; maybe segment_ids: int32 [T]
Row = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Position:
    """The next record to read.

    Attributes:
      epoch: how often all records were read.
      file: the file's place in the epoch's order.
      record: the record's number in its file; the first is 0.
      offset: the record's byte, so that a resume seeks in one step.
      taken: where records are shuffled, how many were handed out of the block that starts here.
    """

    epoch: int = 0
    file: int = 0
    record: int = 0
    offset: int = 0
    taken: int = 0


class Record(NamedTuple):
    """A record as it was read, and its name for error lines."""

    payload: bytes
    where: str


class RecordSet:
    """The records of the files of one index.

    A record is T + 1 tokens (int64 feature `text`), all of which bear loss, or has the int64
    features `input_ids`, `labels` (which follow them) and `input_mask` (1 where a label bears
    loss), [T] each, and `segment_ids` where it holds several texts: a number for each.

    Args:
      shuffle: 0 for the index's order.  Else every epoch takes the files in an order of its own,
        and from each block of so many records one after the other at random: memory holds one
        block, and a resume reads one again.
      seed: what the orders are drawn from.

    Attributes:
      extras: what its rows have besides `obs` and `target`, as its first record tells.
    """

    def __init__(
        self, index_path: str, seq: int, n_vocab: int | None, *, shuffle: int = 0, seed: int = 0
    ):
        self.index_path = index_path
        entries = read_index(index_path)
        # The entries as written: moving a whole data folder changes nothing.
        self.fingerprint = hashlib.sha256("\n".join(entries).encode()).hexdigest()
        self.paths = [resolve(entry, index_path) for entry in entries]
        with ThreadPoolExecutor(16) as pool:  # an index may list thousands of remote files
            self.sizes = list(pool.map(functools.partial(size, index_path), self.paths))
        self.seq, self.n_vocab = seq, n_vocab
        self.shuffle, self.seed = shuffle, seed
        first, _ = next(frames(self.paths[0], 0))
        found = features(first, _where(self.paths[0], 0))
        self.extras: frozenset[str] = frozenset()
        if "input_ids" in found and "text" not in found:
            self.extras = frozenset({"loss_mask"} | (found.keys() & {"segment_ids"}))

    def require(self, count: int) -> None:
        """Raises InputError where the whole set has fewer than `count` records."""
        every = (frame for path in self.paths for frame in frames(path, 0))
        found = sum(1 for _ in islice(every, count))
        if found < count:
            raise InputError(
                f"index {self.index_path}: found {found} records in all, one batch needs {count}; "
                "add data or lower the batch size"
            )

    def state(self, position: Position) -> dict[str, Any]:
        """A position as JSON-able numbers and strings, for `checked_position`."""
        return {"index": self.fingerprint, **self._order(), **dataclasses.asdict(position)}

    def _order(self) -> dict[str, int]:
        """What the order is drawn from; not in the states of sets in their index's order."""
        return {"shuffle_buffer": self.shuffle, "seed": self.seed} if self.shuffle else {}

    def checked_position(self, state: dict[str, Any]) -> Position:
        """The position in a saved state, if the state is of this set and order."""
        if state.get("index") != self.fingerprint:
            raise InputError(
                f"index {self.index_path} lists other files than when the position was saved; "
                "restore its lines, or start anew in another model folder"
            )
        saved = {key: state[key] for key in ("shuffle_buffer", "seed") if key in state}
        if saved != self._order():
            raise InputError(
                f"index {self.index_path}: the position was saved with {_told(saved)}, now it is "
                f"{_told(self._order())}; set it back, or start anew in another model folder"
            )
        names = [field.name for field in dataclasses.fields(Position)]
        counts: dict[str, Any] = {"taken": 0} | {n: state[n] for n in names if n in state}
        valid = all(isinstance(counts.get(name), int) and counts[name] >= 0 for name in names)
        if not valid or counts["file"] >= len(self.paths):
            raise InputError(f"saved data position {state}: expected counts {names}")
        position = Position(**counts)
        file = self._files(position.epoch)[position.file]
        if position.offset > self.sizes[file]:
            raise InputError(
                f"{self.paths[file]}: found {self.sizes[file]} bytes, but the saved position is "
                f"byte {position.offset}; restore the file as it was"
            )
        return position

    def records(self, position: Position, *, repeat: bool) -> Iterator[tuple[Record, Position]]:
        """The records from a position on, each with the position after it.

        Args:
          repeat: whether an epoch follows the next, endlessly.
        """
        return self._shuffled(position, repeat) if self.shuffle else self._listed(position, repeat)

    def row(self, record: Record, extras: Collection[str] = ()) -> Row:
        """A record as what the model reads, what it should say, and where that counts.

        Args:
          extras: what the row has besides, where the set has it not: all bears loss, in one
            segment.
        """
        row = self._row(features(*record), record.where)
        for key in set(extras) - row.keys():
            row[key] = np.ones(self.seq, DTYPES[key])
        return row

    def _files(self, epoch: int) -> list[int]:
        """The files' numbers in the epoch's order."""
        if not self.shuffle:
            return list(range(len(self.paths)))
        return random(self.seed, "files", epoch).permutation(len(self.paths)).tolist()

    def _listed(self, position: Position, repeat: bool) -> Iterator[tuple[Record, Position]]:
        """The files' records one after the other."""
        while True:
            for place, file in list(enumerate(self._files(position.epoch)))[position.file :]:
                path = self.paths[file]
                for payload, offset in frames(path, position.offset):
                    record = Record(payload, _where(path, position.record))
                    position = Position(position.epoch, place, position.record + 1, offset)
                    yield record, position
                position = Position(position.epoch, place + 1)
            if not repeat:
                return
            position = Position(position.epoch + 1)

    def _shuffled(self, position: Position, repeat: bool) -> Iterator[tuple[Record, Position]]:
        """Block after block of `_listed`; those that an epoch begins do not reach into the next."""
        while True:
            start = dataclasses.replace(position, taken=0)
            block = list(islice(self._listed(start, repeat=False), self.shuffle))
            key = (start.epoch, start.file, start.record)
            order = random(self.seed, "records", *key).permutation(len(block))
            for taken in range(position.taken, len(block)):
                record, _ = block[order[taken]]
                yield record, dataclasses.replace(start, taken=taken + 1)
            if len(block) == self.shuffle:
                position = block[-1][1]
            elif repeat:
                position = Position(start.epoch + 1)
            else:
                return

    def _row(self, found: dict[str, np.ndarray | None], where: str) -> Row:
        if "text" in found or not self.extras:
            text = self._tokens("text", found, where, self.seq + 1)
            return {"obs": text[:-1], "target": text[1:]}
        row = {
            "obs": self._tokens("input_ids", found, where, self.seq),
            "target": self._tokens("labels", found, where, self.seq),
        }
        mask = self._numbers("input_mask", found, where, self.seq)
        if ((mask != 0) & (mask != 1)).any():
            raise InputError(f"{where}: feature input_mask holds other numbers than 0 and 1")
        row["loss_mask"] = mask.astype(DTYPES["loss_mask"])
        if "segment_ids" in found:
            if "segment_ids" not in self.extras:
                raise InputError(
                    f"{where} has the feature segment_ids, the first record of {self.index_path} "
                    "has not; give packed records an index of their own"
                )
            segments = self._numbers("segment_ids", found, where, self.seq)
            row["segment_ids"] = segments.astype(DTYPES["segment_ids"])
        return row

    def _tokens(
        self, name: str, found: dict[str, np.ndarray | None], where: str, count: int
    ) -> np.ndarray:
        tokens = self._numbers(name, found, where, count)
        limit = 2**32 if self.n_vocab is None else self.n_vocab
        outside = tokens[(tokens < 0) | (tokens >= limit)]
        if len(outside):
            raise InputError(
                f"{where} holds token id {outside[0]}, outside the vocabulary of config key "
                f"n_vocab {limit}; the records were made with another tokenizer"
            )
        return tokens.astype(np.uint32)

    def _numbers(
        self, name: str, found: dict[str, np.ndarray | None], where: str, count: int
    ) -> np.ndarray:
        numbers = found.get(name)
        if numbers is None:
            raise InputError(
                f"{where} has no int64 feature {name}, found {sorted(found)}; make the records anew"
            )
        if len(numbers) != count:
            extra = count - self.seq
            raise InputError(
                f"{where} holds {len(numbers)} tokens, config key seq {self.seq} needs {count}; "
                f"set seq to {len(numbers) - extra} or make the records anew"
            )
        return numbers


def random(seed: int, stream: str, *place: int) -> np.random.Generator:
    """The draws at a place of a stream, whatever was drawn before it."""
    return np.random.default_rng((seed % 2**64, STREAMS.index(stream), *place))


def _where(path: str, record: int) -> str:
    return f"{path}: record {record} (the first is 0)"


def _told(order: dict[str, int]) -> str:
    return ", ".join(f"{key} {value}" for key, value in order.items()) or "shuffle_buffer 0"
