"""What a run says of itself: metrics.jsonl, wandb, step times and the gradient noise scale."""

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

from etils import epath

from mesh_transformer.config import Config
from mesh_transformer.util import InputError

NAME = "metrics.jsonl"


class MetricsLog:
    """One JSON object an update in the model folder's metrics.jsonl, and the same to wandb.

    For a URI the file is kept under `runs/` here and uploaded at every checkpoint (`upload`).
    """

    def __init__(self, folder: str, config: Config, restored_step: int, wandb_id: str | None):
        """Opens the log to continue after `restored_step`; later rows are cut.

        Args:
          wandb_id: the run to go on with there, None for a new one.
        """
        self._remote = epath.Path(folder) / NAME if "://" in folder else None
        local = folder if self._remote is None else os.path.join("runs", folder.split("://")[1])
        self.path = os.path.join(local, NAME)
        try:
            os.makedirs(local, exist_ok=True)
            _cut(self.path, self._rows_so_far(), restored_step)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be written ({error.strerror}); choose another --model-dir"
            ) from None
        self._wandb = _start_wandb(config, wandb_id)

    @property
    def wandb_id(self) -> str | None:
        """The wandb run, for a checkpoint."""
        return None if self._wandb is None else self._wandb.id

    def _rows_so_far(self) -> str:
        if os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:
                return file.read()
        if self._remote is not None and self._remote.exists():
            return self._remote.read_text()
        return ""

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row; it is on the disk's side when this returns."""
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror}; make room and start again") from None
        if self._wandb is not None:
            self._wandb.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])

    def upload(self) -> None:
        """Copies the file to a remote model folder; nothing to do for a local one."""
        if self._remote is not None:
            self._remote.write_bytes(epath.Path(self.path).read_bytes())

    def close(self) -> None:
        """Ends the file and the wandb run."""
        with contextlib.suppress(OSError):  # `write` has said that the disk is full
            self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


def _cut(path: str, text: str, last: int) -> None:
    """Rewrites the log at `path` with `text`'s rows up to step `last`, less a torn last line."""
    kept = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the process was killed while it wrote this
        if row["step"] <= last:
            kept.append(line + "\n")
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.writelines(kept)
    os.replace(path + ".tmp", path)


def _start_wandb(config: Config, run_id: str | None) -> Any:
    """A wandb run, where the config names a project; WANDB_MODE offline or disabled is heeded."""
    if config.wandb_project is None:
        return None
    import wandb
    from wandb.errors import Error

    try:
        return wandb.init(
            project=config.wandb_project,
            name=config.name,
            config=config.as_dict(),
            id=run_id,
            resume="allow",
        )
    except Error as error:
        raise InputError(
            f"wandb_project is {config.wandb_project!r}, but wandb cannot start: {error}; log in, "
            "set WANDB_MODE=offline or disabled, or remove the key"
        ) from None


class StepClock:
    """How long each of the steps under way takes, by when it ends and not by when it is read.

    The time between two looks is shared out over the steps that were seen to end between them, so
    that the seconds of all steps add up to the time from `restart` to the end of the last one.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque()  # of steps that have ended and are not taken
        self.restart()

    def restart(self) -> None:
        """Begins anew, where no step is under way."""
        self._last = time.perf_counter()

    def look(self, unread: Iterable[tuple[int, Mapping[str, Any]]], *, read: int = 0) -> int:
        """Sees which steps have ended; how many of the `unread` ones, which it returns.

        Those are (step, measurements) in order, of which the `loss` has `is_ready`.  The `read`
        steps before them have, and their seconds are still to be taken.
        """
        ended = sum(1 for _ in takewhile(lambda each: each[1]["loss"].is_ready(), unread))
        new = read + ended - len(self._seconds)
        if new > 0:
            now = time.perf_counter()
            self._seconds.extend([(now - self._last) / new] * new)
            self._last = now
        return ended

    def take(self) -> float:
        """The seconds of the oldest step that has ended."""
        return self._seconds.popleft()


class NoiseScale:
    """The gradient noise scale (McCandlish 2018, appendix A), averaged over steps.

    From the squared norms of gradients of a small and a big batch come unbiased estimates of the
    true gradient's squared norm and of the trace of its covariance; each is averaged before
    their ratio is taken, since a ratio of noisy numbers is biased.
    """

    def __init__(self, alpha: float, small: int, big: int):
        """`small` and `big` are batch sizes in sequences; where equal, there is no estimate."""
        self.alpha = alpha
        self.small = small
        self.big = big
        self.square: float | None = None
        self.trace: float | None = None

    def update(self, small_square: float, big_square: float) -> dict[str, float]:
        """Takes one step's mean squared norms; returns the metrics `noise/*`, or nothing."""
        if self.big == self.small or not math.isfinite(small_square + big_square):
            return {}
        square = (self.big * big_square - self.small * small_square) / (self.big - self.small)
        trace = (small_square - big_square) / (1 / self.small - 1 / self.big)
        self.square = self._average(self.square, square)
        self.trace = self._average(self.trace, trace)
        metrics = {"noise/grad_square": self.square, "noise/covariance_trace": self.trace}
        if self.square > 0:
            metrics["noise/scale"] = self.trace / self.square
        return metrics

    def _average(self, old: float | None, new: float) -> float:
        return new if old is None else (1 - self.alpha) * old + self.alpha * new

    def state(self) -> dict[str, float | None]:
        """The averages, for a checkpoint."""
        return {"square": self.square, "trace": self.trace}

    def restore(self, state: dict[str, float | None]) -> None:
        """Goes on from `state`'s averages."""
        self.square, self.trace = state["square"], state["trace"]
