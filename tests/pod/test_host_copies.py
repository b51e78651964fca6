"""Copies of the state in the memory of hosts: restarts without storage."""

import contextlib
import dataclasses
import os
import signal
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.pod import ray_head
from mesh_transformer.pod.keeper import Keeper
from mesh_transformer.pod.launch import build_model, local_machines, new_copies
from mesh_transformer.util import HostError
from tests.conftest import random_batch
from tests.long.recoveries import kill_keeper
from tests.support.small_run import VALUES
from tests.support.waiting import wait_until

CONFIG = Config(**VALUES, memory_every=2)
OTHER_PROCESSES = 1e-5  # as in test_cluster


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    with local_machines(CONFIG, 2) as hosts:
        yield hosts


@contextlib.contextmanager
def cluster_of(hosts: list[Any], copies: Any) -> Iterator[Any]:
    cluster = build_model(CONFIG, hosts, heartbeat=30, copies=copies)
    try:
        yield cluster
    finally:
        cluster.kill()


def end_keeper(keeper: Any) -> None:
    """Kill a keeper's process, and wait until Ray knows that it has ended."""
    kill_keeper(keeper)
    wait_until(lambda: _is_gone(keeper), "the end of a keeper")


def _is_gone(keeper: Any) -> bool:
    import ray
    from ray import exceptions

    try:
        ray.get(keeper.pid.remote(), timeout=5)
    except exceptions.RayActorError:
        return True
    except exceptions.GetTimeoutError:
        pass
    return False


def train(cluster: Any, step: int) -> float:
    return float(cluster.train(random_batch(CONFIG, 2, 4, seed=step))["loss"])


@pytest.mark.slow
def test_a_state_in_memory_survives_a_host_and_moves_to_other_hosts(machines, tmp_path, capfd):
    copies = new_copies(CONFIG)
    assert copies is not None
    folder = str(tmp_path / "model")
    with cluster_of(machines(), copies) as cluster:
        cluster.init()
        train(cluster, 1)
        assert cluster.keep({"place": 1}) == ""
        train(cluster, 2)
        assert cluster.keep({"place": 2}) == ""
        cluster.call("wait_for_copies")
        expected = [train(cluster, 3), train(cluster, 4)]
        os.kill(cluster._pids[1], signal.SIGKILL)
        end_keeper(copies.keepers[1])
        with pytest.raises(HostError, match="host 1 died"):
            train(cluster, 5)

    four = [dataclasses.replace(host, devices=2) for host in machines() for _ in range(2)]
    with cluster_of(four, copies) as cluster:
        aux = cluster.restore(folder)
        assert (aux["place"], aux["unsaved"], cluster.step) == (2, True, 2)
        assert Config.from_dict(aux["config"]) == CONFIG
        assert "from step 2 in the hosts' memory" in capfd.readouterr().err
        actual = [train(cluster, 3), train(cluster, 4)]
        assert actual == pytest.approx(expected, rel=OTHER_PROCESSES)
        # A saved step that is newer is preferred to the copy.
        cluster.save(folder, {"place": 4})
        cluster.wait()
        assert cluster.restore(folder)["place"] == 4
        assert cluster.step == 4

    for keeper in copies.keepers[:2]:  # both copies of some blocks
        end_keeper(keeper)
    copies.place(four)
    assert copies.newest() is None


@pytest.mark.slow
def test_a_copy_that_is_not_complete_is_reported_and_not_used(machines):
    copies = new_copies(CONFIG)
    assert copies is not None
    with cluster_of(machines(), copies) as cluster:
        cluster.init()
        train(cluster, 1)
        assert cluster.keep({"place": 1}) == ""
        cluster.call("wait_for_copies")
        end_keeper(copies.keepers[0])
        train(cluster, 2)
        cluster.keep({"place": 2})
        train(cluster, 3)
        assert "Actor" in cluster.keep({"place": 3})  # of step 2; keeper 0 has been replaced
        cluster.call("wait_for_copies")
        newest = copies.newest()
        assert newest is not None
        assert newest.aux["place"] == 3
        assert cluster.keep({"place": 3}) == ""


@pytest.mark.parametrize(
    ("held", "newest"),
    [
        ([{1: 2}, {1: 2}], None),  # two of three blocks
        ([{1: 2, 0: 3}, {1: 2, 0: 3}], 20),
        ([{1: 3, 0: 3}, {}], 40),
        ([{}, None], None),  # a keeper that does not answer
        ([{0: 3}, None], 20),
        ([{7: 3}, {}], None),  # a copy of another run
    ],
)
def test_the_newest_complete_copy_is_chosen(held, newest, local_copies, monkeypatch):
    copies = local_copies
    copies._kept = {0: (20, {"place": 20}), 1: (40, {"place": 40})}
    answers = {
        rank: {number: (3, [("block", n) for n in range(count)]) for number, count in own.items()}
        for rank, own in enumerate(held)
        if own is not None
    }
    monkeypatch.setattr(copies, "_answers", lambda call: answers)
    found = copies.newest()
    assert (None if found is None else found.step) == newest
    assert found is None or found.aux == {"place": newest}


class LocalKeeper:
    """A keeper in this process, with the methods of Ray's handle."""

    def __init__(self) -> None:
        self.keeper = Keeper()

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(remote=getattr(self.keeper, name))


@pytest.fixture
def local_copies(monkeypatch) -> Any:
    """Copies with two keepers in this process, without Ray's servers."""
    ray_head._require_token()  # Ray must not be imported before this
    copies = new_copies(CONFIG)
    assert copies is not None
    copies.keepers = [LocalKeeper(), LocalKeeper()]
    monkeypatch.setattr(copies, "_answers", lambda call: {k: call(k) for k in copies.keepers})
    return copies


def keep(copies: Any, step: int, blocks: int = 3) -> None:
    """Keep the first blocks of a state of three; the copy is complete if that is all of them."""
    number = copies.begin(step, {"place": step})
    for keeper in copies.keepers:
        for name in range(blocks):
            keeper.keeper.keep(number, 3, name, np.full(4, step, np.uint8))
    if blocks == 3:
        copies.complete()


def place_of(copies: Any) -> int | None:
    copy = copies.newest()
    return None if copy is None else copy.aux["place"]


def test_the_complete_copy_stays_until_the_next_is_complete(local_copies):
    for step in (10, 20, 30):
        keep(local_copies, step)
    keep(local_copies, 40, blocks=2)
    assert [len(keeper.keeper.held()) for keeper in local_copies.keepers] == [2, 2]
    assert place_of(local_copies) == 30


def test_copies_of_a_lost_attempt_are_not_mixed_with_new_ones(local_copies, tmp_path, capsys):
    keep(local_copies, 180)
    keep(local_copies, 190, blocks=2)
    # All machines are replaced, and the run resumes from a checkpoint.
    local_copies.keepers[:] = [LocalKeeper(), LocalKeeper()]
    assert local_copies.newer_than_saved(str(tmp_path)) is None
    assert "no complete copy is left in the hosts' memory" in capsys.readouterr().err
    keep(local_copies, 110)
    keep(local_copies, 120, blocks=1)
    assert place_of(local_copies) == 110
    # An attempt ends while it sends a step, and the next one sends the same step.
    keep(local_copies, 120, blocks=1)
    assert place_of(local_copies) == 110
    number = local_copies.begin(120, {"place": 120})
    for keeper in local_copies.keepers:
        for name in (1, 2):  # with what the first attempt sent, these would be all
            keeper.keeper.keep(number, 3, name, np.zeros(4, np.uint8))
    assert place_of(local_copies) == 110


def test_a_copy_that_cannot_be_restored_is_given_up(local_copies, tmp_path, capsys):
    keep(local_copies, 10)
    offers = [local_copies.newer_than_saved(str(tmp_path)) for _ in range(3)]
    assert [offer is not None for offer in offers] == [True, True, False]
    assert "step 10 in the hosts' memory is not restored a third time" in capsys.readouterr().err
    keep(local_copies, 20)
    assert local_copies.newer_than_saved(str(tmp_path)) is not None
