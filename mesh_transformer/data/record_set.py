"""Reads the records of an index or folder, in order or shuffled, from any position."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from mesh_transformer.config import Config
from mesh_transformer.data import references
from mesh_transformer.data.record_offsets import RecordOffsets
from mesh_transformer.data.same_tokenizer import check_encoding
from mesh_transformer.data.teacher import TEACHER_KEYS
from mesh_transformer.data.tfrecords import (
    Frame,
    RecordFiles,
    features,
    find_index,
    frames,
    is_compressed,
    size,
)
from mesh_transformer.storage import files
from mesh_transformer.storage.access import GCS
from mesh_transformer.storage.remote_file import IN_FLIGHT
from mesh_transformer.util import InputError

DTYPES = {"loss_mask": np.uint8, "segment_ids": np.int32}
# Threads that query the sizes of files, and files per task; the files of a bucket's folder that are
# as many are listed instead.
THREADS, FILES = 32, 64
# The keys of a saved position that determine a shuffled order.
ORDER = ("shuffle_buffer", "seed", "records")
# The purposes for which random numbers are drawn; each has its own random stream.
STREAMS = ("files", "records", "sets", "prompts", "answers", "permutation")
ROUNDS = 8  # of the Feistel network in `permuted`; the numbers of an epoch are permuted together
PERMUTED = 1024
# With shuffle "all", the records and bytes that are requested before they are needed.
RECORDS_AHEAD, BYTES_AHEAD = 1024, IN_FLIGHT
# One sequence.  obs and target: uint32 [T].  Optional: loss_mask, uint8 [T], 1 where a token bears
# loss; segment_ids, int32 [T], the number of the record's text that each token belongs to;
# reference, f32 [T], see `TFRecordNewInputs`; teacher_ids, uint32 [T x K], and teacher_logprobs,
# f32 [T x K], the K tokens that a teacher finds most likely at each position.
Row = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Position:
    """A position in a `RecordSet`, from which reading can resume.

    Without shuffling, `file`, `record` and `offset` locate the next record to read.  With
    shuffling, records are read and shuffled in blocks.  The fields `file`, `record` and `offset`
    then locate the first record of the current block.  If all records are shuffled together, the
    block is the epoch.

    Attributes:
      epoch: the number of completed epochs.
      file: the file's index in the epoch's order of files.
      record: the record's number in its file, from 0.
      offset: the record's byte offset in its file; a resumed run seeks directly to it.
      taken: the number of records of the current block already returned; 0 without shuffling.
    """

    epoch: int = 0
    file: int = 0
    record: int = 0
    offset: int = 0
    taken: int = 0


class SetSize(NamedTuple):
    """The size of a record set: its number of sequences, and T, the tokens per sequence."""

    sequences: int
    seq: int


def set_size(index_path: str) -> SetSize:
    """Return the number of records of an index, and the tokens per sequence in the first record.

    A config that reads these records must set `seq` to this number of tokens per sequence.

    Raises:
      InputError: if the index or a record file cannot be read, or the first record has no tokens.
    """
    source, _, paths = RecordFiles.of(index_path)
    for path in paths:
        size(source, path)  # raises an error that names the index
    first, _ = next(frames(paths[0], 0))
    arrays = features(first, _where(paths[0], 0))
    text, inputs = arrays.get("text"), arrays.get("input_ids")
    tokens = len(text) - 1 if text is not None else len(inputs) if inputs is not None else 0
    if tokens < 1:
        raise InputError(
            f"{_where(paths[0], 0)} has no tokens in feature text or input_ids, found features "
            f"{sorted(arrays)}; recreate the records"
        )
    return SetSize(sum(1 for path in paths for _ in frames(path, 0)), tokens)


def tokenizer_of(index_path: str) -> str | None:
    """Return the name of the tokenizer of an index's records, or None; see `manifest_tokenizer`."""
    return manifest_tokenizer(index_path).get("name")


def check_tokenizer(index_path: str, tokenizer: str) -> None:
    """Raise InputError if records give other tokens than a tokenizer does (see `check_encoding`).

    Args:
      index_path: the path of an index or folder of records.
      tokenizer: the config key `tokenizer` of the model that reads them.
    """
    made = manifest_tokenizer(index_path)
    check_encoding(made.get("name"), made.get("encoding"), tokenizer, index_path)


def check_preferences(index_path: str, config: Config) -> None:
    """Raise InputError if records are not of the kind of texts that a config's objective needs."""
    known, objective = manifest(index_path), config.objective_kind
    actual, kind = known.get("preferences"), objective and objective.records
    kind = None if config.has_rollouts else kind  # of validation sets
    if not known or actual == kind:
        return
    what = f"preferences ({actual})" if actual else "no preferences"
    remedy = f"give records of `completion-records --preferences {kind}`"
    remedy = remedy if kind else "set objective, such as dpo or kto"
    raise InputError(f"{index_path} has {what}, but objective is {config.objective}; {remedy}")


def manifest_tokenizer(index_path: str) -> dict[str, Any]:
    """Return what a manifest says of the tokenizer that an index's records were created with.

    It is read from NAME.manifest.json next to the index NAME.index.  Returns {} if there is no
    manifest, or if an earlier version of this library wrote a manifest without the name.

    Raises:
      InputError: if the manifest is damaged.
    """
    return manifest(index_path).get("tokenizer", {})


def manifest(index_path: str) -> dict[str, Any]:
    """Return the manifest of an index's records; {} if there is none.

    Raises:
      InputError: if the manifest is damaged.
    """
    path = f"{find_index(index_path).removesuffix('.index')}.manifest.json"
    if not files.is_file(path):
        return {}
    try:
        with files.open_file(path) as file:
            values = json.loads(file.read())
            return values | {"tokenizer": dict(values.get("tokenizer", {}))}
    except (ValueError, AttributeError, TypeError) as error:
        raise InputError(
            f"{path}: not the manifest of a record set; create the records again"
        ) from error


class Record(NamedTuple):
    """An unparsed record.

    Attributes:
      content: its payload, or where it is read when it is needed.
      where: names its file and number, for error messages.
      place: the index of its file, and its number in the file.
    """

    content: bytes | Frame
    where: str
    place: tuple[int, int]

    def request(self) -> None:
        """Begin to read a record that will be needed."""
        if isinstance(self.content, Frame):
            self.content.request()

    def payload(self) -> bytes:
        """Return the payload; for the errors, see `Frame.payload`."""
        return self.content.payload() if isinstance(self.content, Frame) else self.content


class RecordSet:
    """The records of all files listed by one index, or in one folder without an index.

    There are two kinds of records; features are int64 unless stated otherwise:

    * Plain text has one feature, `text`, [T + 1]: the tokens; all of them count in the loss.
    * Other records have the features `input_ids`, `labels` (the next tokens) and `input_mask` (1
      where the label counts in the loss), [T] each.  Records that pack several texts also have
      `segment_ids`, [T]: the number of the text that each token belongs to.  Those with the
      probabilities of a teacher have `teacher_ids` and `teacher_logprobs` (float), [T x K].

    Args:
      index_path: the path of the index or folder.
      seq: T, the number of tokens per sequence.
      n_vocab: the size of the vocabulary; token ids outside of it raise InputError.
      shuffle: 0 to read the records in the index's order.  Otherwise each epoch has its own order
        of files, and the records are shuffled in blocks of `shuffle` records.  One block is held in
        memory, and a resumed run reads its current block again.  With "all", each epoch is a
        permutation of all records, which are read one by one.
      seed: the random seed for shuffling.
      reference: whether rows have `reference`; see `TFRecordNewInputs`.
      teacher: whether rows have `teacher_ids` and `teacher_logprobs`.
      document_end: the token that ends a document of plain text.  If it is not None, rows have
        `segment_ids`, in which each document has its own number.

    Attributes:
      source: the index or folder, for error messages.
      extras: the keys that parsed records have besides `obs` and `target`, inferred from the first
        record.
      is_text: whether that record is of plain text.
      alternatives: K of the teacher's tokens; 0 without `teacher`.
      most_ahead: how many records should be requested before they are needed; 0 if all records are
        read in order.
    """

    def __init__(
        self,
        index_path: str,
        seq: int,
        n_vocab: int | None,
        *,
        shuffle: int | Literal["all"] = 0,
        seed: int = 0,
        reference: bool = False,
        teacher: bool = False,
        document_end: int | None = None,
    ):
        record_files = RecordFiles.of(index_path)
        self.source, entries, self.paths = record_files
        # Hash the entries as written, not as resolved, so that a data folder can be moved.
        self.fingerprint = hashlib.sha256("\n".join(entries).encode()).hexdigest()
        self.sizes = self._sizes()
        self.seq, self.n_vocab = seq, n_vocab
        self.shuffle: int | Literal["all"] = shuffle
        self.seed = seed
        self.reference, self.teacher, self.document_end = reference, teacher, document_end
        self._index_path = index_path
        first, _ = next(frames(self.paths[0], 0))
        arrays = features(first, _where(self.paths[0], 0))
        self._offsets, self.most_ahead = None, 0
        if shuffle == "all":
            self._offsets = RecordOffsets.of(record_files, index_path, self.sizes)
            by_bytes = int(BYTES_AHEAD / self._offsets.record_bytes)
            self.most_ahead = min(RECORDS_AHEAD, max(1, by_bytes))
        self.extras = frozenset[str]() if document_end is None else frozenset({"segment_ids"})
        self.is_text = "input_ids" not in arrays or "text" in arrays
        if not self.is_text:
            self.extras |= {"loss_mask"} | (arrays.keys() & {"segment_ids"})
        ids = arrays.get(TEACHER_KEYS[0])
        self.alternatives = 0 if ids is None or not teacher else len(ids) // seq
        if teacher and not self.alternatives:
            raise InputError(
                f"{self.source}: the records have no probabilities of a teacher, but teacher is "
                "records; give records of `completion-records --teacher-tokens`"
            )

    def _sizes(self) -> list[int]:
        """Return the size of each file; there may be hundreds of thousands, some of them remote."""
        folders = Counter(path.rpartition("/")[0] for path in self.paths if path.startswith(GCS))
        known: dict[str, int] = {}
        for folder, count in folders.items():
            if count >= FILES:
                known |= files.sizes_in(folder)

        def sizes(paths: list[str]) -> list[int]:
            # Empty and missing files are left to `size`, which raises the error.
            return [known.get(path) or size(self.source, path) for path in paths]

        parts = [self.paths[at : at + FILES] for at in range(0, len(self.paths), FILES)]
        with ThreadPoolExecutor(THREADS) as pool:
            return list(itertools.chain.from_iterable(pool.map(sizes, parts)))

    def require(self, count: int) -> None:
        """Raise InputError if the set has fewer than `count` records."""
        if self._offsets is not None:
            available = len(self._offsets)
        else:
            all_frames = (frame for path in self.paths for frame in frames(path, 0))
            available = sum(1 for _ in islice(all_frames, count))
        if available < count:
            raise InputError(
                f"{self.source}: found {available} records in total, but one batch needs "
                f"{count}; add data or lower the batch size"
            )

    def state(self, position: Position) -> dict[str, Any]:
        """Return a position as a JSON-serialisable dict, which `checked_position` reads."""
        return {"index": self.fingerprint, **self._order(), **dataclasses.asdict(position)}

    def _order(self) -> dict[str, int | str]:
        """Return what determines the shuffled order; empty if nothing is shuffled."""
        count = {} if self._offsets is None else {"records": len(self._offsets)}
        return {"shuffle_buffer": self.shuffle, "seed": self.seed, **count} if self.shuffle else {}

    def checked_position(self, state: dict[str, Any]) -> Position:
        """Return the position stored in a saved state.

        Raises:
          InputError: if the state is damaged, or does not match the index, the shuffle settings or
            the size of the record file at that position.
        """
        if state.get("index") != self.fingerprint:
            raise InputError(
                f"{self.source} lists other files than when the checkpoint was saved; restore its "
                "earlier list or start over in another model folder"
            )
        saved = {key: state[key] for key in ORDER if key in state}
        if saved != self._order():
            raise InputError(
                f"{self.source}: the checkpoint was saved with {_format_order(saved)}, "
                f"but the data is now read with {_format_order(self._order())}; restore the "
                "settings or start over in another model folder"
            )
        names = [field.name for field in dataclasses.fields(Position)]
        counts: dict[str, Any] = {"taken": 0} | {n: state[n] for n in names if n in state}
        valid = all(isinstance(counts.get(name), int) and counts[name] >= 0 for name in names)
        within = self._offsets is None or counts["taken"] <= len(self._offsets)
        if not valid or counts["file"] >= len(self.paths) or not within:
            raise InputError(
                f"the checkpoint's data position {state} is damaged, expected a count for each "
                f"of {', '.join(names)}; start over in another model folder"
            )
        position = Position(**counts)
        file = self._files(position.epoch)[position.file]
        # In a compressed file, the offset counts decompressed bytes; `frames` checks it.
        if position.offset > self.sizes[file] and not is_compressed(self.paths[file]):
            raise InputError(
                f"{self.paths[file]}: found {self.sizes[file]} bytes, but the checkpoint's data "
                f"position is byte {position.offset}; restore the file's earlier content"
            )
        return position

    def records(self, position: Position, *, repeat: bool) -> Iterator[tuple[Record, Position]]:
        """Yield (record, next position) for each record, starting with the one at `position`.

        Args:
          repeat: whether to begin a new epoch whenever one ends, endlessly.
        """
        if self._offsets is not None:
            return self._permuted(self._offsets, position, repeat)
        if isinstance(self.shuffle, int) and self.shuffle:
            return self._shuffled(self.shuffle, position, repeat)
        return self._in_index_order(position, repeat)

    def row(self, record: Record, extras: Collection[str] = ()) -> Row:
        """Parse a record into a dict of arrays, [T] each: `obs`, `target` and possibly more.

        Args:
          extras: further keys that the dict must have, such as `loss_mask` or `segment_ids`.  If
            the record lacks such a key, the array is filled with ones: all targets then count in
            the loss, and all tokens belong to the same text.
        """
        row = self._row(features(record.payload(), record.where), record.where)
        if self.reference:
            row["reference"] = self._references.row(*record.place, self.seq)
        for key in set(extras) - row.keys():
            row[key] = np.ones(self.seq, DTYPES[key])
        return row

    @functools.cached_property
    def _references(self) -> references.References:
        """What the file beside the records holds; read with the first row, as a run writes it."""
        result = references.read(self._index_path)
        if result is None:
            raise InputError(
                f"{references.file_of(self._index_path)} is missing; training with these records "
                "as train_set or val_set writes it"
            )
        return result

    def _files(self, epoch: int) -> list[int]:
        """Return the indices of all files, in the order in which the given epoch reads them."""
        if not self.shuffle:
            return list(range(len(self.paths)))
        return random(self.seed, "files", epoch).permutation(len(self.paths)).tolist()

    def _in_index_order(
        self, position: Position, repeat: bool
    ) -> Iterator[tuple[Record, Position]]:
        """Yield (record, next position) for each record; records are not shuffled within a file.

        The files are read in the order of `_files`.
        """
        while True:
            left = list(enumerate(self._files(position.epoch)))[position.file :]
            paths = [self.paths[file] for _, file in left]
            sizes = [self.sizes[file] for _, file in left]
            with files.OpenAhead(paths, sizes, is_cut=position.offset > 0) as ahead:
                for place, file in left:
                    path = self.paths[file]
                    for payload, offset in frames(path, position.offset, ahead.next):
                        where = _where(path, position.record)
                        record = Record(payload, where, (file, position.record))
                        position = Position(position.epoch, place, position.record + 1, offset)
                        yield record, position
                    position = Position(position.epoch, place + 1)
            if not repeat:
                return
            position = Position(position.epoch + 1)

    def _shuffled(
        self, buffer: int, position: Position, repeat: bool
    ) -> Iterator[tuple[Record, Position]]:
        """Yield (record, next position) for each record of `_in_index_order`, shuffled in blocks.

        A block has `buffer` records, the last one of an epoch possibly fewer.
        """
        records, epoch = iter(()), None
        while True:
            start = dataclasses.replace(position, taken=0)
            if start.epoch != epoch:
                records, epoch = self._in_index_order(start, repeat=False), start.epoch
            block = list(islice(records, buffer))
            key = (start.epoch, start.file, start.record)
            order = random(self.seed, "records", *key).permutation(len(block))
            for taken in range(position.taken, len(block)):
                record, _ = block[order[taken]]
                yield record, dataclasses.replace(start, taken=taken + 1)
            if len(block) == buffer:
                position = block[-1][1]
            elif repeat:
                position = Position(start.epoch + 1)
            else:
                return

    def _permuted(
        self, offsets: RecordOffsets, position: Position, repeat: bool
    ) -> Iterator[tuple[Record, Position]]:
        """Yield (record, next position) for each record of the epochs' permutations."""
        while True:
            epoch, count = position.epoch, len(offsets)
            keys = random(self.seed, "permutation", epoch).integers(2**64, size=ROUNDS, dtype="u8")
            for begin in range(position.taken, count, PERMUTED):
                numbers = np.arange(begin, min(begin + PERMUTED, count))
                places = offsets.places(permuted(numbers, count, keys))
                for taken, (file, number, offset, length) in enumerate(places, begin + 1):
                    path = self.paths[file]
                    frame = Frame(path, offset, length, offsets.path)
                    record = Record(frame, _where(path, number), (file, number))
                    yield record, Position(epoch, taken=taken)
            if not repeat:
                return
            position = Position(epoch + 1)

    def _row(self, arrays: dict[str, np.ndarray | None], where: str) -> Row:
        """Convert the features of a record to the dict that `row` returns."""
        if "text" in arrays or self.is_text:
            text = self._tokens("text", arrays, where, self.seq + 1)
            return plain_row(text, self.document_end)
        row = {
            "obs": self._tokens("input_ids", arrays, where, self.seq),
            "target": self._tokens("labels", arrays, where, self.seq),
        }
        mask = self._numbers("input_mask", arrays, where, self.seq)
        if ((mask != 0) & (mask != 1)).any():
            raise InputError(
                f"{where}: feature input_mask has values other than 0 and 1; recreate the records"
            )
        row["loss_mask"] = mask.astype(DTYPES["loss_mask"])
        if "segment_ids" in arrays:
            if "segment_ids" not in self.extras:
                raise InputError(
                    f"{where} has the feature segment_ids, but the first record of "
                    f"{self.source} does not; list packed records in an index of their own"
                )
            segments = self._numbers("segment_ids", arrays, where, self.seq)
            row["segment_ids"] = segments.astype(DTYPES["segment_ids"])
        if self.teacher:
            ids, logprobs = TEACHER_KEYS
            row[ids] = self._tokens(ids, arrays, where, self.seq * self.alternatives)
            numbers = arrays.get(logprobs)
            if numbers is None or numbers.shape != row[ids].shape:
                raise InputError(
                    f"{where}: feature {logprobs} has not the length of {ids}; recreate the records"
                )
            row[logprobs] = numbers
        return row

    def _tokens(
        self, name: str, arrays: dict[str, np.ndarray | None], where: str, count: int
    ) -> np.ndarray:
        """Return the feature `name` as token ids, uint32 [count]."""
        tokens = self._numbers(name, arrays, where, count)
        limit = 2**32 if self.n_vocab is None else self.n_vocab
        outside = tokens[(tokens < 0) | (tokens >= limit)]
        if len(outside):
            raise InputError(
                f"{where} holds token id {outside[0]}, outside the vocabulary (config key n_vocab "
                f"is {limit}); recreate the records with the tokenizer of the model"
            )
        return tokens.astype(np.uint32)

    def _numbers(
        self, name: str, arrays: dict[str, np.ndarray | None], where: str, count: int
    ) -> np.ndarray:
        """Return the feature `name`, int64 [count]."""
        numbers = arrays.get(name)
        if numbers is None or numbers.dtype != np.int64:
            raise InputError(
                f"{where} has no int64 feature {name}, found {sorted(arrays)}; recreate the records"
            )
        if len(numbers) != count:
            extra = count - self.seq
            raise InputError(
                f"{where} holds {len(numbers)} tokens, but config key seq {self.seq} needs "
                f"{count}; set seq to {len(numbers) - extra} or recreate the records"
            )
        return numbers


def plain_row(text: np.ndarray, document_end: int | None) -> Row:
    """Return the row of T + 1 tokens of plain text; for `document_end`, see `RecordSet`."""
    row = {"obs": text[:-1], "target": text[1:]}
    if document_end is not None:
        ends = row["obs"] == document_end
        row["segment_ids"] = (np.cumsum(ends) - ends).astype(DTYPES["segment_ids"])
    return row


def random(seed: int, stream: str, *place: int) -> np.random.Generator:
    """Return a random generator that depends only on the arguments.

    A resumed run can therefore draw the same numbers again.

    Args:
      stream: the purpose of the numbers, one of `STREAMS`.
      place: integers that distinguish the generators of one stream, such as the epoch.
    """
    return np.random.default_rng((seed % 2**64, STREAMS.index(stream), *place))


def permuted(numbers: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """Return the places of numbers in a permutation of range(count), which keys determine.

    No table is needed.  A number is written as two digits of base ceil(sqrt(count)), which a
    Feistel network permutes; a result outside of the range is permuted again, until it is inside
    ("generalized Feistel" and "cycle-walking" of Black and Rogaway, Ciphers with Arbitrary Finite
    Domains, 2002).  The round function is the finalizer of SplitMix64 (Steele, Lea and Flood, Fast
    Splittable Pseudorandom Number Generators, 2014).

    Args:
      numbers: int64 [n], each below `count`.
      keys: uint64, one per round.

    Returns:
      int64 [n].
    """
    base = np.uint64(math.isqrt(count - 1) + 1)
    result, walking = numbers.astype(np.uint64), np.arange(len(numbers))
    while len(walking):
        left, right = np.divmod(result[walking], base)
        for key in keys:
            left, right = right, (left + _mixed(right ^ key) % base) % base
        result[walking] = left * base + right
        walking = walking[result[walking] >= count]
    return result.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Return the finalizer of SplitMix64, uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _where(path: str, record: int) -> str:
    return f"{path}: record {record} (the first is 0)"


def _format_order(order: dict[str, int | str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in order.items()) or "shuffle_buffer 0"
