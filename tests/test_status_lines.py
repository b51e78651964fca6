"""Status lines: what a command prints while it is silent, in a log and on a terminal."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import threading

import pytest
from tqdm import tqdm

from mesh_transformer import status_lines
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    monkeypatch.delenv(status_lines.VARIABLE)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def quick(monkeypatch):
    """Status lines at once, so that tests need not wait; they then wait for lines, not for time."""
    monkeypatch.setattr(status_lines, "SILENCE", 0.0)
    monkeypatch.setattr(status_lines, "EVERY", 0.0)


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_lines_name_what_is_done_and_end_before_the_next_output(monkeypatch, quick, stream):
    err, out = stream(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, "stdout", out)

    def wait_for(line):
        wait_until(lambda: re.search(line, err.getvalue()), line)

    with status_lines.watching():
        wait_for(r"starting \.\.\. \d+ s")
        with status_lines.doing("loading"), status_lines.doing("compiling"):
            wait_for(r"compiling \.\.\. \d+ s")
        with status_lines.doing("loading"):
            wait_for(r"loading \.\.\. \d+ s")
        print("a part", end="")
        wait_for(r"working \.\.\. \d+ s")
    print(" of a line")
    assert out.getvalue() == "a part of a line\n"
    shown = err.getvalue()
    if stream is Terminal:
        # After the part, with the cursor restored to its end; then erased.
        assert re.search(r"(\x1b7 working \.\.\. \d+ s\x1b\[K\x1b8)+\x1b\[K$", shown)
    else:
        assert "\x1b" not in shown
        assert re.search(r"loading \.\.\. \d+ s\n(.*\n)*\nworking \.\.\. \d+ s\n", shown)


def test_progress_bars_are_refreshed_instead(monkeypatch, quick):
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    with status_lines.watching(), tqdm(total=5, file=err, desc="reading") as bar:
        before = err.getvalue().count("reading")
        wait_until(lambda: err.getvalue().count("reading") > before + 2, "refreshes")
        bar.update(5)
    assert " ... " not in err.getvalue()


def test_nothing_is_printed_by_commands_that_print_and_after_the_end(monkeypatch):
    monkeypatch.setattr(status_lines, "SILENCE", 1e9)
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    with status_lines.watching():
        with status_lines.watching(), status_lines.doing("loading"):  # a command in a command
            print("one", file=sys.stderr)
        assert any(thread.name == "status" for thread in threading.enumerate())
        status_lines.end()
        assert not any(thread.name == "status" for thread in threading.enumerate())
        print("two", file=sys.stderr)
    assert err.getvalue() == "one\ntwo\n"
    with status_lines.doing("nothing watches"), status_lines.paused():
        pass


def test_streams_may_be_closed_or_the_same(monkeypatch):
    for out in (None, sys.stderr):
        monkeypatch.setattr(sys, "stdout", out)
        with status_lines.watching():
            assert status_lines._watcher is not None
        assert "write" not in vars(sys.stderr)
    monkeypatch.setattr(sys, "stderr", None)
    with status_lines.watching():
        assert status_lines._watcher is None


def test_no_lines_are_printed_while_the_user_is_to_type(monkeypatch, quick):
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    with status_lines.watching():
        wait_until(err.getvalue, "the first line")
        with status_lines.paused():
            watcher = status_lines._watcher
            assert watcher is not None
            printed = err.getvalue()
            watcher._wait = 0.0  # it would be time for a line
            watcher.look()
            assert err.getvalue() == printed
        watcher._wait = 0.0
        watcher.look()
        assert err.getvalue() != printed


SCRIPT = """
import sys
from mesh_transformer import status_lines, util
status_lines.SILENCE = status_lines.EVERY = 0.0
def main():
    with status_lines.doing("loading"):
        sys.stdin.readline()
    print("done")
    return 3
util.run_script(main)
"""


def test_an_empty_variable_turns_status_lines_off(monkeypatch, quick):
    monkeypatch.setenv(status_lines.VARIABLE, "")
    with status_lines.watching():
        assert status_lines._watcher is None
    monkeypatch.delenv(status_lines.VARIABLE)
    with status_lines.watching():
        assert status_lines._watcher is not None


def test_scripts_have_status_lines_on_a_terminal():
    terminal, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=other, stderr=other
    )
    os.close(other)
    shown = b""
    while b"loading ... " not in shown:
        shown += os.read(terminal, 1000)
    process.communicate(b"\n")
    assert process.returncode == 3
    with contextlib.suppress(OSError):  # the end of a terminal
        while True:
            shown += os.read(terminal, 1000)
    os.close(terminal)
    assert re.search(rb"\x1b8\x1b\[Kdone\r\n", shown)
