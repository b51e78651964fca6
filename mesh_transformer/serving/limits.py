"""Limits on the requests of each API key."""

import collections
import contextlib
import math
import time
from collections.abc import Iterator

from mesh_transformer.serving.errors import ApiError

SECONDS = 60.0  # period in which requests are counted


class KeyLimits:
    """Limits on the requests of each API key.

    Args:
      per_minute: maximum number of requests in 60 seconds; None for no limit.
      concurrent: maximum number of requests in progress; None for no limit.
    """

    def __init__(self, per_minute: int | None = None, concurrent: int | None = None):
        self._per_minute, self._concurrent = per_minute, concurrent
        self._times: dict[str, collections.deque[float]] = {}  # when its last requests began
        self._running = collections.Counter[str]()

    @contextlib.contextmanager
    def request(self, key: str) -> Iterator[None]:
        """Count a request, which is in progress until the end of the context.

        Args:
          key: a valid key, as each takes memory; "" without keys, which all clients share.

        Raises:
          ApiError: with status 429, if the key has reached a limit.  Such a request is not counted.
        """
        now = time.monotonic()
        times = self._times.setdefault(key, collections.deque(maxlen=self._per_minute))
        if self._concurrent is not None and self._running[key] >= self._concurrent:
            raise _refusal(f"{self._concurrent} requests in progress", 1)
        full = self._per_minute is not None and len(times) == self._per_minute
        if full and (left := times[0] + SECONDS - now) > 0:
            raise _refusal(f"{self._per_minute} requests per minute", math.ceil(left))
        if self._per_minute is not None:
            times.append(now)
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1


def _refusal(limit: str, seconds: int) -> ApiError:
    message = f"this API key allows at most {limit}; try again in {seconds} s"
    headers = {"Retry-After": str(seconds)}
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)
