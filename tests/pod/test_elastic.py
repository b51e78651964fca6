"""Runs that shrink when a host is lost for good, and grow when it returns."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mesh_transformer.checkpoint.source import Source
from mesh_transformer.cli import pod
from mesh_transformer.config import Config
from mesh_transformer.evaluation import validation
from mesh_transformer.pod.fit import largest_fit, mesh_name
from mesh_transformer.training import loop
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import HostError, InputError
from tests.conftest import SMALL
from tests.long.elastic import (
    VIRTUAL,
    Attempt,
    Loss,
    assert_close_rows,
    elastic_config,
    elastic_run,
)
from tests.support.small_run import assert_same_rows, rows_of


@pytest.mark.parametrize(("present", "dp", "rows"), [(4, 4, 3), (3, 2, 6), (2, 2, 6), (1, 1, 12)])
def test_a_smaller_mesh_keeps_mp_and_the_microbatch(present, dp, rows):
    config = Config(**SMALL, tpu_size=8, cores_per_replica=2, per_replica_batch=3)
    fit = largest_fit(config, sizes(2, present))
    changes = {"tpu_size": 2 * dp, "per_replica_batch": rows}
    assert fit == config.replace(val_batch_multiplier=fit.val_batch_multiplier, **changes)


def sizes(devices: int, present: int) -> list[int]:
    """Return the sizes of meshes over at most `present` hosts with `devices` devices each."""
    return [devices * count for count in range(1, present + 1)]


def test_mp_is_reduced_only_where_one_replica_has_too_few_devices():
    config = Config(**SMALL, tpu_size=8, cores_per_replica=8)
    meshes = [mesh_name(largest_fit(config, sizes(2, present))) for present in (4, 3, 2, 1)]
    assert meshes == ["mesh 1x8", "mesh 1x4", "mesh 1x4", "mesh 1x2"]


@pytest.mark.slow
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
            fit = largest_fit(config, sizes(devices, present))
            assert fit.tpu_size in sizes(devices, present)
            smaller_mp = fit.cores_per_replica
            assert fit.per_replica_batch * (fit.tpu_size // smaller_mp) == batch * dp
            held = [n for n in range(1, present + 1) if n * devices % mp == 0]
            one_replica = held and dp % (held[0] * devices // mp) == 0
            assert smaller_mp == mp if one_replica else smaller_mp < mp
        assert largest_fit(config, sizes(devices, hosts)) == config


def test_a_virtual_mesh_keeps_its_sequences_per_replica():
    config = Config(**SMALL | {"tpu_size": 8, "cores_per_replica": 2, "virtual_mesh": [8, 8]})
    assert largest_fit(config, sizes(2, 3)) == config.replace(tpu_size=4)


@pytest.mark.parametrize("multiplier", [0.1, 0.5, 1.0, 1.5, 2.9])
@pytest.mark.parametrize("batch", [1, 3, 10])
def test_validation_batches_keep_their_sequences(multiplier, batch):
    def scored(config: Config) -> int:
        dp = (config.tpu_size or 0) // 2
        network: Any = SimpleNamespace(
            config=config, dp=dp, batch_size=dp * config.per_replica_batch
        )
        return validation.batch_size(network)

    shape = {"tpu_size": 16, "cores_per_replica": 2, "per_replica_batch": batch}
    config = Config(**SMALL | shape | {"val_batch_multiplier": multiplier})
    for present in range(1, 9):
        assert scored(largest_fit(config, sizes(2, present))) == scored(config)


def test_mp_is_kept_if_the_parameters_depend_on_it():
    config = Config(**SMALL | {"tpu_size": 8, "cores_per_replica": 4, "norm": "layernorm-desync"})
    assert mesh_name(largest_fit(config, sizes(2, 3))) == "mesh 1x4"
    with pytest.raises(
        HostError, match=r"^2 devices are present, which is too few for cores_per_rep"
    ):
        largest_fit(config, sizes(2, 1))


def test_wait_requires_training(monkeypatch):
    arguments = ["--config", "tiny", "--wait", "5", "--local-hosts", "2", "--mode", "eval"]
    monkeypatch.setattr("sys.argv", ["pod", *arguments])
    with pytest.raises(InputError, match=r"^--wait requires training, but --mode is eval"):
        pod.parse_args()


@pytest.fixture
def runs(tmp_path) -> Callable[..., list[Attempt]]:
    """Return a function that trains a run that loses a host, and the same run in this process."""

    def train(loss: Loss, **keys: Any) -> list[Attempt]:
        for name in ("calm", "lossy"):
            (tmp_path / name).mkdir()
        calm = CausalTransformer(elastic_config(tmp_path / "calm", 30, **keys), init=False)
        loop.train(calm, str(tmp_path / "calm" / "model"))
        attempts = elastic_run(tmp_path / "lossy", [loss], 30, **keys)
        print(*attempts, sep="\n")
        return attempts

    return train


@pytest.mark.slow
def test_a_run_that_loses_a_host_and_gets_it_back_has_the_same_bits(runs, tmp_path, capfd):
    attempts = runs(Loss(7, 16, 1), **VIRTUAL)
    assert [attempt[:2] for attempt in attempts] == [(4, 0), (2, 5), (4, 20)]
    assert attempts[2].again == 0
    rows = rows_of(tmp_path / "lossy" / "model")
    assert_same_rows(rows, rows_of(tmp_path / "calm" / "model"))
    errors = capfd.readouterr().err
    assert "host 127.0.0.3 is missing; to replace it: ray start" in errors
    assert "3 of 4 hosts are present: using mesh 2x2 (bit-identical)" in errors
    assert "4 of 4 hosts are present again, which allows mesh 4x2" in errors


@pytest.mark.slow
def test_a_run_that_ends_with_fewer_hosts_matches_one_with_all(runs, tmp_path):
    attempts = runs(Loss(7, None, 0), hosts_read=True)
    assert [attempt.hosts for attempt in attempts] == [4, 2]
    assert attempts[1].first == 5  # the step of the newest checkpoint
    calm, lossy = (tmp_path / name / "model" for name in ("calm", "lossy"))
    assert_close_rows(rows_of(lossy), rows_of(calm))
    assert Source.of(lossy).config.replace(train_set=None, val_set={}) == Source.of(
        calm
    ).config.replace(train_set=None, val_set={})
