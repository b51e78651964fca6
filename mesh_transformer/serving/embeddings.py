"""Answers to `POST /v1/embeddings`: one vector of length 1 per text."""

import base64
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from mesh_transformer.generation.sampling_settings import SamplingOptions
from mesh_transformer.serving import engine as engines
from mesh_transformer.serving.delivery import QUEUE_FULL, Updates, submit
from mesh_transformer.serving.errors import ApiError, invalid
from mesh_transformer.serving.requests import MOST_INPUTS, EmbeddingRequest
from mesh_transformer.serving.service import Service, json_parts


async def embeddings_of(service: Service, body: EmbeddingRequest) -> "Embeddings":
    """Begin the answer to a `POST /v1/embeddings` request, as in OpenAI's API.

    Raises:
      ApiError: if the request is invalid for this model, or if the engine rejects the request.
    """
    adapter = service.adapter(body.model)
    width = service.engine.network.config.d_model
    if body.dimensions not in (None, width):
        raise invalid("dimensions", body.dimensions, f"{width}, the model's, or no value")
    texts = await service.prompts(body.input, "input", MOST_INPUTS)
    tokens = [await service.tokens(text, 0, "input") for text in texts]
    return Embeddings(service, body, tokens, adapter)


class Embeddings:
    """The vectors of the texts of one HTTP request, which arrive from the engine one by one.

    A request of many texts does not fill the queue: the engine has at most as many of them at once
    as it has rows.

    Args:
      body: the HTTP request.
      texts: token ids [T] of each text.
      adapter: number of the adapter that reads the texts.

    Raises:
      ApiError: at construction, if the engine rejects the request.
    """

    def __init__(
        self, service: Service, body: EmbeddingRequest, texts: list[np.ndarray], adapter: int
    ):
        self._service, self._model = service, body.model or service.name
        self._in_base64 = body.encoding_format == "base64"
        self._updates = Updates[int]()
        self._requests = [
            engines.Request(
                text,
                0,
                SamplingOptions(adapter=adapter),
                self._updates.callback(at),
                embed=True,
            )
            for at, text in enumerate(texts)
        ]
        self._most = min(service.engine.rows, service.engine.queue)
        self._rest = deque(self._requests[self._most :])
        submit(service.engine, self._requests[: self._most])

    def cancel(self) -> None:
        """Cancel the texts that have no vector yet."""
        for request in self._requests:
            self._service.engine.cancel(request)

    async def json_response(self) -> AsyncIterator[str]:
        """Wait for all vectors, and return the response in OpenAI's format.

        Returns:
          An iterator over consecutive parts of the JSON text, because the text may be long.

        Raises:
          ApiError: if the engine has stopped (status 503), or the model fails (500).
        """
        vectors: list[Any] = [None] * len(self._requests)
        running = len(vectors) - len(self._rest)
        while running:
            index, progress = await self._updates.next()
            vectors[index] = self._encoded(progress.vector)
            running += self._submit_more(running - 1) - 1
        items = (
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors)
        )
        tail = {"model": self._model, "usage": self.usage()}
        return json_parts({"object": "list"}, "data", items, tail)

    def _submit_more(self, running: int) -> int:
        """Submit further texts while there is room for them, and return how many.

        Args:
          running: number of texts that the engine has; the queue may be full unless it is 0.
        """
        count = 0
        while self._rest and running + count < self._most:
            try:
                submit(self._service.engine, [self._rest[0]])
            except ApiError as error:
                if error.code != QUEUE_FULL or not running + count:
                    raise
                break
            self._rest.popleft()
            count += 1
        return count

    def _encoded(self, vector: np.ndarray | None) -> list[float] | str:
        """Scale a vector to length 1, and return its numbers, or their little-endian f32 bytes."""
        assert vector is not None
        exact = vector.astype(np.float64)  # the squares of f32 numbers can overflow
        unit = (exact / max(np.linalg.norm(exact), 1e-12)).astype("<f4")
        return base64.b64encode(unit.tobytes()).decode() if self._in_base64 else unit.tolist()

    def usage(self) -> dict[str, Any]:
        """Return the number of tokens of all texts, which is also the total."""
        count = sum(len(request.prompt) for request in self._requests)
        return {"prompt_tokens": count, "total_tokens": count}
