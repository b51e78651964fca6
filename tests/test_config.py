"""The config: parsing, defaults, and one-line errors for invalid values."""

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from mesh_transformer.checkpoint.state_tree import check_same_model, check_same_run
from mesh_transformer.config import Config
from mesh_transformer.model import transformer
from mesh_transformer.util import InputError
from tests.conftest import SMALL

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.json"))
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
YAML = """
# Only YAML allows comments.
layers: 2
d_model: 64
n_heads: 8
n_vocab: 128
seq: 16
lr: 0.001
val_set: {books: data/books.index}
eval_harness_tasks: [lambada, piqa]
"""


def error_line(changes: dict[str, Any]) -> str:
    with pytest.raises(InputError) as error:
        Config.from_dict(SMALL | changes)
    line = str(error.value)
    assert line.startswith("config: ")
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"warmup_step": 3}, ["unknown key 'warmup_step'", "did you mean 'warmup_steps'?"]),
        ({"d_modle": 64}, ["unknown key 'd_modle'", "did you mean 'd_model'?"]),
        ({"xyzzy": 1}, ["unknown key 'xyzzy'", "remove it"]),
        ({"memory_every": 5}, ["'memory_every' no longer exists", "set ckpt_every instead"]),
        ({"layers": "two"}, ["layers is str 'two'", "expected int"]),
        ({"layers": 2.0}, ["layers is float 2.0", "expected int"]),
        ({"layers": True}, ["layers is bool True", "expected int"]),
        ({"layers": None}, ["layers is NoneType None", "expected int"]),
        ({"lr": "1e-4"}, ["lr is str '1e-4'", "expected float"]),
        ({"early_cast": 1}, ["early_cast is int 1", "expected bool"]),
        ({"seq": [16]}, ["seq is list [16]", "expected int"]),
        ({"objective": "dop"}, ["objective is str 'dop'", "did you mean 'dpo'?"]),
        ({"objective": "dpo", "beta": 0.0}, ["beta is 0.0, expected above 0"]),
        ({"beta": 0.1}, ["beta is 0.1, but objective is null; set objective"]),
        ({"reference": ""}, ["reference is an empty string"]),
        ({"teacher": ""}, ["teacher is an empty string"]),
        ({"distill_weight": 1.5}, ["distill_weight is 1.5, expected at most 1"]),
        ({"shuffle_buffer": -1}, ["shuffle_buffer is -1, expected at least 0"]),
        (
            {"shuffle_buffer": "some"},
            ["shuffle_buffer is str 'some', expected int or one of 'all'"],
        ),
        ({"distill_temperature": 0.0}, ["distill_temperature is 0.0, expected above 0"]),
        ({"undesirable_weight": 0.0}, ["undesirable_weight is 0.0, expected above 0"]),
        ({"val_set": ["a"]}, ["val_set is list", "expected dict of str, str"]),
        ({"val_set": {"a": 1}}, ["val_set is dict", "expected dict of str, str"]),
        ({"train_set": 3}, ["train_set is int 3", "expected str or MODULE:NAME or dict of str"]),
        ({"eval_harness_tasks": "piqa"}, ["eval_harness_tasks is str", "expected list of str"]),
        ({"pe": "rotery"}, ["pe is str 'rotery'", "did you mean 'rotary'?", "'fixed', 't5'"]),
        ({"norm": "layer-norm"}, ["norm is str 'layer-norm'", "did you mean 'layernorm'?"]),
        ({"norm": "batch"}, ["norm is str 'batch'", "'scalenorm-bias'"]),
        ({"block": "swiglu"}, ["block is str 'swiglu'", "'gptj', 'geglu'"]),
        (
            {"norm": "layernorm-desync", "partitioning": "jit"},
            ["norm is layernorm-desync", "partitioning is jit; set it to shard_map"],
        ),
        ({"zero": 2}, ["zero is int 2", "one of 0, 1, 3"]),
        ({"zero": True}, ["zero is bool True", "one of 0, 1, 3"]),
        ({"dtype": "float16"}, ["dtype is str 'float16'", "'bfloat16', 'float32'"]),
        ({"version": 3}, ["version is int 3", "one of 1, 2"]),
        ({"tpu_generation": "v5"}, ["tpu_generation is str 'v5'", "did you mean 'v5p'?", "'v6e'"]),
        ({"tpu_generation": 4}, ["tpu_generation is int 4", "one of 'v2'"]),
        ({"tpu_tier": "ondemand"}, ["tpu_tier is str", "did you mean 'on_demand'?"]),
        ({"tpu_zone": 3}, ["tpu_zone is int 3", "expected str or null"]),
        ({"tpu_region": "a"}, ["unknown key 'tpu_region'", "did you mean 'tpu_zone'?"]),
        ({"n_heads": 6}, ["d_model is 64", "not divisible by n_heads 6", "set head_size"]),
        ({"tpu_size": 6, "cores_per_replica": 4}, ["tpu_size is 6", "cores_per_replica 4"]),
        ({"pe_rotary_dims": 10}, ["pe_rotary_dims is 10", "above the head size 8", "lower"]),
        ({"pe_rotary_dims": 5}, ["pe_rotary_dims is 5", "positive even number"]),
        ({"lora_rank": -1}, ["lora_rank is -1", "0 (off) to d_model (64)"]),
        ({"lora_rank": 2, "lora_alpha": 0.0}, ["lora_alpha is 0.0", "above 0"]),
        ({"lora_targets": ["q", "w"]}, ["lora_targets has 'w'", "q, v, k, o, fc, out"]),
        ({"lora_targets": ["q"], "version": 2}, ["lora_targets has 'q'", "fused_in, fused_out"]),
        ({"lora_targets": ["q", "q"]}, ["lora_targets is ['q', 'q']", "no duplicates"]),
        ({"lora_targets": []}, ["lora_targets is []", "at least one"]),
        ({"pe_rotary_dims": 0}, ["pe_rotary_dims is 0", "positive even number"]),
        ({"seed": 2**63}, [f"seed is {2**63}", "expected less than 2**63"]),
        ({"seed": -(2**63) - 1}, [f"seed is {-(2**63) - 1}", "expected at least -2**63"]),
        ({"total_steps": 0}, ["total_steps is 0", "expected at least 1"]),
        ({"eval_harness_limit": 0}, ["eval_harness_limit is 0", "expected at least 1"]),
        ({"batch_ramp_from": 0}, ["batch_ramp_from is 0", "expected 1 to"]),
        ({"d_head": 8}, ['params["d_head"]: use the key head_size']),
        ({"lr": "5e-5"}, ["lr is str '5e-5'", "remove the quotes"]),
        ({"layers": 0}, ["layers is 0", "expected at least 1"]),
        ({"layers": 10**9}, ["layers is 1000000000", "expected at most 4096"]),
        ({"n_heads": 0}, ["n_heads is 0", "expected at least 1"]),
        ({"seq": -1}, ["seq is -1", "expected at least 1"]),
        ({"lr": -1.0}, ["lr is -1.0", "expected at least 0"]),
        ({"adam_b1": 1}, ["adam_b1 is 1.0", "below 1"]),
        ({"clip_norm": 0}, ["clip_norm is 0.0", "expected above 0"]),
        ({"rotary_scaling": {"rope_type": "xpos"}}, ["rope_type 'xpos'", "linear, dynamic"]),
        ({"rotary_scaling": {"rope_type": "linear"}}, ["type linear lacks 'factor'"]),
        ({"rotary_scaling": LINEAR | {"mscale": 1.0}}, ["type linear has 'mscale'", "remove it"]),
        ({"rotary_scaling": LINEAR | {"factor": "8"}}, ["factor is '8'", "a number above 0"]),
        ({"rotary_scaling": LINEAR | {"factor": None}}, ["factor is None", "a number above 0"]),
        ({"rotary_scaling": YARN | {"truncate": 1}}, ["truncate is 1", "expected true or false"]),
        ({"rotary_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, ["high_freq_factor is 1.0"]),
        ({"rotary_scaling": YARN, "rotary_base": 1.0}, ["rotary_base is 1.0", "expected above 1"]),
        ({"block": "llama", "biases": ["q", "q"]}, ["biases is ['q', 'q']", "no duplicates"]),
        ({"block": "llama", "biases": ["w"]}, ["biases has 'w'", "q, v, k, o, fc, out, gate"]),
        ({"unrotated_layers": [1, 1]}, ["unrotated_layers is [1, 1]", "no duplicates"]),
        ({"unrotated_layers": [-1]}, ["unrotated_layers has -1", "expected numbers from 0"]),
        ({"sliding_window": 4, "sliding_layers": [0, 0]}, ["sliding_layers is [0, 0]"]),
        ({"sliding_window": 4, "sliding_layers": [9]}, ["sliding_layers has 9"]),
        ({"sliding_rotary_base": 5.0}, ["sliding_rotary_base is 5.0", "sliding_window is null"]),
        ({"pe": "fixed", "rotary_base": 5.0}, ["rotary_base is 5.0, which pe fixed does not"]),
        ({"pe": "fixed", "unrotated_layers": [0]}, ["unrotated_layers is [0], which pe fixed"]),
        ({"pe": "t5", "rotary_scaling": LINEAR}, ["rotary_scaling is {", "which pe t5 does not"]),
        (
            {"version": 2, "norm": "rms", "qk_norm": "projection"},
            ["qk_norm is 'projection', which fused block geglu does not"],
        ),
        ({"attention_window": 17}, ["attention_window is 17", "at most seq (16)"]),
    ],
    ids=str,
)
def test_invalid_values_are_reported_with_key_value_and_remedy(changes, parts):
    line = error_line(changes)
    for part in parts:
        assert part in line


@pytest.mark.parametrize("field", dataclasses.fields(Config), ids=lambda field: field.name)
def test_absurd_values_are_refused(field):
    """No key takes numbers too large to compute with, and none of a path an empty one."""
    annotation = typing.get_type_hints(Config)[field.name]
    kinds = (annotation, *typing.get_args(annotation))
    absurd: list[Any] = [2**70] * (int in kinds) + [1e300] * (float in kinds)
    if field.name in ("train_set", "bucket", "model_dir", "tokenizer", "tune_model_path"):
        absurd.append("")
    for value in absurd:
        line = error_line({field.name: value})
        assert f"{field.name} is " in line or "tpu_size is " in line  # whose default another key is


def test_a_missing_required_key_is_reported():
    values = {key: value for key, value in SMALL.items() if key != "n_vocab"}
    with pytest.raises(InputError, match="required key 'n_vocab' is missing"):
        Config.from_dict(values)


@pytest.mark.parametrize("key", ["train_set", "total_steps"])
def test_training_requires_more_keys_than_a_model(key):
    values = SMALL | {"train_set": "a.index", "total_steps": 3}
    Config.from_dict(values).require_to_train()
    with pytest.raises(InputError, match=f"training needs the key '{key}'"):
        Config.from_dict(values | {key: None}).require_to_train()


def test_a_run_may_stop_before_its_schedule_ends():
    values = SMALL | {"train_set": "a.index", "schedule": "wsd", "warmup_steps": 100}
    Config.from_dict(values | {"total_steps": 1000}).require_to_train(max_steps=3)
    Config.from_dict(SMALL | {"train_set": "a.index"}).require_to_train(max_steps=3)


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.json", "{", ["a.json", "not JSON at line 1, column 2"]),
        ("a.json", "[1]", ["a.json", "found list [1]", "expected one mapping"]),
        ("a.json", '{"layers": 2}', ["a.json", "required key 'd_model' is missing"]),
        ("a.json", json.dumps(SMALL | {"lr": "x"}), ["a.json", "lr is str 'x'"]),
        ("a.yaml", "a: [1", ["a.yaml", "not YAML"]),
        ("a.yaml", "", ["a.yaml", "found NoneType None", "expected one mapping"]),
        (
            "a.yaml",
            json.dumps(SMALL)[:-1] + ', "lr": 1e-4}',
            ["a.yaml", "lr is ", "1e-4", "needs a decimal point: 1.0e-4"],
        ),
        ("a.yml", "layers: 2\nlayer: 2", ["a.yml", "unknown key 'layer'", "'layers'"]),
    ],
)
def test_errors_in_a_config_file_name_the_file(tmp_path, name, text, parts):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError) as error:
        Config.load(str(path))
    line = str(error.value)
    assert "\n" not in line
    for part in parts:
        assert part in line


def test_a_missing_config_file_is_reported(tmp_path):
    with pytest.raises(InputError, match=r"none\.json cannot be read \(No such file"):
        Config.load(str(tmp_path / "none.json"))


def test_json_and_yaml_give_the_same_config(tmp_path):
    (tmp_path / "a.yaml").write_text(YAML)
    values = {
        "layers": 2,
        "d_model": 64,
        "n_heads": 8,
        "n_vocab": 128,
        "seq": 16,
        "lr": 0.001,
        "val_set": {"books": "data/books.index"},
        "eval_harness_tasks": ["lambada", "piqa"],
    }
    (tmp_path / "a.json").write_text(json.dumps(values))
    from_yaml = Config.load(str(tmp_path / "a.yaml"))
    assert from_yaml == Config.load(str(tmp_path / "a.json")) == Config.from_dict(values)
    assert from_yaml == Config.of(tmp_path / "a.yaml") == Config.of(values) == Config.of(from_yaml)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_committed_config_loads_and_round_trips(path):
    config = Config.load(str(path))
    values = json.loads(path.read_text())
    for key, value in values.items():
        assert getattr(config, key) == ({} if key == "val_set" and value is None else value)
    reloaded = Config.from_dict(json.loads(json.dumps(config.as_dict())))
    assert reloaded == config
    assert hash(reloaded) == hash(config)


def test_the_version_determines_default_values():
    first = Config.from_dict(SMALL)
    assert (first.block, first.partitioning, first.zero) == ("gptj", "shard_map", 0)
    second = Config.from_dict(SMALL | {"version": 2})
    assert (second.block, second.partitioning, second.zero) == ("geglu", "jit", 1)
    no_early_collect = Config.from_dict(SMALL | {"version": 2, "early_collect": False})
    assert no_early_collect.zero == 3
    mixed = Config.from_dict(SMALL | {"version": 2, "block": "gptj", "zero": 0})
    assert (mixed.block, mixed.partitioning, mixed.zero) == ("gptj", "jit", 0)


def test_default_sizes_are_derived_from_other_keys():
    values = {key: value for key, value in SMALL.items() if key != "pe_rotary_dims"}
    config = Config.from_dict(values | {"cores_per_replica": 4})
    assert (config.d_head, config.d_rotary, config.d_ff) == (8, 8, 256)
    assert (config.window, config.tpu_size) == (16, 4)
    # The heads need not add up to d_model; cores_per_replica must divide only their number.
    odd = Config.from_dict(values | {"head_size": 6, "n_heads": 4, "cores_per_replica": 4})
    assert (odd.d_head, odd.d_rotary) == (6, 6)


def test_integers_are_converted_to_floats_for_float_keys():
    config = Config.from_dict(SMALL | {"lr": 1, "clip_norm": 2})
    assert isinstance(config.lr, float)
    assert config == Config.from_dict(SMALL | {"lr": 1.0, "clip_norm": 2.0})


def test_a_config_is_immutable_but_has_replace():
    config = Config.from_dict(SMALL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.layers = 3  # type: ignore[misc]
    assert config.replace(layers=3).layers == 3
    assert config.layers == 2
    with pytest.raises(InputError, match="layers is 0"):
        config.replace(layers=0)


@pytest.mark.parametrize(
    ("bucket", "model_dir", "folder"),
    [
        ("my-bucket", "run", "gs://my-bucket/run"),
        ("gs://my-bucket/", "/run/", "gs://my-bucket/run"),
        ("s3://b", "run", "s3://b/run"),
        ("./models", "run", "./models/run"),
        ("/data/models/", "run", "/data/models/run"),
        (".", "run", "./run"),
    ],
)
def test_the_model_folder_is_derived_from_bucket_and_model_dir(bucket, model_dir, folder):
    values = SMALL | {"bucket": bucket, "model_dir": model_dir}
    assert Config.from_dict(values).model_folder() == folder


def test_a_missing_model_folder_is_reported_with_a_remedy():
    with pytest.raises(InputError, match="set bucket and model_dir, or pass --model-dir"):
        Config.from_dict(SMALL).model_folder()


def test_replace_updates_keys_that_have_derived_defaults():
    config = Config(**SMALL)
    assert config.replace(seq=32).window == 32
    assert config.replace(seq=8).window == 8
    assert config.replace(n_heads=4).d_head == 16
    assert config.replace(cores_per_replica=4).tpu_size == 4
    second = config.replace(version=2)
    assert (second.block, second.partitioning, second.zero) == ("geglu", "jit", 1)
    assert config.replace(block="geglu").replace(version=2).block == "geglu"
    assert config.replace(attention_window=5).replace(seq=32).window == 5


@pytest.mark.parametrize(
    ("key", "value"), [("n_heads", 4), ("norm", "rmsnorm"), ("pe_rotary_dims", 2), ("pe", "t5")]
)
def test_weights_of_another_model_are_refused_even_if_shapes_match(key, value):
    config = Config(**SMALL)
    check_same_model(config, config.as_dict(), "runs/step_3")
    with pytest.raises(InputError, match=rf"^runs/step_3: its model has {key} .*{value}"):
        check_same_model(config, config.replace(**{key: value}).as_dict(), "runs/step_3")


def test_only_a_window_smaller_than_seq_must_match_the_model():
    config = Config(**SMALL)
    check_same_model(config, config.replace(seq=8).as_dict(), "there")
    narrow = config.replace(attention_window=4)
    check_same_model(narrow, narrow.replace(seq=8).as_dict(), "there")
    for expected, actual in ((config, narrow), (narrow, config)):
        with pytest.raises(InputError, match=r"^there: its model has attention_window \d+, but "):
            check_same_model(expected, actual.as_dict(), "there")


def test_rotary_scaling_may_be_added_to_a_model_but_not_left_out_or_changed_in_a_run():
    plain = Config(**SMALL)
    scaled = plain.replace(seq=32, rotary_scaling=LINEAR)
    check_same_model(scaled, plain.as_dict(), "there")
    with pytest.raises(InputError, match=r"^there: its model has rotary_scaling {.*, but .* None"):
        check_same_model(plain, scaled.as_dict(), "there")
    check_same_run(scaled, scaled.as_dict(), "there")
    for one, other in ((plain, scaled), (scaled, plain)):
        with pytest.raises(InputError, match=r"^there.* rotary_scaling .*; "):
            check_same_run(one, other.as_dict(), "there")


def test_the_model_is_what_its_keys_say():
    """Programs and declarations that are cached by it serve all configs with the same keys."""
    config = Config(**SMALL)
    others = {"lr": 1.0, "seed": 3, "zero": 1, "cores_per_replica": 2, "per_replica_batch": 4}
    assert config.replace(**others).model == config.model
    assert transformer.declarations(config.replace(**others)) == transformer.declarations(config)
    for key, value in {"norm": "rmsnorm", "remat": "dots", "lora_rank": 2}.items():
        assert config.replace(**{key: value}).model != config.model
    desync = config.replace(norm="layernorm-desync")  # whose parameters depend on mp
    assert desync.replace(cores_per_replica=2).model != desync.model


def test_numbers_must_be_finite():
    assert "lr is nan, expected a finite number" in error_line({"lr": float("nan")})


def test_val_set_may_be_one_path_as_in_early_configs_of_the_original():
    assert Config.from_dict(SMALL | {"val_set": "pile.val.index"}).val_set == {
        "val": "pile.val.index"
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr=1e-4", ("lr", 1e-4)),
        ("layers=3", ("layers", 3)),
        ("early_cast=true", ("early_cast", True)),
        ("model_dir=7", ("model_dir", "7")),
        ("model_dir=", ("model_dir", "")),
        ("bucket=null", ("bucket", None)),
        ("name=null", ("name", "null")),
        ("train_set=a=b.index", ("train_set", "a=b.index")),
        ('val_set={"a": "b"}', ("val_set", {"a": "b"})),
        ('lora_targets=["q"]', ("lora_targets", ["q"])),
    ],
)
def test_setting_parses_json_and_bare_strings(text, expected):
    assert Config.setting(text) == expected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lr", "--set lr: expected KEY=VALUE"),
        ("lr=", "--set lr=: expected float"),
        ("layer=3", "--set layer=3: unknown key 'layer'; did you mean 'layers'?"),
        (
            "=3",
            "--set =3: unknown key ''; `mesh-transformer keys` lists the keys",
        ),
        ("dtype=bf16", "--set dtype=bf16: expected one of 'bfloat16', 'float32'"),
        ("layers=true", "--set layers=true: expected int"),
    ],
)
def test_invalid_settings_are_refused(text, line):
    with pytest.raises(InputError, match=re.escape(line)):
        Config.setting(text)


def test_removed_keys_of_earlier_checkpoints_are_left_out():
    config = Config(**SMALL)
    assert Config.from_dict(config.as_dict() | {"memory_every": None}) == config
    assert config.replace(memory_every=None) == config


def test_unknown_key_to_replace_is_refused():
    with pytest.raises(InputError, match="config: unknown key 'layer'; did you mean 'layers'"):
        Config(**SMALL).replace(layer=3)


def test_paths_may_be_path_objects():
    index = Path("data") / "some.index"
    config = Config(**SMALL).replace(train_set={index: 0.5, "other.index": 0.5}, val_set=index)
    assert config.train_set == {"data/some.index": 0.5, "other.index": 0.5}
    assert config.val_set == {"val": "data/some.index"}
    assert json.loads(json.dumps(config.as_dict()))["val_set"] == config.val_set


def test_learning_rate_decays_until_the_end_by_default():
    config = Config(**SMALL).replace(total_steps=50, warmup_steps=8, anneal_steps=None)
    assert config.anneal_steps == 42
    assert config.replace(total_steps=20).anneal_steps == 12
    assert config.replace(anneal_steps=30).replace(total_steps=20).anneal_steps == 30
    assert config.replace(total_steps=None).anneal_steps == 1


def test_a_preset_replaces_what_describes_the_model(tmp_path):
    config = Config.load("tiny", model="gpt2-medium", changes={"seq": 64})
    tiny = Config.load("tiny")
    assert (config.block, config.layers, config.n_heads, config.seq) == ("gpt2", 24, 16, 64)
    assert (config.pe, config.tie_head) == ("fixed", True)  # the block's, not those of the file
    assert (config.train_set, config.lr) == (tiny.train_set, tiny.lr)
    other = {"norm": "rmsnorm", "head_size": 64, "attention_window": 32, "seq": 64}
    (tmp_path / "other.json").write_text(json.dumps(tiny.as_dict() | other))
    assert Config.load(str(tmp_path / "other.json"), model="gpt2-medium", changes={"seq": 64}) == (
        config
    )
    assert Config.load("gpt2-medium") == Config.load(None, model="gpt2-medium")
    with pytest.raises(InputError, match="model 'gpt3' is not a preset; choose one of gpt-j-6b, "):
        Config.load("tiny", model="gpt3")
    with pytest.raises(InputError, match="model gpt2: layers is 0, expected at least 1"):
        Config.load(None, model="gpt2", changes={"layers": 0})
