"""The code blocks of the documentation, and how tests run them exactly as they are written."""

import contextlib
import dataclasses
import io
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_transformer.cli.main import main as mesh_transformer

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800  # for a command, on a busy machine
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", *DOCS)
# What a block is run as.  Blocks without a language show output, files or layouts.
LANGUAGES = ("bash", "python")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced code block of a page.

    Attributes:
      line: the number of its first line in the page, for error messages.
      needs: the hardware, account or time that it needs, from the comment `<!-- not run: ... -->`
        on the line before it; None if it can be run here.
    """

    page: str
    line: int
    language: str
    text: str
    needs: str | None

    @property
    def commands(self) -> list[str]:
        """The command lines of a bash block, with continued lines joined and without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]


def blocks(page: str) -> list[Block]:
    """Return a page's code blocks in order; `page` is a path relative to the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(
        r"^(?:<!-- not run: (?P<needs>.+?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
        text,
        re.DOTALL | re.MULTILINE,
    )
    return [
        Block(page, text.count("\n", 0, m.start("text")) + 1, m["language"], m["text"], m["needs"])
        for m in found
    ]


def runnable(page: str) -> list[Block]:
    """Return the blocks of a page that can be run here."""
    return [b for b in blocks(page) if b.language in LANGUAGES and b.needs is None]


def write_files(page: str, folder: Path) -> list[Path]:
    """Write the blocks of a page that begin with a file name, as `# NAME.py`, to a folder."""
    paths = []
    for block in runnable(page):
        name, _, code = block.text.partition("\n")
        if re.fullmatch(r"# \w+\.py", name):
            paths.append(folder / name.removeprefix("# "))
            paths[-1].write_text(code, encoding="utf-8")
    return paths


@contextlib.contextmanager
def reader(
    folder: Path, monkeypatch: pytest.MonkeyPatch, configs: tuple[str, ...] = (), **changes: Any
) -> Iterator["Reader"]:
    """Return a context manager that yields a reader who follows pages in an empty folder.

    The folder gets what a checkout has: data/, scripts/, notebooks/, the root scripts, and configs/
    with the named configs only, changed so that training is quick.  Servers that the reader starts
    end with the `with` block.
    """
    monkeypatch.chdir(folder)
    for path in [*ROOT.glob("*.py"), ROOT / "data", ROOT / "scripts", ROOT / "notebooks"]:
        Path(path.name).symlink_to(path)
    Path("configs").mkdir()
    for name in configs:
        values = json.loads((ROOT / "configs" / name).read_text()) | changes
        Path("configs", name).write_text(json.dumps(values))
    person = Reader(monkeypatch)
    try:
        yield person
    finally:
        person.close()


class Reader:
    """Runs blocks one after the other, as a reader does in one terminal and one Python session.

    Attributes:
      names: the variables of the Python session.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._monkeypatch = monkeypatch
        self.names: dict[str, Any] = {}
        self._servers: list[subprocess.Popen[str]] = []
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        monkeypatch.setenv("PATH", path)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("WANDB_MODE", "disabled")

    def follow(self, page: str) -> None:
        """Run all blocks of a page that can be run here.

        Raises:
          AssertionError: if a command fails; the message has its page and line.
        """
        for block in runnable(page):
            self.run(block)

    def run(self, block: Block) -> None:
        where = f"{block.page}:{block.line}"
        if block.language == "python":
            exec(compile(block.text, where, "exec"), self.names)
            return
        for command in block.commands:
            status = self._command(command)
            assert not status, f"{where}: exit status {status} of {command}"

    def _command(self, command: str) -> object:
        """Run one line; our own programs in this process, where JAX is loaded already."""
        words = shlex.split(command, comments=True)
        in_shell = re.search(r"[|&;<>$*~`]", re.sub(r"'[^']*'|\"[^\"]*\"", "", command))
        if words[:2] == ["mesh-transformer", "serve"]:
            return self._serve(words)
        if not in_shell and words[0] == "mesh-transformer":
            return self._call(words, mesh_transformer)
        if not in_shell and words[0] == "python" and words[1].endswith(".py"):
            path = str(ROOT / words[1])
            return self._call(words[1:], lambda: runpy.run_path(path, run_name="__main__"))
        shell = ["bash", "-euo", "pipefail", "-c", command]
        return subprocess.run(shell, check=False, timeout=SECONDS).returncode

    def _call(self, words: list[str], program: Any) -> object:
        self._monkeypatch.setattr(sys, "argv", words)
        self._monkeypatch.setattr(sys, "stdin", io.StringIO())
        try:
            program()
        except SystemExit as ended:
            return ended.code
        return 0

    def _serve(self, words: list[str]) -> object:
        """Start a server, and return when it prints its address."""
        command = [sys.executable, "-m", "mesh_transformer", *words[1:]]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._servers.append(server)
        assert server.stdout is not None
        return 0 if "http://" in server.stdout.readline() else "no address was printed"

    def close(self) -> None:
        """End the servers as Ctrl-C does."""
        for server in self._servers:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=SECONDS)


def main() -> None:
    """Print how many commands and Python blocks of each page are run, and how many are not."""
    print(f"{'page':24} {'commands':>9} {'not run':>8} {'Python':>7} {'not run':>8}")
    for page in PAGES:
        parts = blocks(page)
        counts = [
            sum(
                len(block.commands) if language == "bash" else 1
                for block in parts
                if block.language == language and (block.needs is None) == is_run
            )
            for language in LANGUAGES
            for is_run in (True, False)
        ]
        print(f"{page:24} {counts[0]:9} {counts[1]:8} {counts[2]:7} {counts[3]:8}")


if __name__ == "__main__":
    main()
