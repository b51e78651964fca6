"""Kills a host of two, or the driver, at a random request of a save to a bucket.

`python -m tests.long.bucket_kills hosts 30` makes 30 kills of hosts, and `... drivers 10` makes 10
kills of drivers.  After each, the newest complete checkpoint in the bucket must equal the one that
an undisturbed run saved at that step, bit for bit; the next hosts resume from it.
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
from tests.long.interruptions import command, state_of, training, uninterrupted
from tests.support.fake_gcs import FakeGcs, gcs_server
from tests.support.multihost import random_batches, run, started
from tests.support.small_run import VALUES, assert_same_rows, parse_rows, rows_of
from tests.support.waiting import SECONDS, wait_until

ROOT = Path(__file__).parents[2]
MODEL = "gs://bucket/model"
MOST_REQUESTS = 250  # a save of this model takes about 200
MOST_STEPS = 6  # per kill
MOST_SAVES = 4  # per kill of a driver


def committed(gcs: FakeGcs) -> int:
    """Return the newest step whose commit file is in the bucket; 0 if there is none."""
    matches = [
        re.fullmatch(r"model/step_(\d+)/commit_success.txt", name) for _, name in [*gcs.objects]
    ]
    return max((int(match[1]) for match in matches if match), default=0)


def kill_at_a_request(gcs: FakeGcs, pid: int, rng: random.Random) -> str:
    """Kill a process at one of the next `MOST_REQUESTS` requests; return what the bucket holds."""
    left, killed = iter(range(rng.randrange(MOST_REQUESTS), -1, -1)), threading.Event()

    def kill() -> None:
        if not next(left, 0) and not killed.is_set():
            os.kill(pid, signal.SIGKILL)
            killed.set()

    gcs.fault = kill
    wait_until(killed.is_set, "the kill")
    gcs.fault = lambda: None
    names = {name.split("/")[1] for _, name in list(gcs.objects)}
    return ", ".join(sorted(name for name in names if name.startswith("step_")))


def check_newest(whole: Path, before: int) -> int:
    """Check that the newest step is newer than `before` and equal to that of a whole run.

    Returns the newest step.
    """
    with Checkpoints(MODEL, read_only=True) as checkpoints:
        newest = checkpoints.newest() or 0
    assert newest > before
    for (name, actual), (expected_name, expected) in zip(
        state_of(MODEL, newest), state_of(whole, newest), strict=True
    ):
        assert name == expected_name
        np.testing.assert_array_equal(actual, expected)
    return newest


def killed_drivers(folder: Path, count: int, seed: int = 0) -> Iterator[str]:
    """Kill the driver of a run on two hosts `count` times, and yield a line about each kill.

    Each new driver has only the bucket, as if it were another machine.  The run must end with the
    metrics of an undisturbed one.
    """
    rng = random.Random(seed)
    # The undisturbed run saves every step, as a save that fails is repeated at a later one.
    total = 4 * MOST_SAVES * (count + 1)
    config, whole = uninterrupted(folder, total_steps=total, ckpt_every=1, keep_n=total)
    settings = ["--set", "keep_n=1", "--set", "ckpt_every=4"]
    arguments = ["-m", "mesh_transformer", "pod", *command(config, MODEL, *settings)[1:]]
    newest = 0
    (folder / "gcs").mkdir()
    with gcs_server(folder / "gcs") as (gcs, environment):
        os.environ.update(environment | {"PYTHONPATH": str(ROOT)})
        for number in range(count + 1):
            place = folder / f"{number}"
            with training(place, *arguments, cwd=place) as run:
                if number == count:
                    assert run.process.wait(SECONDS) == 0, run.log.read_text()
                    break
                wait_until(lambda: committed(gcs) > newest, f"a save; {run.log}")  # noqa: B023
                run.find_heads()
                names = kill_at_a_request(gcs, run.process.pid, rng)
                run.process.wait()
                run.assert_nothing_is_left(SECONDS)
            newest = check_newest(whole, newest)
            yield f"driver killed with {names} in the bucket; step {newest} is whole"
            yield from (line for line in run.log.read_text().splitlines() if "failed" in line)
        metrics = gcs.objects["bucket", "model/metrics.jsonl"].content.decode()
    assert_same_rows(parse_rows(metrics), rows_of(whole))


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
            rank = rng.randrange(2)
            config = VALUES | {"keep_n": 1}
            with started(
                folder / f"{number}", config, 2, batches, [begin, calls], environment=environment
            ) as hosts:
                wait_until(lambda: committed(gcs) > newest, "a save")  # noqa: B023
                names = kill_at_a_request(gcs, hosts[rank].pid, rng)
                hosts[rank].wait()
                time.sleep(rng.uniform(0, 0.5))  # during which the other host may still write
            newest = check_newest(folder / "whole_model", newest)
            yield f"host {rank} killed with {names} in the bucket; step {newest} is whole"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("hosts", "drivers"))
    parser.add_argument("count", type=int, nargs="?", default=30)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        kills = killed_saves if args.what == "hosts" else killed_drivers
        for line in kills(Path(name), args.count, args.seed):
            print(line, flush=True)


if __name__ == "__main__":
    main()
