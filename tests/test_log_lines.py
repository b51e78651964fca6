"""What commands print in logs: progress bars as whole lines, and JSON."""

import io
import json
import os
import re
import subprocess
import sys
import threading
import types

import pytest
from tqdm import tqdm

from mesh_transformer import log_lines
from mesh_transformer.cli import train
from mesh_transformer.pod.hosts import Host, _variables
from mesh_transformer.util import InputError, run_script
from tests.support.multihost import ROOT

KEYS = {"layers": 1, "d_model": 16, "n_heads": 2, "n_vocab": 16, "seq": 8, "pe_rotary_dims": 4}
KEYS |= {"dtype": "float32", "train_set": "own:tokens", "total_steps": 3, "model_dir": "run"}
KEYS |= {"bucket": "./", "per_replica_batch": 2, "name": "test", "tpu_size": 1}
KEYS |= {"cores_per_replica": 1, "skip_nonfinite": True}
OWN = """
import sys
import warnings

import numpy as np

def tokens(config):
    return np.arange(1000) % config.n_vocab

def warns(row):
    if row["step"] == 2:  # pytest would keep warnings.warn from printing
        line = warnings.formatwarning("mind the gap", UserWarning, "own.py", 4, "x = 1")
        sys.stderr.write(line)

def fails(row):
    raise KeyError("the user's error")
"""


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """Undo what a command sets for its process."""
    for name in (log_lines.VARIABLE, log_lines.RUN_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(log_lines, "_is_json", False)
    monkeypatch.setattr(log_lines, "_facts", dict(log_lines._facts))


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Return a function that runs `train` and returns its status and objects by stream."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "config.json").write_text(json.dumps(KEYS))
    monkeypatch.delitem(sys.modules, "own", raising=False)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["mesh-transformer train", "--config", "config.json"])
        sys.argv.extend(words)
        with pytest.raises(SystemExit) as ended:
            run_script(train.main)
        streams = capsys.readouterr()
        out, err = ([json.loads(line) for line in text.splitlines()] for text in streams)
        return ended.value.code or 0, out, err

    return run


FIELDS = ["time", "level", "run", "host", "process", "step", "message"]


def test_each_line_of_a_run_is_json(command, tmp_path, monkeypatch):
    monkeypatch.setattr(log_lines, "FIRST", 0.0)
    status, out, err = command("--log", "json", "--set", 'hooks=["own:warns"]')
    assert status == 0
    for line in out + err:
        assert list(line) == FIELDS
        assert (line["run"], line["host"]) == (str(tmp_path / "run"), os.uname().nodename)
    assert [line["level"] for line in out] == ["info"] * len(out)
    assert [line["step"] for line in out] == [3] * len(out)
    assert out[0]["message"].startswith("time 0:")
    assert out[-1]["message"] == f"{tmp_path}/run: trained to step 3"
    bars = [line for line in err if "%|" in line["message"]]
    assert {line["level"] for line in bars} == {"info"}
    assert re.match(r"100%\|.* 3/3 ", bars[-1]["message"])
    (warning,) = [line for line in err if "mind the gap" in line["message"]]
    assert (warning["level"], warning["process"], warning["step"]) == ("warning", 0, 2)
    assert "\n" in warning["message"]  # with its line of code: one object


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (["--set", "lrr=1"], 2, r"error: .*lrr"),
        (["--no-such-flag"], 2, r"mesh-transformer train: error: unrecognized"),
        (["--process-count", "2"], 2, r"error: --process-count requires --every-host"),
        (["--set", 'hooks=["own:fails"]'], 1, r"(?s)Traceback .*own:fails failed at step 1"),
    ],
)
def test_errors_are_json(command, monkeypatch, words, status, line):
    monkeypatch.setenv(log_lines.VARIABLE, "json")
    actual, _, err = command(*words)
    errors = [own for own in err if own["level"] == "error"]
    assert (actual, len(errors)) == (status, 1)
    assert re.match(line, errors[0]["message"])


def test_another_format_is_refused(monkeypatch):
    monkeypatch.setenv(log_lines.VARIABLE, "yaml")
    with pytest.raises(InputError, match="MESH_TRANSFORMER_LOG is 'yaml', expected text or json"):
        train.parse_args()


def test_hosts_of_a_cluster_print_alike(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert _variables(Host("node", "address")) == {}
    log_lines.use("json")
    log_lines.about(run="runs/a")
    expected = {log_lines.VARIABLE: "json", log_lines.RUN_VARIABLE: "runs/a"}
    assert _variables(Host("node", "address")) == expected
    assert expected.items() <= _variables(Host("node", "address", 2)).items()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bars_are_whole_lines_at_a_low_rate(monkeypatch):
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(log_lines, "time", clock)
    shown = {}
    for stream in (io.StringIO(), Terminal()):
        now[0] = 0.0
        monkeypatch.setattr(sys, "stderr", stream)
        with log_lines.formatted():
            options = {"mininterval": 0.0, "miniters": 1, "file": sys.stderr}
            with tqdm(total=200, desc="outer", **options) as bar:
                for second in range(200):
                    now[0] = float(second)
                    bar.update()
                    if second == 100:
                        bar.write("a message", file=sys.stderr)
                        with tqdm(total=2, desc="inner", leave=False, **options) as inner:
                            inner.update()
            print("\rnot a bar", file=sys.stdout)
        shown[type(stream)] = stream.getvalue()
    lines = shown[io.StringIO].splitlines()
    assert "\r" not in shown[io.StringIO]
    assert all(re.match(r"(outer|inner): +\d+%|a message$", line) for line in lines), lines
    steps = [int(re.search(r" (\d+)/200", line)[1]) for line in lines if line.startswith("outer")]
    # After 3 s, and then after 6, 12, 24, 48, 60 and 60 s; and at the end.
    assert steps == [4, 10, 22, 46, 94, 154, 200]
    assert lines.count("a message") == 1
    assert shown[Terminal].count("\r") > 200  # unchanged


def test_answers_that_begin_like_a_bar_are_printed(capsys):
    with log_lines.formatted():
        print("\ra\rb")
    assert capsys.readouterr().out == "\ra\rb\n"


def bar(**options):
    """Return a bar that shows each update."""
    return tqdm(**{"total": 3, "mininterval": 0, "miniters": 1, "file": sys.stderr} | options)


@pytest.mark.parametrize(
    "parts",
    [["\rWARNING: full\n"], ["\r\nImportant\n"], ["\rcounting 1", "\rcounting 2", " done\n"]],
)
def test_text_that_begins_like_a_bar_is_printed(capsys, parts):
    with log_lines.formatted():
        for part in ("before\n", *parts):
            sys.stderr.write(part)
        with bar(leave=False):
            sys.stderr.write("\rwithin\n")
    err = capsys.readouterr().err
    assert err.startswith("".join(("before\n", *parts)))
    assert err.endswith("\rwithin\n")


def test_the_state_of_an_open_bar_comes_before_other_text_and_at_the_end(capsys):
    with log_lines.formatted():
        steps = bar()
        steps.update()
        print("a message", file=sys.stderr)
        steps.update()
    lines = [line.split("|")[0].strip() for line in capsys.readouterr().err.splitlines()]
    assert lines == ["33%", "a message", "67%"]
    steps.close()


def test_each_bar_that_stays_ends_in_a_line(capsys):
    with log_lines.formatted():
        for _ in bar(iterable=range(2), total=2, desc="outer"):
            for _ in bar(iterable=range(3), desc="inner"):
                pass
            for _ in bar(iterable=range(3), desc="erased", leave=False):
                pass
    lines = [line.split("|")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["inner: 100%", "inner: 100%", "outer: 100%"]


def test_the_first_line_of_a_later_bar_does_not_wait_longer(capsys, monkeypatch):
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(log_lines, "time", clock)
    with log_lines.formatted():
        for name in ("first", "second"):
            with bar(total=30, desc=name, leave=False) as steps:
                for _ in range(30):
                    now[0] += 1
                    steps.update()
    lines = re.findall(r"(\w+): .* (\d+)/30", capsys.readouterr().err)
    expected = [(name, step) for name in ("first", "second") for step in ("3", "9", "21")]
    assert lines == expected


def test_a_bar_begins_a_line(capsys, monkeypatch):
    monkeypatch.setattr(log_lines, "FIRST", 0.0)
    with log_lines.formatted():
        sys.stderr.write("loading: ")
        bar().close()
        sys.stderr.write("done\n")
    lines = [line.split("|")[0].strip() for line in capsys.readouterr().err.splitlines()]
    assert lines == ["loading:", "0%", "0%", "done"]


def test_json_of_threads(capsys):
    log_lines.use("json")
    before = threading.excepthook
    with log_lines.formatted():
        print("error: an answer of ", end="")
        print("a warning of ", end="", file=sys.stderr)
        for work in (lambda: print("another thread"), lambda: 1 / 0):
            thread = threading.Thread(target=work, name="worker")
            thread.start()
            thread.join()
        print("this thread")
    assert threading.excepthook is before
    out, err = (list(map(json.loads, text.splitlines())) for text in capsys.readouterr())
    messages = ["another thread", "error: an answer of this thread"]
    assert [(line["level"], line["message"]) for line in out] == [("info", own) for own in messages]
    failed, part = err
    assert (failed["level"], part["level"]) == ("error", "warning")
    assert re.match(r"Exception in thread worker:\nTraceback (?s:.*)Zero.*$", failed["message"])
    assert part["message"] == "a warning of "


@pytest.mark.parametrize("words", [["keys"], ["--help"]])
def test_a_reader_that_has_ended_ends_a_command_quietly(words):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mesh_transformer", *words]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")
