"""Load-test a running server: compare many concurrent clients with one request at a time.

First, each request of a fixed set is sent on its own.  Then many clients concurrently send requests
drawn at random from the same set.  Every answer must equal the one that the same request got when
it was sent on its own.
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
    parser.add_argument(
        "--url", default="http://127.0.0.1:5000", help="server (default %(default)s)"
    )
    parser.add_argument("--api-key", help="API key, if the server requires one")
    parser.add_argument("--clients", type=int, default=64, help="concurrent clients (default 64)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of the load (default 60)"
    )
    parser.add_argument(
        "--requests", type=int, default=64, help="number of distinct requests (default 64)"
    )
    parser.add_argument(
        "--most-words", type=int, default=40, help="maximum words per prompt (default 40)"
    )
    parser.add_argument(
        "--most-tokens", type=int, default=64, help="maximum tokens per answer (default 64)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (default 0)")
    return parser.parse_args()


@dataclasses.dataclass
class Answer:
    """A complete answer of the server.

    Attributes:
      text: the generated text.
      tokens: the number of generated tokens.
      first: seconds from the request to the first event of the stream.
      end: seconds from the request to the end of the stream.
    """

    text: str
    tokens: int
    first: float
    end: float

    @property
    def per_token(self) -> float:
        """Mean seconds between consecutive tokens."""
        return (self.end - self.first) / max(self.tokens - 1, 1)


class Client:
    """A client that requests streamed completions; it opens a new connection for each request."""

    def __init__(self, url: str, api_key: str | None):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise InputError(f"--url {url}: expected http://host:port")
        self.host, self.port = parts.hostname, parts.port or 80
        self.head = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"

    async def ask(self, body: dict[str, Any]) -> Answer:
        """Send a request and return its answer.

        Raises:
          InputError: if the server cannot be reached.
          StoppedError: if the server returns an error or an incomplete answer.
        """
        began = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
        except OSError as error:
            raise InputError(f"--url: no server answers at {self.host}:{self.port}") from error
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
            raise StoppedError(f"the server returned {status.strip()}: {await reader.read()}")
        pieces, first, tokens = [], None, None
        # Each event of the stream is one line; all other lines are HTTP headers or chunk lengths.
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise StoppedError(f"the server reports {event['error']['message']}")
            first = first or time.perf_counter() - began
            pieces += [choice["text"] for choice in event["choices"]]
            if event["usage"]:
                tokens = event["usage"]["completion_tokens"]
        if first is None or tokens is None:
            raise StoppedError("a stream ended before its answer was complete")
        return Answer("".join(pieces), tokens, first, time.perf_counter() - began)


def make_requests(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Draw random requests that differ in prompt, length and sampling settings."""
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
    """Print the throughput and the latency of the answers, and return the tokens per second.

    Args:
      name: the name of the measurement, printed first.
      seconds: the duration of the measurement.
    """
    rate = sum(answer.tokens for answer in answers) / seconds

    def milliseconds(values: list[float]) -> str:
        cuts = (
            statistics.quantiles(values, n=100, method="inclusive") if values[1:] else values * 99
        )
        return f"{1e3 * cuts[49]:.1f} / {1e3 * cuts[98]:.1f} ms"

    first = milliseconds([answer.first for answer in answers])
    per_token = milliseconds([answer.per_token for answer in answers if answer.tokens > 1])
    print(
        f"{name}: {len(answers)} answers, {rate:.1f} tokens/s; "
        f"p50 / p99 time to first token {first}, per token {per_token}"
    )
    return rate


async def load(args: argparse.Namespace) -> int:
    """Run both measurements: one request at a time, and then many concurrent clients.

    Returns:
      The exit status: 1 if an answer of the second measurement differs from that of the first.
    """
    client, requests = Client(args.url, args.api_key), make_requests(args)
    began = time.perf_counter()
    expected = [
        await client.ask(body) for body in tqdm(requests, desc="one at a time", file=sys.stderr)
    ]
    single = report("one at a time", expected, time.perf_counter() - began)

    answers: list[Answer] = []
    wrong, rng = 0, random.Random(args.seed)
    began = time.perf_counter()

    async def work() -> int:
        nonlocal wrong
        count = 0
        while time.perf_counter() - began < args.seconds:
            index = rng.randrange(len(requests))
            answers.append(await client.ask(requests[index]))
            wrong += answers[-1].text != expected[index].text
            count += 1
        return count

    with tqdm(total=round(args.seconds), desc="concurrent", file=sys.stderr) as bar:
        workers = [asyncio.ensure_future(work()) for _ in range(args.clients)]
        while not all(worker.done() for worker in workers):
            await asyncio.sleep(0.5)
            bar.update(min(round(time.perf_counter() - began), bar.total) - bar.n)
    counts = [worker.result() for worker in workers]
    concurrent = report(f"{args.clients} clients", answers, time.perf_counter() - began)
    print(
        f"{concurrent / single:.2f} times the throughput; {min(counts)} to {max(counts)} answers "
        f"per client; {wrong} answers differ from those given one at a time"
    )
    return 1 if wrong else 0


def main() -> int:
    return asyncio.run(load(parse_args()))


if __name__ == "__main__":
    run_script(main)
