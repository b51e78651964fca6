"""Traces of some steps of a run: `train --profile`."""

import gzip
import json
import signal
from pathlib import Path

import pytest

from mesh_transformer.cli import train
from mesh_transformer.training import profile
from mesh_transformer.util import InputError
from tests.support.every_host import every_host
from tests.support.small_run import assert_same_rows, rows_of, run_values, write_config


def steps_in(folder: Path) -> int:
    """Return how often a training step was called during the only trace in a model folder."""
    (trace,) = folder.glob("profile/plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    calls = [e for e in events if e.get("name") == "PjitFunction(train_step)"]
    count, end = 0, 0.0
    for call in sorted(calls, key=lambda call: call["ts"]):
        if call["ts"] >= end:  # else it is a part of the call before
            count, end = count + 1, call["ts"] + call["dur"]
    return count


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that trains 8 steps with some flags, and returns the model folder."""
    config = write_config(tmp_path / "config.json", run_values(tmp_path, total_steps=8))

    def call(name: str, *words: str) -> Path:
        folder = tmp_path / name
        flags = ["--config", config, "--model-dir", str(folder)]
        monkeypatch.setattr("sys.argv", ["train", *flags, *words])
        train.main()
        return folder

    return call


def test_the_steps_are_traced_and_no_bit_changes(run, capsys):
    plain, traced = run("plain"), run("traced", "--profile", "4-6")
    assert_same_rows(rows_of(traced), rows_of(plain))
    assert not (plain / "profile").exists()
    assert steps_in(traced) == 3
    line = f"trace of steps 4 to 6: {traced}/profile; to look at it: pip install xprof"
    assert line in capsys.readouterr().err


def test_a_run_that_ends_before_the_last_of_the_steps_writes_its_trace(run, monkeypatch, capsys):
    before_step = profile.ProfiledSteps.before_step

    def stop(self):
        before_step(self)
        if self._network.step == 5:
            self._network.signals.append(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(profile.ProfiledSteps, "before_step", stop)
        folder = run("stopped", "--profile", "5-8")
    assert "trace of steps 5 to 6: " in capsys.readouterr().err
    assert steps_in(folder) == 2
    assert run("stopped", "--profile", "3") == folder
    assert "--profile: the run resumes after step 6; no step is traced" in capsys.readouterr().err
    assert steps_in(folder) == 2


@pytest.mark.parametrize("name", ["profile", "profile/plugins"])  # where folders would be
def test_a_trace_that_cannot_be_written_does_not_end_the_run(run, tmp_path, capsys, name):
    path = tmp_path / "full" / name
    path.parent.mkdir(parents=True)
    path.touch()
    folder = run("full", "--profile", "4-6")
    assert f"{folder}/profile: no trace is written: " in capsys.readouterr().err
    assert len(rows_of(folder)) == 8


def test_errors(run, capsys):
    with pytest.raises(InputError, match="--profile: there is no step 9, as the run ends at step"):
        run("late", "--profile", "8-9")
    with pytest.raises(InputError, match="--profile is for training; remove --profile or --mode e"):
        run("eval", "--profile", "8", "--mode", "eval")
    for text in ("0", "4-3", "a", "1-", "-1"):
        with pytest.raises(SystemExit):
            run("bad", f"--profile={text}")
        error = capsys.readouterr().err
        assert "steps, such as 5-7" in error or "steps are counted from 1" in error


@pytest.mark.slow
def test_one_process_per_machine_has_a_trace(run, tmp_path):
    config = str(tmp_path / "config.json")
    with every_host(tmp_path / "two", config, 2, "--profile", "5-6") as processes:
        assert processes.wait() == [0, 0], processes.log(0)[-3000:]
    assert steps_in(processes.folder) == 2
    assert processes.log(0).count("trace of steps 5 to 6: ") == 1
