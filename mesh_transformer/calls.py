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

ROWS = {"rows": True}  # metadata of fields with batch rows


class Call(Generic[Result]):
    """A request to a network, with a result of type `Result`.  Subclasses are frozen dataclasses.

    A field with the metadata `ROWS` is a tree of arrays with one entry per batch row.  Each host
    gets the entries of its own rows.  Other fields have the same value on all hosts.

    Attributes:
      returns_rows: whether the result is such a tree, too; otherwise all hosts return the same.
    """

    returns_rows: ClassVar[bool] = False


def split(call: AnyCall, replicas: list[list[int]]) -> tuple[list[AnyCall], list[np.ndarray]]:
    """Divide a call among hosts.

    Args:
      replicas: for each host, the dp indices of its replicas.

    Returns:
      The call of each host, and the indices of its rows in `call`.  If the rows cannot be divided
      equally among the replicas, copies of the first row follow the last one.
    """
    rows, count = _rows(call)
    if not rows:
        return [call] * len(replicas), []
    places = process_rows(replicas, -(-count // len(set().union(*replicas))))
    declared: Any = call
    calls = []
    for place in places:
        index = np.where(place < count, place, 0)
        calls.append(dataclasses.replace(declared, **jax.tree.map(lambda x, i=index: x[i], rows)))
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


def _rows(call: Call[Any]) -> tuple[dict[str, Any], int]:
    """Return the fields of a call that hold batch rows, and the number of rows."""
    declared: Any = call
    fields = [field.name for field in dataclasses.fields(declared) if "rows" in field.metadata]
    rows = {name: getattr(call, name) for name in fields}
    return rows, len(jax.tree.leaves(rows)[0]) if rows else 0
