"""`--mode eval_all`: every step in order, stopped and continued, with damaged steps."""

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import device_train
from mesh_transformer.checkpoint.original import write
from mesh_transformer.checkpoint.source import saved_steps
from mesh_transformer.evaluation import all_steps, validation
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.checkpoint.test_original import random_state
from tests.conftest import SMALL
from tests.support.small_run import SEQ, damage_step, write_set

STEPS = (5, 10, 20, 100)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Return a model folder, which has the steps `STEPS`, and the values of its config."""
    place = tmp_path_factory.mktemp("made")
    values = SMALL | {"layers": 1, "val_set": {"made": write_set(place, "made", {"one": 5})}}
    values |= {"val_batches": 9, "seq": SEQ, "keep_n": 9, "model_dir": "model"}
    network = CausalTransformer(values, devices=jax.devices()[:1])
    assert network.state is not None
    for step in STEPS:
        network.step = step
        network.state["params"] = jax.tree.map(lambda x: x * 1.01, network.state["params"])
        network.save(str(place / "model"))
    network.close()
    return place / "model", values


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """Return a folder with a copy of the model, and with its config.json."""
    model, values = made
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "config.json").write_text(json.dumps(values | {"bucket": str(tmp_path)}))
    return tmp_path


@pytest.fixture
def evaluate(folder, monkeypatch, capsys) -> Callable[..., list[str]]:
    """Return a function that runs --mode eval_all, and returns the lines that it prints."""

    def run(*flags: str) -> list[str]:
        words = ["--config", str(folder / "config.json"), "--mode", "eval_all", *flags]
        monkeypatch.setattr(sys, "argv", ["device_train.py", *words])
        capsys.readouterr()
        device_train.main()
        return capsys.readouterr().out.splitlines()

    return run


def rows_in(folder: Path) -> list[dict]:
    text = (folder / "model" / all_steps.NAME).read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_every_step_gets_a_row_and_none_is_evaluated_twice(folder, evaluate, monkeypatch):
    first = evaluate()
    assert re.findall(r"\S+", first[0])[:2] == ["step", "val/loss_made"]
    assert [int(line.split()[0]) for line in first[1:-1]] == list(STEPS)
    assert first[-1] == f"{folder}/model/{all_steps.NAME}: 4 steps evaluated, 0 skipped"
    rows = rows_in(folder)
    network = CausalTransformer(str(folder / "config.json"), devices=jax.devices()[:1], init=False)
    for row, line in zip(rows, first[1:], strict=False):
        path = str(folder / "model" / f"step_{row['step']}")
        [scores] = validation.validate(network, path).values()
        bits = scores.nats / math.log(2) / scores.bytes
        expected = [scores.loss, scores.correct / scores.tokens, bits]
        # The runs have other meshes, whose f32 sums are in another order.
        actual = [row[f"val/{name}_made"] for name in ("loss", "accuracy", "bits_per_byte")]
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
        np.testing.assert_allclose([float(cell) for cell in line.split()[1:]], expected, atol=1e-4)
    assert len({row["val/loss_made"] for row in rows}) == 4

    monkeypatch.setattr(validation, "score", None)  # fails if it is called
    assert evaluate() == first
    assert rows_in(folder) == rows


@pytest.mark.slow
def test_a_stopped_evaluation_continues(folder, evaluate, monkeypatch):
    score, calls = validation.score, []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(validation, "score", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluate()
        assert [row["step"] for row in rows_in(folder)] == [5, 10]
        with (folder / "model" / all_steps.NAME).open("a") as file:
            file.write('{"step": 20, "val/lo')  # as after a power failure
        assert len(evaluate()) == 6
        assert len(calls) == 5
        assert [row["step"] for row in rows_in(folder)] == list(STEPS)
        # Other settings need other rows.
        evaluate("--set", "val_batches=1")
        assert len(calls) == 9
        assert [row["step"] for row in rows_in(folder)] == [*STEPS, *STEPS]
        evaluate()
        assert len(calls) == 9


@pytest.mark.slow
def test_a_row_counts_only_for_the_state_and_the_settings_that_it_was_made_with(
    folder, evaluate, monkeypatch
):
    calls = []

    def scored(network, *_, **__):
        calls.append(network)
        return validation.Scores(1.0, 1, 1, 1)

    monkeypatch.setattr(validation, "score", scored)
    evaluate()
    evaluate()
    assert len(calls) == 4
    network = CausalTransformer(str(folder / "config.json"), devices=jax.devices()[:1])
    network.step = 10
    shutil.rmtree(folder / "model" / "step_10")
    network.save(str(folder / "model"))
    network.close()
    for _ in range(2):
        evaluate()
        assert len(calls) == 5
    for number, change in enumerate(("per_replica_batch=2", "weight_bits=8", "dtype=bfloat16"), 1):
        evaluate("--set", change)
        assert len(calls) == 5 + 4 * number


def test_damaged_and_deleted_steps_are_skipped(folder, evaluate, monkeypatch, capsys):
    damage_step(folder / "model" / "step_10")
    load = CausalTransformer.load

    def deleted(network, path, **options):
        if path.endswith("step_20"):  # as by a run that goes on at the same time
            (folder / "model" / "step_20").rename(folder / "elsewhere")
        return load(network, path, **options)

    monkeypatch.setattr(CausalTransformer, "load", deleted)
    words = ["--config", str(folder / "config.json"), "--mode", "eval_all"]
    monkeypatch.setattr(sys, "argv", ["device_train.py", *words])
    device_train.main()
    captured = capsys.readouterr()
    assert re.search(r"^step 10 is skipped: checkpoint .*step_10", captured.err, re.MULTILINE)
    assert re.search(r"^step 20 is skipped: checkpoint folder", captured.err, re.MULTILINE)
    assert captured.out.endswith(": 2 steps evaluated, 2 skipped\n")
    assert [row["step"] for row in rows_in(folder)] == [5, 100]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--model-dir", "nowhere"), "--mode eval_all: nowhere has no step_<N> folders"),
        (
            ("--max-steps", "3"),
            "--max-steps is for training; remove .* or --mode eval_all",
        ),
        (("--tune-model-path", "x"), "--mode eval_all scores a model folder; give it as --model-d"),
        (("--set", "val_batches=0"), "--mode eval needs the key val_set"),
        (("--set", "d_model=32"), "step_5: its model has d_model 64, but the config has 32"),
    ],
)
def test_impossible_evaluations_are_refused(folder, evaluate, flags, line):
    with pytest.raises(InputError, match=line):
        evaluate(*flags)
    assert not (folder / "model" / all_steps.NAME).exists()


def test_steps_of_every_format_are_found(folder, tmp_path, small):
    assert saved_steps(folder / "model") == list(STEPS)
    assert saved_steps(folder) == []
    config = small(layers=1)
    for step in (3, 12):
        state = random_state(config) | {"step": np.int32(step)}
        write(str(tmp_path / "original"), state, config)
    assert saved_steps(tmp_path / "original") == [3, 12]
