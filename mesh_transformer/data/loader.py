"""Data loader: reads batches from the TFRecord files of an index; can resume from any record."""

import functools
import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any, Literal, NamedTuple

import numpy as np

from mesh_transformer.config import Config, Weight
from mesh_transformer.data.in_memory import InMemoryTrainSet
from mesh_transformer.data.mixture import Drawn, Mixture, MixturePosition
from mesh_transformer.data.prefetch import Prefetch
from mesh_transformer.data.record_set import RecordSet, Row, check_preferences, check_tokenizer
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.storage.access import AnyPath
from mesh_transformer.util import InputError, is_named, load_named

BATCHES_AHEAD = 4


class _DrawnBatch(NamedTuple):
    """The records of a batch that is not read yet, the batch's shape, and the position after it."""

    records: list[Drawn]
    shape: tuple[int, ...]
    place: MixturePosition

    def batch(self) -> tuple[Row, MixturePosition]:
        """Read and parse the records; return the batch and the position after it."""
        rows = [record.row() for record in self.records]
        batch = {
            key: np.stack([row[key] for row in rows]).reshape(*self.shape, -1) for key in rows[0]
        }
        return batch, self.place


class TFRecordNewInputs:
    """Iterator over batches of token records, endless or (`repeat=False`) over one epoch.

    A batch is a dict of arrays, each of shape [*batch_size, T].  The keys `obs` (the tokens) and
    `target` (the next tokens), both uint32, are always present.  Two more keys are present if the
    records of at least one index have them: `loss_mask` (uint8, 1 where the target counts in the
    loss) and `segment_ids` (int32, the number of the text that a token belongs to, for records that
    pack several texts).

    Records are read in the index's order, or shuffled (see `RecordSet`).  A batch can span the end
    of a file or of an epoch, so the sequence of records is the same for any batch size.  A
    background thread reads a few batches ahead.

    Args:
      index_path: the path of an index (a text file that lists TFRecord files) or of a folder of
        TFRecord files, which are read in order of their names; or a mixture: a mapping from such
        paths to weights (see `Weight`).  In a mixture, each record is read from a randomly chosen
        index, with probability proportional to the index's weight.  With `repeat`, each index
        restarts after its last record, independently of the others.
      batch_size: the leading dimensions of a batch; with `first_size`, of the largest one.
      sample_size: T, the number of tokens per sequence.
      n_vocab: the size of the vocabulary; token ids outside of it raise InputError.
      repeat: whether to read endlessly, epoch after epoch.
      partial: whether to return a smaller batch at the end if too few records remain for a full
        batch.  For use with `repeat` False; requires an integer `batch_size`.
      columns: the batch rows to return, as indices into the last dimension of `batch_size`; None
        for all rows.  For hosts that each feed only part of a batch.  The records of other rows are
        not parsed, nor read if `shuffle_buffer` is "all".
      shuffle_buffer: the number of records that are shuffled together; 0 for the index's order,
        "all" for all records of a set.
      seed: the random seed for mixing and shuffling.
      restore_state: the position to resume from, as returned by `state`.
      first_size: a function from the number of earlier batches to the first dimension of the next
        batch (default: always that of `batch_size`).
      reference: whether batches have `reference`, f32: in each row, the log-probabilities of the
        record's texts from the file NAME.reference.json beside the records, then zeros.
      teacher: whether batches have `teacher_ids` and `teacher_logprobs`, [*batch_size, T x K], with
        the K tokens that a teacher finds most likely at each position.
      document_end: see `RecordSet`.

    Raises:
      InputError: if a file is missing or damaged, or if its records do not fit `sample_size` or
        `n_vocab`.  Some problems are found at construction, others only when the record is read.
    """

    def __init__(
        self,
        index_path: AnyPath | Mapping[str, Weight],
        batch_size: Sequence[int] | int,
        sample_size: int,
        *,
        n_vocab: int | None = None,
        repeat: bool = True,
        partial: bool = False,
        columns: Sequence[int] | np.ndarray | None = None,
        shuffle_buffer: int | Literal["all"] = 0,
        seed: int = 0,
        restore_state: dict | None = None,
        first_size: Callable[[int], int] | None = None,
        reference: bool = False,
        teacher: bool = False,
        document_end: int | None = None,
    ):
        self._shape = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        mixture = index_path if isinstance(index_path, Mapping) else {index_path: 1.0}
        weights = {os.fspath(path): weight for path, weight in mixture.items()}
        everything = np.arange(int(np.prod(self._shape))).reshape(self._shape)
        self._selected = everything if columns is None else everything[..., list(columns)]
        self._arguments = (index_path, batch_size, sample_size, n_vocab, document_end)
        sets = [
            RecordSet(
                path,
                sample_size,
                n_vocab,
                shuffle=shuffle_buffer,
                seed=seed,
                reference=reference,
                teacher=teacher,
                document_end=document_end,
            )
            for path in weights
        ]
        if len({records.alternatives for records in sets}) > 1:
            counts = ", ".join(f"{one.alternatives} in {one.source}" for one in sets)
            raise InputError(
                f"train_set: records have different numbers of a teacher's tokens ({counts}); "
                "create them with the same --teacher-tokens"
            )
        if len(sets) == 1 and not partial:
            sets[0].require(everything.size)
        self._mixture = Mixture(sets, list(weights.values()), seed)
        self._repeat, self._partial = repeat, partial
        self._first_size, self._batches = first_size, 0  # the number of batches returned
        self._place = self._mixture.beginning
        self._ahead: Prefetch[tuple[Row, MixturePosition]] | None = None
        if restore_state is not None:
            self.restore(restore_state)

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        return self.get_samples()

    def get_samples(self) -> Row:
        """Return the next batch.

        Raises:
          StopIteration: if `repeat` is False and all batches have been returned.
        """
        if self._ahead is None:
            self._ahead = Prefetch(self._batches_from(self._batches), BATCHES_AHEAD)
        batch, self._place = next(self._ahead)
        self._batches += 1
        return batch

    def _batches_from(self, first: int) -> Iterator[tuple[Row, MixturePosition]]:
        """Yield (batch, position of the record after it), after `first` earlier batches."""
        ahead, requested = deque[_DrawnBatch](), 0
        for drawn in self._drawn_from(first):
            for record in drawn.records:
                record.record.request()
            ahead.append(drawn)
            requested += len(drawn.records)
            # Whole batches are requested until those before the last one have enough records.
            while ahead and requested - len(ahead[-1].records) >= self._mixture.most_ahead:
                requested -= len(ahead[0].records)
                yield ahead.popleft().batch()
        yield from (drawn.batch() for drawn in ahead)

    def _drawn_from(self, first: int) -> Iterator[_DrawnBatch]:
        """Yield the records of each batch, after `first` earlier batches."""
        number = first
        records = self._mixture.records(self._place, lambda: number, repeat=self._repeat)
        for number in count(first):
            rows = self._shape[0] if self._first_size is None else self._first_size(number)
            size = rows * math.prod(self._shape[1:])
            chunk = list(islice(records, size))
            if len(chunk) < size and not (chunk and self._partial):
                return
            selected = self._selected[:rows] if len(chunk) == size else np.arange(len(chunk))
            wanted = [chunk[at][0] for at in selected.flat]
            yield _DrawnBatch(wanted, selected.shape, chunk[-1][1])

    def sample_once(self) -> "TFRecordNewInputs":
        """Return a new iterator over one unshuffled epoch of the same records, for validation."""
        index_path, batch_size, sample_size, n_vocab, end = self._arguments
        return TFRecordNewInputs(
            index_path, batch_size, sample_size, n_vocab=n_vocab, document_end=end, repeat=False
        )

    def state(self) -> dict[str, Any]:
        """Return the position after the last returned batch as a JSON-serialisable dict.

        The position is counted in records, so a loader with another batch size can resume from it.
        """
        state = self._mixture.state(self._place)
        return state | ({"batches": self._batches} if self._mixture.changes else {})

    def restore(self, state: dict[str, Any] | None, batches: int = 0) -> None:
        """Continue from a position that was returned by the method `state`; None: the first record.

        Args:
          batches: the number of batches before this position; used only with `first_size`, and
            with weights that change, for which the position has it, too.

        Raises:
          InputError: if the position is damaged, or was saved with other indexes or other shuffle
            settings.
        """
        self.close()
        self._place = self._mixture.beginning
        if state is not None:
            self._place = self._mixture.checked_place(state)
            batches = batches or state.get("batches", 0)
        self._batches = batches

    def fingerprint(self) -> str:
        """Return a digest of the names and sizes of all record files.

        Hosts that read the same records have the same fingerprint.
        """
        files = [(records.fingerprint, records.sizes) for records in self._mixture.sets]
        return hashlib.sha256(repr(files).encode()).hexdigest()

    def close(self) -> None:
        """Stop the background thread; the next call of `get_samples` starts a new one."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None


def open_train_set(
    config: Config,
    batch_size: int,
    columns: Sequence[int] | np.ndarray | None = None,
    *,
    reference: bool | None = None,
) -> "TFRecordNewInputs | InMemoryTrainSet":
    """Return a loader of a config's training set, whose arrays have shape [A, batch_size, T].

    A is the number of microbatches of the update (`Config.microbatches`), and T is the config's
    `seq`.  For `columns` and `reference`, see `TFRecordNewInputs`; by default, the config's
    objective decides whether batches have the reference, and which records are accepted.
    """
    assert config.train_set is not None
    if is_named(config.train_set):
        data = load_named(str(config.train_set), "train_set")(config)
        return in_memory(config, data, batch_size, columns)
    for path in [config.train_set] if isinstance(config.train_set, str) else config.train_set:
        check_tokenizer(path, config.tokenizer)
        if reference is None:
            check_preferences(path, config)
    if reference is None:
        reference = config.objective_kind is not None and config.objective_kind.needs_reference
    return TFRecordNewInputs(
        config.train_set,
        (config.gradient_accumulation_steps, batch_size),
        config.seq,
        n_vocab=config.n_vocab,
        columns=columns,
        shuffle_buffer=config.shuffle_buffer,
        seed=config.seed,
        first_size=config.microbatches,
        reference=reference,
        teacher=config.has_stored_teacher,
        document_end=document_end(config),
    )


def in_memory(
    config: Config,
    data: Any,
    batch_size: int,
    columns: Sequence[int] | np.ndarray | None = None,
) -> InMemoryTrainSet:
    """Return training batches of data in memory, with the keys of a config."""
    return InMemoryTrainSet(
        data,
        config.seq,
        lambda step: (config.microbatches(step), batch_size),
        config.seed,
        document_end(config),
        columns,
    )


@functools.cache  # validation asks again and again
def document_end(config: Config) -> int | None:
    """Return the token that ends documents, if the config's `separate_documents` is true.

    Raises:
      InputError: if the config's tokenizer has no end-of-text token, or cannot be loaded.
    """
    if not config.separate_documents:
        return None
    end = load_tokenizer(config.tokenizer).eos_token_id
    if end is None:
        raise InputError(
            f"separate_documents is true, but tokenizer {config.tokenizer} has no end-of-text "
            "token; set tokenizer to that of the records"
        )
    return end


def describe_batch(
    train_set: str | Mapping[str, Weight], before: dict[str, Any], after: dict[str, Any]
) -> str:
    """Describe which records a batch consists of, for error messages.

    Args:
      train_set: the config's `train_set`.
      before: the position before the batch, as the `state` of its `TrainSet` returned it.
      after: the position after the batch.
    """
    if "sequence" in before:  # of data in memory
        return f"sequences {before['sequence']} to {after['sequence'] - 1} of the data"
    if "rollout" in after:
        return f"update {after['update']} of rollout {after['rollout']}"
    indexes = _indexes(train_set)
    positions = zip(before.get("sets", [before]), after.get("sets", [after]), strict=True)
    return " and ".join(
        f"{index} from {_describe(first)} to before {_describe(end)}"
        for index, (first, end) in zip(indexes, positions, strict=True)
        if first != end
    )


def _indexes(train_set: str | Mapping[str, Weight]) -> list[str]:
    return [train_set] if isinstance(train_set, str) else list(train_set)


def epochs(train_set: str | Mapping[str, Weight] | None, after: dict[str, Any]) -> dict[str, int]:
    """Return how often each index of a mixture has been read completely, by its name.

    Args:
      train_set, after: as for `describe_batch`.

    Returns:
      An empty dict if the training set is not a mixture.
    """
    if train_set is None or len(after.get("sets", ())) != len(indexes := _indexes(train_set)):
        return {}
    names = [os.path.basename(index.rstrip("/")).removesuffix(".index") for index in indexes]
    if len(set(names)) < len(names):
        names = indexes
    return {name: each["epoch"] for name, each in zip(names, after["sets"], strict=True)}


def _describe(state: dict[str, Any]) -> str:
    """Describe a position in a record set, saved by `RecordSet.state`, for error messages."""
    if state.get("shuffle_buffer") == "all":
        return f"epoch {state['epoch']}, record {state['taken']} of its shuffled order"
    block = f" (after {state['taken']} records of the shuffled block that starts there)"
    taken = block if state["taken"] else ""
    return f"epoch {state['epoch']}, file {state['file']}, record {state['record']}{taken}"
