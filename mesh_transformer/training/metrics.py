"""Metrics of a run: metrics.jsonl, wandb, step times and the gradient noise scale."""

import errno
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
from typing import Any, NamedTuple

from etils import epath
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.storage.access import convert_storage_errors, is_uri, local_path, reason
from mesh_transformer.training import goodput, wandb_upload
from mesh_transformer.training.wandb_upload import WandbUpload
from mesh_transformer.util import InputError, start_thread

NAME = "metrics.jsonl"
CLOSE_SECONDS = 30.0  # longest wait for the last upload
RETRY_SECONDS = (1.0, 60.0)  # first and longest pause after a failed upload


class MetricsLog:
    """A log with one row (a JSON object) per update, in metrics.jsonl and, if configured, on wandb.

    The file, `name`, is in the model folder.  If the model folder is a URI, the file is kept
    locally under `runs/` and uploaded in the background at every checkpoint (`upload`).  Once the
    log is open, a failed write or upload neither ends nor delays training: the failure is reported
    once, and the operation is retried.  If the disk is full, new rows are kept in memory until they
    can be written.

    Attributes:
      earlier: one dict per row that the file contained when the log was opened, including removed
        rows.  Each dict has the row's `step` and `seconds/*` metrics (see `goodput.Ledger`).
    """

    def __init__(
        self,
        folder: str,
        restored_step: int,
        wandb: WandbUpload | None = None,
        wandb_id: str | None = None,
        name: str = NAME,
    ):
        """Open the log to continue after `restored_step`; rows of later steps are removed.

        Args:
          folder: the model folder.
          wandb: the result of `start_wandb`: the upload to begin, or None for no upload.
          wandb_id: the id of the wandb run to resume, or None for a new wandb run.

        Raises:
          InputError: if the file cannot be written, or an existing one cannot be read.
        """
        self.path, remote = _paths(folder, name)
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            rows = _rows_so_far(self.path, remote, restored_step)
            self.earlier = rows.times
            _replace(self.path, rows.lines)
            self._file = os.open(self.path, os.O_WRONLY)
            self._end = os.fstat(self._file).st_size
        except OSError as error:
            raise _unwritable(self.path, error) from None
        self._unwritten: list[str] = []
        self._failing = False
        self._uploads = None if remote is None else _Uploads(self.path, remote)
        self.wandb_id, self._wandb = wandb_id, wandb
        if wandb is not None:
            self.wandb_id = wandb_id or secrets.token_hex(4)
            wandb.begin(self.wandb_id, restored_step)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to the file; if writing fails, keep the row in memory for the next call."""
        self._unwritten.append(json.dumps(row) + "\n")
        try:
            self._flush()
        except OSError as error:
            if not self._failing:
                _print_error(
                    f"{self.path}: {error.strerror}; "
                    "training continues; new metrics are kept in memory"
                )
            self._failing = True

    def _flush(self) -> None:
        """Write the rows that are in memory; on an error, truncate the file to its old length.

        Raises:
          OSError: if the rows cannot be written; they stay in memory.
        """
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
        """Request an upload of the file to the model folder; do nothing if the folder is local."""
        if self._uploads is not None:
            self._uploads.request()

    def close(self) -> None:
        """Close the log, and wait a limited time for the last uploads to finish."""
        try:
            self._flush()
        except OSError as error:
            _print_error(f"{self.path}: {error.strerror}; {len(self._unwritten)} rows are lost")
        os.close(self._file)
        if self._uploads is not None:
            self._uploads.close()
        if self._wandb is not None:
            self._wandb.close()


def check_log(folder: str) -> None:
    """Raise InputError if a `MetricsLog` of this folder could not be written; create no file."""
    path, _ = _paths(folder)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.lexists(path):
            os.close(os.open(path, os.O_WRONLY))
        elif not os.access(os.path.dirname(path), os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: str, error: OSError) -> InputError:
    return InputError(f"{path} cannot be written ({error.strerror}); choose another --model-dir")


def start_wandb(folder: str, config: Config) -> WandbUpload | None:
    """Start the process that uploads a run's metrics to wandb.

    Call this before loading any data, because the process takes seconds to start.

    Returns None if the config sets no `wandb_project`, or if wandb is disabled in the environment.
    Also returns None if the API key is missing or malformed; this is reported on stderr.

    Args:
      folder: the model folder.
    """
    if config.wandb_project is None or os.environ.get("WANDB_MODE") == "disabled":
        return None
    path = _paths(folder)[0]
    if problem := wandb_upload.key_problem():
        wandb_upload.warn(problem, path)
        return None
    return WandbUpload(path, config)


def row_of(folder: str, step: int) -> dict[str, Any] | None:
    """Return the metrics row of the step `step` from a model folder; None if the row is missing.

    Raises:
      InputError: if the metrics cannot be read.
    """
    path, remote = _paths(folder)
    lines = _rows_so_far(path, remote, step).lines
    last = json.loads(lines[-1]) if lines else {"step": None}
    return last if last["step"] == step else None


def _paths(folder: str, name: str = NAME) -> tuple[str, epath.Path | None]:
    """Return the metrics file's local path, and its remote path (None if `folder` is local)."""
    folder = local_path(folder)
    if not is_uri(folder):
        return os.path.join(folder, name), None
    return os.path.join("runs", folder.split("://")[1], name), epath.Path(folder) / name


class _Rows(NamedTuple):
    """The rows of a metrics file up to some step.

    Attributes:
      lines: the rows up to that step, as lines of JSON.
      reached: the last step in `lines`; 0 if there are no lines.
      times: the `step` and `seconds/*` metrics of every row in the file, including later rows.
    """

    lines: list[str]
    reached: int
    times: list[dict[str, float]]


def _rows_so_far(path: str, remote: epath.Path | None, last: int) -> _Rows:
    """Return the rows up to step `last` from the local or the remote copy of the metrics file.

    If both copies exist, the one with the later last step is used; if their last steps are equal,
    the remote one is used.  The local copy may be outdated, because another machine may have
    continued the run.
    """
    copies = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            copies.append(_rows_up_to(file.read(), last))
    if remote is not None:
        with convert_storage_errors(f"{remote}"):
            copies.append(_rows_up_to(remote.read_text() if remote.exists() else "", last))
    return max(reversed(copies), key=lambda copy: copy.reached, default=_Rows([], 0, []))


def _rows_up_to(text: str, last: int) -> _Rows:
    """Return the rows of `text` up to step `last`, without incomplete lines."""
    lines, reached, times = [], 0, []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the process was killed while writing this line
        seconds = {name: row[name] for name in row if name.startswith(goodput.PREFIX)}
        times.append({"step": row["step"]} | seconds)
        if row["step"] <= last:
            lines.append(line + "\n")
            reached = max(reached, row["step"])
    return _Rows(lines, reached, times)


def _replace(path: str, lines: Sequence[str]) -> None:
    """Replace the content of a file atomically."""
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.writelines(lines)
    os.replace(path + ".tmp", path)


class _Uploads:
    """A thread that uploads a file to a bucket on request, and retries failed uploads."""

    def __init__(self, path: str, remote: epath.Path):
        self._path, self._remote = path, remote
        self._wake = threading.Condition()
        self._requested = self._closing = False
        self._thread = start_thread(self._run, name="upload", failed=self._give_up)

    def request(self) -> None:
        with self._wake:
            self._requested = True
            self._wake.notify()

    def close(self) -> None:
        """Wait for a requested upload to finish; give up after `CLOSE_SECONDS`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _print_error(f"{self._remote}: not uploaded; the metrics are in {self._path}")

    def _give_up(self, error: Exception) -> None:
        _print_error(f"{self._remote}: no longer uploaded; the metrics are in {self._path}")

    def _run(self) -> None:
        pause, warned = RETRY_SECONDS[0], False
        while True:
            with self._wake:
                while not (self._requested or self._closing):
                    self._wake.wait()
                if not self._requested:
                    return
                self._requested = False
            try:
                self._remote.write_bytes(epath.Path(self._path).read_bytes())
                pause = RETRY_SECONDS[0]
            except Exception as error:  # every kind of storage raises its own exceptions
                if not warned:
                    _print_error(f"{self._remote} cannot be written ({reason(error)}); retrying")
                warned = True
                with self._wake:
                    self._requested = True
                    self._wake.wait(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])


def _print_error(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


class StepClock:
    """Measures the duration of each training step while several steps are in flight.

    The time between two calls of `record_finished` is divided equally among the steps that finished
    in that time.  The durations of all steps therefore add up to the time since `restart`, with one
    exception.  If a step's end is noticed late, the next step may end right after that, and would
    have taken no time.  It gets the mean of both durations.
    """

    # A step that was in flight when the one before was recorded, and took less than this part of
    # that one's time, has probably run during that time.
    SHORT = 0.25

    def __init__(self) -> None:
        self._seconds: deque[float] = deque()  # of finished steps; `pop_seconds` removes them
        self.restart()

    def restart(self) -> None:
        """Restart the clock; no step may be in flight."""
        self._last = time.perf_counter()
        self._before = 0.0  # the duration of the newest finished step, if others were in flight

    def record_finished(self, unread: Iterable[Mapping[str, Any]], *, read: int = 0) -> int:
        """Record which steps have finished; return the number of finished steps in `unread`.

        Args:
          unread: the metrics of each step whose metrics have not been read, oldest step first.  A
            step has finished if the method `is_ready` of its metric `loss` returns True.
          read: number of steps before `unread` whose metrics have been read, but whose durations
            `pop_seconds` has not returned yet.  The returned number does not include these steps.
        """
        unread = list(unread)
        finished = sum(1 for _ in takewhile(lambda metrics: metrics["loss"].is_ready(), unread))
        new = read + finished - len(self._seconds)
        if new > 0:
            now = time.perf_counter()
            seconds = (now - self._last) / new
            if seconds < self.SHORT * self._before:
                seconds = (self._before + seconds) / 2
            self._seconds.extend([seconds] * new)
            self._last, self._before = now, seconds if finished < len(unread) else 0.0
        return finished

    def pop_seconds(self) -> float:
        """Remove and return the duration of the oldest finished step, in seconds."""
        return self._seconds.popleft()


class NoiseScale:
    """The gradient noise scale (McCandlish 2018, appendix A), averaged over steps.

    The squared gradient norms of a small and a big batch give unbiased estimates of two quantities:
    the squared norm of the true gradient, and the trace of the covariance of per-sequence
    gradients.  The noise scale is the trace divided by the squared norm.  Each estimate is averaged
    over steps before the division, because the ratio of two noisy numbers is biased.

    Args:
      alpha: weight of the newest step in the moving averages.
      small: the small batch size, in sequences.
      big: the big batch size, in sequences.  If it equals `small`, nothing can be estimated.
    """

    def __init__(self, alpha: float, small: int, big: int):
        self.alpha = alpha
        self.small = small
        self.big = big
        self.square: float | None = None
        self.trace: float | None = None

    def update(
        self, small_square: float, big_square: float, big: int | None = None
    ) -> dict[str, float]:
        """Add one step's estimates to the averages; return the metrics `noise/*`.

        Args:
          small_square: mean squared gradient norm of the small batches.
          big_square: squared gradient norm of the big batch.
          big: the size of this step's big batch (default: that of all steps).
        """
        small, big = self.small, self.big if big is None else big
        if big == small or not math.isfinite(small_square + big_square):
            return {}
        square = (big * big_square - small * small_square) / (big - small)
        trace = (small_square - big_square) / (1 / small - 1 / big)
        self.square = self._average(self.square, square)
        self.trace = self._average(self.trace, trace)
        metrics = {"noise/grad_square": self.square, "noise/covariance_trace": self.trace}
        if self.square > 0:
            metrics["noise/scale"] = self.trace / self.square
        return metrics

    def _average(self, old: float | None, new: float) -> float:
        return new if old is None else (1 - self.alpha) * old + self.alpha * new

    def state(self) -> dict[str, float | None]:
        """Return the moving averages as a dict, to be stored in a checkpoint."""
        return {"square": self.square, "trace": self.trace}

    def restore(self, state: dict[str, float | None]) -> None:
        """Restore the moving averages from a dict that the method `state` returned."""
        self.square, self.trace = state["square"], state["trace"]
