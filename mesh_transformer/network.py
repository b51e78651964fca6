"""Interfaces of a network and its running batch, independent of where they run.

They are implemented by `CausalTransformer` (on the devices of this process), `TPUCluster` (on the
hosts of a pod) and `LastingCluster` (on a pod whose hosts are replaced when one fails).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mesh_transformer.config import Config
from mesh_transformer.generation.sampling import SamplerSettings


class Batch(Protocol):
    """A running batch of generated sequences; see `generation.batch.Batch`.

    Generated tokens are returned as numpy arrays.

    Attributes:
      rows: number of rows, a multiple of the network's `dp`.
      left: number of tokens that each row may still generate, [rows].
    """

    rows: int
    left: np.ndarray

    def reserve(self, positions: int) -> None: ...
    def insert(
        self,
        rows: Sequence[int],
        prompts: Sequence[np.ndarray],
        lengths: Any,
        settings: SamplerSettings,
        *,
        alternatives: int | None = None,
    ) -> Any: ...
    def release(self, rows: Sequence[int]) -> None: ...
    def decode(self, steps: int, alternatives: int | None = None) -> Any: ...


class Network(Protocol):
    """A model that generates and scores; see `CausalTransformer`.

    Attributes:
      dp: number of data-parallel replicas; each holds the same number of batch rows.
    """

    config: Config

    @property
    def dp(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    def batch(self, rows: int) -> Batch: ...
    def eval(self, sample: dict[str, np.ndarray]) -> dict[str, Any]: ...
    def score(self, tokens: np.ndarray, alternatives: int) -> Any: ...


class TrainSet(Protocol):
    """A stream of training batches, read by the driver or by the hosts; see `TFRecordNewInputs`."""

    def get_samples(self) -> dict[str, np.ndarray]: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class TrainableNetwork(Network, Protocol):
    """A network with its optimizer; see `CausalTransformer`.

    `train` returns metrics without waiting for the step.  Converting one with `float` blocks until
    the step has finished; its method `is_ready` reports whether it has.

    Attributes:
      step: number of updates done.
    """

    step: int

    @property
    def noise_batches(self) -> tuple[int, int]: ...
    @property
    def peak_flops(self) -> float | None: ...
    def init(self) -> None: ...
    def open_train_set(self) -> TrainSet: ...
    def train(self, sample: dict[str, np.ndarray]) -> dict[str, Any]: ...
    def claim(self, folder: str) -> None: ...
    @property
    def save_failed(self) -> bool: ...
    def save(self, folder: str, aux: dict[str, Any] | None = None) -> None: ...
    def wait(self) -> None: ...
    def restore(self, folder: str, base: str | None = None) -> dict[str, Any] | None: ...
    def load(self, path: str, *, fresh_opt: bool = False) -> None: ...
    def close(self) -> None: ...
