"""The ledger of a run's time: its sums, and its counts after failures."""

import json
import random
import re
import time
import types
from typing import Any

import pytest

from mesh_transformer.config import Config
from mesh_transformer.training import goodput, loop
from mesh_transformer.training.goodput import KINDS, Ledger
from mesh_transformer.transformer_shard import CausalTransformer
from tests.support.small_run import run_values


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The simulated time in seconds, as a list of one number."""
    now = [1000.0]
    monkeypatch.setattr(goodput, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize("seed", range(5))
def test_kinds_are_exclusive_and_add_up(clock, seed):
    rng = random.Random(seed)
    ledger, expected = Ledger(elapsed=2.5), dict.fromkeys(KINDS, 0.0) | {"start": 2.5}

    def spend(kind: str, depth: int) -> None:
        for _ in range(rng.randint(1, 3)):
            seconds = rng.randint(1, 100) / 8  # binary fractions, which add up exactly
            clock[0] += seconds
            expected[kind] += seconds
            if depth:
                inner = rng.choice(list(KINDS))
                with ledger.spending(inner):
                    spend(inner, depth - 1)

    spend("start", 4)
    metrics = ledger.metrics(complete=True)
    assert metrics == {f"seconds/{k}": v for k, v in expected.items() if v or k == "start"}
    assert sum(metrics.values()) == 2.5 + clock[0] - 1000


def test_steps_after_the_restored_one_are_lost(clock):
    ledger = Ledger()
    ledger.resume([], 0)
    rows = []
    for step in range(1, 8):
        with ledger.spending("steps"):
            clock[0] += step
        rows.append({"step": step} | ledger.metrics(complete=step % 3 == 0))
    with ledger.spending("steps"):
        clock[0] += 0.5  # a step that was never logged
    ledger.resume(rows, 4)
    lost = 5 + 6 + 7 + 0.5
    assert ledger.seconds["lost"] == lost
    assert ledger.seconds["steps"] == 1 + 2 + 3 + 4

    clock[0] += 3  # another process: all that it knows are the rows
    again = Ledger()
    again.resume(rows, 4)
    assert again.seconds["steps"] == 1 + 2 + 3 + 4
    assert again.seconds["lost"] == 5 + 6 + 7
    again.resume(rows, 0)  # once more in this process, from the beginning
    assert again.seconds["steps"] == 0
    assert again.seconds["lost"] == sum(range(1, 8))


def test_metrics_without_seconds_are_resumed(clock):
    ledger = Ledger()
    ledger.resume([{"step": 1, "train/loss": 3.0}], 1)
    assert sum(ledger.seconds.values()) == 0


@pytest.mark.slow
def test_the_seconds_of_a_run_add_up_to_its_duration(tmp_path, capsys):
    config = Config(**run_values(tmp_path, ckpt_every=4))
    began = time.monotonic()
    ledger = Ledger()
    network = CausalTransformer(config, init=False)
    loop.train(network, str(tmp_path / "model"), max_steps=10, ledger=ledger)
    rows = rows_with_seconds(tmp_path)
    total = sum(ledger.metrics(complete=True).values())  # also the time since the run's end
    assert total == pytest.approx(time.monotonic() - began, rel=0.01)
    assert all("seconds/steps" in row for row in rows)
    complete = [row["step"] for row in rows if "seconds/start" in row]
    assert complete == [4, 8, 10]
    assert ledger.seconds["restore"] == 0  # a new run
    for kind in ("start", "init", "compile", "steps", "save", "data"):
        assert ledger.seconds[kind] > 0, kind
    assert ledger.seconds["lost"] == 0
    assert re.search(r"^time 0:0\d:\d\d: steps \d.*%, compile \d.*%", capsys.readouterr().out, re.M)

    resumed = Ledger()
    network = CausalTransformer(config, init=False)
    loop.train(network, str(tmp_path / "model"), max_steps=12, ledger=resumed)
    assert resumed.seconds["restore"] > 0
    assert resumed.seconds["init"] == pytest.approx(ledger.seconds["init"], abs=1e-3)  # is rounded
    assert resumed.seconds["compile"] > ledger.seconds["compile"]
    assert resumed.seconds["lost"] == 0


def rows_with_seconds(folder: Any) -> list[dict[str, Any]]:
    text = (folder / "model" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
