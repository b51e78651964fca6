"""The commands of docs/pods.md: run on a tiny model, or parsed where they would cost money."""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_transformer.cli.arguments import run_arguments, tpu_arguments
from tests.long.interruptions import last_step, training
from tests.support.documents import PYTHON, ROOT, commands, python_commands
from tests.support.waiting import SECONDS, wait_until

PAGE = "pods.md"
# As quick as a step can be with the vocabulary of the records.
TINY = {"layers": 2, "d_model": 32, "pe_rotary_dims": 4, "per_replica_batch": 1, "val_batches": 1}
TINY |= {"total_steps": 80, "ckpt_every": 25, "val_every": 25}
SHORTER = {"device_sample.py": ["--length", "4"], "train.py": ["--max-steps", "60"]}


def said_on_the_page(first: str) -> str:
    """A pattern for what the page shows that a program prints; numbers may be others."""
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    (found,) = re.findall(rf"```\n({first}.*?)\n```", text, re.DOTALL)
    return re.sub(r"\d+", r"\\d+", re.escape(found))


def run(words: list[str]) -> str:
    """What one of the page's commands prints; it ends well."""
    script, *flags = words
    command = [sys.executable, str(ROOT / script), *flags, *SHORTER.get(script, [])]
    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert found.returncode == 0, (words, found.stdout, found.stderr)
    return found.stdout


@pytest.mark.slow
def test_the_rehearsal_is_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "data", "data")
    Path("configs").mkdir()
    tiny = json.loads((ROOT / "configs/tiny.json").read_text()) | TINY
    Path("configs/tiny.json").write_text(json.dumps(tiny))
    first, kill, *later = commands(PAGE)[:6]
    assert first[:2] == [PYTHON, "train.py"]
    assert kill[0] == "pkill"
    model = Path("runs/tiny")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # as where the script lies in the working folder
    with training(tmp_path, str(ROOT / first[1]), *first[2:], cwd=tmp_path) as driver:
        wait_until(lambda: last_step(model) >= 3, "step 3")
        assert len(driver.hosts()) == 2
        # Of this run's hosts alone: others may run on this machine.
        sessions = ",".join(map(str, driver.sessions))
        subprocess.run([kill[0], "-s", sessions, *kill[1:]], check=True)
        again = said_on_the_page("host 1 died")
        wait_until(lambda: re.search(again, driver.log.read_text()), "the failure is told")
        reached = last_step(model)
        wait_until(lambda: last_step(model) > reached, "it goes on")
        os.killpg(driver.process.pid, signal.SIGINT)
        assert driver.process.wait(60) == 0
        driver.assert_nothing_is_left()
        stopped = said_on_the_page("SIGINT")
        assert re.search(stopped, driver.log.read_text()), driver.log.read_text()
    printed = "".join(run(words) for _, *words in later)
    assert last_step(model) == tiny["total_steps"]
    assert "ROMEO:" in printed
    assert Path("loss.png").stat().st_size > 1000


def test_the_commands_for_a_tpu_are_understood(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = [words for words in python_commands(PAGE) if "--tpu" in words]
    assert found
    for words in found:
        monkeypatch.setattr("sys.argv", words)
        args = runpy.run_path(words[0])["parse_args"]()
        config, _, _ = run_arguments(args)
        spec, _ = tpu_arguments(args, config)
        assert spec.devices == config.tpu_size


def flags(script: str) -> set[str]:
    """Those that a script's own help names."""
    command = [sys.executable, str(ROOT / script), "--help"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"--[a-z][a-z-]+", found))


def test_the_page_has_every_flag():
    table = "\n".join(re.findall(r"^\| `--.*", (ROOT / "docs" / PAGE).read_text(), re.MULTILINE))
    on_the_page = set(re.findall(r"--[a-z][a-z-]+", table))
    older = {"--tpu-region"}  # of --tpu-zone
    assert on_the_page == flags("train.py") - flags("device_train.py") - older
