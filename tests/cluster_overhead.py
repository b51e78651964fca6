"""Median step time through the cluster and of the same two processes without Ray, in turns.

`python -m tests.cluster_overhead [rounds]` prints both; the cluster may cost 5 percent and 2 ms.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mesh_transformer.build_model import build_model, local_machines
from mesh_transformer.config import Config
from mesh_transformer.training import IN_FLIGHT
from tests.multihost import STEPS, random_batches, run
from tests.small_run import VALUES

TIMED = 60
CONFIG = VALUES | {"layers": 4, "d_model": 128, "per_replica_batch": 8}


def through_the_cluster(config: Config, hosts: list[Any], batches: dict[str, Any]) -> list[float]:
    """Seconds between the steps' ends, but for the first, read in `training`'s way."""
    cluster = build_model(config, hosts)
    cluster.init()
    pending, ends = [], []
    for step in range(TIMED):
        sample = {key: batches[f"train_{key}_{step % STEPS}"] for key in ("obs", "target")}
        pending.append(cluster.train(sample))
        if len(pending) > IN_FLIGHT:
            float(pending.pop(0)["loss"])
            ends.append(time.perf_counter())
    cluster.close()
    return np.diff(ends[5:]).tolist()


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    config = Config(**CONFIG)
    batches = random_batches(config)
    plain, driven = [], []
    with tempfile.TemporaryDirectory() as name, local_machines(config, 2) as hosts:
        for number in range(rounds):
            calls = [("init", []), ("time", TIMED)]
            found = run(Path(name) / str(number), CONFIG, 2, batches, calls)
            plain.append(statistics.median(found[0]["1_seconds"]))
            driven.append(statistics.median(through_the_cluster(config, hosts(), batches)))
            print(f"without Ray {plain[-1] * 1e3:.1f} ms, cluster {driven[-1] * 1e3:.1f} ms")
    one, other = statistics.median(plain), statistics.median(driven)
    allowed = one * 1.05 + 0.002
    print(f"medians {one * 1e3:.1f} and {other * 1e3:.1f} ms; allowed {allowed * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
