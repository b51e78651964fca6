"""Validation of prompts and answer lengths on the host, before generation starts."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from mesh_transformer.config import Config
from mesh_transformer.generation.sampling_settings import SamplerSettings
from mesh_transformer.util import InputError, brief, check_number

POOLINGS = ("mean", "last")  # see `Network.embed`


def longest_text(config: Config) -> int | None:
    """Return the maximum total length of a prompt and its answer in tokens, or None for no limit.

    Only models with `pe: "fixed"` have a limit, because they have only `config.seq` position
    embeddings.  The limit is `config.seq` + 1, because the last token of an answer is never an
    input of the model.
    """
    return config.seq + 1 if config.pe == "fixed" else None


def check_length(gen_length: int) -> None:
    """Raise InputError unless `gen_length` is a whole number of at least 1."""
    check_number("generate: gen_length", gen_length, 1)


def check_rows(rows: ArrayLike, prompts: int, size: int) -> np.ndarray:
    """Return the rows of a batch that prompts are inserted into, int32 [prompts].

    Args:
      prompts: number of prompts.
      size: number of rows of the batch.

    Raises:
      InputError: unless the rows are different whole numbers from 0 to `size` - 1, as many as there
        are prompts.
    """
    values = _array("rows", rows) if prompts else np.zeros(0, np.int32)
    if values.dtype.kind not in "iu" or values.shape != (prompts,):
        raise InputError(
            f"generate: rows is {brief(repr(rows))}, expected {prompts} whole numbers, one for "
            "each prompt"
        )
    wrong = values[(values < 0) | (values >= size)]
    if len(wrong):
        raise InputError(f"generate: rows has {wrong[0]}, expected 0 to {size - 1}")
    numbers, counts = np.unique(values, return_counts=True)
    if len(numbers) < prompts:
        raise InputError(
            f"generate: rows has {numbers[counts > 1][0]} more than once; insert one prompt into "
            "each row"
        )
    return values.astype(np.int32)


def check_prompts(ctx: ArrayLike, ctx_length: ArrayLike, gen_length: int) -> list[np.ndarray]:
    """Return the prompts in `ctx` as one numpy array per prompt, without padding.

    This function does not check the token ids; `check_texts` does.

    Args:
      ctx: token ids [B, T], right-aligned.
      ctx_length: number of prompt tokens in each row [B].
      gen_length: number of tokens to generate; it is validated, but not otherwise used.

    Raises:
      InputError: if the shapes do not match, a length is not a whole number from 1 to T, or
        `gen_length` is not a whole number of at least 1.
    """
    tokens, length = _array("ctx", ctx), _array("ctx_length", ctx_length)
    if tokens.ndim != 2 or length.shape != tokens.shape[:1] or not len(length):
        raise InputError(
            f"generate: ctx has shape {tokens.shape} and ctx_length {length.shape}, expected "
            "[B, T] and [B]"
        )
    if length.dtype.kind not in "iuf" or np.any(length % 1 != 0):  # True for NaN
        raise InputError(
            f"generate: ctx_length is {brief(repr(ctx_length))}, expected {len(tokens)} "
            "whole numbers, one for each prompt"
        )
    check_length(gen_length)
    if length.min() < 1 or length.max() > tokens.shape[1]:
        raise InputError(
            f"generate: ctx_length has values from {length.min()} to {length.max()}, expected "
            f"1 to {tokens.shape[1]}, the width of ctx"
        )
    return [row[len(row) - int(n) :] for row, n in zip(tokens, length, strict=True)]


def check_pooled(tokens: np.ndarray, lengths: ArrayLike, pooling: str) -> np.ndarray:
    """Return the lengths of left-aligned texts, int32 [B].

    Args:
      tokens: token ids [B, T].
      lengths: number of tokens of each text.
      pooling: "mean" or "last"; it is validated, but not otherwise used.

    Raises:
      InputError: if the lengths are not B whole numbers from 1 to T, or `pooling` is another value.
    """
    rows, width = tokens.shape
    counts = np.asarray(lengths)
    if counts.dtype.kind not in "iu" or counts.shape != (rows,):
        raise InputError(
            f"embed: lengths has dtype {counts.dtype} and shape {counts.shape}, expected {rows} "
            "integers, one for each text"
        )
    if counts.min() < 1 or counts.max() > width:
        raise InputError(
            f"embed: lengths has values from {counts.min()} to {counts.max()}, expected 1 to "
            f"{width}, the width of tokens"
        )
    if pooling not in POOLINGS:
        raise InputError(f"embed: pooling is {pooling!r}, expected one of {', '.join(POOLINGS)}")
    return counts.astype(np.int32)


def _array(name: str, values: ArrayLike) -> np.ndarray:
    """Return an argument as a numpy array; raise InputError for lists of different lengths."""
    try:
        return np.asarray(values)
    except ValueError:
        raise InputError(
            f"generate: {name} is {brief(repr(values))}, expected rows of equal length"
        ) from None


def check_biases(config: Config, settings: SamplerSettings) -> None:
    """Raise InputError if the settings bias a token id outside the vocabulary."""
    largest = int(settings.biased_BN.max(initial=0))
    if largest >= config.n_vocab:
        raise InputError(
            f"generate: logit_bias has the token id {largest}, outside the vocabulary (n_vocab is "
            f"{config.n_vocab})"
        )


def check_texts(
    config: Config, prompts: Sequence[np.ndarray], lengths: ArrayLike
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Check prompts and the lengths of their answers.

    Args:
      lengths: number of tokens to generate; one number for all prompts, or one per prompt.

    Returns:
      The last `config.window` tokens of each prompt, the number of these tokens per prompt, and
      the number of tokens to generate per prompt.

    Raises:
      InputError: in the cases that `Batch.insert` lists.
    """
    texts = list(map(np.asarray, prompts))
    for row, text in enumerate(texts):
        if not np.issubdtype(text.dtype, np.integer) or text.ndim != 1 or not len(text):
            raise InputError(
                f"generate: prompt {row} has dtype {text.dtype} and shape {text.shape}, expected "
                "at least one integer token id, in an array of shape [T]"
            )
        if text.min() < 0 or text.max() >= config.n_vocab:
            raise InputError(
                f"generate: prompt {row} has the token id {min(text.min(), 0) or text.max()}, "
                f"outside the vocabulary (n_vocab is {config.n_vocab})"
            )
    texts = [text[-config.window :] for text in texts]
    length = np.array([len(text) for text in texts], np.int32)
    counts = np.asarray(lengths)
    if not np.issubdtype(counts.dtype, np.integer) or counts.shape not in ((), length.shape):
        raise InputError(
            f"generate: the number of tokens to generate has dtype {counts.dtype} and shape "
            f"{counts.shape}, expected one integer, or {len(length)} of them, one per prompt"
        )
    left = np.broadcast_to(counts, length.shape)
    longest = longest_text(config)
    for total, own in zip(length + left, left, strict=True):
        check_length(own)
        if longest is not None and total > longest:
            raise InputError(
                f"generate: prompt and answer have {total} tokens, but a model with pe 'fixed' "
                f"allows at most {longest} (seq + 1); shorten the prompt or the answer"
            )
    return texts, length, left


def check_adapters(numbers: ArrayLike, count: int) -> None:
    """Raise InputError if one of the numbers is not that of an adapter.

    Args:
      count: number of adapters, which are numbered from 1; 0 stands for none.
    """
    wrong = np.setdiff1d(numbers, range(count + 1))
    if len(wrong):
        more = f", or up to {count}" if count else ""
        raise InputError(f"generate: adapter is {wrong[0]}, expected 0 for none{more}")
