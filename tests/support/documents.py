"""The commands that the documents tell their readers to run."""

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
    """The words of each line of a document's bash blocks, in order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def python_commands(page: str) -> list[list[str]]:
    """Those that run a script of ours, less the interpreter."""
    return [words for first, *words in commands(page) if first == PYTHON]


def new_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, configs: tuple[str, ...], **changes: Any
) -> None:
    """Makes a folder that a page's commands can run in: those configs with changes, some text."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # as where a script is started
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
    """Runs a script with its flags in this process; it ends well."""
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    assert not ended.value.code, (words, capsys.readouterr())
