"""`BestStep`: the step with the lowest validation loss, and when a run stops early."""

import math
from collections.abc import Mapping
from typing import Any

from mesh_transformer.config import Config


class BestStep:
    """Follows the loss on one validation set, to keep the best step and to stop early.

    If the config sets neither `keep_best` nor `early_stop`, no set is followed.
    """

    def __init__(self, config: Config):
        self._set = config.watched_set
        self._keeps, self._patience = config.keep_best is not None, config.early_stop
        self._lowest: float | None = None  # the lowest loss so far
        self._stale = 0  # validations since the lowest loss
        self._validated = 0  # the last validated step
        # The steps that were the best when they were saved, ascending, with their losses.  The last
        # one is the best, unless saving it fails.
        self._kept: list[dict[str, Any]] = []

    @property
    def step(self) -> int | None:
        """The best step, or None if none is kept."""
        return self._kept[-1]["step"] if self._kept else None

    @property
    def is_over(self) -> bool:
        """Whether the run stops early."""
        return self._patience is not None and self._stale >= self._patience

    def lacks(self, step: int) -> bool:
        """Return whether a set is followed, and its loss at `step` has not been added."""
        return self._set is not None and self._validated != step

    def add(self, step: int, row: Mapping[str, Any]) -> bool:
        """Add the losses of a validation; return whether `step` is the best and is to be kept.

        Args:
          row: the metrics of the step; losses are called `val/loss_<set>`.
        """
        loss = row.get(f"val/loss_{self._set}")
        if loss is None:
            return False
        self._validated, self._stale = step, self._stale + 1
        if loss < (math.inf if self._lowest is None else self._lowest):
            self._lowest, self._stale = loss, 0
        if not self._keeps or not loss < (self._kept[-1]["loss"] if self._kept else math.inf):
            return False
        self._kept.append({"step": step, "loss": loss})
        return True

    def lost(self, step: int) -> None:
        """Forget a step that could not be saved."""
        self._kept = [kept for kept in self._kept if kept["step"] != step]

    def reason(self) -> str:
        """Say why the run stops early."""
        return (
            f"the loss on {self._set} has not improved for {self._stale} validations (lowest "
            f"{self._lowest})"
        )

    def state(self) -> dict[str, Any]:
        """Return JSON values to save in a checkpoint; `step` and `loss` are those of the best."""
        kept = self._kept[-1] if self._kept else {"step": None, "loss": None}
        return kept | {
            "set": self._set,
            "lowest": self._lowest,
            "stale": self._stale,
            "validated": self._validated,
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from values returned by `state`, unless they are those of another set."""
        if state is None or state["set"] != self._set:
            return
        self._lowest, self._stale = state["lowest"], state["stale"]
        self._validated = state["validated"]
        if state["step"] is not None:
            self._kept = [{"step": state["step"], "loss": state["loss"]}]
