"""A server with replicas as a process, its weights, and clients that check its answers."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from mesh_transformer.transformer_shard import CausalTransformer
from tests.conftest import QUICK_COMPILATION
from tests.support.waiting import SECONDS, wait_until

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "layers": 1,
    "d_model": 32,
    "n_heads": 4,
    "n_vocab": 264,
    "seq": 128,
    "pe_rotary_dims": 8,
    "dtype": "float32",
    "tokenizer": "bytes",
    "tpu_size": 1,
    "cores_per_replica": 1,
    "name": "tiny",
}
FLAGS = (
    *("--rows", "8", "--prefix-cache", "4096", "--drain-seconds", "120"),
    *("--fixed-shapes", "--chunk", "16"),  # with pages of 16 tokens
)


class Weights:
    """A model folder whose newest step is replaced by others, as a training run would.

    Args:
      folder: an empty folder.
      count: number of steps, each of other random weights.
    """

    def __init__(self, folder: Path, count: int):
        self.folder, self._hidden, self._published = folder / "model", folder / "hidden", 0
        for step in range(count):
            network = CausalTransformer({**CONFIG, "seed": step})
            network.step = step
            network.save(str(self._hidden / f"{step}"))
            network.close()
        self.folder.mkdir()
        self.publish()

    def step(self, number: int) -> Path:
        """Return the folder of a step, published or not."""
        published = self.folder / f"step_{number}"
        return published if published.exists() else self._hidden / f"{number}" / published.name

    def publish(self) -> None:
        """Add the next step to the model folder."""
        step = self.step(self._published)
        shutil.copytree(step, self.folder / "draft")
        (self.folder / "draft").rename(self.folder / step.name)
        self._published += 1


def environment_with(compiled: Path) -> dict[str, str]:
    """Return the environment of a command with one device, which keeps programs in a folder."""
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return inherited | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": QUICK_COMPILATION,
        "PYTHONPATH": str(ROOT),
    }


def replica_processes(name: str) -> list[int]:
    """Return the process ids of the replicas of the command with a port or a process id."""
    start, ids = f"ray::ServeReplica:mesh-transformer-{name}-".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cmdline").read_bytes().startswith(start):
                ids.append(int(path.name))
    return sorted(ids)


class Server:
    """The command `serve` in a process, and its address."""

    def __init__(self, model: Path, *flags: str, compiled: Path):
        command = [sys.executable, "-m", "mesh_transformer", "serve", "--model-path", str(model)]
        self.errors = compiled / f"errors_{random.getrandbits(40):x}"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, "--port", "0", *FLAGS, *flags],
                cwd=ROOT,
                env=environment_with(compiled),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        address = re.search(r"http://\S+:(\d+)", self.process.stdout.readline())
        if address is None:
            self.process.kill()
            raise AssertionError(self.errors.read_text())
        self.url, self.port = address[0], address[1]
        self.http = httpx.Client(base_url=self.url, timeout=SECONDS)

    def processes(self) -> list[int]:
        """Return the process ids of the replicas."""
        return replica_processes(self.port)

    def names(self) -> list[str]:
        """Return the names of the replicas that can answer."""
        replicas = self.http.get("/health").json()["replicas"]
        return sorted(name for name, state in replicas.items() if state["status"] == "ok")

    def change(self, step: int) -> None:
        """Let the server replace its replicas by ones with the newest step, which is `step`."""
        self.process.send_signal(signal.SIGHUP)
        line = f"step_{step}\n"
        wait_until(lambda: line in self.errors.read_text(), f"the replicas serve step {step}")

    def metric(self, name: str) -> dict[str, float]:
        """Return {name of a replica, or "": a metric's value}."""
        text = self.http.get("/metrics").text
        values = re.findall(rf'^{name}(?:{{replica="(\w+)"}})? (\S+)$', text, re.MULTILINE)
        return {replica: float(value) for replica, value in values}

    def close(self) -> None:
        """End the server as an administrator would."""
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(SECONDS) == 0, self.errors.read_text()


@contextlib.contextmanager
def running(model: Path, *flags: str, compiled: Path) -> Iterator[Server]:
    """Run a server until the end of the context."""
    server = Server(model, *flags, compiled=compiled)
    try:
        yield server
        server.close()
    finally:
        server.process.kill()
        server.process.communicate()


def requests_of(groups: int, each: int) -> list[dict[str, Any]]:
    """Return requests with random prompts, of which each group has the first 64 letters in common.

    The answers to a request are equal for equal weights.
    """
    rng = random.Random(groups * each)

    def letters(count: int) -> str:
        return "".join(rng.choices("abcdefgh ", k=count))

    return [
        {"prompt": start + letters(16), "max_tokens": 12, "temperature": heat, "seed": number}
        for start in [letters(64) for _ in range(groups)]
        for number in range(each)
        for heat in [number % 2]
    ]


def answer(client: httpx.Client, request: dict[str, Any], *, stream: bool) -> tuple[str, Any]:
    """Send a request; returns ("answered", its text and usage), or ("refused" or "lost", why).

    An answer that ends with an error event counts as refused.
    """
    body = request | {
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    try:
        response = client.post("/v1/completions", json=body)
    except httpx.HTTPError as error:
        return "lost", repr(error)
    if response.status_code != 200:
        return "refused", f"{response.status_code} {response.text}"
    if not stream:
        value = response.json()
        return "answered", (value["choices"][0]["text"], value["usage"])
    events = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    if events[-1] != "[DONE]":
        return ("refused" if '"error"' in events[-1] else "lost"), events[-1]
    values = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["text"] for value in values for choice in value["choices"])
    return "answered", (text, values[-1]["usage"])
