"""The commands of docs/pods.md: run with a tiny model, or only parsed if they would cost money."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_transformer.cli import pod
from mesh_transformer.cli.arguments import run_arguments, tpu_arguments
from tests.long.interruptions import last_step, training
from tests.support.documents import PYTHON, ROOT, commands, python_commands
from tests.support.waiting import SECONDS, wait_until

PAGE = "pods.md"
# The fastest possible steps with the vocabulary of the records.
TINY = {"layers": 2, "d_model": 32, "pe_rotary_dims": 4, "per_replica_batch": 1, "val_batches": 1}
TINY |= {"total_steps": 80, "ckpt_every": 25, "val_every": 25}
SHORTER = {"device_sample.py": ["--length", "4"], "train.py": ["--max-steps", "60"]}


def output_on_the_page(first: str) -> str:
    """Return a regular expression for output shown on the page; numbers may differ."""
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    (output,) = re.findall(rf"```\n({first}.*?)\n```", text, re.DOTALL)
    return re.sub(r"\d+", r"\\d+", re.escape(output))


def run(words: list[str]) -> str:
    """Run one of the page's commands, which must succeed; return what it prints."""
    script, *flags = words
    command = [sys.executable, str(ROOT / script), *flags, *SHORTER.get(script, [])]
    process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert process.returncode == 0, (words, process.stdout, process.stderr)
    return process.stdout


@pytest.mark.slow
def test_the_rehearsal_runs_as_described(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "data", "data")
    Path("configs").mkdir()
    tiny = json.loads((ROOT / "configs/tiny.json").read_text()) | TINY
    Path("configs/tiny.json").write_text(json.dumps(tiny))
    first, kill, *later = commands(PAGE)[:6]
    assert first[:2] == [PYTHON, "train.py"]
    assert kill[0] == "pkill"
    model = Path("runs/tiny")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # as if the script were in the working folder
    with training(tmp_path, str(ROOT / first[1]), *first[2:], cwd=tmp_path) as driver:
        wait_until(lambda: last_step(model) >= 3, "step 3")
        assert len(driver.hosts()) == 2
        # Kill only this run's host; other runs may be active on this machine.
        sessions = ",".join(map(str, driver.sessions))
        subprocess.run([kill[0], "-s", sessions, *kill[1:]], check=True)
        failure_message = output_on_the_page("host 1 died")
        wait_until(
            lambda: re.search(failure_message, driver.log.read_text()), "the failure is reported"
        )
        reached = last_step(model)
        wait_until(lambda: last_step(model) > reached, "training continues")
        os.killpg(driver.process.pid, signal.SIGINT)
        assert driver.process.wait(60) == 0
        driver.assert_nothing_is_left()
        stop_message = output_on_the_page("SIGINT")
        assert re.search(stop_message, driver.log.read_text()), driver.log.read_text()
    printed = "".join(run(words) for _, *words in later)
    assert last_step(model) == tiny["total_steps"]
    assert "ROMEO:" in printed
    assert Path("loss.png").stat().st_size > 1000


def test_the_commands_for_a_tpu_can_be_parsed(monkeypatch):
    monkeypatch.chdir(ROOT)
    tpu_commands = [words for words in python_commands(PAGE) if "--tpu" in words]
    assert tpu_commands
    for words in tpu_commands:
        monkeypatch.setattr("sys.argv", words)
        args = {"train.py": pod}[words[0]].parse_args()
        config, _, _ = run_arguments(args)
        spec, _ = tpu_arguments(args, config)
        assert spec.devices == config.tpu_size


def flags(script: str) -> set[str]:
    """Return the flags in a script's help text."""
    command = [sys.executable, str(ROOT / script), "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"--[a-z][a-z-]+", help_text))


def test_the_page_lists_every_flag():
    table = "\n".join(re.findall(r"^\| `--.*", (ROOT / "docs" / PAGE).read_text(), re.MULTILINE))
    on_the_page = set(re.findall(r"--[a-z][a-z-]+", table))
    older = {"--tpu-region"}  # old name of --tpu-zone
    assert on_the_page == flags("train.py") - flags("device_train.py") - older
