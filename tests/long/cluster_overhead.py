"""Compares the step time of the cluster with that of the same two processes without Ray.

`python -m tests.long.cluster_overhead [rounds]` starts both meshes side by side and gives them the
same blocks of steps alternately, so that other load on the machine affects both.  The
cluster may cost up to 5 percent plus 2 ms per step; the exit status is 1 if it costs more.  With
`--itself`, neither mesh uses Ray, which shows the precision of this measurement.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mesh_transformer.config import Config
from mesh_transformer.pod.launch import build_model, local_machines
from mesh_transformer.training.loop import IN_FLIGHT
from tests.support.host_process import SECONDS_ARE
from tests.support.multihost import STEPS, random_batches, started
from tests.support.small_run import VALUES

BLOCK = 10  # steps
PAIRS = 10  # of blocks per round
CONFIG = VALUES | {"layers": 4, "d_model": 128, "per_replica_batch": 8}
PERCENT, MORE = 0.05, 0.002


def through_the_cluster(cluster: Any, samples: list[dict[str, np.ndarray]]) -> float:
    """Return the seconds of a block, with metrics read as in `training.loop`."""
    began, pending = time.perf_counter(), deque()
    for step in range(BLOCK):
        pending.append(cluster.train(samples[step % STEPS]))
        if len(pending) > IN_FLIGHT:
            float(pending.popleft()["loss"])
    while pending:
        float(pending.popleft()["loss"])
    return time.perf_counter() - began


def without_ray(processes: list[subprocess.Popen]) -> float:
    """Return the seconds of a block, by the clock of the first process."""
    for process in processes:
        print("go", file=process.stdin, flush=True)
    lines = [
        next(line for line in process.stdout if line.startswith(SECONDS_ARE))
        for process in processes
    ]
    return float(lines[0].removeprefix(SECONDS_ARE))


@contextlib.contextmanager
def measured_mesh(
    folder: Path, itself: bool, batches: dict[str, np.ndarray]
) -> Iterator[Callable[[], float]]:
    """Yield a function that runs a block on the measured mesh and returns its seconds."""
    if itself:
        with without(folder / "other", batches) as processes:
            yield lambda: without_ray(processes)
        return
    config = Config(**CONFIG)
    samples = [
        {key: batches[f"train_{key}_{step}"] for key in ("obs", "target")} for step in range(STEPS)
    ]
    with (
        local_machines(config, 2) as hosts,
        contextlib.closing(build_model(config, hosts())) as model,
    ):
        model.init()
        yield lambda: through_the_cluster(model, samples)


def without(
    folder: Path, batches: dict[str, np.ndarray]
) -> contextlib.AbstractContextManager[list[subprocess.Popen]]:
    calls = [("init", []), ("blocks", BLOCK)]
    return started(folder, CONFIG, 2, batches, calls, pipes=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument("--itself", action="store_true")
    args = parser.parse_args()
    batches = random_batches(Config(**CONFIG))
    plain, driven = [], []
    with (
        tempfile.TemporaryDirectory() as name,
        measured_mesh(Path(name), args.itself, batches) as measured_block,
        without(Path(name) / "plain", batches) as processes,
    ):
        measured_block(), without_ray(processes)  # compiles
        for number in range(args.rounds * PAIRS):
            if number % 2:
                plain.append(without_ray(processes) / BLOCK)
            driven.append(measured_block() / BLOCK)
            if not number % 2:
                plain.append(without_ray(processes) / BLOCK)
            if not (number + 1) % PAIRS:
                print(summary(plain[-PAIRS:], driven[-PAIRS:]), flush=True)
    print(f"all: {summary(plain, driven)}")
    return int(cost(plain, driven) > statistics.median(plain) * PERCENT + MORE)


def cost(plain: list[float], driven: list[float]) -> float:
    """Return the median of the additional time of the cluster, over all pairs."""
    return statistics.median(np.subtract(driven, plain))


def summary(plain: list[float], driven: list[float]) -> str:
    low, high = confidence_interval(np.subtract(driven, plain))
    alone = statistics.median(plain)
    return (
        f"{len(plain)} pairs: a step takes {alone * 1e3:.1f} ms without Ray, the other "
        f"{cost(plain, driven) * 1e3:+.1f} ms (95%: {low * 1e3:+.1f} to {high * 1e3:+.1f}; "
        f"allowed {(alone * PERCENT + MORE) * 1e3:+.1f})"
    )


def confidence_interval(differences: np.ndarray) -> np.ndarray:
    """Return a 95 percent confidence interval of the median, by the bootstrap."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(differences, (2000, len(differences)))
    return np.quantile(np.median(drawn, axis=1), (0.025, 0.975))


if __name__ == "__main__":
    sys.exit(main())
