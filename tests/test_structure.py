"""What the design promises of the source itself: who imports whom, and where collectives live.

Each rule is a function from source text to the lines that break it, so that the tests can also
show that it finds something.
"""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mesh_transformer"

# A module may import the package's modules of a lower level alone.
LEVELS = {
    "util": 0,
    "value_types": 0,
    "attention": 1,
    "casts": 1,
    "config": 1,
    "declaration": 1,
    "tensor_files": 2,
    "lazy_leaf": 2,
    "host_arrays": 3,
    "mesh": 2,
    "parallel": 2,
    "sampling": 2,
    "tokenizer": 2,
    "record_files": 2,
    "record_set": 3,
    "tfrecord_loader": 4,
    "flops": 2,
    "checksums": 1,
    "integrity": 2,
    "joint_save": 2,
    "prefetch": 1,
    "storage": 1,
    "state_tree": 2,
    "whole_folder": 2,
    "metrics": 3,
    "wandb_upload": 2,
    "optimizer": 3,
    "cross_entropy": 3,
    "layers": 3,
    "model": 4,
    "int8": 2,
    "flash_attention": 3,
    "collectives": 1,
    "lora": 2,
    "same_model": 2,
    "merged_leaves": 3,
    "generation": 5,
    "step": 6,
    "checkpoint": 5,
    "original_names": 2,
    "original_files": 2,
    "original_checkpoint": 5,
    "hf_config": 3,
    "hf": 5,
    "native_checkpoint": 6,
    "conversion": 7,
    "comparison": 8,
    "rows": 6,
    "generator": 7,
    "compilation_cache": 1,
    "text_stream": 1,
    "signals": 1,
    "loading": 8,
    "transformer_shard": 9,
    "train_actor": 10,
    "ray_head": 9,
    "tpu_spec": 2,
    "tpu_api": 3,
    "tpu_ssh": 3,
    "tpu_ray": 4,
    "tpu_guard": 5,
    "arguments": 3,
    "tpu_vm": 9,
    "hlo": 1,
    "hlo_bytes": 2,
    "compiler_options": 2,
    "roofline": 3,
    "scaling": 4,
    "topology": 4,
    "device_trace": 1,
    "benchmark": 8,
    "traffic": 4,
    "plan": 9,
    "decode_plan": 10,
    "plan_search": 10,
    "ray_hosts": 11,
    "cluster_batch": 8,
    "cluster_step": 1,
    "cluster_train_set": 2,
    "tpu_cluster": 12,
    "lasting_cluster": 13,
    "build_model": 14,
    "repl": 14,
    "__init__": 15,
}
# These drive a network that they know by its methods only (a Protocol), wherever it runs.
DRIVERS = {
    "training": {
        "config",
        "util",
        "flops",
        "metrics",
        "storage",
        "tfrecord_loader",
        "validation",
        "harness",
    },
    "validation": {"config", "util", "text_stream", "tfrecord_loader", "tokenizer", "harness"},
    "runs": {
        "config",
        "util",
        "metrics",
        "storage",
        "tfrecord_loader",
        "training",
        "validation",
        "checkpoint",
    },
    "network_lm": {"config", "util", "sampling"},
    "evaluation": {"config", "util", "network_lm"},
    "harness": {"config", "util", "hf_config", "evaluation", "network_lm"},
    "serving": {"config", "util", "sampling", "text_stream", "serving"},
}
MESH_NAMES = {"Mesh", "NamedSharding", "PartitionSpec", "shard_map", "make_mesh"}

# The files that may import each of the heavy packages.
HOMES = {
    "tensorflow": {"mesh_transformer/data/tfrecords.py"},
    "orbax": {
        "mesh_transformer/checkpoint/native.py",
        "mesh_transformer/checkpoint/host_arrays.py",
    },
    "rouge_score": {"scripts/score_summaries.py"},
    "wandb": {"mesh_transformer/training/wandb_upload.py"},
    "lm_eval": {
        "mesh_transformer/evaluation/evaluation.py",
        "mesh_transformer/evaluation/network_lm.py",
    },
    "transformers": {"mesh_transformer/data/tokenizer.py", "scripts/measure/generation.py"},
    # To read .bin files, and as what generation is measured against.
    "torch": {"mesh_transformer/checkpoint/hf_files.py", "scripts/measure/generation.py"},
    "fabric": {"mesh_transformer/pod/tpu/ssh.py"},
    "fastapi": {"mesh_transformer/serving/app.py"},
    "uvicorn": {"mesh_transformer/serving/server.py"},
    "prometheus_client": {
        "mesh_transformer/serving/app.py",
        "mesh_transformer/serving/metrics.py",
    },
    "paramiko": {"mesh_transformer/pod/tpu/spec.py", "mesh_transformer/pod/tpu/ssh.py"},
    "google.api_core": {"mesh_transformer/pod/tpu/api.py"},
    "google.auth": {"mesh_transformer/pod/tpu/api.py"},
    "google.cloud.tpu_v2": {"mesh_transformer/pod/tpu/api.py", "mesh_transformer/pod/tpu/vm.py"},
    "ray": {
        "mesh_transformer/pod/ray_head.py",
        "mesh_transformer/pod/hosts.py",
        "mesh_transformer/pod/cluster.py",
    },
}

COLLECTIVES = {
    "all_gather",
    "all_to_all",
    "axis_index",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "shard_map",
    "with_sharding_constraint",
}
AXES = {"dp", "mp"}
# Built from parts, since this file is searched as well.
FORBIDDEN_TEXT = re.compile(r"\.\./" + r"shared|(?<![\w./:-])/" + r"(?:work|root|home)/")


def module_of(path: Path) -> str:
    """A file's module in the tables; a subpackage is one module."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            # Relative imports would escape the rules below, so they are named as they stand.
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def layering_errors(module: str, source: str) -> list[str]:
    """Imports inside the package that do not go down the table."""
    if module not in LEVELS and module not in DRIVERS:
        return [f"{module}: unknown module; add it to LEVELS or DRIVERS in tests/test_structure.py"]
    errors = []
    for line, name in imports(source):
        if name.startswith("."):
            errors.append(f"{module}:{line}: relative import {name}; write the whole name")
        parts = name.split(".")
        if parts[0] != "mesh_transformer" or len(parts) == 1:
            continue
        other = parts[1]
        if module in DRIVERS:
            allowed = other in DRIVERS[module]
        else:
            drives = other in DRIVERS and module == "__init__"
            allowed = drives or LEVELS.get(other, 99) < LEVELS[module]
        if not allowed:
            errors.append(f"{module}:{line}: may not import {other}")
    return errors


def mesh_errors(module: str, source: str) -> list[str]:
    """What a driver may not know: meshes and layouts."""
    if module not in DRIVERS:
        return []
    return [
        f"{module}:{line}: may not import {name}"
        for line, name in imports(source)
        if name.startswith("jax.sharding") or name.split(".")[-1] in MESH_NAMES
    ]


def home_errors(path: str, source: str) -> list[str]:
    """Imports of a heavy package outside its home."""
    return [
        f"{path}:{line}: {package} is imported in {sorted(HOMES[package]) or 'tests'} alone"
        for line, name in imports(source)
        for package in HOMES
        if f"{name}.".startswith(f"{package}.") and path not in HOMES[package]
    ]


def root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def jax_names(source: str) -> set[str]:
    """The names under which a source knows jax, its parts and Haiku."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ("jax", "haiku"):
                    names.add((alias.asname or alias.name).split(".")[0])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def strings_given(call: ast.Call) -> Iterator[str]:
    """String constants among a call's arguments, in tuples too, but not in calls within."""
    pending: list[ast.AST] = [*call.args, *(keyword.value for keyword in call.keywords)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif not isinstance(node, ast.Call):
            pending.extend(ast.iter_child_nodes(node))


def collective_errors(module: str, source: str) -> list[str]:
    """In layers and model: collectives, and axis names given to JAX instead of `par`.

    A layer may not even see a PartitionSpec; the model's stacking of its layers prepends to one.
    """
    errors = []
    known = jax_names(source)
    for line, name in imports(source):
        last = name.split(".")[-1]
        if last in COLLECTIVES or (module == "layers" and last in MESH_NAMES):
            errors.append(f"{module}:{line}: imports {name}; ask `par`")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES | {"PartitionSpec"}:
            errors.append(f"{module}:{node.lineno}: {node.attr}; ask `par`")
        if isinstance(node, ast.Call) and root_name(node.func) in known:
            given = sorted(AXES.intersection(strings_given(node)))
            if given:
                errors.append(f"{module}:{node.lineno}: axes {given} given to JAX; ask `par`")
    return errors


def import_work_errors(module: str, source: str) -> list[str]:
    """Calls at import: bare ones, and those that make arrays or ask for devices.

    A custom derivative's `defvjp` is part of a definition, as a decorator would be.
    """
    errors = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if getattr(node.value.func, "attr", None) == "defvjp":
                continue
            errors.append(f"{module}:{node.lineno}: a call at import")
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for call in ast.walk(node.value):
                if isinstance(call, ast.Call) and makes_arrays(ast.unparse(call.func)):
                    errors.append(f"{module}:{call.lineno}: JAX runs at import")
    return errors


def makes_arrays(function: str) -> bool:
    return function.startswith(("jnp.", "jax.numpy.", "jax.random.")) or function in (
        "jax.devices",
        "jax.device_count",
        "jax.device_put",
    )


def text_errors(name: str, text: str) -> list[str]:
    """Lines that name a place which exists on one machine alone."""
    return [
        f"{name}:{number}: {match[0]!r} exists on one machine alone"
        for number, line in enumerate(text.splitlines(), 1)
        if (match := FORBIDDEN_TEXT.search(line))
    ]


@pytest.mark.parametrize("rule", [layering_errors, mesh_errors, import_work_errors])
def test_every_module_keeps(rule):
    errors = [e for path in sources() for e in rule(module_of(path), path.read_text("utf-8"))]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(
    "module", ["layers", "cross_entropy", "model", "generation", "sampling", "int8"]
)
def test_no_collective_but_through_par(module):
    errors = collective_errors(module, (PACKAGE / f"{module}.py").read_text("utf-8"))
    assert not errors, "\n".join(errors)


def test_heavy_packages_have_one_home():
    files = [*sources(), *ROOT.glob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    errors = [
        e
        for path in files
        for e in home_errors(str(path.relative_to(ROOT)), path.read_text("utf-8"))
    ]
    assert not errors, "\n".join(errors)


def test_scripts_and_files_stay_short():
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in sources()}
    long = [
        f"{path.name}: {lines} lines, at most 600" for path, lines in lengths.items() if lines > 600
    ]
    for path in ROOT.glob("*.py"):
        lines = len(path.read_text("utf-8").splitlines())
        if lines >= 80:
            long.append(f"{path.name}: {lines} lines, a root script has fewer than 80")
    assert not long, "\n".join(long)


def test_nothing_tracked_names_one_machine():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what is tracked is unknown")
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    tracked = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    errors = []
    for name in filter(None, tracked.split("\0")):
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b""
        if b"\0" not in content:
            errors += text_errors(name, content.decode("utf-8", errors="replace"))
    assert not errors, "\n".join(errors)


def test_importing_the_package_loads_no_heavy_package():
    program = (
        "import sys, mesh_transformer;"
        f"print([p for p in {sorted([*HOMES, 'jax'])} if p in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert found.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("layers", "from mesh_transformer.model.gptj import init", "may not import model"),
        ("optimizer", "from mesh_transformer import layers", "may not import layers"),
        ("step", "def f():\n    import mesh_transformer.transformer_shard", ":2:"),
        ("training", "from mesh_transformer.transformer_shard import C", "transformer_shard"),
        ("training", "from mesh_transformer import parallel", "may not import parallel"),
        ("model", "from mesh_transformer.training.loop import train", "may not import training"),
        ("model", "from .layers import Norm", "relative import"),
        ("helpers", "", "add it to LEVELS"),
    ],
)
def test_layering_rule_finds(module, source, found):
    assert found in "\n".join(layering_errors(module, source))


@pytest.mark.parametrize(
    "source",
    [
        "import jax\njax.lax.psum(x, name)",
        "from jax.lax import all_gather",
        "from jax.sharding import PartitionSpec as P",
        "import jax\njax.sharding.PartitionSpec(None)",
        "import jax\njax.lax.with_sharding_constraint(x, s)",
        "from jax import lax\nlax.some_new_collective(x, ('dp', 'mp'))",
        "import jax.numpy as jnp\njnp.sum(x, axis_name='mp')",
    ],
)
def test_collective_rule_finds(source):
    assert len(collective_errors("layers", source)) == 1


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (mesh_errors, "serving", "from jax.sharding import Mesh"),
        (mesh_errors, "training", "from jax import shard_map"),
        (home_errors, "scripts/make.py", "def f():\n    import tensorflow as tf"),
        (home_errors, "mesh_transformer/checkpoint/hf.py", "from torch import nn"),
        (home_errors, "mesh_transformer/training/step.py", "import orbax.checkpoint as ocp"),
        (home_errors, "mesh_transformer/training/step.py", "from google.cloud import tpu_v2"),
        (import_work_errors, "layers", "import jax.numpy as jnp\nONES = jnp.ones(3)"),
        (import_work_errors, "layers", "print('hello')"),
        (text_errors, "README.md", "see `.." + "/shared/DESIGN.md`"),
        (text_errors, "train.py", "open('/" + "home/me/data')"),
    ],
)
def test_other_rules_find(rule, name, source):
    assert len(rule(name, source)) == 1


def test_rules_pass_what_the_design_allows():
    layer = """
from mesh_transformer.mesh.parallel import param
import jax

class Linear:
    def __call__(self, x):
        axes = (None, "mp")
        w = param(self.par, "w", (2, 3), axes, init)
        b = param(self.par, "b", (3,), ("mp",), jax.nn.initializers.zeros)
        return self.par.join(jax.nn.gelu(x @ w + b))
"""
    assert layering_errors("layers", layer) == []
    assert collective_errors("layers", layer) == []
    assert import_work_errors("layers", layer) == []
    assert home_errors("mesh_transformer/checkpoint/native.py", "import orbax.checkpoint") == []
    assert text_errors("README.md", "https://example.org/home/page and data/work/x") == []
