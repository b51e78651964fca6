"""The hosts of each attempt of a run: which failures end the run, and which are retried."""

import dataclasses
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from mesh_transformer.config import Config
from mesh_transformer.pod import launch
from mesh_transformer.pod.tpu.api import PreemptedError, UnavailableError
from mesh_transformer.pod.tpu.spec import SshOptions, TpuSpec
from mesh_transformer.util import HostError, InputError, StoppedError
from tests.conftest import SMALL

CONFIG = Config(**SMALL | {"tpu_size": 8})
PLACE = ("1.0.0.1", "1.0.0.2")


class Present(NamedTuple):
    """Stands for `elastic.Present`, whose module would import Ray into the test process."""

    hosts: list[Any]
    config: Config
    missing: str


class Machines:
    """A fake TPU, Ray head and set of joined hosts in one object, which records its calls.

    `plan` maps the name of a method to its next outcomes: an error to raise, or None.
    """

    address = "1.0.0.9:6379"
    spec = types.SimpleNamespace(max_hours=None)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.plan: dict[str, list[Exception | None]] = {}
        self.joined = False
        self.only: list[str] | None = None  # the hosts of the last `start_ray`

    def __enter__(self) -> "Machines":
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append("end")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        error = self.plan[name].pop(0) if self.plan.get(name) else None
        if error is not None:
            raise error

    def revive(self) -> None:
        self._call("revive")

    def check(self) -> None:
        self._call("check")

    def recreate(self) -> None:
        self.joined = False
        self._call("recreate")

    def hosts(self) -> list[str]:
        return list(PLACE)

    def start_ray(self, address: str, token: str, only: list[str] | None) -> None:
        assert address == self.address
        assert token == "token"
        self.only = only
        self._call("start_ray")
        self.joined = True

    def missing_hosts(self, addresses: list[str]) -> list[str]:
        return [] if self.joined else [addresses[1]]

    def joined_hosts(self, addresses: list[str], seconds: float = 300.0) -> list[Any]:
        if not self.joined:
            raise HostError(f"host {addresses[0]} has not joined")
        return [types.SimpleNamespace(address=address) for address in addresses]


@pytest.fixture
def machines(monkeypatch) -> Machines:
    fake = Machines()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token")
    monkeypatch.setattr(launch, "RayHead", lambda size: fake)
    # Replaces the real module, which would import Ray into the test process.
    hosts = types.SimpleNamespace(joined_hosts=fake.joined_hosts, missing_hosts=fake.missing_hosts)
    monkeypatch.setitem(sys.modules, "mesh_transformer.pod.hosts", hosts)
    return fake


@pytest.fixture
def attempt(machines) -> Iterator[Callable[[], list[str]]]:
    """A function that requests the hosts once and returns the calls that this made."""
    tpu: Any = machines
    with launch._tpu_machines(CONFIG, tpu) as hosts:

        def once() -> list[str]:
            machines.calls.clear()
            assert [host.address for host in hosts()] == list(PLACE)
            return list(machines.calls)

        yield once
    assert machines.calls[-2:] == ["end", "end"]


def test_ray_is_started_once_and_again_after_hosts_have_left(machines, attempt):
    assert attempt() == ["revive", "check", "start_ray"]
    assert machines.only is None
    assert attempt() == ["revive", "check"]
    machines.joined = False
    assert attempt() == ["revive", "check", "start_ray"]
    assert machines.only == [PLACE[1]]  # the other host still has its copies of the state


def test_preempted_tpu_is_recreated_and_its_hosts_started(machines, attempt):
    attempt()
    machines.plan["check"] = [PreemptedError("gone")]
    assert attempt() == ["revive", "check", "recreate", "start_ray"]


@pytest.mark.parametrize("error", [HostError("cut off"), StoppedError("exited with status 1")])
def test_two_failures_of_the_first_start_are_retried(machines, attempt, error):
    machines.plan["start_ray"] = [error, error]
    for _ in range(2):
        with pytest.raises(HostError, match=str(error)):
            attempt()
    assert attempt() == ["revive", "check", "start_ray"]
    # After that, it counts like any other failure.
    machines.joined = False
    machines.plan["start_ray"] = [error] * 5
    for _ in range(5):
        with pytest.raises(HostError, match=str(error)):
            attempt()


def test_run_ends_if_its_hosts_never_join(machines, attempt):
    machines.plan["start_ray"] = [HostError("no SSH on port 22")] * 3
    for _ in range(2):
        with pytest.raises(HostError):
            attempt()
    with pytest.raises(StoppedError, match="no SSH on port 22; giving up after 3 at") as caught:
        attempt()
    assert not isinstance(caught.value, HostError)


def test_run_is_asked_to_end_after_max_hours(machines, monkeypatch, capsys):
    """The run gets SIGTERM, at which it saves; a run that ends earlier gets no signal."""
    monkeypatch.setattr(machines, "spec", types.SimpleNamespace(max_hours=0.05 / 3600))
    received, ended = [], threading.Event()

    def receive(number: int, frame: object) -> None:
        received.append(number)
        ended.set()

    before = signal.signal(signal.SIGTERM, receive)
    tpu: Any = machines
    try:
        with launch._tpu_machines(CONFIG, tpu):
            assert ended.wait(60)
        assert "--max-hours" in capsys.readouterr().err
        monkeypatch.setattr(machines, "spec", types.SimpleNamespace(max_hours=1000.0))
        with launch._tpu_machines(CONFIG, tpu):
            timers = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
            assert len(timers) == 1
        timers[0].join(60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_hosts_preempted_before_they_join_are_recreated(machines, attempt):
    machines.plan = {"start_ray": [HostError("cut off")], "check": [None, PreemptedError("gone")]}
    with pytest.raises(HostError, match="cut off"):
        attempt()
    machines.plan["check"] = [PreemptedError("gone")]
    assert attempt() == ["revive", "check", "recreate", "start_ray"]


@pytest.mark.parametrize("error", [HostError("cut off"), PreemptedError("gone")])
def test_failed_restart_of_hosts_that_had_joined_is_retried(machines, attempt, error):
    attempt()
    machines.joined = False
    machines.plan["start_ray"] = [error]
    with pytest.raises(HostError, match=str(error)):
        attempt()
    assert attempt() == ["revive", "check", "start_ray"]


@pytest.mark.parametrize("error", [HostError("no SSH"), StoppedError("exited with status 143")])
def test_recreated_tpu_may_need_two_attempts_to_start(machines, attempt, error):
    attempt()
    machines.plan = {"check": [PreemptedError("gone")], "start_ray": [error]}
    with pytest.raises(HostError, match=str(error)):
        attempt()
    assert attempt() == ["revive", "check", "start_ray"]


def test_failure_caused_by_preemption_is_retried(machines, attempt):
    failed = StoppedError("exited with status 143")
    machines.plan = {"start_ray": [failed], "check": [None, PreemptedError("gone")]}
    with pytest.raises(HostError, match="status 143"):
        attempt()


@pytest.mark.parametrize("name", ["check", "recreate"])
def test_unavailable_api_is_retried(machines, attempt, name):
    attempt()
    machines.plan = {"check": [PreemptedError("gone")]} | {name: [UnavailableError("silence")]}
    with pytest.raises(HostError, match="silence"):
        attempt()
    machines.joined = False
    assert attempt()[-1] == "start_ray"


@pytest.mark.parametrize("error", [StoppedError("not ready"), InputError("no rights")])
def test_permanent_error_ends_the_run(machines, attempt, error):
    machines.plan["check"] = [error]
    with pytest.raises(type(error)) as caught:
        attempt()
    assert caught.value is error


def test_smaller_tpu_trains_on_a_smaller_mesh(machines, monkeypatch):
    fake_elastic = types.SimpleNamespace(Present=Present)
    monkeypatch.setitem(sys.modules, "mesh_transformer.pod.elastic", fake_elastic)
    tpu: Any = machines
    specs = [TpuSpec("pod", "us-central2-b", kind) for kind in ("v4-16", "v4-8")]
    config = CONFIG.replace(cores_per_replica=2)
    with launch._smaller_tpus(config, tpu) as hosts:
        machines.spec = specs[0]
        found = hosts()
        assert (found.config, found.missing) == (config, "")
        machines.plan["check"] = [PreemptedError("gone")]
        machines.spec = specs[1]
        found = hosts()
        assert machines.calls[-2:] == ["recreate", "start_ray"]
        rows = 2 * config.per_replica_batch
        assert (found.config.tpu_size, found.config.cores_per_replica) == (4, 2)
        assert found.config.per_replica_batch == rows
        assert found.missing == "TPU 'pod' is only a v4-8"
        assert hosts.larger_mesh(1) == ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["v4-8", "v4-4", "v4-2"]),
        ({"cores_per_replica": 4}, ["v4-8"]),
        ({"norm": "layernorm-desync", "cores_per_replica": 2}, ["v4-8", "v4-4"]),
    ],
)
def test_only_types_on_which_the_run_can_continue_are_requested(
    monkeypatch, capsys, changes, expected
):
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(launch, "TpuVm", lambda spec, **options: made.append(options))
    spec = TpuSpec("pod", "us-central2-b", "v4-16")
    launch.smaller_tpus(CONFIG.replace(**changes), spec, 60.0)
    assert made[0]["smaller"] == expected
    assert f"no v4-16 for 60 s: {', '.join(expected)}\n" in capsys.readouterr().err
    assert made[0]["limits"].smaller_after == 60.0
    with pytest.raises(InputError, match="--wait cannot be combined with --queued"):
        launch.smaller_tpus(CONFIG, dataclasses.replace(spec, queued=True), 60.0)


def test_local_nodes_grow_only_if_more_can_be_used(machines, monkeypatch):
    head: Any = machines
    nodes = launch.LocalNodes(CONFIG.replace(cores_per_replica=2), head, list("abcd"), 1.0)
    for present, used, mesh in ((0, 1, ""), (1, 1, ""), (2, 1, "2x2"), (3, 2, ""), (4, 2, "4x2")):
        monkeypatch.setattr(nodes, "present", lambda present=present: present)
        line = nodes.larger_mesh(used)
        expected = f"{present} of 4 hosts are present again, which allows mesh {mesh}"
        assert line == (expected if mesh else "")


def test_wrong_tpu_size_and_missing_ssh_key_are_refused_at_once():
    spec = TpuSpec("pod", "us-central2-b", "v4-8")
    with pytest.raises(InputError, match="v4-8 has 4 devices, but the config's tpu_size is 8"):
        launch.tpu_machines(CONFIG, spec)
    with pytest.raises(InputError, match="SSH key nowhere is missing"):
        launch.tpu_machines(
            CONFIG, TpuSpec("pod", "us-central2-b", "v4-16"), SshOptions(key_file="nowhere")
        )
