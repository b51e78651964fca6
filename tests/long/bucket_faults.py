"""Saves, restores, converts and reads records while requests to a bucket fail.

`python -m tests.long.bucket_faults --seeds 0 200` makes 200 faults.  Each is drawn from its seed:
the operation, the number of its first request that fails, how many fail and how.  An operation must
either succeed with the right result, or raise an InputError of one line that names the path; the
earlier checkpoint must stay whole, and the operation must succeed when it is repeated.
"""

import argparse
import collections
import contextlib
import dataclasses
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.fake_gcs import FAULTS, FakeGcs, gcs_server

PASSING = (429, 503, *FAULTS)  # which end after `MOST_FAILING` requests in a row at most
LASTING = (401, 403)  # such as expired credentials; these last until the operation has ended
MOST_FAILING = 4
# Short timeouts and pauses of the clients, so that a fault takes seconds.
CLIENTS = {
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "5",
    "GCS_REQUEST_IDLE_TIMEOUT_SECS": "5",
    "GCS_RETRY_CONFIG_INIT_DELAY_TIME_US": "100000",
    "GCS_RETRY_CONFIG_MAX_DELAY_TIME_US": "1000000",
}
# The longest time of an operation: each failing request may be noticed after 5 s and repeated after
# up to 16 s, on a machine that may be busy.
LIMIT_SECONDS = 300.0


@dataclasses.dataclass
class Plan:
    """Fails requests from the one with number `first`, `count` in a row.

    Attributes:
      seen: number of requests so far.
      made: number of requests that failed.
    """

    kind: int | str
    first: int
    count: int
    seen: int = 0
    made: int = 0

    def __call__(self) -> int | str | None:
        self.seen += 1
        if not self.first <= self.seen - 1 < self.first + self.count:
            return None
        self.made += 1
        return self.kind


class Operations:
    """The operations and what they must return; each seed has a folder of its own in the bucket."""

    def __init__(self, gcs: FakeGcs, local: Path):
        import jax
        import numpy as np

        from mesh_transformer.checkpoint.original import write
        from mesh_transformer.config import Config
        from mesh_transformer.data.tfrecords import write_set
        from tests.checkpoint.test_original import random_state

        self.gcs, self.jax, self.np = gcs, jax, np
        self.config = Config(
            layers=2,
            d_model=16,
            n_heads=2,
            n_vocab=32,
            seq=8,
            pe_rotary_dims=4,
            cores_per_replica=2,
        )
        self.start = str(local / "start")
        write(self.start, random_state(self.config), self.config)
        rng = np.random.default_rng(0)
        self.rows = rng.integers(0, 32, (300, 9), dtype=np.int64)
        self.states = [
            {"params": {"layers": {"w": jax.numpy.asarray(rng.normal(size=(2, 70, 90)))}}}
            for _ in range(2)
        ]
        self._write_set = write_set

    def all(self) -> dict[str, Callable[[str], tuple[Callable[[], Any], Callable[[], None]]]]:
        return {
            "save": self.save,
            "restore": self.restore,
            "read records": self.read_records,
            "write records": self.write_records,
            "convert": self.convert,
        }

    def _assert_restores(self, folder: str, step: int, state: Any) -> None:
        from mesh_transformer.checkpoint.native import Checkpoints

        with Checkpoints(folder, read_only=True) as checkpoints:
            assert checkpoints.newest() == step, f"{folder}: newest is {checkpoints.newest()}"
            restored = checkpoints.restore(step, self._template(state))
        self._assert_equal(restored, state)

    def _template(self, state: Any) -> Any:
        sharding = self.jax.sharding.SingleDeviceSharding(self.jax.devices()[0])
        return self.jax.tree.map(
            lambda x: self.jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state
        )

    def _assert_equal(self, actual: Any, expected: Any) -> None:
        self.jax.tree.map(self.np.testing.assert_array_equal, actual, expected)

    def save(self, folder: str):
        from mesh_transformer.checkpoint.native import Checkpoints

        first = Checkpoints(folder)
        first.save(1, self.states[0], {"config": {}})
        first.close()

        def act() -> None:
            checkpoints = Checkpoints(folder)
            try:
                checkpoints.save(2, self.states[1], {"config": {}})
            finally:
                checkpoints.close()

        def check(done: bool) -> None:
            step = 2 if done else 1
            self._assert_restores(folder, step, self.states[step - 1])

        return act, check

    def restore(self, folder: str):
        from mesh_transformer.checkpoint.native import Checkpoints

        with Checkpoints(folder) as checkpoints:
            checkpoints.save(1, self.states[0], {"config": {}})
        return (lambda: self._assert_restores(folder, 1, self.states[0])), (lambda done: None)

    def _assert_records(self, index: str) -> None:
        from mesh_transformer.data.loader import TFRecordNewInputs

        loader = TFRecordNewInputs(index, 10, 8, n_vocab=32, repeat=False)
        try:
            read = [batch["obs"] for batch in loader]
        finally:
            loader.close()
        self._assert_equal(self.np.concatenate(read), self.rows[:, :8])

    def read_records(self, folder: str):
        _, index, _ = self._write_set(folder, "train", self.rows)
        return (lambda: self._assert_records(index)), (lambda done: None)

    def write_records(self, folder: str):
        def act() -> None:
            self._write_set(folder, "train", self.rows)

        def check(done: bool) -> None:
            if done:
                self._assert_records(f"{folder}/train.index")

        return act, check

    def convert(self, folder: str):
        from mesh_transformer.checkpoint.conversion import convert, read
        from mesh_transformer.checkpoint.source import Source
        from mesh_transformer.checkpoint.state_tree import in_memory
        from mesh_transformer.util import InputError

        source, target = f"{folder}/hf", f"{folder}/native"
        convert(self.start, "original", source, "hf", config=self.config)
        _, expected = read(Source(source))
        expected = in_memory(expected)

        def act() -> None:
            convert(source, "hf", target, "native")

        def check(done: bool) -> None:
            if done:
                _, state = read(Source(target))
                self._assert_equal(in_memory(state), expected)
                return
            # What could not be deleted must not be taken for a model; the user moves it away.
            with contextlib.suppress(InputError):
                read(Source(target))
                raise AssertionError(f"{target} was read, although it is not complete")
            left = target.removeprefix("gs://bucket/")
            for key in [key for key in self.gcs.objects if key[1].startswith(f"{left}/")]:
                del self.gcs.objects[key]

        return act, check


def count_requests(gcs: FakeGcs, operations: Operations) -> dict[str, int]:
    """Return the number of requests of each operation without faults."""
    counts = {}
    for name, operation in operations.all().items():
        act, check = operation(f"gs://bucket/{name.replace(' ', '_')}")
        before = gcs.requests
        act()
        counts[name] = gcs.requests - before
        check(True)
    return counts


def run(
    gcs: FakeGcs, operations: Operations, requests: dict[str, int], seed: int
) -> tuple[str, str, str]:
    """Make the fault of a seed; return the operation, the kind of the fault and the outcome.

    Args:
      requests: the number of requests of each operation.
    """
    from mesh_transformer.util import InputError

    rng = random.Random(seed)
    name = rng.choice(sorted(operations.all()))
    folder = f"gs://bucket/seed_{seed}"
    act, check = operations.all()[name](folder)
    kind = rng.choice((*PASSING, *LASTING))
    count = 10**9 if kind in LASTING else rng.randint(1, MOST_FAILING)
    plan = Plan(kind, rng.randrange(requests[name]), count)
    gcs.fault, outcome = plan, "succeeded"
    began = time.monotonic()
    try:
        act()
    except InputError as error:
        line = str(error)
        assert "gs://bucket" in line, line
        assert "\n" not in line, line
        outcome = f"failed: {line}"
    finally:
        gcs.fault = lambda: None
    seconds = time.monotonic() - began
    assert seconds < LIMIT_SECONDS, f"{seconds:.0f} s"
    if outcome == "succeeded" and not plan.made:
        outcome = "ended before the fault"
    print(f"seed {seed}: {name}, {plan}: {outcome} in {seconds:.1f} s", flush=True)
    check(not outcome.startswith("failed"))
    if outcome.startswith("failed"):
        act()
        check(True)
    return name, str(kind), outcome.partition(":")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 200), metavar=("FIRST", "END"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, gcs_server(Path(folder)) as (gcs, environment):
        os.environ.update(environment | CLIENTS)
        operations = Operations(gcs, Path(folder))
        failed, outcomes = [], collections.Counter()
        requests = count_requests(gcs, operations)
        print(f"requests: {requests}")
        for seed in range(*args.seeds):
            try:
                outcomes[run(gcs, operations, requests, seed)] += 1
            except Exception as error:
                failed.append(seed)
                traceback.print_exc()
                print(f"seed {seed}: WRONG: {type(error).__name__}: {error}", flush=True)
        for key, count in sorted(outcomes.items()):
            print(f"{count:4} {', '.join(key)}")
        print(f"{sum(outcomes.values())} faults as expected, {len(failed)} not: {failed}")
        return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
