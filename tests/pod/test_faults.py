"""Faults of machines on local hosts, beside another Ray: each is survived, or one clear line."""

import contextlib
import functools
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_transformer
from mesh_transformer.config import Config
from mesh_transformer.network import Train
from mesh_transformer.pod import ray_head, restarts
from mesh_transformer.pod.faults import PermanentError
from mesh_transformer.pod.launch import build_model, local_machines
from mesh_transformer.pod.runner import (
    PACKAGE_VERSION,
    MeshPlace,
    NetworkRunner,
    check_versions,
    versions,
)
from mesh_transformer.util import HostError, InputError
from tests.conftest import random_batch
from tests.long.interruptions import members, sessions_of
from tests.support.small_run import VALUES, assert_same_rows, rows_of, run_values
from tests.support.waiting import wait_until

CONFIG = Config(**VALUES)
HEARTBEAT = 20  # enough for hosts that a busy machine holds up


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_is_in_use_is_one_line(taken):
    """Without the check, jaxlib ends the process by a segmentation fault."""
    address, line = f"127.0.0.1:{taken}", rf"^port {taken} at 127\.0\.0\.1, which JAX's coordinator"
    for bind in (None, "127.0.0.1"):
        place = MeshPlace("127.0.0.1", address, 2, 10, bind=bind)
        with pytest.raises(HostError, match=line):
            NetworkRunner(0).start(VALUES, place)


@pytest.mark.parametrize("seed", range(5))
def test_a_host_with_another_version_is_named(seed):
    rng = random.Random(seed)
    names = [f"host {rank} (10.0.0.{rank + 2})" for rank in range(rng.randint(2, 4))]
    reports = {name: versions() for name in names}
    check_versions(reports)
    what, odd = rng.choice([*versions()]), rng.choice(names)
    reports[odd][what] = "0.0.1"
    first = "the driver" if what == PACKAGE_VERSION else next(name for name in names if name != odd)
    with pytest.raises(InputError) as error:
        check_versions(reports)
    line = str(error.value)
    assert line.startswith(f"{what} is ")
    assert f"0.0.1 on {odd}" in line
    assert f"{versions()[what] or 'missing'} on {first}" in line
    assert line.endswith("; install the same version on all of them")


@pytest.fixture(scope="module")
def other_ray() -> Iterator[int]:
    """The process id of another Ray head on this machine, which RAY_ADDRESS names."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    command = [sys.executable, "-m", "mesh_transformer.pod.ray_head", str(80 << 20)]
    pipes: Any = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    pipes |= {"stderr": subprocess.DEVNULL, "text": True}
    for _ in range(4):  # on a busy machine, a start may exceed Ray's limits of 15 and 30 s
        with (
            subprocess.Popen(command, env=variables, start_new_session=True, **pipes) as head,
            pytest.MonkeyPatch.context() as patch,
        ):
            assert head.stdin is not None
            assert head.stdout is not None
            if address := head.stdout.readline().removeprefix("address: ").strip():
                patch.setenv("RAY_ADDRESS", address)
                yield head.pid
            head.stdin.close()
            ray_head._kill_session(head.pid)
        if address:
            return
    raise AssertionError("the other Ray does not start")


@pytest.fixture(scope="module")
def machines(other_ray, tmp_path_factory) -> Iterator[Any]:
    """Hosts beside another Ray; they can import this package only from where it is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        with local_machines(CONFIG, 2) as hosts:
            yield hosts


@pytest.mark.slow
def test_another_ray_on_the_machine_is_left_alone(machines, other_ray):
    import ray

    assert os.environ["RAY_ADDRESS"]
    before = members(other_ray)

    @ray.remote(num_cpus=0)
    def cluster() -> str:
        return ray.get_runtime_context().gcs_address

    actual = {ray.get_runtime_context().gcs_address, ray.get(cluster.remote())}
    assert len(actual) == 1
    assert os.environ["RAY_ADDRESS"] not in actual
    assert len(ray.nodes()) == 1
    with contextlib.closing(build_model(CONFIG, machines(), heartbeat=100)) as network:
        network.init()
        assert np.isfinite(float(network.train(random_batch(CONFIG, 2, 4))["loss"]))
    assert members(other_ray).items() >= before.items()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["another version", "not importable"])
def test_a_host_that_runs_another_version_is_refused(machines, monkeypatch, tmp_path, kind):
    from mesh_transformer.pod import hosts

    package = tmp_path / "mesh_transformer"
    shutil.copytree(Path(mesh_transformer.__file__).parent, package)
    path = package / ("__init__.py" if kind == "another version" else "pod/runner.py")
    with path.open("a") as file:
        file.write("# edited\n" if kind == "another version" else "import no_such_package\n")
    variables, started = hosts._variables, []

    def other(host: Any) -> dict[str, str]:
        started.append(host)
        return variables(host) | ({"PYTHONPATH": str(tmp_path)} if len(started) == 2 else {})

    monkeypatch.setattr(hosts, "_variables", other)
    own = versions()[PACKAGE_VERSION]
    if kind == "another version":
        error, line = InputError, r"^the version of mesh_transformer \(digest .* on the driver, "
        line += r"host 0 \(127\.0\.0\.1\), but .* on host 1 \(127\.0\.0\.1\); install the same"
    else:
        error = PermanentError
        line = r"^host 1 died at its start: .*No module named 'no_such_package'"
    with pytest.raises(error, match=line) as caught:
        build_model(CONFIG, machines())
    assert "\n" not in str(caught.value)
    assert own is not None
    assert own in str(caught.value) or kind == "not importable"


def late(value: Any, seconds: float) -> Any:
    """Return an object in place of `value`, with which a host is slow to begin its call."""

    def after_a_while(value: Any) -> Any:  # inside a function, so that hosts need no tests
        time.sleep(seconds)
        return value

    class Late:
        def __reduce__(self) -> Any:
            return after_a_while, (value,)

    return Late()


def suspend(pid: int, seconds: float) -> threading.Thread:
    """Suspend a process for some seconds, or until it is killed."""
    process = os.pidfd_open(pid)
    signal.pidfd_send_signal(process, signal.SIGSTOP)

    def resume() -> None:
        select.select([process], [], [], seconds)  # returns at once when the process ends
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGCONT)

    thread = threading.Thread(target=resume)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_run_survives_a_taken_port_and_slow_and_suspended_hosts(
    machines, other_ray, monkeypatch, tmp_path, taken, capfd
):
    config = Config(**run_values(tmp_path, ckpt_every=2, total_steps=24, val_batches=0))
    restarts.train(lambda: build_model(config, machines(), heartbeat=100), str(tmp_path / "whole"))
    capfd.readouterr()
    (head,) = sessions_of(os.getpid()) - {other_ray}
    threads: list[threading.Thread] = []
    attempts: list[Any] = []
    suspensions = {9: 4.0, 14: 200.0}  # for less than the heartbeat, and for more

    def suspend_new(before: set[int]) -> None:
        (pid, *_) = wait_until(lambda: runners() - before, "a host's process")
        threads.append(suspend(pid, 30.0))

    def runners() -> set[int]:
        titles = members(head).items()
        return {pid for pid, title in titles if title.startswith("ray::NetworkRunner")}

    def make() -> Any:
        if not attempts:
            attempts.append(None)
            with monkeypatch.context() as patch:
                name = "mesh_transformer.pod.cluster.TPUCluster._coordinator"
                patch.setattr(name, lambda cluster: f"127.0.0.1:{taken}")
                return build_model(config, machines(), heartbeat=HEARTBEAT)
        starting = threading.Thread(target=suspend_new, args=(runners(),))
        if len(attempts) == 1:
            starting.start()
        cluster = build_model(config, machines(), heartbeat=HEARTBEAT)
        attempts.append(cluster)
        if len(attempts) == 2:
            starting.join()
            submit, read = cluster._submit, cluster.read
            monkeypatch.setattr(cluster, "_submit", functools.partial(slow_submit, cluster, submit))
            monkeypatch.setattr(cluster, "read", functools.partial(observed_read, cluster, read))
        return cluster

    def slow_submit(cluster: Any, submit: Any, method: str, *arguments: Any) -> Any:
        if method == "run" and isinstance(arguments[1][0], Train) and cluster.step == 6:
            arguments = arguments[0], (late(arguments[1][0], 35.0),)
        return submit(method, *arguments)

    def observed_read(cluster: Any, read: Any, reading: Any) -> Any:
        values = read(reading)
        if seconds := suspensions.pop(reading.step, None):
            threads.append(suspend(cluster._pids[1], seconds))
        return values

    restarts.train(make, str(tmp_path / "run"))
    for thread in threads:
        thread.join()
    assert len(threads) == 3
    assert len(attempts) == 3
    printed = capfd.readouterr().err
    assert printed.count("restarting all hosts in") == 2
    assert "has been taken by another program\nrestarting all hosts in" in printed
    assert "host 1 does not answer\nrestarting all hosts in" in printed
    assert_same_rows(rows_of(tmp_path / "run"), rows_of(tmp_path / "whole"))
    wait_until(lambda: not runners(), "end of all hosts")
