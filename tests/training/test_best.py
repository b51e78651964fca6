"""The best step is kept and found again, whatever interrupts the run, and runs stop early."""

import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

import mesh_transformer
from mesh_transformer.checkpoint import native, step_folders
from mesh_transformer.checkpoint.native import Checkpoints, find
from mesh_transformer.config import Config
from mesh_transformer.training import loop
from mesh_transformer.training.best import BestStep
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import SMALL
from tests.support.fake_gcs import gcs_server
from tests.support.small_run import assert_same_rows, rows_of, run_values
from tests.support.waiting import SECONDS, wait_until
from tests.training.test_loop import Counter, Storage

ROOT = Path(__file__).resolve().parents[2]
SETS = {"books": "a.index", "web": "b.index"}


def config_with(**changes: Any) -> Config:
    return Config.from_dict(SMALL | {"val_set": SETS} | changes)


@pytest.mark.parametrize("seed", range(5))
def test_the_best_step_and_the_stale_validations_match_numpy(seed):
    rng = np.random.default_rng(seed)
    losses = rng.choice([1.0, 2.0, 3.0, 4.0, np.nan], 40, p=[0.05, 0.2, 0.3, 0.35, 0.1])
    config = config_with(keep_best="web", early_stop=9)
    best = BestStep(config)
    for count, loss in enumerate(losses, 1):
        before = losses[: count - 1]
        lowest = np.min(before[~np.isnan(before)], initial=np.inf)
        assert best.add(5 * count, {"val/loss_web": loss, "val/loss_books": 0.0}) == (loss < lowest)
        seen = losses[:count]
        if not np.isnan(seen).all():
            first = int(np.nanargmin(seen))
            assert best.step == 5 * (first + 1)
            assert best.is_over == (count - 1 - first >= 9)
        saved = json.loads(json.dumps(best.state()))
        assert (saved["set"], saved["validated"], best.lacks(5 * count)) == (
            "web",
            5 * count,
            False,
        )
        best = BestStep(config)  # resumed
        best.restore(saved)
    assert best.is_over or seed
    other = BestStep(config.replace(keep_best="books"))
    other.restore(best.state())
    assert (other.step, other.is_over, other.lacks(200)) == (None, False, True)


def test_lost_steps_are_no_longer_the_best():
    best = BestStep(config_with(keep_best="web"))
    assert [best.add(step, {"val/loss_web": 9 - step}) for step in (1, 2, 3)] == [True] * 3
    best.lost(2)
    best.lost(3)
    assert best.step == 1
    # Better than step 1, though not than the lost ones.
    assert best.add(4, {"val/loss_web": 7.5})
    assert not BestStep(config_with()).lacks(3)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"keep_best": "pile"}, "keep_best is 'pile', expected a name in val_set: books, web"),
        ({"early_stop": 0, "keep_best": "web"}, "early_stop is 0, expected at least 1"),
        ({"early_stop": 3}, "early_stop needs keep_best, the name of one val_set: books, web"),
        ({"early_stop": 3, "val_set": {}}, "early_stop needs keep_best, .*: none"),
        ({"keep_best": "web", "val_batches": 0}, "need validation; set val_batches above 0"),
    ],
)
def test_impossible_settings_are_refused(changes, line):
    with pytest.raises(InputError, match=line):
        config_with(**changes)
    assert config_with(early_stop=3, val_set={"web": "b.index"}).watched_set == "web"


# The training loop, with a fake network.


@pytest.fixture
def scored(tmp_path) -> Callable[..., Counter]:
    """Return a function that creates a `Counter` with given validation losses.

    They are those at the steps 10, 20 and so on.
    """
    values = run_values(tmp_path, val_every=10, ckpt_every=25, keep_best="held_out")

    def make(losses: list[float], saved: dict[int, Any] | None = None, **changes: Any) -> Counter:
        network = Counter(Config(**values | {"total_steps": 10 * len(losses)} | changes), saved)

        def evaluate(sample: dict[str, np.ndarray]) -> dict[str, Any]:
            shape, loss = sample["obs"].shape, losses[network.step // 10 - 1]
            return {"all_loss": np.full(shape, loss), "correct": np.zeros(shape, bool)}

        network.eval = evaluate
        return network

    return make


LOSSES = [3.0, 4.0, 2.0, 2.5, 2.25, 1.0, 2.0, 3.0]


def test_each_best_step_is_saved_and_recorded(scored, tmp_path):
    network = scored(LOSSES)
    loop.train(network, str(tmp_path))
    assert sorted(network.saved) == [10, 25, 30, 50, 60, 75, 80]
    best = {step: aux["best"]["step"] for step, aux in network.saved.items()}
    assert best == {10: 10, 25: 10, 30: 30, 50: 30, 60: 60, 75: 60, 80: 60}
    assert [aux["best"]["stale"] for aux in network.saved.values()] == [0, 1, 0, 2, 0, 1, 2]


@pytest.mark.parametrize("patience", [1, 2])
def test_a_run_stops_early_and_is_not_continued_silently(scored, tmp_path, capsys, patience):
    changes = {"early_stop": patience, "keep_best": None}
    network = scored(LOSSES, **changes)
    loop.train(network, str(tmp_path))
    stop = {1: 20, 2: 50}[patience]
    lowest = {1: 3.0, 2: 2.0}[patience]
    reason = f"the loss on held_out has not improved for {patience} validations (lowest {lowest})"
    assert f"{tmp_path}: stopped at step {stop}: {reason}\n" in capsys.readouterr().out
    assert max(network.saved) == network.step == stop
    assert all(aux["best"]["step"] is None for aux in network.saved.values())
    again = scored(LOSSES, network.saved, **changes)
    loop.train(again, str(tmp_path))
    expected = f"{tmp_path} is at step {stop}: {reason}; to train on, raise early_stop or set it "
    assert capsys.readouterr().out == expected + "to null\n"
    assert again.seen == []
    longer = scored(LOSSES, network.saved, early_stop=3, keep_best=None)
    loop.train(longer, str(tmp_path))
    assert longer.step == 80
    assert "trained to step 80" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["at once", "later"])
def test_a_best_step_that_cannot_be_saved_is_not_recorded(scored, tmp_path, how):
    network = scored(LOSSES)
    Storage(network, lambda step: how if step == 60 else None)
    loop.train(network, str(tmp_path))
    best = {step: aux["best"]["step"] for step, aux in network.saved.items()}
    # At step 70, the loss is 2, as at step 30: it must be lower to be the best.
    assert best == {10: 10, 25: 10, 30: 30, 50: 30, 61: 30, 75: 30, 80: 30}


@pytest.mark.quick(4)
@pytest.mark.parametrize("stop", [10, 30, 35, 60, 61])
def test_a_resumed_run_knows_the_best_step(scored, tmp_path, stop):
    whole = scored(LOSSES)
    loop.train(whole, str(tmp_path / "whole"))
    saved: dict[int, Any] = {}
    loop.train(scored(LOSSES, saved), str(tmp_path / "parts"), max_steps=stop)
    loop.train(scored(LOSSES, saved), str(tmp_path / "parts"))
    assert {step: saved[step]["best"] for step in whole.saved} == {
        step: aux["best"] for step, aux in whole.saved.items()
    }


@pytest.mark.parametrize("total", [10, 30])
def test_a_validation_after_its_checkpoint_counts(scored, tmp_path, total):
    """A signal during the validation saves the step first; it is validated when resumed."""
    model, saved = str(tmp_path / "model"), {}
    first = scored(LOSSES, saved, total_steps=total)
    evaluate = first.eval

    def interrupted(sample: Any) -> Any:
        if first.step == total:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(sample)

    first.eval = interrupted
    loop.train(first, model)
    assert saved[total]["best"]["step"] == (None if total == 10 else 10)
    for _ in range(2):  # the second time, the metrics row has the loss already
        again = scored(LOSSES, saved, total_steps=total)
        marked: list[Any] = []
        again.save = lambda folder, aux, marked=marked: marked.append(aux["best"])
        loop.train(again, model)
        assert (marked[-1]["step"], marked[-1]["loss"]) == (total, min(LOSSES[: total // 10]))


# Real checkpoints.


def tiny_state(step: int) -> dict[str, Any]:
    return {"params": {"w": jax.numpy.full(3, float(step))}, "step": jax.numpy.int32(step)}


def record(step: int | None) -> dict[str, Any]:
    return {"best": {"step": step, "set": "web", "loss": 1.5, "stale": 0}}


def best_of(folder: Path) -> int | None:
    return step_folders.best_step(epath.Path(folder))


def test_the_best_step_is_never_deleted(tmp_path):
    best = [None, 2, 2, 2, 5, 5, 5, 5]
    with Checkpoints(str(tmp_path), keep_n=2) as checkpoints:
        for step, known in enumerate(best, 1):
            checkpoints.save(step, tiny_state(step), record(known))
            checkpoints.wait()
            kept = sorted({max(1, step - 1), step, known or step})
            wait_until(lambda: checkpoints.steps() == kept, "old steps are deleted")  # noqa: B023
            assert best_of(tmp_path) == known
    assert json.loads((tmp_path / "best").read_text()) == {"step": 5, "set": "web", "loss": 1.5}
    assert find(f"{tmp_path}/best").number == 5
    assert find(str(tmp_path)).number == 8
    with Checkpoints(str(tmp_path), keep_n=1) as checkpoints:  # of a run without keep_best
        checkpoints.save(9, tiny_state(9), {})
        checkpoints.wait()
        wait_until(lambda: checkpoints.steps() == [5, 9], "old steps are deleted")


def test_a_best_step_that_is_not_recorded_is_recorded_later(tmp_path, monkeypatch, caplog):
    with Checkpoints(str(tmp_path), keep_n=1) as checkpoints:
        checkpoints.save(1, tiny_state(1), record(1))
        checkpoints.wait()

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(native, "write_best", fail)
            checkpoints.save(2, tiny_state(2), record(2))
            checkpoints.wait()
            assert "cannot record the best step of" in caplog.text
            with pytest.raises(InputError, match="cannot be written: No space left on device"):
                checkpoints.save(2, tiny_state(2), record(2))
        assert (best_of(tmp_path), checkpoints.steps()) == (1, [1, 2])
        checkpoints.save(2, tiny_state(2), record(2))  # as a resumed run does
        assert best_of(tmp_path) == 2
        checkpoints.save(3, tiny_state(3), record(7))  # a step that does not exist
        checkpoints.wait()
        assert best_of(tmp_path) == 2
    for text in ("", "{}", "[]", '{"step": "x"}'):  # as after a power failure
        (tmp_path / "best").write_text(text)
        assert best_of(tmp_path) is None
    with pytest.raises(InputError, match=r"best is a file; expected a model folder"):
        find(f"{tmp_path}/best")
    (tmp_path / "best").write_text('{"step": 7}')
    with pytest.raises(InputError, match="best names step_7, which does not exist"):
        find(f"{tmp_path}/best")


def train(values: dict[str, Any], folder: Path | str, **options: Any) -> None:
    network = CausalTransformer(values, devices=jax.devices()[:1], init=False)
    loop.train(network, folder, **options)


@pytest.mark.slow
def test_the_best_step_of_a_run_can_be_loaded(tmp_path):
    alone = {"tpu_size": 1, "cores_per_replica": 1, "layers": 1}
    keys = {"val_every": 2, "val_batches": 4, "ckpt_every": 3, "keep_n": 1, "total_steps": 14}
    # The validation loss first falls, then rises, because the learning rate is high.
    values = run_values(tmp_path, keep_best="held_out", lr=0.03, **alone, **keys)
    folder = tmp_path / "run"
    train(values, folder)
    losses = {row["step"]: row["val/loss_held_out"] for row in rows_of(folder)[1::2]}
    lowest = min(losses, key=lambda step: losses[step])
    assert lowest < 14
    assert best_of(folder) == lowest
    assert {path.name for path in folder.glob("step_*")} == {f"step_{lowest}", "step_14"}
    best = mesh_transformer.load(folder / "best")
    same = mesh_transformer.load(folder / f"step_{lowest}")
    assert best.state is not None
    assert same.state is not None
    jax.tree.map(np.testing.assert_array_equal, best.state["params"], same.state["params"])

    (folder / "best").unlink()  # a kill between the commit of a step and its record
    train(values, folder)
    assert best_of(folder) == lowest
    (folder / f"step_{lowest}").rename(folder / "elsewhere")
    network = CausalTransformer(values, devices=jax.devices()[:1], init=False)
    aux = network.restore(folder)
    assert aux is not None
    assert (aux["best"]["step"], aux["best"]["loss"]) == (None, None)
    assert aux["best"]["lowest"] == losses[lowest]


@pytest.mark.slow
def test_the_best_step_in_a_bucket(tmp_path, monkeypatch):
    alone = {"tpu_size": 1, "cores_per_replica": 1, "layers": 1}
    keys = {"val_every": 2, "ckpt_every": 3, "keep_n": 1, "total_steps": 8, "lr": 0.03}
    values = run_values(tmp_path, keep_best="held_out", **alone, **keys)
    train(values, tmp_path / "whole")
    monkeypatch.chdir(tmp_path)  # which gets a copy of the metrics
    with gcs_server(tmp_path) as (gcs, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for steps in (5, 8):
            train(values, "gs://bucket/run", max_steps=steps)
        expected = json.loads((tmp_path / "whole" / "best").read_text())
        assert json.loads(gcs.objects[("bucket", "run/best")].content) == expected
        assert find("gs://bucket/run/best").number == expected["step"]


@pytest.mark.slow
def test_killed_runs_keep_the_best_step(tmp_path):
    """Runs are killed at random moments; whenever `best` exists, it can be read."""
    alone = {"tpu_size": 1, "cores_per_replica": 1, "layers": 1}
    keys = {"val_every": 1, "ckpt_every": 3, "keep_n": 1, "total_steps": 40, "lr": 0.03}
    values = run_values(tmp_path, keep_best="held_out", **alone, **keys)
    train(values, tmp_path / "whole")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(values))
    folder = tmp_path / "run"
    words = ["device_train.py", "--config", str(config), "--model-dir", str(folder)]
    for moment in itertools.chain(random.Random(0).sample(range(3, 38), 3), [None]):
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT)
        try:
            if moment is None:
                assert process.wait(SECONDS) == 0
                break
            wait_until(lambda: process.poll() is not None or at(folder) >= moment, "a step")  # noqa: B023
            time.sleep(random.Random(moment).uniform(0, 0.3))  # the moment of the kill
        finally:
            process.kill()
            process.wait()
        if (folder / "best").exists():
            assert find(f"{folder}/best").config
    assert_same_rows(rows_of(folder), rows_of(tmp_path / "whole"))
    expected = json.loads((tmp_path / "whole" / "best").read_text())
    assert json.loads((folder / "best").read_text()) == expected


def at(folder: Path) -> int:
    """Return the last step in a run's metrics."""
    rows = rows_of(folder)
    return rows[-1]["step"] if rows else 0
