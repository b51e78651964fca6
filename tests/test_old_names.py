"""The original's names, calls and config keys: each works, or its error names a replacement."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from typing import Any

import jax
import numpy as np
import pytest

import mesh_transformer
from mesh_transformer import old_names
from mesh_transformer.config import Config
from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.old_names import NOW
from mesh_transformer.pod.launch import build_model
from mesh_transformer.pod.ray_head import _require_token
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import SMALL, random_batch
from tests.support.pages import ROOT

PAGE = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
KEYS = {field.name for field in fields(Config)}
NETWORK = "mesh_transformer.transformer_shard.CausalTransformer"

KEPT = [name for name, now in NOW.items() if " " not in now]
OLD_KEYS = [name for name in NOW if name.startswith("params[")]
ATTRIBUTES = [name for name in NOW if name.startswith(f"{NETWORK}.")]
REMOVED_MODULES = [name for name in NOW if "." not in name and name not in OLD_KEYS]
REMOVED = sorted({*NOW} - {*KEPT, *OLD_KEYS, *ATTRIBUTES, *REMOVED_MODULES})

DOTTED = r"(?:mesh_transformer|jax|optax)(?:\.\w+)+"
FLAGS = set(
    re.findall(
        r"--[a-z][\w-]+",
        "".join(
            path.read_text(encoding="utf-8")
            for folder in (ROOT, ROOT / "mesh_transformer" / "cli")
            for path in folder.glob("*.py")
        ),
    )
)
SCRIPT = r"[\w/]+\.py"
KEY = r"\bkey (\w+)|\bkeys ((?:\w+, )+\w+ and \w+)"


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch) -> None:
    """Set up Ray's tokens, which some replacements require, and hide scripts from imports."""
    _require_token()
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("/scripts")])
    monkeypatch.delitem(sys.modules, "create_finetune_tfrecords", raising=False)


def import_from(name: str) -> Any:
    """Return the result of `from <module> import <name>`."""
    module, _, attribute = name.rpartition(".")
    scope: dict[str, Any] = {}
    exec(f"from {module} import {attribute} as imported", scope)
    return scope["imported"]


def resolve(name: str) -> Any:
    """Return the object with a dotted name, of which any number of parts may be modules."""
    parts = name.split(".")
    result, module_name = importlib.import_module(parts[0]), parts[0]
    for part in parts[1:]:
        module_name = f"{module_name}.{part}"
        result = (
            getattr(result, part) if hasattr(result, part) else importlib.import_module(module_name)
        )
    return result


def keys_in(text: str) -> list[str]:
    """Return the config keys that a text names."""
    matches = re.findall(KEY, text)
    return [key for single, several in matches for key in re.split(", | and ", single or several)]


def tables(heading: str) -> list[tuple[str, str]]:
    """Return the rows, as (first cell, second cell), of the tables under a heading of the page."""
    (section,) = re.findall(
        rf"^{re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE
    )
    rows = re.findall(r"^\| (.*?) \| (.*?)(?: \|.*)?\|$", section, re.MULTILINE)
    return [(first, second.strip()) for first, second in rows if not first.startswith("old call")]


def test_every_old_name_has_exactly_one_kind():
    assert list(NOW) == sorted(NOW)
    kinds = (KEPT, OLD_KEYS, ATTRIBUTES, REMOVED_MODULES, REMOVED)
    assert sorted(name for kind in kinds for name in kind) == list(NOW)
    assert all(kinds)
    assert not [now for now in NOW.values() if "\n" in now or now != now.strip()]


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_name_refers_to_the_new_object(name):
    assert import_from(name) is resolve(NOW[name])
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute) is resolve(NOW[name])


@pytest.mark.parametrize("name", REMOVED)
def test_importing_a_removed_name_reports_its_replacement(name):
    with pytest.raises(ImportError) as error:
        import_from(name)
    assert str(error.value) == f"{name}: {NOW[name]}"
    module, _, attribute = name.rpartition(".")
    with pytest.raises(ImportError, match=re.escape(f"{name}: ")):
        getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("module", REMOVED_MODULES)
@pytest.mark.parametrize("statement", ["import {}", "from {} import f", "import {}.util"])
def test_importing_a_removed_module_reports_its_replacement(module, statement):
    with pytest.raises(ModuleNotFoundError) as error:
        exec(statement.format(module))
    assert str(error.value) == f"{module}: {NOW[module]}"


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_removed_attribute_reports_its_replacement(name):
    network = object.__new__(CausalTransformer)
    with pytest.raises(AttributeError) as error:
        getattr(network, name.rpartition(".")[2])
    assert str(error.value) == f"{name}: {NOW[name]}"


@pytest.mark.parametrize("name", NOW)
def test_the_replacement_exists_and_accepts_the_arguments(name):
    text = NOW[name]
    objects = re.findall(rf"({DOTTED})(?:\((.*?)\))?", text)
    scripts = re.findall(SCRIPT, text)
    assert objects or scripts or keys_in(text), "the text names no replacement"
    for dotted, arguments in objects:
        target = resolve(dotted)
        passed = [argument for argument in arguments.split(", ") if argument and argument[0] != "*"]
        if passed:
            named = dict(argument.split("=") for argument in passed if "=" in argument)
            unnamed = [argument for argument in passed if "=" not in argument]
            method = inspect.isfunction(target) and inspect.isclass(
                resolve(dotted.rpartition(".")[0])
            )
            inspect.signature(target).bind(*[None] * method, *unnamed, **named)
    for script in scripts:
        assert (ROOT / script).is_file(), script
    assert set(re.findall(r"--[\w-]+", text)) <= FLAGS
    assert set(keys_in(text)) <= KEYS


def test_the_helpers_find_keys_and_detect_missing_names():
    assert keys_in("set the key clip_norm, or the keys lr, end_lr and weight_decay") == [
        "clip_norm",
        "lr",
        "end_lr",
        "weight_decay",
    ]
    with pytest.raises(ModuleNotFoundError):
        resolve("mesh_transformer.model.layers.nothing")


def test_unknown_names_raise_the_usual_python_errors():
    from mesh_transformer import checkpoint, util

    layers = importlib.import_module("mesh_transformer.layers")
    for module in (checkpoint, util, layers, mesh_transformer.transformer_shard):
        assert not hasattr(module, "nothing")
        with pytest.raises(AttributeError, match=f"'{module.__name__}' has no attribute 'nothing'"):
            module.nothing  # noqa: B018
    network: Any = object.__new__(CausalTransformer)
    with pytest.raises(AttributeError, match="'CausalTransformer' object has no attribute 'nothi"):
        network.nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'mesh_transformer\.nothing'"):
        importlib.import_module("mesh_transformer.nothing")
    with pytest.raises(ModuleNotFoundError, match="No module named 'params'"):
        importlib.import_module("params")


def test_an_error_raised_by_a_property_is_not_hidden(monkeypatch):
    def broken(_):
        raise AttributeError("the real reason")

    monkeypatch.setattr(CausalTransformer, "replicas", property(broken))
    with pytest.raises(AttributeError, match="the real reason"):
        object.__new__(CausalTransformer).replicas  # noqa: B018


def test_existing_modules_take_precedence_over_old_names(tmp_path, monkeypatch):
    assert sys.meta_path.count(old_names._FINDER) == 1
    old_names.install()
    assert sys.meta_path.count(old_names._FINDER) == 1
    (tmp_path / "tasks.py").write_text("TASK = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tasks", raising=False)
    assert importlib.import_module("tasks").TASK == 1
    monkeypatch.delitem(sys.modules, "tasks")
    # The message of an old name would hide a module of the same name.
    assert not [name for name in NOW if (ROOT / f"{name.replace('.', '/')}.py").exists()]
    assert not [name for name in NOW if (ROOT / name.replace(".", "/")).exists()]


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("import tfrecord_loader", "No module named 'tfrecord_loader'"),
        (
            "import mesh_transformer\nfrom tfrecord_loader import TFRecordWIT",
            f"tfrecord_loader.TFRecordWIT: {NOW['tfrecord_loader.TFRecordWIT']}",
        ),
        (
            "from mesh_transformer.layers import getnorm",
            f"mesh_transformer.layers.getnorm: {NOW['mesh_transformer.layers.getnorm']}",
        ),
    ],
)
def test_old_names_are_reported_without_importing_jax(program, printed):
    heavy = "[name for name in ('jax', 'numpy', 'optax') if name in sys.modules]"
    lines = ("import sys", "try:", f"    exec({program!r})", "except ImportError as error:")
    script = "\n".join((*lines, "    print(error)", f"print({heavy})"))
    command = [sys.executable, "-c", script]
    process = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert process.stdout.splitlines() == [printed, "[]"]


# Calls of the original.


@pytest.mark.parametrize("name", OLD_KEYS)
def test_an_old_key_in_params_reports_its_replacement(name):
    params = SMALL | {re.findall('"(.*)"', name)[0]: object()}
    with pytest.raises(InputError) as error:
        CausalTransformer(params)
    assert str(error.value) == f"config: {name}: {NOW[name]}"
    with pytest.raises(InputError) as error:
        mesh_transformer.load(ROOT / "tests/data/original/f32/mp4_ga1", params)
    assert str(error.value) == f"config: {name}: {NOW[name]}"


def test_all_old_keys_in_params_are_reported_together():
    with pytest.raises(InputError) as error:
        CausalTransformer(SMALL | {"sampler": print, "optimizer": None})
    line = str(error.value)
    assert "\n" not in line
    assert line.index('params["sampler"]: leave') < line.index('; params["optimizer"]: leave')
    with pytest.raises(InputError, match="unknown key 'layer'; did you mean 'layers'"):
        CausalTransformer(SMALL | {"layer": 2})


@pytest.mark.parametrize(
    "call",
    [
        lambda: build_model({}, "name", "europe-west4-a", False),
        lambda: build_model({}, "name", "europe-west4-a", True, version=2),
        lambda: build_model({}, "name", region="europe-west4-a", preemptible=True),
        lambda: build_model({}, None, None, False),
    ],
)
def test_old_calls_of_build_model_report_the_replacement(call):
    with pytest.raises(InputError) as error:
        call()
    line = str(error.value)
    assert line.startswith("build_model(params, tpu_name, region, preemptible) is now build_model(")
    assert "\n" not in line
    (target,) = re.findall(DOTTED, line)
    assert target == "mesh_transformer.pod.launch.tpu_machines"
    assert callable(resolve(target))
    assert "train.py --tpu NAME" in line


@pytest.mark.slow
def test_old_calls_of_a_network_behave_as_documented():
    network: Any = CausalTransformer(SMALL | {"layers": 1}, devices=jax.devices()[:1])
    batch = random_batch(network.config, 1, 2)
    with pytest.raises(AttributeError, match=r"move_xmap: leave it out"):
        network.state = network.move_xmap(network.state, np.zeros(1))

    tokens, length = batch["obs"][0], np.full(2, 16, np.uint32)
    options = {"top_p": np.ones(2) * 0.9, "temp": np.ones(2)}
    output = network.generate(tokens, length, 3, options)
    assert output.shape == (2, 3)
    quoted = re.findall(r"IndexError: `(.*?)` for one prompt, `(.*?)` for several", PAGE)
    for rows, message in zip((output[:1], output), quoted[0], strict=True):
        with pytest.raises(IndexError) as error:
            rows[1][0][:, :, 0]
        assert str(error.value) == message
    with pytest.raises(TypeError, match="unexpected keyword argument 'return_logits'"):
        network.generate(tokens, length, 3, options, return_logits=True)

    scored = network.eval({"obs": tokens, "target": tokens, "ctx_length": length})
    np.testing.assert_array_equal(
        scored["loss"], network.eval({"obs": tokens, "target": tokens})["loss"]
    )
    (message,) = re.findall("ValueError: `(.*?)`", PAGE)
    with pytest.raises(ValueError, match=message):
        _loss, _last_loss, _grad_norm, _grad_norm_micro = network.train(batch)
    assert {"loss", "last_loss", "grad_norm", "grad_norm_micro"} <= set(network.train(batch))


def test_old_calls_of_a_cluster_and_a_loader_behave_as_documented():
    from mesh_transformer.pod.cluster import TPUCluster

    assert not hasattr(TPUCluster, "move")
    for method, arguments in (("save", (1, "bucket", "path")), ("load", ("bucket", "path"))):
        signature = inspect.signature(getattr(TPUCluster, method))
        with pytest.raises(TypeError):
            signature.bind(None, *arguments, **({"keep_n": 3} if method == "save" else {}))
    cluster = object.__new__(TPUCluster)
    cluster.config, cluster.hosts = Config(**SMALL), []
    with pytest.raises(InputError, match="train: the batch is of type ndarray, expected a dict of"):
        cluster.train(np.zeros((1, 2, 17), np.uint32))
    with pytest.raises(InputError, match="eval: the batch is of type ndarray, expected a dict of"):
        cluster.eval(np.zeros((1, 2, 17), np.uint32))
    assert not {"get_state", "reset"} & set(dir(TFRecordNewInputs))
    loader = TFRecordNewInputs(str(ROOT / "data/tiny.val.index"), (2, 3), 64)
    (row,) = (second for first, second in tables("## Calls that changed") if "get_samples" in first)
    assert "each `[A, B, T]`" in row
    assert {key: rows.shape for key, rows in loader.get_samples().items()} == {
        "obs": (2, 3, 64),
        "target": (2, 3, 64),
    }
    loader.close()


# The page docs/porting.md.


def test_the_page_lists_every_old_name():
    headings = re.findall(r"^### `(.*)`$", PAGE, re.MULTILINE)
    sections = [(f"### `{heading}`", f"{heading}.") for heading in headings]
    documented = {}
    for heading, prefix in (*sections, ("### Other modules", ""), ("## Config keys", "")):
        for first, second in tables(heading):
            for name in re.findall("`(.*?)`", first):
                documented[prefix + name] = second.replace("`", "")
    for key in KEYS:
        documented.pop(key, None)
    assert documented == NOW


def test_the_page_lists_the_config_keys_of_the_original():
    kept = [
        key
        for first, second in tables("## Config keys")
        for key in re.findall("`(.*?)`", first)
        if second.startswith("unchanged")
    ]
    assert len(kept) == len(set(kept))
    assert set(kept) <= KEYS
    # The keys of the original's config file, and the other keys that its programs read.
    config_keys = json.loads((ROOT / "configs/6B_roto_256.json").read_text(encoding="utf-8"))
    others = {"noise_scale_alpha", "early_cast", "bf16_optimizer", "early_collect"}
    others.add("val_batch_multiplier")
    assert set(kept) == set(config_keys) | others


def flags_in(text: str) -> set[str]:
    """Return the flags in a text; any of them may be written with underscores."""
    return {flag.replace("_", "-") for flag in re.findall(r"--[\w-]+", text)}


def test_the_scripts_and_flags_on_the_page_exist():
    rows = tables("## Scripts")
    assert len(rows) >= 15
    for first, second in rows:
        for path in re.findall(r"[\w/]+\.(?:py|sh|yaml|ipynb)\b", second):
            assert (ROOT / path).is_file(), path
        assert flags_in(second) <= FLAGS, second
        assert all(map(resolve, re.findall(DOTTED, second)))
        if second.startswith("the same;"):
            (script,) = re.findall(r"^`(\w+\.py)", first)
            assert (ROOT / script).is_file(), script
            assert flags_in(first) <= FLAGS, first
