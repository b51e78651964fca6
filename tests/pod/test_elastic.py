"""Runs that shrink when a host is lost for good, and grow when it returns."""

import random

import pytest

from mesh_transformer.config import Config
from mesh_transformer.pod.elastic import largest_fit
from tests.conftest import SMALL
from tests.long.elastic import VIRTUAL, Loss, elastic_run
from tests.support.small_run import assert_same_rows, rows_of


@pytest.mark.parametrize(
    ("present", "mesh", "hosts", "rows"),
    [(4, (4, 2), 4, 3), (3, (2, 2), 2, 6), (2, (2, 2), 2, 6), (1, (1, 2), 1, 12)],
)
def test_a_smaller_mesh_keeps_mp_and_the_microbatch(present, mesh, hosts, rows):
    config = Config(**SMALL, tpu_size=8, cores_per_replica=2, per_replica_batch=3)
    fit = largest_fit(config, 4, present)
    assert str(fit) == f"mesh {mesh[0]}x{mesh[1]} on {hosts} hosts"
    changes = {"tpu_size": mesh[0] * mesh[1], "per_replica_batch": rows}
    assert fit == (hosts, config.replace(**changes))


def test_mp_is_reduced_only_where_one_replica_has_too_few_devices():
    config = Config(**SMALL, tpu_size=8, cores_per_replica=8)
    meshes = [str(largest_fit(config, 4, present)) for present in (4, 3, 2, 1)]
    assert meshes == [
        "mesh 1x8 on 4 hosts", "mesh 1x4 on 2 hosts", "mesh 1x4 on 2 hosts", "mesh 1x2 on 1 hosts"
    ]  # fmt: skip


def test_any_number_of_remaining_hosts_allows_a_mesh_with_the_same_microbatch():
    rng = random.Random(0)
    for _ in range(200):
        hosts, devices = rng.randrange(1, 9), rng.choice([1, 2, 3, 4, 8])
        size = hosts * devices
        mp = rng.choice([n for n in range(1, size + 1) if size % n == 0])
        batch, dp = rng.randrange(1, 4), size // mp
        config = Config(
            **SMALL | {"tpu_size": size, "cores_per_replica": mp, "per_replica_batch": batch}
        )
        for present in range(1, hosts + 1):
            fit = largest_fit(config, hosts, present)
            assert fit.hosts <= present
            assert fit.config.tpu_size == fit.hosts * devices
            assert fit.config.tpu_size is not None
            smaller_dp = fit.config.tpu_size // fit.config.cores_per_replica
            assert fit.config.per_replica_batch * smaller_dp == batch * dp
        assert largest_fit(config, hosts, hosts) == (hosts, config)


def test_a_virtual_mesh_keeps_its_sequences_per_replica():
    config = Config(**SMALL | {"tpu_size": 8, "cores_per_replica": 2, "virtual_mesh": [8, 8]})
    assert largest_fit(config, 4, 3) == (2, config.replace(tpu_size=4))


@pytest.mark.slow
def test_a_run_that_loses_a_host_for_good_and_gets_it_back_has_the_same_bits(tmp_path, capfd):
    (tmp_path / "calm").mkdir()
    (tmp_path / "lossy").mkdir()
    elastic_run(tmp_path / "calm", [], 30, **VIRTUAL)
    attempts = elastic_run(tmp_path / "lossy", [Loss(7, 16, 1)], 30, **VIRTUAL)
    print(*attempts, sep="\n")
    assert [attempt.hosts for attempt in attempts] == [4, 2, 4]
    assert attempts[1].first == 5
    assert attempts[2].again == 0
    rows = rows_of(tmp_path / "lossy" / "model")
    assert_same_rows(rows, rows_of(tmp_path / "calm" / "model"))
    errors = capfd.readouterr().err
    assert "3 of 4 hosts are there: training on mesh 2x2 on 2 hosts (every bit" in errors
    assert "mesh 4x2 on 4 hosts is possible again" in errors
