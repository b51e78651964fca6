"""Reads records from a bucket whose answers begin after 50 ms, and prints the speed.

`python -m tests.long.bucket_reading` reads one set in files of 100 MB, and one in files of 2 MB.
The records are read as a host does that takes no row of a batch: read and checked, but not parsed.
"""

import argparse
import multiprocessing
import os
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


def serve(folder: str, seconds: float, ready: "multiprocessing.Queue[dict[str, str]]") -> None:
    """Serve a bucket with the sets, each answer `seconds` late, until the process is ended."""
    from mesh_transformer.data.tfrecords import write_records

    once = Path(folder) / "once"
    rows = np.random.default_rng(0).integers(0, 50257, (RECORDS, SEQ + 1))
    write_records(str(once), rows)
    fake_gcs.SLOW_SECONDS = seconds
    with fake_gcs.gcs_server(Path(folder)) as (gcs, environment):
        for number, (repeats, count) in enumerate(SETS.values()):
            names = [f"{number}/{file}.tfrecords" for file in range(count)]
            content = once.read_bytes() * repeats
            for name in names:
                gcs.objects["bucket", name] = fake_gcs.Stored(content, 1, time.time())
            index = "".join(f"gs://bucket/{name}\n" for name in names).encode()
            gcs.objects["bucket", f"{number}.index"] = fake_gcs.Stored(index, 1, time.time())
        gcs.fault = lambda: "slow"
        ready.put(environment)
        time.sleep(10**6)


@contextmanager
def late_bucket(seconds: float) -> Iterator[None]:
    """Let this process use such a bucket of another process."""
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=serve, args=(folder, seconds, ready), daemon=True)
        process.start()
        try:
            os.environ.update(ready.get())
            yield
        finally:
            process.kill()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--milliseconds", type=float, default=50.0)
    args = parser.parse_args()
    with late_bucket(args.milliseconds / 1e3):
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
