"""The wheel: its contents, and its command from records to a server in a folder without sources."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import mesh_transformer
from mesh_transformer.cli.main import COMMANDS
from scripts import release
from tests.support.waiting import SECONDS

ROOT = Path(__file__).resolve().parents[2]
# What `pip wheel` reads, and two folders that must stay out of the wheel.
SOURCES = ("mesh_transformer", "configs", "scripts", "tests/support")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
# pip needs neither the network nor a build environment of its own.
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
ABOUT = ("licenses/LICENSE", "entry_points.txt", "METADATA")
SMALL = ("layers=1", "d_model=32", "n_heads=4", "pe_rotary_dims=4", "seq=32", "tpu_size=1")
SMALL += ("cores_per_replica=1", "per_replica_batch=2", "total_steps=10", "ckpt_every=10")
SMALL += ("train_set=records/mine.index", 'val_set={"mine": "records/mine.index"}')
SMALL += ("val_batches=1", "val_every=10")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel, built from a copy of the sources because building writes beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "sources"
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    subprocess.run([*PIP, "wheel", *options, copy], check=True, timeout=SECONDS)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_wheel_has_the_package_its_configs_and_nothing_else(wheel):
    files = [*(ROOT / "mesh_transformer").rglob("*"), *(ROOT / "configs").iterdir()]
    kept = [path for path in files if path.is_file() and "__pycache__" not in path.parts]
    release.check_wheel(wheel, [path.relative_to(ROOT).as_posix() for path in kept])
    version = mesh_transformer.__version__
    about = f"mesh_transformer-{version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(f"{about}/{name}") for name in ABOUT}
    assert contents["licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    entry = "[console_scripts]\nmesh-transformer = mesh_transformer.__main__:main\n"
    assert contents["entry_points.txt"].decode() == entry
    metadata = message_from_bytes(contents["METADATA"])
    values = [metadata[key] for key in ("Name", "Version", "License-Expression")]
    assert values == ["mesh-transformer", version, "Apache-2.0"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload(decode=True)
    assert isinstance(description, bytes)
    text = description.decode()
    # README.md, in which links to other files of the checkout are only their text.
    assert text.startswith((ROOT / "README.md").read_text("utf-8").partition("](")[0])
    assert "(docs/" not in text
    assert "[mesh-transformer-jax](https://" in text
    assert "Your own text in eight commands" in text


class Installed:
    """A wheel that is installed in a folder, and the empty folder in which its command runs.

    The processes find the dependencies of this Python and, before everything else, the wheel.
    """

    def __init__(self, wheel: Path, folder: Path):
        self._library, self.place = folder / "library", folder / "place"
        self.place.mkdir()
        options = ("--no-deps", "--no-index", "--target", self._library)
        subprocess.run([*PIP, "install", *options, wheel], check=True, timeout=SECONDS)
        self._environment = os.environ | {
            "PYTHONPATH": str(self._library),
            "JAX_PLATFORMS": "cpu",
            "WANDB_MODE": "disabled",
        }

    def start(self, program: object, *words: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(word) for word in (program, *words)],
            cwd=self.place,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def command(self, *words: object) -> subprocess.Popen[str]:
        return self.start(self._library / "bin/mesh-transformer", *words)

    def run(self, *words: object) -> str:
        """Run a command of mesh-transformer, and return its stdout."""
        return self.output(self.command(*words))

    def output(self, process: subprocess.Popen[str]) -> str:
        """Wait for the end of a process, check that it succeeded, and return its stdout."""
        out, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, (process.args, out, errors)
        return out

    def check_module(self) -> None:
        """Check that the package is imported from the wheel and not from the checkout."""
        code = "import mesh_transformer as m; print(m.__file__, *m.__path__)"
        folder = self._library / "mesh_transformer"
        expected = f"{folder / '__init__.py'} {folder}\n"
        assert self.output(self.start(sys.executable, "-c", code)) == expected


def completion(url: str, **request: object) -> str:
    """Return the text with which a server completes a prompt."""
    headers = {"Content-Type": "application/json"}
    call = urllib.request.Request(f"{url}/v1/completions", json.dumps(request).encode(), headers)
    with urllib.request.urlopen(call, timeout=SECONDS) as response:
        return json.load(response)["choices"][0]["text"]


@pytest.mark.slow
def test_installed_wheel_trains_converts_samples_and_serves(wheel, tmp_path):
    installed = Installed(wheel, tmp_path)
    installed.check_module()
    run = installed.run
    listed = re.findall(r"^  ([\w-]+)  ", run("--help"), re.MULTILINE)
    assert listed == list(COMMANDS)

    (installed.place / "text.txt").write_text("A herd of unicorns crossed the valley. " * 200)
    run("records", "text.txt", "mine", "--output-dir", "records", "--seq", 32)
    changes = [word for change in SMALL for word in ("--set", change)]
    run("train", "--config", "tiny", *changes)
    rows = (installed.place / "runs/tiny/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows if "train/loss" in row] == list(range(1, 11))
    run("convert", "--from", "native", "runs/tiny", "--to", "hf", "hf")

    prompt = "A herd of"
    greedy = ("--length", 8, "--temperature", 0)
    sampled = run("sample", "--model-path", "hf", "--prompt", prompt, *greedy)
    server = installed.command("serve", "--model-path", "hf", "--port", 0, "--rows", 1)
    try:
        assert server.stdout is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        assert address is not None, server.communicate(timeout=SECONDS)
        text = completion(address[0], prompt=prompt, max_tokens=8, temperature=0)
        server.send_signal(signal.SIGTERM)
        installed.output(server)
    finally:
        server.kill()
        server.communicate()
    assert prompt + text + "\n" == sampled
    names = {path.name for path in installed.place.iterdir()}
    assert names == {"text.txt", "records", "runs", "hf"}
