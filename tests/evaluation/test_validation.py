"""Scores of record sets: means over the unmasked tokens, and bytes of their text."""

import json
import math
import re
import sys

import numpy as np
import pytest

import device_train
from mesh_transformer.data.tfrecords import write_records
from mesh_transformer.data.tokenizer import bytes_of_tokens, load_tokenizer
from mesh_transformer.evaluation import validation
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError, NonFiniteError
from tests.support.llama_tokenizers import LLAMA_LIKE, PIECES

ROWS = 11
MESH = {"tpu_size": 8, "cores_per_replica": 4}  # batches of 2


@pytest.fixture
def masked(tmp_path):
    """Return random records with loss masks, as arrays [rows, T], and the path of their index."""
    rng = np.random.default_rng(1)
    records = rng.integers(0, 128, (3, ROWS, 16))
    records[2] %= 2
    names = ("input_ids", "labels", "input_mask")
    rows = [dict(zip(names, row, strict=True)) for row in records.swapaxes(0, 1)]
    write_records(str(tmp_path / "a.tfrecords"), rows)
    index = tmp_path / "a.index"
    index.write_text("a.tfrecords\n")
    return dict(zip(("obs", "target", "loss_mask"), records, strict=True)), str(index)


@pytest.mark.slow
def test_scores_are_means_over_the_unmasked_tokens(small, masked):
    records, index = masked
    network = CausalTransformer(small(**MESH, val_batches=4))
    actual = validation.score(network, index, bytes_of=np.arange(128))
    evaluated = network.eval({key: records[key].astype(np.uint32) for key in ("obs", "target")})
    unmasked = records["loss_mask"][:8] == 1  # 4 batches of 2
    loss = np.asarray(evaluated["all_loss"], np.float64)[:8][unmasked]
    assert actual.tokens == unmasked.sum()
    assert actual.loss == pytest.approx(loss.mean(), rel=1e-6)  # f32, in batches of different sizes
    assert actual.correct == np.asarray(evaluated["correct"])[:8][unmasked].sum()
    assert actual.bytes == records["target"][:8][unmasked].sum()


@pytest.mark.slow
def test_val_batch_multiplier_enlarges_validation_batches(small, masked):
    _, index = masked
    config = small(**MESH, val_batches=2, val_batch_multiplier=2.0)
    network = CausalTransformer(config)
    assert validation.batch_size(network) == 2 * network.batch_size
    actual = validation.score(network, index)
    plain = config.replace(val_batches=4, val_batch_multiplier=1.0)
    expected = validation.score(CausalTransformer(plain), index)
    assert (actual.tokens, actual.correct) == (expected.tokens, expected.correct)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-6)  # f32, in batches of two sizes


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_losses_that_are_not_finite_are_an_error_unless_masked(value):
    losses = {"all_loss": np.array([[1.0, value], [2.0, 3.0]]), "correct": np.zeros((2, 2), bool)}
    sample = dict.fromkeys(("obs", "target"), np.zeros((2, 2), np.uint32))
    with pytest.raises(NonFiniteError, match="the model's losses are NaN or infinite"):
        validation.Scores().add(sample, losses, None)
    scores = validation.Scores()
    scores.add(sample | {"loss_mask": np.array([[1, 0], [1, 1]])}, losses, None)
    assert scores.loss == 2


def test_a_set_without_unmasked_tokens_has_loss_nan():
    assert math.isnan(validation.Scores().loss)
    assert "nan" in validation.Scores().row("empty")


def test_bytes_of_tokens_add_up_to_the_bytes_of_the_text():
    tokenizer = load_tokenizer()
    text = "Caf\u00e9 \u4e2d\u6587, don't \U0001f600\n\n  x<|endoftext|>y"
    counts = bytes_of_tokens(tokenizer, 50400)
    assert counts[tokenizer(text)["input_ids"]].sum() == len(
        text.replace("<|endoftext|>", "").encode()
    )
    assert counts[50256:].sum() == 0  # the end-of-text token and the vocabulary's padding


@pytest.mark.parametrize("kind", LLAMA_LIKE)
def test_bytes_of_tokens_count_the_spaces_and_bytes_of_llama_2s(kind):
    tokenizer, rng = LLAMA_LIKE[kind](), np.random.default_rng(0)
    text = "a" + "".join(rng.choice(PIECES, 200))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    counts = bytes_of_tokens(tokenizer, 400)
    assert counts[tokens].sum() == len(f" {text}".encode())
    assert not counts[tokenizer.all_special_ids].any()


@pytest.mark.slow
def test_mode_eval_scores_the_newest_checkpoint(small, masked, tmp_path, monkeypatch, capsys):
    records, index = masked
    config = small(**MESH, val_set={"made": index}, val_batches=5)
    network = CausalTransformer(config)
    network.save(str(tmp_path / "model"))
    network.close()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.as_dict()))
    flags = ["--config", str(path), "--model-dir", str(tmp_path / "model"), "--mode", "eval"]
    monkeypatch.setattr(sys, "argv", ["device_train.py", *flags])
    device_train.main()
    captured = capsys.readouterr()
    assert re.search(rf"{index}: .*5batch", captured.err)  # a progress bar
    heading, row = captured.out.splitlines()
    name, tokens, loss, perplexity, accuracy, bits = row.split()
    scores = validation.score(network, index, bytes_of=bytes_of_tokens(load_tokenizer(), 128))
    assert (name, int(tokens)) == ("made", records["loss_mask"][:10].sum())
    assert float(loss) == pytest.approx(scores.loss, abs=5e-5)  # rounded for printing
    assert float(perplexity) == pytest.approx(math.exp(scores.loss), rel=1e-4)
    assert accuracy == f"{scores.correct / scores.tokens:.2%}"
    assert float(bits) == pytest.approx(scores.nats / math.log(2) / scores.bytes, abs=5e-5)
    assert heading.split() == ["set", "tokens", "loss", "perplexity", "accuracy", "bits/byte"]


@pytest.mark.parametrize(
    ("changes", "flags", "line"),
    [
        ({"val_set": {}}, [], "config: --mode eval needs the key val_set"),
        ({"val_batches": 0}, [], "val_batches above 0"),
        ({}, [], "model does not exist; expected a model folder"),
        ({}, ["--max-steps", "3"], "--max-steps is for training"),
        ({}, ["--tune-model-path", "x", "--fresh-opt"], "--fresh-opt is for training"),
    ],
    ids=str,
)
def test_invalid_settings_of_mode_eval_are_refused(
    small, masked, tmp_path, monkeypatch, changes, flags, line
):
    config = small(**(MESH | {"val_set": {"made": masked[1]}} | changes))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.as_dict()))
    model = ["--config", str(path), "--model-dir", str(tmp_path / "model"), "--mode", "eval"]
    monkeypatch.setattr(sys, "argv", ["device_train.py", *model, *flags])
    with pytest.raises(InputError, match=line):
        device_train.main()


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_losses_by_position_are_means_of_the_tokens_there(small, packed, monkeypatch):
    monkeypatch.setattr(validation, "FIRST", 3)
    rng = np.random.default_rng(5)
    rows = [{key: rng.integers(0, 128, 16) for key in ("obs", "target")} for _ in range(ROWS)]
    places = []
    for row in rows:
        row["loss_mask"] = rng.integers(0, 2, 16)
        cut = int(rng.integers(1, 15)) if packed else 16
        if packed:
            row["segment_ids"] = np.repeat([4, 2], [cut, 16 - cut])
        places.append(np.concatenate([np.arange(cut), np.arange(16 - cut)]))
    network = CausalTransformer(small(**MESH, val_by_position=True, length_buckets=[4, 8]))
    scores = validation.score(network, rows)
    batch = {key: np.stack([row[key] for row in rows]) for key in rows[0] if key != "loss_mask"}
    losses = np.asarray(network.eval(batch)["all_loss"], np.float64)
    counts = np.stack([row["loss_mask"] for row in rows]) == 1
    expected = {}
    for first, last in ((0, 2), (3, 5), (6, 11), (12, 23)):
        here = counts & (np.stack(places) >= first) & (np.stack(places) <= last)
        if here.any():
            expected[f"val_position/made/{first}-{last}"] = losses[here].mean()
    assert len(expected) == 4
    # f32 losses, in batches of different sizes.
    assert scores.position_metrics("made") == pytest.approx(expected, rel=1e-6)
    lines = scores.row("made").splitlines()[1:]
    assert [float(line.split()[-1]) for line in lines] == pytest.approx(
        list(expected.values()), abs=5e-5
    )  # rounded for printing
    without = CausalTransformer(small(**MESH))
    assert validation.score(without, rows).position_metrics("made") == {}


def test_the_last_position_of_a_range_is_below_a_power_of_two():
    scores = validation.Scores(by_position=np.zeros((2, validation.RANGES)))
    length = 1030
    nats = np.arange(length, dtype=np.float64)[None]
    sample = dict.fromkeys(("obs", "target"), np.zeros((1, length), np.uint32))
    scores.add(sample, {"all_loss": nats, "correct": nats > 0}, None)
    assert scores.position_metrics("a/b") == {
        "val_position/a/b/0-127": 63.5,
        "val_position/a/b/128-255": 191.5,
        "val_position/a/b/256-511": 383.5,
        "val_position/a/b/512-1023": 767.5,
        "val_position/a/b/1024-2047": 1026.5,
    }
