"""Analysis of a compiled program's HLO text: collectives in each loop, and memory traffic.

Memory traffic is an estimate.  Each fusion, and each operation outside a fusion, is assumed to read
its operands once and to write its results once.  If an operation reads or updates only a slice of
an array, only this slice counts.  Arrays in on-chip memory do not count.

Each line of HLO is parsed once, as an `Operation`.  For example, these lines yield:

    %p = f32[8,4]{1,0} parameter(0)
        An array of 128 bytes, which moves nothing itself.
    %s = f32[1,4]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,4}
        Reads the slice, 16 bytes of %p, and writes as many.
    %f = f32[1,4]{1,0} fusion(%p, %s), kind=kLoop, calls=%fused
        Reads of %p and %s what the operations of %fused use; writes what its ROOT gives, 16 bytes.
    %r = f32[1,4]{1,0} all-reduce(%f), replica_groups={{0,1}}, to_apply=%add
        A `Collective` of one f32 array of this shape in a group of two devices.
    %w = (s32[], f32[8,4]{1,0}) while(%t), condition=%c, body=%b, ..."known_trip_count":{"n":"3"}
        A `Loop` with 3 iterations, whose collectives and memory traffic are those of %b.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mesh_transformer.performance.groups import Groups, groups_of

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
# The end of the kinds of collectives over the network of the data centre, such as
# "all-reduce between slices".
BETWEEN_SLICES = " between slices"
BACKWARD = "transpose(jvp"  # part of JAX's names of the operations of a backward pass
# Kinds whose -start operation returns a tuple of its operands followed by its results.
WITH_OPERANDS = ("all-gather", "collective-permute")
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="([A-Z_]+)"')
_LINE = re.compile(r"^\s*(ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[sfu]\d+|bf16)\[([\d,]*)\](\{[^}]*\})?")
# The layout of an array that is not in device memory names its memory space, such as S(1).
_OTHER_MEMORY = re.compile(r"S\([1-9]")
_CYCLES, UNKNOWN = re.compile(r'"estimated_cycles":"?(\d+)'), 2**62
_BYTES = {"pred": 1, "bf16": 2}


@dataclass(frozen=True)
class Collective:
    """One array exchanged by a collective operation, such as an all-reduce.

    A collective operation on several arrays is represented by one `Collective` per array.

    Attributes:
      kind: one of `KINDS`, or one of them and `BETWEEN_SLICES`.
      shape, dtype: shape and dtype of the result on one device; between slices, of what the device
        contributes.
      groups: the sets of devices that exchange data with each other (see `groups_of`); empty if all
        devices are one group.
      where: JAX's name of the operation (`op_name`).
      chain: empty, unless the compiler has split the collective into several operations.  Each of
        them then has a `Collective`, and those of the same array have the same `chain`.
      beside_loop: whether a loop runs between the collective's start and its end.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    groups: Groups
    where: str
    chain: str = ""
    beside_loop: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the result on one device."""
        return int(math.prod(self.shape) * width(self.dtype))

    @property
    def is_alone(self) -> bool:
        """Whether every group contains only one device, so that no data is exchanged."""
        return bool(self.groups) and all(len(group) == 1 for group in self.groups)


def width(dtype: str) -> float:
    """Return the bytes per element of a dtype, given the dtype's HLO name, such as "bf16".

    Elements of 4 bits are taken to be packed in pairs, as the compilers for CPUs and TPUs do.
    """
    return _BYTES.get(dtype) or int(dtype[1:]) / 8


def computations(text: str) -> dict[str, list[str]]:
    """Split a program's HLO text into computations, which are HLO's functions.

    Returns:
      A dict from the name of each computation to its lines.  The name of the entry computation is
      "ENTRY".
    """
    result: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%(\S+) .*\{$", line)
        if header:
            lines = result.setdefault("ENTRY" if header[1] else header[2], [])
        else:
            lines.append(line)
    return result


@dataclass(frozen=True)
class Operation:
    """One operation, which is one line of a program's HLO text.

    The result of an operation may consist of several arrays.

    Attributes:
      kind: HLO's name for the kind of operation, such as "fusion".
      bytes: total size of the result's arrays that are in device memory.
      whole: total size in bytes of all the result's arrays, in any memory.
      operands: names of the operations whose results this operation reads.
      called: name of the computation that this operation calls; None if it calls none.
      body: name of the computation that a `while` loop repeats; None for all other operations.
      root: whether this is the ROOT operation, which gives the result of its computation.
      type: HLO's type of the result.
      rest: HLO's text after the "(" of the operands.
    """

    name: str
    kind: str
    bytes: int
    whole: int
    operands: tuple[str, ...]
    called: str | None
    body: str | None
    root: bool
    type: str
    rest: str

    @property
    def is_piece(self) -> bool:
        """Whether this is one of several operations into which the compiler has split a collective.

        `Program` counts the memory traffic of such a collective separately.
        """
        return self.kind in KINDS and "chain_id=" in self.rest

    @property
    def names_operands(self) -> bool:
        """Whether this is a -start operation whose result is a tuple that begins with its operands.

        For example, an all-gather-start returns a tuple of its operands and its results.
        """
        kind = self.kind.removesuffix("-start")
        return kind != self.kind and (kind in WITH_OPERANDS or self.type.startswith("(("))


def _sizes(text: str) -> tuple[int, int]:
    """Return the bytes of an HLO type's arrays that are in device memory, and those of all."""
    in_device_memory = total = 0
    for dtype, shape, layout in _ARRAY.findall(text):
        size = int(width(dtype) * math.prod(_shape(shape)))
        total += size
        in_device_memory += 0 if _OTHER_MEMORY.search(layout) else size
    return in_device_memory, total


def _operation(line: str) -> Operation | None:
    """Parse a line of HLO; return None if the line is not an operation."""
    match = _LINE.match(line)
    if match is None:
        return None
    root, name, result, kind, rest = match.groups()
    called = re.search(r"(?:calls|to_apply)=%([^\s,)]+)", rest)
    body = re.search(r"body=%([^\s,]+)", rest) if kind == "while" else None
    if kind == "fusion" and "output_to_operand_aliasing" in rest and "calls=%copy_fusion" in rest:
        kind, called = "copy", None  # TPU7x's compiler puts each copy in place into a fusion
    operands = tuple(re.findall(r"%([^\s,()]+)", rest.partition(")")[0]))
    in_device_memory, total = _sizes(result)
    return Operation(
        name=name,
        kind=kind,
        bytes=in_device_memory,
        whole=total,
        operands=operands,
        called=called and called[1],
        body=body and body[1],
        root=root is not None,
        type=result,
        rest=rest,
    )


Operations = dict[str, Operation]  # those of one computation, by name


def _parse_operations(text: str) -> dict[str, Operations]:
    """Return the operations of each computation of a program, by its name; see `computations`."""
    return {
        name: {operation.name: operation for operation in map(_operation, lines) if operation}
        for name, lines in computations(text).items()
    }


def _collectives_of(operation: Operation) -> list[Collective]:
    """Return one `Collective` per array that an operation transfers; none for other operations."""
    kind = operation.kind.removesuffix("-start")
    arrays = [(dtype, _shape(shape)) for dtype, shape, _ in _ARRAY.findall(operation.type)]
    between = _BETWEEN_SLICES.search(operation.rest) if kind == "send" else None
    if between:
        dtype, shape = arrays[0]  # the others are bookkeeping
        kind = between[1].lower().replace("_", "-") + BETWEEN_SLICES
        return [Collective(kind, shape, dtype, frozenset(), "")]
    if kind not in KINDS:
        return []
    name = re.search(r'op_name="([^"]*)"', operation.rest)
    where, groups = name[1] if name else "", groups_of(operation.rest)
    chain = re.search(r'chain_id="(\w+)"', operation.rest)
    if kind != operation.kind and kind in WITH_OPERANDS:
        arrays = [array for array in arrays if array != ("u32", ())]  # drop context scalars
        arrays = arrays[len(arrays) // 2 :]
    return [
        Collective(kind, shape, dtype, groups, where, f"{chain[1]}.{index}" if chain else "")
        for index, (dtype, shape) in enumerate(arrays)
    ]


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


@dataclass
class Loop:
    """A loop of a program.

    Attributes:
      trips: number of iterations; None if the HLO text does not give it.
      collectives: collectives that one iteration runs, without those in nested loops.
      loops: the loops that are nested directly in this loop.
      is_backward: whether it has operations of a backward pass, by their names.  Not all of its
        collectives have one.
    """

    trips: int | None
    collectives: list[Collective]
    loops: list["Loop"]
    is_backward: bool = False

    def runs(self) -> Iterator[tuple[Collective, int]]:
        """Yield each collective, and how many times it runs in one iteration of this loop.

        Collectives in nested loops are included.  A nested loop with an unknown number of
        iterations counts as one iteration.
        """
        for collective in self.collectives:
            yield collective, 1
        for loop in self.loops:
            for collective, times in loop.runs():
                yield collective, times * (loop.trips or 1)

    def all(self) -> list["Loop"]:
        """Return this loop and all loops nested in it."""
        return [self, *(inner for loop in self.loops for inner in loop.all())]


def parse(text: str) -> Loop:
    """Return the loops and collectives of a compiled program, given its HLO text.

    Returns:
      A `Loop` with one iteration that represents the whole program.  The program's own loops are
      nested in it.
    """
    return _loop(_parse_operations(text), "ENTRY", 1)


def _loop(computations: dict[str, Operations], name: str, trips: int | None) -> Loop:
    """Return the computation `name` as the body of a loop with `trips` iterations.

    Collectives and loops in computations that the body calls are included.
    """
    names = (operation.rest for operation in computations[name].values())
    loop = Loop(trips, [], [], is_backward=any(BACKWARD in rest for rest in names))
    beside = _beside_loops(computations[name])
    for operation in computations[name].values():
        if operation.body:
            trips = _trip_count(computations, operation)
            loop.loops.append(_loop(computations, operation.body, trips))
            continue
        own = _collectives_of(operation)
        if operation.name in beside:
            own = [replace(one, beside_loop=True) for one in own]
        loop.collectives += own
        if operation.called and not operation.kind.endswith("-done"):  # its start counts
            inner = _loop(computations, operation.called, 1)
            loop.collectives += inner.collectives
            loop.loops += inner.loops
    # Of the operations into which the compiler has split a collective, only the first one counts.
    # Those after it may be in a loop with which the collective overlaps.
    first = {one.chain: one for one in reversed(loop.collectives) if one.chain}
    for inner in loop.all():
        inner.collectives = [one for one in inner.collectives if one is first.get(one.chain, one)]
    return loop


def _beside_loops(operations: Operations) -> set[str]:
    """Return the names of the -start operations between which and their -done a loop runs."""
    running: set[str] = set()
    beside: set[str] = set()
    for operation in operations.values():
        if operation.kind.endswith("-start"):
            running.add(operation.name)
        elif operation.kind.endswith("-done"):
            running.difference_update(operation.operands)
        elif operation.body:
            beside |= running
    return beside


def _trip_count(computations: dict[str, Operations], loop: Operation) -> int | None:
    """Return the number of iterations of a `while` loop; None if it is unknown.

    If its line does not state the number, but the loop's condition contains exactly one integer
    constant, the result is this constant.
    """
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known:
        return int(known[1])
    condition = re.search(r"condition=%([^\s,]+)", loop.rest)
    operations = computations.get(condition[1], {}) if condition else {}
    constants = {
        int(operation.rest.partition(")")[0])
        for operation in operations.values()
        if operation.kind == "constant" and re.match(r"s32\[\]", operation.type)
    }
    return constants.pop() if len(constants) == 1 else None


# Operations that count as no memory traffic: most of them only name or order existing arrays.
FREE = (
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "iota",
    "conditional",
    "add-dependency",
    "opt-barrier",
)
# Operations that move no data inside a fusion.  There, the result counts as the same array as the
# operand.
RENAMES = ("bitcast", "reshape", "copy")
SLICES = ("dynamic-slice", "slice", "gather")
# Operations that update their first operand in place.  The number is the index of the operand that
# holds the new values.
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


def planned_memory(compiled: Any) -> int:
    """Return the bytes that a program needs on one device, according to the compiler.

    This is the sum of arguments, outputs and temporaries.  Memory that an output shares with a
    donated argument counts once.
    """
    analysis = compiled.memory_analysis()
    # `peak_memory_in_bytes` is not used, because it omits the temporaries on CPUs.
    arguments_and_outputs = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    return arguments_and_outputs - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes


class Program:
    """Memory traffic of a compiled program, estimated from its HLO text.

    An operation reads its operands and writes its results.  If it reads or updates only a slice of
    an array, only the slice counts; for a fusion, `_Fusion` finds these slices.  Loops count as
    often as they repeat.

    The compiler splits some collectives into several operations, which overlap with other work.
    The memory traffic of such a collective is counted as if it were one operation.

    Args:
      text: the program's HLO text, as returned by `as_text()` of the compiled function.
    """

    def __init__(self, text: str):
        self._computations = _parse_operations(text)
        runs = _loop(self._computations, "ENTRY", 1).runs()
        self._by_split_collectives = sum(
            2 * times * collective.bytes for collective, times in runs if collective.chain
        )

    def moved(self) -> int:
        """Return the bytes that one run of the program reads and writes in one device's memory."""
        return self._moved_in("ENTRY") + self._by_split_collectives

    def bytes_moved_per_iteration(self, unknown_trips: int = 1) -> int:
        """Return the bytes that one iteration of the program's main loop reads and writes.

        The main loop is the top-level loop with the most memory traffic per iteration.  The result
        also includes every collective that the compiler has split into several operations, even a
        collective outside the main loop.

        Args:
          unknown_trips: number of iterations of inner loops, where the HLO text does not give it.
        """
        operations = self._computations["ENTRY"].values()
        bodies = [self._moved_in(loop.body, unknown_trips) for loop in operations if loop.body]
        return max(bodies, default=0) + self._by_split_collectives

    def cycles(self) -> dict[str, int]:
        """Return the cycles of all operations of each kind and type of result, in all runs.

        Only the compilers for TPUs estimate cycles; those of collectives are unknown to them.
        """
        total: dict[str, int] = {}
        for operation, own in self._cycles_in("ENTRY", 1):
            name = f"{operation.kind} {re.sub(r'{[^}]*}', '', operation.type)}"
            total[name] = total.get(name, 0) + own
        return total

    def _cycles_in(self, name: str, times: int) -> Iterator[tuple[Operation, int]]:
        for operation in self._computations[name].values():
            if operation.body:
                trips = _trip_count(self._computations, operation) or 1
                yield from self._cycles_in(operation.body, trips * times)
            elif operation.kind == "call" and operation.called:
                yield from self._cycles_in(operation.called, times)
            elif (match := _CYCLES.search(operation.rest)) and int(match[1]) < UNKNOWN:
                yield operation, int(match[1]) * times

    def _moved_in(self, name: str, unknown_trips: int = 1) -> int:
        """Return the bytes that the computation `name` reads and writes, including its loops.

        Collectives that the compiler has split into several operations are left out.
        """
        total = 0
        operations = self._computations[name]
        for operation in operations.values():
            if operation.body:
                trips = _trip_count(self._computations, operation) or unknown_trips
                total += trips * self._moved_in(operation.body, unknown_trips)
            elif operation.kind == "call" and operation.called:
                total += self._moved_in(operation.called, unknown_trips)
            elif operation.kind not in FREE and not operation.kind.endswith("-done"):
                operands = [operations[name] for name in operation.operands if name in operations]
                total += self._moved_by(operation, operands)
        return total

    def _moved_by(self, operation: Operation, operands: list[Operation]) -> int:
        """Return the bytes that an operation reads and writes."""
        if operation.kind in SLICES:
            return 2 * operation.bytes
        if operation.kind in UPDATES:
            reads_target = _reads_target(self._computations, operation)
            return (2 + reads_target) * operands[UPDATES[operation.kind]].bytes
        if operation.kind in ("copy-start", "slice-start"):
            source = operands[0]
            moved = operation.whole - source.whole  # the result is a tuple of target and source
            return (moved if source.bytes else 0) + max(operation.bytes - source.bytes, 0)
        read = [operand.bytes for operand in operands]
        written = operation.bytes - (sum(read) if operation.names_operands else 0)
        if operation.kind in ("fusion", "async-start") and operation.called:
            fusion = _Fusion(self._computations, operation.called)
            read = [min(size, fusion.bytes_read(index)) for index, size in enumerate(read)]
            written = min(written, fusion.bytes_written())
        return sum(read) + written


class _Fusion:
    """The computation of a fusion: what it reads of its parameters, and writes of its results.

    Between its operations the data stays on the chip.  A fusion with a piece of a split collective
    also returns the arrays of that collective as they are, which moves nothing.
    """

    def __init__(self, computations: dict[str, Operations], name: str):
        self._computations = computations
        self._operations = computations[name]
        self._has_piece = any(one.is_piece for one in self._operations.values())

    def bytes_read(self, index: int) -> int:
        """Return the bytes that the fusion reads from its parameter `index`."""
        operations = self._operations.values()
        parameters = (one for one in operations if one.kind == "parameter")
        return self._used(next(one for one in parameters if one.rest.startswith(f"{index})")))

    def bytes_written(self) -> int:
        """Return the bytes that the fusion writes."""
        root = next(operation for operation in self._operations.values() if operation.root)
        if root.kind != "tuple":
            return self._written(root)
        return sum(self._written(self._operations[name]) for name in root.operands)

    def _used(self, value: Operation) -> int:
        """Return how many bytes of an operation's result the other operations read."""
        total = 0
        for user in self._operations.values():
            if value.name not in user.operands or user.is_piece:
                continue
            if self._has_piece and user.kind == "tuple":
                continue
            is_first = user.operands[0] == value.name
            if user.kind in RENAMES and not user.root:
                total += self._used(user)
            elif user.kind in SLICES and is_first:
                total += user.whole
            elif user.kind in UPDATES and is_first:
                if _reads_target(self._computations, user):
                    total += self._update(user).whole
            elif user.kind == "fusion" and user.called:
                inner = _Fusion(self._computations, user.called)
                total += inner.bytes_read(user.operands.index(value.name))
            else:
                return value.whole
        return min(total, value.whole)

    def _written(self, result: Operation) -> int:
        """Return the bytes that are written for a result: of an array updated in place, the update.

        If the fusion itself creates the array, it also writes the whole array once.
        """
        result = self._origin(result)
        if result.is_piece or (self._has_piece and result.kind == "parameter"):
            return 0
        if result.kind in UPDATES:
            target = self._origin(self._operations[result.operands[0]])
            created = 0 if target.kind == "parameter" else self._written(target)
            return created + self._update(result).whole
        if result.kind == "fusion" and result.called:
            return _Fusion(self._computations, result.called).bytes_written()
        return result.whole

    def _update(self, operation: Operation) -> Operation:
        """Return the operation that gives the new values of an update in place."""
        return self._operations[operation.operands[UPDATES[operation.kind]]]

    def _origin(self, operation: Operation) -> Operation:
        """Return the operation that created a result's data, which `RENAMES` do not create."""
        while operation.kind in RENAMES and operation.operands[0] in self._operations:
            operation = self._operations[operation.operands[0]]
        return operation


def _reads_target(computations: dict[str, Operations], operation: Operation) -> bool:
    """Whether an update in place reads the old values before it overwrites them.

    For example, a scatter-add reads them.
    """
    if operation.kind != "scatter" or operation.called is None:
        return False
    combiner = computations[operation.called].values()
    return next(one for one in combiner if one.root).kind != "parameter"
