"""`RestartingCluster`: when it replaces its hosts, and when it gives up."""

from typing import Any

import numpy as np
import pytest

from mesh_transformer.generation.batch import NewBatch, Score
from mesh_transformer.network import Eval
from mesh_transformer.pod import restarts
from mesh_transformer.pod.restarts import ATTEMPTS, RestartingCluster
from mesh_transformer.util import HostError, InputError

BATCH, EVAL = NewBatch(4, None, 0), Eval({})
SCORE = Score(np.zeros((1, 2), np.uint32), 5, None, 0)


class FakeCluster:
    """A cluster whose calls return its number, or raise `error` if it is set."""

    config, dp, batch_size, adapters = "config", 2, 4, 0

    def __init__(self, number: int):
        self.number = number
        self.ended = False
        self.error: Exception | None = None

    def run(self, call: Any) -> Any:
        if self.error is not None:
            self.ended = isinstance(self.error, HostError)
            raise self.error
        return self.number, call

    def kill(self) -> None:
        self.ended = True


@pytest.fixture
def clusters(monkeypatch) -> list[FakeCluster]:
    monkeypatch.setattr(restarts, "SECONDS_BETWEEN", 0.0)
    return []


@pytest.fixture
def cluster(clusters) -> Any:
    def make() -> Any:
        clusters.append(FakeCluster(len(clusters)))
        return clusters[-1]

    return RestartingCluster(make)


def test_hosts_are_replaced_after_a_failure(cluster, clusters, capsys):
    assert (cluster.config, cluster.dp) == ("config", 2)
    assert cluster.run(BATCH) == cluster.run(BATCH) == (0, BATCH)
    clusters[0].ended = True
    assert cluster.run(BATCH) == (1, BATCH)
    assert cluster.run(SCORE) == (1, SCORE)
    clusters[1].error = HostError("host 0 died")
    with pytest.raises(HostError, match="host 0 died"):  # the caller has to make a new batch
        cluster.run(SCORE)
    clusters[1].ended, clusters[1].error = False, None
    clusters[1].error = HostError("host 1 died")  # raised by the call itself
    assert cluster.run(BATCH) == (2, BATCH)
    clusters[2].error = HostError("host 0 died")
    assert cluster.run(EVAL) == (3, EVAL)
    assert capsys.readouterr().err.splitlines() == [
        "restarting all hosts",
        "host 1 died",
        "restarting all hosts",
        "host 0 died",
        "restarting all hosts",
    ]
    cluster.close()
    assert [fake.ended for fake in clusters] == [True] * 4


def test_bad_input_does_not_replace_the_hosts(cluster, clusters):
    clusters[0].error = InputError("a batch of 3 rows")
    with pytest.raises(InputError, match="a batch of 3 rows"):
        cluster.run(BATCH)
    assert len(clusters) == 1


def test_number_of_failed_replacements_is_limited(cluster, clusters):
    def fails() -> Any:
        clusters.append(FakeCluster(len(clusters)))
        raise HostError(f"attempt {len(clusters) - 1}")

    clusters[0].ended = True
    cluster._make = fails
    with pytest.raises(HostError, match=f"attempt {ATTEMPTS}"):
        cluster.run(BATCH)
    assert len(clusters) == 1 + ATTEMPTS


def test_no_hosts_are_started_after_close(cluster, clusters):
    cluster.close()
    with pytest.raises(HostError, match="have been shut down"):
        cluster.run(BATCH)
    assert len(clusters) == 1


def test_hosts_that_start_during_close_are_ended(cluster, clusters):
    clusters[0].ended = True
    make = cluster._make

    def slow() -> Any:
        cluster.close()  # as another thread does
        return make()

    cluster._make = slow
    cluster.run(BATCH)
    assert len(clusters) == 2
    assert clusters[1].ended
