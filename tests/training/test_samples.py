"""Texts that a network writes while it is trained."""

import itertools
import re

import jax
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.training import loop
from mesh_transformer.training.samples import Samples
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.support.small_run import assert_same_rows, rows_of, run_values

PROMPTS = ["ab", "", "\u00e9\n"]
CHANGES = {"tpu_size": 1, "cores_per_replica": 1, "tokenizer": "bytes", "n_vocab": 264}
CHANGES |= {"total_steps": 5, "val_every": 2, "layers": 1}


@pytest.mark.slow
def test_samples_are_shown_and_change_nothing(tmp_path, capsys):
    values, params = run_values(tmp_path, **CHANGES), {}
    for name, prompts in (("with", PROMPTS), ("without", [])):
        network = CausalTransformer(values | {"sample_prompts": prompts}, init=False)
        loop.train(network, str(tmp_path / name))
        params[name] = jax.device_get(network.params)
        printed = capsys.readouterr().out
        assert (", samples " in printed.splitlines()[-2]) == bool(prompts)  # where the time went
        parts = re.findall(r"^step (\d), sample:\n((?:    .*\n)+)", printed, re.MULTILINE)
        assert [int(step) for step, _ in parts] == [n for n in (2, 4, 5) for _ in prompts]
        texts = [text.replace("\n    ", "\n")[4:-1] for _, text in parts]
        if prompts:  # those of the last step are what the trained network writes
            tokens = [[256, 97, 98], [256, 256, 256], [0xC3, 0xA9, 10]]
            answers = network.generate(tokens, [2, 1, 3], 64, {"temp": 0.8, "seed": 0})
            expected = map(text_of, answers)
            assert texts[-3:] == [p + x for p, x in zip(prompts, expected, strict=True)]
            assert texts[:3] != texts[3:6]
    assert_same_rows(rows_of(tmp_path / "with"), rows_of(tmp_path / "without"))
    jax.tree.map(np.testing.assert_array_equal, *params.values())


def text_of(answer):
    """Return the text of bytes up to an end token (256), with marks for what is no text."""
    own = itertools.takewhile(lambda token: token != 256, answer.tolist())
    text = bytes(token for token in own if token < 256).decode(errors="replace")  # others: nothing
    return "".join(x if x.isprintable() or x in "\n\t" else "\ufffd" for x in text)


def test_a_tokenizer_that_does_not_fit_is_refused_before_the_first_step(tmp_path):
    values = run_values(tmp_path, **CHANGES | {"n_vocab": 128})
    network = CausalTransformer(values | {"sample_prompts": [""]}, init=False)
    with pytest.raises(InputError, match=r"sample_prompts: .*tokenizer.*or train without samples"):
        loop.train(network, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with pytest.raises(InputError, match="sample_prompts is str 'a', expected list of str"):
        Config.from_dict(values | {"sample_prompts": "a"})


def test_texts_of_a_model_with_fixed_positions_fit_into_its_window(tmp_path):
    values = run_values(tmp_path, **CHANGES) | {"block": "gpt2", "pe": "fixed"}
    network = CausalTransformer(values | {"sample_prompts": ["a", "ab"]})
    report = Samples(network).report()
    assert report.count("step 0, sample:") == 2
    long = "a" * (network.config.seq + 1)
    network = CausalTransformer(values | {"sample_prompts": [long]}, init=False)
    with pytest.raises(InputError, match=r"sample_prompts: a prompt has \d+ tokens.*\(seq \+ 1\)"):
        loop.train(network, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_hook_that_fails_does_not_prevent_the_last_save(tmp_path):
    def fail(row):
        if row["step"] >= 3:
            raise KeyError("hook")

    network = CausalTransformer(run_values(tmp_path, **CHANGES), init=False)
    with pytest.raises(KeyError, match="hook"):
        loop.train(network, str(tmp_path / "run"), on_row=fail)
    assert (tmp_path / "run" / f"step_{network.step}").is_dir()
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [*range(1, network.step + 1)]
