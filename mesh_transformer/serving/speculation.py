"""When decode calls guess tokens: as long as it saves time."""

from collections.abc import Sequence

from mesh_transformer.serving.metrics import Metrics

PROBE_CALLS = 16  # while guesses do not save time, one call in this many makes them
SMOOTHING = 0.2  # weight of the newest call in the averages


class Speculation:
    """Decides which decode calls guess tokens, from the time and the tokens of earlier calls.

    A step with guesses takes longer, and generates more tokens if they are right.

    Args:
      guesses: number of tokens that a step may guess; with 0, calls never guess.
      metrics: records how many guesses are right.
      always: whether all calls guess if they may.

    Attributes:
      choices: the values that `next` may return.
    """

    def __init__(self, guesses: int, metrics: Metrics, *, always: bool = False):
        self.choices = (False, True)
        self._guesses, self._metrics = guesses, metrics
        if not guesses:
            self.choices = (False,)
        elif always:
            self.choices = (True,)
        self._calls = 0
        self._seconds: dict[bool, float] = {}  # per step, on average
        self._tokens = 1.0  # per row and step with guesses, on average

    def next(self) -> bool:
        """Return whether the next decode call should guess tokens."""
        if len(self.choices) == 1:
            return self.choices[0]
        self._calls += 1
        for choice in self.choices:
            if choice not in self._seconds:
                return choice
        saves = self._seconds[True] < self._tokens * self._seconds[False]
        probe = self._calls % PROBE_CALLS == 0
        return saves != probe

    def observe(self, speculated: bool, seconds: float, steps: int, made: Sequence[int]) -> None:
        """Take account of a call.

        Args:
          speculated: whether the call guessed tokens.
          seconds: the time of the call.
          steps: its number of steps.
          made: number of tokens that each row generated; only of rows that generated in all steps,
            and could have generated more.
        """
        if not made:
            return
        seconds /= steps
        old = self._seconds.get(speculated, seconds)
        self._seconds[speculated] = old + SMOOTHING * (seconds - old)
        if speculated:
            self._metrics.guessed_tokens.inc(self._guesses * steps * len(made))
            self._metrics.right_guesses.inc(sum(made) - steps * len(made))
            self._tokens += SMOOTHING * (sum(made) / len(made) / steps - self._tokens)
