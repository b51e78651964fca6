"""The formats that requests choose for their answers, without delay to other requests."""

import asyncio
import functools
import json
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mesh_transformer.serving.answer import TokenTexts
from mesh_transformer.serving.errors import ApiError
from mesh_transformer.serving.grammar import ANY_OBJECT, Format, FullError, Grammars
from mesh_transformer.serving.requests import ResponseFormat
from mesh_transformer.util import InputError

MOST_NEW = 32  # maximum number of new schemas that wait to be compiled
RETRY_SECONDS = 5


class Formats:
    """Finds the formats of answers; a new schema is compiled in a thread for schemas alone.

    Args:
      words: the texts of the tokenizer's tokens.
      n_vocab: the model's vocabulary size.
      run_in_thread: runs short work in another thread.
    """

    def __init__(
        self,
        words: TokenTexts,
        n_vocab: int,
        run_in_thread: Callable[[Callable[[], str]], Awaitable[str]],
    ):
        self._grammars = Grammars(words, n_vocab)
        self._run_in_thread = run_in_thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="schema")
        self._new = 0  # number of new schemas

    async def format(self, chosen: ResponseFormat | None) -> Format | None:
        """Return the format of the answers to a request; None if they may be any text.

        Raises:
          ApiError: if the format's schema is invalid, not supported or too large (status 400), or
            if too many schemas are waiting or in use (429), or the process for schemas ended (503).
        """
        if chosen is None or chosen.type == "text":
            return None
        schema = ANY_OBJECT
        if chosen.json_schema is not None:
            work = functools.partial(json.dumps, chosen.json_schema.content)
            schema = await self._run_in_thread(work)
        return self._grammars.kept(schema) or await self._compiled(schema)

    async def _compiled(self, schema: str) -> Format:
        """Return the format of a new schema, after those that are waiting already."""
        if self._new >= MOST_NEW:
            raise _busy(f"{self._new} schemas are waiting already")
        left = threading.Event()
        work = functools.partial(self._grammars.json, schema, left)
        self._new += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except InputError as error:
            message = f"response_format: {error}; change the schema"
            raise ApiError(400, message, param="response_format") from None
        except FullError:
            raise _busy("the schemas in use take all the memory for schemas") from None
        except OSError as error:
            raise ApiError(503, f"response_format: {error}; send the request again") from error
        finally:
            self._new -= 1
            left.set()

    def close(self) -> None:
        """End the thread, once it has nothing left to do, and its process."""
        self._thread.submit(self._grammars.close)
        self._thread.shutdown(wait=False)


def _busy(problem: str) -> ApiError:
    headers: dict[str, Any] = {"Retry-After": str(RETRY_SECONDS)}
    message = f"response_format: {problem}; try again in {RETRY_SECONDS} s"
    return ApiError(429, message, param="response_format", headers=headers)
