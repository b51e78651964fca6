"""What the server tells Prometheus; each server has a registry of its own."""

import collections
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

RATE_SECONDS = 10.0  # over which tokens per second are counted
LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """Counters of one server; those that are not set here are read when Prometheus asks."""

    def __init__(self, rows: int):
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mesh_transformer_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"mesh_transformer_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = LATENCIES) -> Histogram:
            return Histogram(f"mesh_transformer_{name}", text, buckets=buckets, registry=registry)

        self.answers = counter("http_responses", "Answers by path and status", "path", "status")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were read")
        self._tokens = counter("generated_tokens", "Tokens that were generated")
        self._waiting = gauge("queue_length", "Requests that wait for a row")
        self._active = gauge("rows_active", "Rows of the batch with a request")
        gauge("rows", "Rows of the batch").set(rows)
        self._rate = gauge("tokens_per_second", f"Generated, over the last {RATE_SECONDS:.0f} s")
        self._rate.set_function(self.tokens_per_second)
        self._first = histogram("time_to_first_token_seconds", "From the request's arrival")
        self._each = histogram("seconds_per_token", "Of one step of all rows", TOKEN_LATENCIES)
        self._prefill = histogram("prefill_seconds", "Of one call, in which no row advances")
        self._recent: collections.deque[tuple[float, int]] = collections.deque()

    def watch(self, *, waiting: Callable[[], int], active: Callable[[], int]) -> None:
        """Sets where the engine's present state is read."""
        self._waiting.set_function(waiting)
        self._active.set_function(active)

    def prompt_tokens(self, count: int) -> None:
        """A prompt of so many tokens was read."""
        self._prompt_tokens.inc(count)

    def prefill(self, seconds: float, tokens: int) -> None:
        """Prompts of so many tokens came into the batch."""
        self._prefill.observe(seconds)
        self._prompt_tokens.inc(tokens)

    def first_token(self, seconds: float) -> None:
        """A request has its first token, so long after it came."""
        self._first.observe(seconds)

    def decode(self, seconds: float, steps: int) -> None:
        """All rows advanced by `steps`."""
        self._each.observe(seconds / steps)

    def made(self, count: int) -> None:
        """A request got so many tokens."""
        self._tokens.inc(count)
        self._recent.append((time.monotonic(), count))
        while self._recent[0][0] < time.monotonic() - RATE_SECONDS:
            self._recent.popleft()

    def tokens_per_second(self) -> float:
        """Of late, over all requests."""
        since = time.monotonic() - RATE_SECONDS
        return sum(count for when, count in self._recent.copy() if when >= since) / RATE_SECONDS

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
