"""Positions of sequences that are split over the mesh axis cp (context parallelism)."""

import abc
import copy
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from mesh_transformer.util import InputError


class Positions(abc.ABC):
    """The part of `Parallel` that is about positions.

    Attributes:
      cp: number of devices that the positions of each sequence are split over.
      mp: size of the mesh axis mp; 1 if the compiler partitions over mp.
      shards: size of the mesh axis mp, also if the compiler partitions over mp.
      axes: the mesh axes over which collectives are explicit.
    """

    axes: tuple[str, ...]
    cp: int
    mp: int
    shards: int

    @abc.abstractmethod
    def shard(self, x: Array, *axes: str | None) -> Array:
        """Constrain how the compiler shards x over mp, and return x.

        If the compiler does not partition over mp, x is returned unchanged.

        Args:
          axes: for each array axis, the mesh axis that splits it, or None.
        """

    def cp_rank(self) -> Array | int:
        """Return this device's index along cp."""
        return lax.axis_index("cp") if self.cp > 1 else 0

    def cut(self, x: Array) -> Array:
        """Return this device's positions of an array [B, T, ...] with those of whole sequences.

        A sequence is cut into 2 cp chunks.  Device r has the chunks r and 2 cp - 1 - r, so that
        causal attention is equal work for all devices.

        Raises:
          InputError: if T is not a multiple of 2 cp.
        """
        if self.cp == 1:
            return x
        (size, rest), rank = divmod(x.shape[1], 2 * self.cp), self.cp_rank()
        if rest:
            raise InputError(
                f"sequences have {x.shape[1]} tokens, not a multiple of twice context_parallel "
                f"({self.cp}); pad them"
            )
        chunks = [
            lax.dynamic_slice_in_dim(x, chunk * size, size, axis=1)
            for chunk in (rank, 2 * self.cp - 1 - rank)
        ]
        return jnp.concatenate(chunks, axis=1)

    def whole(self, x: Array) -> Array:
        """Undo `cut`, by an all-gather over cp."""
        if self.cp == 1:
            return x
        return self._in_order(lax.all_gather(x, "cp", axis=1, tiled=True, to="invarying"))

    def _in_order(self, x: Array) -> Array:
        """Return an array with the positions of all devices, one after the other, in order."""
        B, T = x.shape[:2]
        x = x.reshape(B, self.cp, 2, T // (2 * self.cp), *x.shape[2:])
        return jnp.concatenate((x[:, :, 0], x[:, ::-1, 1]), axis=1).reshape(B, T, *x.shape[4:])

    def _by_device(self, x: Array) -> Array:
        """Undo `_in_order`: return the positions of one device after those of another."""
        B, T = x.shape[:2]
        x = x.reshape(B, 2, self.cp, T // (2 * self.cp), *x.shape[2:])
        return jnp.stack((x[:, 0], x[:, 1, ::-1]), axis=2).reshape(B, T, *x.shape[4:])

    def heads_for_positions(self, x: Array) -> Array:
        """Return all positions of a share of the heads, by an all-to-all over cp.

        Args:
          x: [B, T, H, ...], with H a multiple of cp in each mp shard, and T as for `cut`.

        Returns:
          [B, cp T, H / cp, ...], with the positions in order.
        """
        B, T, H = x.shape[:3]
        shards = self.shards // self.mp  # in the array
        x = self.shard(x.reshape(B, T, shards, -1, *x.shape[3:]), "dp", None, "mp")
        x = lax.all_to_all(x, "cp", 3, 1, tiled=True)
        return self._in_order(x).reshape(B, T * self.cp, H // self.cp, *x.shape[4:])

    def positions_for_heads(self, x: Array) -> Array:
        """Undo `heads_for_positions`."""
        B, T, H = x.shape[:3]
        shards = self.shards // self.mp
        x = self._by_device(x).reshape(B, T, shards, -1, *x.shape[3:])
        x = lax.all_to_all(self.shard(x, "dp", None, "mp"), "cp", 1, 3, tiled=True)
        return x.reshape(B, T // self.cp, H * self.cp, *x.shape[4:])

    def own_heads(self, x: Array) -> Array:
        """Return the share of the heads, [B, H / cp], that `heads_for_positions` returns."""
        x = x.reshape(len(x), self.shards // self.mp, self.cp, -1)
        x = lax.dynamic_index_in_dim(x, self.cp_rank(), axis=2, keepdims=False)
        return x.reshape(len(x), -1)

    def with_whole_positions(self) -> Self:
        """Return a copy for code whose arrays have all positions, though cp splits others."""
        par = copy.copy(self)
        par.cp = 1
        return par

    def without_cp(self) -> Self:
        """Return a copy for code whose arrays are equal on all devices along cp."""
        par = self.with_whole_positions()
        par.axes = tuple(axis for axis in self.axes if axis != "cp")
        return par

    def shift(self, x: Any, distance: int) -> Any:
        """Return the tree of arrays of the device that is `distance` devices before along cp."""
        if not distance % self.cp:
            return x
        pairs = [(rank, (rank + distance) % self.cp) for rank in range(self.cp)]
        return jax.tree.map(lambda x: lax.ppermute(x, "cp", pairs), x)
