"""Serves a model to hostile and honest clients at once; checks that honest answers stay the same.

`python -m tests.long.hostile_server --requests 5000` takes some minutes.  The test suite does not
run it.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from tests.support.hostile_requests import COSTLY, Hostile
from tests.support.waiting import SECONDS, wait_until

ROOT = Path(__file__).resolve().parents[2]
DRAIN_SECONDS = 10
HONEST = 8
CONFIG = {
    "layers": 2,
    "d_model": 64,
    "n_heads": 8,
    "n_vocab": 50400,
    "seq": 256,
    "pe_rotary_dims": 8,
    "dtype": "float32",
    "name": "small",
}


class Served:
    """device_serve.py with a model of random weights."""

    def __init__(self, folder: Path):
        command = [sys.executable, "device_serve.py", "--model-path", str(folder), "--port", "0"]
        command += [
            "--chat-template",
            "plain",
            "--max-tokens",
            "500",
            "--drain-seconds",
            str(DRAIN_SECONDS),
        ]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if "http://" in line)
        self.url = re.findall(r"http://\S+", line)[0]
        self.address = ("127.0.0.1", int(self.url.rpartition(":")[2]))
        self.http = httpx.Client(base_url=self.url, timeout=10 * SECONDS)

    def resident(self) -> int:
        """Return the resident memory in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.findall(r"VmRSS:\s+(\d+)", status)[0])

    def ask(self, body: dict[str, Any]) -> str:
        """Return the text of a completion; if the queue is full, wait until it has room."""
        while True:
            answer = self.http.post("/v1/completions", json=body)
            if answer.status_code != 429:
                assert answer.status_code == 200, answer.text
                return answer.json()["choices"][0]["text"]
            time.sleep(float(answer.headers["Retry-After"]))


@contextlib.contextmanager
def health_polled(url: str) -> Iterator[list[float]]:
    """Request /health during the block, over new connections from a separate process.

    Yields a list, which at the end of the block contains the seconds of each request.
    """
    asking = subprocess.Popen(
        [sys.executable, "-m", "tests.long.hostile_server", "--health", url],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds: list[float] = []
    try:
        yield seconds
    finally:
        seconds += json.loads(asking.communicate()[0])


def poll_health(url: str) -> list[float]:
    """Request /health until the standard input ends; returns the seconds of each request."""
    ended = threading.Thread(target=sys.stdin.read, daemon=True)
    ended.start()
    seconds = []
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=url, limits=limits, timeout=SECONDS) as client:
        while ended.is_alive():
            began = time.perf_counter()
            assert client.get("/health").json()["status"] == "ok"
            seconds.append(time.perf_counter() - began)
            time.sleep(0.05)
    return seconds


def honest_requests(rng: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [rng.randrange(50257) for _ in range(rng.randint(1, 100))],
            "max_tokens": rng.randint(1, 40),
            "temperature": rng.choice([0, 0.7, 1.0]),
            "top_p": rng.choice([0.5, 0.9, 1.0]),
            "repetition_penalty": rng.choice([1.0, 1.2]),
            "seed": rng.randrange(2**32),
        }
        for _ in range(64)
    ]


def attack(served: Served, count: int, seed: int) -> None:
    rng = random.Random(seed)
    requests = honest_requests(rng)
    expected = [served.ask(body) for body in tqdm(requests, desc="alone")]
    stop = threading.Event()
    wrong: list[tuple[int, str]] = []
    answered = [0] * HONEST
    memory: list[int] = []

    def honest(number: int) -> None:
        draw = random.Random(number)
        while not stop.is_set():
            index = draw.randrange(len(requests))
            text = served.ask(requests[index])
            if text != expected[index]:
                wrong.append((index, text))
            answered[number] += 1

    hostile = Hostile(served, seed, more=COSTLY)
    with ThreadPoolExecutor(HONEST) as beside, health_polled(served.url) as health:
        clients = [beside.submit(honest, number) for number in range(HONEST)]
        try:
            complaints = []
            with ThreadPoolExecutor(16) as pool:
                answers = pool.map(hostile.run, range(count))
                for done, complaint in enumerate(tqdm(answers, "hostile", count), 1):
                    if complaint:
                        complaints.append(complaint)
                    if done % max(count // 5, 1) == 0:
                        memory.append(served.resident())
        finally:
            stop.set()
        for client in clients:
            client.result()
    wait_until(lambda: _rows_in_use(served) == 0, "free rows")
    print(f"{count} hostile requests; complaints: {len(complaints)} {complaints[:5]}")
    print(f"{sum(answered)} honest answers, {min(answered)} at least to each; {len(wrong)} differ")
    cuts = statistics.quantiles(health, n=100, method="inclusive")
    print(f"/health {len(health)} times: median {cuts[49]:.3f} s, p99 {cuts[98]:.3f} s")
    print(f"resident memory after each fifth: {[size >> 20 for size in memory]} MiB")
    assert not complaints
    assert not wrong
    assert min(answered) > 0
    assert cuts[98] < 0.5
    assert memory[-1] <= 1.05 * memory[0]


def _rows_in_use(served: Served) -> float:
    text = served.http.get("/metrics").text
    return float(re.findall(r"^\S*rows_active\S* (\S+)$", text, re.MULTILINE)[0])


def end(served: Served, rng: random.Random) -> None:
    """Send SIGTERM during answers that take longer than the drain time."""
    body = {"prompt": "Hello", "max_tokens": 500, "n": 64, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(served.http.post, "/v1/completions", json=body) for _ in range(4)]
        wait_until(lambda: _rows_in_use(served) > 0, "a row in use")
        began = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        status = served.process.wait(DRAIN_SECONDS + SECONDS)
        seconds = time.monotonic() - began
        for answer in answers:
            answer.exception()
    print(f"SIGTERM: ended with status {status} after {seconds:.1f} s (drain {DRAIN_SECONDS} s)")
    assert seconds < DRAIN_SECONDS + 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000, help="hostile requests (5000)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--health", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.health:
        json.dump(poll_health(args.health), sys.stdout)
        return

    from mesh_transformer.transformer_shard import CausalTransformer

    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        network = CausalTransformer(CONFIG)
        network.save(str(folder))
        network.close()
        served = Served(folder)
        try:
            attack(served, args.requests, args.seed)
            end(served, random.Random(args.seed))
        finally:
            served.process.kill()
            served.process.wait()


if __name__ == "__main__":
    main()
