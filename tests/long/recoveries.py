"""Kills hosts of training runs, and measures how they recover from storage and from memory.

`python -m tests.long.recoveries 12` kills 12 hosts of each of four runs: on 2 and on 4 local hosts,
with and without copies in the hosts' memory.  A host is killed together with the keeper of its
copies, as if its machine had vanished.  Every run must end with the metrics of an undisturbed run,
bit for bit.
"""

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from mesh_transformer.config import Config
from mesh_transformer.pod import restarts
from tests.support.small_run import assert_same_rows, rows_of, run_values

CKPT_EVERY, MEMORY_EVERY = 25, 4
APART = 30  # steps between two kills


class Recovery(NamedTuple):
    """One killed host.

    Attributes:
      step: the newest step that was dispatched before.
      rank: the host's rank.
      lost: number of steps that were computed again.
      seconds: from the kill until the losses of all lost steps were known again.
      source: where the state was restored from, "memory" or "storage".
    """

    step: int
    rank: int
    lost: int
    seconds: float
    source: str


def recoveries(folder: Path, hosts: int, kills: list[tuple[int, int]], **keys: Any) -> list[Any]:
    """Train, and kill the host with each rank once its step is dispatched.

    Args:
      kills: (step, rank) of each kill, by step.

    Returns:
      One `Recovery` per kill.
    """
    from mesh_transformer.pod.launch import build_model, local_machines, new_copies

    config = Config(**run_values(folder, ckpt_every=CKPT_EVERY, val_batches=0, **keys))
    planned, measured = list(kills), []
    killed: tuple[int, int, float] | None = None
    restored, source = 0, ""

    with local_machines(config, hosts) as machines:
        copies = new_copies(config)

        def make() -> Any:
            cluster = build_model(config, machines(), heartbeat=30, copies=copies)
            train, restore = cluster.train, cluster.restore

            def observed_restore(folder: Any, base: Any = None) -> Any:
                nonlocal restored, source
                aux = restore(folder, base)
                restored = cluster.step
                source = "memory" if aux is not None and aux.get("unsaved") else "storage"
                return aux

            def observed_train(sample: Any) -> Any:
                nonlocal killed
                if killed is not None and cluster.step >= killed[0] + 2:  # two steps are unread
                    step, rank, began = killed
                    seconds = time.monotonic() - began
                    measured.append(Recovery(step, rank, step - restored, seconds, source))
                    killed = None
                if planned and cluster.step == planned[0][0]:
                    step, rank = planned.pop(0)
                    killed = step, rank, time.monotonic()
                    if copies is not None:
                        kill_keeper(copies.keepers[rank])
                    os.kill(cluster._pids[rank], signal.SIGKILL)
                return train(sample)

            cluster.train, cluster.restore = observed_train, observed_restore
            return cluster

        restarts.train(make, str(folder / "model"))
    assert len(measured) == len(kills)
    return measured


def kill_keeper(keeper: Any) -> None:
    """Kill a keeper's process, as if its machine had vanished."""
    import ray  # only while there is a Ray head, which sets how Ray authenticates

    os.kill(ray.get(keeper.pid.remote()), signal.SIGKILL)


def compared(hosts: int, count: int, seed: int, folder: Path) -> dict[str, list[Recovery]]:
    """Kill `count` hosts of a run without copies in memory, and of one with them.

    Both runs must end like one that nothing disturbs.
    """
    rng = random.Random(seed)
    kills = [
        (APART * n + rng.randrange(APART // 2) + 5, rng.randrange(hosts)) for n in range(count)
    ]
    ways = {"undisturbed": ([], {}), "storage": (kills, {})}
    ways["memory"] = kills, {"memory_every": MEMORY_EVERY}
    measured = {}
    for way, (kills_of_run, keys) in ways.items():
        (folder / way).mkdir()
        measured[way] = recoveries(
            folder / way, hosts, kills_of_run, total_steps=APART * count + 5, **keys
        )
    whole = rows_of(folder / "undisturbed" / "model")
    for way in ("storage", "memory"):
        assert_same_rows(rows_of(folder / way / "model"), whole)
    return {way: measured[way] for way in ("storage", "memory")}


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill hosts and measure recovery.")
    parser.add_argument("count", type=int, nargs="?", default=12, help="kills per run")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"a checkpoint every {CKPT_EVERY} steps, a copy in memory every {MEMORY_EVERY}")
    for hosts in args.hosts:
        with tempfile.TemporaryDirectory() as folder:
            for way, measured in compared(hosts, args.count, args.seed, Path(folder)).items():
                lost, seconds = [r.lost for r in measured], [r.seconds for r in measured]
                for recovery in measured:
                    print(hosts, way, recovery, flush=True)
                print(
                    f"{hosts} hosts, {way}: steps lost median {statistics.median(lost):g}, most "
                    f"{max(lost)}; seconds median {statistics.median(seconds):.1f}, most "
                    f"{max(seconds):.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
