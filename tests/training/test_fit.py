"""`fit` runs the train steps on its batches, resumes exactly, and writes only to its folder."""

import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

import mesh_transformer
from mesh_transformer.config import Config
from mesh_transformer.data.in_memory import InMemoryTrainSet
from mesh_transformer.data.tfrecords import write_set
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import StoppedError
from tests.conftest import SMALL
from tests.support.refusals import refused

STEPS = 5
VALUES = SMALL | {"total_steps": STEPS, "val_every": 2, "ckpt_every": 2, "seed": 7}


def network_with(**changes):
    return CausalTransformer(Config.from_dict(VALUES | changes))


def windows(count=20, seed=0):
    return np.random.default_rng(seed).integers(0, SMALL["n_vocab"], (count, SMALL["seq"] + 1))


def leaves(network):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(network.state)]


def assert_same_state(actual, expected):
    for a, e in zip(leaves(actual), leaves(expected), strict=True):
        np.testing.assert_array_equal(a, e)


def test_fit_is_the_train_steps_on_its_batches():
    data = windows()
    fitted, stepped = network_with(), network_with()
    rows = mesh_transformer.fit(fitted, data)
    config = stepped.config
    shape = (config.gradient_accumulation_steps, stepped.batch_size)
    batches = InMemoryTrainSet(data, config.seq, lambda _: shape, config.seed)
    losses = [float(stepped.train(batches.get_samples())["loss"]) for _ in range(STEPS)]
    batches.close()
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert [row["train/loss"] for row in rows] == losses
    assert_same_state(fitted, stepped)


@pytest.mark.slow
def test_data_in_memory_continue_where_a_save_outside_of_fit_was_made(tmp_path, capsys):
    data = windows()
    network, whole = network_with(), network_with()
    expected = mesh_transformer.fit(whole, data)
    mesh_transformer.fit(network, data, steps=2)
    network.save(tmp_path)
    network.close()
    capsys.readouterr()
    rows = mesh_transformer.fit(network_with(), data, tmp_path)
    assert "no position" not in capsys.readouterr().out
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in expected[2:]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["epochs", "text"])
def test_several_calls_are_one_run(capsys, kind):
    data = windows() if kind == "epochs" else windows().ravel()
    network, whole = network_with(), network_with()
    rows = mesh_transformer.fit(network, data, steps=2) + mesh_transformer.fit(network, data)
    expected = mesh_transformer.fit(whole, data)
    for row, other in zip(rows, expected, strict=True):
        assert (row["step"], row["train/loss"]) == (other["step"], other["train/loss"])
    assert_same_state(network, whole)
    capsys.readouterr()
    assert mesh_transformer.fit(network, data) == []
    assert capsys.readouterr().out == "the network is at step 5 of 5: nothing left to train\n"


@pytest.mark.slow
def test_training_ends_with_the_data(capsys):
    network = network_with()
    count = 3 * network.batch_size * network.config.gradient_accumulation_steps
    rows = mesh_transformer.fit(network, (row for row in windows(count + 1)))
    assert [row["step"] for row in rows] == [1, 2, 3]
    printed = capsys.readouterr()
    assert "the data have ended" in printed.out + printed.err


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, True])
def test_a_loss_that_is_not_finite_names_its_sequences(tmp_path, capsys, skip):
    network = network_with(lr=1e30, end_lr=1e30, warmup_steps=0, skip_nonfinite=skip, ckpt_every=1)
    if skip:
        rows = mesh_transformer.fit(network, windows(), steps=4)
        assert rows[-1]["train/skipped"] >= 1
    else:
        with pytest.raises(StoppedError, match=r"its batch is sequences \d+ to \d+ of the data"):
            mesh_transformer.fit(network, windows(), tmp_path / "model")
        bad = 1 + len((tmp_path / "model/metrics.jsonl").read_text("utf-8").splitlines())
        assert not (tmp_path / f"model/step_{bad}").exists()


@pytest.mark.slow
def test_early_stop_watches_the_validation_data():
    keys = {"val_set": {"val": "in memory"}, "early_stop": 1, "lr": 0.0, "end_lr": 0.0}
    rows = mesh_transformer.fit(network_with(**keys), windows(), val=windows(8))
    assert rows[-1]["step"] == 4  # validated in steps 2 and 4


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["epochs", "memmap"])
def test_a_stopped_run_resumes_with_the_same_bits(tmp_path, kind):
    data = windows() if kind == "epochs" else windows().ravel()
    whole, stopped, resumed = network_with(), network_with(), network_with(seed=7)
    expected = mesh_transformer.fit(whole, data, tmp_path / "whole")

    def stop(row):
        if row["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = mesh_transformer.fit(stopped, data, tmp_path / "model", hooks=[stop])
    assert len(before) < STEPS
    after = mesh_transformer.fit(resumed, data, tmp_path / "model")
    assert_same_state(resumed, whole)
    for row, other in zip(before + after, expected, strict=True):
        assert (row["step"], row["train/loss"]) == (other["step"], other["train/loss"])
    ended = network_with()
    assert mesh_transformer.fit(ended, data, tmp_path / "model") == []
    assert_same_state(ended, whole)
    lines = (tmp_path / "model/metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, STEPS + 1)]


@pytest.mark.slow
def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    mesh_transformer.fit(network_with(), windows())
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out.endswith("\ntrained to step 5\n")


@pytest.mark.slow
def test_ctrl_c_ends_an_unsaved_run_with_its_rows(capsys):
    network = network_with(total_steps=10_000)
    rows = mesh_transformer.fit(
        network,
        windows(),
        hooks=[lambda row: os.kill(os.getpid(), signal.SIGINT) if row["step"] == 3 else None],
    )
    assert 3 <= len(rows) < 10_000
    assert len(rows) == network.step
    assert capsys.readouterr().out.endswith(f"\nSIGINT: stopped at step {network.step}\n")


@pytest.mark.slow
def test_hooks_see_every_row_and_validation_is_the_mean_loss():
    network, held_out, seen = network_with(), windows(11, seed=3), []
    rows = mesh_transformer.fit(network, windows(), steps=4, val=held_out, hooks=[seen.append])
    assert seen == rows
    assert [row["step"] for row in rows if "val/loss_val" in row] == [2, 4]
    losses = network.eval({"obs": held_out[:, :-1], "target": held_out[:, 1:]})["loss"]
    # 1e-6: means of 11 losses in batches of 4 and at once, in f32.
    np.testing.assert_allclose(rows[-1]["val/loss_val"], np.mean(losses), rtol=1e-6)


@pytest.mark.slow
def test_targets_below_0_do_not_count():
    row = windows(1)[0]
    target = np.where(np.arange(SMALL["seq"]) < 9, -1, row[1:])
    network = network_with(z_loss=0.0)
    losses = network.eval({"obs": row[None, :-1], "target": row[None, 1:]})["all_loss"]
    [first] = mesh_transformer.fit(network, [(row[:-1], target)] * 4, steps=1)
    # 1e-6: a mean in f32.
    np.testing.assert_allclose(first["train/loss"], np.mean(losses[0, 9:]), rtol=1e-6)


@pytest.mark.slow
def test_a_record_set_gives_the_losses_of_training_on_it(tmp_path):
    rows = [row.astype(np.int64) for row in windows(30)]
    _, index, _ = write_set(tmp_path, "text", rows)
    from_records = mesh_transformer.fit(network_with(), index, tmp_path / "a", steps=4, val=index)
    with refused("run on records", "give the records, or another folder"):
        mesh_transformer.fit(network_with(), windows(), tmp_path / "a")
    again = mesh_transformer.fit(network_with(), Path(index))
    assert [row["train/loss"] for row in from_records] == [row["train/loss"] for row in again[:4]]
    assert "val/loss_val" in from_records[3]


def too_large():
    rows = windows()
    rows[3, 4] = SMALL["n_vocab"]
    return rows


BOOKS = {"val_set": {"books": "x"}, "keep_best": "books"}
IN_MEMORY = {"val_set": {"val": "in memory"}, "early_stop": 1}
# Config keys and arguments of `fit`; what the error names, and what it says to do.
REFUSALS = [
    ({"total_steps": None}, {}, "total_steps is not set", "set it"),
    ({}, {"steps": 0}, "steps is 0", "at least 1"),
    ({}, {"steps": 7.5}, "steps is 7.5", "a whole number"),
    ({}, {"hooks": print}, "hooks is <", "a list of functions"),
    ({}, {"hooks": [3]}, "hooks is [3]", "a list of functions"),
    ({}, {"hooks": iter([print])}, "hooks is <", "a list of functions"),
    ({}, {"val": iter(windows())}, "val is an iterator", "give an iterable"),
    ({}, {"val": np.arange(9)}, "val has 9 tokens", "more than seq (16)"),
    ({}, {"data": np.arange(16)}, "data has 16 tokens", "more than seq (16)"),
    ({}, {"data": [np.zeros((2, 2), np.int64)] * 8}, "an item of data", "expected"),
    ({}, {"data": too_large()}, f"token id {SMALL['n_vocab']}", "below n_vocab"),
    ({}, {"data": iter(windows(1))}, "data has fewer sequences than a batch", "give more"),
    (BOOKS, {"val": windows(8)}, "losses of 'books'", "val_set"),
    (IN_MEMORY, {}, "losses of 'val'", "give val"),
]


@pytest.fixture(scope="module")
def untrained():
    return network_with()


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "arguments", "named", "remedy"), REFUSALS)
def test_what_fit_cannot_use_is_refused_before_it_trains(untrained, keys, arguments, named, remedy):
    network = network_with(**keys) if keys else untrained
    with refused(named, remedy):
        mesh_transformer.fit(network, **{"data": windows()} | arguments)
    assert network.step == 0


@pytest.mark.slow
def test_a_network_without_weights_is_refused():
    network = network_with()
    network.only_generate()
    with refused("no weights to train", "init or load"):
        mesh_transformer.fit(network, windows())
