"""Install a wheel in clean environments, and run the commands of the core and of each extra there.

`python scripts/clean_environments.py WHEEL`; `make release` does so with what it has built.  For
each Python there is one environment with the core alone, in which the commands that need an extra
must name it, and one per extra, which has its packages beside the core's.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mesh_transformer.extras import EXTRAS
from mesh_transformer.util import InputError, run_script

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
SECONDS = 1200  # after which a command is killed
FAILED = "**failed**"
CONFIG = {
    "block": "gpt2", "pe": "fixed", "layers": 1, "d_model": 32, "n_heads": 4, "n_vocab": 50304,
    "seq": 32, "tpu_size": 1, "cores_per_replica": 1, "per_replica_batch": 2, "warmup_steps": 1,
    "total_steps": 4, "ckpt_every": 4, "train_set": "data/mine.index",
    "val_set": {},
}  # fmt: skip
TRAIN = "mesh-transformer train --config small.json --model-dir runs"
MODEL = "--model-path runs/small"
# What an installation without extras does.
CORE = (
    "mesh-transformer --version",
    "mesh-transformer plan --config small.json --topology cpu-1 --fast",
    "mesh-transformer records text.txt mine --output-dir data --seq 32",
    f"{TRAIN}/small",
    f"mesh-transformer sample {MODEL} --prompt A --length 4",
)


class Check(NamedTuple):
    """A command that needs extras.

    Attributes:
      extras: as pip takes them, such as "pod,serve".
      command: with {root} for the checkout.
      status, text: its exit status with the extras, and what it prints then, if that is checked.
      lacking: its exit status without the extras.
    """

    extras: str
    command: str
    status: int = 0
    text: str = ""
    lacking: int = 2


CHECKS = (
    Check("plan", "mesh-transformer plot runs/small loss.png"),
    Check("records", "mesh-transformer split text.txt parts"),
    Check("gguf", "mesh-transformer convert --from native runs/small --to gguf model.gguf"),
    # Without wandb, training continues: its metrics are in a file as well.
    Check("wandb", f"{TRAIN}/wandb --set wandb_project=trial", lacking=0),
    Check("serve", f"mesh-transformer serve {MODEL} --port 0"),
    Check("pod,serve,replicas", f"mesh-transformer serve {MODEL} --port 0 --replicas 1"),
    Check("pod", "mesh-transformer pod --config small.json --model-dir runs/pod --local-hosts 1"),
    Check("eval", f"mesh-transformer eval {MODEL} --include-path . --tasks made_choice"),
    # The package is there, but the hub is not asked.
    Check("datasets", "mesh-transformer records hf:a/b hub --seq 32", 2, "check the name"),
    Check("examples", "python -c 'import runpy; runpy.run_path(\"{root}/examples/digits.py\")'"),
    Check("notebook", "jupyter lab --version"),
)
# pip resolves these, but installs nothing: the union of extras above, what the lock's tests use,
# and gigabytes for hardware.
RESOLVED = ("all", "dev", "tpu", "gpu")


class Environment:
    """A virtual environment in a folder; its commands run in the folder `place`."""

    def __init__(self, python: str, folder: Path, base: "Environment | None" = None):
        """Create it; it sees the packages of `base`, and shares its `place`."""
        _run([python, "-m", "venv", str(folder)])
        self._bin, self.name = folder / "bin", folder.name
        (self._library,) = folder.glob("lib/python*/site-packages")
        if base is None:
            self.place = folder / "place"
            self.place.mkdir()
        else:
            self.place = base.place
            (self._library / "base.pth").write_text(f"{base._library}\n")

    def install(self, *words: str) -> float:
        """Run `pip install` and return its seconds."""
        started = time.monotonic()
        _run([str(self._bin / "pip"), "install", *words, "--quiet", "--disable-pip-version-check"])
        return time.monotonic() - started

    def command(self, line: str) -> tuple[int, str]:
        """Run a command in `place`; a server is stopped as soon as it has printed its address.

        Returns:
          The exit status and all output.
        """
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        environment |= {"PATH": f"{self._bin}{os.pathsep}{environment['PATH']}"}
        environment |= {"JAX_PLATFORMS": "cpu", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            shlex.split(line.replace("{root}", str(ROOT))),
            cwd=self.place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            output = []
            for text in process.stdout if " serve " in line else ():
                output.append(text)
                if re.search(r"http://127\.0\.0\.1:\d+", text):
                    process.send_signal(signal.SIGTERM)
                    break
            output.append(process.communicate()[0])
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        return process.returncode, "".join(output)

    def check(self, line: str, status: int = 0, text: str = "") -> float:
        """Run a command and return its seconds.

        Raises:
          InputError: if its exit status is another one, or the pattern `text` is not in its output.
        """
        started = time.monotonic()
        actual, output = self.command(line)
        seconds = time.monotonic() - started
        if actual != status or not re.search(text, output):
            wanted = f"{status} and the output {text!r}" if text else status
            raise InputError(
                f"{self.name}: exit status {actual} of {line}, expected {wanted}:\n{output}"
            )
        return seconds

    def mebibytes(self) -> float:
        """Return the size of the packages."""
        files = (path for path in self._library.rglob("*") if path.is_file())
        return sum(path.stat().st_size for path in files) / 2**20


def _run(words: list[str]) -> None:
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode:
        raise InputError(f"{shlex.join(words)} failed:\n{result.stdout}{result.stderr}")


def interpreter(version: str) -> str:
    """Return the path of a Python, such as "3.13"."""
    found = subprocess.run([ROOT / ".ci/python", version], capture_output=True, text=True)
    if found.returncode:
        raise InputError(f"Python {version} is not installed here; leave it out with --python")
    return found.stdout.strip()


def write_inputs(place: Path) -> None:
    """Write what the commands read: a text, a config and an lm-eval task."""
    (place / "text.txt").write_text("A herd of unicorns crossed the valley. " * 200)
    (place / "small.json").write_text(json.dumps(CONFIG))
    for path in (ROOT / "tests/data/eval_tasks").glob("choice.*"):
        shutil.copy(path, place)


def check_extras(core: Environment, check: Check, wheel: Path, python: str) -> list[str]:
    """Run a command without its extras, then with only them.

    Returns:
      The cells of a row: MiB beyond the core's, seconds of pip, the command, its seconds.
    """
    names = check.extras.split(",")
    if set(names) <= set(EXTRAS):
        line = rf"install the extra: .*\[({'|'.join(names)})\]"
        core.check(check.command, check.lacking, line)
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(python, Path(folder) / check.extras, core)
        environment.install("--no-deps", "--force-reinstall", str(wheel))  # its own command
        seconds = environment.install(f"{wheel}[{check.extras}]")
        taken = environment.check(check.command, check.status, check.text)
        size = f"+{environment.mebibytes():.0f}"
    return [size, f"{seconds:.0f}", f"`{check.command}`", f"{taken:.1f}"]


def check_python(
    version: str, python: str, wheel: Path, source: Path | None, extras: list[str]
) -> Iterator[str]:
    """Check the core and extras with a version of Python, whose path is `python`.

    Yields:
      The rows of a table in Markdown.  That of extras which fail has the error instead.

    Raises:
      InputError: if the core fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        core = Environment(python, Path(folder) / "core")
        seconds = f"{core.install(str(wheel)):.0f}"
        size = f"{core.mebibytes():.0f}"
        write_inputs(core.place)
        for line in CORE:
            yield f"| {version} | | {size} | {seconds} | `{line}` | {core.check(line):.1f} |"
            size = seconds = ""
        if source is not None:
            environment = Environment(python, Path(folder) / "source", core)
            seconds = f"{environment.install('--no-deps', str(source)):.0f}"
            taken = f"{environment.check(CORE[0]):.1f}"
            yield f"| {version} | from the source archive | | {seconds} | `{CORE[0]}` | {taken} |"
        for check in (check for check in CHECKS if check.extras in extras):
            try:
                cells = " | ".join(check_extras(core, check, wheel, python))
            except InputError as error:
                cells = f"{FAILED}: {error}"
            yield f"| {version} | {check.extras} | {cells} |"
        for name in (name for name in RESOLVED if name in extras):
            try:
                seconds = core.install("--dry-run", f"{wheel}[{name}]")
                cells = f"| {seconds:.0f} | resolved, not installed | |"
            except InputError as error:
                cells = f"{FAILED}: {error} |"
            yield f"| {version} | {name} | {cells}"


def report(wheel: Path, source: Path | None, pythons: list[str], extras: list[str]) -> str:
    """Check with several Pythons, and return a table in Markdown.

    Raises:
      InputError: if the core fails, or an extra, after all others have been checked.
    """
    lines = [
        "| Python | extras | MiB | seconds of pip | command | its seconds |",
        "|---|---|---|---|---|---|",
    ]
    for version, python in {version: interpreter(version) for version in pythons}.items():
        for row in check_python(version, python, wheel, source, extras):
            print(row, flush=True)
            lines.append(row)
    failed = [" ".join(row.removeprefix("| ").split(" | ")[:2]) for row in lines if FAILED in row]
    if failed:
        raise InputError(f"checks failed, see above: Python {', '.join(failed)}")
    return "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose what is checked."""
    known = [*(check.extras for check in CHECKS), *RESOLVED]
    parser.add_argument(
        "--python", nargs="*", default=PYTHONS, help="versions to check (default all)"
    )
    parser.add_argument(
        "--extras",
        nargs="*",
        default=known,
        choices=known,
        metavar="EXTRAS",
        help=f"extras to check (default all: {' '.join(known)})",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--source", type=Path, help="source archive to install as well")
    add_arguments(parser)
    args = parser.parse_args()
    source = args.source and args.source.absolute()
    report(args.wheel.absolute(), source, args.python, args.extras)


if __name__ == "__main__":
    run_script(main)
