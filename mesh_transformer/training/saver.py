"""`Saver`: saves the checkpoints of a run, and tries again after failures."""

from collections.abc import Callable
from typing import Any

from mesh_transformer.network import TrainableNetwork
from mesh_transformer.training.best import BestStep
from mesh_transformer.training.goodput import Ledger
from mesh_transformer.util import HostError, InputError

MOST_STEPS_BETWEEN_SAVES = 8  # longest pause between attempts to save, while saving fails


class Saver:
    """Saves the checkpoints of a run, and tries again after failures.

    Args:
      state: a function that returns the loop's own state, which each checkpoint holds beside the
        network's state.
      best: told about each step that could not be saved.
      report: a function that prints a line.

    Attributes:
      saved: the newest checkpoint's step, or the run's first step if there is none; -1 if the
        restored state is not in a checkpoint, or the last save failed.
    """

    def __init__(
        self,
        network: TrainableNetwork,
        folder: str,
        state: Callable[[], dict[str, Any]],
        best: BestStep,
        ledger: Ledger,
        report: Callable[[str], None],
    ):
        self._network, self._folder = network, folder
        self._state, self._best = state, best
        self._ledger, self._report = ledger, report
        self.saved = network.step
        self._saving = False  # whether the last save may still be in progress
        self._pause = 0  # steps between attempts to save, after a failure
        self._again_at: int | None = None

    def save_if_due(self, save: Callable[[], None]) -> None:
        """Call `save` if a checkpoint or another attempt is scheduled for the network's step.

        Before that, schedule another attempt if the save in the background has failed.
        """
        network = self._network
        if network.save_failed and (error := self._failure_of_save()) is not None:
            self._try_later(error)
        if network.step % network.config.ckpt_every == 0 or network.step == self._again_at:
            save()

    def restart_if_larger(self) -> None:
        """Raise HostError if the network's step is saved, and a restart would give a larger mesh.

        Waits for the save first; if the save has failed, another attempt is scheduled instead.
        """
        if self.saved != self._network.step or not (reason := self._network.larger_mesh()):
            return
        if (error := self._failure_of_save()) is not None:
            self._try_later(error)
            return
        raise HostError(reason)

    def save(self, *, again: bool = False) -> None:
        """Start saving a checkpoint of the network's step; a failed save is retried later.

        Args:
          again: whether to call the network's `save` even if the step is saved, which updates the
            record of the best step.
        """
        # Wait for the previous save first: its failure must not prevent this one.
        error = self._failure_of_save()
        if error is not None:
            self._stop_if_configured(error)
            self._report(str(error))
        self._again_at = None
        if again or self._network.step != self.saved:
            error = self._failure_of(self._begin)
            if error is not None:
                self._try_later(error)

    def save_last(self) -> None:
        """Save a checkpoint of the network's step, and wait until it is complete.

        Raises:
          InputError: if saving fails twice.
        """
        if (error := self._failure_of_save()) is None and self._network.step != self.saved:
            error = self._failure_of(self._begin) or self._failure_of_save()
        if error is not None:
            self._report(f"{error}; retrying once")
            self._begin()
            self._wait()

    def _begin(self) -> None:
        """Start saving a checkpoint of the network and of the loop's own state."""
        step = self._network.step
        with self._ledger.spending("save"):
            try:
                self._network.save(self._folder, self._state())
            except InputError:
                self._best.lost(step)
                raise
        self.saved, self._saving = step, True

    def _failure_of_save(self) -> InputError | None:
        """Wait for the save in progress, if any; return its error if it failed, else None."""
        if not self._saving:
            return None
        error = self._failure_of(self._wait)
        self._saving = False
        if error is None:
            self._pause = 0
        else:
            self._best.lost(self.saved)
            self.saved = -1
        return error

    def _wait(self) -> None:
        with self._ledger.spending("save"):
            self._network.wait()

    @staticmethod
    def _failure_of(action: Callable[[], None]) -> InputError | None:
        try:
            action()
        except InputError as error:
            return error
        return None

    def _stop_if_configured(self, error: InputError) -> None:
        """Raise the error of a failed save if the config's `on_save_failure` is "stop"."""
        if self._network.config.on_save_failure == "stop":
            raise error

    def _try_later(self, error: InputError) -> None:
        """Schedule another attempt after a failed save; the pauses between attempts increase."""
        self._stop_if_configured(error)
        self._pause = min(2 * self._pause or 1, MOST_STEPS_BETWEEN_SAVES)
        self._again_at = self._network.step + self._pause
        self._report(f"{error}; training continues, next attempt to save at step {self._again_at}")
