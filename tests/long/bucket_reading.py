"""Reads records from a bucket whose answers begin after 50 ms, and prints the speed.

`python -m tests.long.bucket_reading` reads one set in files of 100 MB, and one in files of 2 MB.
The records are read as a host does that takes no row of a batch: read and checked, but not parsed.
With `--shuffled` N, N records of each set are read in the order of `shuffle_buffer` all, one
request each, by a loader that parses them.

`--many` N opens a set of N files of one record in such a bucket, whose folder is listed, alone and
in a mixture of two, and resumes at a random step.  It prints the seconds of each, and the CPU
time and memory of the process so far.
"""

import argparse
import collections
import itertools
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.support import fake_gcs

SEQ = 2048
RECORDS = 364  # about 2 MB
SETS = {"100 MB": (50, 5), "2 MB": (1, 100)}  # how often a file repeats these records, and files


def serve(
    folder: str, seconds: float, many: int, ready: "multiprocessing.Queue[dict[str, str]]"
) -> None:
    """Serve a bucket with the sets, each answer `seconds` late, until the process is ended.

    Args:
      many: the files of the set `many`; 0 for the sets in `SETS`.
    """
    from mesh_transformer.data.tfrecords import write_records

    once = Path(folder) / "once"
    rows = np.random.default_rng(0).integers(0, 50257, (1 if many else RECORDS, SEQ + 1))
    write_records(str(once), rows)
    fake_gcs.SLOW_SECONDS = seconds
    with fake_gcs.gcs_server(Path(folder)) as (gcs, environment):
        sets = {"many": (1, many)} if many else dict(enumerate(SETS.values()))
        for number, (repeats, count) in sets.items():
            names = [f"{number}/{file:07}.tfrecords" for file in range(count)]
            content = once.read_bytes() * repeats
            stored = fake_gcs.Stored(content, 1, time.time())
            for name in names:
                gcs.objects["bucket", name] = stored
            index = "".join(f"gs://bucket/{name}\n" for name in names).encode()
            gcs.objects["bucket", f"{number}.index"] = fake_gcs.Stored(index, 1, time.time())
        gcs.fault = lambda: "slow"
        ready.put(environment)
        time.sleep(10**6)


@contextmanager
def late_bucket(seconds: float, many: int = 0) -> Iterator[None]:
    """Let this process use such a bucket of another process; see `serve`."""
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=serve, args=(folder, seconds, many, ready), daemon=True)
        process.start()
        try:
            os.environ.update(ready.get())
            yield
        finally:
            process.kill()
            process.join()


def read_shuffled(count: int) -> None:
    from mesh_transformer.data.loader import TFRecordNewInputs

    for number, name in enumerate(SETS):
        index = f"gs://bucket/{number}.index"
        loader = TFRecordNewInputs(index, 16, SEQ, shuffle_buffer="all")
        for _ in itertools.islice(loader, 8):  # the first answers are late
            pass
        began, batches = time.perf_counter(), count // 16
        for _ in itertools.islice(loader, batches):
            pass
        speed = batches * 16 / (time.perf_counter() - began)
        print(f"files of {name}, shuffled: {speed:,.0f} records, {speed * SEQ:,.0f} tokens/s")
        loader.close()


def open_many(count: int) -> None:
    from mesh_transformer.data.mixture import Mixture
    from mesh_transformer.data.record_set import Position, RecordSet

    def report(what: str, began: float) -> None:
        seconds, used = time.perf_counter() - began, time.process_time()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{what}: {seconds:.2f} s; {used:.1f} s of CPU, peak memory {memory:,.0f} MiB so far")

    index = "gs://bucket/many.index"
    report("start", time.perf_counter())
    for shuffle in (0, 100):
        began = time.perf_counter()
        records = RecordSet(index, SEQ, None, shuffle=shuffle)
        report(f"opening with shuffle_buffer {shuffle}", began)
        state = records.state(Position(epoch=1, file=count // 3))
        began = time.perf_counter()
        next(records.records(records.checked_position(state), repeat=True))
        report("resuming at a random step", began)
    began = time.perf_counter()
    mixture = Mixture([records, records], [1.0, 2.0], 0)
    choices = mixture._choices(10**6, lambda: 0)
    collections.deque(itertools.islice(choices, 10**5), maxlen=0)
    report("a mixture's plan for 100,000 records", began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--milliseconds", type=float, default=50.0)
    parser.add_argument("--shuffled", type=int, metavar="N")
    parser.add_argument("--many", type=int, metavar="N", default=0)
    args = parser.parse_args()
    with late_bucket(args.milliseconds / 1e3, args.many):
        if args.many:
            open_many(args.many)
            return
        if args.shuffled:
            read_shuffled(args.shuffled)
            return
        from mesh_transformer.data.record_set import Position, RecordSet

        for number, (name, (repeats, count)) in enumerate(SETS.items()):
            records = RecordSet(f"gs://bucket/{number}.index", SEQ, None)
            speeds = []
            for _ in range(args.rounds):
                began, size, all_records = time.perf_counter(), 0, 0
                for record, _ in records.records(Position(), repeat=False):
                    size += len(record.payload())
                    all_records += 1
                assert all_records == RECORDS * repeats * count
                speeds.append(size / 1e6 / (time.perf_counter() - began))
            print(f"files of {name}: {statistics.median(speeds):.0f} MB/s of {speeds}", flush=True)


if __name__ == "__main__":
    main()
