"""Updates of a training state that is partly in host memory (see `mesh.host_memory`).

Stacked matrices are updated in a loop over the layers: the devices hold one layer at a time, and
its transfer can overlap with the computation of another one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
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
    """Update parameters and moments of which some are in host memory, inside `jit`.

    Args:
      function: returns the new parameters and optimizer state.  It is called with one matrix at a
        time, or one layer of it, and at last with all other parameters; each time with an
        `Optimizer` of these.  Its arguments and results are on the devices.
    """
    config = optimizer.config
    rest, matrices = partition(optimizer.declared, optimizer.declared, is_offloaded)
    updated: tuple[Any, OptState] = ({}, {})
    for part in _single(matrices):
        new = _update_matrix(function, Optimizer(config, part), grads, state, params)
        updated = combine(updated[0], new[0]), combine(updated[1], new[1])
    optimizer = Optimizer(config, rest)
    new = function(optimizer, select(grads, rest), _own(optimizer, state), select(params, rest))
    return combine(updated[0], new[0]), combine(updated[1], new[1])


def _single(declared: Any) -> Iterator[Any]:
    """Yield for each leaf of a nested dict a nested dict with this leaf alone."""
    for name, node in declared.items():
        for part in [node] if is_declaration(node) else _single(node):
            yield {name: part}


def _own(optimizer: Optimizer, state: OptState) -> OptState:
    """Return the part of the state that belongs to the parameters of `optimizer`."""
    moments = {name: select(state[name], tree) for name, tree in optimizer.moments().items()}
    return {"count": state["count"]} | moments


def _update_matrix(
    function: Update, optimizer: Optimizer, grads: Any, state: OptState, params: Any
) -> tuple[Any, OptState]:
    """Update the only matrix of `optimizer`; see `update`.  The result has no `count`."""
    declared, config = optimizer.declared, optimizer.config
    grads, params, state = select(grads, declared), select(params, declared), _own(optimizer, state)
    count = state.pop("count")
    arrays = params, state
    put_back = on_host if config.offload == "params" else on_device

    def moved(optimizer: Optimizer, grads: Any, arrays: Any) -> Any:
        params, state = jax.tree.map(on_device, arrays)
        params, state = function(optimizer, grads, {"count": count} | state, params)
        del state["count"]
        return jax.tree.map(put_back, params), jax.tree.map(on_host, state)

    (matrix,) = jax.tree.leaves(declared, is_leaf=is_declaration)
    if not matrix.stacked:
        return moved(optimizer, grads, arrays)
    layer = Optimizer(config, map_declared(lambda d: d.unstack().stack(1), declared))

    def body(index: Array, arrays: Any) -> Any:
        def own(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, index, 1)

        new = moved(layer, *jax.tree.map(own, (grads, arrays)))
        return jax.tree.map(
            lambda x, part: lax.dynamic_update_slice_in_dim(x, part, index, 0), arrays, new
        )

    return lax.fori_loop(0, matrix.shape[0], body, arrays)
