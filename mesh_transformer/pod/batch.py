"""`ClusterBatch`: a batch for text generation whose rows are spread over the hosts of a cluster."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import ArrayLike

from mesh_transformer.config import Config
from mesh_transformer.generation.batch import limited, positions_needed
from mesh_transformer.generation.blocks import Chunks, Pool
from mesh_transformer.generation.decode import Chosen
from mesh_transformer.generation.prompts import (
    check_adapters,
    check_biases,
    check_rows,
    check_texts,
)
from mesh_transformer.generation.sampling import SamplerSettings
from mesh_transformer.generation.stream import MOST_STEPS
from mesh_transformer.mesh.placement import process_rows
from mesh_transformer.util import HostError, InputError, check_number


class Cluster(Protocol):
    """The interface that `ClusterBatch` requires of a cluster; `TPUCluster` implements it."""

    config: Config
    dp: int
    adapters: int  # number of LoRA adapters
    replicas: list[list[int]]  # for each host, the dp indices of its replicas
    newest_batch: "ClusterBatch | None"

    def call(self, method: str, *arguments: tuple[Any, ...]) -> list[Any]: ...

    def gathered(
        self, parts: Sequence[np.ndarray], positions: Sequence[np.ndarray]
    ) -> np.ndarray: ...

    def failed(self, message: str) -> HostError: ...


class ClusterBatch:
    """A batch for text generation whose rows are spread over the hosts of a `TPUCluster`.

    Create one with `TPUCluster.batch`.  The methods are those of `generation.batch.Batch`, but rows
    are numbered across all hosts.  Each host holds the rows of its data-parallel replicas, and
    receives only the prompts for these rows.  Invalid prompts raise InputError before any host is
    called, so the cluster stays usable.

    Args:
      rows: total number of rows, a positive multiple of the number of replicas.
      pool: the size of each replica's pool of blocks (see `Blocks`); None for none.
      guesses: number of tokens that a decode step may guess (see `Batch.decode`).

    Attributes:
      rows: total number of rows, divided into one block of equal size per replica.
      left: number of tokens that each row may still generate, int32 [rows].

    Raises:
      InputError: from `reserve`, `insert` and `decode`, if `TPUCluster.batch` has since created a
        newer batch, because the hosts hold only the newest one.
      HostError: from the same methods, if a host fails or if the hosts' results contradict each
        other.
    """

    def __init__(self, cluster: Cluster, rows: int, pool: Pool | None = None, guesses: int = 0):
        check_number("generate: rows", rows, 1)
        if rows % cluster.dp:
            raise InputError(
                f"generate: the batch has {rows} rows, expected a positive multiple of "
                f"{cluster.dp}, the number of replicas; add or remove rows"
            )
        self.rows = rows
        self.left = np.zeros(rows, np.int32)
        self._length = np.zeros(rows, np.int32)  # tokens in each row's cache
        self._replica = np.arange(rows) // (rows // cluster.dp)  # replica of each row
        self._host_rows = process_rows(cluster.replicas, rows // cluster.dp)
        self._cluster, self._guesses = cluster, guesses
        cluster.call("batch", *[(len(own), pool, guesses) for own in self._host_rows])

    def bad_weights(self) -> str | None:
        """Name the weights that are NaN or infinite; see `Batch.bad_weights`."""
        return self._call("bad_weights")[0]

    def reserve(self, positions: int) -> None:
        """Grow the KV cache so that each row can hold `positions` tokens; see `Batch.reserve`."""
        self._call("reserve", *[(positions,)] * len(self._host_rows))

    def insert(
        self,
        rows: Sequence[int],
        prompts: Sequence[np.ndarray],
        lengths: ArrayLike,
        settings: SamplerSettings,
        *,
        alternatives: int | None = None,
        chunks: Chunks | None = None,
        allowed: Mapping[int, np.ndarray] | None = None,
        longest: int | None = None,
    ) -> Chosen:
        """Put prompts into `rows` and choose the first token of each answer; see `Batch.insert`."""
        texts, length, left = check_texts(self._cluster.config, prompts, lengths)
        check_biases(self._cluster.config, settings)
        check_adapters(settings.adapter_B, self._cluster.adapters)
        row_ids = check_rows(rows, len(texts), self.rows)
        most = int(np.bincount(self._replica[row_ids]).max())  # most prompts in any replica
        begin = np.zeros_like(length) if chunks is None else chunks.begin_P
        reach = int(length.max()) if begin.any() else None
        # For each host, the indices of the prompts that go into its rows.
        shares = [np.flatnonzero(np.isin(row_ids, own)) for own in self._host_rows]
        arguments = [
            (
                np.searchsorted(own, row_ids[share]),
                [texts[index] for index in share],
                left[share],
                jax.tree.map(lambda x, share=share: x[share], settings),
                alternatives,
                jax.tree.map(lambda x, share=share: x[share], chunks),
                _local(allowed, own),
                longest or int((length - begin).max()),
                most,
                reach,
            )
            for own, share in zip(self._host_rows, shares, strict=True)
        ]
        chosen = self._gathered(self._call("insert", *arguments), shares)
        self._length[row_ids], self.left[row_ids] = length, left - 1
        return chosen

    def release(self, rows: Sequence[int] | np.ndarray) -> None:
        """Make `rows` idle, so that they generate no more tokens."""
        self.left[np.asarray(rows, np.intp)] = 0

    def decode(
        self,
        steps: int,
        alternatives: int | None = None,
        *,
        speculate: bool = False,
        allowed: Mapping[int, np.ndarray] | None = None,
    ) -> Chosen:
        """Make decode steps in every row; see `Batch.decode`."""
        check_number("generate: steps", steps, 1, MOST_STEPS)
        most = steps * (1 + self._guesses * speculate)
        # Each host knows only its own rows, but all hosts must reserve the same size.
        needed = positions_needed(self._length, self.left, most)
        idle = [np.flatnonzero(self.left[own] == 0) for own in self._host_rows]
        arguments = [
            (steps, alternatives, speculate, _local(allowed, own), needed, rows)
            for own, rows in zip(self._host_rows, idle, strict=True)
        ]
        results = self._call("decode", *arguments)
        # Hosts that share a replica must agree.
        left = self._cluster.gathered([own for own, _ in results], self._host_rows)
        made = np.minimum(limited(self.left, allowed), steps)
        if not speculate and (left != self.left - made).any():
            raise self._cluster.failed("the hosts disagree on how many tokens each row has left")
        self._length += self.left - left
        self.left = left
        return self._gathered([chosen for _, chosen in results], self._host_rows)

    def _call(self, method: str, *arguments: tuple[Any, ...]) -> list[Any]:
        if self._cluster.newest_batch is not self:
            raise InputError("a newer batch has replaced this one on the hosts; use the newer one")
        return self._cluster.call(method, *arguments)

    def _gathered(self, results: list[Chosen], positions: list[np.ndarray]) -> Chosen:
        return jax.tree.map(lambda *parts: self._cluster.gathered(parts, positions), *results)


def _local(
    allowed: Mapping[int, np.ndarray] | None, own: np.ndarray
) -> dict[int, np.ndarray] | None:
    """Return the part of `allowed` for the rows `own`, with the places of these rows as keys."""
    if allowed is None:
        return None
    return {place: allowed[row] for place, row in enumerate(own.tolist()) if row in allowed}
