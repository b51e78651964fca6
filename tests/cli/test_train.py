"""train.py as its users run it: over local hosts, interrupted, and what keeps it from beginning."""

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
from tests.long.interruptions import ROOT, assert_same, command, last_step, rows_of, training
from tests.support.fake_pod import FakePod
from tests.support.small_run import mixed_values, run_values, write_config
from tests.support.waiting import SECONDS, wait_until

# f32 rounds to 6e-8; on other processes sums are in another order, over 30 updates.
OTHER_PROCESSES = 1e-5

TOKEN = "a-token-of-ray-that-nobody-else-may-see"
# How it is split, and where its records are read: by the hosts, mixed and shuffled, or the driver.
VERSIONS = {
    "1": functools.partial(mixed_values, hosts_read=True),
    "2": functools.partial(run_values, zero=1),
}
# A run moves over so many hosts by its checkpoints, each time until such a step.
HOSTS = {"1": ((2, 20), (4, 24), (1, 27)), "2": ((4, 24),)}


def run_to_end(folder: Path, *words: str) -> None:
    with training(folder, *words) as run:
        assert run.process.wait(SECONDS) == 0, run.log.read_text()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_any_number_of_hosts_is_one_process(tmp_path, monkeypatch, version):
    config = write_config(tmp_path / "config.json", VERSIONS[version](tmp_path))
    one, many = tmp_path / "one", tmp_path / "many"

    def alone(folder: Path) -> None:
        """In this process, as device_train.py needs no other."""
        words = ["--config", config, "--version", version, "--model-dir", str(folder)]
        monkeypatch.setattr("sys.argv", ["device_train.py", *words])
        runpy.run_path(str(ROOT / "device_train.py"))["main"]()

    alone(one)
    for hosts, steps in HOSTS[version]:
        more = ("--version", version, "--max-steps", str(steps))
        run_to_end(many, *command(config, many, *more, hosts=hosts))
    alone(many)  # no cluster at all

    found, expected = rows_of(many), rows_of(one)
    assert [row["step"] for row in found] == list(range(1, 31))
    worst = 0.0
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for name in ("train/loss", "train/last_loss", "train/grad_norm", "val/loss_held_out"):
            if name in other:
                assert row[name] == pytest.approx(other[name], rel=OTHER_PROCESSES), row["step"]
                worst = max(worst, abs(row[name] / other[name] - 1))
    print(f"version {version}: largest relative difference {worst:.1e}")
    raw = [json.loads(line) for line in (many / "metrics.jsonl").read_text().splitlines()]
    hosts_told = [sum(name.startswith("host_seconds/") for name in row) for row in raw]
    wanted: list[int] = []
    for hosts, steps in (*HOSTS[version], (0, 30)):
        wanted += [hosts] * (steps - len(wanted))
    assert hosts_told == wanted


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[str, Path]:
    """A config, and the folder of a run over two hosts that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(folder / "config.json", mixed_values(folder))
    run_to_end(folder / "model", *command(config, folder / "model"))
    return config, folder / "model"


@pytest.mark.slow
def test_stopped_and_killed_drivers_leave_nothing_and_the_next_goes_on(whole, tmp_path):
    config, expected = whole
    # Read by the hosts from the second on, no record is another.
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
            status = run.process.wait(60)
            run.assert_nothing_is_left()
            if number != signal.SIGKILL:
                assert status == 0
                said = run.log.read_text()
                saved = last_step(tmp_path)
                assert f"{number.name}: stopped and saved at step {saved}" in said
                assert (tmp_path / f"step_{saved}").is_dir()
        config = hosts_read
    run_to_end(tmp_path, *command(config, tmp_path))
    assert_same(tmp_path, expected)


def refused(*words: str) -> str:
    """The one line with which train.py ends, with status 2."""
    found = subprocess.run(
        [sys.executable, "train.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert found.returncode == 2, found.stderr
    lines = found.stderr.strip().splitlines()
    return lines[-1]


def test_what_keeps_it_from_beginning(tmp_path):
    config = write_config(tmp_path / "config.json", run_values(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "metrics.jsonl").write_text("")
    base = ("--config", config, "--model-dir", str(tmp_path / "model"))
    assert "--local-hosts is 3, which does not divide the config's tpu_size 8" in refused(
        *base, "--local-hosts", "3"
    )
    assert "a TPU needs a zone; give --tpu-zone" in refused(*base, "--tpu", "pod")
    # It is said before --new deletes, and before anything is made.
    tpu = ("--tpu", "pod", "--tpu-zone", "us-central2-b", "--ssh-key", str(tmp_path / "none"))
    assert "none is missing; create it with `ssh-keygen" in refused(*base, *tpu, "--new", "--yes")
    assert "--queued requires --tpu" in refused(*base, "--local-hosts", "2", "--queued")
    assert "--fresh-opt requires --tune-model-path" in refused(
        *base, "--local-hosts", "2", "--fresh-opt"
    )
    assert "--new would delete metrics.jsonl in" in refused(*base, "--local-hosts", "2", "--new")
    assert (tmp_path / "model" / "metrics.jsonl").is_file()
    # argparse's own: one of them, not both.
    assert "one of the arguments" in refused(*base)
    assert "not allowed with" in refused(*base, "--local-hosts", "2", "--tpu", "pod")


@pytest.fixture
def pod(tmp_path, monkeypatch) -> Iterator[FakePod]:
    """A project where drivers started from here find their TPUs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with FakePod(tmp_path) as project:
        for name, value in project.environment.items():
            monkeypatch.setenv(name, value)
        yield project


def on_tpu(config: str, folder: Path, pod: FakePod, *more: str) -> list[str]:
    """train.py as on a pod."""
    run = ["train.py", "--config", config, "--model-dir", str(folder), "--heartbeat", "10"]
    tpu = ["--tpu", "pod", "--tpu-zone", "us-central2-b", "--preemptible"]
    return [*run, *tpu, *pod.flags, *more]


def command_lines() -> str:
    """What anybody on this machine can see of all processes."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            found.append((process / "cmdline").read_text(errors="replace"))
    return "\n".join(found)


def goes_on(model: Path) -> int:
    """Waits until the run in a folder is further than now; the step where it was."""
    reached = last_step(model)
    wait_until(lambda: last_step(model) > reached, f"the run goes on from {reached}")
    return reached


@pytest.mark.slow
def test_a_tpu_is_made_taken_over_taken_away_made_again_and_deleted(whole, tmp_path, pod):
    """A v4-16 of two hosts loses its driver, then is preempted; each row is as without.

    The first driver is killed outright, and the second stopped.
    """
    config, expected = whole
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
        goes_on(model)
        assert "taking over TPU 'pod'" in run.log.read_text()
        assert len(pod.processes("ray::NetworkRunner")) == 2  # and none of the first driver's
        assert pod.api.calls.count("CreateNode") == 1
        seen += command_lines()
        pod.switch_on(2, devices=4)  # those of the next TPU
        pod.preempt()
        wait_until(lambda: "restarting all hosts" in run.log.read_text(), "the failure is seen")
        goes_on(model)
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(60) == 0
        run.assert_nothing_is_left()
    said, saved = run.log.read_text(), last_step(model)
    assert f"SIGTERM: stopped and saved at step {saved}" in said
    assert not pod.api.nodes
    assert pod.api.calls.count("CreateNode") == 2
    assert rows_of(model) == rows_of(expected)[:saved]
    assert (model / f"step_{saved}").is_dir()
    # No log, command line or file that others can read has what lets one in.
    seen += said + pod.commands() + pod.readable()
    secrets = [TOKEN, *pod.secrets, *(each.split()[-1] for each in pod.api.authorizations)]
    assert not [secret for secret in secrets if secret in seen]


@pytest.mark.slow
def test_ctrl_c_while_the_tpu_is_made_deletes_it(whole, tmp_path, pod):
    pod.switch_on(1, devices=8)
    pod.api.ready_after = None
    with training(tmp_path / "model", *on_tpu(whole[0], tmp_path / "model", pod)) as run:
        wait_until(lambda: pod.api.nodes, "the TPU")
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.process.wait(60) == 130
        run.assert_nothing_is_left()
    assert not pod.api.nodes
    assert "Traceback" not in run.log.read_text()


@pytest.mark.slow
def test_a_host_that_cannot_start_ray_is_heard_and_the_tpu_deleted(whole, tmp_path, pod):
    (broken,) = pod.switch_on(1, devices=8)
    ray = broken.home / install.FOLDER / "venv" / "bin" / "ray"
    ray.write_text("#!/bin/sh\necho one of many lines\necho no space left on device >&2\nexit 3\n")
    with training(tmp_path / "model", *on_tpu(whole[0], tmp_path / "model", pod)) as run:
        assert run.process.wait(SECONDS) == 1
        run.assert_nothing_is_left()
    lines = run.log.read_text().splitlines()
    assert f"[host 0 ({broken.address})] one of many lines" in lines
    assert lines[-1] == (
        f"error: host 0 ({broken.address}): 'install and start Ray' exited with status 3: "
        "no space left on device; giving up after 3 attempts to start the first hosts"
    )
    assert not pod.api.nodes


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_a_save_but_deletes_the_tpu(whole, tmp_path, pod):
    """Its host is stopped, and would never save."""
    pod.switch_on(1, devices=8)
    model = tmp_path / "model"
    with training(model, *on_tpu(whole[0], model, pod), "--heartbeat", "300") as run:
        wait_until(lambda: last_step(model) >= 3, f"step 3; {run.log}")
        (host,) = pod.processes("ray::NetworkRunner")
        os.kill(host, signal.SIGSTOP)
        os.killpg(run.process.pid, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(3)
        assert pod.api.nodes
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.process.wait(30) == 130
        run.assert_nothing_is_left()
    assert not pod.api.nodes
    assert "Traceback" not in run.log.read_text()
