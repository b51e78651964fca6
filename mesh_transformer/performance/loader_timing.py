"""The loader: against a bare tf.data pipeline, and its time to resume.

A set of small records is made, read by turns with the loader and with tf.data, then resumed by
turns near its beginning and behind all records.
"""

import functools
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.tfrecords import tensorflow, write_records
from mesh_transformer.util import InputError

FILES, DISTINCT = 10, 10_000  # records that are made; a file repeats them
BATCH = 8
MOST_BATCHES = 2000  # in one comparison
EARLY = 10  # records before the first resume
SHUFFLED = 1000  # a shuffle_buffer that is resumed too


def write_index(folder: Path, records: int, seq: int) -> str:
    """A set of so many records in `FILES` files; TFRecord files may be joined byte by byte."""
    distinct = max(min(DISTINCT, records // FILES), 1)
    if records % (FILES * distinct):
        raise InputError(f"--records is {records}, expected a multiple of {FILES * distinct}")
    once = folder / "once.tfrecords"
    rng = np.random.default_rng(0)
    write_records(str(once), rng.integers(0, 50257, (distinct, seq + 1)))
    for part in range(FILES):
        with (folder / f"{part}.tfrecords").open("wb") as file:
            file.write(once.read_bytes() * (records // FILES // distinct))
    index = folder / "made.index"
    index.write_text("".join(f"{part}.tfrecords\n" for part in range(FILES)))
    return str(index)


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def by_turns(
    rounds: int, what: str, first: Callable[[], object], other: Callable[[], object]
) -> tuple[float, float, float]:
    """The medians of both in seconds, and of the ratio of the first to the other."""
    for each in (first, other):
        each()  # what is slow but once
    pairs = [(seconds(first), seconds(other)) for _ in tqdm(range(rounds), what, leave=False)]
    medians = (statistics.median(column) for column in zip(*pairs, strict=True))
    return (*medians, statistics.median(one / two for one, two in pairs))


def bare(paths: list[str], batches: int, seq: int) -> None:
    """As many batches by tf.data alone."""
    tf = tensorflow()
    form = {"text": tf.io.FixedLenFeature((seq + 1,), tf.int64)}
    records = tf.data.TFRecordDataset(paths)
    parsed = records.map(lambda record: tf.io.parse_single_example(record, form)["text"])
    for _ in islice(parsed.batch(BATCH).prefetch(4).as_numpy_iterator(), batches):
        pass


def state_after(index: str, records: int, seq: int, **options: Any) -> dict[str, Any]:
    """The position after so many records."""
    with closing(TFRecordNewInputs(index, 1000, seq, **options)) as loader:
        for _ in tqdm(range(records // 1000), "reading", unit="k records", leave=False):
            loader.get_samples()
        state = loader.state()
    with closing(TFRecordNewInputs(index, 1, seq, restore_state=state, **options)) as loader:
        for _ in range(records % 1000):
            loader.get_samples()
        return loader.state()


def resume(index: str, seq: int, state: dict[str, Any], **options: Any) -> None:
    """Opens the set at a position and reads one batch."""
    with closing(TFRecordNewInputs(index, BATCH, seq, restore_state=state, **options)) as loader:
        loader.get_samples()


def measure(folder: Path, records: int, seq: int, rounds: int) -> dict[str, Any]:
    """Rates, medians, and seconds until a resumed loader's first batch."""
    index = write_index(folder, records, seq)
    paths = [str(folder / f"{part}.tfrecords") for part in range(FILES)]
    batches = min(MOST_BATCHES, records // BATCH)

    def ours() -> None:
        with closing(TFRecordNewInputs(index, BATCH, seq)) as loader:
            for _ in range(batches):
                loader.get_samples()

    alone, other, ratio = by_turns(
        rounds, "loader, tf.data", ours, lambda: bare(paths, batches, seq)
    )
    found: dict[str, Any] = {
        "records": records,
        "records_per_second": batches * BATCH / alone,
        "tokens_per_second": batches * BATCH * seq / alone,
        "tf_data_tokens_per_second": batches * BATCH * seq / other,
        "times_as_fast_as_tf_data": 1 / ratio,
    }
    for shuffle in (0, SHUFFLED):
        options = {"shuffle_buffer": shuffle}
        places = (records + EARLY, EARLY)  # at one record of a block
        late, early = (
            functools.partial(resume, index, seq, state_after(index, n, seq, **options), **options)
            for n in places
        )
        last, first, ratio = by_turns(rounds, "resume", late, early)
        shuffled = "shuffled_" if shuffle else ""
        found[f"{shuffled}resume_seconds"] = last
        found[f"{shuffled}resume_seconds_at_first"] = first
        found[f"{shuffled}resume_ratio"] = ratio
    return found
