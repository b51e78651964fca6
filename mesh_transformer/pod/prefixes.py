"""Which replica answers a request: the one that has most of its beginning in its cache."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

KEPT = 2**16  # beginnings to remember, of up to about 200 bytes each


class Routes:
    """The replicas that last answered the beginnings of prompts.

    Args:
      rows: requests that a replica serves at the same time.
      kept: maximum number of beginnings to remember; the least recently used one is forgotten.
    """

    def __init__(self, rows: int, kept: int = KEPT):
        self._rows, self._kept = rows, kept
        self._replicas: OrderedDict[int, str] = OrderedDict()
        self._chosen: dict[str, int] = {}  # when each replica was last chosen, as a count
        self._count = 0

    def order(self, prefixes: Sequence[int], ongoing: Mapping[str, int]) -> list[str]:
        """Return the names of all replicas, the preferred one first, which is remembered.

        Preferred is the replica that last answered the longest of these beginnings, unless it is
        much busier than the least busy one: by more than the latter's requests and a quarter of
        the rows.  Next come the replicas with the fewest requests.

        Args:
          prefixes: hashes of the beginnings of a prompt, the shortest one first.
          ongoing: {name of a replica: number of its requests}, of all replicas.
        """
        self._chosen = {name: self._chosen.get(name, 0) for name in ongoing}
        names = sorted(ongoing, key=lambda name: (ongoing[name], self._chosen[name]))
        known = (self._replicas.get(prefix) for prefix in reversed(prefixes))
        last = next((name for name in known if name in ongoing), None)
        if last is not None and ongoing[last] <= 2 * ongoing[names[0]] + self._rows / 4:
            names.remove(last)
            names.insert(0, last)
        if names:
            self._remember(prefixes, names[0])
        return names

    def _remember(self, prefixes: Iterable[int], name: str) -> None:
        self._count += 1
        self._chosen[name] = self._count
        for prefix in prefixes:
            self._replicas[prefix] = name
            self._replicas.move_to_end(prefix)
        while len(self._replicas) > self._kept:
            self._replicas.popitem(last=False)
