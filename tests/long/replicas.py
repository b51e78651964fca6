"""Many clients of a server with replicas, of which one is killed and whose weights change twice.

`python -m tests.long.replicas` takes 25 minutes on 2 cores: 10 with replicas, as long with a single
one, and the answers of one server without Ray to each request, with each of the weights.  It fails
if an answer is not that of weights which could have been in use, if one is lost or doubled, or if
the share of prompt tokens that were in a cache is more than 5 percent below that of one replica.
"""

import argparse
import collections
import functools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.support.replicas import Server, Weights, answer, requests_of, running
from tests.support.waiting import SECONDS

STEPS = 3
REQUESTS = requests_of(groups=16, each=8)


class Clients:
    """Threads that ask one request after the other, and count the results.

    Attributes:
      counts: number of results of each kind.
      reasons: number of refused or lost requests for each reason.
      oldest, newest: the steps of the weights that may be in use.
    """

    def __init__(self, server: Server, count: int, expected: list[list[str]], seed: int):
        self.counts, self.reasons = collections.Counter[str](), collections.Counter[str]()
        self.oldest = self.newest = 0
        self._server, self._expected, self._stop = server, expected, threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {number}"),))
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, rng: random.Random) -> None:
        with httpx.Client(base_url=self._server.url, timeout=SECONDS) as client:
            while not self._stop.is_set():
                number, stream, oldest = (
                    rng.randrange(len(REQUESTS)),
                    rng.random() < 0.5,
                    self.oldest,
                )
                kind, value = answer(client, REQUESTS[number], stream=stream)
                with self._lock:
                    self._count(number, kind, value, oldest)

    def _count(self, number: int, kind: str, value: Any, oldest: int) -> None:
        if kind != "answered":
            self.counts[kind] += 1
            self.reasons[f"{kind}: {value[:160]}"] += 1
            return
        text, usage = value
        allowed = [self._expected[step][number] for step in range(oldest, self.newest + 1)]
        if text not in allowed:
            kind = "doubled" if text in [one + one for one in allowed] else "wrong"
            self.reasons[f"{kind}: {number} {text!r}"] += 1
        self.counts[kind] += 1
        self.counts["prompt tokens"] += usage["prompt_tokens"]
        self.counts["cached tokens"] += usage["prompt_tokens_details"]["cached_tokens"]

    def close(self) -> None:
        """Wait for the last answers."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @property
    def share(self) -> float:
        """Share of the prompts' tokens that were in a cache."""
        return self.counts["cached tokens"] / max(self.counts["prompt tokens"], 1)


def expected_answers(weights: Weights, folder: Path) -> list[list[str]]:
    """Return the answers to all requests of one server without Ray, with each of the weights."""
    texts = []
    for step in range(STEPS):
        with (
            running(weights.step(step), compiled=folder) as server,
            ThreadPoolExecutor(8) as pool,
        ):
            ask = functools.partial(answer, server.http, stream=False)
            results = list(pool.map(ask, REQUESTS))
        texts.append([value[0] for _, value in results])
    return texts


def measure(
    args: argparse.Namespace, folder: Path, weights: Weights, expected: list[list[str]], count: int
) -> Clients:
    """Run the clients with `count` replicas, and print what happens and the counts."""
    with running(weights.folder, "--replicas", str(count), compiled=folder) as server:
        clients, began = Clients(server, args.clients, expected, args.seed), time.monotonic()

        def wait(share: float) -> None:
            time.sleep(max(began + 60 * args.minutes * share - time.monotonic(), 0))

        def say(what: str) -> None:
            answered = clients.counts["answered"]
            print(f"{time.monotonic() - began:6.0f} s, {answered:6} answers: {what}", flush=True)

        wait(0.2)
        if count > 1:
            os.kill(server.processes()[0], signal.SIGKILL)
            say("killed a replica")
        for step in range(1, STEPS):
            wait(0.2 + 0.25 * step)
            clients.newest = step
            weights.publish()
            say(f"changing to step {step}")
            server.change(step)
            clients.oldest = step
            say(f"all replicas serve step {step}")
        wait(1)
        clients.close()
        say("the end")
        retried = server.metric("mesh_transformer_front_retried_requests_total")[""]
        print(f"{count} replicas: {dict(clients.counts)}; {retried:.0f} sent again")
        for reason, times in clients.reasons.items():
            print(f"  {times} times {reason}")
        print(f"  {100 * clients.share:.1f} percent of the prompts' tokens were in a cache")
    return clients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="with replicas (default 10)")
    parser.add_argument("--clients", type=int, default=64, help="number of clients (default 64)")
    parser.add_argument("--replicas", type=int, default=2, help="number of replicas (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the clients' choices")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        runs = []
        expected: list[list[str]] = []
        for count in (args.replicas, 1):
            folder = Path(name, f"{count}")
            folder.mkdir()
            weights = Weights(folder, STEPS)
            expected = expected or expected_answers(weights, Path(name))
            runs.append(measure(args, Path(name), weights, expected, count))
    several, single = runs
    bad = sum(run.counts[kind] for run in runs for kind in ("wrong", "lost", "doubled"))
    sys.exit(bad > 0 or several.share < 0.95 * single.share)


if __name__ == "__main__":
    main()
