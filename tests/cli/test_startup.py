"""What commands import before they work, and Ctrl-C while they do; counts, not clock times."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_transformer.cli.main import COMMANDS
from tests.support.waiting import SECONDS, wait_until
from tests.test_structure import HOMES

ROOT = Path(__file__).resolve().parents[2]
SLOW = sorted({"haiku", "jax", "optax", "tensorstore", "tokenizers", *HOMES})  # to import
PROGRAM = f"""
import atexit, sys
from mesh_transformer.__main__ import main
atexit.register(lambda: print(*(p for p in {SLOW} if p in sys.modules), file=sys.stderr))
main()
"""
# Commands whose flags need no package of `SLOW`; the other one has choices that depend on JAX.
QUICK = [name for name in COMMANDS if name != "convert"]


def imported(*words: object, cwd: Path = ROOT) -> set[str]:
    """Run a command, which must succeed, and return the packages of `SLOW` that it has imported."""
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stderr.splitlines()[-1].split())


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["keys", "lr"], *([name, "--help"] for name in QUICK)]
)
def test_help_and_keys_import_no_slow_package(words):
    assert imported(*words) == set()


def test_plot_imports_no_slow_package(tmp_path):
    rows = [{"step": step, "train/loss": 1 / step} for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert imported("plot", tmp_path, tmp_path / "loss.png") == set()
    assert (tmp_path / "loss.png").stat().st_size


@pytest.mark.slow
def test_records_are_created_without_jax_and_tensorflow(tmp_path):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "to be or not to be"}) + "\n")
    words = ["text.jsonl", "set", "--output-dir", ".", "--seq", 8, "--tokenizer", "bytes"]
    assert imported("records", *words, cwd=tmp_path) == {"tokenizers", "transformers"}


# Short sleeps: Python does not notice a signal that comes just before a sleep until the sleep ends.
STUB = """
import pathlib, time
pathlib.Path({marker!r}).touch()
for _ in range(6000):
    time.sleep(0.1)
"""
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py") if path.name != "setup.py")


@pytest.mark.quick(12)
@pytest.mark.parametrize("words", [*([name] for name in COMMANDS), *SCRIPTS])
def test_ctrl_c_while_importing_ends_quietly(tmp_path, words):
    marker = tmp_path / "importing"
    for name in ("jax", "tqdm"):  # every command imports the one or the other before its work
        (tmp_path / f"{name}.py").write_text(STUB.format(marker=str(marker)))
    script = ["-m", "mesh_transformer", *words] if isinstance(words, list) else [str(ROOT / words)]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    command = [sys.executable, *script]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(marker.exists, "the import begins")
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=SECONDS)[1] == ""
            assert process.returncode == 130
        finally:
            process.kill()


def test_ctrl_c_in_a_callback_is_not_lost():
    """Python only prints an exception that a weak reference's callback raises, and goes on."""
    program = """
import signal, time, weakref
from mesh_transformer.util import run_script

class Module: ...

def main():
    module = Module()
    reference = weakref.ref(module, lambda _: signal.raise_signal(signal.SIGINT))
    del module
    for _ in range(6000):
        time.sleep(0.1)

run_script(main)
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (130, "")
