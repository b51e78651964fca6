"""Generation as a stream: prompts into a running batch, new tokens as they are decoded."""

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

    First come the prompts' first tokens (n = 1), then as many as one decode call makes.  A row
    that is complete before the others gets tokens that have no meaning.

    Args:
      batch: a `network.Batch`.
      lengths: the number of tokens of each answer, one number or one per prompt.
      most: the largest n.
      seconds: the time that one decode call should take; n is adapted to it.
      insert: called in place of `batch.insert`.
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
