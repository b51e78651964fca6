"""Rules about the source code: imports between rooms, heavy packages and use of collectives.

Each rule is a function from source text to a list of errors, so that the tests can also check that
it detects errors.
"""

import ast
import contextlib
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mesh_transformer"

# The rooms of the package.  Each may import the rooms to the left of `|`, which come before it, and
# the packages to the right, also in type annotations.
ROOMS = {
    "old_names": "|",
    "extras": "|",
    "log_lines": "|",
    "status_lines": "log_lines |",
    "util": "old_names extras log_lines status_lines |",
    "storage": "util | etils gcsfs tensorflow tensorstore tqdm yaml",
    "families": "|",
    "config_checks": "families util |",
    "config_files": "util storage families |",
    "config_model": "util families |",
    "config": "old_names util storage families config_checks config_files config_model |",
    "mesh": "status_lines util config | haiku jax numpy",
    "calls": "mesh | jax numpy",
    "data": (
        "extras status_lines util storage config | datasets ftfy google google_crc32c jinja2 numpy "
        "pyarrow tokenizers tqdm transformers zstandard"
    ),
    "model": "util config_model mesh | jax numpy",
    "generation": "util config config_model mesh calls model | jax numpy",
    "network": "status_lines util storage config calls data generation | numpy",
    "evaluation": "extras util storage config data generation network | lm_eval numpy tqdm",
    "training": (
        "extras log_lines status_lines util storage config config_model mesh data model generation "
        "network evaluation | etils jax numpy optax prometheus_client tqdm wandb"
    ),
    "checkpoint": (
        "util storage families config config_model mesh data model generation training | etils "
        "gguf jax ml_dtypes numpy orbax tensorstore torch tqdm transformers"
    ),
    "transformer_shard": (
        "old_names util storage config mesh calls data generation network training checkpoint "
        "| jax numpy"
    ),
    "serving": (
        "status_lines util storage config data generation network | fastapi h11 llguidance numpy "
        "prometheus_client pydantic pydantic_core starlette tqdm uvicorn"
    ),
    "pod": (
        "extras log_lines status_lines util storage config mesh calls data generation network "
        "evaluation training checkpoint transformer_shard | etils fabric google invoke jax msgpack "
        "numpy paramiko ray tqdm"
    ),
    "performance": (
        "util families config config_model mesh data model generation training | jax matplotlib "
        "numpy tqdm"
    ),
    "cli": (
        "log_lines status_lines util storage families config_files config mesh data model "
        "generation evaluation training checkpoint transformer_shard serving pod performance | jax "
        "tqdm yaml"
    ),
    "__main__": "util cli |",
    "__init__": "old_names util config training transformer_shard |",
}
# These modules use a network only through its protocol, without meshes and layouts.
DRIVERS = (
    *("training.loop", "training.metrics", "training.rollouts"),
    *("evaluation", "serving", "pod.restarts"),
)
LAYOUTS = (
    "mesh.declaration",
    "mesh.devices",
    "mesh.parallel",
    "mesh.placement",
    "mesh.program",
    "mesh.virtual",
    "training.step",
)
MESH_NAMES = {"Mesh", "NamedSharding", "PartitionSpec", "shard_map", "make_mesh"}

# The files that may import each of the heavy packages, Haiku, and JAX's private modules.
HOMES = {
    "haiku": {"mesh_transformer/mesh/haiku.py"},
    "jax._src": {"mesh_transformer/mesh/jax_versions.py"},  # it loads these modules by name
    "tensorflow": {"mesh_transformer/storage/access.py"},
    "orbax": {
        "mesh_transformer/checkpoint/native.py",
        "mesh_transformer/checkpoint/orbax_handlers.py",
        "mesh_transformer/checkpoint/saved_step.py",
    },
    "datasets": {
        "mesh_transformer/data/hub.py",
        "scripts/measure/peers/with_easydel.py",
        "scripts/measure/tokenizing.py",
    },
    "gguf": {"mesh_transformer/checkpoint/gguf_files.py"},
    "pyarrow": {"mesh_transformer/data/tables.py"},
    "rouge_score": {"scripts/score_summaries.py"},
    "wandb": {"mesh_transformer/training/wandb_upload.py"},
    "lm_eval": {
        "mesh_transformer/evaluation/tasks.py",
        "mesh_transformer/evaluation/network_lm.py",
    },
    "transformers": {
        "mesh_transformer/checkpoint/torch_model.py",
        "mesh_transformer/data/tokenizer.py",
        "scripts/measure/generation.py",
        "scripts/measure/peers/with_torch.py",
        "scripts/measure/training.py",
    },
    # To compare logits and speed.
    "torch": {
        "mesh_transformer/checkpoint/torch_model.py",
        "scripts/measure/generation.py",
        "scripts/measure/peers/with_torch.py",
        "scripts/measure/training.py",
    },
    "fabric": {"mesh_transformer/pod/tpu/ssh.py"},
    "fastapi": {"mesh_transformer/serving/app.py"},
    "uvicorn": {"mesh_transformer/serving/server.py"},
    "prometheus_client": {
        "mesh_transformer/serving/app.py",
        "mesh_transformer/serving/metrics.py",
        "mesh_transformer/training/exporter.py",
    },
    "paramiko": {"mesh_transformer/pod/tpu/spec.py", "mesh_transformer/pod/tpu/ssh.py"},
    "google.api_core": {"mesh_transformer/pod/tpu/api.py"},
    "google.auth": {"mesh_transformer/pod/tpu/api.py"},
    "google.cloud.tpu_v2": {"mesh_transformer/pod/tpu/api.py", "mesh_transformer/pod/tpu/vm.py"},
    "ray": {
        "mesh_transformer/pod/ray_head.py",
        "mesh_transformer/pod/hosts.py",
        "mesh_transformer/pod/cluster.py",
        "mesh_transformer/pod/replicas.py",
        "mesh_transformer/pod/ray_workers.py",
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
# Private methods that classes of other packages declare for their subclasses to define.
OVERRIDES = {"_loglikelihood_tokens"}  # of lm-eval's models
# Assembled from parts because this file is searched too.
# Of /tmp, only Ray's folder is the same everywhere.
FORBIDDEN_TEXT = re.compile(
    r"\.\./" + r"shared|(?<![\w./:-])/" + r"(?:work|root|home|tmp(?!/ray/))/"
)


def module_of(path: Path) -> str:
    """Return a file's module, such as "data.loader", or the room for an `__init__` file."""
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(source: str, *, types: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the (line, dotted name) of every import in a source, at any level.

    Args:
      types: whether to include imports under `TYPE_CHECKING`.
    """
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if not types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            # Keep the dots of relative imports, so that the rules below can reject them.
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        pending += ast.iter_child_nodes(node)


def layering_errors(module: str, source: str) -> list[str]:
    """Find imports that `ROOMS` does not name for the module's room."""
    room = module.partition(".")[0]
    if room not in ROOMS:
        return [f"{module}: unknown room {room}; add it to ROOMS in tests/test_structure.py"]
    rooms, packages = map(str.split, ROOMS[room].split("|"))
    errors = []
    for line, name in imports(source):
        if name.startswith("."):
            errors.append(f"{module}:{line}: relative import {name}; write the whole name")
        package, _, rest = name.partition(".")
        if package == "mesh_transformer":
            other = rest.partition(".")[0]
            allowed = not other or other in rooms or (other == room and "." in module)
        else:
            other, allowed = package, package in packages or package in sys.stdlib_module_names
        if not allowed and not name.startswith("."):
            errors.append(f"{module}:{line}: may not import {other}")
    return errors


def cycles(modules: dict[str, str]) -> list[str]:
    """Find modules that import each other, and return one line per cycle.

    Args:
      modules: the source of each module by name.
    """
    graph = {
        module: sorted(
            {
                imported
                for _, name in imports(source, types=False)
                for imported in (name.removeprefix("mesh_transformer."),)
                for imported in (imported, imported.rpartition(".")[0])
                if imported in modules and imported != module
            }
        )
        for module, source in modules.items()
    }
    errors: list[str] = []
    finished: set[str] = set()

    def walk(module: str, path: list[str]) -> None:
        if module in path:
            errors.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in finished:
            for imported in graph[module]:
                walk(imported, [*path, module])
            finished.add(module)

    for module in graph:
        walk(module, [])
    return errors


def init_errors(module: str, source: str) -> list[str]:
    """Check that a room's `__init__` is a docstring of one sentence, and nothing else."""
    tree = ast.parse(source)
    text = ast.get_docstring(tree) or ""
    if len(tree.body) == 1 and text.endswith(".") and "\n" not in text:
        return []
    return [f"{module}: its __init__ must be a docstring of one sentence, and nothing else"]


def mesh_errors(module: str, source: str) -> list[str]:
    """Find imports of meshes and layouts in `DRIVERS`."""
    if not any(module == driver or module.startswith(f"{driver}.") for driver in DRIVERS):
        return []
    return [
        f"{module}:{line}: may not import {name}"
        for line, name in imports(source)
        if name.startswith(("jax.sharding", *(f"mesh_transformer.{m}" for m in LAYOUTS)))
        or name.split(".")[-1] in MESH_NAMES
    ]


def home_errors(path: str, source: str) -> list[str]:
    """Find imports of a heavy package outside the files that `HOMES` lists."""
    return [
        f"{path}:{line}: {package} may be imported only in {sorted(HOMES[package]) or 'tests'}"
        for line, name in imports(source)
        for package in HOMES
        if f"{name}.".startswith(f"{package}.") and path not in HOMES[package]
    ]


def root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def jax_names(source: str) -> set[str]:
    """Return the names under which a source imports JAX and parts of it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "jax":
                    names.add((alias.asname or alias.name).split(".")[0])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def string_arguments(call: ast.Call) -> Iterator[str]:
    """Yield the string constants in a call's arguments, except those inside nested calls."""
    pending: list[ast.AST] = [*call.args, *(keyword.value for keyword in call.keywords)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif not isinstance(node, ast.Call):
            pending.extend(ast.iter_child_nodes(node))


def collective_errors(module: str, source: str) -> list[str]:
    """Find collectives, PartitionSpecs, and axis names passed to JAX instead of `par`.

    `model.layers` may not even import PartitionSpec; `model.transformer` may, to stack its layers.
    """
    errors = []
    jax_modules = jax_names(source)
    for line, name in imports(source):
        last = name.split(".")[-1]
        if last in COLLECTIVES or (module == "model.layers" and last in MESH_NAMES):
            errors.append(f"{module}:{line}: imports {name}; use `par`")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES | {"PartitionSpec"}:
            errors.append(f"{module}:{node.lineno}: {node.attr}; use `par`")
        if isinstance(node, ast.Call) and root_name(node.func) in jax_modules:
            axes = sorted(AXES.intersection(string_arguments(node)))
            if axes:
                errors.append(f"{module}:{node.lineno}: axes {axes} passed to JAX; use `par`")
    return errors


def import_work_errors(module: str, source: str) -> list[str]:
    """Find calls at import: expression statements, array creation and device queries.

    The call that sets a custom gradient is allowed, because it belongs to a definition.
    """
    errors = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if getattr(node.value.func, "attr", None) in ("defvjp", "defjvps"):
                continue
            # Importing the package must install the finder that handles old names.
            if (module, ast.unparse(node)) == ("__init__", "old_names.install()"):
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


def thread_errors(module: str, source: str) -> list[str]:
    """Find threads that are not started by `util.start_thread`, which reports their exceptions.

    The thread of status lines is not, as an exception of its own must not end the command.
    """
    used: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        used += [node.func] if isinstance(node, ast.Call) else []
        used += node.bases if isinstance(node, ast.ClassDef) else []
    return [
        f"{module}:{node.lineno}: nobody sees an exception of this thread; use `start_thread`"
        for node in used
        if ast.unparse(node).endswith("Thread") and module not in ("util", "status_lines")
    ]


def foreign_bases(tree: ast.Module, node: ast.ClassDef) -> Iterator[type]:
    """Yield the classes from other packages that a class at the top of a module inherits from."""
    classes = {other.name: other for other in tree.body if isinstance(other, ast.ClassDef)}
    names: dict[str, str] = {}
    for one in ast.walk(tree):
        if isinstance(one, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in one.names}
        elif isinstance(one, ast.ImportFrom):
            names |= {
                alias.asname or alias.name: f"{one.module}.{alias.name}" for alias in one.names
            }
    for base in (ast.unparse(base).partition("[")[0] for base in node.bases):
        if base in classes:
            yield from foreign_bases(tree, classes[base])
            continue
        first, _, rest = base.partition(".")
        name = f"{names.get(first, f'builtins:{first}')}{rest and '.'}{rest}"
        if not name.startswith("mesh_transformer."):
            with contextlib.suppress(ImportError):  # an optional package
                found = pkgutil.resolve_name(name)
                yield from (found,) if isinstance(found, type) else ()  # NamedTuple is a function


def private_names(node: ast.AST) -> set[str]:
    """Return the private names of the methods and attributes that a class defines."""
    names = []
    for x in ast.walk(node):
        if isinstance(x, ast.FunctionDef):
            names.append(x.name)
        elif isinstance(x, ast.Attribute | ast.Name) and isinstance(x.ctx, ast.Store):
            names.append(ast.unparse(x).removeprefix("self."))  # may also be a local variable
    return {name for name in names if re.fullmatch(r"_\w*[^_]", name)}


def overwriting_errors(module: str, source: str) -> list[str]:
    """Find classes that define a private name which a base from another package uses for itself."""
    tree, errors = ast.parse(source), []
    for node in tree.body:
        for base in foreign_bases(tree, node) if isinstance(node, ast.ClassDef) else ():
            used = set()
            for one in base.__mro__:
                used |= set(vars(one))
                with contextlib.suppress(OSError, TypeError):  # it is not written in Python
                    used |= private_names(ast.parse(textwrap.dedent(inspect.getsource(one))))
            errors += [
                f"{module}:{node.lineno}: {name} is also a name of {base.__qualname__}"
                for name in sorted((private_names(node) & used) - OVERRIDES)
            ]
    return errors


def text_errors(name: str, text: str) -> list[str]:
    """Find lines with paths that exist only on one machine."""
    return [
        f"{name}:{number}: {match[0]!r} exists only on one machine"
        for number, line in enumerate(text.splitlines(), 1)
        if (match := FORBIDDEN_TEXT.search(line))
    ]


@pytest.mark.parametrize(
    "rule",
    [layering_errors, mesh_errors, import_work_errors, thread_errors, overwriting_errors],
)
def test_every_module_follows_the_rule(rule):
    errors = [e for path in sources() for e in rule(module_of(path), path.read_text("utf-8"))]
    assert not errors, "\n".join(errors)


def test_rooms_import_only_rooms_before_them():
    for number, (room, allowed) in enumerate(ROOMS.items()):
        before = {"", *list(ROOMS)[:number]}
        assert set(allowed.partition("|")[0].split()) <= before, room


def test_no_two_modules_import_each_other():
    modules = {module_of(path): path.read_text("utf-8") for path in sources()}
    assert not cycles(modules), "\n".join(cycles(modules))


def test_every_folder_has_a_description():
    folders = [path for path in PACKAGE.rglob("*/") if path != PACKAGE and any(path.glob("*.py"))]
    assert 10 <= sum(path.parent == PACKAGE for path in folders) <= 12
    errors = []
    for path in folders:
        init = path / "__init__.py"
        assert init.exists(), f"{path}: has no __init__.py"
        errors += init_errors(module_of(init), init.read_text("utf-8"))
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(
    "module",
    [
        "model.layers",
        "model.loss",
        "model.transformer",
        "model.attention",
        "generation.decode",
        "generation.sampling",
        "generation.texts",
        "model.matrices",
    ],
)
def test_collectives_are_used_only_through_par(module):
    path = PACKAGE / f"{module.replace('.', '/')}.py"
    errors = collective_errors(module, path.read_text("utf-8"))
    assert not errors, "\n".join(errors)


def test_heavy_packages_are_imported_only_in_listed_files():
    files = [*sources(), *ROOT.glob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    errors = [
        e
        for path in files
        for e in home_errors(str(path.relative_to(ROOT)), path.read_text("utf-8"))
    ]
    assert not errors, "\n".join(errors)


def test_modules_and_scripts_stay_short():
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in sources()}
    long = [
        f"{path.name}: {lines} lines, at most 600" for path, lines in lengths.items() if lines > 600
    ]
    for path in set(ROOT.glob("*.py")) - {ROOT / "setup.py"}:
        lines = len(path.read_text("utf-8").splitlines())
        if lines >= 80:
            long.append(f"{path.name}: {lines} lines, a root script has fewer than 80")
    assert not long, "\n".join(long)


def test_tracked_files_contain_no_paths_of_one_machine():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so the tracked files are unknown")
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
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("mesh.devices", "from mesh_transformer.model import transformer", "may not import model"),
        ("model.layers", "from mesh_transformer.training import step", "may not import training"),
        ("training.step", "def f():\n    import mesh_transformer.transformer_shard", ":2:"),
        ("training.loop", "from mesh_transformer.transformer_shard import C", "transformer_shard"),
        ("util", "from mesh_transformer import config", "may not import config"),
        ("util", "def f():\n    import jax.numpy as jnp", ":2: may not import jax"),
        ("data.loader", "from mesh_transformer.mesh import devices", "may not import mesh"),
        ("model.transformer", "from .layers import Norm", "relative import"),
        ("helpers.files", "", "unknown room helpers"),
    ],
)
def test_the_layering_rule_detects_errors(module, source, expected):
    assert expected in "\n".join(layering_errors(module, source))


def test_the_cycle_rule_detects_errors():
    modules = {
        "data.a": "from mesh_transformer.data.b import f",
        "data.b": "def g():\n    from mesh_transformer.data import c",
        "data.c": "import mesh_transformer.data.a",
    }
    assert cycles(modules) == ["data.a -> data.b -> data.c -> data.a"]
    typed = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mesh_transformer.data.a"
    )
    assert cycles(modules | {"data.c": typed}) == []


@pytest.mark.parametrize(
    "source",
    ['"""Data."""\nimport jax', '"""Data"""', '"""Data.\n\nMore."""', ""],
)
def test_the_init_rule_detects_errors(source):
    assert len(init_errors("data", source)) == 1
    assert init_errors("data", '"""Text to batches."""') == []


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
def test_the_collective_rule_detects_errors(source):
    assert len(collective_errors("model.layers", source)) == 1


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (mesh_errors, "serving.app", "from jax.sharding import Mesh"),
        (mesh_errors, "training.loop", "from mesh_transformer.mesh import parallel"),
        (mesh_errors, "training.loop", "from mesh_transformer.training.step import StateLayout"),
        (home_errors, "scripts/make.py", "def f():\n    import tensorflow as tf"),
        (home_errors, "mesh_transformer/checkpoint/hf.py", "from torch import nn"),
        (home_errors, "mesh_transformer/training/step.py", "import orbax.checkpoint as ocp"),
        (home_errors, "mesh_transformer/training/step.py", "from google.cloud import tpu_v2"),
        (import_work_errors, "layers", "import jax.numpy as jnp\nONES = jnp.ones(3)"),
        (import_work_errors, "layers", "print('hello')"),
        (import_work_errors, "layers", "old_names.install()"),
        (thread_errors, "pod.meeting", "import threading\nthreading.Thread(target=f).start()"),
        (thread_errors, "pod.meeting", "import threading\nclass Hub(threading.Thread):\n    ..."),
        (
            overwriting_errors,
            "pod.meeting",
            "from threading import Thread\nclass A(Thread):\n    x = 1\nclass B(A):\n    _name = 1",
        ),
        (
            overwriting_errors,
            "pod.meeting",
            "import threading as t\nclass A(t.Thread):\n    def f(self):\n        self._args = 1",
        ),
        (text_errors, "README.md", "see `.." + "/shared/DESIGN.md`"),
        (text_errors, "train.py", "open('/" + "home/me/data')"),
        (text_errors, "train.py", "open('/" + "tmp/mine')"),
    ],
)
def test_the_other_rules_detect_errors(rule, name, source):
    assert len(rule(name, source)) == 1


def test_the_rules_accept_valid_code():
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
    assert layering_errors("model.layers", layer) == []
    assert collective_errors("model.layers", layer) == []
    assert import_work_errors("model.layers", layer) == []
    assert import_work_errors("__init__", "old_names.install()") == []
    assert home_errors("mesh_transformer/checkpoint/native.py", "import orbax.checkpoint") == []
    assert text_errors("README.md", "https://example.org/home/page and data/work/x") == []
