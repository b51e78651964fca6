"""The commands in the documentation, and how tests run them."""

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ".venv/bin/python"


def commands(page: str) -> list[list[str]]:
    """Return the words of each line of a page's bash blocks, in order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def python_commands(page: str) -> list[list[str]]:
    """Return the commands of a page that run one of our scripts, without the interpreter."""
    return [words for first, *words in commands(page) if first == PYTHON]


def new_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, configs: tuple[str, ...], **changes: Any
) -> None:
    """Enter `folder` and put into it what a page's commands need: changed configs and some text."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # as if a script is started
    Path("configs").mkdir()
    for name in configs:
        values = json.loads((ROOT / "configs" / name).read_text()) | changes
        for key in ("wandb_project", "eval_harness_tasks"):
            values.pop(key, None)
        Path("configs", name).write_text(json.dumps(values))
    Path("my_text").mkdir()
    Path("my_text/one.txt").write_text("a herd of unicorns " * 2000)


def run_here(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run a script with its flags in this process, and check that it succeeds."""
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    assert not ended.value.code, (words, capsys.readouterr())
