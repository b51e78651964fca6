"""Programs of a virtual mesh, which give the same bits on each mesh that divides it.

A function is traced as the program of one device of the virtual mesh; this trace does not depend on
the real mesh.  A real device then runs the program of each of its virtual devices:

* What is between two collectives runs once per virtual device, in a loop.  The shapes are those of
  one virtual device.  The compiler must compile it alike on every mesh, so it is a function of its
  own, which the compiler can neither merge with what is around it nor specialise for the number of
  iterations.  What is equal on all virtual devices along a mesh axis runs only once.
* Collectives add in an order that does not depend on the real mesh; see `blocks`.

Layers, model and steps see only a `Manual` whose mesh is the virtual one.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer.mesh import apart
from mesh_transformer.mesh.blocks import Axes, Blocks, Value, ordered
from mesh_transformer.mesh.equations import (
    AXES,
    EXCHANGES,
    EXTREMES,
    GATHERS,
    SCATTERS,
    SHIFTS,
    SUMS,
    TYPES,
    Index,
    axis_names,
    called,
    evaluate,
    indices,
    inner,
    is_local,
    opened,
    read,
)
from mesh_transformer.mesh.jax_versions import carry_of, prng_name


def virtual_mesh(shape: Sequence[int]) -> AbstractMesh:
    """Return a (dp, mp) or (dp, cp, mp) mesh without devices."""
    # By default, JAX 0.12 makes the axes Explicit, which have no arrays of another layout.
    axes = _axes(shape)
    return AbstractMesh(tuple(shape), axes, axis_types=(AxisType.Auto,) * len(axes))


def _axes(shape: Sequence[int]) -> Axes:
    """Return the axes of a virtual mesh, which may lack cp."""
    return AXES if len(shape) == len(AXES) else ("dp", "mp")


def virtual(
    program: Callable[..., Any],
    shape: Sequence[int],
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
) -> Callable[..., Any]:
    """Return a function of global arrays that runs a program of the virtual mesh.

    Args:
      program: the program of one device, as for `jax.shard_map`.
      shape: of the virtual mesh, (dp, mp) or (dp, cp, mp): powers of two, and multiples of those
        of `mesh`.
      mesh: the real mesh.
      in_specs, out_specs: the PartitionSpecs of the arguments and results.
    """
    traced = jax.shard_map(
        program, mesh=virtual_mesh(shape), in_specs=in_specs, out_specs=out_specs
    )
    sizes = dict(zip(_axes(shape), shape, strict=True))
    blocks = {axis: size // mesh.shape.get(axis, 1) for axis, size in sizes.items()}

    def run(*args: Any) -> Any:
        closed, results = jax.make_jaxpr(traced, return_shape=True)(*args)
        (call,) = closed.jaxpr.eqns
        before, after = call.params["in_specs"], call.params["out_specs"]

        def local(*arrays: Array) -> list[Array]:
            own = _Program(blocks, mesh)
            values = [own.split(x, spec) for x, spec in zip(arrays, before, strict=True)]
            ends = own.run(*opened(call.params["jaxpr"]), values)
            return [own.join(value, spec) for value, spec in zip(ends, after, strict=True)]

        variables = (*closed.jaxpr.constvars, *closed.jaxpr.invars)
        inputs = dict(zip(variables, (*closed.consts, *jax.tree.leaves(args)), strict=True))
        # The trace has checked what each result varies along; this program has other types.
        arrays = jax.shard_map(
            local, mesh=mesh, in_specs=before, out_specs=list(after), check_vma=False
        )(*(read(atom, inputs) for atom in call.invars))
        return jax.tree.unflatten(jax.tree.structure(results), arrays)

    return run


def on_every_device(function: Callable[[Array], Any], mesh: Mesh) -> Callable[[Array], Any]:
    """Return `function` with the same bits on every mesh: each device computes whole arrays."""

    # Kept apart, so that the compiler does not compute only the part that a device keeps.
    own = apart.kept_apart(function, mesh.devices.flat[0].platform)
    return jax.shard_map(own, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


class _Program(Blocks):
    """The program of one real device, which runs those of its virtual devices.

    This takes two steps.  The first determines for each variable the mesh axes along which the
    virtual devices differ: forward through the equations, and through loops until nothing changes.
    The second runs the equations, those between two collectives in a loop over the virtual devices
    that differ.

    For example, each real device has two virtual devices along mp, `w` is split over mp, and `x`
    and `bias` are not:

        equation               axes of result   how it runs
        a = dot(x, w)          (mp,)            one segment with b: a loop over the two
        b = gelu(a)            (mp,)
        c = psum(b, "mp")      ()               tree sum of the two, then across real devices
        d = add(c, bias)       ()               once: all virtual devices have the same value
        e, f = jit(g)(a, d)    (mp,), ()        the axes differ: equation by equation, like this
    """

    def __init__(self, blocks: dict[str, int], mesh: Mesh):
        super().__init__(blocks, {axis: mesh.shape.get(axis, 1) for axis in blocks})
        self._platform = mesh.devices.flat[0].platform
        self._names = mesh.axis_names

    # Along which axes the virtual devices differ.

    def _axes_after(self, jaxpr: Jaxpr, inputs: Sequence[Axes]) -> list[Axes]:
        """Return the axes of a function's results, from those of its arguments."""
        known: dict[Var, Axes] = dict(zip(jaxpr.invars, inputs, strict=True))

        def axes_of(atom: Any) -> Axes:
            return () if isinstance(atom, Literal) else known.get(atom, ())

        for eqn in jaxpr.eqns:
            results = self._axes_after_equation(eqn, [axes_of(atom) for atom in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [axes_of(atom) for atom in jaxpr.outvars]

    def _axes_after_equation(self, eqn: JaxprEqn, inputs: list[Axes]) -> list[Axes]:
        name, params = eqn.primitive.name, eqn.params
        if is_local(eqn):
            same = [ordered(indices(eqn).union(*inputs))] * len(eqn.outvars)
            return self._differing_axes(eqn, inputs) or same
        if name in SUMS | EXTREMES | GATHERS:
            return [ordered({*axes} - {*axis_names(params)}) for axes in inputs]
        if name in SHIFTS:
            return inputs
        if name in SCATTERS | EXCHANGES:
            return [ordered({*axes, *axis_names(params)}) for axes in inputs]
        if name == "scan":
            first, count = carry_of(params)
            carry = self._carried(inner(eqn)[0], inputs, first, count)
            inputs = [*inputs[:first], *carry, *inputs[first + count :]]
            return [*carry, *self._axes_after(inner(eqn)[0], inputs)[count:]]
        if name == "while":
            return self._carried_by_while(eqn, inputs)
        if name == "cond":
            branches = [self._axes_after(branch, inputs[1:]) for branch in inner(eqn)]
            return [ordered(set().union(*axes)) for axes in zip(*branches, strict=True)]
        return self._axes_after(inner(eqn)[0], inputs)

    def _differing_axes(self, eqn: JaxprEqn, inputs: list[Axes]) -> list[Axes]:
        """Return the axes of each result of a call whose results have different axes, else []."""
        if called(eqn) is None or len(eqn.outvars) == 1 or len({*inputs}) == 1:
            return []
        results = self._axes_after(inner(eqn)[0], inputs)
        return results if len({*results}) > 1 else []

    def _carried_by_while(self, eqn: JaxprEqn, inputs: list[Axes]) -> list[Axes]:
        own, first = inputs[eqn.params["cond_nconsts"] :], eqn.params["body_nconsts"]
        return self._carried(inner(eqn)[1], own, first, len(own) - first)

    def _carried(self, body: Jaxpr, inputs: Sequence[Axes], first: int, count: int) -> list[Axes]:
        """Return the axes of a loop's carry, to which no iteration adds one.

        Of the body's arguments, whose axes are `inputs`, `count` from `first` on are the carry.
        """
        carry = list(inputs[first : first + count])
        while True:
            after = self._axes_after(body, [*inputs[:first], *carry, *inputs[first + count :]])
            joined = [ordered({*old, *new}) for old, new in zip(carry, after[:count], strict=True)]
            if joined == carry:
                return carry
            carry = joined

    # Execution.

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """Run a function on the virtual devices of this real device."""
        known: dict[Var, Value] = dict(zip(jaxpr.invars, args, strict=True))
        known.update(zip(jaxpr.constvars, (Value(x, ()) for x in consts), strict=True))

        def value(atom: Any) -> Value:
            return Value(read(atom, {}), ()) if isinstance(atom, Literal) else known[atom]

        results = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
        waiting = _used(jaxpr, results)
        while waiting:
            first = waiting[0]
            if not is_local(first) or self._differing_axes(first, _input_axes(first, known, ())):
                # The names of the trace, from which `plan` knows the backward pass.
                with jax.named_scope(str(first.source_info.name_stack) or "virtual"):
                    ends = self._run_collective(first, [value(atom) for atom in first.invars])
                known.update(zip(first.outvars, ends, strict=True))
                waiting = waiting[1:]
                continue
            axes = _local_axes(first, known)
            segment, waiting = self._segment(waiting, known, axes)
            # A branch, unlike a call, cannot write a result over its argument.
            sums: list[JaxprEqn] = []
            if not apart.calls_stay(self._platform):
                segment, sums = _split_sums(segment, known)
            later = results.union(*map(_variables, (*sums, *waiting)))
            outputs = [var for eqn in segment for var in eqn.outvars if var in later]
            known.update(
                zip(outputs, self._run_segment(segment, outputs, known, axes), strict=True)
            )
            for eqn in sums:
                known[eqn.outvars[0]] = self._run_sum([value(atom) for atom in eqn.invars])
        return [value(atom) for atom in jaxpr.outvars]

    def _segment(
        self, eqns: list[JaxprEqn], known: dict[Var, Value], axes: Axes
    ) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
        """Split equations into those that can run next, in a loop over `axes`, and all others."""
        segment, rest, inside = [], [], set()
        for eqn in eqns:
            variables = _variables(eqn)
            if is_local(eqn) and all(var in known or var in inside for var in variables):
                own = set(_local_axes(eqn, known)) | (set(axes) if variables & inside else set())
                mixed = self._differing_axes(eqn, _input_axes(eqn, known, axes))
                if own == set(axes) and not mixed:
                    segment.append(eqn)
                    inside.update(eqn.outvars)
                    continue
            rest.append(eqn)
        return segment, rest

    def _run_segment(
        self, eqns: list[JaxprEqn], outputs: list[Var], known: dict[Var, Value], axes: Axes
    ) -> list[Value]:
        """Run equations without collectives once for each virtual device along `axes`."""
        inputs = {
            var: known[var]
            for eqn in eqns
            for var in eqn.invars
            if isinstance(var, Var) and var in known
        }
        sizes = [self.blocks[axis] for axis in axes]
        shapes: list[Any] = [var.aval for var in outputs]

        def function(taken: list[Any], index: Index) -> list[Array]:
            values = dict(zip(inputs, taken, strict=True))
            evaluate(eqns, values, index)
            return [
                _stored(values[var], aval.dtype) for var, aval in zip(outputs, shapes, strict=True)
            ]

        on_its_own = apart.kept_apart(function, self._platform)

        def on_one(own: dict[str, Array]) -> list[Array]:
            taken = [_taken(value, own) for value in inputs.values()]
            index = {axis: self._first(axis) + own[axis] for axis in axes}
            return [jnp.expand_dims(x, range(len(axes))) for x in on_its_own(taken, index)]

        def body(number: Array, buffers: list[Array]) -> list[Array]:
            own = dict(zip(axes, jnp.unravel_index(number, sizes), strict=True))
            return [
                lax.dynamic_update_slice(x, end, (*own.values(), *(0,) * (x.ndim - len(axes))))
                for x, end in zip(buffers, on_one(own), strict=True)
            ]

        if math.prod(sizes) == 1:
            arrays = on_one({axis: jnp.int32(0) for axis in axes})
        else:
            buffers = [_zeros((*sizes, *aval.shape), aval.dtype) for aval in shapes]
            arrays = lax.fori_loop(0, math.prod(sizes), body, buffers)
        return [
            Value(_restored(x, aval.dtype), axes) for x, aval in zip(arrays, shapes, strict=True)
        ]

    def _first(self, axis: str) -> Array | int:
        """Return the index of this device's first virtual device along a mesh axis."""
        # A real mesh without cp lacks that axis.
        return lax.axis_index(axis) * self.blocks[axis] if axis in self._names else 0

    def _run_sum(self, values: list[Value]) -> Value:
        """Run an equation that `_split_sums` has split off, on all virtual devices at once.

        Its result is f32, and the sum of its inputs.
        """
        axes = ordered(set().union(*(value.axes for value in values)))
        arrays = [self.spread(value, axes).astype(jnp.float32) for value in values]
        return Value(sum(arrays[1:], arrays[0]), axes)

    def _run_collective(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        """Run an equation that is a collective, or one whose functions must be run in parts."""
        name, params = eqn.primitive.name, eqn.params
        if name in SUMS:
            return [self.sum(value, ordered(axis_names(params))) for value in values]
        if name in EXTREMES:
            axes = ordered(axis_names(params))
            return [self.extreme(value, axes, largest=name == "pmax") for value in values]
        if name in GATHERS:
            return [self.gather(value, params) for value in values]
        if name in SCATTERS:
            return [self.scatter(value, params) for value in values]
        if name in SHIFTS:
            return [self.shift(value, params) for value in values]
        if name in EXCHANGES:
            return [self.exchange(value, params) for value in values]
        if name == "scan":
            return self._run_scan(eqn, values)
        if name == "while":
            return self._run_while(eqn, values)
        if name == "cond":
            return self._run_cond(eqn, values)
        function = called(eqn)
        assert function is not None
        return self.run(*function, values)

    def _spread_all(self, values: Sequence[Value], axes: Sequence[Axes]) -> list[Array]:
        return [self.spread(value, own) for value, own in zip(values, axes, strict=True)]

    def _run_scan(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        params, (jaxpr, consts) = eqn.params, opened(eqn.params["jaxpr"])
        first, count = carry_of(params)
        axes = self._axes_after_equation(eqn, [value.axes for value in values])
        constants = values[:first]
        start = values[first : first + count]
        stacked = values[first + count :]

        def body(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
            now = [Value(x, own) for x, own in zip(carry, axes, strict=False)]
            ones = [Value(x, value.axes) for x, value in zip(xs, stacked, strict=True)]
            ends = self._spread_all(self.run(jaxpr, consts, [*constants, *now, *ones]), axes)
            return ends[:count], ends[count:]

        carry, ys = lax.scan(
            body,
            self._spread_all(start, axes[:count]),
            [jnp.moveaxis(value.array, len(value.axes), 0) for value in stacked],
            params["length"],
            params["reverse"],
            params.get("unroll", 1),
        )
        ys = [jnp.moveaxis(y, 0, len(own)) for y, own in zip(ys, axes[count:], strict=True)]
        return [Value(x, own) for x, own in zip([*carry, *ys], axes, strict=True)]

    def _run_while(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        params = eqn.params
        test, body = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        axes = self._carried_by_while(eqn, [value.axes for value in values])

        def now(carry: list[Array]) -> list[Value]:
            return [Value(x, own) for x, own in zip(carry, axes, strict=True)]

        def is_running(carry: list[Array]) -> Array:
            (result,) = self.run(*test, [*values[:first], *now(carry)])
            assert not result.axes, "virtual devices do not agree on the end of a loop"
            return result.array

        def step(carry: list[Array]) -> list[Array]:
            return self._spread_all(self.run(*body, [*values[first:second], *now(carry)]), axes)

        return now(lax.while_loop(is_running, step, self._spread_all(values[second:], axes)))

    def _run_cond(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        which, *rest = values
        assert not which.axes, "virtual devices do not agree on a branch"
        axes = self._axes_after_equation(eqn, [value.axes for value in values])

        def branch(closed: Any) -> Callable[[list[Array]], list[Array]]:
            def run(arrays: list[Array]) -> list[Array]:
                args = [Value(x, value.axes) for x, value in zip(arrays, rest, strict=True)]
                return self._spread_all(self.run(*opened(closed), args), axes)

            return run

        branches = [branch(closed) for closed in eqn.params["branches"]]
        arrays = lax.switch(which.array, branches, [value.array for value in rest])
        return [Value(x, own) for x, own in zip(arrays, axes, strict=True)]


def _variables(eqn: JaxprEqn) -> set[Var]:
    """Return the inputs of an equation that are variables."""
    return {atom for atom in eqn.invars if isinstance(atom, Var)}


def _used(jaxpr: Jaxpr, results: set[Var]) -> list[JaxprEqn]:
    """Return the equations of a function that its results depend on, in order."""
    needed, eqns = set(results), []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed |= _variables(eqn)
            eqns.append(eqn)
    return eqns[::-1]


def _input_axes(eqn: JaxprEqn, known: dict[Var, Value], others: Axes) -> list[Axes]:
    """Return the axes of an equation's inputs; variables that are not in `known` have `others`."""
    return [
        () if isinstance(atom, Literal) else known[atom].axes if atom in known else others
        for atom in eqn.invars
    ]


def _local_axes(eqn: JaxprEqn, known: dict[Var, Value]) -> Axes:
    """Return the axes of the results of an equation without collectives, from its known inputs."""
    return ordered(indices(eqn).union(*(known[x].axes for x in _variables(eqn) if x in known)))


def _split_sums(
    segment: list[JaxprEqn], known: dict[Var, Value]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Split additions of two known f32 arrays off a segment, if they are the segment's results.

    These add a microbatch's gradients to the gradient sum.  In a branch, the new sum would need
    memory beside the old one.  An addition has the same bits wherever it is compiled.  bf16
    gradients are converted to f32 in both parts, so that none is stored in f32.

    For example, with the known arrays `total` (f32) and `gradient` (bf16), this segment has both
    parts, and the conversion is in both:

        wide = convert(gradient)           rest, sums
        norm = reduce_sum(wide * wide)     rest
        new = add(total, wide)             sums

    Returns:
      The other equations, and the additions with the conversions that they need.
    """
    summed = {*known}  # the known arrays, and their sums
    for eqn in segment:
        if _is_sum(eqn) and _variables(eqn) <= summed:
            summed.update(eqn.outvars)
    used_by_rest: set[Var] = set()
    rest, sums = [], []  # in reverse order
    for eqn in reversed(segment):
        if eqn.outvars[0] in summed and eqn.outvars[0] not in used_by_rest:
            sums.append(eqn)
        else:
            rest.append(eqn)
            used_by_rest |= _variables(eqn)
    used_by_sums: set[Var] = set().union(*map(_variables, sums))
    for eqn in rest:
        if eqn.outvars[0] in used_by_sums:
            sums.append(eqn)
            used_by_sums |= _variables(eqn)
    return rest[::-1], sums[::-1]


def _is_sum(eqn: JaxprEqn) -> bool:
    """Return whether an equation adds two f32 arrays, or is exact: a change of type or to f32."""
    name, arrays = eqn.primitive.name, [*eqn.invars, *eqn.outvars]
    if not all(isinstance(x, Var) for x in arrays):
        return False
    dtypes = [x.aval.dtype for x in arrays]
    if name == "convert_element_type":
        return dtypes == [jnp.bfloat16, jnp.float32]
    if set(dtypes) != {jnp.dtype(jnp.float32)} or len({x.aval.shape for x in arrays}) > 1:
        return False
    return name in ("add", "add_any", *TYPES)


def _taken(value: Value, own: dict[str, Array]) -> Any:
    """Return a value on the virtual device with the index `own` among those of this device."""
    x = value.array
    for axis in value.axes:
        x = lax.dynamic_index_in_dim(x, own[axis], 0, keepdims=False)
    return x


# Arrays of PRNG keys are stored as arrays of integers.


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _stored(x: Any, dtype: Any) -> Array:
    return jax.random.key_data(x) if _is_key(dtype) else jnp.asarray(x, dtype)


def _restored(x: Array, dtype: Any) -> Array:
    return jax.random.wrap_key_data(x, impl=prng_name(dtype)) if _is_key(dtype) else x


def _zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    if _is_key(dtype):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = data.shape, data.dtype
    return jnp.zeros(shape, dtype)
