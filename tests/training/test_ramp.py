"""The batch-size ramp: its sizes, its records, and its updates against those of plain batches."""

import json
from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.data.batches import whole_batch
from mesh_transformer.data.loader import open_train_set
from mesh_transformer.training import loop, step
from mesh_transformer.training.metrics import NoiseScale
from mesh_transformer.training.schedule import learning_rate
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import random_batch
from tests.support.small_run import assert_same_rows, rows_of, run_values
from tests.training.test_loop import Counter, whole_records
from tests.training.test_step import fresh_state, mesh_of, on_mesh, small_config

RAMP = {"gradient_accumulation_steps": 5, "batch_ramp_steps": 9, "batch_ramp_from": 2}


@pytest.mark.parametrize(("first", "most", "steps"), [(1, 4, 7), (2, 5, 9), (3, 3, 5), (1, 9, 2)])
def test_the_number_of_microbatches_rises_linearly(first, most, steps):
    config = small_config(
        gradient_accumulation_steps=most, batch_ramp_steps=steps, batch_ramp_from=first
    )
    actual = [config.microbatches(done) for done in range(steps + 4)]
    expected = np.floor(first + (most - first) * np.minimum(np.arange(steps + 4) / steps, 1))
    assert actual == expected.tolist()
    assert {config.replace(batch_ramp_steps=0).microbatches(done) for done in range(9)} == {most}


@pytest.mark.parametrize("ramp_from", [0, 6])
def test_an_impossible_ramp_is_refused(ramp_from):
    with pytest.raises(
        InputError, match=rf"batch_ramp_from is {ramp_from}, expected 1 to .* \(5\)"
    ):
        small_config(**RAMP | {"batch_ramp_from": ramp_from})


@pytest.mark.parametrize("columns", [None, (1, 3)])
def test_every_record_is_read_once_and_resuming_is_exact(tmp_path, columns):
    config = Config(**run_values(tmp_path, **RAMP, shuffle_buffer=7))
    sizes = [config.microbatches(done) for done in range(14)]
    plain = open_train_set(config.replace(gradient_accumulation_steps=1, batch_ramp_steps=0), 1)
    records = [whole_records(plain.get_samples())[0, 0] for _ in range(4 * sum(sizes))]
    rows = np.stack(records).reshape(-1, 4, config.seq + 1)  # [microbatches, rows, T + 1]
    expected = np.split(rows if columns is None else rows[:, columns], np.cumsum(sizes)[:-1])
    loader, resumed = (open_train_set(config, 4, columns) for _ in range(2))
    for done in range(14):
        resumed.restore(json.loads(json.dumps(loader.state())) if done else None, done)
        for reader in (loader, resumed):
            np.testing.assert_array_equal(whole_records(reader.get_samples()), expected[done])
    for reader in (plain, loader, resumed):
        reader.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partitioning", "zero", "masked"),
    [
        ("shard_map", 0, True),
        pytest.param("shard_map", 3, False, marks=pytest.mark.slow),
        pytest.param("jit", 1, True, marks=pytest.mark.slow),
    ],
)
def test_an_update_ignores_the_missing_microbatches(partitioning, zero, masked):
    """The reference is the program without a ramp, on the microbatches that are there."""
    config = on_mesh(small_config(layers=1, **RAMP), partitioning, 4, zero)
    plain = config.replace(batch_ramp_steps=0)
    mesh, states = mesh_of(2, 4), []
    layout = step.StateLayout(config, mesh)
    train, reference = step.compile_train(layout), step.compile_train(layout.of(plain))
    for _ in range(2):
        fresh = fresh_state(config.replace(partitioning="jit", zero=0, cores_per_replica=1))
        states.append(jax.tree.map(jax.device_put, fresh, layout.shardings))
    state, expected = states
    for done, count in enumerate((2, 5)):
        batch = random_batch(config, count, 4, seed=done)
        if masked:
            rng = np.random.default_rng(done)
            batch["loss_mask"] = rng.integers(0, 2, batch["obs"].shape).astype(np.uint8)
        state, metrics = train(state, *whole_batch(config, batch))
        expected, expected_metrics = reference(expected, batch)
        for name, value in expected_metrics.items():  # f32 sums in another order
            np.testing.assert_allclose(metrics[name], value, rtol=2e-6, err_msg=name)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, expected
    )  # as in test_step.py


def test_too_many_microbatches_are_refused():
    config = small_config(**RAMP)
    with pytest.raises(InputError, match=r"the batch has 6 microbatches, expected at most .*\(5\)"):
        whole_batch(config, random_batch(config, 6, 2))


def test_metrics_count_the_sequences_of_each_update(tmp_path, monkeypatch):
    seen: list[Any] = []
    update = NoiseScale.update

    def recorded(noise: NoiseScale, small: float, square: float, big: int) -> dict[str, float]:
        seen.append(big)
        return update(noise, small, square, big)

    monkeypatch.setattr(NoiseScale, "update", recorded)
    network = Counter(Config(**run_values(tmp_path, **RAMP, total_steps=12)))
    loop.train(network, str(tmp_path))
    sizes = [network.config.microbatches(done) for done in range(12)]
    assert [len(batch) for batch in network.seen] == sizes
    assert seen == [4 * size for size in sizes]


@pytest.mark.slow
def test_resuming_within_the_ramp_is_bit_identical(tmp_path):
    """The schedule is in tokens, and its decay ends with the run."""
    tokens = {"warmup_steps": 0, "anneal_steps": None, "warmup_tokens": 500, "anneal_tokens": 800}
    alone = {"cores_per_replica": 1, "tpu_size": 1, "per_replica_batch": 4, "val_set": None}
    values = run_values(tmp_path, **RAMP, **tokens, **alone, schedule="wsd", total_steps=11)

    def train(folder: str, stop: int) -> None:
        network = CausalTransformer(values, devices=jax.devices()[:1], init=False)
        loop.train(network, folder, max_steps=stop)

    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    train(whole, 11)
    for stop in (5, 11):
        train(parts, stop)
    assert_same_rows(rows_of(parts), rows_of(whole))
    config = Config(**values)
    consumed = 4 * np.cumsum([0, *[config.microbatches(done) for done in range(11)]])
    actual = [row["train/learning_rate"] for row in rows_of(whole)]
    left = (consumed[-1] - consumed[:-1]) * config.seq
    share = 1 - np.minimum(left / 800, 1)
    warm = np.minimum(consumed[:-1] * config.seq / 500, 1)
    expected = warm * config.lr - (config.lr - config.end_lr) * share
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-9)  # f32


def test_the_end_of_wsd_in_tokens_is_exact_if_the_ramp_is_longer_than_the_run():
    config = small_config(
        **RAMP, schedule="wsd", warmup_steps=0, anneal_steps=None, anneal_tokens=200, total_steps=6
    )
    sizes = [config.microbatches(done) * 3 * config.seq for done in range(6)]
    left = np.cumsum(sizes[::-1])[::-1]
    actual = [learning_rate(config, np.int32(done), np.int32(0), 3) for done in range(6)]
    expected = config.lr - (config.lr - config.end_lr) * (1 - np.minimum(left / 200, 1))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)  # f32
