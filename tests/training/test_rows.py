"""Metrics rows: step times, sequences and tokens, and the batch of a resumed run."""

import json
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mesh_transformer
from mesh_transformer.config import Config
from mesh_transformer.training import loop, metrics
from mesh_transformer.training.metrics import StepClock
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import SMALL
from tests.support.small_run import run_values
from tests.training.test_loop import Counter


class Ending:
    """The loss of a step that ends at a time of a simulated clock."""

    def __init__(self, clock: Any, end: float):
        self.clock, self.end = clock, end

    def is_ready(self) -> bool:
        return self.clock.now >= self.end


def test_no_step_is_recorded_with_a_fraction_of_its_time(monkeypatch):
    """Steps of one second, of which two are in flight; the host is up to 2.5 s late at times."""
    rng = np.random.default_rng(0)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    measured, recorded, end = StepClock(), [], 0.0
    pending: deque[dict[str, Any]] = deque()
    for _ in range(400):
        clock.now += 1e-4
        end = max(end, clock.now) + 1
        pending.append({"loss": Ending(clock, end)})
        if len(pending) > 2:
            oldest = pending.popleft()["loss"]
            clock.now = max(clock.now, oldest.end)  # wait for the step, as `float` does
            clock.now += rng.choice([1e-4, rng.uniform(0, 2.5)], p=[0.7, 0.3])
            measured.record_finished(pending, read=1)
            recorded.append(measured.pop_seconds())
        clock.now += 1e-4
        measured.record_finished(pending)
    assert min(recorded) > 0.2
    assert max(recorded) < 4
    assert np.median(recorded) == pytest.approx(1, abs=0.1)


def test_a_fast_step_after_a_slow_one_keeps_its_time(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    measured, actual = StepClock(), []
    for seconds in (30.0, 0.1, 0.2, 9.0, 0.1):  # the first compiles; each is waited for alone
        clock.now += seconds
        measured.record_finished([], read=1)
        actual.append(measured.pop_seconds())
    np.testing.assert_allclose(actual, [30.0, 0.1, 0.2, 9.0, 0.1])


@pytest.fixture
def values(tmp_path) -> dict[str, Any]:
    return run_values(tmp_path, val_set={}, ckpt_every=5)


def rows_in(folder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_count_sequences_and_tokens_through_a_ramp_and_a_resumption(values, tmp_path):
    ramp = {"gradient_accumulation_steps": 5, "batch_ramp_steps": 12, "batch_ramp_from": 2}
    config = Config(**(values | ramp))
    first = Counter(config)
    loop.train(first, tmp_path / "model", max_steps=7)  # type: ignore[arg-type]
    loop.train(Counter(config, first.saved), tmp_path / "model", max_steps=15)  # type: ignore[arg-type]
    rows = rows_in(tmp_path / "model")
    sequences = [config.microbatches(step) * Counter.batch_size for step in range(15)]
    assert [row["train/sequences"] for row in rows] == sequences
    tokens = (np.cumsum(sequences) * config.seq).tolist()
    assert [row["train/tokens"] for row in rows] == tokens
    del first.saved[7]["tokens"], first.saved[7]["batch"]  # a checkpoint of an earlier version
    loop.train(Counter(config, {7: first.saved[7]}), tmp_path / "model", max_steps=9)  # type: ignore[arg-type]
    assert rows_in(tmp_path / "model")[-1]["train/tokens"] == tokens[8]


def test_another_batch_is_refused_unless_its_keys_have_changed(values, tmp_path, capsys):
    config = Config(**values)
    first = Counter(config)
    loop.train(first, tmp_path / "model", max_steps=5)  # type: ignore[arg-type]
    first.saved[5]["config"] = config.as_dict()

    def resume(batch_size: int, **changes: Any) -> None:
        resumed = Counter(config.replace(**changes), dict(first.saved))
        resumed.batch_size, resumed.dp = batch_size, 2
        loop.train(resumed, tmp_path / "model", max_steps=6)  # type: ignore[arg-type]

    with pytest.raises(
        InputError, match=r"updates have 8 .* mesh 2x4 .* have 16; set per_replica_batch to 2,"
    ):
        resume(8)
    assert sorted(first.saved) == [5]
    assert [row["step"] for row in rows_in(tmp_path / "model")] == [1, 2, 3, 4, 5]
    resume(4)
    assert "sequences per update" not in capsys.readouterr().out
    resume(8, per_replica_batch=4)
    assert (
        "with 16 sequences per update, was 8: per_replica_batch is 4, was 2\n"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_resumption_with_another_cores_per_replica_keeps_the_batch(tmp_path):
    sizes = {"layers": 1, "tpu_size": 8, "cores_per_replica": 4, "per_replica_batch": 2}
    config = Config(**(SMALL | sizes | {"total_steps": 2, "ckpt_every": 1}))
    tokens = np.random.default_rng(0).integers(0, config.n_vocab, 500)
    mesh_transformer.fit(CausalTransformer(config), tokens, tmp_path / "model", steps=1)
    other = {"cores_per_replica": 8}
    network = CausalTransformer(config.replace(**other))
    with pytest.raises(InputError, match=r"updates have 4 .* have 2; set per_replica_batch to 4"):
        mesh_transformer.fit(network, tokens, tmp_path / "model")
    network = CausalTransformer(config.replace(per_replica_batch=4, **other))
    [row] = mesh_transformer.fit(network, tokens, tmp_path / "model")
    assert (row["train/sequences"], row["train/tokens"]) == (4, 2 * 4 * config.seq)
