"""What a compiled program's HLO says: its collectives by loop, and the bytes it moves.

For the bytes, every operation that is not inside another reads its operands once and writes its
results once.  Of what is only sliced or updated in part that part alone counts; what the compiler
keeps in on-chip memory does not.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
WITH_OPERANDS = ("all-gather", "collective-permute")  # their -start tells these, then the results
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(?:-start)?\((.*)$")
_ARRAY = re.compile(r"\b(pred|[sfu]\d+|bf16)\[([\d,]*)\]")
_BYTES = {"pred": 1, "bf16": 2}

Groups = frozenset[frozenset[int]]


@dataclass(frozen=True)
class Collective:
    """One array that devices exchange: a combined collective counts once for each.

    Attributes:
      shape, dtype: of the result on one device.
      groups: which devices take part together; empty where all do.
      where: JAX's name of the operation.
      chain: names an array of a collective that runs beside other work, in pieces; empty where
        it is whole.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    groups: Groups
    where: str
    chain: str = ""

    @property
    def bytes(self) -> int:
        """Of the result on one device."""
        return math.prod(self.shape) * width(self.dtype)

    @property
    def is_alone(self) -> bool:
        """Whether every device talks to itself alone."""
        return bool(self.groups) and all(len(group) == 1 for group in self.groups)


def width(dtype: str) -> int:
    """Bytes of one number of a type as the text names it."""
    return _BYTES.get(dtype) or max(int(dtype[1:]) // 8, 1)


def groups_of(text: str) -> Groups:
    """`replica_groups` in any of its three notations; empty where there are none."""
    listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text)
    if listed:
        rows = [map(int, row.split(",")) for row in re.findall(r"\{([\d,]+)\}", listed[1])]
        return frozenset(frozenset(row) for row in rows)
    named = re.search(r"replica_groups=mesh\[([^]]*)\] *\{([^}]*)\}", text)
    if named:
        sizes = {axis: int(n) for axis, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        over = [axis for axis in sizes if f"'{axis}'" in named[2]]
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        ids = np.moveaxis(ids, [list(sizes).index(axis) for axis in over], range(-len(over), 0))
        rows = ids.reshape(-1, math.prod(sizes[axis] for axis in over))
        return frozenset(frozenset(map(int, row)) for row in rows)
    found = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if found is None:
        return frozenset()
    shape, source, order = ([int(n) for n in (g or "").split(",") if n] for g in found.groups())
    ids = np.arange(math.prod(source)).reshape(source)
    ids = (ids.transpose(order) if order else ids).reshape(shape)
    return frozenset(frozenset(map(int, row)) for row in ids)


def _collectives_of(line: str) -> list[Collective]:
    found = _COLLECTIVE.search(line)
    if found is None:
        return []
    result, kind, rest = found.groups()
    name = re.search(r'op_name="([^"]*)"', rest)
    where, groups = name[1] if name else "", groups_of(rest)
    chain = re.search(r'chain_id="(\w+)"', rest)
    arrays = _ARRAY.findall(result)
    if f" {kind}-start(" in line and kind in WITH_OPERANDS:
        arrays = [each for each in arrays if each != ("u32", "")]  # contexts
        arrays = arrays[len(arrays) // 2 :]
    return [
        Collective(
            kind,
            tuple(int(n) for n in shape.split(",") if n),
            dtype,
            groups,
            where,
            f"{chain[1]}.{place}" if chain else "",
        )
        for place, (dtype, shape) in enumerate(arrays)
    ]


@dataclass
class Loop:
    """A loop of a program.

    Attributes:
      trips: how often its body runs; None where the text does not say.
      collectives: those that one run of the body does itself.
      loops: those within it.
    """

    trips: int | None
    collectives: list[Collective]
    loops: list["Loop"]

    def runs(self) -> Iterator[tuple[Collective, int]]:
        """Every collective in here, and how often one run of this loop's body runs it.

        A loop of which the text does not say how often it runs counts once.
        """
        for each in self.collectives:
            yield each, 1
        for loop in self.loops:
            for each, times in loop.runs():
                yield each, times * (loop.trips or 1)

    def all(self) -> list["Loop"]:
        """This one and all within it."""
        return [self, *(inner for loop in self.loops for inner in loop.all())]


def parse(text: str) -> Loop:
    """A compiled program (its HLO) as a loop that runs once."""
    return _loop(computations(text), "ENTRY", 1)


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation of a program, by its name; the whole's is ENTRY."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%(\S+) .*\{$", line)
        if header:
            lines = found.setdefault("ENTRY" if header[1] else header[2], [])
        else:
            lines.append(line)
    return found


def _loop(computations: dict[str, list[str]], name: str, times: int | None) -> Loop:
    found = Loop(times, [], [])
    for line in computations[name]:
        body = re.search(r" while\(.*body=%([^\s,]+)", line)
        if body:
            found.loops.append(_loop(computations, body[1], trip_count(computations, line)))
            continue
        found.collectives += _collectives_of(line)
        for called in re.findall(r"(?:calls|to_apply)=%([^\s,)]+)", line):
            inner = _loop(computations, called, 1)
            found.collectives += inner.collectives
            found.loops += inner.loops
    found.collectives = _joined(found.collectives)
    return found


def _joined(collectives: list[Collective]) -> list[Collective]:
    """The same, each that runs in pieces once."""
    chains: set[str] = set()
    joined = []
    for each in collectives:
        if each.chain not in chains:
            joined.append(each)
        chains |= {each.chain} - {""}
    return joined


def trip_count(computations: dict[str, list[str]], line: str) -> int | None:
    """How often a loop runs: as its line says, or else the one number that it counts up to."""
    told = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    if told:
        return int(told[1])
    condition = re.search(r"condition=%([^\s,]+)", line)
    lines = computations.get(condition[1], []) if condition else []
    numbers = {
        int(n) for each in lines for n in re.findall(r"= s32\[\]\S* constant\((\d+)\)", each)
    }
    return numbers.pop() if len(numbers) == 1 else None


# These move nothing: they name what is there, or are the ends of what a -start has moved.
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
RENAMES = ("bitcast", "reshape", "copy")  # inside a fusion: the same array under another name
SLICES = ("dynamic-slice", "slice", "gather")
# What writes into its first operand in place, and which operand it writes.
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_LINE = re.compile(r"^\s*(ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_LAID_OUT = re.compile(r"\b(pred|[sfu]\d+|bf16)\[([\d,]*)\](\{[^}]*\})?")
_ELSEWHERE = re.compile(r"S\([1-9]")  # a layout's memory space; none is the device's memory


def planned_memory(compiled: Any) -> int:
    """Bytes of one device that a program needs, by the compiler: all parts, what is reused once."""
    planned = compiled.memory_analysis()
    # Not `peak_memory_in_bytes`, which leaves the temporaries out on CPUs.
    held = planned.argument_size_in_bytes + planned.output_size_in_bytes
    return held - planned.alias_size_in_bytes + planned.temp_size_in_bytes


@dataclass(frozen=True)
class Operation:
    """One line of a program: `bytes` is what its result takes of the device's memory."""

    name: str
    kind: str
    bytes: int
    whole: int  # the same, wherever it is
    operands: tuple[str, ...]
    called: str | None
    root: bool
    line: str

    @property
    def is_piece(self) -> bool:
        """Whether it is part of a collective, which counts as a whole elsewhere."""
        return self.kind in KINDS and "chain_id=" in self.line

    @property
    def names_operands(self) -> bool:
        """Whether its result is a tuple that begins with its operands, as most of a -start's."""
        whole = self.kind.removesuffix("-start")
        return whole != self.kind and (whole in WITH_OPERANDS or " = ((" in self.line)


def _sizes(text: str) -> tuple[int, int]:
    """Bytes of the arrays of a type that are in the device's memory, and of all of them."""
    inside = total = 0
    for dtype, shape, layout in _LAID_OUT.findall(text):
        size = width(dtype) * math.prod(int(n) for n in shape.split(",") if n)
        total += size
        inside += 0 if _ELSEWHERE.search(layout) else size
    return inside, total


def _operation(line: str) -> Operation | None:
    found = _LINE.match(line)
    if found is None:
        return None
    root, name, result, kind, rest = found.groups()
    called = re.search(r"(?:calls|to_apply)=%([^\s,)]+)", rest)
    operands = tuple(re.findall(r"%([^\s,()]+)", rest.partition(")")[0]))
    inside, total = _sizes(result)
    return Operation(
        name, kind, inside, total, operands, called and called[1], root is not None, line
    )


def _renamed(inside: dict[str, Operation], each: Operation) -> Operation:
    """What the array was before it got other names."""
    while each.kind in RENAMES and each.operands[0] in inside:
        each = inside[each.operands[0]]
    return each


class Program:
    """A compiled program's text, to be asked what it moves."""

    def __init__(self, text: str):
        self._text = text
        self._lines = computations(text)
        parsed = {name: map(_operation, lines) for name, lines in self._lines.items()}
        self._inside = {
            name: {each.name: each for each in every if each is not None}
            for name, every in parsed.items()
        }

    def moved(self) -> int:
        """Bytes that one run reads from and writes to the memory of a device."""
        return self._moved_in("ENTRY") + self._pieces()

    def _pieces(self) -> int:
        runs = parse(self._text).runs()
        return sum(2 * times * each.bytes for each, times in runs if each.chain)

    def moved_in_a_loop(self) -> int:
        """The same of one run of the body of the largest loop."""
        bodies = [
            self._moved_in(body[1])
            for each in self._inside["ENTRY"].values()
            if each.kind == "while" and (body := re.search(r"body=%([^\s,]+)", each.line))
        ]
        return max(bodies, default=0) + self._pieces()

    def _moved_in(self, name: str) -> int:
        total = 0
        for each in self._inside[name].values():
            body = re.search(r"body=%([^\s,]+)", each.line) if each.kind == "while" else None
            if body:
                trips = trip_count(self._lines, each.line) or 1
                total += trips * self._moved_in(body[1])
            elif each.kind == "call" and each.called:
                total += self._moved_in(each.called)
            elif each.kind not in FREE and not each.kind.endswith("-done"):
                total += self._moved_by(name, each)
        return total

    def _moved_by(self, name: str, each: Operation) -> int:
        around = self._inside[name]
        operands = [around[operand] for operand in each.operands if operand in around]
        if each.kind in SLICES:
            return 2 * each.bytes
        if each.kind in UPDATES:
            return (2 + self._combines(each)) * operands[UPDATES[each.kind]].bytes
        if each.kind in ("copy-start", "slice-start"):
            return self._started(each, operands)
        whole = sum(operand.bytes for operand in operands)
        written = each.bytes - (whole if each.names_operands else 0)
        if each.called is None or each.kind not in ("fusion", "async-start"):
            return whole + written
        read = sum(
            min(operand.bytes, self._read(each.called, index))
            for index, operand in enumerate(operands)
        )
        return read + min(written, self._written(each.called))

    @staticmethod
    def _started(each: Operation, operands: list[Operation]) -> int:
        target = _sizes(each.line.partition(" = ")[2].lstrip("( "))
        source = operands[0]
        moved = target[1] - source.whole  # the result names target and source
        return (moved if source.bytes else 0) + max(each.bytes - source.bytes, 0)

    def _read(self, name: str, index: int) -> int:
        """Bytes that a fused computation reads of its parameter of that number."""
        inside = self._inside[name]
        mark = f" parameter({index})"
        parameter = next(each for each in inside.values() if mark in each.line)
        return self._used(name, parameter)

    def _used(self, name: str, value: Operation) -> int:
        total = 0
        for user in self._inside[name].values():
            if value.name not in user.operands or user.is_piece:
                continue
            if user.kind in RENAMES and not user.root:
                total += self._used(name, user)
            elif user.kind in SLICES and user.operands[0] == value.name:
                total += user.whole
            elif user.kind in UPDATES and user.operands[0] == value.name:
                written = self._inside[name][user.operands[UPDATES[user.kind]]]
                total += written.whole if self._combines(user) else 0
            elif user.kind == "fusion" and user.called:
                total += self._read(user.called, user.operands.index(value.name))
            else:
                return value.whole
        return min(total, value.whole)

    def _written(self, name: str) -> int:
        """Bytes that a fused computation writes: of an array updated in place, the update."""
        inside = self._inside[name]
        root = next(each for each in inside.values() if each.root)
        ends = [inside[each] for each in root.operands] if root.kind == "tuple" else [root]
        return sum(self._result(inside, end) for end in ends)

    def _combines(self, each: Operation) -> bool:
        """Whether it reads what it writes over, as a scatter that adds does."""
        if each.kind != "scatter" or each.called is None:
            return False
        return (
            next(one for one in self._inside[each.called].values() if one.root).kind != "parameter"
        )

    def _result(self, inside: dict[str, Operation], end: Operation) -> int:
        end = _renamed(inside, end)
        if end.is_piece:
            return 0
        if end.kind in UPDATES:
            before = _renamed(inside, inside[end.operands[0]])
            written = inside[end.operands[UPDATES[end.kind]]].whole
            # What the fusion itself makes, and then writes into, is written as a whole.
            return written + (0 if before.kind == "parameter" else self._result(inside, before))
        if end.kind == "fusion" and end.called:
            return self._written(end.called)
        return end.whole
