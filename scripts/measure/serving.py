"""Load-test a running server: compare many concurrent clients with one request at a time.

First, each request of a fixed set is sent on its own.  Then many clients concurrently send requests
drawn at random from the same set.  Every answer must equal the one that the same request got when
it was sent on its own.

With --rates, requests arrive at random times instead, as those of independent users do (a Poisson
process), at each of the given mean rates in turn.  A request is sent however many are still
unanswered, so the latencies show at which rate the server can no longer keep up.  The throughput
counts the answers that ended while requests arrived.

At the end, the server must have no active row and no waiting request left.  Its memory is printed
at several times, so that a leak shows.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import math
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from mesh_transformer.performance import pictures
from mesh_transformer.util import InputError, StoppedError, run_script

TEXT = "the king and his men went over a hill to see what had become of them all"
WORDS = TEXT.split()


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 to 1")
    return value


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--url", default="http://127.0.0.1:5000", help="server (default %(default)s)"
    )
    parser.add_argument("--api-key", help="API key, if the server requires one")
    for flag, kind, default, description in (
        ("--clients", int, 64, "concurrent clients"),
        ("--seconds", float, 60.0, "duration of the load"),
        ("--requests", int, 64, "number of distinct requests"),
        ("--most-words", int, 40, "maximum words per prompt"),
        ("--most-tokens", int, 64, "maximum tokens per answer"),
    ):
        text = f"{description} (default {default:g})"
        parser.add_argument(flag, type=kind, default=default, help=text)
    parser.add_argument(
        "--lengths",
        choices=["uniform", "skewed"],
        default="uniform",
        help="distribution of the lengths of prompts and answers: uniform, or skewed, in which "
        "most are short (default uniform)",
    )
    parser.add_argument(
        "--shared-words",
        type=int,
        default=0,
        help="words with which all prompts begin, besides their own (default 0)",
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        metavar="R",
        help="mean requests per second that arrive at random times; instead of --clients",
    )
    parser.add_argument(
        "--leave",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="share of the requests whose client disconnects at a random time (default 0)",
    )
    parser.add_argument(
        "--count-errors",
        action="store_true",
        help="count the server's errors, as when a host is killed, instead of ending the test",
    )
    parser.add_argument(
        "--picture", help="PNG or SVG file for a plot of latency against throughput; with --rates"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (default 0)")
    args = parser.parse_args()
    if args.picture and not args.rates:
        raise InputError("--picture requires --rates; add the rates to measure")
    for rate in args.rates or []:
        if not 0 < rate < math.inf:
            raise InputError(f"--rates {rate:g}: expected more than 0 requests per second")
    return args


@dataclasses.dataclass
class Answer:
    """A complete answer of the server.

    Attributes:
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


RETRY_SECONDS = 1.0  # until a client sends another request after one was refused


class RefusedError(StoppedError):
    """The server's queue is full."""


class LeftError(Exception):
    """The client has disconnected before the answer's end, as it was told to."""


class Client:
    """A client that requests streamed completions; it opens a new connection for each request."""

    def __init__(self, url: str, api_key: str | None):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise InputError(f"--url {url}: expected http://host:port")
        self.host, self.port = parts.hostname, parts.port or 80
        self.head = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"

    async def metrics(self) -> dict[str, float]:
        """Return the server's metrics that have no labels."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(f"GET /metrics HTTP/1.0\r\nHost: {self.host}\r\n{self.head}\r\n".encode())
        text = (await reader.read()).decode()
        writer.close()
        lines = [line.split(" ") for line in text.partition("\r\n\r\n")[2].splitlines()]
        return {line[0]: float(line[1]) for line in lines if len(line) == 2 and line[0] != "#"}

    async def ask(
        self, body: dict[str, Any], began: float | None = None, leave: int | None = None
    ) -> Answer:
        """Send a request and return its answer.

        Args:
          began: the time from which the answer's seconds are counted (default: now).
          leave: number of events of the stream after which to disconnect; None for never.

        Raises:
          LeftError: if the client has disconnected before the answer's end.
          InputError: if the server cannot be reached.
          RefusedError: if the server's queue is full.
          StoppedError: if the server returns another error or an incomplete answer.
        """
        began = time.perf_counter() if began is None else began
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
            return await self._read(reader, began, leave)
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, began: float, leave: int | None) -> Answer:
        if leave == 0:
            raise LeftError
        status = (await reader.readline()).decode()
        if " 429 " in status:
            raise RefusedError("the server's queue is full")
        if " 200 " not in status:
            raise StoppedError(f"the server returned {status.strip()}: {await reader.read()}")
        pieces, first, tokens, events = [], None, None, 0
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
            events += 1
            if events == leave:
                raise LeftError
        if first is None or tokens is None:
            raise StoppedError("a stream ended before its answer was complete")
        return Answer("".join(pieces), tokens, first, time.perf_counter() - began)


def make_requests(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Draw random requests that differ in prompt, length and sampling settings."""
    rng = random.Random(args.seed)
    shared = rng.choices(WORDS, k=args.shared_words)

    def length(most: int) -> int:
        if args.lengths == "uniform":
            return rng.randint(1, most)
        # The median is a tenth of the maximum, and one in six is more than 2.7 times the median.
        return min(max(round(most / 10 * rng.lognormvariate(0, 1)), 1), most)

    return [
        {
            "prompt": " ".join(shared + rng.choices(WORDS, k=length(args.most_words))),
            "max_tokens": length(args.most_tokens),
            "temperature": rng.choice([0, 0.7, 1.0]),
            "top_p": rng.choice([0.9, 1.0]),
            "seed": rng.randrange(2**32),
        }
        for _ in range(args.requests)
    ]


@dataclasses.dataclass
class Load:
    """The answers during one measurement.

    Attributes:
      seconds: duration of the measurement.
      tokens: number of tokens of the answers that ended within this time.
      wrong: number of answers that differ from those given one at a time.
      refused: number of requests that were refused because the queue was full.
      left: number of requests whose client disconnected before the answer's end.
      errors: the server's error messages, each with its number.
    """

    answers: list[Answer]
    seconds: float
    tokens: int = 0
    wrong: int = 0
    refused: int = 0
    left: int = 0
    errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def first(self) -> list[float]:
        """Return the percentiles of the times to the first token, in seconds."""
        return percentiles([answer.first for answer in self.answers])

    def per_token(self) -> list[float]:
        """Return the percentiles of the times per further token, in seconds."""
        return percentiles([answer.per_token for answer in self.answers if answer.tokens > 1])

    def report(self, name: str) -> None:
        """Print the name of the measurement, the throughput and the latencies."""

        def milliseconds(values: list[float]) -> str:
            return " / ".join(f"{1e3 * values[place]:.1f}" for place in PERCENTILES.values())

        counts = {"refused": self.refused, "left": self.left, "failed": self.errors.total()}
        others = "".join(f", {count} {what}" for what, count in counts.items() if count)
        print(
            f"{name}: {len(self.answers)} answers, {self.tokens_per_second:.1f} tokens/s{others}; "
            f"{' / '.join(PERCENTILES)} time to first token {milliseconds(self.first())} ms, "
            f"per token {milliseconds(self.per_token())} ms"
        )
        for message, count in self.errors.items():
            print(f"{count} failed: {message}")


PERCENTILES = {"p50": 49, "p90": 89, "p99": 98}  # their places in a list of `percentiles`


def percentiles(values: list[float]) -> list[float]:
    """Return the 99 percentiles of at least one value; NaN if there is none."""
    if len(values) < 2:
        return (values or [float("nan")]) * 99
    return statistics.quantiles(values, n=100, method="inclusive")


async def load(args: argparse.Namespace) -> int:
    """Run all measurements: one request at a time, and then many at the same time.

    Returns:
      The exit status: 1 if an answer differs from that to the same request on its own.
    """
    client, requests = Client(args.url, args.api_key), make_requests(args)
    began = time.perf_counter()
    expected = [
        await client.ask(body) for body in tqdm(requests, desc="one at a time", file=sys.stderr)
    ]
    seconds = time.perf_counter() - began
    alone = Load(expected, seconds, sum(answer.tokens for answer in expected))
    alone.report("one at a time")
    tester = Tester(client, requests, expected, args)
    if not args.rates:
        async with tester.sampled():
            loads = [await tester.with_clients(args.clients, alone)]
    else:
        loads = []
        for rate in sorted(args.rates):
            async with tester.sampled():
                loads.append(await tester.with_arrivals(rate))
    wrong = sum(load.wrong for load in loads)
    print(f"{wrong} answers differ from those given one at a time")
    busy = await rows_in_use(client)
    print(f"{busy} rows and waiting requests are left")
    if tester.memory:
        print(f"memory of the server: {' / '.join(f'{mb:.0f}' for mb in tester.memory)} MB")
    if args.picture:
        draw(loads, args.picture)
    return 1 if wrong or busy else 0


IDLE_SECONDS = 10.0  # the longest time until rows of clients that have left are free
SAMPLES = 5  # of the server's memory, per measurement


async def rows_in_use(client: Client) -> int:
    """Return how many rows and waiting requests the server still has after `IDLE_SECONDS`."""
    names = ("mesh_transformer_rows_active", "mesh_transformer_queue_length")
    until, busy = time.perf_counter() + IDLE_SECONDS, 1
    while busy and time.perf_counter() < until:
        metrics = await client.metrics()
        busy = int(sum(metrics[name] for name in names))
        await asyncio.sleep(0.1)
    return busy


class Tester:
    """Sends requests drawn at random, and compares their answers with the expected ones.

    Args:
      expected: the answer to each of the requests on its own.

    Attributes:
      memory: the server's resident memory in MB, `SAMPLES` times per measurement.
    """

    def __init__(
        self,
        client: Client,
        requests: list[dict[str, Any]],
        expected: list[Answer],
        args: argparse.Namespace,
    ):
        self._client, self._requests, self._expected = client, requests, expected
        self._seconds, self._leave, self._count_errors = args.seconds, args.leave, args.count_errors
        self._rng = random.Random(args.seed)
        self.memory: list[float] = []

    async def _ask(self, load: Load, began: float, until: float) -> bool:
        """Send a request of a measurement that ends at `until`; return whether it was answered."""
        index = self._rng.randrange(len(self._requests))
        body, leave = self._requests[index], None
        if self._rng.random() < self._leave:
            leave = self._rng.randrange(body["max_tokens"])
        try:
            answer = await self._client.ask(body, began, leave)
        except RefusedError:
            load.refused += 1
            return False
        except LeftError:
            load.left += 1
            return True
        except StoppedError as error:
            if not self._count_errors:
                raise
            load.errors[str(error)] += 1
            return False
        load.answers.append(answer)
        load.tokens += answer.tokens * (time.perf_counter() <= until)
        load.wrong += answer.text != self._expected[index].text
        return True

    @contextlib.asynccontextmanager
    async def sampled(self) -> AsyncIterator[None]:
        """Record the server's memory while the body of the `async with` runs."""

        async def sample() -> None:
            for _ in range(SAMPLES):
                await asyncio.sleep(self._seconds / (SAMPLES + 1))
                bytes_ = (await self._client.metrics()).get("process_resident_memory_bytes")
                if bytes_ is not None:  # on Linux
                    self.memory.append(bytes_ / 1e6)

        task = asyncio.ensure_future(sample())
        try:
            yield
        finally:
            task.cancel()
            # Without a sample, if the server does not answer.
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await task

    async def with_clients(self, clients: int, alone: Load) -> Load:
        """Measure clients that each send a request when their last one has been answered."""
        load, began = Load([], 0.0), time.perf_counter()

        async def work() -> int:
            count = 0
            while (now := time.perf_counter()) - began < self._seconds:
                if await self._ask(load, now, math.inf):
                    count += 1
                else:
                    await asyncio.sleep(RETRY_SECONDS)
            return count

        with tqdm(total=round(self._seconds), desc="concurrent", file=sys.stderr) as bar:
            workers = [asyncio.ensure_future(work()) for _ in range(clients)]
            while not all(worker.done() for worker in workers):
                await asyncio.sleep(0.5)
                bar.update(min(round(time.perf_counter() - began), bar.total) - bar.n)
        counts = [worker.result() for worker in workers]
        load.seconds = time.perf_counter() - began
        load.report(f"{clients} clients")
        times = load.tokens_per_second / alone.tokens_per_second
        print(f"{times:.2f} times the throughput; {min(counts)} to {max(counts)} answers each")
        return load

    async def with_arrivals(self, rate: float) -> Load:
        """Measure requests that arrive at random times, on average `rate` per second."""
        load, began = Load([], self._seconds), time.perf_counter()
        due, end = began + self._rng.expovariate(rate), began + self._seconds
        with tqdm(desc=f"{rate:g} requests/s", unit="request", file=sys.stderr) as bar:
            try:
                async with asyncio.TaskGroup() as tasks:
                    while due < end:
                        await asyncio.sleep(max(due - time.perf_counter(), 0))
                        task = tasks.create_task(self._ask(load, due, end))
                        task.add_done_callback(lambda _: bar.update())
                        due += self._rng.expovariate(rate)
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        load.report(f"{rate:g} requests/s")
        return load


def draw(loads: list[Load], picture: str) -> None:
    """Plot the latencies against the throughput; `loads` are in the order of their rates."""
    figure, axes = pictures.pyplot().subplots(1, 2, figsize=(9, 4), layout="constrained")
    for axis, title, scale, values in (
        (axes[0], "time to first token", "log", [load.first() for load in loads]),
        (axes[1], "time per further token", "linear", [load.per_token() for load in loads]),
    ):
        for name, place in PERCENTILES.items():
            latencies = [1e3 * value[place] for value in values]
            axis.plot([load.tokens_per_second for load in loads], latencies, marker="o", label=name)
        axis.set(xlabel="tokens per second", ylabel=f"{title} (ms)", yscale=scale)
        axis.grid(alpha=0.3)
        axis.legend()
    pictures.save(figure, picture)


def main() -> int:
    return asyncio.run(load(parse_args()))


if __name__ == "__main__":
    run_script(main)
