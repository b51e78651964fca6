"""Streaming generation: yields the new tokens of a running batch as they are decoded."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mesh_transformer.generation.finite import blaming, check_tokens_chosen
from mesh_transformer.generation.sampling_settings import SamplerSettings

MOST_STEPS = 32  # maximum number of steps per decode call


def stream_tokens(
    batch: Any,
    prompts: Sequence[np.ndarray],
    lengths: ArrayLike,
    settings: SamplerSettings,
    *,
    most: int = MOST_STEPS,
    seconds: float | None = None,
    insert: Callable[..., Any] | None = None,
) -> Iterator[np.ndarray]:
    """Insert prompts into the first rows of an idle batch, and yield the tokens of their answers.

    Each item is an array [prompts, n].  The first item holds the first token of each answer (n =
    1), and each later item holds the tokens of one decode call.  Rows of answers that have ended
    hold meaningless tokens.

    Args:
      batch: a `network.Batch`.
      lengths: number of tokens to generate; one number for all prompts, or one per prompt.
      most: maximum number of tokens per row in one decode call (the maximum n).
      seconds: target duration of a decode call in seconds, to which n is adapted; None decodes
        `most` tokens per call.
      insert: function to call instead of `batch.insert`.

    Raises:
      NonFiniteError: if the model's logits are NaN or infinite.
    """
    count = len(prompts)

    def checked(tokens: np.ndarray) -> np.ndarray:
        with blaming(lambda: batch.bad_weights()):
            check_tokens_chosen(tokens)
        return tokens

    first = (insert or batch.insert)(range(count), prompts, lengths, settings)
    yield checked(first.token[:, None])
    steps = most if seconds is None else 1
    while left := int(batch.left[:count].max()):
        steps, began = min(steps, left, most), time.perf_counter()
        tokens = batch.decode(steps).token[:count]
        if seconds is not None:
            steps = max(int(steps * seconds / (time.perf_counter() - began)), 1)
        yield checked(tokens)
