"""train.py as users run it: with local hosts and fake TPUs, interrupted, and with bad flags."""

import contextlib
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh_transformer.pod.tpu import install
from mesh_transformer.training.metrics import NAME
from tests.long.interruptions import ROOT, assert_same, command, last_step, training
from tests.support.fake_pod import FakePod
from tests.support.small_run import (
    assert_same_rows,
    mixed_values,
    rows_of,
    run_values,
    write_config,
)
from tests.support.waiting import SECONDS, wait_until

# Relative tolerance: f32 rounds to 6e-8, and sums over other processes are in a different order,
# over 30 updates.
OTHER_PROCESSES = 1e-5

TOKEN = "a-token-of-ray-that-nobody-else-may-see"
# The batch still grows when the last part of each run starts.
RAMP = {"gradient_accumulation_steps": 3, "batch_ramp_steps": 28}
# Versions of the run: the hosts read mixed and shuffled records, or the driver reads them, with
# ZeRO.
VERSIONS = {
    "1": functools.partial(mixed_values, hosts_read=True, **RAMP),
    "2": functools.partial(run_values, zero=1, **RAMP),
}
# For each version, (number of hosts, last step) pairs: each part of the run resumes from the
# previous part's checkpoint.
HOSTS = {"1": ((2, 20), (4, 24), (1, 27)), "2": ((4, 24),)}


def run_to_end(folder: Path, *words: str) -> None:
    with training(folder, *words) as run:
        assert run.process.wait(SECONDS) == 0, run.log.read_text()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_any_number_of_hosts_trains_like_one_process(tmp_path, monkeypatch, version):
    config = write_config(tmp_path / "config.json", VERSIONS[version](tmp_path))
    reference, model = tmp_path / "one", tmp_path / "many"

    def train_in_this_process(folder: Path) -> None:
        """Run device_train.py in this process."""
        words = ["--config", config, "--version", version, "--model-dir", str(folder)]
        monkeypatch.setattr("sys.argv", ["device_train.py", *words])
        runpy.run_path(str(ROOT / "device_train.py"))["main"]()

    train_in_this_process(reference)
    for hosts, steps in HOSTS[version]:
        flags = ("--version", version, "--max-steps", str(steps))
        run_to_end(model, *command(config, model, *flags, hosts=hosts))
    train_in_this_process(model)  # without a cluster

    actual, expected = rows_of(model), rows_of(reference)
    assert [row["step"] for row in actual] == list(range(1, 31))
    worst = 0.0
    for row, base in zip(actual, expected, strict=True):
        assert row.keys() == base.keys()
        for name in ("train/loss", "train/last_loss", "train/grad_norm", "val/loss_held_out"):
            if name in base:
                assert row[name] == pytest.approx(base[name], rel=OTHER_PROCESSES), row["step"]
                worst = max(worst, abs(row[name] / base[name] - 1))
    print(f"version {version}: largest relative difference {worst:.1e}")
    expected_hosts: list[int] = []
    for hosts, steps in (*HOSTS[version], (0, 30)):
        expected_hosts += [hosts] * (steps - len(expected_hosts))
    assert hosts_in_rows(model) == expected_hosts


def hosts_in_rows(folder: Path) -> list[int]:
    """Return how many hosts computed each step of a run, from its complete metrics rows."""
    lines = (folder / NAME).read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [sum(name.startswith("host_seconds/") for name in row) for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[str, Path]:
    """Return a config, and the folder of an uninterrupted run over two hosts."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(folder / "config.json", mixed_values(folder, shuffle_buffer="all"))
    run_to_end(folder / "model", *command(config, folder / "model"))
    return config, folder / "model"


@pytest.mark.slow
def test_stopped_or_killed_drivers_leave_no_processes_and_the_run_resumes(uninterrupted, tmp_path):
    config, expected = uninterrupted
    # From the second part on, the hosts read the records, which must be the same.
    values = json.loads(Path(config).read_text()) | {"hosts_read": True}
    hosts_read = write_config(tmp_path / "hosts_read.json", values)
    for step, number in ((9, signal.SIGKILL), (16, signal.SIGINT)):
        with training(tmp_path, *command(config, tmp_path)) as run:
            wait_until(lambda: last_step(tmp_path) >= step, f"step {step}")  # noqa: B023
            assert len(run.hosts()) == 2
            if number == signal.SIGINT:
                os.killpg(run.process.pid, number)  # as a terminal sends Ctrl-C
            else:
                run.process.send_signal(number)
            status = run.process.wait(SECONDS)
            run.assert_nothing_is_left()
            if number != signal.SIGKILL:
                assert status == 0
                output = run.log.read_text()
                saved = last_step(tmp_path)
                assert f"{number.name}: stopped and saved at step {saved}" in output
                assert (tmp_path / f"step_{saved}").is_dir()
        config = hosts_read
    run_to_end(tmp_path, *command(config, tmp_path))
    assert_same(tmp_path, expected)


def error_of(*words: str) -> str:
    """Run train.py, which must exit with status 2; return the last line of stderr."""
    process = subprocess.run(
        [sys.executable, "train.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert process.returncode == 2, process.stderr
    lines = process.stderr.strip().splitlines()
    return lines[-1]


@pytest.mark.slow
def test_invalid_settings_are_refused_before_the_run_starts(tmp_path):
    config = write_config(tmp_path / "config.json", run_values(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "metrics.jsonl").write_text("")
    base = ("--config", config, "--model-dir", str(tmp_path / "model"))
    assert "--local-hosts is 3, which does not divide the config's tpu_size 8" in error_of(
        *base, "--local-hosts", "3"
    )
    assert "a TPU needs a zone; give --tpu-zone" in error_of(*base, "--tpu", "pod")
    # The error is raised before --new deletes anything and before a TPU is created.
    tpu = ("--tpu", "pod", "--tpu-zone", "us-central2-b", "--ssh-key", str(tmp_path / "none"))
    assert "none is missing; create it with `ssh-keygen" in error_of(*base, *tpu, "--new", "--yes")
    assert "--queued requires --tpu" in error_of(*base, "--local-hosts", "2", "--queued")
    assert "--fresh-opt requires --tune-model-path" in error_of(
        *base, "--local-hosts", "2", "--fresh-opt"
    )
    assert "--new would delete metrics.jsonl in" in error_of(*base, "--local-hosts", "2", "--new")
    assert (tmp_path / "model" / "metrics.jsonl").is_file()
    # argparse requires exactly one of the two flags.
    assert "one of the arguments" in error_of(*base)
    assert "not allowed with" in error_of(*base, "--local-hosts", "2", "--tpu", "pod")


@pytest.fixture
def pod(tmp_path, monkeypatch) -> Iterator[FakePod]:
    """Yield a fake Google Cloud project that drivers started by the test use."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with FakePod(tmp_path) as project:
        for name, value in project.environment.items():
            monkeypatch.setenv(name, value)
        yield project


def on_tpu(config: str, folder: Path, pod: FakePod, *more: str) -> list[str]:
    """Return the command that runs train.py on a TPU."""
    run = ["train.py", "--config", config, "--model-dir", str(folder), "--heartbeat", "10"]
    tpu = ["--tpu", "pod", "--tpu-zone", "us-central2-b", "--preemptible"]
    return [*run, *tpu, *pod.flags, *more]


def command_lines() -> str:
    """Return the command lines of all processes, which every user of the machine can read."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has exited
            lines.append((process / "cmdline").read_text(errors="replace"))
    return "\n".join(lines)


def wait_for_progress(model: Path) -> int:
    """Wait until the run in a folder has advanced; return the step from which it did."""
    reached = last_step(model)
    wait_until(lambda: last_step(model) > reached, f"the run continues from {reached}")
    return reached


@pytest.mark.slow
def test_a_tpu_is_created_taken_over_preempted_recreated_and_deleted(uninterrupted, tmp_path, pod):
    """Train on a v4-16 with two hosts whose driver is killed and which is then preempted.

    The second driver is stopped by a signal.  The metrics match an uninterrupted run.
    """
    config, expected = uninterrupted
    model = tmp_path / "model"
    pod.switch_on(2, devices=4)
    drive = on_tpu(config, model, pod, "--tpu-generation", "v4")
    with training(model, *drive) as run:
        wait_until(lambda: last_step(model) >= 9, f"step 9; {run.log}")
        seen = command_lines()
        run.process.kill()
        run.process.wait()
        run.assert_nothing_is_left()
    assert [node.accelerator_type for node in pod.api.nodes.values()] == ["v4-16"]
    with training(model, *drive) as run:
        wait_for_progress(model)
        assert "taking over TPU 'pod'" in run.log.read_text()
        assert len(pod.processes("ray::NetworkRunner")) == 2  # none from the first driver
        assert pod.api.calls.count("CreateNode") == 1
        seen += command_lines()
        pod.switch_on(2, devices=4)  # hosts of the next TPU
        pod.preempt()
        wait_until(lambda: "restarting all hosts" in run.log.read_text(), "the failure is noticed")
        wait_for_progress(model)
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(SECONDS) == 0
        run.assert_nothing_is_left()
    output, saved = run.log.read_text(), last_step(model)
    assert f"SIGTERM: stopped and saved at step {saved}" in output
    assert not pod.api.nodes
    assert pod.api.calls.count("CreateNode") == 2
    rows, whole = rows_of(model), rows_of(expected)[:saved]
    if not any(key.startswith("val/") for key in rows[-1]):  # the signal can interrupt a validation
        whole[-1] = {key: value for key, value in whole[-1].items() if not key.startswith("val/")}
    assert rows == whole
    assert (model / f"step_{saved}").is_dir()
    # No log, command line or readable file contains a secret.
    seen += output + pod.commands() + pod.readable()
    secrets = [TOKEN, *pod.secrets, *(header.split()[-1] for header in pod.api.authorizations)]
    assert not [secret for secret in secrets if secret in seen]


@pytest.mark.slow
def test_a_smaller_tpu_continues_the_run_with_the_same_bits(tmp_path, pod):
    """A v4-16 is preempted, replaced by a v4-8 with half the hosts, and then by a v4-16 again."""
    changes = {"cores_per_replica": 2, "virtual_mesh": [4, 2], "total_steps": 10**6}
    config = write_config(tmp_path / "config.json", run_values(tmp_path, **changes))
    calm, lossy = tmp_path / "calm", tmp_path / "lossy"
    pod.switch_on(2, devices=4)
    drive = on_tpu(config, lossy, pod, "--tpu-generation", "v4", "--wait", "1")
    with training(lossy, *drive) as run:
        for hosts, without in ((1, {"v4-16"}), (2, set[str]())):
            wait_for_progress(lossy)
            pod.api.without_capacity = without
            pod.switch_on(hosts, devices=4)
            pod.preempt()
            wait_until(
                lambda hosts=hosts: hosts_in_rows(lossy)[-1:] == [hosts],
                f"{hosts} hosts; {run.log}",
            )
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(SECONDS) == 0, run.log.read_text()[-3000:]
    output = run.log.read_text()
    assert "TPU 'pod' is only a v4-8: using mesh 2x2 (bit-identical)" in output
    assert not pod.api.nodes
    run_to_end(calm, *command(config, calm, "--max-steps", str(last_step(lossy))))
    assert_same_rows(rows_of(lossy), rows_of(calm))


@pytest.mark.slow
def test_ctrl_c_while_the_tpu_is_created_deletes_it(uninterrupted, tmp_path, pod):
    pod.switch_on(1, devices=8)
    pod.api.ready_after = None
    with training(tmp_path / "model", *on_tpu(uninterrupted[0], tmp_path / "model", pod)) as run:
        wait_until(lambda: pod.api.nodes, "the TPU")
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.process.wait(SECONDS) == 130
        run.assert_nothing_is_left()
    assert not pod.api.nodes
    assert "Traceback" not in run.log.read_text()


@pytest.mark.slow
def test_a_host_that_cannot_start_ray_is_reported_and_the_tpu_is_deleted(
    uninterrupted, tmp_path, pod
):
    (broken,) = pod.switch_on(1, devices=8)
    ray = broken.home / install.FOLDER / "venv" / "bin" / "ray"
    ray.write_text("#!/bin/sh\necho one of many lines\necho no space left on device >&2\nexit 3\n")
    with training(tmp_path / "model", *on_tpu(uninterrupted[0], tmp_path / "model", pod)) as run:
        assert run.process.wait(SECONDS) == 1
        run.assert_nothing_is_left()
    lines = run.log.read_text().splitlines()
    assert f"[host 0 ({broken.address})] one of many lines" in lines
    assert lines[-1] == (
        f"error: host 0 ({broken.address}): 'install and start Ray' exited with status 3: "
        "no space left on device; giving up after 3 attempts to start the hosts"
    )
    assert not pod.api.nodes


@pytest.mark.slow
def test_a_second_ctrl_c_deletes_the_tpu_without_waiting_for_a_save(uninterrupted, tmp_path, pod):
    """The host is stopped by SIGSTOP, so the save would never finish."""
    pod.switch_on(1, devices=8)
    model = tmp_path / "model"
    with training(model, *on_tpu(uninterrupted[0], model, pod), "--heartbeat", "300") as run:
        wait_until(lambda: last_step(model) >= 3, f"step 3; {run.log}")
        (host,) = pod.processes("ray::NetworkRunner")
        os.kill(host, signal.SIGSTOP)
        os.killpg(run.process.pid, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(3)
        assert pod.api.nodes
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.process.wait(SECONDS) == 130
        run.assert_nothing_is_left()
    assert not pod.api.nodes
    assert "Traceback" not in run.log.read_text()
