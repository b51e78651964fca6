"""Step time through the cluster and of the same two processes without Ray, in turns.

`python -m tests.long.cluster_overhead [rounds]` starts both meshes side by side and gives them the
same blocks of steps alternately, so that other load on the machine affects both.  The
cluster may cost 5 percent and 2 ms a step; the exit status says whether it does.  With `--itself`
the other mesh is without Ray too: what is measured then is how well this can measure.
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
PAIRS = 10  # of blocks, a round
CONFIG = VALUES | {"layers": 4, "d_model": 128, "per_replica_batch": 8}
PERCENT, MORE = 0.05, 0.002


def through_the_cluster(cluster: Any, samples: list[dict[str, np.ndarray]]) -> float:
    """Seconds of a block, read in `training`'s way."""
    began, pending = time.perf_counter(), deque()
    for step in range(BLOCK):
        pending.append(cluster.train(samples[step % STEPS]))
        if len(pending) > IN_FLIGHT:
            float(pending.popleft()["loss"])
    while pending:
        float(pending.popleft()["loss"])
    return time.perf_counter() - began


def without_ray(processes: list[subprocess.Popen]) -> float:
    """Seconds of a block, by the first process's own clock."""
    for process in processes:
        print("go", file=process.stdin, flush=True)
    said = [
        next(line for line in process.stdout if line.startswith(SECONDS_ARE))
        for process in processes
    ]
    return float(said[0].removeprefix(SECONDS_ARE))


@contextlib.contextmanager
def other_mesh(
    folder: Path, itself: bool, batches: dict[str, np.ndarray]
) -> Iterator[Callable[[], float]]:
    """What gives the seconds of a block on the mesh that is measured against one without Ray."""
    if itself:
        with without(folder / "other", batches) as processes:
            yield lambda: without_ray(processes)
        return
    config = Config(**CONFIG)
    samples = [
        {key: batches[f"train_{key}_{step}"] for key in ("obs", "target")} for step in range(STEPS)
    ]
    with local_machines(config, 2) as hosts, contextlib.closing(build_model(config, hosts())) as it:
        it.init()
        yield lambda: through_the_cluster(it, samples)


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
        other_mesh(Path(name), args.itself, batches) as other,
        without(Path(name) / "plain", batches) as processes,
    ):
        other(), without_ray(processes)  # compiles
        for number in range(args.rounds * PAIRS):
            if number % 2:
                plain.append(without_ray(processes) / BLOCK)
            driven.append(other() / BLOCK)
            if not number % 2:
                plain.append(without_ray(processes) / BLOCK)
            if not (number + 1) % PAIRS:
                print(told(plain[-PAIRS:], driven[-PAIRS:]), flush=True)
    print(f"all: {told(plain, driven)}")
    return int(cost(plain, driven) > statistics.median(plain) * PERCENT + MORE)


def cost(plain: list[float], driven: list[float]) -> float:
    """The median of what the cluster took longer in each pair."""
    return statistics.median(np.subtract(driven, plain))


def told(plain: list[float], driven: list[float]) -> str:
    low, high = certain(np.subtract(driven, plain))
    alone = statistics.median(plain)
    return (
        f"{len(plain)} pairs: a step takes {alone * 1e3:.1f} ms without Ray, the other "
        f"{cost(plain, driven) * 1e3:+.1f} ms (95%: {low * 1e3:+.1f} to {high * 1e3:+.1f}; "
        f"allowed {(alone * PERCENT + MORE) * 1e3:+.1f})"
    )


def certain(differences: np.ndarray) -> np.ndarray:
    """Between which values their median is, with 95 percent certainty, by the bootstrap."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(differences, (2000, len(differences)))
    return np.quantile(np.median(drawn, axis=1), (0.025, 0.975))


if __name__ == "__main__":
    sys.exit(main())
