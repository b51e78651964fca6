"""Measures the loader on one core: against a bare tf.data pipeline, and its time to resume.

Makes a set of small records (a million by default), reads the same of them by turns with the loader
and with tf.data, then resumes by turns near the beginning and behind all records.
"""

import argparse
import functools
import os
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mesh_transformer.record_files import tensorflow, write_records
from mesh_transformer.tfrecord_loader import TFRecordNewInputs
from mesh_transformer.util import InputError, run_script

FILES, DISTINCT = 10, 10_000  # records that are made; a file repeats them
BATCH = 8
EARLY = 10  # records before the first resume


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("folder", type=Path, help="to work in; made and removed again")
    parser.add_argument("--records", type=int, default=1_000_000, help="of the set (%(default)s)")
    parser.add_argument("--seq", type=int, default=64, help="tokens in each (%(default)s)")
    parser.add_argument(
        "--shuffle-buffer", type=int, default=1000, help="also resumed (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="of each comparison (%(default)s)")
    return parser.parse_args()


def write_index(folder: Path, records: int, seq: int) -> str:
    """A set of so many records in `FILES` files; TFRecord files may be joined byte by byte."""
    if records % (FILES * DISTINCT):
        raise InputError(f"--records is {records}, expected a multiple of {FILES * DISTINCT}")
    once = folder / "once.tfrecords"
    rng = np.random.default_rng(0)
    write_records(str(once), rng.integers(0, 50257, (DISTINCT, seq + 1)))
    for part in range(FILES):
        with (folder / f"{part}.tfrecords").open("wb") as file:
            file.write(once.read_bytes() * (records // FILES // DISTINCT))
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


def measure(args: argparse.Namespace) -> None:
    """Prints a line for each comparison."""
    index, seq = write_index(args.folder, args.records, args.seq), args.seq
    paths = [str(args.folder / f"{part}.tfrecords") for part in range(FILES)]
    batches = 2000

    def ours() -> None:
        with closing(TFRecordNewInputs(index, BATCH, seq)) as loader:
            for _ in range(batches):
                loader.get_samples()

    alone, other, ratio = by_turns(
        args.rounds, "loader, tf.data", ours, lambda: bare(paths, batches, seq)
    )
    print(
        f"on one core: {batches * BATCH * seq / alone:,.0f} tokens/s, tf.data alone "
        f"{batches * BATCH * seq / other:,.0f}; {1 / ratio:.2f} times as fast"
    )
    for shuffle in (0, args.shuffle_buffer):
        options = {"shuffle_buffer": shuffle}
        places = (args.records + EARLY, EARLY)  # at one record of a block
        late, early = (
            functools.partial(resume, index, seq, state_after(index, n, seq, **options), **options)
            for n in places
        )
        last, first, ratio = by_turns(args.rounds, "resume", late, early)
        print(
            f"shuffle_buffer {shuffle}: first batch after a resume behind record {places[0]:,} "
            f"{last * 1e3:.1f} ms, behind record {EARLY} {first * 1e3:.1f} ms; ratio {ratio:.2f}"
        )


def resume(index: str, seq: int, state: dict[str, Any], **options: Any) -> None:
    """Opens the set at a position and reads one batch."""
    with closing(TFRecordNewInputs(index, BATCH, seq, restore_state=state, **options)) as loader:
        loader.get_samples()


def main() -> None:
    args = parse_args()
    if args.folder.exists():
        raise InputError(f"{args.folder}: is there already; choose another name")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    args.folder.mkdir(parents=True)
    try:
        measure(args)
    finally:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    run_script(main)
