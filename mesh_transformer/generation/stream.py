"""Streaming generation: yields the new tokens of a running batch as they are decoded."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mesh_transformer.generation.sampling import SamplerSettings

MOST_STEPS = 32  # per decode call


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
    """Yield the new tokens [rows, n] of prompts in the first rows of an idle batch.

    The first item has each prompt's first token (n = 1), every further one the tokens of one decode
    call.  In rows that finish before the others, the tokens after the end are meaningless.

    Args:
      batch: a `network.Batch`.
      lengths: number of tokens to generate, one number or one per prompt.
      most: maximum n.
      seconds: target time of a decode call, to which n is adapted; None always decodes `most`.
      insert: called instead of `batch.insert`.
    """
    count = len(prompts)
    first = (insert or batch.insert)(range(count), prompts, lengths, settings)
    yield first.token[:, None]
    steps = most if seconds is None else 1
    while left := int(batch.left[:count].max()):
        steps, began = min(steps, left, most), time.perf_counter()
        tokens = batch.decode(steps).token[:count]
        if seconds is not None:
            steps = max(int(steps * seconds / (time.perf_counter() - began)), 1)
        yield tokens
