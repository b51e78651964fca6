"""Trains over local hosts while they are killed, stopped or made to fail; checks what is left.

`python -m tests.long.interruptions hosts 12` and `... saves 20` are the long runs; the suite has
some of each.  Every run has to end by itself with the rows of an undisturbed run, bit for bit.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.checkpoint.native import Checkpoints
from mesh_transformer.config import Config
from mesh_transformer.pod import restarts
from mesh_transformer.training.metrics import NAME
from tests.support.multihost import random_batches, started
from tests.support.multihost import run as run_hosts
from tests.support.small_run import TIMES, VALUES, mixed_values, write_config
from tests.support.waiting import SECONDS, wait_until

ROOT = Path(__file__).parents[2]
HEARTBEAT = 10
LONGEST = 60.0  # until a run is further than it was when it was disturbed
KINDS = ("SIGKILL", "SIGSTOP", "exception")
SERVERS = ("gcs_server", "raylet")  # of Ray's head; their SIGKILL is a kind too
HOSTS = 2
PIDS = "pids.json"  # in the folder of a run by `drive`: its hosts' process ids, by rank


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics that are whole, less what the clock decides."""
    path = folder / NAME
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [
        {k: v for k, v in row.items() if k not in TIMES and not k.startswith("host_seconds/")}
        for row in rows
    ]


def last_step(folder: Path) -> int:
    return max((row["step"] for row in rows_of(folder)), default=0)


def members(session: int) -> dict[int, str]:
    """Linux: the live processes of a session and their titles."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.name)) == session:
                title = (path / "cmdline").read_bytes().split(b"\0")[0].decode()
                if title:  # a zombie has none
                    found[int(path.name)] = title
    return found


def sessions_of(driver: int) -> set[int]:
    """Linux: the sessions of the Ray heads among a process's children."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for child in map(int, Path(f"/proc/{driver}/task/{driver}/children").read_text().split()):
            # Others begin sessions too: wandb's server does.
            command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if os.getsid(child) == child and b"mesh_transformer.pod.ray_head" in command:
                found.add(child)
    return found


class Training:
    """A driver in a session of its own, and the Ray sessions that it starts."""

    def __init__(self, folder: Path, *command: str, cwd: Path = ROOT):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log.txt"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.sessions = {self.process.pid}  # its own, and those of Ray's heads

    def hosts(self) -> list[int]:
        """The host processes' ids, oldest first."""
        return self.ray_processes("ray::NetworkRunner")

    def ray_processes(self, name: str) -> list[int]:
        """The ids of those of Ray's processes that are called so, oldest first."""
        self.find_heads()
        found = self.members()
        return sorted(p for p, title in found.items() if os.path.basename(title).startswith(name))

    def find_heads(self) -> None:
        """Looks which heads there are, so that what they leave behind is seen later."""
        self.sessions |= sessions_of(self.process.pid)

    def members(self) -> dict[int, str]:
        """The live processes of all that it has started, and their titles."""
        return {pid: title for each in self.sessions for pid, title in members(each).items()}

    def end(self) -> None:
        """Kills whatever still runs."""
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def assert_nothing_is_left(self, seconds: float = 10.0) -> None:
        wait_until(lambda: not self.members(), "processes stay behind", seconds)


@contextlib.contextmanager
def training(folder: Path, *command: str, cwd: Path = ROOT) -> Iterator[Training]:
    run = Training(folder, *command, cwd=cwd)
    try:
        yield run
    finally:
        run.end()


def command(config: str, folder: Path, *more: str, hosts: int = HOSTS) -> list[str]:
    run = ["train.py", "--config", config, "--local-hosts", str(hosts)]
    return [*run, "--model-dir", str(folder), "--heartbeat", str(HEARTBEAT), *more]


def uninterrupted(folder: Path, **changes: Any) -> tuple[str, Path]:
    """A config and the folder of a whole run of it."""
    config = write_config(folder / "config.json", mixed_values(folder, **changes))
    with training(folder / "whole", *command(config, folder / "whole")) as run:
        assert run.process.wait(SECONDS) == 0, run.log.read_text()
        run.assert_nothing_is_left()
    return config, folder / "whole"


class Interruption(NamedTuple):
    """What befalls a run after a step: the host of a rank, or one of Ray's `SERVERS`."""

    kind: str
    step: int
    rank: int = 0


@dataclasses.dataclass
class Outcome:
    """What an interruption did: seconds until the run was further than before, and its words."""

    seconds: float
    said: str


def interrupt(
    config: str, whole: Path, folder: Path, interruptions: Sequence[Interruption]
) -> list[Outcome]:
    """Disturbs one run several times; checks that it mends itself, and ends as if undisturbed.

    There may be one exception among them.
    """
    words = ["-m", "tests.long.interruptions", "drive", config, str(folder)]
    words += [str(n) for each in interruptions if each.kind == "exception" for n in each[1:]]
    with training(folder, *words) as run:
        found = [_disturb(run, each, number) for number, each in enumerate(interruptions)]
        assert run.process.wait(SECONDS) == 0, run.log.read_text()
        run.assert_nothing_is_left()
    assert_same(folder, whole)
    return found


def _disturb(run: Training, wanted: Interruption, before: int) -> Outcome:
    """One of a run's interruptions, after so many others: what became of it."""
    folder, (kind, step, rank) = run.folder, wanted
    said_before = len(run.log.read_text())

    def said() -> str:
        return run.log.read_text()[said_before:]

    if kind == "exception":
        # The rows of the steps in flight before it are never written: the log tells of it.
        wait_until(lambda: "KeyError" in said(), "the exception")
        began = time.monotonic()
    else:
        wait_until(lambda: run.find_heads() or run.ray_processes("raylet"), "Ray")
        servers = run.ray_processes(kind)  # before the step, after which each millisecond counts
        wait_until(lambda: last_step(folder) >= step, f"step {step}; {run.log}")
        began = time.monotonic()
        if kind in SERVERS:
            os.kill(*servers, signal.SIGKILL)
        else:
            pids = json.loads((folder / PIDS).read_text())
            os.kill(pids[rank], getattr(signal, kind))
    wait_until(lambda: "restarting all hosts" in said(), f"failure {before + 1} is seen")
    reached = last_step(folder)
    wait_until(lambda: last_step(folder) > reached, "the run goes on")
    run.find_heads()  # another than before, where that has died
    seconds = time.monotonic() - began
    told = next(line for line in said().splitlines() if "host " in line and "error" not in line)
    if kind not in SERVERS:
        assert re.search(rf"host {rank}\b", told), told
    return Outcome(seconds, told.split("\r")[-1])


def assert_same(folder: Path, whole: Path) -> None:
    """All rows are those of the undisturbed run, to the bit: JSON keeps a float's every digit."""
    found, expected = rows_of(folder), rows_of(whole)
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == other


def drive(config: str, folder: str, step: int | None = None, rank: int = 0) -> None:
    """As train.py, and writes down which process has which rank.

    After `step`, once, the host of that rank gets a batch without `obs`: a KeyError there.
    """
    from mesh_transformer.pod.launch import build_model, local_machines

    loaded = Config.load(config)
    done = []

    def make(hosts: list[Any]) -> Any:
        cluster = build_model(loaded, hosts, heartbeat=HEARTBEAT)
        (Path(folder) / PIDS).write_text(json.dumps(cluster._pids))
        shares = cluster._shares

        def spoiled(batch: Any, axis: int = 0) -> Any:
            found = shares(batch, axis)
            if step is not None and cluster.step > step and axis == 1 and not done:
                done.append(step)
                found[rank][0].pop("obs")
            return found

        cluster._shares = spoiled
        return cluster

    with local_machines(loaded, HOSTS) as hosts:
        restarts.train(lambda: make(hosts()), folder)


def planned(count: int, seed: int) -> list[tuple[str, int, int]]:
    """So many interruptions (kind, step, rank), in an order and at steps that `seed` decides.

    Every kind befalls every rank in the first six, again in the next six, and so on.
    """
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        pairs = list(itertools.product(KINDS, range(HOSTS)))
        rng.shuffle(pairs)
        found += [(kind, rng.randint(1, 25), rank) for kind, rank in pairs]
    return found[:count]


def many_hosts(count: int, seed: int) -> None:
    """`count` interruptions at random steps, of every kind on every host."""
    plan = planned(count, seed)
    every = set(itertools.product(KINDS, range(HOSTS)))
    assert {(kind, rank) for kind, _, rank in plan} == every, f"give at least {len(every)}"
    with tempfile.TemporaryDirectory() as name:
        config, whole = uninterrupted(Path(name))
        for number, (kind, step, rank) in enumerate(plan):
            wanted = [Interruption(kind, step, rank)]
            (outcome,) = interrupt(config, whole, Path(name) / f"{number}", wanted)
            print(
                f"{kind} of host {rank} after step {step}: {outcome.seconds:.1f} s; {outcome.said}",
                flush=True,
            )
            assert outcome.seconds < LONGEST


def state_of(folder: Path, step: int) -> list[tuple[str, np.ndarray]]:
    """The arrays of a checkpoint, by path."""
    with Checkpoints(str(folder), read_only=True) as checkpoints:
        assert checkpoints.saved(step).aux["saved after"] == step
        return [
            ("/".join(path), np.asarray(checkpoints.saved(step).open_leaf(path)))
            for path in sorted(checkpoints.saved(step).leaves)
        ]


# What there is first, in a model folder of one step, as `step` is saved and the one before deleted.
MOMENTS = {
    "a folder": "step_{step}*",
    "data": "step_{step}.*/state.*/ocdbt.process_*/d/*",
    "all data": "step_{step}.*/state.*/d/*",
    "the arrays' commit file": "step_{step}.*/state*/commit_success.txt",
    "the commit file": "step_{step}/commit_success.txt",
    "a deletion": "step_{step}/commit_success.txt",
}
COMMIT = "commit_success.txt"


def has_reached(model: Path, moment: str, step: int) -> bool:
    """Whether a save of `step` is as far as that."""
    with contextlib.suppress(FileNotFoundError):  # what is moved or deleted meanwhile
        if moment == "a deletion" and (model / f"step_{step - 1}" / COMMIT).exists():
            return False
        return any(model.glob(MOMENTS[moment].format(step=step)))
    return False


def step_reached(model: Path, moment: str, first: int) -> int | None:
    """A step, `first` or one after it, whose save is as far as that: one may go by unseen."""
    with contextlib.suppress(FileNotFoundError):
        names = [re.match(r"step_(\d+)", path.name) for path in model.iterdir()]
        steps = sorted({int(name[1]) for name in names if name})
        return next((n for n in steps if n >= first and has_reached(model, moment, n)), None)
    return None


def interrupted_saves(
    folder: Path, count: int, seed: int = 0, last: int = 60, moments: Sequence[str] = (*MOMENTS,)
) -> Iterator[str]:
    """Kills one of two hosts in the midst of a save, `count` times; what became of each.

    What can be restored then has to be, to the bit, what an undisturbed run saved at that step;
    and the next hosts go on from it.  The kills fall shortly after each of the `moments` in turn.
    """
    rng = random.Random(seed)
    batches = random_batches(Config(**VALUES))
    saving = ("train_and_save", [str(folder / "whole_model"), last + 20])
    run_hosts(folder / "whole", VALUES | {"keep_n": 1000}, 2, batches, [("init", []), saving])
    model = folder / "model"
    saving = ("train_and_save", [str(model), 10**6])
    newest = 0
    for number in range(count):
        moment = moments[number % len(moments)]
        begin = ("restore", [str(model)]) if newest else ("init", [])
        config = VALUES | {"keep_n": 1}
        with started(folder / f"{number}", config, 2, batches, [begin, saving]) as hosts:
            # Far enough for a checkpoint before it, not beyond what there is to compare with.
            first = newest + rng.randint(2, max(2, (last - newest) // (count - number)))

            def reached() -> int | None:
                assert all(host.poll() is None for host in hosts), "a host has ended by itself"
                return step_reached(model, moment, first)  # noqa: B023

            wanted = wait_until(reached, moment, pause=0)
            time.sleep(rng.uniform(0, 0.005))
            # Only the first process commits and deletes.
            rank = 0 if "commit" in moment or "deletion" in moment else rng.randrange(2)
            hosts[rank].kill()
            hosts[rank].wait()
            there = what_is_there(model)
            time.sleep(rng.uniform(0, 0.5))  # what the other one may still write
        with Checkpoints(str(model), read_only=True) as checkpoints:
            newest = checkpoints.newest() or 0
        assert newest >= wanted - 1
        if newest:
            pairs = zip(
                state_of(model, newest),
                state_of(folder / "whole_model", newest),
                strict=True,
            )
            for (name, found), (other, expected) in pairs:
                assert name == other
                np.testing.assert_array_equal(found, expected)
        yield f"host {rank} killed after {moment} of step {wanted}: {there}; step {newest} is whole"


def what_is_there(model: Path) -> str:
    """The steps in a model folder: how many files each has, and whether it is committed."""
    found = []
    for path in sorted(model.glob("step_*")):
        files = sum(map(Path.is_file, path.rglob("*")))
        commit = "" if (path / COMMIT).exists() else " without commit"
        found.append(f"{path.name.partition('.')[0]} of {files} files{commit}")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("hosts", "saves", "drive"))
    parser.add_argument("rest", nargs="*")
    args = parser.parse_args()
    if args.what == "drive":
        config, folder, *raises = args.rest
        drive(config, folder, *map(int, raises))
    elif args.what == "hosts":
        count, seed = (*map(int, args.rest), *(12, 0)[len(args.rest) :])
        many_hosts(count, seed)
    else:
        count, seed = (*map(int, args.rest), *(20, 0)[len(args.rest) :])
        with tempfile.TemporaryDirectory() as name:
            for line in interrupted_saves(Path(name), count, seed):
                print(line, flush=True)


if __name__ == "__main__":
    main()
