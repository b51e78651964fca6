"""Validation: how well a network foretells sets of records, during training or by itself."""

import contextlib
import dataclasses
import math
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
from tqdm import tqdm

from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.tokenizer import bytes_of_tokens, load_tokenizer
from mesh_transformer.evaluation import harness
from mesh_transformer.network import TrainableNetwork
from mesh_transformer.util import InputError

IN_FLIGHT = 2  # batches dispatched before what is told of the oldest is read


class StoppedScoringError(Exception):
    """Whoever asked for scores has no use for them any more."""


@dataclasses.dataclass
class Scores:
    """What a network says of the tokens of a set that bear loss.

    Attributes:
      nats: the sum of their losses.
      tokens: their number.
      correct: how many of them were the likeliest.
      bytes: of the text that they are; 0 where nobody counts.
    """

    nats: float = 0.0
    tokens: int = 0
    correct: int = 0
    bytes: int = 0

    @property
    def loss(self) -> float:
        """Nats a token; NaN where no token bears loss."""
        return self.nats / self.tokens if self.tokens else math.nan

    def add(
        self, sample: dict[str, np.ndarray], told: dict[str, Any], bytes_of: np.ndarray | None
    ) -> None:
        """Counts a batch, and what `TrainableNetwork.eval` tells of it, in."""
        bearing = np.asarray(sample.get("loss_mask", np.ones(sample["obs"].shape)), bool)
        self.nats += float(np.asarray(told["all_loss"], np.float64)[bearing].sum())
        self.tokens += int(bearing.sum())
        self.correct += int(np.asarray(told["correct"])[bearing].sum())
        if bytes_of is not None:
            self.bytes += int(bytes_of[sample["target"][bearing]].sum())

    def row(self, name: str) -> str:
        """A line of the table under `HEADING`."""
        likely = f"{math.exp(min(self.loss, 700)):12.4f} {self.correct / max(self.tokens, 1):9.2%}"
        bits = f"{self.nats / math.log(2) / self.bytes:14.4f}" if self.bytes else f"{'-':>14}"
        return f"{name:20} {self.tokens:12,} {self.loss:9.4f} {likely} {bits}"


HEADING = (
    f"{'set':20} {'tokens':>12} {'loss':>9} {'perplexity':>12} {'accuracy':>9} {'bits/byte':>14}"
)


def open_set(network: TrainableNetwork, path: str) -> TFRecordNewInputs:
    """A validation set's batches, once, in its index's order."""
    config = network.config
    return TFRecordNewInputs(
        path, network.batch_size, config.seq, n_vocab=config.n_vocab, repeat=False, partial=True
    )


def _filled(sample: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """A batch of `size` rows, whose shape is compiled already; those added bear no loss."""
    missing = size - len(sample["obs"])
    if not missing:
        return sample
    sample = {"loss_mask": np.ones(sample["obs"].shape, np.uint8)} | sample
    filled = {key: np.pad(rows, ((0, missing), (0, 0)), "edge") for key, rows in sample.items()}
    filled["loss_mask"][-missing:] = 0
    return filled


def score(
    network: TrainableNetwork,
    path: str,
    *,
    bytes_of: np.ndarray | None = None,
    show: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Scores:
    """Scores of the first `val_batches` batches of a set.

    Args:
      bytes_of: how many bytes of text each token id is.
      show: a progress bar.
      stopped: looked at between batches.

    Raises:
      StoppedScoringError: where `stopped` says so.
    """
    found, most = Scores(), network.config.val_batches
    pending: deque[tuple[dict[str, np.ndarray], dict[str, Any]]] = deque()
    with contextlib.closing(open_set(network, path)) as batches:
        for each in tqdm(islice(batches, most), path, unit="batch", disable=not show):
            if stopped():
                raise StoppedScoringError
            sample = _filled(each, network.batch_size)
            told = network.eval({key: x for key, x in sample.items() if key != "loss_mask"})
            pending.append((sample, told))
            if len(pending) > IN_FLIGHT:
                found.add(*pending.popleft(), bytes_of)
    for each in pending:
        found.add(*each, bytes_of)
    return found


def validate(network: TrainableNetwork, path: str) -> dict[str, Scores]:
    """Loads the weights at `path`; prints what it says of every `val_set`, and lm-eval's tasks."""
    config = network.config
    sets = config.val_set if config.val_batches else {}
    asked = harness.opened(config)
    if not sets and asked is None:
        raise InputError(
            "config: --mode eval needs the key val_set, and val_batches above 0, or "
            "eval_harness_tasks"
        )
    for index in sets.values():
        open_set(network, index).close()
    network.load(path, fresh_opt=True)
    found = {}
    if sets:
        bytes_of = bytes_of_tokens(load_tokenizer(config.tokenizer), config.n_vocab)
        for name, index in sets.items():
            found[name] = score(network, index, bytes_of=bytes_of, show=True)
        print("\n".join([HEADING, *(scores.row(name) for name, scores in found.items())]))
    if asked and (results := asked.results(network)):
        print(asked.table(results))
    return found
