"""Between the engine's thread and the event loop: requests, their updates and errors."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from mesh_transformer.serving.engine import (
    ConstraintError,
    Engine,
    Progress,
    QueueFullError,
    Request,
    StoppedEngineError,
)
from mesh_transformer.serving.errors import ApiError
from mesh_transformer.util import NonFiniteError

Name = TypeVar("Name")
QUEUE_FULL = "queue_full"  # the code of an error


class Updates(Generic[Name]):
    """The engine's updates on several requests, each with a name of its request."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[Name, Progress]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def callback(self, name: Name, *, whole: bool = False) -> Callable[[Progress], None]:
        """Return the callback `deliver` of a request, which the engine's thread calls.

        Args:
          whole: whether all updates become a single one, at the end of the request.
        """
        earlier: list[Progress] = []

        def deliver(progress: Progress) -> None:
            if whole:
                earlier.append(progress)
                if not progress.ended:
                    return
                tokens = [token for part in earlier for token in part.tokens]
                progress = progress._replace(tokens=tokens, prompt=earlier[0].prompt)
            # RuntimeError: the event loop is closed, because the server stopped before its requests
            # had finished.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (name, progress))

        return deliver

    async def next(self) -> tuple[Name, Progress]:
        """Wait for the next update.

        Raises:
          ApiError: if the request has ended with an error.
        """
        name, progress = await self._queue.get()
        if progress.error is not None:
            raise failed(progress.error) from progress.error
        return name, progress


def submit(engine: Engine, requests: Sequence[Request]) -> None:
    """Submit requests to the engine.

    Raises:
      ApiError: if the engine's queue is full (status 429), the engine has stopped (503), or the
        weights are not finite (500).
    """
    try:
        engine.submit(requests)
    except QueueFullError as error:
        headers = {"Retry-After": str(error.retry_after)}
        raise ApiError(429, str(error), code=QUEUE_FULL, headers=headers) from None
    except (StoppedEngineError, NonFiniteError) as error:
        raise failed(error) from None


def failed(error: Exception) -> ApiError:
    """Return what to send to the client of a request that the engine ended with an error."""
    if isinstance(error, StoppedEngineError):
        return ApiError(503, str(error), headers={"Retry-After": "10"})
    if isinstance(error, ConstraintError):
        message = f"response_format: {error}; change the schema"
        return ApiError(400, message, param="response_format")
    if isinstance(error, NonFiniteError):
        return ApiError(500, str(error))
    return ApiError(500, "the model failed; send the request again")
