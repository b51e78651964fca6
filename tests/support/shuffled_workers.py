"""Workers of `parts.Parts` that are this process, and finish parts in a random order."""

import random


class Stopped(BaseException):
    """An exception that ends a run and that no handler in the script catches."""


class ShuffledWorkers:
    """Call the function in this process, for the parts in a random order, twice for some of them.

    Args:
      calls: the number of parts after which the run is interrupted.
    """

    def __init__(self, seed: int, calls: int | None = None):
        self.generator, self.left, self.parts = random.Random(seed), calls, []

    def run(self, function, shared, parts):
        waiting, is_last = [], False
        while waiting or not is_last:
            while not is_last and len(waiting) < 5:
                part = next(parts, None)
                is_last = part is None
                waiting += [] if part is None else [part]
            if not waiting:
                return
            part = waiting.pop(self.generator.randrange(len(waiting)))
            if self.left is not None and len(self.parts) == self.left:
                raise Stopped
            self.parts.append(part)
            for _ in range(self.generator.choice([1, 1, 2])):
                result = function(shared, part)
            yield part, result
