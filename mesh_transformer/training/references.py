"""The reference of objectives, and validation on preferences.

The reference never changes, so its log-probabilities of a record set are computed once, by the
program of `Network.eval`, and kept in a file beside the records (see `data.references`).
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.data import references
from mesh_transformer.data.batches import GROUP
from mesh_transformer.data.in_memory import InMemoryTrainSet, InOrder
from mesh_transformer.data.record_set import Row
from mesh_transformer.data.references import References
from mesh_transformer.evaluation import harness, validation
from mesh_transformer.network import TrainableNetwork, TrainSet
from mesh_transformer.training.objectives import (
    PREFIX,
    Head,
    counted,
    head_of,
    metric_sums,
    text_sums,
    texts_of,
)
from mesh_transformer.util import InputError, InterruptedWorkError, NonFiniteError

_compiled_sums = jax.jit(text_sums)


def record_sets(config: Config, train_set: TrainSet, val_sets: Mapping[str, Any]) -> list[str]:
    """Return the paths of a run's record sets, without data in memory."""
    named = [] if isinstance(train_set, InMemoryTrainSet) else config.train_set or []
    paths = [*([named] if isinstance(named, str) else named), *val_sets.values()]
    return list(dict.fromkeys(path for path in paths if isinstance(path, str)))


def prepare(network: TrainableNetwork, paths: Sequence[str], weights: str | None = None) -> str:
    """Compute the log-probabilities of record sets under the network's parameters, if need be.

    Sets whose file holds those of equal records and equal weights are left as they are.

    Args:
      weights: the digest of the reference of a resumed run, whose parameters are others; files
        that are missing then cannot be computed.

    Returns:
      The digest of the reference's weights.

    Raises:
      InputError: if a file of a resumed run is missing or is of other records or weights.
    """
    expected = weights or network.checksum()
    for path in paths:
        digest, counts = references.record_digest(path)
        old = references.read(path)
        if old is not None and (old.records, old.weights) == (digest, expected):
            continue
        if weights is not None:
            raise InputError(
                f"{references.file_of(path)} is missing, or is not of these records and the "
                "weights that the run began with; put it back, set reference to the path of these "
                "weights, or start over in another model folder"
            )
        with contextlib.closing(validation.open_set(network, path)) as batches:
            shown = tqdm(_with_sums(network, batches), f"reference of {path}", unit="batch")
            sums = np.concatenate([sums for _, sums in shown])
        most = np.flatnonzero(sums.any(axis=0)).max(initial=0) + 1
        references.write(path, References(digest, expected, counts, sums[:, :most]))
    return expected


def with_reference(network: TrainableNetwork, items: Sequence[Any]) -> list[Row]:
    """Return sequences in memory with the key `reference`, the network being the reference.

    Args:
      items: dicts with `obs`, `target`, `loss_mask` and `segment_ids`, [T] each.
    """
    batches = InOrder(items, network.config.seq, validation.batch_size(network))
    result = []
    for sample, sums in _with_sums(network, batches):
        padding = sample["obs"].shape[1] - sums.shape[1]
        rows = sample | {"reference": np.pad(sums, ((0, 0), (0, padding)))}
        result += [{key: x[i] for key, x in rows.items()} for i in range(len(sums))]
    return result


def _with_sums(
    network: TrainableNetwork, batches: Iterable[Row]
) -> Iterator[tuple[Row, np.ndarray]]:
    """Yield each batch with the sums of log p of its texts, f32 [B, 3 N]."""
    pending: deque[tuple[Row, Any]] = deque()

    def oldest() -> tuple[Row, np.ndarray]:
        sample, losses = pending.popleft()
        values = -np.asarray(losses, np.float32)[: len(sample["obs"])]
        if not np.isfinite(values).all():
            raise NonFiniteError("log-probabilities are NaN or infinite; give other weights")
        return sample, _text_sums(values, sample)

    for sample in batches:
        _check_preferences(sample)
        whole = validation.pad_batch(sample, validation.batch_size(network))
        inputs = {key: whole[key] for key in ("obs", "target", "segment_ids")}
        pending.append((sample, network.eval(inputs)["all_loss"]))
        if len(pending) > validation.IN_FLIGHT:
            yield oldest()
    while pending:
        yield oldest()


def _check_preferences(sample: Row) -> None:
    if missing := {"loss_mask", "segment_ids"} - sample.keys():
        raise InputError(f"records without {', '.join(sorted(missing))} are no preferences")


def check_set(network: TrainableNetwork, source: Any, head: Head | None) -> None:
    """Raise InputError if the first batch of a validation set cannot be scored.

    Args:
      head: the objective that `score` measures on it; None for the losses of all tokens.
    """
    batch = validation.first_batch(network, source)
    if head is not None and not head.by_token:
        _check_preferences(batch)


def _text_sums(values_BT: np.ndarray, sample: Row) -> np.ndarray:
    """Return the sums of the values of each text's positions that count, f32 [B, 3 N]."""
    sums_BN3 = _compiled_sums(values_BT, sample["loss_mask"], sample["segment_ids"])
    return np.asarray(sums_BN3).reshape(len(values_BT), -1)


def score(
    network: TrainableNetwork,
    source: Any,
    head: Head,
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Return the loss and the metrics of an objective on a validation set of preferences.

    Args:
      source, stopped: see `validation.score`.

    Raises:
      InterruptedWorkError: if `stopped` returns True.
    """
    batches = validation.open_set(network, source, reference=head.needs_reference)
    parts = []
    with contextlib.closing(batches):
        for sample, sums in _with_sums(network, islice(batches, network.config.val_batches)):
            if stopped():
                raise InterruptedWorkError
            ones = np.ones(sample["obs"].shape, np.float32)
            reference = sample.get("reference", 0 * ones)
            parts.append((sums, _text_sums(ones, sample), reference[:, : sums.shape[1]]))
    arrays = [np.concatenate(part) for part in zip(*parts, strict=True)]
    sums, counts, reference = (x.reshape(len(x), -1, GROUP) for x in arrays)
    texts = texts_of(jnp.asarray(sums), jnp.asarray(counts), jnp.asarray(reference))
    loss, metrics = head.function(texts)
    weights = counted(jnp.asarray(counts), by_text=head.by_text)
    totals, shares = metric_sums(metrics, jnp.asarray(counts))
    results = {"loss": jnp.sum(weights * loss) / weights.sum()}
    results |= dict(zip(head.names, totals / shares, strict=True))
    return {name.removeprefix(PREFIX): float(value) for name, value in results.items()}


def validate(network: TrainableNetwork, path: str) -> Mapping[str, Any]:
    """Load a checkpoint's weights, and print the metrics of the objective on each validation set.

    The results on the lm-eval tasks of the config are printed, too.  Without an objective, or if it
    samples answers, this is `validation.validate`.

    Returns:
      A dict from the name of each validation set to its metrics (see `score`).

    Raises:
      InputError: if there are no validation sets, or a reference is needed that is not beside one.
    """
    config, head = network.config, head_of(network.config)
    if head is None or head.by_token:
        return validation.validate(network, path)
    tasks = harness.load_harness(config)
    if not config.val_set and tasks is None:
        raise InputError("config: --mode eval needs the key val_set or eval_harness_tasks; add one")
    for source in config.val_set.values():
        check_set(network, source, head)
    network.load(path, only_params=True)
    results = {name: score(network, source, head) for name, source in config.val_set.items()}
    for name, metrics in results.items():
        print(f"{name}: {', '.join(f'{key} {value:.4f}' for key, value in metrics.items())}")
    if tasks is not None and (scores := tasks.results(network)):
        print(tasks.table(scores))
    return results
