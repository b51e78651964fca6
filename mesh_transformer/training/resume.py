"""What the training loop does before the first step of a run that is started again."""

import os
import sys
from typing import Any

from mesh_transformer.config import Config
from mesh_transformer.network import TrainableNetwork
from mesh_transformer.training.best import BestStep
from mesh_transformer.util import DamagedError


def restore(
    network: TrainableNetwork, folder: str, base: str | None, fall_back: bool
) -> dict[str, Any] | None:
    """Restore the newest checkpoint in `folder`, and return the result of `network.restore`.

    `base` is the new path of a LoRA run's base model, or None if the base model has not moved.
    With `fall_back`, damaged checkpoints are renamed, and the newest intact one is restored.
    """
    while True:
        try:
            return network.restore(folder, base)
        except DamagedError as error:
            if error.previous is None or os.path.dirname(error.step) != folder:
                raise
            if not fall_back:
                message = f"{error}; --fall-back resumes from that step"
                raise DamagedError(message, *error.args[1:]) from None
            name = network.set_aside(error.step)
            print(f"{error}; falling back to {error.previous}, {name} is kept", file=sys.stderr)


def is_validated(config: Config, step: int, total: int) -> bool:
    """Return whether a step is to be validated: each `val_every` steps, and the run's last step.

    The last step is not, if it is only where --max-steps stops the run, before `total_steps`: a run
    that is stopped validates the steps of one that is not.

    Args:
      total: the step to train to.
    """
    is_last = step == total and total >= (config.total_steps or 0)
    return is_last or step % config.val_every == 0


def unscored_row(row: dict[str, Any] | None, step: int, best: BestStep) -> dict[str, Any] | None:
    """Return the metrics row of the restored step if that step must still be validated, else None.

    The step must still be validated if its row has no validation results, because the run was
    interrupted.

    Args:
      row: the row of a step that is to be validated; None if it is missing.
      best: gets the row's results if the step was validated after it had been saved.
    """
    if row is None or any(name.startswith(("val/", "eval/")) for name in row):
        if row is not None and best.lacks(step):
            best.add(step, row)
        return None
    return row


def ended_line(step: int, total: int, best: BestStep) -> str:
    """Say why a run that has reached `step` has ended; return "" if it has not."""
    if step >= total:
        return f"{' of' if step == total else ', past'} {total}: nothing left to train"
    advice = "to train on, raise early_stop or set it to null"
    return f": {best.reason()}; {advice}" if best.is_over else ""
