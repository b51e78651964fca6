"""Time the loader, compared with tf.data, and how it resumes: `bench --loader`.

A set of small records is written.  The loader and a plain tf.data pipeline then read the records
alternately.

To time resuming, loaders are created that resume alternately from two saved positions.  The first
position is near the start of the first epoch.  The second is the same position in the second epoch,
after all records have been read once.  A loader that reads all earlier records again takes longer
from the second position.  The flags are those of `bench`.
"""

import argparse
import contextlib
import functools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mesh_transformer.cli import benchmark as command
from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.tfrecords import write_records
from mesh_transformer.mesh.program import Layout
from mesh_transformer.model import flops
from mesh_transformer.performance import benchmark
from mesh_transformer.performance.report import Column
from mesh_transformer.storage.access import tensorflow
from mesh_transformer.util import InputError, run_script

FILES = 10
MAX_DISTINCT_RECORDS = 10_000  # maximum number of records to generate; every file repeats them
BATCH = 8
MOST_BATCHES = 2000  # maximum number of batches to read when the loader is compared with tf.data
EARLY_RECORDS = 10  # the loader resumes after this many records of an epoch
SHUFFLE_BUFFER = 1000  # resuming is timed without shuffling, and with this shuffle_buffer
COLUMNS: list[Column] = [
    ("records/s", lambda f: f"{f['records_per_second']:,.0f}"),
    ("tokens/s", lambda f: f"{f['tokens_per_second']:,.0f}"),
    ("times as fast as tf.data", lambda f: f"{f['times_as_fast_as_tf_data']:.2f}"),
    (
        "training tokens/s at peak FLOP/s",
        lambda f: f"{f['most_tokens_per_second_of_a_step'] or float('nan'):,.0f}",
    ),
    (
        "resume after all records, near the first (ms)",
        lambda f: f"{f['resume_seconds'] * 1e3:.1f}, {f['resume_seconds_at_first'] * 1e3:.1f}",
    ),
]


def write_index(folder: Path, records: int, seq: int) -> str:
    """Write `records` random records to `FILES` files; return the path of their index.

    The number of distinct records is `records` / `FILES`, but at most `MAX_DISTINCT_RECORDS`.
    Every file contains all distinct records, repeated as often as necessary.
    """
    distinct = max(min(MAX_DISTINCT_RECORDS, records // FILES), 1)
    if records % (FILES * distinct):
        raise InputError(f"--records is {records}, expected a multiple of {FILES * distinct}")
    source = folder / "once.tfrecords"
    rng = np.random.default_rng(0)
    write_records(str(source), rng.integers(0, 50257, (distinct, seq + 1)))
    for part in range(FILES):
        with (folder / f"{part}.tfrecords").open("wb") as file:
            file.write(source.read_bytes() * (records // FILES // distinct))
    index = folder / "made.index"
    index.write_text("".join(f"{part}.tfrecords\n" for part in range(FILES)))
    return str(index)


def time_alternately(
    rounds: int, label: str, first: Callable[[], object], second: Callable[[], object]
) -> tuple[float, float, float]:
    """Time two functions alternately; `label` is the text of the progress bar.

    Returns:
      The median seconds of `first`, the median seconds of `second`, and the median over the rounds
      of the ratio of `first` to `second`.
    """
    calls = (first, second)
    for call in calls:
        call()  # not timed, so that one-time costs do not count
    bar = tqdm(range(rounds), label, leave=False)
    pairs = [[benchmark.timed(call)[0] for call in calls] for _ in bar]
    medians = (statistics.median(column) for column in zip(*pairs, strict=True))
    return (*medians, statistics.median(one / two for one, two in pairs))


def read_with_tf_data(paths: list[str], batches: int, seq: int) -> None:
    """Read `batches` batches from TFRecord files with a plain tf.data pipeline."""
    tf = tensorflow()
    features = {"text": tf.io.FixedLenFeature((seq + 1,), tf.int64)}
    records = tf.data.TFRecordDataset(paths)
    parsed = records.map(lambda record: tf.io.parse_single_example(record, features)["text"])
    for _ in islice(parsed.batch(BATCH).prefetch(4).as_numpy_iterator(), batches):
        pass


def state_after(index: str, records: int, seq: int, **options: Any) -> dict[str, Any]:
    """Return the state of a loader after it has read `records` records, to pass to `resume`."""
    with closing(TFRecordNewInputs(index, 1000, seq, **options)) as loader:
        for _ in tqdm(range(records // 1000), "reading", unit="k records", leave=False):
            loader.get_samples()
        state = loader.state()
    with closing(TFRecordNewInputs(index, 1, seq, restore_state=state, **options)) as loader:
        for _ in range(records % 1000):
            loader.get_samples()
        return loader.state()


def resume(index: str, seq: int, state: dict[str, Any], **options: Any) -> None:
    """Create a loader that resumes from `state`, and read one batch."""
    with closing(TFRecordNewInputs(index, BATCH, seq, restore_state=state, **options)) as loader:
        loader.get_samples()


def measure(folder: Path, records: int, seq: int, rounds: int) -> dict[str, Any]:
    """Measure the throughput of the loader and its time to resume, on newly written records.

    Returns:
      A dict of medians over the rounds.  For throughput, it has the rates at which the loader and
      tf.data read, and how many times as fast the loader is.  For resuming, it has the seconds
      until the first batch of a loader that resumes in the second epoch, and of one that resumes at
      the same position in the first epoch, and the ratio of the two times.  The figures of resuming
      are given with and without shuffling.
    """
    index = write_index(folder, records, seq)
    paths = [str(folder / f"{part}.tfrecords") for part in range(FILES)]
    batches = min(MOST_BATCHES, records // BATCH)

    def read_with_loader() -> None:
        with closing(TFRecordNewInputs(index, BATCH, seq)) as loader:
            for _ in range(batches):
                loader.get_samples()

    loader_seconds, tf_data_seconds, ratio = time_alternately(
        rounds, "loader, tf.data", read_with_loader, lambda: read_with_tf_data(paths, batches, seq)
    )
    result: dict[str, Any] = {
        "records": records,
        "records_per_second": batches * BATCH / loader_seconds,
        "tokens_per_second": batches * BATCH * seq / loader_seconds,
        "tf_data_tokens_per_second": batches * BATCH * seq / tf_data_seconds,
        "times_as_fast_as_tf_data": 1 / ratio,
    }
    for shuffle in (0, SHUFFLE_BUFFER):
        options = {"shuffle_buffer": shuffle}
        positions = (
            records + EARLY_RECORDS,
            EARLY_RECORDS,
        )  # one epoch apart, at the same position in the epoch and in its shuffle block
        late, early = (
            functools.partial(resume, index, seq, state_after(index, n, seq, **options), **options)
            for n in positions
        )
        late_seconds, early_seconds, ratio = time_alternately(rounds, "resume", late, early)
        prefix = "shuffled_" if shuffle else ""
        result[f"{prefix}resume_seconds"] = late_seconds
        result[f"{prefix}resume_seconds_at_first"] = early_seconds
        result[f"{prefix}resume_ratio"] = ratio
    return result


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Restrict this process to one CPU core inside the `with` block.

    Threads that are started inside the block stay on that core even after the block has ended.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise InputError(
            "--loader must pin this process to one CPU core; run it on Linux, which allows this"
        )
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def result(layout: Layout, args: argparse.Namespace, peak: float | None) -> dict[str, Any]:
    """Return the results that `bench --loader` reports.

    Args:
      peak: peak FLOP/s of all devices together; None if unknown.
    """
    config = layout.config
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=args.folder) as folder, one_core():
        measured = measure(Path(folder), args.records, config.seq, args.rounds)
    most = peak and peak / flops.palm_flops_per_token(config)
    return measured | {"most_tokens_per_second_of_a_step": most}


if __name__ == "__main__":
    sys.argv.insert(1, "--loader")
    run_script(command.main)
