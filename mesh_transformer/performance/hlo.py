"""What a compiled program's text says: which collectives it runs, how often, in which loop."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

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
            found.loops.append(_loop(computations, body[1], trips(computations, line)))
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


def trips(computations: dict[str, list[str]], line: str) -> int | None:
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
