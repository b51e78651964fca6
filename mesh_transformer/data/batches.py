"""Checks of the batches that callers pass to a network."""

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mesh_transformer.config import Config
from mesh_transformer.data.teacher import TEACHER_KEYS
from mesh_transformer.util import InputError

VALUE_KEYS = ("reference", "advantage", "sampled", "old")  # f32; see `TrainableNetwork.train`
# The first two are required.
BATCH_KEYS = ("obs", "target", "loss_mask", "segment_ids", *VALUE_KEYS, *TEACHER_KEYS)
# Texts per group in the records of preferences: the chosen one, the rejected one, and one with the
# answer to another prompt.
GROUP = 3


def check_batch(
    config: Config,
    method: str,
    sample: dict[str, np.ndarray],
    rank: int,
    *,
    ignored: str | None = None,
    multiple: int = 1,
) -> dict[str, np.ndarray]:
    """Check the arrays of a batch, and return them with the dtypes that the model requires.

    Args:
      method: the name of the calling method, for error messages.
      rank: required number of dimensions of each array.
      ignored: a key that the batch may have and the result leaves out.
      multiple: the number of positions per sequence is a multiple of this.

    Raises:
      InputError: if an array is missing or unknown, or has a wrong shape, dtype or value.
    """
    _check_keys(method, sample, ignored)
    batch = {key: check_tokens(config, key, sample[key], rank) for key in BATCH_KEYS[:2]}
    if "loss_mask" in sample:
        mask = np.asarray(sample["loss_mask"])
        if not ((mask == 0) | (mask == 1)).all():
            raise InputError(
                f"{method}: loss_mask has values other than 0 and 1; give 1 where a target counts, "
                "else 0"
            )
        batch["loss_mask"] = mask.astype(np.uint8)
    if "segment_ids" in sample:
        segments = np.asarray(sample["segment_ids"])
        if not np.issubdtype(segments.dtype, np.integer):
            raise InputError(f"{method}: segment_ids has dtype {segments.dtype}, expected integers")
        batch["segment_ids"] = segments.astype(np.int32)
    values = {key: np.asarray(sample[key], np.float32) for key in VALUE_KEYS if key in sample}
    batch |= values
    for key, array in batch.items():
        if array.shape != batch["obs"].shape:
            raise InputError(
                f"obs has shape {batch['obs'].shape}, but {key} has shape {array.shape}; "
                "expected equal shapes"
            )
    if taught := sample.keys() & {*TEACHER_KEYS}:
        batch |= _alternatives(config, method, sample, batch["obs"].shape, taught)
    if (length := batch["obs"].shape[-1]) % multiple:
        raise InputError(
            f"{method}: the sequences have {length} positions, expected a multiple of {multiple}, "
            "because the mesh splits them (shard_activations or context_parallel)"
        )
    return batch


def _alternatives(
    config: Config,
    method: str,
    sample: dict[str, np.ndarray],
    shape: tuple[int, ...],
    keys: Collection[str],
) -> dict[str, np.ndarray]:
    """Return the checked `TEACHER_KEYS` of a batch, whose tokens have a shape [..., T]."""
    if missing := {*TEACHER_KEYS} - {*keys}:
        raise InputError(f"{method}: the batch has no {min(missing)!r}; give both or neither")
    ids, logprobs = (np.asarray(sample[key]) for key in TEACHER_KEYS)
    ids = check_tokens(config, "teacher_ids", ids, len(shape), longest=ids.size)
    length = shape[-1]
    if ids.shape != logprobs.shape or ids.shape[:-1] != shape[:-1] or ids.shape[-1] % length:
        raise InputError(
            f"{method}: teacher_ids has shape {ids.shape}, and teacher_logprobs {logprobs.shape}; "
            f"expected both to be {[*shape[:-1]]} with a multiple of {length}, the positions, as "
            "the last number"
        )
    return {"teacher_ids": ids, "teacher_logprobs": logprobs.astype(np.float32)}


def cut_to_bucket(batch: dict[str, np.ndarray], lengths: Collection[int]) -> dict[str, np.ndarray]:
    """Cut positions off the end of a batch after which no target counts in the loss.

    Attention is causal, so that the losses of the targets before do not change.  Without
    `loss_mask`, all targets count.

    Args:
      batch: the arrays of a batch, [..., T] or [..., T x K].
      lengths: the possible numbers of positions of the result, besides T; the smallest that holds
        all targets that count is chosen.
    """
    length = batch["obs"].shape[-1]
    if "loss_mask" not in batch:
        return batch
    mask = batch["loss_mask"].reshape(-1, length)
    used = int(np.flatnonzero(mask.any(axis=0)).max(initial=-1)) + 1
    if "segment_ids" in batch:  # an objective has places for a third as many groups as positions
        used = max(used, -(-int(batch["segment_ids"].max()) // GROUP) * GROUP)
    kept = min((n for n in lengths if used <= n < length), default=length)
    if kept == length:
        return batch

    def cut(array: np.ndarray) -> np.ndarray:
        shape = array.shape[:-1]
        return array.reshape(*shape, length, -1)[..., :kept, :].reshape(*shape, -1)

    return {key: cut(array) for key, array in batch.items()}


def check_groups(batch: dict[str, np.ndarray], *, by_token: bool = False) -> None:
    """Check that a batch has what an objective needs; see `training.objectives`.

    Args:
      batch: the result of `check_batch`.
      by_token: whether the loss is per token.

    Raises:
      InputError: if an array is missing, or a number in `segment_ids` is out of range.
    """
    if missing := {"loss_mask", "advantage" if by_token else "segment_ids"} - batch.keys():
        kind = "rollouts" if by_token else "records of preferences"
        raise InputError(
            f"train: the batch has no {min(missing)!r}, which the objective needs; give {kind}, "
            "or set objective to null"
        )
    if by_token:
        return
    most = batch["obs"].shape[-1] // GROUP * GROUP
    segments = batch["segment_ids"]
    if segments.min() < 0 or segments.max() > most:
        raise InputError(
            f"train: segment_ids has {min(segments.min(), 0) or segments.max()}, expected 0 to "
            f"{most}: with an objective, they number the texts of groups of {GROUP}"
        )


def check_tokens(
    config: Config, name: str, tokens: ArrayLike, rank: int, *, longest: int | None = None
) -> np.ndarray:
    """Check the dtype, shape and range of token ids, and return them as uint32.

    Args:
      name: the name of the array, for error messages.
      rank: required number of dimensions.
      longest: maximum length of the last axis (default: `config.seq`).

    Raises:
      InputError: if the array has a wrong dtype or shape, or a token outside of the vocabulary.
    """
    tokens, longest = np.asarray(tokens), longest or config.seq
    if not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(f"{name} has dtype {tokens.dtype}, expected integer token ids")
    if tokens.ndim != rank or not tokens.size or tokens.shape[-1] > longest:
        dimensions = ("[T]", "[B, T]", "[A, B, T]")[rank - 1]
        raise InputError(
            f"{name} has shape {tokens.shape}, expected {dimensions} "
            f"with T from 1 to {longest} (seq is {config.seq})"
        )
    if tokens.min() < 0 or tokens.max() >= config.n_vocab:
        raise InputError(
            f"{name} holds token id {min(tokens.min(), 0) or tokens.max()}, outside the "
            f"vocabulary; expected at least 0 and below n_vocab ({config.n_vocab})"
        )
    return tokens.astype(np.uint32)


def _check_keys(method: str, sample: Any, ignored: str | None) -> None:
    """Raise InputError unless `sample` is a dict with the keys of a batch; see `check_batch`."""
    optional = " and ".join([", ".join(BATCH_KEYS[2:-1]), BATCH_KEYS[-1]])
    expected = f"expected a dict of obs, target, and optionally {optional}"
    if not isinstance(sample, dict):
        raise InputError(f"{method}: the batch is of type {type(sample).__name__}, {expected}")
    for key in BATCH_KEYS[:2]:
        if key not in sample:
            raise InputError(f"{method}: the batch has no {key!r}; {expected}")
    for key in sample:
        if key not in (*BATCH_KEYS, ignored):
            raise InputError(f"{method}: the batch has an unknown key {key!r}; {expected}")


def whole_batch(config: Config, batch: dict[str, np.ndarray]) -> tuple[Any, ...]:
    """Return the arguments of the compiled training step that follow the state, on the host.

    Without `batch_ramp_steps`, this is `batch`.  Otherwise zeros are appended to `batch` until it
    has `gradient_accumulation_steps` microbatches, and its own number of microbatches is returned,
    too.

    Raises:
      InputError: if `batch` has more microbatches than that.
    """
    if not config.batch_ramp_steps:
        return (batch,)
    microbatches, most = len(batch["obs"]), config.gradient_accumulation_steps
    if microbatches > most:
        raise InputError(
            f"train: the batch has {microbatches} microbatches, expected at most "
            f"gradient_accumulation_steps ({most})"
        )
    padding = ((0, most - microbatches), (0, 0), (0, 0))
    return {key: np.pad(x, padding) for key, x in batch.items()}, np.int32(microbatches)
