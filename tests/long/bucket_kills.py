"""Kills a host of two at a random request of a save to a bucket.

`python -m tests.long.bucket_kills 30` makes 30 kills.  After each, the newest complete checkpoint
in the bucket must equal the one that an undisturbed run saved at that step, bit for bit; the next
hosts resume from it.
"""

import argparse
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mesh_transformer.checkpoint.native import Checkpoints
from mesh_transformer.config import Config
from tests.long.interruptions import state_of
from tests.support.fake_gcs import FakeGcs, gcs_server
from tests.support.multihost import random_batches, run, started
from tests.support.small_run import VALUES
from tests.support.waiting import wait_until

MODEL = "gs://bucket/model"
MOST_REQUESTS = 250  # a save of this model takes about 200
MOST_STEPS = 6  # per kill


def committed(gcs: FakeGcs) -> int:
    """Return the newest step whose commit file is in the bucket; 0 if there is none."""
    matches = [
        re.fullmatch(r"model/step_(\d+)/commit_success.txt", name) for _, name in [*gcs.objects]
    ]
    return max((int(match[1]) for match in matches if match), default=0)


def killed_saves(folder: Path, count: int, seed: int = 0) -> Iterator[str]:
    """Kill one of two hosts `count` times, and yield a line about each kill.

    The kill is at a random request after the first save of these hosts, so it can be in any part of
    a save, or in the deletion of an older step.
    """
    rng = random.Random(seed)
    batches = random_batches(Config(**VALUES))
    saving = ("train_and_save", [str(folder / "whole_model"), MOST_STEPS * count + 20])
    run(folder / "whole", VALUES | {"keep_n": 1000}, 2, batches, [("init", []), saving])
    calls = ("train_and_save", [MODEL, 10**6])
    newest = 0
    (folder / "gcs").mkdir()
    with gcs_server(folder / "gcs") as (gcs, environment):
        os.environ.update(environment)
        for number in range(count):
            begin = ("restore", [MODEL]) if newest else ("init", [])
            rank, first = rng.randrange(2), rng.randrange(MOST_REQUESTS)
            config = VALUES | {"keep_n": 1}
            with started(
                folder / f"{number}", config, 2, batches, [begin, calls], environment=environment
            ) as hosts:
                wait_until(lambda: committed(gcs) > newest, "a save")  # noqa: B023
                left, killed = iter(range(first, -1, -1)), threading.Event()

                def kill() -> None:
                    if not next(left, 0) and not killed.is_set():  # noqa: B023
                        os.kill(hosts[rank].pid, signal.SIGKILL)  # noqa: B023
                        killed.set()  # noqa: B023

                gcs.fault = kill
                wait_until(killed.is_set, "the kill")
                gcs.fault = lambda: None
                hosts[rank].wait()
                names = sorted({name.split("/")[1] for _, name in list(gcs.objects)} - {".lock"})
                line = f"host {rank} killed with {', '.join(names)} in the bucket"
                time.sleep(rng.uniform(0, 0.5))  # during which the other host may still write
            before = newest
            with Checkpoints(MODEL, read_only=True) as checkpoints:
                newest = checkpoints.newest() or 0
            assert newest > before
            expected = state_of(folder / "whole_model", newest)
            for (name, actual), (expected_name, value) in zip(
                state_of(MODEL, newest), expected, strict=True
            ):
                assert name == expected_name
                np.testing.assert_array_equal(actual, value)
            yield f"{line}; step {newest} is whole"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=30)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for line in killed_saves(Path(name), args.count, args.seed):
            print(line, flush=True)


if __name__ == "__main__":
    main()
