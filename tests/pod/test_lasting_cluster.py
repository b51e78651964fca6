"""A cluster that outlives its hosts: when they are made anew, and when that is given up."""

from typing import Any

import numpy as np
import pytest

from mesh_transformer.pod import restarts
from mesh_transformer.pod.restarts import ATTEMPTS, LastingCluster
from mesh_transformer.util import HostError, InputError


class FakeCluster:
    """Its batch is its own number, or what its `error` says."""

    config, dp = "config", 2

    def __init__(self, number: int):
        self.number = number
        self.ended = False
        self.error: Exception | None = None

    def batch(self, rows: int) -> tuple[int, int]:
        if self.error is not None:
            self.ended = isinstance(self.error, HostError)
            raise self.error
        return self.number, rows

    eval = batch

    def score(self, tokens: np.ndarray, alternatives: int) -> np.ndarray:
        return tokens + alternatives * self.number

    def kill(self) -> None:
        self.ended = True


@pytest.fixture
def made(monkeypatch) -> list[FakeCluster]:
    monkeypatch.setattr(restarts, "SECONDS_BETWEEN", 0.0)
    return []


@pytest.fixture
def cluster(made) -> Any:
    def make() -> Any:
        made.append(FakeCluster(len(made)))
        return made[-1]

    return LastingCluster(make)


def test_hosts_are_made_anew_once_they_have_ended(cluster, made, capsys):
    assert (cluster.config, cluster.dp) == ("config", 2)
    assert cluster.batch(4) == cluster.batch(4) == (0, 4)
    made[0].ended = True
    assert cluster.batch(6) == (1, 6)
    assert cluster.score(np.zeros(2), 5).tolist() == [5, 5]
    made[1].error = HostError("host 1 died")  # in the call itself, while the engine was idle
    assert cluster.batch(6) == (2, 6)
    made[2].error = HostError("host 0 died")
    assert cluster.eval(5) == (3, 5)
    assert capsys.readouterr().err.splitlines() == [
        "restarting all hosts",
        "host 1 died",
        "restarting all hosts",
        "host 0 died",
        "restarting all hosts",
    ]
    cluster.close()
    assert [each.ended for each in made] == [True] * 4


def test_bad_input_ends_nothing(cluster, made):
    made[0].error = InputError("a batch of 3 rows")
    with pytest.raises(InputError, match="a batch of 3 rows"):
        cluster.batch(3)
    assert len(made) == 1


def test_new_hosts_that_fail_too_are_few(cluster, made):
    def fails() -> Any:
        made.append(FakeCluster(len(made)))
        raise HostError(f"attempt {len(made) - 1}")

    made[0].ended = True
    cluster._make = fails
    with pytest.raises(HostError, match=f"attempt {ATTEMPTS}"):
        cluster.batch(4)
    assert len(made) == 1 + ATTEMPTS


def test_once_closed_no_hosts_are_made(cluster, made):
    cluster.close()
    with pytest.raises(HostError, match="have been ended"):
        cluster.batch(1)
    assert len(made) == 1


def test_hosts_that_were_being_made_when_it_closed_end_too(cluster, made):
    made[0].ended = True
    make = cluster._make

    def slow() -> Any:
        cluster.close()  # as another thread does
        return make()

    cluster._make = slow
    cluster.batch(1)
    assert len(made) == 2
    assert made[1].ended
