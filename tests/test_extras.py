"""An installation without extras: what it can do, and how it names what it lacks."""

import ast
import collections
import csv
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from mesh_transformer.extras import EXTRAS, missing
from tests.support.waiting import SECONDS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mesh_transformer"
OURS = "mesh-transformer"


def key_of(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def distributions(*first: str) -> dict[str, importlib.metadata.Distribution]:
    """Return the installed distributions that these requirements need, by name."""
    found, extras = {}, {}
    left = [Requirement(line) for line in first]
    while left:
        requirement = left.pop()
        key, own = key_of(requirement.name), requirement.extras or {""}
        if key in found and own <= extras[key]:
            continue
        found[key] = importlib.metadata.distribution(key)
        extras[key] = extras.get(key, set()) | own
        for line in found[key].requires or ():
            child = Requirement(line)
            if child.marker is None or any(child.marker.evaluate({"extra": e}) for e in own):
                left.append(child)
    return found


def files_of(distribution: importlib.metadata.Distribution) -> list[str]:
    """Return the files of a distribution in site-packages."""
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    paths = [path for path, *_ in rows]
    return [path for path in paths if not path.startswith("..") and not path.endswith(".pth")]


providers = functools.cache(importlib.metadata.packages_distributions)


def modules_of(names: set[str]) -> set[str]:
    """Return the top-level modules of the distributions with these names."""
    return {module for module, by in providers().items() if names & set(map(key_of, by))}


def imported() -> dict[str, str]:
    """Return the modules that the package imports, with a file that imports each."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= dict.fromkeys(names, path.relative_to(ROOT).as_posix())
    return found


@pytest.mark.slow
def test_every_import_is_of_the_base_or_named_by_its_extra():
    base = modules_of(set(distributions(OURS))) | set(sys.stdlib_module_names)
    known = base - {"google"} | {"torch", "libtpu"}  # these two have requirements of their own
    lacking = {
        name: path
        for name, path in imported().items()
        if missing(ImportError(name=name)) is None
        and name.partition(".")[0] not in known
        and not name.startswith("google.protobuf")
    }
    assert not lacking


def test_extras_bring_the_modules_that_are_named():
    for extra in EXTRAS:
        brought = modules_of(set(distributions(f"{OURS}[{extra}]")))
        assert {module.partition(".")[0] for module in EXTRAS[extra]} <= brought, extra


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with the packages that `pip install` without extras brings, as links."""
    library = tmp_path_factory.mktemp("base")
    wanted, owners = distributions(OURS), collections.defaultdict(set)
    for distribution in importlib.metadata.distributions():
        name = key_of(distribution.name)  # parses the metadata
        for file in files_of(distribution):
            owners[file.partition("/")[0]].add(name)
    for distribution in wanted.values():
        parts = set()
        for file in files_of(distribution):
            first = file.partition("/")[0]
            # Whole folders, with their compiled modules, unless other packages share them.
            parts.add(first if owners[first] <= set(wanted) else file)
        for part in parts:
            link, source = library / part, Path(str(distribution.locate_file(part)))
            if source.exists() and not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source)
    return library


@pytest.fixture
def python(base, tmp_path):
    """Run Python in an empty folder, with the packages of `base` alone."""

    def python(*words: object, status: int = 0) -> str:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{base}", "JAX_PLATFORMS": "cpu"}
        # -S: without this Python's own site-packages
        program = (sys.executable, "-S", *map(str, words))
        result = subprocess.run(
            program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
        assert result.returncode == status, result.stderr
        return result.stdout if status == 0 else result.stderr

    return python


@pytest.fixture
def run(python):
    """Run a command of the package; see `python`."""
    return functools.partial(python, "-m", "mesh_transformer")


def lacks(module: str, extra: str) -> str:
    return f"package {module} is missing; install the extra: pip install '{OURS}[{extra}]'"


def last_line(text: str) -> str:
    return text.splitlines()[-1]


@pytest.mark.slow
def test_a_missing_package_is_one_line_that_names_its_extra(run, tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    (tmp_path / "text.txt").write_text("A herd of unicorns. " * 100)
    (tmp_path / "lr.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    for words, module, extra in (
        (("split", "text.txt", "parts"), "zstandard", "records"),
        (("records", "rows.parquet", "out", "--seq", 8), "pyarrow", "records"),
        (("plot", "lr.jsonl", "picture.png"), "matplotlib", "plan"),
    ):
        place = "rows.parquet: " if module == "pyarrow" else ""
        assert last_line(run(*words, status=2)) == f"error: {place}{lacks(module, extra)}"


FIT = """
import mesh_transformer, numpy as np
network = mesh_transformer.CausalTransformer("config.json")
rows = mesh_transformer.fit(network, np.memmap("tokens.bin", np.uint16, "r"), "fitted")
print([row["step"] for row in rows if "train/loss" in row])
"""


@pytest.mark.slow
def test_the_base_trains_samples_converts_and_measures(python, run, tmp_path):
    np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint16).tofile(
        tmp_path / "tokens.bin"
    )
    config = {
        "layers": 1, "d_model": 32, "n_heads": 4, "n_vocab": 50304, "seq": 64, "pe_rotary_dims": 4,
        "cores_per_replica": 1, "tpu_size": 1, "per_replica_batch": 2, "total_steps": 4,
        "warmup_steps": 1, "anneal_steps": 2, "ckpt_every": 4, "val_every": 4, "val_batches": 1,
        "train_set": "tiny.train.index", "val_set": {},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert last_line(python("-c", FIT)) == "[1, 2, 3, 4]"
    for path in (ROOT / "data").glob("tiny.train*"):
        (tmp_path / path.name).symlink_to(path)
    run("train", "--config", "config.json", "--model-dir", "run")
    run("convert", "--from", "native", "run", "--to", "hf", "hf")
    prompt = ("--prompt", "A herd", "--length", 4, "--temperature", 0)
    own = run("sample", "--model-path", "run", *prompt)
    assert own.startswith("A herd")
    assert run("sample", "--model-path", "hf", *prompt) == own
    run("bench", "--config", "config.json", "--rounds", 1)
    model = ("--model-path", "run", "--local-hosts", 1)
    assert last_line(run("sample", *model, *prompt, status=2)) == f"error: {lacks('ray', 'pod')}"
    assert last_line(run("serve", *model[:2], status=2)) == f"error: {lacks('fastapi', 'serve')}"
