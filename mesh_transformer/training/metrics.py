"""What a run says of itself: metrics.jsonl, wandb, step times and the gradient noise scale."""

import json
import math
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from etils import epath
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.data.storage import is_uri, local_path, reason, reported
from mesh_transformer.training.wandb_upload import WandbUpload
from mesh_transformer.util import InputError

NAME = "metrics.jsonl"
CLOSE_SECONDS = 30.0  # for the last upload, while the run waits
RETRY_SECONDS = (1.0, 60.0)  # between uploads that fail: at first, at most


class MetricsLog:
    """One JSON object per update in the model folder's metrics.jsonl, and the same to wandb.

    For a URI the file is kept under `runs/` here and uploaded in the background at every checkpoint
    (`upload`).  Nothing that goes wrong after the start ends or delays the run: it is reported
    once and tried again.  Rows that the disk has no room for are kept until it has.
    """

    def __init__(self, folder: str, config: Config, restored_step: int, wandb_id: str | None):
        """Opens the log to continue after `restored_step`; later rows are cut.

        Args:
          wandb_id: the run to resume there, None for a new one.

        Raises:
          InputError: where the file cannot be written, or what is there cannot be read.
        """
        self.path, remote = _places(folder)
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            _replace(self.path, _rows_so_far(self.path, remote, restored_step))
            self._file = os.open(self.path, os.O_WRONLY)
            self._end = os.fstat(self._file).st_size
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be written ({error.strerror}); choose another --model-dir"
            ) from None
        self._unwritten: list[str] = []
        self._failing = False
        self._uploads = None if remote is None else _Uploads(self.path, remote)
        self.wandb_id, self._wandb = wandb_id, None
        if config.wandb_project is not None and os.environ.get("WANDB_MODE") != "disabled":
            self.wandb_id = wandb_id or secrets.token_hex(4)
            self._wandb = WandbUpload(self.path, config, self.wandb_id, restored_step)

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row; it is on the disk's side when this returns, if there is room."""
        self._unwritten.append(json.dumps(row) + "\n")
        try:
            self._flush()
        except OSError as error:
            if not self._failing:
                _say(f"{self.path}: {error.strerror}; training continues, its metrics are kept")
            self._failing = True

    def _flush(self) -> None:
        """Writes the rows kept; of a row that does not fit no part is left."""
        content = "".join(self._unwritten).encode()
        try:
            done = 0
            while done < len(content):
                done += os.pwrite(self._file, content[done:], self._end + done)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += len(content)
        self._unwritten.clear()
        self._failing = False

    def upload(self) -> None:
        """Has the file copied to a remote model folder; nothing to do for a local one."""
        if self._uploads is not None:
            self._uploads.request()

    def close(self) -> None:
        """Ends the file, the uploads and the wandb run; waits some seconds for them."""
        try:
            self._flush()
        except OSError as error:
            _say(f"{self.path}: {error.strerror}; {len(self._unwritten)} rows are lost")
        os.close(self._file)
        if self._uploads is not None:
            self._uploads.close()
        if self._wandb is not None:
            self._wandb.close()


def row_of(folder: str, step: int) -> dict[str, Any] | None:
    """What the metrics in a model folder say of a step, if they do.

    Raises:
      InputError: where they cannot be read.
    """
    path, remote = _places(folder)
    rows = _rows_so_far(path, remote, step)
    last = json.loads(rows[-1]) if rows else {"step": None}
    return last if last["step"] == step else None


def _places(folder: str) -> tuple[str, epath.Path | None]:
    """The metrics' file here, and the one in a remote model folder."""
    folder = local_path(folder)
    if not is_uri(folder):
        return os.path.join(folder, NAME), None
    return os.path.join("runs", folder.split("://")[1], NAME), epath.Path(folder) / NAME


def _rows_so_far(path: str, remote: epath.Path | None, last: int) -> list[str]:
    """The rows up to step `last`, of the copy here or of the remote one: the one that has more.

    A copy here may be of a time before another machine went on with the run.
    """
    copies = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            copies.append(_kept(file.read(), last))
    if remote is not None:
        with reported(f"{remote}"):
            copies.append(_kept(remote.read_text(), last) if remote.exists() else ([], 0))
    rows, _ = max(reversed(copies), key=lambda copy: copy[1], default=([], 0))
    return rows


def _kept(text: str, last: int) -> tuple[list[str], int]:
    """A file's lines up to step `last`, less a torn one, and the greatest step in them."""
    kept, reached = [], 0
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the process was killed while it wrote this
        if row["step"] <= last:
            kept.append(line + "\n")
            reached = max(reached, row["step"])
    return kept, reached


def _replace(path: str, lines: Sequence[str]) -> None:
    """Puts these lines into a file, whole or not at all."""
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.writelines(lines)
    os.replace(path + ".tmp", path)


class _Uploads:
    """Copies a file to its place in a bucket when asked, in a thread, until it succeeds."""

    def __init__(self, path: str, remote: epath.Path):
        self._path, self._remote = path, remote
        self._wake = threading.Condition()
        self._wanted = self._closing = False
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def request(self) -> None:
        with self._wake:
            self._wanted = True
            self._wake.notify()

    def close(self) -> None:
        """Copies what was asked for; gives up after some seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _say(f"{self._remote}: not uploaded; the metrics are in {self._path}")

    def _run(self) -> None:
        pause, warned = RETRY_SECONDS[0], False
        while True:
            with self._wake:
                while not (self._wanted or self._closing):
                    self._wake.wait()
                if not self._wanted:
                    return
                self._wanted = False
            try:
                self._remote.write_bytes(epath.Path(self._path).read_bytes())
                pause = RETRY_SECONDS[0]
            except Exception as error:  # each storage raises its own kinds
                if not warned:
                    _say(f"{self._remote}: cannot be written ({reason(error)}); trying again")
                warned = True
                with self._wake:
                    self._wanted = True
                    self._wake.wait(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


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
