"""The steps of docker/, run without a container: copies, command and health check."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mesh_transformer.cli import serve
from mesh_transformer.transformer_shard import CausalTransformer
from tests.conftest import QUICK_COMPILATION

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120


def instructions() -> list[tuple[str, str]]:
    """Return the (keyword, arguments) of each instruction in the Dockerfile."""
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def services() -> dict:
    return yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]


def test_the_image_installs_the_same_packages_as_ci():
    # CI installs with the Makefile's rule: the same file, with the same options.
    rule = re.search(r"pip install (.* -r requirements\.txt)", (ROOT / "Makefile").read_text())
    installs = [rest for keyword, rest in instructions() if keyword == "RUN" and "-r " in rest]
    assert rule is not None
    # These options change no package.  The image's user cannot write compiled modules, so pip does.
    neutral = {"--no-cache-dir", "--no-compile"}
    assert [set(shlex.split(i)) - neutral for i in installs] == [
        {"pip", "install", *shlex.split(rule[1])} - neutral
    ]
    [version] = [rest for keyword, rest in instructions() if keyword == "FROM"]
    assert version.startswith("python:3.11")


def test_the_build_context_contains_the_copied_files():
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split()
    copied = {rest.split()[0] for keyword, rest in instructions() if keyword == "COPY"}
    assert {f"!{name}" for name in copied} == {name for name in ignored if name[0] == "!"}
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize("name", ["serve", "serve-gpu"])
def test_compose_runs_the_image(name, monkeypatch):
    service = services()[name]
    build = service["build"]
    assert (ROOT / "docker" / build["context"] / build["dockerfile"]).resolve().is_file()
    [entry] = [json.loads(rest) for keyword, rest in instructions() if keyword == "ENTRYPOINT"]
    [exposed] = [rest for keyword, rest in instructions() if keyword == "EXPOSE"]
    monkeypatch.setattr(sys, "argv", [*entry[1:], *service["command"]])
    args = serve.parse_args()
    assert (args.host, args.model_path) == ("0.0.0.0", "/model")
    assert service["ports"] == [f"127.0.0.1:{exposed}:{args.port}"]
    assert int(service["stop_grace_period"].removesuffix("s")) > args.drain_seconds
    assert build.get("args", {}).get("EXTRA", "") == ("gpu" if name == "serve-gpu" else "")


@pytest.mark.slow
def test_the_command_serves_from_the_copied_files(tmp_path):
    config = {"layers": 1, "d_model": 16, "n_heads": 2, "n_vocab": 50400, "seq": 16}
    network = CausalTransformer(config | {"pe_rotary_dims": 8, "dtype": "float32"})
    network.save(str(tmp_path / "model"))
    network.close()
    app = tmp_path / "app"
    app.mkdir()
    for source, target in [r.split() for keyword, r in instructions() if keyword == "COPY"]:
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, app / target)
    values = {k: rest for k, rest in instructions() if k in ("ENTRYPOINT", "CMD", "HEALTHCHECK")}
    command = json.loads(values["ENTRYPOINT"]) + json.loads(values["CMD"])
    health = json.loads(values["HEALTHCHECK"].partition("CMD ")[2])
    changed = {"python": sys.executable, "/model": str(tmp_path / "model"), "5000": "0"}
    environment = {
        key: v for key, v in os.environ.items() if key not in ("XLA_FLAGS", "PYTHONPATH")
    }
    process = subprocess.Popen(
        [changed.get(word, word) for word in command],
        cwd=app,
        env=environment | {"XLA_FLAGS": QUICK_COMPILATION},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = re.findall(r":(\d+)", process.stdout.readline())[-1]
        check = [sys.executable, *(word.replace("5000", port) for word in health[1:])]
        assert subprocess.run(check, timeout=SECONDS, check=False).returncode == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        assert subprocess.run(check, timeout=SECONDS, check=False, stderr=-3).returncode == 1
    finally:
        process.kill()
        process.communicate()
