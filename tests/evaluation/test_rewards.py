"""Reward functions in processes of their own: values, time limits and errors."""

import contextlib
import os
from pathlib import Path

import pytest

from mesh_transformer.evaluation.rewards import Rewards
from mesh_transformer.util import InputError

SOURCE = """\
import os, sys, time
import beside

def reward(prompt, answer, row):
    print("a line that is no reply")
    if answer == "hangs":
        while True:
            pass
    if answer == "forks":  # a process that holds the pipe
        os.fork()
        time.sleep(1000)
    if answer == "throws":
        raise ValueError("two\\nlines")
    if answer == "ends":
        os._exit(3)
    if answer == "jax":
        return float("jax" in sys.modules or "numpy" in sys.modules)
    if answer == "pid":
        return os.getpid()
    return row["rewards"].get(answer, beside.DEFAULT)
"""
ROW = {"rewards": {"one": 1, "true": True, "nan": float("nan"), "text": "1.0", "none": None}}


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(SOURCE)
    (tmp_path / "beside.py").write_text("DEFAULT = 0.25\n")
    return f"{tmp_path}/rewards.py:reward"


def test_every_outcome_is_a_number_or_a_line(place: str) -> None:
    expected: dict[str, float | str] = {
        "one": 1.0,
        "true": 1.0,
        "other": 0.25,
        "jax": 0.0,  # the process imports nothing of the library
        "throws": "ValueError: two lines (line 13)",
        "ends": "it ended with status 3",
        "nan": "ValueError: the result is nan, expected a finite number",
        "text": "ValueError: the result is '1.0', expected a finite number",
    }
    answers = [*expected, "one", *expected]
    with contextlib.closing(Rewards(place, 60.0, 2)) as rewards:
        actual = rewards([("prompt", answer, ROW) for answer in answers])
        (none,) = rewards([("prompt", "none", ROW)])
    assert actual == [expected[answer] for answer in answers]
    assert isinstance(none, str)
    assert none.startswith("TypeError: ")


def test_a_process_that_hangs_is_replaced(place: str) -> None:
    # Long enough for the other calls on a busy machine.
    with contextlib.closing(Rewards(place, 5.0, 2)) as rewards:
        actual = rewards([("", answer, ROW) for answer in ("hangs", "forks", "one", "one")])
    assert actual == ["no result after 5 s", "no result after 5 s", 1.0, 1.0]


def test_close_ends_the_processes(place: str) -> None:
    rewards = Rewards(place, 60.0, 2)
    pids = {int(float(x)) for x in rewards([("", "pid", ROW)] * 20)}
    rewards.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_functions_that_cannot_be_loaded_are_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    cases = {
        "rewards.reward": "expected FILE.py:FUNCTION",
        f"{tmp_path}/missing.py:reward": "expected FILE.py:FUNCTION of an existing file",
        f"{place}s": "has no attribute 'rewards'",
        f"{tmp_path}/broken.py:reward": r"ModuleNotFoundError: .* \(line 1\)",
    }
    for wrong, part in cases.items():
        with pytest.raises(InputError, match=part):
            Rewards(wrong, 1.0, 1)
