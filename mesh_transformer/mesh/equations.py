"""The equations of a traced program (a jaxpr): which are collectives, and how the others are run.

A program that is traced for a mesh consists of equations between collectives.  The equations name
the mesh in their types.  To run them on another mesh, `evaluate` binds each again.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding

from mesh_transformer.mesh.apart import is_kept_apart, kept_apart
from mesh_transformer.mesh.jax_versions import carry_of

AXES = ("dp", "cp", "mp")
Index = dict[str, Array]  # the index of the device that runs the equations, along each mesh axis

# Names of JAX's primitives.
TYPES = {"pvary", "pcast"}  # change only the type
SUMS = {"psum", "psum_invariant"}
EXTREMES = {"pmax", "pmin"}
GATHERS = {"all_gather", "all_gather_invariant"}
SCATTERS = {"reduce_scatter"}
SHIFTS = {"ppermute"}
EXCHANGES = {"all_to_all"}
COLLECTIVES = SUMS | EXTREMES | GATHERS | SCATTERS | SHIFTS | EXCHANGES
# Primitives that call a function, and the parameter with this function.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "shard_map": "jaxpr",
}


def opened(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Return a function's equations and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())


def called(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Return the function that an equation only calls, and its constants; None if there is none."""
    name = CALLS.get(eqn.primitive.name)
    return None if name is None else opened(eqn.params[name])


def inner(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the functions in an equation: those of a loop, the branches, or the one it calls."""
    kind, params = eqn.primitive.name, eqn.params
    if kind == "scan":
        return [opened(params["jaxpr"])[0]]
    if kind == "while":
        return [opened(params[name])[0] for name in ("cond_jaxpr", "body_jaxpr")]
    if kind == "cond":
        return [opened(branch)[0] for branch in params["branches"]]
    function = called(eqn)
    return [] if function is None else [function[0]]


def axis_names(params: dict[str, Any]) -> tuple[Any, ...]:
    """Return the axes in a primitive's parameters, those of the mesh by their names."""
    value = params.get("axes", params.get("axis_name", ()))
    return value if isinstance(value, tuple) else (value,)


@functools.lru_cache(maxsize=4096)
def _is_local(jaxpr: Jaxpr) -> bool:
    return all(map(is_local, jaxpr.eqns))


def is_local(eqn: JaxprEqn) -> bool:
    """Return whether an equation needs no other device.

    Raises:
      NotImplementedError: if the equation is a collective without a rule here.
    """
    name = eqn.primitive.name
    if name in COLLECTIVES:
        return False
    if name not in TYPES | {"axis_index"} and set(axis_names(eqn.params)) & set(AXES):
        raise NotImplementedError(f"virtual_mesh: there is no rule for the collective {name}")
    return all(map(_is_local, inner(eqn)))


@functools.lru_cache(maxsize=4096)
def _indices(jaxpr: Jaxpr) -> frozenset[str]:
    return frozenset().union(*map(indices, jaxpr.eqns))


def indices(eqn: JaxprEqn) -> frozenset[str]:
    """Return the mesh axes along which an equation reads the index of its device."""
    if eqn.primitive.name == "axis_index":
        return frozenset(axis_names(eqn.params))
    return frozenset().union(*map(_indices, inner(eqn)))


def read(atom: Any, values: dict[Var, Any]) -> Any:
    """Return the value of an input of an equation."""
    if not isinstance(atom, Literal):
        return values[atom]
    # The type of the literal's value names the mesh; that of a NumPy array does not.
    return np.asarray(atom.val, getattr(atom.aval, "dtype", None))


def _evaluate_function(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], index: Index
) -> list[Any]:
    values: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
    values.update(zip(jaxpr.constvars, consts, strict=True))
    evaluate(jaxpr.eqns, values, index)
    return [read(atom, values) for atom in jaxpr.outvars]


def evaluate(eqns: Sequence[JaxprEqn], values: dict[Var, Any], index: Index) -> None:
    """Run equations without collectives, on one device, and add their results to `values`."""
    for eqn in eqns:
        results = _evaluate_one(eqn, [read(atom, values) for atom in eqn.invars], index)
        values.update(zip(eqn.outvars, results, strict=True))


def _evaluate_one(eqn: JaxprEqn, args: list[Any], index: Index) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in TYPES:
        return args
    if name == "axis_index":
        (axis,) = axis_names(params)
        return [index[axis]]
    if name == "scan":
        return _evaluate_scan(params, args, index)
    if name == "while":
        test, body = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        return lax.while_loop(
            lambda carry: _evaluate_function(*test, [*args[:first], *carry], index)[0],
            lambda carry: _evaluate_function(*body, [*args[first:second], *carry], index),
            args[second:],
        )
    if name == "cond":

        def branch(closed: Any, *rest: Any) -> list[Any]:
            return _evaluate_function(*opened(closed), rest, index)

        branches = [functools.partial(branch, closed) for closed in params["branches"]]
        return lax.switch(args[0], branches, *args[1:])
    function = called(eqn)
    if function is not None:
        run = functools.partial(_evaluate_function, *function, index=index)
        return (kept_apart(run, "cpu") if is_kept_apart(eqn) else run)(args)
    if name == "div" and jnp.issubdtype(jnp.result_type(args[1]), jnp.floating):
        # The compiler rewrites some divisions like this, depending on what is around them.
        return [lax.mul(args[0], lax.div(lax.full_like(args[1], 1), args[1]))]
    results = eqn.primitive.bind(*args, **{key: _on_this_mesh(x) for key, x in params.items()})
    return results if eqn.primitive.multiple_results else [results]


def _on_this_mesh(x: Any) -> Any:
    """Return an equation's parameter without what it says about the traced mesh."""
    if isinstance(x, NamedSharding):  # a layout; within a device, nothing is split
        return None
    if isinstance(x, ShapedArray):  # the type of a kernel's result
        return jax.make_jaxpr(lambda: lax.full(x.shape, 0, x.dtype))().out_avals[0]
    return tuple(map(_on_this_mesh, x)) if type(x) is tuple else x


def _evaluate_scan(params: dict[str, Any], args: list[Any], index: Index) -> list[Any]:
    jaxpr, consts = opened(params["jaxpr"])
    first, count = carry_of(params)

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _evaluate_function(jaxpr, consts, [*args[:first], *carry, *xs], index)
        return results[:count], results[count:]

    carry, ys = lax.scan(
        body,
        args[first : first + count],
        args[first + count :],
        params["length"],
        params["reverse"],
        params.get("unroll", 1),
    )
    return [*carry, *ys]
