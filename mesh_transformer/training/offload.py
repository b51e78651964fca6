"""Updates of a training state that is partly in host memory (see `mesh.host_memory`).

Stacked matrices are updated in a loop over the layers: the devices hold one layer at a time, and
the transfers in both directions can overlap.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mesh_transformer.mesh.declaration import (
    combine,
    is_declaration,
    map_declared,
    partition,
    select,
)
from mesh_transformer.mesh.host_memory import is_offloaded, on_device, on_host
from mesh_transformer.training.optimizer import Optimizer, OptState

# (optimizer, gradients, optimizer state, parameters) -> (parameters, optimizer state)
Update = Callable[[Optimizer, Any, OptState, Any], tuple[Any, OptState]]


def update(
    function: Update, optimizer: Optimizer, grads: Any, state: OptState, params: Any
) -> tuple[Any, OptState]:
    """Update parameters and moments, some of them in host memory, inside `jit`.

    Args:
      function: returns the new parameters and optimizer state.  It is called with one matrix at a
        time, or one layer of it, and finally with all other parameters; each time with an
        `Optimizer` of these.  Its arguments and results are on the devices.
    """
    config = optimizer.config
    rest, matrices = partition(optimizer.declared, optimizer.declared, is_offloaded)
    updated: tuple[Any, OptState] = ({}, {})
    for part in _one_leaf_each(matrices):
        new = _update_matrix(function, Optimizer(config, part), grads, state, params)
        updated = combine(updated[0], new[0]), combine(updated[1], new[1])
    optimizer = Optimizer(config, rest)
    own = {"count": state["count"]} | _moments(optimizer, state)
    new = function(optimizer, select(grads, rest), own, select(params, rest))
    return combine(updated[0], new[0]), combine(updated[1], new[1])


def _one_leaf_each(declared: Any) -> Iterator[Any]:
    """Yield for each leaf of a nested dict a nested dict with this leaf alone."""
    for name, node in declared.items():
        for part in [node] if is_declaration(node) else _one_leaf_each(node):
            yield {name: part}


def _moments(optimizer: Optimizer, state: OptState) -> OptState:
    """Return the moments of the parameters of `optimizer`: the state without the count."""
    return {name: select(state[name], tree) for name, tree in optimizer.moments().items()}


def _update_matrix(
    function: Update, optimizer: Optimizer, grads: Any, state: OptState, params: Any
) -> tuple[Any, OptState]:
    """Update the only matrix of `optimizer` (see `update`); return it and its moments."""
    declared, config = optimizer.declared, optimizer.config
    grads, count = select(grads, declared), {"count": state["count"]}
    arrays = select(params, declared), _moments(optimizer, state)
    put_back = on_host if config.offload == "params" else on_device

    def updated(optimizer: Optimizer, grads: Any, arrays_on_device: Any) -> Any:
        params, moments = arrays_on_device
        params, state = function(optimizer, grads, count | moments, params)
        moments = {name: state[name] for name in moments}
        return jax.tree.map(put_back, params), jax.tree.map(on_host, moments)

    (matrix,) = jax.tree.leaves(declared, is_leaf=is_declaration)
    if not matrix.stacked:
        return updated(optimizer, grads, jax.tree.map(on_device, arrays))
    layers = matrix.shape[0]
    layer = Optimizer(config, map_declared(lambda d: d.unstack().stack(1), declared))

    def read(arrays: Any, index: Array | int) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index, 1), arrays)

    def body(index: Array, carry: Any) -> Any:
        arrays, current = carry
        # TPUs read the next layer while they write back this one.
        following = jax.tree.map(on_device, read(arrays, jnp.minimum(index + 1, layers - 1)))
        new = updated(layer, read(grads, index), current)
        arrays = jax.tree.map(
            lambda x, part: lax.dynamic_update_slice_in_dim(x, part, index, 0), arrays, new
        )
        return arrays, following

    first = jax.tree.map(on_device, read(arrays, 0))
    return lax.fori_loop(0, layers, body, (arrays, first))[0]
