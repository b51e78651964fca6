"""Calls as values: their division among hosts, and the assembly of the results."""

import pickle
import random
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from mesh_transformer.calls import (
    MICROBATCH_ROWS,
    ROW_KEYS,
    ROW_NUMBERS,
    ROWS,
    Call,
    joined,
    split,
)
from mesh_transformer.util import HostError


class Pair(NamedTuple):
    one_B: np.ndarray
    other_BN: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Whole(Call[dict[str, Any]]):
    """A call with a value for each row."""

    batch: dict[str, np.ndarray] = field(metadata=ROWS)
    allowed: dict[int, int] | None = field(metadata=ROW_KEYS)
    same: int
    returns_rows: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Some(Call[Pair]):
    """A call with values for some rows of a batch."""

    rows: np.ndarray = field(metadata=ROW_NUMBERS)
    pair: Pair = field(metadata=ROWS)
    allowed: dict[int, int] | None = field(metadata=ROW_KEYS)
    returns_rows: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Stacked(Call[None]):
    """A call with arrays whose rows are along the second axis."""

    batch: dict[str, np.ndarray] | None = field(metadata=MICROBATCH_ROWS)


@dataclass(frozen=True)
class Question(Call[str]):
    """A call without rows."""

    text: str


def hosts_of(rng: random.Random) -> tuple[int, list[list[int]]]:
    """Return a number of replicas, and those of each host: several, or one that hosts share."""
    dp, each = rng.choice([(1, 1), (2, 1), (4, 2), (6, 3), (2, 2)])
    replicas = [list(range(begin, begin + each)) for begin in range(0, dp, each)]
    return dp, [own for own in replicas for _ in range(rng.choice([1, 2]) if each == 1 else 1)]


@pytest.mark.parametrize("seed", range(20))
def test_hosts_get_their_rows_and_their_results_are_joined(seed):
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    dp, hosts = hosts_of(rng)
    count, size = rng.randint(1, 9), rng.randint(1, 3)
    allowed = rng.choice([None, {}, {row: -row for row in range(count) if rng.random() < 0.5}])
    whole = Whole({"x": numbers.normal(size=(count, 2)), "y": np.arange(count)}, allowed, 3)
    calls, places = split(whole, hosts)
    each = {len(own.batch["x"]) / len(of) for own, of in zip(calls, hosts, strict=True)}
    assert each == {-(-count // dp)}
    for own, rows in zip(calls, places, strict=True):
        assert own.same == 3
        parts = [allowed[row] for row in rows.tolist() if row in allowed] if allowed else []
        assert (own.allowed is None) == (allowed is None)
        assert list((own.allowed or {}).values()) == parts
    results = joined(whole, [pickle.loads(pickle.dumps(own)).batch for own in calls], places)
    for name, rows in whole.batch.items():
        np.testing.assert_array_equal(results[name], rows)

    rows = numbers.permutation(dp * size)[: rng.randint(1, dp * size)]
    pair = Pair(numbers.normal(size=len(rows)), rng.choice([None, rows[:, None] + [0, 1]]))
    some = Some(rows, pair, {int(row): int(row) for row in rows[::2]})
    calls, places = split(some, hosts, size)
    for own, replicas in zip(calls, hosts, strict=True):
        globally = np.concatenate([np.arange(r * size, (r + 1) * size) for r in replicas])
        assert {int(globally[place]): row for place, row in (own.allowed or {}).items()} == {
            row: row for row in some.allowed if row in globally
        }
        assert sorted(globally[own.rows]) == sorted(set(rows) & set(globally))
    result = joined(some, [own.pair for own in calls], places)
    np.testing.assert_array_equal(result.one_B, pair.one_B)
    if pair.other_BN is not None:
        np.testing.assert_array_equal(result.other_BN, pair.other_BN)

    stacked = Stacked({"x": numbers.normal(size=(2, dp * size, 3)), "y": np.ones((1, dp * size))})
    calls, places = split(stacked, hosts)
    for own, rows in zip(calls, places, strict=True):
        assert len(rows) == size * len(hosts[0])
        assert stacked.batch is not None
        assert own.batch is not None
        for name, x in stacked.batch.items():
            np.testing.assert_array_equal(own.batch[name], x[:, rows])
    assert [own.batch for own in split(Stacked(None), hosts)[0]] == [None] * len(hosts)

    question = Question("when?")
    calls, places = split(question, hosts)
    assert calls == [question] * len(hosts)
    assert joined(question, ["now"] * len(hosts), places) == "now"


def test_hosts_that_share_a_row_must_agree():
    call = Whole({"x": np.zeros(3)}, None, 0)
    _, places = split(call, [[0], [0]])
    values = {"x": np.array([1.0, 2, 3])}
    with pytest.raises(HostError, match="host 1 and an earlier host returned different values"):
        joined(call, [values, {"x": values["x"] + 1}], places)
