"""Trains while the disk fills, the bucket fails and wandb is killed; checks that nothing is lost.

`python -m tests.long.faults bucket` and `... folder` take some minutes each.  The test suite does
not run them.  With `bucket`, the model folder is in a fake gs:// bucket and the local copy of the
metrics on a small disk; with `folder`, both are on the disk.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.fake_gcs import FakeGcs, gcs_server
from tests.support.small_run import VALUES, assert_same_rows, rows_of, run_values, write_config
from tests.support.waiting import SECONDS

ROOT = Path(__file__).resolve().parents[2]
FIRST = 30  # steps before the first fault
GAP = (11, 16)  # steps from the end of a fault to the next one
LENGTH = (1, 6)  # duration of a fault in steps
COMPLETE_WITHIN = 10  # steps after the end of a fault
DISK = "32m"  # a step takes about 2 MB of it
STATUSES = (403, 429, 500, 503)


class Fault(NamedTuple):
    """A fault from the start of step `begin` to the start of step `end`.

    Faults of the bucket instead last `end - begin` times the pace.
    """

    kind: str  # "disk", "wandb", or a status that the bucket returns
    begin: int
    end: int


def planned(kinds: list[str], count: int, seed: int) -> list[Fault]:
    rng = random.Random(seed)
    faults, step = [], FIRST
    while len(faults) < count:
        kind = rng.choice(kinds)
        if kind == "bucket":
            kind = str(rng.choice(STATUSES))
        end = step + rng.randint(*LENGTH)
        faults.append(Fault(kind, step, end))
        step = end + rng.randint(*GAP)
    return faults


def drive(folder: str, config: str, model: str, pace: float) -> None:
    """Run device_train.py with the faults in `plan.json`; writes the current step to `progress`."""
    import device_train
    from mesh_transformer.transformer_shard import CausalTransformer
    from mesh_transformer.util import run_script

    place = Path(folder)
    plan = [Fault(*values) for values in json.loads((place / "plan.json").read_text())]
    junk, status = place / "disk" / "junk", place / "status"
    train, reached = CausalTransformer.train, [0]
    ended: dict[int, int] = {}  # maps the first step of a fault to the step at its end

    def begin(fault: Fault) -> None:
        if fault.kind == "disk":
            room = os.statvfs(junk.parent)
            with contextlib.suppress(OSError), junk.open("wb", buffering=0) as file:
                file.write(b"x" * (room.f_bavail * room.f_frsize))
                while file.write(b"x" * 512):
                    pass
        elif fault.kind == "wandb":
            for pid in _wandb_processes(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            status.write_text(fault.kind)
            # Ended by a timer, because a step may wait for the storage.
            threading.Timer(pace * (fault.end - fault.begin), end, [fault]).start()

    def end(fault: Fault) -> None:
        if fault.kind == "disk":
            junk.unlink()
        elif fault.kind != "wandb":
            status.unlink()
            ended[fault.begin] = reached[0]
            (place / "ended.json").write_text(json.dumps(ended))

    def disturbed(self: Any, sample: Any) -> Any:
        step = reached[0] = self.step + 1
        for fault in plan:
            if fault.end == step and fault.kind == "disk":
                end(fault)
            if fault.begin == step:
                begin(fault)
        written = place / "progress.new"
        written.write_text(str(step))
        written.replace(place / "progress")
        time.sleep(pace)
        return train(self, sample)

    CausalTransformer.train = disturbed
    sys.argv = ["device_train.py", "--config", config, "--model-dir", model]
    run_script(device_train.main)


def _wandb_processes(root: int) -> list[int]:
    """Return the wandb processes among a process's descendants."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    parents = {}
    for line in listed.splitlines():
        pid, parent, command = line.split(maxsplit=2)
        parents[int(pid)] = (int(parent), command)
    pids = []
    for pid, (_, command) in parents.items():
        ancestor = pid
        while ancestor in parents and ancestor != root:
            ancestor = parents[ancestor][0]
        if ancestor == root and pid != root and "wandb" in command:
            pids.append(pid)
    return pids


def newest_in_bucket(gcs: FakeGcs) -> int:
    with gcs.lock:
        names = [name for _, name in gcs.objects]
    steps = [re.fullmatch(r"run/step_(\d+)/commit_success.txt", name) for name in names]
    return max((int(match[1]) for match in steps if match), default=0)


def newest_in(folder: Path) -> int:
    steps = [path.parent.name for path in folder.glob("step_*/commit_success.txt")]
    return max((int(name[5:]) for name in steps if name[5:].isdigit()), default=0)


def follow(process: subprocess.Popen, progress: Path, newest: Callable[[], int]) -> dict[int, int]:
    """Return, by step, the newest complete checkpoint at the start of that step."""
    saved: dict[int, int] = {}
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            step = int(progress.read_text())
            if step not in saved:
                saved[step] = newest()
                print(f"\rstep {step}, saved {saved[step]}  ", end="", flush=True)
        time.sleep(0.01)
    print()
    return saved


def check(plan: list[Fault], newest: dict[int, int], stores: set[str], every: int) -> None:
    """Check that few steps were ever at risk, and that a save followed soon after each fault."""
    bad = [fault for fault in plan if fault.kind in stores]
    at_risk = [
        step - saved
        for step, saved in newest.items()
        if not any(fault.begin <= step < fault.end + COMPLETE_WITHIN for fault in bad)
        and step > 2 * every
    ]
    print(f"steps at risk while storage worked: {max(at_risk)} at most (saved every {every})")
    assert max(at_risk) <= 2 * every
    waits = []
    for fault in bad:
        before = newest[fault.end]
        after = next((s for s in sorted(newest) if s > fault.end and newest[s] > before), None)
        assert after is not None, fault
        waits.append(after - fault.end)
    print(f"steps from a fault's end to the next complete save: {sorted(waits)}")
    assert all(wait <= COMPLETE_WITHIN for wait in waits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("where", choices=("bucket", "folder", "drive"))
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--faults", type=int, default=30, help="(30)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument(
        "--pace", type=float, default=0.5, help="seconds to wait at each step (0.5)"
    )
    args = parser.parse_args()
    if args.where == "drive":
        folder, config, model = args.rest
        drive(folder, config, model, args.pace)
        return
    in_bucket = args.where == "bucket"
    plan = planned(["disk", "wandb", *["bucket"] * in_bucket], args.faults, args.seed)
    for fault in plan:
        print(*fault)
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gcs, environment = stack.enter_context(gcs_server(place))
        disk = place / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)]
        subprocess.run(mount, check=True)
        stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=True)
        steps = plan[-1].end + COMPLETE_WITHIN + 5
        values = run_values(place, total_steps=steps, anneal_steps=steps - 3, keep_n=2)
        config = write_config(place / "config.json", values | {"wandb_project": "faults"})
        environment = os.environ | environment | {"JAX_PLATFORMS": "cpu", "WANDB_MODE": "offline"}
        environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
        environment |= {"PYTHONPATH": str(ROOT), "WANDB_DIR": str(place)}
        whole = ["device_train.py", "--config", config, "--model-dir", str(place / "whole")]
        quiet = environment | {"WANDB_MODE": "disabled"}
        subprocess.run([sys.executable, *whole], cwd=ROOT, env=quiet, check=True)

        status = place / "status"

        def failing() -> int | None:
            with contextlib.suppress(FileNotFoundError, ValueError):
                return int(status.read_text())
            return None

        gcs.fault = failing
        (place / "plan.json").write_text(json.dumps(plan))
        model = "gs://bucket/run" if in_bucket else str(disk / "model")
        command = ["-m", "tests.long.faults", "drive", str(place), config, model]
        log = (place / "log.txt").open("w")
        stack.enter_context(log)
        process = subprocess.Popen(
            [sys.executable, *command, "--pace", str(args.pace)],
            cwd=disk,  # where the local copy of the metrics is
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        watchdog = threading.Timer(SECONDS + steps * (args.pace + 5), process.kill)
        watchdog.start()
        stack.callback(watchdog.cancel)
        newest = follow(
            process,
            place / "progress",
            (lambda: newest_in_bucket(gcs)) if in_bucket else (lambda: newest_in(disk / "model")),
        )
        log_lines = (place / "log.txt").read_text().replace("\r", "\n").splitlines()
        lines = [line for line in log_lines if line.strip() and "%|" not in line]
        lines = [line for line in lines if "validation loss" not in line and "s/step" not in line]
        print(*lines, sep="\n")
        assert process.returncode == 0, process.returncode
        if in_bucket:
            metrics = gcs.objects["bucket", "run/metrics.jsonl"].content
            (place / "uploaded").mkdir()
            (place / "uploaded" / "metrics.jsonl").write_bytes(metrics)
            rows = rows_of(place / "uploaded")
        else:
            rows = rows_of(disk / "model")
        assert_same_rows(rows, rows_of(place / "whole"))
        print(f"{len(rows)} rows, the undisturbed run's to the bit")
        stores = {"disk"} if not in_bucket else set(map(str, STATUSES))
        if in_bucket:
            ended = json.loads((place / "ended.json").read_text())
            plan = [fault._replace(end=ended.get(str(fault.begin), fault.end)) for fault in plan]
        check(plan, newest, stores, VALUES["ckpt_every"])
        shutil.rmtree(place / "whole")


if __name__ == "__main__":
    main()
