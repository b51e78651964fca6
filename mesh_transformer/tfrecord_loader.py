"""Token records: an index file of TFRecords to batches, with a position exact to the record.

The library's one TensorFlow import, made when first needed: its file system (local and gs://) and
its `Example` message.  The framing around the messages is read here, because only so can a reader
start at any record and name the byte at which a file is damaged.
"""

import dataclasses
import functools
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

from mesh_transformer.prefetch import Prefetch
from mesh_transformer.util import InputError

HEADER_BYTES = 12  # a length (uint64) and the checksum of these eight bytes
FOOTER_BYTES = 4  # the checksum of the payload
BATCHES_AHEAD = 4
KERAS_CHOICE = "TF_USE_LEGACY_KERAS"  # TensorFlow's name for it


@functools.cache
def tensorflow() -> Any:
    """The tensorflow module, silenced and without accelerators: JAX needs their memory."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # oneDNN announces itself whatever the log level; nothing here computes.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    # Told to use another Keras, it does not load the one there is, which takes half of the time.
    choice = os.environ.get(KERAS_CHOICE)
    os.environ[KERAS_CHOICE] = "1"
    import tensorflow

    del os.environ[KERAS_CHOICE]
    if choice is not None:
        os.environ[KERAS_CHOICE] = choice
    for kind in ("GPU", "TPU"):
        tensorflow.config.set_visible_devices([], kind)
    return tensorflow


@dataclasses.dataclass(frozen=True)
class Position:
    """The next record to read; `offset` is its byte, so that a resume seeks in one step."""

    epoch: int = 0
    file: int = 0
    record: int = 0
    offset: int = 0


class TFRecordNewInputs:
    """Batches of token records from an index file, endlessly or (`repeat=False`) once.

    A batch is uint32 `[*batch_size, sample_size + 1]`.  Records come in the index's order;
    those left at a file's end begin the next batch with the next file's (and epoch's), so any
    batch size gives the same sequence of records.  A background thread reads a few batches ahead.
    Raises InputError for whatever is wrong with the files, here or when a record is reached.
    """

    def __init__(
        self,
        index_path: str,
        batch_size: Sequence[int] | int,
        sample_size: int,
        *,
        n_vocab: int | None = None,
        repeat: bool = True,
        restore_state: dict | None = None,
    ):
        shape = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        self._arguments = (index_path, batch_size, sample_size)
        self._n_vocab = n_vocab
        self._records = RecordSet(index_path, sample_size, n_vocab, repeat)
        self._shape = (*shape, sample_size + 1)
        self._records.require(int(np.prod(shape)))
        self._position = Position()
        self._ahead: Prefetch[tuple[np.ndarray, Position]] | None = None
        if restore_state is not None:
            self.restore(restore_state)

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        return self.get_samples()

    def get_samples(self) -> np.ndarray:
        """The next batch; StopIteration after the last full one where `repeat` is False."""
        if self._ahead is None:
            batches = self._records.batches(self._position, self._shape)
            self._ahead = Prefetch(batches, BATCHES_AHEAD)
        batch, self._position = next(self._ahead)
        return batch

    def sample_once(self) -> "TFRecordNewInputs":
        """A fresh iterator over one epoch of the same records, for validation."""
        return TFRecordNewInputs(*self._arguments, n_vocab=self._n_vocab, repeat=False)

    def state(self) -> dict:
        """The position after the last batch handed out, as JSON-able numbers and strings.

        It counts records, so a loader with another batch size continues at the same record.
        """
        return {"index": self._records.fingerprint, **dataclasses.asdict(self._position)}

    def restore(self, state: dict) -> None:
        """Continue after the batch at which `state` was taken; refuses another index's state."""
        self.close()
        self._position = self._records.checked_position(state)

    def close(self) -> None:
        """End the reading thread; the next batch, if asked for, starts it again."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None


class RecordSet:
    """The records that an index file lists, from any position on."""

    def __init__(self, index_path: str, seq: int, n_vocab: int | None, repeat: bool):
        self.index_path = index_path
        entries = _read_index(index_path)
        # The entries as written: moving a whole data folder changes nothing.
        self.fingerprint = hashlib.sha256("\n".join(entries).encode()).hexdigest()
        self.paths = [_resolve(entry, index_path) for entry in entries]
        with ThreadPoolExecutor(16) as pool:  # an index may list thousands of remote files
            self.sizes = list(pool.map(functools.partial(_size, index_path), self.paths))
        self.seq = seq
        self.n_vocab = n_vocab
        self.repeat = repeat

    def require(self, batch: int) -> None:
        """Raises InputError where the whole set has fewer than `batch` records."""
        frames = (frame for path in self.paths for frame in _frames(path, 0))
        found = sum(1 for _ in islice(frames, batch))
        if found < batch:
            raise InputError(
                f"index {self.index_path}: found {found} records in all, one batch needs {batch}; "
                "add data or lower the batch size"
            )

    def checked_position(self, state: dict) -> Position:
        """The position in a saved state, if the state is of this set."""
        if state.get("index") != self.fingerprint:
            raise InputError(
                f"index {self.index_path} lists other files than when the position was saved; "
                "restore its lines, or start anew in another model folder"
            )
        names = [field.name for field in dataclasses.fields(Position)]
        counts: dict[str, Any] = {name: state.get(name) for name in names}
        valid = all(isinstance(count, int) and count >= 0 for count in counts.values())
        if not valid or counts["file"] >= len(self.paths):
            raise InputError(f"saved data position {state}: expected counts {names}")
        position = Position(**counts)
        if position.offset > self.sizes[position.file]:
            raise InputError(
                f"{self.paths[position.file]}: found {self.sizes[position.file]} bytes, but the "
                f"saved position is byte {position.offset}; restore the file as it was"
            )
        return position

    def batches(
        self, position: Position, shape: tuple[int, ...]
    ) -> Iterator[tuple[np.ndarray, Position]]:
        """Full batches of `shape` (tokens last), each with the position after it."""
        records = self._records(position)
        count = int(np.prod(shape[:-1]))
        while len(chunk := list(islice(records, count))) == count:
            yield np.stack([tokens for tokens, _ in chunk]).reshape(shape), chunk[-1][1]

    def _records(self, position: Position) -> Iterator[tuple[np.ndarray, Position]]:
        while True:
            for file, path in enumerate(self.paths[position.file :], position.file):
                for payload, offset in _frames(path, position.offset):
                    tokens = self._tokens(payload, path, position.record)
                    position = Position(position.epoch, file, position.record + 1, offset)
                    yield tokens, position
                position = Position(position.epoch, file + 1)
            if not self.repeat:
                return
            position = Position(position.epoch + 1)

    def _tokens(self, payload: bytes, path: str, record: int) -> np.ndarray:
        where = f"{path}: record {record} (the first is 0)"
        tokens = _parse(payload, where)
        if len(tokens) != self.seq + 1:
            raise InputError(
                f"{where} holds {len(tokens)} tokens, config key seq {self.seq} needs "
                f"{self.seq + 1}; set seq to {len(tokens) - 1} or make the records anew"
            )
        limit = 2**32 if self.n_vocab is None else self.n_vocab
        outside = tokens[(tokens < 0) | (tokens >= limit)]
        if outside.size:
            raise InputError(
                f"{where} holds token id {outside[0]}, outside the vocabulary of config key "
                f"n_vocab {limit}; the records were made with another tokenizer"
            )
        return tokens.astype(np.uint32)


def _read_index(index_path: str) -> list[str]:
    tf = tensorflow()
    try:
        with tf.io.gfile.GFile(index_path, "rb") as file:
            lines = file.read().decode().splitlines()
    except tf.errors.NotFoundError as error:
        raise InputError(f"index {index_path}: no such file; it lists record files") from error
    except tf.errors.OpError as error:
        raise InputError(f"index {index_path}: {_first_line(error)}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"index {index_path}: not text; an index lists .tfrecords files, one a line"
        ) from error
    entries = [line.strip() for line in lines if line.strip()]
    if not entries:
        raise InputError(f"index {index_path}: empty; list .tfrecords files, one a line")
    return entries


def _resolve(entry: str, index_path: str) -> str:
    """A relative path counts from the working directory, or else from the index's folder."""
    if "://" in entry or os.path.isabs(entry) or os.path.exists(entry):
        return entry
    return os.path.join(os.path.dirname(index_path), entry)


def _size(index_path: str, path: str) -> int:
    tf = tensorflow()
    try:
        status = tf.io.gfile.stat(path)
    except tf.errors.OpError as error:
        missing = isinstance(error, tf.errors.NotFoundError)
        found = "no such file" if missing else _first_line(error)
        raise InputError(f"{path}: {found}; index {index_path} lists it") from error
    if status.is_directory or status.length == 0:
        found = "a folder" if status.is_directory else "empty"
        raise InputError(f"{path}: {found}, expected records; index {index_path} lists it")
    return status.length


def _frames(path: str, offset: int) -> Iterator[tuple[bytes, int]]:
    """The payloads of a TFRecord file from byte `offset` on, each with the byte after it."""
    tf = tensorflow()
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            file.seek(offset)
            while header := file.read(HEADER_BYTES):
                length = _unframe(header, 8, path, offset)
                (count,) = struct.unpack("<Q", length)
                framed = file.read(count + FOOTER_BYTES)
                payload = _unframe(framed, count, path, offset)
                offset += HEADER_BYTES + count + FOOTER_BYTES
                yield payload, offset
    except tf.errors.OpError as error:
        raise InputError(f"{path}: {_first_line(error)} (record at byte {offset})") from error


def _unframe(framed: bytes, count: int, path: str, offset: int) -> bytes:
    """The `count` bytes before their checksum; the record that they are of starts at `offset`."""
    if len(framed) < count + FOOTER_BYTES:
        raise InputError(f"{path}: truncated in the record at byte {offset}; copy or make it anew")
    data = framed[:count]
    if struct.unpack("<I", framed[count:])[0] != _masked_checksum(data):
        raise InputError(
            f"{path}: corrupt record at byte {offset} (wrong checksum); copy or make it anew"
        )
    return data


def _masked_checksum(data: bytes) -> int:
    """TFRecord's checksum: CRC-32C, rotated right by 15 bits, plus a constant."""
    import google_crc32c

    checksum = google_crc32c.value(data)
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _parse(payload: bytes, where: str) -> np.ndarray:
    """The int64 tokens of a serialised Example's feature `text`."""
    from google.protobuf.message import DecodeError

    try:
        features = tensorflow().train.Example.FromString(payload).features.feature
    except DecodeError as error:
        raise InputError(f"{where} is not a tf.train.Example; make the records anew") from error
    if "text" not in features or features["text"].WhichOneof("kind") != "int64_list":
        raise InputError(
            f"{where} has no int64 feature text, found {sorted(features)}; make the records anew"
        )
    return np.array(features["text"].int64_list.value, dtype=np.int64)


def write_records(path: str, sequences: Iterable[np.ndarray]) -> int:
    """Write one record a token sequence and return their number; `path` appears when complete."""
    tf = tensorflow()
    partial, count = f"{path}.partial", 0
    try:
        with tf.io.TFRecordWriter(partial) as writer:
            for count, sequence in enumerate(sequences, 1):  # noqa: B007
                tokens = tf.train.Int64List(value=np.asarray(sequence).tolist())
                features = {"text": tf.train.Feature(int64_list=tokens)}
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
        tf.io.gfile.rename(partial, path, overwrite=True)
    except tf.errors.OpError as error:
        raise InputError(f"{path}: cannot be written: {_first_line(error)}") from error
    finally:
        if tf.io.gfile.exists(partial):
            tf.io.gfile.remove(partial)
    return count


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
