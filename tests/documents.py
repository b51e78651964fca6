"""The commands that the documents tell their readers to run."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ".venv/bin/python"


def commands(page: str) -> list[list[str]]:
    """The words of each line of a document's bash blocks, in order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def python_commands(page: str) -> list[list[str]]:
    """Those that run a script of ours, less the interpreter."""
    return [words for first, *words in commands(page) if first == PYTHON]
