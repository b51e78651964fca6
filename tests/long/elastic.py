"""Takes a host away from a training run for good and brings it back, at random steps.

`python -m tests.long.elastic 6` trains on 4 local hosts, each a Ray node of its own.  Six times,
one of them vanishes with all its processes, and the run must continue with fewer hosts.  Some steps
later it returns, and the run must grow at the next save.  The metrics must be those of an
undisturbed run: every bit with `virtual_mesh`, and all but rounding without (`--plain`).
"""

import argparse
import contextlib
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.config import Config
from mesh_transformer.pod import restarts
from tests.support.ray_nodes import other_node, vanish
from tests.support.small_run import assert_same_rows, rows_of, run_values
from tests.support.waiting import wait_until

HOSTS, WAIT, CKPT_EVERY = 4, 3, 5
APART = 30  # steps between two losses
VIRTUAL = {"virtual_mesh": [4, 2]}


class Loss(NamedTuple):
    """One host that vanishes and returns.

    Attributes:
      step: the host vanishes once the metrics of this step have been read.
      back: the host is started again once the metrics of this step have been read; None for never.
      rank: number of the host.
    """

    step: int
    back: int | None
    rank: int


class Attempt(NamedTuple):
    """One cluster of the run.

    Attributes:
      hosts: number of its hosts.
      first: the step from which it resumed; 0 at the beginning.
      seconds: from the end of the last attempt's last step until its own first step has finished.
      again: number of steps that were computed again.
    """

    hosts: int
    first: int
    seconds: float
    again: int


def random_losses(count: int, seed: int) -> list[Loss]:
    """Return hosts to lose, each at a random step, and back some steps later."""
    rng = random.Random(seed)
    losses = []
    for number in range(count):
        step = APART * number + rng.randrange(3, 10)
        losses.append(Loss(step, step + rng.randrange(3, 9), rng.randrange(HOSTS)))
    return losses


def elastic_config(folder: Path, steps: int, **keys: Any) -> Config:
    """Write records to a folder, and return the config of a run of `steps` steps on them."""
    values = {"cores_per_replica": 2, "ckpt_every": CKPT_EVERY, "val_batches": 0}
    return Config(**run_values(folder, **values | {"total_steps": steps} | keys))


def elastic_run(folder: Path, losses: list[Loss], steps: int, **keys: Any) -> list[Attempt]:
    """Train while hosts vanish and return; return the attempts."""
    from mesh_transformer.pod.launch import local_nodes
    from mesh_transformer.pod.ray_head import local_address

    config = elastic_config(folder, steps, **keys)
    events = sorted(
        [(loss.step, "vanish", loss.rank) for loss in losses]
        + [(loss.back, "return", loss.rank) for loss in losses if loss.back is not None]
    )
    attempts: list[Attempt] = []
    newest, ended = 0, time.monotonic()

    with local_nodes(config, HOSTS, WAIT) as machines, contextlib.ExitStack() as stack:

        def make() -> Any:
            from mesh_transformer.pod.elastic import ElasticCluster

            cluster = ElasticCluster(config, machines, heartbeat=30)
            restore, read = cluster.restore, cluster.read
            first: int | None = None

            def observed_restore(folder: Any, base: Any = None) -> Any:
                nonlocal first
                aux = restore(folder, base)
                first = cluster.step
                return aux

            def observed_read(reading: Any) -> Any:
                nonlocal newest, ended, first
                values = read(reading)
                if first is not None:
                    seconds = time.monotonic() - ended
                    again = max(newest - first, 0)
                    attempts.append(Attempt(len(cluster.hosts), first, seconds, again))
                    first = None
                newest, ended = max(newest, reading.step), time.monotonic()
                while events and newest >= events[0][0]:
                    _, what, rank = events.pop(0)
                    address = local_address(rank)
                    if what == "vanish":
                        cluster.wait()  # else it is left to chance whether the last save is there
                        vanish(address)
                    else:
                        stack.enter_context(other_node(address))
                        wait_until(lambda: machines.present() == HOSTS, "the return of the host")
                return values

            cluster.restore, cluster.read = observed_restore, observed_read
            return cluster

        restarts.train(make, str(folder / "model"))
    assert not events
    return attempts


def assert_close_rows(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in actual] == [row["step"] for row in expected]
    for row, other in zip(actual, expected, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/learning_rate"):
            # f32 sums over devices in another order, whose rounding grows over tens of steps.
            np.testing.assert_allclose(row[name], other[name], rtol=1e-4, err_msg=name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Take hosts away for good and bring them back.")
    parser.add_argument("count", type=int, nargs="?", default=6, help="hosts to lose")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="without virtual_mesh")
    args = parser.parse_args()
    keys = {} if args.plain else VIRTUAL
    steps = APART * args.count
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for name, losses in (("calm", []), ("lossy", random_losses(args.count, args.seed))):
            path = Path(folder) / name
            path.mkdir()
            for loss in losses:
                print(loss, flush=True)
            for attempt in elastic_run(path, losses, steps, **keys):
                print(name, attempt, flush=True)
            rows.append(rows_of(path / "model"))
    (assert_close_rows if args.plain else assert_same_rows)(rows[1], rows[0])
    same = "up to rounding" if args.plain else "in every bit"
    print(f"{steps} steps, each logged once, are those of the undisturbed run {same}")


if __name__ == "__main__":
    main()
