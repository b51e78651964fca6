"""Loads a running server with many clients at once, and compares them with one at a time.

Each of a fixed set of requests is served alone first.  Then clients draw from the set, and every
answer must be what it was alone.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from mesh_transformer.util import InputError, StoppedError, run_script

WORDS = [
    "the",
    "king",
    "and",
    "his",
    "men",
    "went",
    "over",
    "a",
    "hill",
    "to",
    "see",
    "what",
    "had",
    "become",
    "of",
    "them",
    "all",
]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:5000", help="(http://127.0.0.1:5000)")
    parser.add_argument("--api-key", help="where the server wants one")
    parser.add_argument("--clients", type=int, default=64, help="at once (64)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load (60)")
    parser.add_argument("--requests", type=int, default=64, help="that differ (64)")
    parser.add_argument("--most-words", type=int, default=40, help="in a prompt (40)")
    parser.add_argument("--most-tokens", type=int, default=64, help="in an answer (64)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (0)")
    return parser.parse_args()


@dataclasses.dataclass
class Answer:
    """What came back, and when, in seconds from the request."""

    text: str
    tokens: int
    first: float
    end: float

    @property
    def per_token(self) -> float:
        """Seconds between tokens, after the first."""
        return (self.end - self.first) / max(self.tokens - 1, 1)


class Client:
    """Asks a server for streams, a connection each."""

    def __init__(self, url: str, api_key: str | None):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise InputError(f"--url {url}: expected http://host:port")
        self.host, self.port = parts.hostname, parts.port or 80
        self.head = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"

    async def ask(self, body: dict[str, Any]) -> Answer:
        """Raises StoppedError for anything but a whole answer."""
        began = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
        except OSError as error:
            raise InputError(f"--url: nothing answers at {self.host}:{self.port}") from error
        content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\n{self.head}"
            "Connection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content.encode())}\r\n\r\n{content}".encode()
        )
        try:
            return await self._read(reader, began)
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, began: float) -> Answer:
        status = (await reader.readline()).decode()
        if " 200 " not in status:
            raise StoppedError(f"the server says {status.strip()}: {await reader.read()}")
        pieces, first, tokens = [], None, None
        # An event is a line; what stands between are HTTP's headers and lengths of chunks.
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise StoppedError(f"the server says {event['error']['message']}")
            first = first or time.perf_counter() - began
            pieces += [choice["text"] for choice in event["choices"]]
            if event["usage"]:
                tokens = event["usage"]["completion_tokens"]
        if first is None or tokens is None:
            raise StoppedError("a stream ended before its answer did")
        return Answer("".join(pieces), tokens, first, time.perf_counter() - began)


def make_requests(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prompts, lengths and settings of all kinds."""
    rng = random.Random(args.seed)
    return [
        {
            "prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, args.most_words))),
            "max_tokens": rng.randint(1, args.most_tokens),
            "temperature": rng.choice([0, 0.7, 1.0]),
            "top_p": rng.choice([0.9, 1.0]),
            "seed": rng.randrange(2**32),
        }
        for _ in range(args.requests)
    ]


def report(name: str, answers: list[Answer], seconds: float) -> float:
    """Prints a line of figures; returns tokens per second."""
    rate = sum(answer.tokens for answer in answers) / seconds

    def milliseconds(values: list[float]) -> str:
        cuts = (
            statistics.quantiles(values, n=100, method="inclusive") if values[1:] else values * 99
        )
        return f"{1e3 * cuts[49]:.1f} / {1e3 * cuts[98]:.1f} ms"

    first = milliseconds([answer.first for answer in answers])
    each = milliseconds([answer.per_token for answer in answers if answer.tokens > 1])
    print(
        f"{name}: {len(answers)} answers, {rate:.1f} tokens/s; "
        f"p50 / p99 to the first token {first}, per token {each}"
    )
    return rate


async def load(args: argparse.Namespace) -> int:
    client, requests = Client(args.url, args.api_key), make_requests(args)
    began = time.perf_counter()
    alone = [await client.ask(body) for body in tqdm(requests, desc="alone", file=sys.stderr)]
    single = report("one at a time", alone, time.perf_counter() - began)

    answers: list[Answer] = []
    wrong, rng = 0, random.Random(args.seed)
    began = time.perf_counter()

    async def work() -> int:
        nonlocal wrong
        count = 0
        while time.perf_counter() - began < args.seconds:
            index = rng.randrange(len(requests))
            answers.append(await client.ask(requests[index]))
            wrong += answers[-1].text != alone[index].text
            count += 1
        return count

    with tqdm(total=round(args.seconds), desc="together", file=sys.stderr) as bar:
        workers = [asyncio.ensure_future(work()) for _ in range(args.clients)]
        while not all(worker.done() for worker in workers):
            await asyncio.sleep(0.5)
            bar.update(min(round(time.perf_counter() - began), bar.total) - bar.n)
    counts = [worker.result() for worker in workers]
    together = report(f"{args.clients} clients", answers, time.perf_counter() - began)
    print(
        f"{together / single:.2f} times the tokens; answers to one client {min(counts)} to "
        f"{max(counts)}; {wrong} answers differ from those given alone"
    )
    return 1 if wrong else 0


def main() -> int:
    return asyncio.run(load(parse_args()))


if __name__ == "__main__":
    run_script(main)
