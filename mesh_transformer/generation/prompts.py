"""Prompts and their sampling settings, checked before they reach a device."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from mesh_transformer.config import Config
from mesh_transformer.util import InputError


def check_length(gen_length: int) -> None:
    """Raises InputError where no token is asked for."""
    if gen_length < 1:
        raise InputError(f"generate: gen_length is {gen_length}, expected at least 1")


def check_prompts(
    ctx: ArrayLike, ctx_length: ArrayLike, gen_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts [B, T] and their lengths [B] as numpy arrays, checked in all but their tokens.

    Raises:
      InputError: where shapes do not fit, a prompt is empty, or nothing is to be generated.
    """
    tokens, length = np.asarray(ctx), np.asarray(ctx_length, np.int32)
    if tokens.ndim != 2 or length.shape != tokens.shape[:1] or not len(length):
        raise InputError(
            f"generate: ctx {tokens.shape}, ctx_length {length.shape}, expected [B, T] and [B]"
        )
    check_length(gen_length)
    if length.min() < 1 or length.max() > tokens.shape[1]:
        raise InputError("generate: an empty prompt, or a length beyond ctx; give 1 to T tokens")
    return tokens, length


def check_texts(
    config: Config, prompts: Sequence[np.ndarray], lengths: ArrayLike
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """The last window of each prompt, its length, and how many tokens it may have; all checked.

    Raises:
      InputError: see `Batch.insert`.
    """
    texts = [np.asarray(prompt)[-config.window :] for prompt in prompts]
    for text in texts:
        if not np.issubdtype(text.dtype, np.integer) or text.ndim != 1 or not len(text):
            raise InputError(
                f"generate: a prompt is {text.dtype} {text.shape}, expected token ids [T]"
            )
        if text.min() < 0 or text.max() >= config.n_vocab:
            raise InputError(
                f"generate: ctx holds token id {max(text.max(), -text.min())}, outside the "
                f"vocabulary of n_vocab {config.n_vocab}"
            )
    length = np.array([len(text) for text in texts], np.int32)
    left = np.broadcast_to(np.asarray(lengths, np.int32), length.shape)
    for total, own in zip(length + left, left, strict=True):
        check_length(own)
        if config.pe == "fixed" and total > config.seq:
            raise InputError(
                f"generate: {total} tokens in all, but pe fixed has positions for seq "
                f"{config.seq}; shorten the prompt or the answer"
            )
    return texts, length, left
