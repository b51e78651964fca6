"""The Prometheus metrics of the HTTP server."""

import collections
import time
from collections.abc import Callable, Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

RATE_SECONDS = 10.0  # period over which tokens per second are averaged
LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """The Prometheus metrics of one server, in a separate registry.

    Gauges of the current state, such as the queue length, are computed at each scrape, by functions
    that the engine sets.

    Args:
      rows: number of batch rows, which is reported as a gauge.
    """

    def __init__(self, rows: int):
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mesh_transformer_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"mesh_transformer_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = LATENCIES) -> Histogram:
            return Histogram(f"mesh_transformer_{name}", text, buckets=buckets, registry=registry)

        ProcessCollector(registry=registry)  # memory and CPU time of the server's process, on Linux
        self.answers = counter("http_responses", "Responses by path and status", "path", "status")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens processed")
        cached = "Prompt tokens whose keys and values were kept from earlier prompts"
        self.cached_tokens = counter("cached_prompt_tokens", cached)
        spilled = "Prompt tokens whose keys and values were copied to host memory"
        self.spilled_tokens = counter("spilled_prompt_tokens", spilled)
        restored = "Prompt tokens whose keys and values were copied back from host memory"
        self.restored_tokens = counter("restored_prompt_tokens", restored)
        self._tokens = counter("generated_tokens", "Generated tokens")
        guessed = "Guessed tokens, except those of an answer's last call"
        self.guessed_tokens = counter("guessed_tokens", guessed)
        self.right_guesses = counter("right_guesses", "Those of them that became part of an answer")
        self.waiting = gauge("queue_length", "Requests waiting for a batch row")
        self.active = gauge("rows_active", "Batch rows with a request")
        gauge("rows", "Batch rows").set(rows)
        self.used_tokens = gauge(
            "cache_tokens_used", "Tokens that the pages of active rows have room for"
        )
        rate = f"Generated tokens per second over the last {RATE_SECONDS:.0f} s"
        gauge("tokens_per_second", rate).set_function(self.tokens_per_second)
        first = "Time from a request's arrival to its first token"
        self.first_token_seconds = histogram("time_to_first_token_seconds", first)
        step = "Time of one decode step, which generates one token per row"
        self.step_seconds = histogram("seconds_per_token", step, TOKEN_LATENCIES)
        prefill = "Time of one prefill call, during which no row advances"
        self.prefill_seconds = histogram("prefill_seconds", prefill)
        # Pairs (time, number of tokens generated at that time), oldest first.
        self._recent: collections.deque[tuple[float, int]] = collections.deque()

    def generated(self, count: int) -> None:
        """Record `count` generated tokens of a request."""
        self._tokens.inc(count)
        self._recent.append((time.monotonic(), count))
        while self._recent[0][0] < time.monotonic() - RATE_SECONDS:
            self._recent.popleft()

    def tokens_per_second(self) -> float:
        """Return the tokens generated per second by all requests, over the last `RATE_SECONDS`."""
        since = time.monotonic() - RATE_SECONDS
        return sum(count for when, count in self._recent.copy() if when >= since) / RATE_SECONDS

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class FrontMetrics:
    """The metrics of the address of several replicas, in a separate registry.

    Args:
      running: returns the number of replicas that run.
    """

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, running: Callable[[], int]):
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mesh_transformer_front_{name}", text, labels, registry=registry)

        replicas = Gauge("mesh_transformer_front_replicas", "Running replicas", registry=registry)
        replicas.set_function(running)
        self.retried = counter("retried_requests", "Requests sent again, as their replica died")
        interrupted = "Responses that ended with an error, as their replica died"
        self.interrupted = counter("interrupted_responses", interrupted)
        self.refused = counter("refused_requests", "Requests refused before a replica", "status")

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def merged(texts: Mapping[str, str]) -> str:
    """Return the metrics of several servers as one text in Prometheus' format.

    Args:
      texts: {name of a replica: its metrics in this format}.  The name becomes the label `replica`.
    """
    families: dict[str, dict[str, None]] = {}  # the lines of each metric, in order
    for name, text in texts.items():
        lines: dict[str, None] = {}
        for line in text.splitlines():
            if line.startswith("#"):  # "# HELP name ..." and "# TYPE name ..." precede the samples
                lines = families.setdefault(line.split()[2], {})
                lines[line] = None
                continue
            metric, brace, rest = line.partition("{")
            if not brace:
                metric, _, rest = line.partition(" ")
                rest = f"}} {rest}"
            lines[f'{metric}{{replica="{name}"{"," * bool(brace)}{rest}'] = None
    return "".join(f"{line}\n" for lines in families.values() for line in lines)
