"""`ClusterBatch`: a running batch of prompts, its rows spread over the hosts of a mesh."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import ArrayLike

from mesh_transformer.config import Config
from mesh_transformer.generation.decode import Chosen
from mesh_transformer.generation.prompts import check_texts
from mesh_transformer.generation.sampling import SamplerSettings
from mesh_transformer.mesh.placement import places
from mesh_transformer.util import HostError, InputError


class Cluster(Protocol):
    """What a batch asks of its `TPUCluster`, where these are told of."""

    config: Config
    dp: int
    replicas: list[list[int]]  # of each host
    newest_batch: "ClusterBatch | None"

    def call(self, method: str, *arguments: tuple[Any, ...]) -> list[Any]: ...

    def gathered(self, found: Sequence[np.ndarray], at: Sequence[np.ndarray]) -> np.ndarray: ...

    def failed(self, told: str) -> HostError: ...


class ClusterBatch:
    """`generator.Batch` over all hosts: the same methods, for the rows of every replica.

    Each host holds the rows of its replicas.  All get each call at once, with their own share of
    the prompts, and with what their programs' shapes follow from: that is of all prompts.  What
    would fail on one host alone, where the others would wait for it, is refused here.

    Attributes:
      rows: how many there are in all, as many of each replica, in the replicas' order.
      left: how many tokens each row may still have.

    Raises:
      InputError: from every method, once a newer batch has taken this one's place on the hosts.
      HostError: from every method, when a host fails, or says something else than another.
    """

    def __init__(self, cluster: Cluster, rows: int):
        if rows < 1 or rows % cluster.dp:
            raise InputError(
                f"generate: a batch of {rows} rows, expected a multiple of the {cluster.dp} "
                "replicas"
            )
        self.rows = rows
        self.left = np.zeros(rows, np.int32)
        self._length = np.zeros(rows, np.int32)  # tokens in each row's cache
        self._replica = np.arange(rows) // (rows // cluster.dp)  # whose each row is
        self._here = places(cluster.replicas, rows // cluster.dp)  # each host's rows
        self._cluster = cluster
        cluster.call("batch", *[(len(own),) for own in self._here])

    def reserve(self, positions: int) -> None:
        """As `Batch.reserve`."""
        self._call("reserve", *[(positions,)] * len(self._here))

    def insert(
        self,
        rows: Sequence[int],
        prompts: Sequence[np.ndarray],
        lengths: ArrayLike,
        settings: SamplerSettings,
        *,
        alternatives: int | None = None,
    ) -> Chosen:
        """As `Batch.insert`."""
        texts, length, left = check_texts(self._cluster.config, prompts, lengths)
        where = np.asarray(rows)
        most = int(np.bincount(self._replica[where]).max())
        # Which of the prompts each host gets.
        shares = [np.flatnonzero(np.isin(where, own)) for own in self._here]
        arguments = [
            (
                np.searchsorted(own, where[share]),
                [texts[at] for at in share],
                left[share],
                jax.tree.map(lambda x, share=share: x[share], settings),
                alternatives,
                int(length.max()),
                most,
            )
            for own, share in zip(self._here, shares, strict=True)
        ]
        chosen = self._gathered(self._call("insert", *arguments), shares)
        self._length[where], self.left[where] = length, left - 1
        return chosen

    def release(self, rows: Sequence[int] | np.ndarray) -> None:
        """As `Batch.release`; the hosts learn of it with the next `decode`."""
        self.left[np.asarray(rows, np.intp)] = 0

    def decode(self, steps: int, alternatives: int | None = None) -> Chosen:
        """As `Batch.decode`."""
        ahead = np.minimum(self.left, steps)
        # How much room a host makes by itself would follow from its own rows alone.
        needed = int((self._length + ahead).max())
        idle = [np.flatnonzero(self.left[own] == 0) for own in self._here]
        told = self._call("decode", *[(steps, alternatives, needed, rows) for rows in idle])
        self._length += ahead
        self.left -= ahead
        if any(
            (left != self.left[own]).any() for (left, _), own in zip(told, self._here, strict=True)
        ):
            raise self._cluster.failed("the hosts disagree about how far each row is")
        return self._gathered([chosen for _, chosen in told], self._here)

    def _call(self, method: str, *arguments: tuple[Any, ...]) -> list[Any]:
        if self._cluster.newest_batch is not self:
            raise InputError("a newer batch has taken this one's place on the hosts; use that one")
        return self._cluster.call(method, *arguments)

    def _gathered(self, found: list[Chosen], at: list[np.ndarray]) -> Chosen:
        return jax.tree.map(lambda *parts: self._cluster.gathered(parts, at), *found)
