"""The rules by which optimizers turn clipped gradients into updates; optax computes most of them.

A rule's state is a dict: `count`, the number of updates so far, and trees of f32 arrays, which are
called moments.  A tree has the structure of the parameters, but may lack those that have no such
moment.

The rules run on global arrays, under `jit`.  Rules that are not elementwise act on each layer
separately, although the layers' parameters are stacked, and on weights as matrices [inputs,
outputs], although some have more axes; `per_layer` unstacks and reshapes them.
"""

import abc
import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import (
    Declaration,
    Moment,
    combine,
    is_declaration,
    map_declared,
    partition,
    resized,
    select,
)
from mesh_transformer.model.casts import to_f32
from mesh_transformer.util import InputError, first_line, load_named

# Adafactor factors the moments of matrices with at least so many inputs and outputs.
FACTORED_SIZE = 128
# RMS of the entries of Muon's updates, about that of Adam's, so that one `lr` suits both (Liu
# 2025).
MUON_RMS = 0.2

RuleState = dict[str, Any]  # `count`, and the moments by name


@dataclass(frozen=True)
class Rule(abc.ABC):
    """A rule for updates, with the optimizer keys of `config`.

    Attributes:
      declared: a tree with the `Declaration` of every trained parameter.
    """

    config: Config
    declared: Any

    @abc.abstractmethod
    def moments(self) -> dict[str, Any]:
        """Return {name: tree with a `Moment` for each array}, without empty trees."""

    def initial(self, params: Any) -> dict[str, Any]:
        """Return the moments before the first update, which are 0."""

        def zeros(moment: Moment, p: Array) -> Array:
            return jnp.zeros([p.shape[axis] for axis in moment.axes], jnp.float32)

        return {
            name: jax.tree.map(zeros, tree, select(params, tree))
            for name, tree in self.moments().items()
        }

    @abc.abstractmethod
    def update(self, grads: Any, state: RuleState, params: Any) -> tuple[Any, RuleState]:
        """Return the updates, before they are multiplied by the learning rate, and the new state.

        Args:
          grads: the clipped gradients, a tree of f32 arrays.
          params: the parameters, a tree of f32 arrays.
        """

    def _whole(self) -> Any:
        """Return a tree of moments in the shapes of the parameters."""
        return map_declared(_whole, self.declared)


class Adam(Rule):
    """Adam (Kingma 2015): means of the gradients (`mu`) and of their squares (`nu`)."""

    def moments(self) -> dict[str, Any]:
        return {"mu": self._whole(), "nu": self._whole()}

    def update(self, grads: Any, state: RuleState, params: Any) -> tuple[Any, RuleState]:
        return adam_update(self.config, grads, state)


def adam_update(config: Config, grads: Any, state: RuleState) -> tuple[Any, RuleState]:
    adam = optax.scale_by_adam(b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps)
    before = optax.ScaleByAdamState(state["count"], state["mu"], state["nu"])
    updates, after = adam.update(grads, before)
    assert isinstance(after, optax.ScaleByAdamState)
    return updates, {"count": after.count, "mu": after.mu, "nu": after.nu}


class Lion(Rule):
    """Lion (Chen 2023): the sign of an average of the gradients; `mu` is another average."""

    def moments(self) -> dict[str, Any]:
        return {"mu": self._whole()}

    def update(self, grads: Any, state: RuleState, params: Any) -> tuple[Any, RuleState]:
        lion = optax.scale_by_lion(b1=self.config.lion_b1, b2=self.config.lion_b2)
        updates, after = lion.update(grads, optax.ScaleByLionState(state["count"], state["mu"]))
        assert isinstance(after, optax.ScaleByLionState)
        return updates, {"count": after.count, "mu": after.mu}


class Sgd(Rule):
    """Gradient descent with momentum; `mu` is the decayed sum of the gradients."""

    def moments(self) -> dict[str, Any]:
        return {"mu": self._whole()} if self.config.momentum else {}

    def update(self, grads: Any, state: RuleState, params: Any) -> tuple[Any, RuleState]:
        count = optax.safe_increment(state["count"])
        if not self.config.momentum:
            return grads, {"count": count}
        trace = optax.trace(self.config.momentum)
        updates, after = trace.update(grads, optax.TraceState(state["mu"]))
        assert isinstance(after, optax.TraceState)
        return updates, {"count": count, "mu": after.trace}


class Adafactor(Rule):
    """Adafactor (Shazeer 2018), without momentum.

    The mean square of a matrix's gradients is estimated from the means of its rows (`row`, one per
    input) and columns (`col`, one per output).  Vectors and small matrices have a mean square per
    entry (`nu`).  The update of each vector or matrix is limited to an RMS of 1, and multiplied by
    the parameter's own RMS (at least 1e-3).
    """

    def moments(self) -> dict[str, Any]:
        whole, factored = partition(self.declared, self.declared, _is_factored)
        trees = {
            "nu": map_declared(_whole, whole),
            "row": map_declared(lambda d: _without(d, d.matrix_axes[1]), factored),
            "col": map_declared(lambda d: _without(d, d.matrix_axes[0]), factored),
        }
        return {name: tree for name, tree in trees.items() if tree}

    def update(self, grads: Any, state: RuleState, params: Any) -> tuple[Any, RuleState]:
        unused = jnp.zeros(1)  # of the moments that a parameter does not have

        def step(g: Array, p: Array, row: Array, col: Array, nu: Array, factored: bool) -> Any:
            adafactor = optax.chain(
                optax.scale_by_factored_rms(factored, min_dim_size_to_factor=FACTORED_SIZE),
                optax.clip_by_block_rms(1.0),
                optax.scale_by_param_block_rms(),
            )
            before = optax.FactoredState(state["count"], row, col, nu)
            update, after = adafactor.update(g, (before, *[optax.EmptyState()] * 2), p)
            assert isinstance(after, tuple)
            return update, after[0]

        def whole(d: Declaration, g: Array, p: Array, nu: Array) -> Any:
            def one(g: Array, p: Array, nu: Array) -> Any:
                update, after = step(g, p, unused, unused, nu, False)
                return update, after.v

            return per_layer(one, [_whole(d)] * 3, (g, p, nu), (0, 2))

        def factored(d: Declaration, g: Array, p: Array, row: Array, col: Array) -> Any:
            # optax calls the moment of the shorter axis a row.
            wide = d.matrix_shape[0] <= d.matrix_shape[1]

            def one(g: Array, p: Array, row: Array, col: Array) -> Any:
                update, after = step(g, p, *((row, col) if wide else (col, row)), unused, True)
                means = (after.v_row, after.v_col)
                return update, *(means if wide else means[::-1])

            inputs, outputs = d.matrix_axes
            kinds = [_whole(d), _whole(d), _without(d, outputs), _without(d, inputs)]
            return per_layer(one, kinds, (g, p, row, col), (0, 2, 3))

        parts = [partition(self.declared, t, _is_factored) for t in (self.declared, grads, params)]
        (of_whole, *rest), (of_factored, *matrices) = zip(*parts, strict=True)
        results = map_declared(whole, of_whole, *rest, state.get("nu", {}))
        updates, nu = _unzip(of_whole, results, 2)
        means = (state.get("row", {}), state.get("col", {}))
        results = map_declared(factored, of_factored, *matrices, *means)
        scaled, row, col = _unzip(of_factored, results, 3)
        after = {"nu": nu, "row": row, "col": col}
        count = optax.safe_increment(state["count"])
        after = {name: tree for name, tree in after.items() if tree}
        return combine(updates, scaled), {"count": count} | after


class Muon(Rule):
    """Muon (Jordan 2024) for the matrices of the layers, and Adam for all other parameters.

    Muon's update of a matrix is the mean of its gradients (`mu`), made nearly orthogonal by five
    Newton-Schulz iterations, and scaled to an RMS of about `MUON_RMS`.
    """

    def moments(self) -> dict[str, Any]:
        others, _ = partition(self.declared, self.declared, _is_layer_matrix)
        return {"mu": self._whole(), **({"nu": map_declared(_whole, others)} if others else {})}

    def update(self, grads: Any, state: RuleState, params: Any) -> tuple[Any, RuleState]:
        c = self.config
        assert c.momentum is not None
        numbers = optax.contrib.MuonDimensionNumbers()
        muon = optax.contrib.scale_by_muon(beta=c.momentum, weight_dimension_numbers=numbers)

        def one(g: Array, mu: Array) -> tuple[Any, Any]:
            before: Any = muon.init(mu)
            update, after = muon.update(g, before._replace(count=state["count"], mu=mu))
            assert isinstance(after, optax.contrib.MuonState)
            return update * (MUON_RMS * max(g.shape) ** 0.5), after.mu

        def matrix(d: Declaration, g: Array, mu: Array) -> Any:
            return per_layer(one, [_whole(d)] * 2, (g, mu), (0, 1), one_by_one=True)

        parts = [
            partition(self.declared, t, _is_layer_matrix)
            for t in (self.declared, grads, state["mu"])
        ]
        (_, other_grads, other_mu), (declared, *matrices) = zip(*parts, strict=True)
        # Otherwise TPUs and newer GPUs round the inputs of f32 matmuls, as muon tolerates.
        exact = c.dtype == "float32"
        with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
            results = map_declared(matrix, declared, *matrices)
        updates, mu = _unzip(declared, results, 2)
        adam = {"count": state["count"], "mu": other_mu, "nu": state.get("nu", {})}
        other_updates, after = adam_update(c, other_grads, adam)
        after["mu"] = combine(after["mu"], mu)
        if not after["nu"]:
            del after["nu"]
        return combine(updates, other_updates), after


@dataclass(frozen=True)
class _Place:
    """A moment of a user's transformation, and the keys of its parameter in the nested dicts."""

    moment: Moment
    keys: tuple[str, ...]


class OwnRule(Rule):
    """A transformation of optax's, which a function of the user's returns for the config.

    Arrays of its state that are shaped like a parameter are moments, and have its layout; whole
    numbers count the updates.  A moment is named after its place in the state, such as `mu`.

    Raises:
      InputError: if the function returns something else, if the state has other arrays, or if the
        updates are already multiplied by a learning rate.
    """

    @functools.cached_property
    def _transformation(self) -> optax.GradientTransformation:
        name = self.config.optimizer
        function = load_named(name, "optimizer")
        try:
            result = function(self.config)
        except Exception as error:  # the user's code may raise any
            raise InputError(
                f"optimizer {name}: {type(error).__name__}: {first_line(error)}; it is called with "
                "the config"
            ) from error
        if not isinstance(result, optax.GradientTransformation):
            raise InputError(
                f"optimizer {name} returned {type(result).__name__}, expected a transformation of "
                "optax"
            )
        return result

    @functools.cached_property
    def _state(self) -> tuple[list[tuple[str, _Place] | None], Any]:
        """The name and `_Place` of each moment in the state, None for each count; and its tree."""

        def places(node: Any, keys: tuple[str, ...] = ()) -> Any:
            if is_declaration(node):
                return _Place(_whole(node), keys)
            return {name: places(child, (*keys, name)) for name, child in node.items()}

        def checked(leaf: jax.ShapeDtypeStruct, place: _Place | None = None) -> Any:
            is_count = not leaf.shape and jnp.issubdtype(leaf.dtype, jnp.integer)
            if is_count if place is None else leaf.shape == place.moment.shape:
                return place or 0
            raise InputError(
                f"optimizer {self.config.optimizer}: its state has an array of shape {leaf.shape} "
                f"and type {leaf.dtype}; expected only arrays of the shapes of parameters, and "
                "whole numbers that count the updates"
            )

        _check_transformation(self.config.optimizer, self._transformation)
        params = map_declared(lambda d: jax.ShapeDtypeStruct(d.shape, jnp.float32), self.declared)
        init: Any = self._transformation.init
        state, own = jax.eval_shape(init, params), places(self.declared)
        map_params = optax.tree_utils.tree_map_params
        checked_state = map_params(init, checked, state, own, transform_non_params=checked)
        slots = [
            (_name(path[: -len(leaf.keys)]), leaf) if isinstance(leaf, _Place) else None
            for path, leaf in jax.tree_util.tree_leaves_with_path(checked_state)
        ]
        names = [(slot[0], slot[1].keys) for slot in slots if slot is not None]
        assert len(set(names)) == len(names)
        return slots, jax.tree.structure(state)

    def _moments(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Return {name: tree} of the leaves of a state that are moments."""
        trees: dict[str, Any] = {}
        for slot, leaf in zip(self._state[0], leaves, strict=True):
            if slot is not None:
                name, place = slot
                node = trees.setdefault(name, {})
                for key in place.keys[:-1]:
                    node = node.setdefault(key, {})
                node[place.keys[-1]] = leaf
        return trees

    def moments(self) -> dict[str, Any]:
        return self._moments([slot and slot[1].moment for slot in self._state[0]])

    def initial(self, params: Any) -> dict[str, Any]:
        own = self._unpadded(to_f32(params))
        moments = self._moments(jax.tree.leaves(self._transformation.init(own)))
        return {name: self._padded(tree, params) for name, tree in moments.items()}

    def update(self, grads: Any, state: RuleState, params: Any) -> tuple[Any, RuleState]:
        slots, tree = self._state

        def leaf(slot: tuple[str, _Place] | None) -> Array:
            if slot is None:
                return state["count"]
            name, place = slot
            moment = functools.reduce(lambda node, key: node[key], place.keys, state[name])
            return resized(moment, place.moment.shape)

        before = jax.tree.unflatten(tree, map(leaf, slots))
        own = self._unpadded(grads), before, self._unpadded(params)
        updates, after = self._transformation.update(*own)
        moments = self._moments(jax.tree.leaves(after))
        padded = {name: self._padded(tree, params) for name, tree in moments.items()}
        count = optax.safe_increment(state["count"])
        return self._padded(updates, params), {"count": count} | padded

    def _unpadded(self, tree: Any) -> Any:
        return map_declared(lambda d, x: resized(x, d.shape), self.declared, tree)

    def _padded(self, tree: Any, params: Any) -> Any:
        """Return arrays with the padding of their parameters, which is 0."""
        return jax.tree.map(lambda x, p: resized(x, p.shape), tree, select(params, tree))


def _check_transformation(name: str, transformation: optax.GradientTransformation) -> None:
    """Raise InputError if whole numbers of a state do not count, or updates point uphill.

    The transformation updates a small parameter with positive gradients a few times.
    """
    with jax.ensure_compile_time_eval():
        params = {"layers": {"w": jnp.ones((2, 2, 2))}}
        state = transformation.init(params)
        for count in range(4):
            numbers = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.integer)]
            if any(x.shape or int(x) != count for x in numbers):
                raise InputError(
                    f"optimizer {name}: a whole number of its state does not count the updates, so "
                    "that it cannot be stored; use another transformation"
                )
            updates, state = transformation.update(params, state, params)
            first: Any = jax.tree.leaves(updates)[0]
            if not count and (first < 0).any():
                raise InputError(
                    f"optimizer {name} returns updates against the gradients, which are multiplied "
                    "by the learning rate and subtracted; leave out its own learning rate, as in "
                    "optax.scale_by_adam() in place of optax.adam(lr)"
                )


def _name(path: Sequence[Any]) -> str:
    """Return the name of a moment at a path of a state."""
    keys = (jax.tree_util.keystr((key,), simple=True).replace(".", "_") for key in path)
    return f"own_{name}" if (name := "_".join(keys)) in ("", "count") else name


RULES: dict[str, type[Rule]] = {
    "adam": Adam,
    "adafactor": Adafactor,
    "lion": Lion,
    "muon": Muon,
    "sgd": Sgd,
}


def _is_factored(d: Declaration) -> bool:
    return d.decay and min(d.matrix_shape) >= FACTORED_SIZE


def _is_layer_matrix(d: Declaration) -> bool:
    return d.decay and d.stacked


def _whole(d: Declaration) -> Moment:
    return Moment(d, tuple(range(len(d.shape))))


def _without(d: Declaration, removed: tuple[int, ...]) -> Moment:
    return Moment(d, tuple(axis for axis in range(len(d.shape)) if axis not in removed))


def _unzip(declared: Any, results: Any, count: int) -> list[Any]:
    """Split a tree of tuples, in the structure of `declared`, into `count` trees."""
    return [map_declared(lambda _, r, i=i: r[i], declared, results) for i in range(count)]


def per_layer(
    function: Callable[..., tuple[Array, ...]],
    kinds: Sequence[Moment],
    arrays: Sequence[Array],
    results: Sequence[int],
    *,
    one_by_one: bool = False,
) -> tuple[Array, ...]:
    """Apply a function to a parameter and its moments, separately for each layer if stacked.

    The function gets weights as matrices [inputs, outputs], and moments that lack the inputs or the
    outputs as vectors.  Biases and norms keep their shapes.

    The arrays on the devices may be larger than declared, padded with zeros at the end of each
    axis.  The function gets arrays without padding, and the results are padded again.

    Args:
      kinds: for each array, which axes of the parameter it has.
      arrays: the function's arguments.
      results: for each result of the function, the index in `arrays` of an array of its shape.
      one_by_one: whether to process the layers one after the other, which saves memory.
    """

    def unpadded(kind: Moment, x: Array) -> Array:
        return resized(x, kind.shape).reshape(_shape_of_layers(kind))

    def padded(index: int, x: Array) -> Array:
        return resized(x.reshape(kinds[index].shape), arrays[index].shape)

    layers = tuple(map(unpadded, kinds, arrays))
    if not kinds[0].parameter.stacked:
        outputs = function(*layers)
    elif one_by_one:
        outputs = jax.lax.map(lambda layer: function(*layer), layers)
    else:
        outputs = jax.vmap(function)(*layers)
    return tuple(map(padded, results, outputs))


def _shape_of_layers(kind: Moment) -> tuple[int, ...]:
    """Return the shape of a parameter or moment with its inputs and outputs flattened to one axis.

    The layer axis comes first, if there is one.  Only weights are flattened.
    """
    d = kind.parameter
    if not d.decay:
        return kind.shape
    sizes = zip(d.matrix_axes, d.matrix_shape, strict=True)
    flat = [size for axes, size in sizes if set(axes) <= set(kind.axes)]
    return (*kind.shape[: d.stacked], *flat)
