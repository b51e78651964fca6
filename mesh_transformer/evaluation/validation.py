"""Validation: scores of a network on validation sets, during training or in a separate run."""

import contextlib
import dataclasses
import math
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
from tqdm import tqdm

from mesh_transformer.data.batches import cut_to_bucket
from mesh_transformer.data.in_memory import InOrder
from mesh_transformer.data.loader import TFRecordNewInputs, document_end
from mesh_transformer.data.record_set import check_preferences, check_tokenizer
from mesh_transformer.data.tokenizer import bytes_of_tokens, load_tokenizer
from mesh_transformer.evaluation import harness
from mesh_transformer.generation.finite import check_finite
from mesh_transformer.network import Network, TrainableNetwork
from mesh_transformer.util import InputError, InterruptedWorkError

POSITIONS = "val_position/"  # the beginning of the names of metrics by position
FIRST = 128  # positions in the first range
RANGES = 32
IN_FLIGHT = 2  # batches dispatched before the losses of the oldest are read


@dataclasses.dataclass
class Scores:
    """Scores of a network on the target tokens of a validation set, as sums over the tokens.

    Tokens that the loss mask excludes do not count.

    Attributes:
      nats: sum of the tokens' losses, in nats.
      tokens: number of tokens.
      correct: number of tokens that were the network's most likely token at their position.
      bytes: number of bytes of the tokens' text; 0 if bytes are not counted.
      by_position: the sums of losses, and the numbers of tokens, in ranges of positions in their
        text, [2, 32]: 0 to 127, then 128 to 255, 256 to 511 and so on; None if they are not
        counted.
    """

    nats: float = 0.0
    tokens: int = 0
    correct: int = 0
    bytes: int = 0
    by_position: np.ndarray | None = None

    @property
    def loss(self) -> float:
        """Mean loss in nats per token; NaN if there are no tokens."""
        return self.nats / self.tokens if self.tokens else math.nan

    def add(
        self, sample: dict[str, np.ndarray], losses: dict[str, Any], bytes_of: np.ndarray | None
    ) -> None:
        """Add the losses and counts of one batch to the sums.

        Args:
          sample: the batch, with the keys `obs`, `target` and optionally `loss_mask`, each [B, T].
          losses: the result of `TrainableNetwork.eval` for this batch.
          bytes_of: the number of bytes of each token id's text, [n_vocab]; None: bytes are not
            counted.

        Raises:
          NonFiniteError: if a loss is NaN or infinite.
        """
        mask = np.asarray(sample.get("loss_mask", np.ones(sample["obs"].shape)), bool)
        nats = np.asarray(losses["all_loss"], np.float64)[mask]
        check_finite((nats,), "losses")
        self.nats += float(nats.sum())
        self.tokens += int(mask.sum())
        self.correct += int(np.asarray(losses["correct"])[mask].sum())
        if self.by_position is not None:
            positions = np.arange(mask.shape[1])
            if "segment_ids" in sample:
                same = np.diff(sample["segment_ids"], prepend=sample["segment_ids"][:, :1]) == 0
                positions = positions - np.maximum.accumulate(np.where(same, 0, positions), axis=1)
            ranges = np.broadcast_to(np.maximum(np.frexp(positions / FIRST)[1], 0), mask.shape)
            self.by_position += [np.bincount(ranges[mask], x, RANGES) for x in (nats, None)]
        if bytes_of is not None:
            self.bytes += int(bytes_of[sample["target"][mask]].sum())

    def position_metrics(self, name: str) -> dict[str, float]:
        """Return the mean losses by position, called as in metrics.jsonl.

        Args:
          name: the name of the validation set.
        """
        sums = np.zeros((2, 0)) if self.by_position is None else self.by_position
        starts = [0, *(FIRST << i for i in range(RANGES))]
        return {
            f"{POSITIONS}{name}/{starts[i]}-{starts[i + 1] - 1}": float(nats / tokens)
            for i, (nats, tokens) in enumerate(sums.T)
            if tokens
        }

    def row(self, name: str) -> str:
        """Return the scores as a row of the table with columns `HEADING`.

        Rows with the losses by position follow, if they are counted.

        Args:
          name: the name of the validation set, for the first column.
        """
        likely = f"{math.exp(min(self.loss, 700)):12.4f} {self.correct / max(self.tokens, 1):9.2%}"
        bits = f"{self.nats / math.log(2) / self.bytes:14.4f}" if self.bytes else f"{'-':>14}"
        rows = [f"{name:20} {self.tokens:12,} {self.loss:9.4f} {likely} {bits}"]
        for metric, loss in self.position_metrics(name).items():
            place = f"  positions {metric.rpartition('/')[2]}"
            rows.append(f"{place:33} {loss:9.4f}")
        return "\n".join(rows)


HEADING = (
    f"{'set':20} {'tokens':>12} {'loss':>9} {'perplexity':>12} {'accuracy':>9} {'bits/byte':>14}"
)


def open_set(
    network: Network, source: Any, *, reference: bool = False
) -> TFRecordNewInputs | InOrder:
    """Open a validation set, to be read once in its order.

    The last batch may be smaller than the others.

    Args:
      source: the path of an index or of a folder of records, or data in memory (see `InOrder`).
      reference: see `TFRecordNewInputs`.
    """
    config, rows = network.config, batch_size(network)
    if not isinstance(source, str):
        return InOrder(source, config.seq, rows, document_end(config))
    check_tokenizer(source, config.tokenizer)
    if network.objective is None:
        check_preferences(source, config)
    return TFRecordNewInputs(
        source,
        rows,
        config.seq,
        n_vocab=config.n_vocab,
        repeat=False,
        partial=True,
        reference=reference,
        document_end=document_end(config),
    )


def first_batch(network: Network, source: Any) -> dict[str, np.ndarray]:
    """Return the first batch of a validation set, so that an unusable set is reported early.

    Raises:
      InputError: if it cannot be read, or the set is empty.
    """
    with contextlib.closing(open_set(network, source)) as batches:
        batch = next(iter(batches), None)
    if batch is None:
        name = source if isinstance(source, str) else "in memory"
        raise InputError(f"validation set {name} is empty; give sequences, or set val_batches to 0")
    return batch


def batch_size(network: Network) -> int:
    """Return the number of sequences per validation batch, a multiple of the number of replicas."""
    replicas = network.config.replicas(network.dp)
    rows = network.batch_size // replicas
    return replicas * max(1, int(rows * network.config.val_batch_multiplier))


def pad_batch(sample: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """Pad a batch to `size` rows, so that all batches have the same shape and compile only once.

    The loss mask of the added rows is 0, so they do not count.
    """
    missing = size - len(sample["obs"])
    if not missing:
        return sample
    sample = {"loss_mask": np.ones(sample["obs"].shape, np.uint8)} | sample
    filled = {key: np.pad(rows, ((0, missing), (0, 0)), "edge") for key, rows in sample.items()}
    filled["loss_mask"][-missing:] = 0
    return filled


def score(
    network: Network,
    source: Any,
    *,
    bytes_of: np.ndarray | None = None,
    by_position: bool = False,
    show: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Scores:
    """Score a network on the first `config.val_batches` batches of a validation set.

    Args:
      source: the validation set; see `open_set`.
      bytes_of: the number of bytes of each token id's text, [n_vocab]; None: bytes are not counted.
      by_position: whether to count losses by position, as with `config.val_by_position`.
      show: whether to show a progress bar.
      stopped: function that is called before each batch; if it returns True, scoring ends.

    Raises:
      InterruptedWorkError: if `stopped` returns True.
    """
    config = network.config
    by_position = by_position or config.val_by_position
    scores = Scores(by_position=np.zeros((2, RANGES)) if by_position else None)
    pending: deque[tuple[dict[str, np.ndarray], dict[str, Any]]] = deque()
    name = source if isinstance(source, str) else "validation"
    with contextlib.closing(open_set(network, source)) as batches:
        for batch in tqdm(
            islice(batches, config.val_batches), name, unit="batch", disable=not show
        ):
            if stopped():
                raise InterruptedWorkError
            sample = pad_batch(batch, batch_size(network))
            sample = cut_to_bucket(sample, config.length_buckets)
            losses = network.eval({key: x for key, x in sample.items() if key != "loss_mask"})
            pending.append((sample, losses))
            if len(pending) > IN_FLIGHT:
                scores.add(*pending.popleft(), bytes_of)
    for sample, losses in pending:
        scores.add(sample, losses, bytes_of)
    return scores


class Evaluation:
    """The validation sets in a config's `val_set`, and the tasks in its `eval_harness_tasks`.

    Raises:
      InputError: if the config has neither sets nor tasks, or if they cannot be used.
    """

    def __init__(self, network: TrainableNetwork):
        config = network.config
        self._sets = config.val_set if config.val_batches else {}
        self._tasks = harness.load_harness(config)
        if not self._sets and self._tasks is None:
            raise InputError(
                "config: --mode eval needs the key val_set with val_batches above 0, or the key "
                "eval_harness_tasks; add one"
            )
        for index in self._sets.values():
            first_batch(network, index)
        self._bytes_of = None
        if self._sets:
            self._bytes_of = bytes_of_tokens(load_tokenizer(config.tokenizer), config.n_vocab)

    def run(self, network: TrainableNetwork) -> tuple[dict[str, Scores], dict[str, Any] | None]:
        """Return the scores of a network by validation set, and the results of the tasks."""
        scores_by_set = {
            name: score(network, index, bytes_of=self._bytes_of, show=True)
            for name, index in self._sets.items()
        }
        return scores_by_set, self._tasks.results(network) if self._tasks else None

    def table(self, scores_by_set: dict[str, Scores], results: dict[str, Any] | None) -> str:
        """Format the results of `run`."""
        rows = [scores.row(name) for name, scores in scores_by_set.items()]
        tables = ["\n".join([HEADING, *rows])] if rows else []
        if self._tasks and results:
            tables.append(self._tasks.table(results))
        return "\n".join(tables)


def validate(network: TrainableNetwork, path: str) -> dict[str, Scores]:
    """Load the weights of the checkpoint at `path` into a network, and evaluate the network.

    Prints the scores on the validation sets in the config's `val_set`, and the results on the
    lm-eval tasks in the config's `eval_harness_tasks`.

    Returns:
      A dict from the name of each validation set to its scores.

    Raises:
      InputError: if the config has neither validation sets nor lm-eval tasks.
    """
    evaluation = Evaluation(network)
    network.load(path, only_params=True)
    scores_by_set, results = evaluation.run(network)
    print(evaluation.table(scores_by_set, results))
    return scores_by_set
