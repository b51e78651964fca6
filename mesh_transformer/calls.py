"""`Call`: a request to a network as a value, which one process can send to others.

If several hosts (processes) hold a network's replicas, each of them has a part of the batch rows.
A call declares which of its fields hold batch rows, and whether its result does.  `split` divides
any call among hosts accordingly, and `joined` assembles their results.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
import numpy as np

from mesh_transformer.mesh.placement import gathered, process_rows

Result = TypeVar("Result")
AnyCall = TypeVar("AnyCall", bound="Call[Any]")

# Metadata of fields with a part for each batch row: a tree of arrays with one entry per row, the
# same with rows along the second axis, an array of row numbers, and a mapping whose keys are row
# numbers.  Such a field may be None.
ROWS, MICROBATCH_ROWS = {"rows": "entries"}, {"rows": "microbatches"}
ROW_NUMBERS, ROW_KEYS = {"rows": "numbers"}, {"rows": "keys"}


class Call(Generic[Result]):
    """A request to a network, with a result of type `Result`.  Subclasses are frozen dataclasses.

    Of a field with metadata such as `ROWS`, each host gets the part for its own rows.  Other fields
    have the same value on all hosts.  The rows are those of a batch in which each replica has
    equally many, or with `ROW_NUMBERS` the rows with these numbers only.

    Attributes:
      returns_rows: whether the result is a tree of arrays with one entry per row; otherwise all
        hosts return the same value.
    """

    returns_rows: ClassVar[bool] = False


class StateCall(Call[Result]):
    """A request to create, change or store a network's state.

    If it fails on one host, it fails on all of them.
    """


def split(
    call: AnyCall, replicas: list[list[int]], size: int | None = None
) -> tuple[list[AnyCall], list[np.ndarray]]:
    """Divide a call among hosts.

    Args:
      replicas: for each host, the dp indices of its replicas.
      size: number of batch rows per replica; None for as few as the rows of the call require.  Then
        copies of the first row may follow the last one.

    Returns:
      The call of each host, and for each host the indices of its rows in `call`.
    """
    rows, count = _rows(call)
    if not rows:
        return [call] * len(replicas), []
    numbers = next((value for kind, value in rows.values() if kind == "numbers"), None)
    dp = len(set().union(*replicas))
    declared: Any = call
    calls, places = [], []
    for own in process_rows(replicas, size or -(-count // dp)):
        if numbers is None:
            place, index = own, np.where(own < count, own, 0)
        else:
            place = index = np.flatnonzero(np.isin(numbers, own))
        parts = {name: _part(*field, index, own) for name, field in rows.items()}
        calls.append(dataclasses.replace(declared, **parts))
        places.append(place)
    return calls, places


def joined(call: Call[Result], results: Sequence[Result], places: Sequence[np.ndarray]) -> Result:
    """Assemble the result of `call` from the results of all hosts.

    Args:
      places: as returned by `split`.

    Raises:
      HostError: if hosts returned different values for the same row.
    """
    if not call.returns_rows:
        return results[0]
    count = _rows(call)[1]
    return jax.tree.map(lambda *parts: gathered(parts, places)[:count], *results)


def _rows(call: Call[Any]) -> tuple[dict[str, tuple[str, Any]], int]:
    """Return the fields {name: (kind, value)} with parts for rows, and the number of rows."""
    declared: Any = call
    rows = {
        field.name: (field.metadata["rows"], value)
        for field in dataclasses.fields(declared)
        if "rows" in field.metadata and (value := getattr(call, field.name)) is not None
    }
    kind, first = next(iter(rows.values()), ("", np.zeros(0)))
    return rows, jax.tree.leaves(first)[0].shape[kind == "microbatches"]


def _part(kind: str, value: Any, index: np.ndarray, own: np.ndarray) -> Any:
    """Return the part of a field for one host.

    Args:
      index: indices of the host's rows in the call.
      own: indices of the host's rows in the batch.
    """
    if kind == "numbers":
        return np.searchsorted(own, value[index]).astype(value.dtype)
    if kind == "keys":
        return {place: value[row] for place, row in enumerate(own.tolist()) if row in value}
    return jax.tree.map(lambda x: x.take(index, axis=int(kind == "microbatches")), value)
