"""docs/run-book.md: its messages are those of the code, and its commands can be parsed."""

import ast
import functools
import re
import shlex

import pytest

from mesh_transformer.cli import plan, pod, runs, train
from mesh_transformer.config import Config
from tests.support.pages import ROOT, blocks

PAGE = "docs/run-book.md"
VALUE = "\0"  # stands for what is inserted into a message
COMMANDS = {"train": train, "pod": pod, "runs": runs, "plan": plan}


@functools.cache
def messages() -> list[str]:
    """Return all strings in the code, with `VALUE` for what is inserted into them."""
    found = []
    for path in (ROOT / "mesh_transformer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [x.value if isinstance(x, ast.Constant) else VALUE for x in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def is_message(line: str) -> bool:
    """Return whether a string in the code is a line of the page, with values for its dots."""
    pattern = ".*".join(map(re.escape, line.split("...")))
    return any(re.search(f"(^|\n|{VALUE}|: ){pattern}", message) for message in messages())


def lines() -> list[str]:
    return [line for block in blocks(PAGE) for line in block.text.splitlines()]


def test_the_messages_are_those_of_the_code():
    assert len(lines()) > 30
    assert [line for line in lines() if not is_message(line)] == []
    assert not is_message("the hosts agree after step ...")
    assert not is_message("Ray's head has died (...); nothing happens")


def test_the_commands_can_be_parsed(monkeypatch):
    text = (ROOT / PAGE).read_text()
    commands = [shlex.split(c) for c in re.findall(r"`mesh-transformer ([^`\n]+-[^`\n]+)`", text)]
    assert len(commands) >= 5
    for name, *words in commands:
        monkeypatch.setattr("sys.argv", [name, *words])
        COMMANDS[name].parse_args()
    known = set(Config.__dataclass_fields__)
    assert set(re.findall(r"--set (\w+)=", text)) <= known


def test_flags_and_keys_exist(capsys, monkeypatch):
    text = (ROOT / PAGE).read_text()
    monkeypatch.setattr("sys.argv", ["train", "--help"])
    with pytest.raises(SystemExit):
        train.parse_args()
    monkeypatch.setattr("sys.argv", ["pod", "--help"])
    with pytest.raises(SystemExit):
        pod.parse_args()
    monkeypatch.setattr("sys.argv", ["plan", "--help"])
    with pytest.raises(SystemExit):
        plan.parse_args()
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    assert set(re.findall(r"--[a-z][a-z-]+", text)) - known == set()
