"""The code of docs/pods.md: run with a tiny model, or only parsed if it would cost money."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_transformer.cli import pod
from mesh_transformer.cli.arguments import run_arguments
from mesh_transformer.cli.machines import tpu_arguments
from tests.long.interruptions import last_step, training
from tests.support.pages import ROOT, blocks, reader, runnable
from tests.support.waiting import SECONDS, wait_until

PAGE = "docs/pods.md"
# The fastest possible steps with the vocabulary of the records.
TINY = {"layers": 2, "d_model": 32, "pe_rotary_dims": 4, "per_replica_batch": 1, "val_batches": 1}
TINY |= {"total_steps": 160, "ckpt_every": 25, "val_every": 50}


def output_on_the_page(first: str) -> str:
    """Return a regular expression for output shown on the page; numbers may differ."""
    (output,) = (b.text.strip() for b in blocks(PAGE) if b.text.startswith(first))
    return re.sub(r"\d+", r"\\d+", re.escape(output))


@pytest.mark.slow
def test_the_rehearsal_runs_as_described(tmp_path, monkeypatch, capsys):
    (first, *_), (kill, *_), *later = (block.commands for block in runnable("docs/pods.md"))
    (program, *words), kill_words = shlex.split(first), shlex.split(kill)
    assert (program, kill_words[0]) == ("mesh-transformer", "pkill")
    model = Path("runs/tiny")
    with reader(tmp_path, monkeypatch, ("tiny.json",), **TINY) as person:
        with training(tmp_path, "-m", "mesh_transformer", *words, cwd=tmp_path) as driver:
            wait_until(lambda: last_step(model) >= 3, "step 3")
            assert len(driver.hosts()) == 2
            # Kill only this run's host; other runs may be active on this machine.
            sessions = ",".join(map(str, driver.sessions))
            subprocess.run([kill_words[0], "-s", sessions, *kill_words[1:]], check=True)
            failure_message = output_on_the_page("host 1 died")
            wait_until(
                lambda: re.search(failure_message, driver.log.read_text()),
                "the failure is reported",
            )
            reached = last_step(model)
            wait_until(lambda: last_step(model) > reached, "training continues")
            os.killpg(driver.process.pid, signal.SIGINT)
            assert driver.process.wait(SECONDS) == 0
            driver.assert_nothing_is_left()
            stop_message = output_on_the_page("SIGINT")
            assert re.search(stop_message, driver.log.read_text()), driver.log.read_text()
        for block in runnable(PAGE)[2:]:
            person.run(block)
        assert later
    assert last_step(model) == TINY["total_steps"]
    assert "ROMEO:" in capsys.readouterr().out
    assert Path("loss.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_commands_for_a_tpu_can_be_parsed(monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = [line for block in blocks(PAGE) if block.needs for line in block.commands]
    assert lines
    for line in lines:
        program, command, *words = shlex.split(line)
        assert (program, command) == ("mesh-transformer", "pod")
        monkeypatch.setattr("sys.argv", [command, *words])
        args = pod.parse_args()
        config, _, _ = run_arguments(args)
        spec, _ = tpu_arguments(args, config)
        assert spec.devices == config.tpu_size


def flags(command: str) -> set[str]:
    """Return the flags in a command's help text."""
    words = [sys.executable, "-m", "mesh_transformer", command, "--help"]
    help_text = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return set(re.findall(r"--[a-z][a-z-]+", help_text))


def test_the_page_lists_every_flag():
    table = "\n".join(re.findall(r"^\| `--.*", (ROOT / PAGE).read_text(), re.MULTILINE))
    on_the_page = set(re.findall(r"--[a-z][a-z-]+", table))
    older = {"--tpu-region"}  # old name of --tpu-zone
    shared = flags("train") - {"--heartbeat"}  # of `train --every-host` too
    assert on_the_page == flags("pod") - shared - older
