"""The original's names, calls and config keys: each works or names a replacement that exists."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import mesh_transformer
from mesh_transformer import old_names
from mesh_transformer.checkpoint import original
from mesh_transformer.config import Config
from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.old_names import NOW
from mesh_transformer.pod.launch import build_model
from mesh_transformer.pod.ray_head import _require_token
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import SMALL, random_batch
from tests.support.documents import ROOT, new_place

PAGE = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
KEYS = {field.name for field in fields(Config)}
NETWORK = "mesh_transformer.transformer_shard.CausalTransformer"

KEPT = [name for name, now in NOW.items() if " " not in now]
OLD_KEYS = [name for name in NOW if name.startswith("params[")]
ATTRIBUTES = [name for name in NOW if name.startswith(f"{NETWORK}.")]
GONE_MODULES = [name for name in NOW if "." not in name and name not in OLD_KEYS]
GONE = sorted({*NOW} - {*KEPT, *OLD_KEYS, *ATTRIBUTES, *GONE_MODULES})

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
    """Ray, which some replacements import, requires tokens; scripts are no modules."""
    _require_token()
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("/scripts")])
    monkeypatch.delitem(sys.modules, "create_finetune_tfrecords", raising=False)


def import_from(name: str) -> Any:
    """What `from <module> import <name>` gives."""
    module, _, attribute = name.rpartition(".")
    scope: dict[str, Any] = {}
    exec(f"from {module} import {attribute} as imported", scope)
    return scope["imported"]


def resolve(name: str) -> Any:
    """The object of a dotted name, whichever parts of it are modules."""
    parts = name.split(".")
    found, at = importlib.import_module(parts[0]), parts[0]
    for part in parts[1:]:
        at = f"{at}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(at)
    return found


def keys_in(text: str) -> list[str]:
    """The config keys that a text names."""
    found = re.findall(KEY, text)
    return [key for one, several in found for key in re.split(", | and ", one or several)]


def tables(heading: str) -> list[tuple[str, str]]:
    """The rows (first cell, second cell) of the tables under a heading of the page."""
    (section,) = re.findall(
        rf"^{re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE
    )
    rows = re.findall(r"^\| (.*?) \| (.*?)(?: \|.*)?\|$", section, re.MULTILINE)
    return [(first, second.strip()) for first, second in rows if not first.startswith("old call")]


def test_every_row_is_of_one_kind():
    assert list(NOW) == sorted(NOW)
    kinds = (KEPT, OLD_KEYS, ATTRIBUTES, GONE_MODULES, GONE)
    assert sorted(name for kind in kinds for name in kind) == list(NOW)
    assert all(kinds)
    assert not [now for now in NOW.values() if "\n" in now or now != now.strip()]


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_name_is_the_new_object(name):
    assert import_from(name) is resolve(NOW[name])
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute) is resolve(NOW[name])


@pytest.mark.parametrize("name", GONE)
def test_importing_a_name_that_is_gone_names_its_replacement(name):
    with pytest.raises(ImportError) as raised:
        import_from(name)
    assert str(raised.value) == f"{name}: {NOW[name]}"
    module, _, attribute = name.rpartition(".")
    with pytest.raises(ImportError, match=re.escape(f"{name}: ")):
        getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("module", GONE_MODULES)
@pytest.mark.parametrize("statement", ["import {}", "from {} import f", "import {}.util"])
def test_importing_a_module_that_is_gone_names_its_replacement(module, statement):
    with pytest.raises(ModuleNotFoundError) as raised:
        exec(statement.format(module))
    assert str(raised.value) == f"{module}: {NOW[module]}"


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_is_gone_names_its_replacement(name):
    network = object.__new__(CausalTransformer)
    with pytest.raises(AttributeError) as raised:
        getattr(network, name.rpartition(".")[2])
    assert str(raised.value) == f"{name}: {NOW[name]}"


@pytest.mark.parametrize("name", NOW)
def test_the_replacement_exists_and_takes_the_call(name):
    text = NOW[name]
    objects = re.findall(rf"({DOTTED})(?:\((.*?)\))?", text)
    scripts = re.findall(SCRIPT, text)
    assert objects or scripts or keys_in(text), "names no replacement"
    for dotted, arguments in objects:
        target = resolve(dotted)
        given = [each for each in arguments.split(", ") if each and each[0] != "*"]
        if given:
            named = dict(each.split("=") for each in given if "=" in each)
            unnamed = [each for each in given if "=" not in each]
            method = inspect.isfunction(target) and inspect.isclass(
                resolve(dotted.rpartition(".")[0])
            )
            inspect.signature(target).bind(*[None] * method, *unnamed, **named)
    for script in scripts:
        assert (ROOT / script).is_file(), script
    assert set(re.findall(r"--[\w-]+", text)) <= FLAGS
    assert set(keys_in(text)) <= KEYS


def test_the_replacement_rule_finds():
    assert keys_in("set the key clip_norm, or the keys lr, end_lr and weight_decay") == [
        "clip_norm",
        "lr",
        "end_lr",
        "weight_decay",
    ]
    with pytest.raises(ModuleNotFoundError):
        resolve("mesh_transformer.model.layers.nothing")


def test_names_that_neither_has_are_python_s_errors():
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


def test_an_attribute_s_own_error_is_not_hidden(monkeypatch):
    def broken(_):
        raise AttributeError("the real reason")

    monkeypatch.setattr(CausalTransformer, "batch_size", property(broken))
    with pytest.raises(AttributeError, match="the real reason"):
        object.__new__(CausalTransformer).batch_size  # noqa: B018


def test_what_exists_is_found_before_the_old_name(tmp_path, monkeypatch):
    assert sys.meta_path.count(old_names._FINDER) == 1
    old_names.install()
    assert sys.meta_path.count(old_names._FINDER) == 1
    (tmp_path / "tasks.py").write_text("TASK = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tasks", raising=False)
    assert importlib.import_module("tasks").TASK == 1
    monkeypatch.delitem(sys.modules, "tasks")
    # A module of ours by an old name would be hidden by its line.
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
def test_a_new_process_imports_nothing_but_the_line(program, printed):
    heavy = "[name for name in ('jax', 'numpy', 'optax') if name in sys.modules]"
    lines = ("import sys", "try:", f"    exec({program!r})", "except ImportError as error:")
    script = "\n".join((*lines, "    print(error)", f"print({heavy})"))
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert found.stdout.splitlines() == [printed, "[]"]


# Old calls.


@pytest.mark.parametrize("name", OLD_KEYS)
def test_an_old_key_in_params_names_its_replacement(name):
    params = SMALL | {re.findall('"(.*)"', name)[0]: object()}
    with pytest.raises(InputError) as raised:
        CausalTransformer(params)
    assert str(raised.value) == f"config: {name}: {NOW[name]}"
    with pytest.raises(InputError) as raised:
        mesh_transformer.load(ROOT / "tests/data/original/f32/mp4_ga1", params)
    assert str(raised.value) == f"config: {name}: {NOW[name]}"


def test_the_original_s_params_are_told_all_at_once():
    with pytest.raises(InputError) as raised:
        CausalTransformer(SMALL | {"sampler": print, "optimizer": None})
    line = str(raised.value)
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
def test_the_original_s_build_model_names_its_replacement(call):
    with pytest.raises(InputError) as raised:
        call()
    line = str(raised.value)
    assert line.startswith("build_model(params, tpu_name, region, preemptible) is build_model(")
    assert "\n" not in line
    (target,) = re.findall(DOTTED, line)
    assert target == "mesh_transformer.pod.launch.tpu_machines"
    assert callable(resolve(target))
    assert "train.py --tpu NAME" in line


def test_old_calls_of_a_network_do_what_the_page_says():
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
        with pytest.raises(IndexError) as raised:
            rows[1][0][:, :, 0]
        assert str(raised.value) == message
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


def test_old_calls_of_a_cluster_and_a_loader_do_what_the_page_says():
    from mesh_transformer.pod.cluster import TPUCluster

    assert not hasattr(TPUCluster, "move")
    for method, arguments in (("save", (1, "bucket", "path")), ("load", ("bucket", "path"))):
        signature = inspect.signature(getattr(TPUCluster, method))
        with pytest.raises(TypeError):
            signature.bind(None, *arguments, **({"keep_n": 3} if method == "save" else {}))
    cluster = object.__new__(TPUCluster)
    cluster.hosts = []
    for call in (cluster.train, cluster.eval):
        with pytest.raises(IndexError):
            call(np.zeros((1, 2, 17), np.uint32))
    assert not {"get_state", "reset"} & set(dir(TFRecordNewInputs))
    loader = TFRecordNewInputs(str(ROOT / "data/tiny.val.index"), (2, 3), 64)
    (row,) = (second for first, second in tables("## Calls that changed") if "get_samples" in first)
    assert "each `[A, B, T]`" in row
    assert {key: rows.shape for key, rows in loader.get_samples().items()} == {
        "obs": (2, 3, 64),
        "target": (2, 3, 64),
    }
    loader.close()


# The page.


def test_the_page_has_the_table():
    headings = re.findall(r"^### `(.*)`$", PAGE, re.MULTILINE)
    sections = [(f"### `{heading}`", f"{heading}.") for heading in headings]
    found = {}
    for heading, prefix in (*sections, ("### Other modules", ""), ("## Config keys", "")):
        for first, second in tables(heading):
            for name in re.findall("`(.*?)`", first):
                found[prefix + name] = second.replace("`", "")
    for key in KEYS:
        found.pop(key, None)
    assert found == NOW


def test_the_page_has_the_original_s_keys():
    kept = [
        key
        for first, second in tables("## Config keys")
        for key in re.findall("`(.*?)`", first)
        if second.startswith("unchanged")
    ]
    assert len(kept) == len(set(kept))
    assert set(kept) <= KEYS
    # Its own config file, and the keys that its programs read besides.
    own = json.loads((ROOT / "configs/6B_roto_256.json").read_text(encoding="utf-8"))
    others = {"noise_scale_alpha", "early_cast", "bf16_optimizer", "early_collect"}
    assert set(kept) == set(own) | others


def test_the_page_s_scripts_exist():
    rows = tables("## Scripts")
    assert len(rows) >= 15
    for first, second in rows:
        for path in re.findall(r"[\w/]+\.(?:py|sh|yaml|ipynb)\b", second):
            assert (ROOT / path).is_file(), path
        assert set(re.findall(r"--[\w-]+", second)) <= FLAGS, second
        assert all(map(resolve, re.findall(DOTTED, second)))
        if second.startswith("the same;"):
            (script,) = re.findall(r"^`(\w+\.py)", first)
            assert (ROOT / script).is_file(), script
            assert set(re.findall(r"--[\w-]+", first)) <= FLAGS, first


@pytest.mark.slow
def test_the_notebook_s_code_runs(tmp_path, monkeypatch, capsys):
    tiny = {"layers": 2, "d_model": 32, "n_heads": 8, "pe_rotary_dims": 4, "seq": 32}
    new_place(tmp_path, monkeypatch, ("example_config.json",), **tiny)
    config = Config.load("configs/example_config.json")
    state = jax.tree.map(np.asarray, CausalTransformer(config).state)
    slim = {"params": state["params"], "step": state["step"]}
    original.write("model", slim, config, dtype="bfloat16")
    Path("model/step_0").rename("step_383500")

    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    printed = capsys.readouterr().out
    assert "512 tokens in" in printed
    assert "64 tokens in" in printed
    assert "\nEleutherAI is" in printed
    assert scope["network"].state["params"]["embed"]["embedding"]["w"].dtype == "bfloat16"
    one, other = (scope["infer"]("EleutherAI is", gen_len=8)[0] for _ in range(2))
    assert one != other  # the seeds are new ones
