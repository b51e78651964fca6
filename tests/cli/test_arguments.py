"""Flags that several scripts share: their values, defaults and contradictions."""

import argparse
import json
from functools import partial

import jax
import pytest

from mesh_transformer.cli.arguments import (
    byte_count,
    model_arguments,
    model_parser,
    positive,
    run_arguments,
    run_parser,
    token_count,
)
from mesh_transformer.cli.machines import add_tpu_arguments, refuse_tpu_arguments, tpu_arguments
from mesh_transformer.config import Config
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import SMALL


@pytest.mark.parametrize("text", ["0", "-1", "2.5", "x"])
def test_positive_accepts_only_positive_integers(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text} is not a positive integer"):
        positive(text)
    assert positive("7") == 7


ZONE = {"tpu_zone": "us-central2-b"}


def parse(*words: str) -> argparse.Namespace:
    parser = run_parser("what it does")
    parser.add_argument("--tpu")
    add_tpu_arguments(parser)
    return parser.parse_args(["--config", "config.json", "--tpu", "pod", *words])


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("2M", 2**21), ("512k", 2**19), ("0.5M", 2**19), ("2,097,152", 2**21), ("1", 1)],
)
def test_numbers_of_tokens(text, tokens):
    assert token_count(text) == tokens


@pytest.mark.parametrize("text", ["0", "-1", "2G", "1.5", "0.0001K", "M", "two", ""])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{text} is not a number of tokens"):
        token_count(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("10GB", 10**10), ("500 mb", 5 * 10**8), ("1.5k", 1500), ("2T", 2 * 10**12), ("7", 7)],
)
def test_amounts_of_text(text, size):
    assert byte_count(text) == size


@pytest.mark.parametrize("text", ["0", "-1", "10GiB", "B", "0.5", ""])
def test_what_is_no_amount_of_text_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{text} is not a number of bytes"):
        byte_count(text)


def test_run_arguments(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | {"bucket": "./models", "model_dir": "run"}))
    words = ["--config", str(path), "--version", "2", "--max-steps", "7"]
    config, folder, options = run_arguments(run_parser(None).parse_args(words))
    assert (config.block, folder) == ("geglu", "./models/run")
    expected = {"max_steps": 7, "tune_model_path": None, "fresh_opt": False, "fall_back": False}
    expected |= {"validate": True, "profile": None}
    assert options == expected
    assert config.total_steps == 7
    words += ["--model-dir", "there", "--tune-model-path", "gpt-j", "--fresh-opt"]
    _, folder, options = run_arguments(run_parser(None).parse_args(words))
    assert folder == "there"
    assert options == expected | {"tune_model_path": "gpt-j", "fresh_opt": True}
    with pytest.raises(InputError, match="--fresh-opt requires --tune-model-path"):
        run_arguments(run_parser(None).parse_args(["--config", str(path), "--fresh-opt"]))


def test_mode_train_does_not_validate(tmp_path, capsys):
    path = tmp_path / "config.json"

    def options(mode: str, **changes: object) -> object:
        path.write_text(json.dumps(SMALL | changes))
        words = ["--config", str(path), "--model-dir", "there", "--mode", mode]
        return run_arguments(run_parser(None).parse_args(words))[2]["validate"]

    assert options("train_and_eval", val_set="a.index") is True
    assert options("train") is False
    assert capsys.readouterr().out == ""
    assert options("train", val_set="a.index") is False
    line = "--mode train: the config's val_set and eval_harness_tasks are not scored\n"
    assert capsys.readouterr().out == line
    for key, value in (("keep_best", "val"), ("early_stop", 3)):
        with pytest.raises(InputError, match="--mode train does not score val, which keep_best"):
            options("train", val_set="a.index", **{key: value})


def test_a_chat_template_becomes_a_config_key(tmp_path):
    path, template = tmp_path / "config.json", tmp_path / "chat.jinja"
    path.write_text(json.dumps(SMALL))
    template.write_text("{{ messages[0].content }}")
    words = ["--config", str(path), "--model-dir", "there", "--chat-template", str(template)]
    assert (
        run_arguments(run_parser(None).parse_args(words))[0].chat_template == template.read_text()
    )
    template.write_text("{% if %}")
    with pytest.raises(InputError, match=r"--chat-template .*: the chat template is not valid"):
        run_arguments(run_parser(None).parse_args(words))


@pytest.mark.slow
def test_a_config_with_another_tokenizer_than_the_models_is_refused(tmp_path):
    """In all modes and commands; keys about answers that it lacks are the model's."""
    values = SMALL | {"layers": 1, "n_vocab": 260, "tokenizer": "bytes", "total_steps": 3}
    answers = {"end_tokens": [7], "chat_template": "T", "sampling": {"temp": 0.5}}
    network = CausalTransformer(values | answers, devices=jax.devices()[:1])
    network.save(tmp_path / "model")
    network.close()
    own, other = tmp_path / "own.json", tmp_path / "other.json"
    parser = run_parser(None)
    parser.add_argument("--new", action="store_true")
    own.write_text(json.dumps(values))
    other.write_text(json.dumps(values | {"tokenizer": "gpt2"}))
    line = "model was created with the tokenizer bytes, which gives other tokens than gpt2; use one"

    def run(config, mode="train_and_eval") -> Config:
        words = ("--config", str(config), "--model-dir", str(tmp_path / "model"), "--mode", mode)
        return run_arguments(parser.parse_args(words))[0]

    def model(config, *words: str) -> Config | None:
        words = ("--config", str(config), "--model-path", str(tmp_path / "model"), *words)
        return model_arguments(model_parser(None).parse_args(words))[1]

    for read in (model, run, *(partial(run, mode=mode) for mode in ("eval", "eval_all"))):
        with pytest.raises(InputError, match=line):
            read(other)
        config = read(own)
        assert config is not None
        assert {key: getattr(config, key) for key in answers} == answers
    assert model(other, "--set", "tokenizer=gpt2") == Config.load(str(other))
    words = ["--config", str(other), "--model-dir", str(tmp_path / "model"), "--new"]
    assert run_arguments(parser.parse_args(words))[0] == Config.load(str(other))


@pytest.mark.parametrize(
    ("words", "values", "kind", "runtime", "tier"),
    [
        ([], {}, "v3-8", "tpu-ubuntu2204-base", "on_demand"),
        (["--preemptible"], {}, "v3-8", "tpu-ubuntu2204-base", "preemptible"),
        (["--preemptible", "--queued"], {}, "v3-8", "tpu-ubuntu2204-base", "spot"),
        (["--preemptible"], {"tpu_tier": "spot"}, "v3-8", "tpu-ubuntu2204-base", "spot"),
        ([], {"tpu_generation": "v4"}, "v4-16", "tpu-ubuntu2204-base", "on_demand"),
        ([], {"tpu_generation": "v5e"}, "v5litepod-8", "v2-alpha-tpuv5-lite", "on_demand"),
        (["--preemptible"], {"tpu_generation": "v5p"}, "v5p-16", "v2-alpha-tpuv5", "spot"),
        (["--tpu-generation", "v6e"], {"tpu_generation": "v2"}, "v6e-8", "v2-alpha-tpuv6e", None),
        (["--tpu-runtime-version", "b"], {"tpu_runtime_version": "a"}, "v3-8", "b", None),
        ([], {"tpu_runtime_version": "a", "tpu_tier": "spot"}, "v3-8", "a", "spot"),
    ],
)
def test_tpu_arguments_from_flags_config_and_defaults(words, values, kind, runtime, tier):
    """Flags override the config's keys; the defaults depend on the TPU generation."""
    config = Config(**SMALL | {"tpu_size": 8} | ZONE | values)
    spec, _ = tpu_arguments(parse(*words), config)
    assert (spec.name, spec.zone, spec.devices) == ("pod", "us-central2-b", 8)
    assert (spec.accelerator_type, spec.runtime) == (kind, runtime)
    assert spec.tier == (tier or "on_demand")
    assert spec.queued == ("--queued" in words)


@pytest.mark.parametrize("flag", ["--tpu-zone", "--tpu-region", "--tpu_region"])
def test_zone_flag_aliases_and_network_keys(flag):
    config = Config(**SMALL | ZONE)
    spec, _ = tpu_arguments(parse(flag, "europe-west4-a"), config)
    assert spec.zone == "europe-west4-a"
    network = config.replace(tpu_network="net", tpu_subnetwork="sub")
    spec, _ = tpu_arguments(parse(), network)
    assert (spec.network, spec.subnetwork) == ("net", "sub")


def test_ssh_arguments(monkeypatch):
    monkeypatch.setenv("LOGNAME", "me")
    config = Config(**SMALL | ZONE)
    _, ssh = tpu_arguments(parse(), config)
    assert (ssh.user, ssh.key_file, ssh.port) == ("me", "~/.ssh/google_compute_engine", 22)
    words = ["--ssh-user", "you", "--ssh-key", "key", "--ssh-port", "2222"]
    _, ssh = tpu_arguments(parse(*words), config)
    assert (ssh.user, ssh.key_file, ssh.port) == ("you", "key", 2222)


@pytest.mark.parametrize(
    ("words", "values", "message"),
    [
        (
            [],
            {"tpu_zone": None},
            "a TPU needs a zone; give --tpu-zone .*key tpu_zone",
        ),
        (["--tpu-zone", "europe-west4"], {}, "zone is 'europe-west4'; give a zone with its letter"),
        (["--tpu-generation", "v9"], {}, "tpu_generation is str 'v9', expected one of 'v2'"),
        (["--queued"], {"tpu_tier": "preemptible"}, "'preemptible', which cannot be queued"),
    ],
)
def test_invalid_tpu_settings_are_refused(words, values, message):
    config = Config(**SMALL | ZONE | values)
    with pytest.raises(InputError, match=message) as error:
        tpu_arguments(parse(*words), config)
    assert "\n" not in str(error.value)


def test_tpu_flags_without_tpu_are_refused():
    refuse_tpu_arguments(parse())
    for words in (["--preemptible"], ["--queued"], ["--tpu-zone", "a"], ["--ssh-key", "a"]):
        with pytest.raises(InputError, match=rf"^{words[0]} requires --tpu; "):
            refuse_tpu_arguments(parse(*words))
