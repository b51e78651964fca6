"""How many bytes a compiled program takes of a device's memory, and by its HLO reads and writes.

Every operation that is not inside another reads its operands once and writes its results once.
Of what is only sliced or updated in part that part alone counts; what the compiler keeps in
on-chip memory does not.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from mesh_transformer.performance import hlo

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
_ARRAY = re.compile(r"\b(pred|[sfu]\d+|bf16)\[([\d,]*)\](\{[^}]*\})?")
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
        return self.kind in hlo.KINDS and "chain_id=" in self.line

    @property
    def names_operands(self) -> bool:
        """Whether its result is a tuple that begins with its operands, as most of a -start's."""
        whole = self.kind.removesuffix("-start")
        return whole != self.kind and (whole in hlo.WITH_OPERANDS or " = ((" in self.line)


def _sizes(text: str) -> tuple[int, int]:
    """Bytes of the arrays of a type that are in the device's memory, and of all of them."""
    inside = total = 0
    for dtype, shape, layout in _ARRAY.findall(text):
        size = hlo.width(dtype) * math.prod(int(n) for n in shape.split(",") if n)
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
        self._lines = hlo.computations(text)
        parsed = {name: map(_operation, lines) for name, lines in self._lines.items()}
        self._inside = {
            name: {each.name: each for each in every if each is not None}
            for name, every in parsed.items()
        }

    def moved(self) -> int:
        """Bytes that one run reads from and writes to the memory of a device."""
        return self._moved_in("ENTRY") + self._pieces()

    def _pieces(self) -> int:
        runs = hlo.parse(self._text).runs()
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
                trips = hlo.trips(self._lines, each.line) or 1
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
