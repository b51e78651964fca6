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

from mesh_transformer.cli import serve, train
from mesh_transformer.transformer_shard import CausalTransformer
from tests.conftest import QUICK_COMPILATION
from tests.support.small_run import run_values, write_config

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120


def instructions() -> list[tuple[str, str]]:
    """Return the (keyword, arguments) of each instruction in the Dockerfile."""
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def services(name: str = "compose.yaml") -> dict:
    return yaml.safe_load((ROOT / "docker" / name).read_text())["services"]


def value(keyword: str) -> list[str]:
    """Return the words of the only ENTRYPOINT, CMD or health check."""
    [text] = [rest for key, rest in instructions() if key == keyword]
    return json.loads(text.rpartition("CMD ")[2])


def image(folder: Path) -> Path:
    """Make what the Dockerfile copies and the command that it writes; return the command's path."""
    app, command = folder / "app", folder / "bin" / "mesh-transformer"
    app.mkdir()
    command.parent.mkdir()
    for source, target in [r.split() for keyword, r in instructions() if keyword == "COPY"]:
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, app / target)
    [write] = [r for keyword, r in instructions() if keyword == "RUN" and "printf" in r]
    write = write.replace("/usr/local/bin/mesh-transformer", shlex.quote(str(command)))
    subprocess.run(["sh", "-c", write], check=True)
    python = command.parent / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    return command


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a container whose image is in a folder."""
    variables = dict(rest.split("=") for key, rest in instructions() if key == "ENV")
    own = {"XLA_FLAGS": QUICK_COMPILATION, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    own["PYTHONPATH"] = str(folder / variables["PYTHONPATH"].strip("/"))
    return os.environ | own


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
    [exposed] = [rest for keyword, rest in instructions() if keyword == "EXPOSE"]
    assert value("ENTRYPOINT") == ["mesh-transformer"]
    assert service["command"][0] == "serve"
    monkeypatch.setattr(sys, "argv", service["command"])
    args = serve.parse_args()
    assert (args.host, args.model_path) == ("0.0.0.0", "/model")
    assert service["ports"] == [f"127.0.0.1:{exposed}:{args.port}"]
    assert int(service["stop_grace_period"].removesuffix("s")) > args.drain_seconds
    assert build.get("args", {}).get("EXTRA", "") == ("gpu" if name == "serve-gpu" else "")


@pytest.mark.parametrize("name", ["train", "train-gpu"])
def test_compose_trains_with_the_image(name, monkeypatch):
    service, served = services("train.yaml")[name], services()[name.replace("train", "serve")]
    assert service["build"] == served["build"]
    assert service["image"] == served["image"]
    assert service.get("deploy") == served.get("deploy")
    assert service["command"][0] == "train"
    monkeypatch.setattr(sys, "argv", service["command"])
    assert train.parse_args().config == "config.json"
    assert service["restart"] == "no"  # a loss that is not finite ends it once


@pytest.mark.slow
def test_the_command_trains_from_the_copied_files(tmp_path):
    command = image(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    values = run_values(work, total_steps=4, bucket="./", model_dir="model")
    for key in ("train_set", "val_set"):
        values[key] = json.loads(json.dumps(values[key]).replace(f"{work}/", ""))
    write_config(work / "config.json", values)
    words = services("train.yaml")["train"]["command"]
    result = subprocess.run(
        [command, *words], cwd=work, env=environment(tmp_path), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.endswith("model: trained to step 4\n")
    assert (work / "model" / "step_4").is_dir()


@pytest.mark.slow
def test_the_command_serves_from_the_copied_files(tmp_path):
    config = {"layers": 1, "d_model": 16, "n_heads": 2, "n_vocab": 50400, "seq": 16}
    network = CausalTransformer(config | {"pe_rotary_dims": 8, "dtype": "float32"})
    network.save(str(tmp_path / "model"))
    network.close()
    command = image(tmp_path)
    health = value("HEALTHCHECK")
    changed = {"/model": str(tmp_path / "model"), "5000": "0"}
    process = subprocess.Popen(
        [command, *(changed.get(word, word) for word in value("CMD"))],
        cwd=tmp_path / "app",
        env=environment(tmp_path),
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
