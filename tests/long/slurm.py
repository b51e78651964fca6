"""Runs the batch script of docs/slurm.md on a Slurm cluster of one node, on this machine.

Needs root and Debian's packages slurm-wlm and munge; takes about seven minutes:

    python -m tests.long.slurm

Each case is a job of its own with two tasks, which ends in another way.  The job must be queued
again, or not, as the page says, and a job that was queued again must end with the rows of a run
that was not disturbed.  Only `--nodes` and `--ntasks-per-node` differ from the page; the node
pretends to have GPUs, and JAX uses CPU devices.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mesh_transformer.training import run_status
from tests.support.multihost import ROOT, free_port
from tests.support.pages import blocks
from tests.support.small_run import assert_same_rows, rows_of, run_values, write_config
from tests.support.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo", "squeue")
TASKS, GPUS = 2, 8
STEPS, SEEN = 60, 15  # of each run, and after which it is disturbed
SECONDS = 600.0  # for a job to end, its time in the queue included
CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
MinJobAge=3600
KillWait=60
ReturnToService=2
NodeName={host} CPUs={tasks} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=low Nodes={host} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=high Nodes={host} MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""
SOURCE = """
def infinite(cross_entropy):
    return cross_entropy / 0.0
"""


class Case(NamedTuple):
    """A job, and how it must end.

    Attributes:
      changes: keys of its config.
      disturb: called with the cluster and the job's number after some steps; None for nothing.
      status: the job's exit status in the end.
      restarts: how often it is queued again.
    """

    changes: dict[str, Any]
    disturb: "Callable[[Cluster, str], None] | None"
    status: int
    restarts: int


class Cluster:
    """A Slurm cluster of this machine; its files are in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        host = socket.gethostname()
        (folder / "munge").mkdir(mode=0o755)
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        names = {"host": host, "ports": (free_port(), free_port()), "folder": folder}
        text = CONFIG.format(**names, tasks=TASKS, gpus=GPUS)
        (folder / "slurm.conf").write_text(text)
        for number in range(GPUS):
            (folder / f"gpu{number}").touch()
        gpus = f"NodeName={host} Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n"
        (folder / "gres.conf").write_text(gpus)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(8 // TASKS),
        }

    def call(self, *words: str) -> str:
        result = subprocess.run(
            words, env=self.environment, cwd=self.folder, capture_output=True, text=True
        )
        assert not result.returncode, f"{words}: {result.stderr}"
        return result.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm says of a job, by name."""
        return dict(re.findall(r"(\w+)=(\S+)", self.call("scontrol", "show", "job", number)))

    def cancel(self) -> None:
        """Cancel all jobs, whose processes would outlive the servers."""
        self.call("scancel", "--user=root")
        wait_until(lambda: not self.call("squeue", "-h"), "the jobs end", 120, 0.5)

    def submit(self, folder: Path, script: Path, *flags: str) -> str:
        own = (f"--chdir={folder}", f"--output={folder}/log", "--parsable", *flags)
        return self.call("sbatch", *own, str(script)).strip()

    def tasks(self, folder: Path) -> list[int]:
        """Return the ids of the processes that train in a folder, in ascending order."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes()
                is_task = b"--every-host" in words and b"srun" not in words
                if is_task and os.readlink(path / "cwd") == str(folder):
                    found.append(int(path.name))
        return sorted(found)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Run a cluster whose files are in a folder; its servers end with the `with` block."""
    own = Cluster(folder)
    key, munge = folder / "munge/key", folder / "munge"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = [f"--{name}-file={munge}/{name}" for name in ("key", "log", "pid", "seed")]
    servers = (
        ["munged", "--foreground", "--force", f"--socket={munge}/socket", *files],
        ["slurmctld", "-D"],
        ["slurmd", "-D"],
    )
    with contextlib.ExitStack() as stack:
        for command in servers:
            log = stack.enter_context((folder / f"{command[0]}.out").open("w"))
            process = subprocess.Popen(
                command, env=own.environment, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            if command[0] == "munged":
                wait_until((munge / "socket").exists, "munged listens", 60)
        wait_until(lambda: "idle" in own.call("sinfo", "-h", "-o", "%T"), "the node is idle", 120)
        stack.callback(own.cancel)
        yield own


def warn(cluster: Cluster, job: str) -> None:
    """Send the signal that Slurm sends before the time limit, by --signal=TERM@300."""
    cluster.call("scancel", "--signal=TERM", job)


def preempt(cluster: Cluster, job: str) -> None:
    """Submit a job of higher priority, for which Slurm preempts the other one."""
    script = cluster.folder / "other.sh"
    script.write_text("#!/bin/bash\nsleep 5\n")
    cluster.submit(cluster.folder, script, "--partition=high", f"--ntasks={TASKS}")


def requeue(cluster: Cluster, job: str) -> None:
    """Queue the job again, as an administrator does."""
    cluster.call("scontrol", "requeue", job)


def kill(cluster: Cluster, job: str) -> None:
    """Kill one of the job's tasks."""
    folder = (cluster.folder / f"job{job}").resolve()
    os.kill(cluster.tasks(folder)[-1], signal.SIGKILL)


CASES = {
    "ends": Case({}, None, 0, 0),
    "nan": Case({"token_loss": "source:infinite"}, None, 3, 0),
    "bad input": Case({"no_such_key": 1}, None, 2, 0),
    "time limit": Case({}, warn, 0, 1),
    "killed task": Case({}, kill, 0, 1),
    "preempted": Case({}, preempt, 0, 1),
    "requeued": Case({}, requeue, 0, 1),
}


def run(cluster: Cluster, name: str, case: Case, values: dict[str, Any]) -> str:
    """Run a case, check how it ends, and return a line about it."""
    folder = cluster.folder / name.replace(" ", "_")
    folder.mkdir()
    (folder / "source.py").write_text(SOURCE)
    write_config(folder / "config.json", values | case.changes)
    (text,) = (block.text for block in blocks("docs/slurm.md") if "#SBATCH" in block.text)
    (folder / "job.sh").write_text(text)
    began = time.monotonic()
    job = cluster.submit(folder, folder / "job.sh", "--nodes=1", f"--ntasks-per-node={TASKS}")
    (cluster.folder / f"job{job}").symlink_to(folder)
    metrics = folder / "run" / "metrics.jsonl"
    if case.disturb is not None:
        wait_until(
            lambda: metrics.exists() and metrics.read_text().count("\n") >= SEEN,
            f"step {SEEN} of {name}",
            SECONDS,
        )
        case.disturb(cluster, job)
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    wait_until(lambda: cluster.job(job)["JobState"] in ended, f"the end of {name}", SECONDS, 1.0)
    facts = cluster.job(job)
    line = f"{name}: {facts['JobState']}, exit status {facts['ExitCode']}, "
    line += f"restarts {facts['Restarts']}, {time.monotonic() - began:.0f} s"
    log = (folder / "log").read_text()
    assert facts["ExitCode"] == f"{case.status}:0", f"{line}\n{log[-3000:]}"
    assert int(facts["Restarts"]) == case.restarts, f"{line}\n{log[-3000:]}"
    if case.status == 0:
        assert run_status.read(str(folder / "run"))["state"] == "complete"
        assert_same_rows(rows_of(folder / "run"), rows_of(cluster.folder / "ends" / "run"))
    return line


def main() -> None:
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking or os.geteuid():
        print(f"skipped: this needs root, and {', '.join(lacking) or 'nothing else'}")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        values = run_values(folder, total_steps=STEPS, ckpt_every=20, val_every=30)
        values |= {"bucket": "./", "model_dir": "run"}
        with cluster(folder) as own:
            for case in sys.argv[1:] or CASES:
                print(run(own, case, CASES[case], values), flush=True)


if __name__ == "__main__":
    main()
