"""Interfaces of networks and of their batches, independent of where a network runs.

Three classes implement `Network`: `CausalTransformer` runs on the devices of this process,
`TPUCluster` on the hosts of a pod, and `RestartingCluster` on a pod whose hosts are all restarted
when one of them fails.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mesh_transformer.config import Config
from mesh_transformer.generation.blocks import Chunks, Pool
from mesh_transformer.generation.sampling import SamplerSettings


class Batch(Protocol):
    """A batch of sequences that are being generated; see `generation.batch.Batch`.

    Its methods return generated tokens as numpy arrays.

    Attributes:
      rows: number of batch rows, a multiple of the network's `dp`.
      left: number of tokens that each row may still generate, [rows].
    """

    rows: int
    left: np.ndarray

    def bad_weights(self) -> str | None: ...
    def reserve(self, positions: int) -> None: ...
    def insert(
        self,
        rows: Sequence[int],
        prompts: Sequence[np.ndarray],
        lengths: Any,
        settings: SamplerSettings,
        *,
        alternatives: int | None = None,
        chunks: Chunks | None = None,
        allowed: Mapping[int, np.ndarray] | None = None,
        longest: int | None = None,
    ) -> Any: ...
    def release(self, rows: Sequence[int]) -> None: ...
    def decode(
        self,
        steps: int,
        alternatives: int | None = None,
        *,
        speculate: bool = False,
        allowed: Mapping[int, np.ndarray] | None = None,
    ) -> Any: ...


class Network(Protocol):
    """A model that can generate text and score it; see `CausalTransformer`.

    Attributes:
      dp: number of data-parallel replicas; each holds the same number of batch rows.
    """

    config: Config

    @property
    def dp(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    def batch(self, rows: int, pool: Pool | None = None, guesses: int = 0) -> Batch: ...
    def eval(self, sample: dict[str, np.ndarray]) -> dict[str, Any]: ...
    def score(
        self,
        tokens: np.ndarray,
        alternatives: int,
        beginning: np.ndarray | None = None,
        adapter: int = 0,
    ) -> Any: ...
    def embed(
        self, tokens: np.ndarray, lengths: np.ndarray, pooling: str = "mean", adapter: int = 0
    ) -> np.ndarray: ...


class TrainSet(Protocol):
    """A stream of training batches that can save and restore its position.

    Its methods are those of `TFRecordNewInputs`.
    """

    def get_samples(self) -> dict[str, np.ndarray]: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any] | None, batches: int = 0) -> None: ...
    def close(self) -> None: ...


class TrainableNetwork(Network, Protocol):
    """A network with its optimizer; see `CausalTransformer`.

    `train` starts a training step and returns its metrics without waiting for the step to finish.
    Calling `float` on a metric blocks until the step has finished.  The metric's method `is_ready`
    returns whether the step has finished.

    Attributes:
      step: number of completed optimizer updates.
      notice: the event that announces the shutdown of a host's machine, such as "host 1 received
        SIGTERM"; "" if there is none.
    """

    step: int
    notice: str

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
    def larger_mesh(self) -> str: ...
    def keep(self, aux: dict[str, Any]) -> str: ...
    def restore(self, folder: str, base: str | None = None) -> dict[str, Any] | None: ...
    def load(self, path: str, *, fresh_opt: bool = False, only_params: bool = False) -> None: ...
    def close(self) -> None: ...
