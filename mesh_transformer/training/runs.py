"""Reads the metrics of runs, while they train or later, and writes them for TensorBoard."""

import json
import os
import statistics
import time
from collections.abc import Iterable
from typing import Any

from mesh_transformer.data.tfrecords import framed, message_class
from mesh_transformer.storage import files
from mesh_transformer.storage.access import is_uri
from mesh_transformer.training import goodput, run_status
from mesh_transformer.training.metrics import NAME
from mesh_transformer.util import InputError

DEPTH = 3  # of the subfolders in which runs are looked for
ALERT = "alert/"  # the beginning of the names of what hooks report
RECENT = 100  # rows whose loss and speed are averaged
LOSS = f"loss (mean of {RECENT})"
# The messages of a TensorBoard event file, with the fields that are written.
_EVENT = """
name: "mesh_transformer_event.proto" package: "mesh_transformer.event" syntax: "proto3"
message_type {
  name: "Value"
  field {name: "tag" number: 1 type: TYPE_STRING}
  field {name: "simple_value" number: 2 type: TYPE_FLOAT}
}
message_type {
  name: "Summary"
  field {name: "value" number: 1 label: LABEL_REPEATED type_name: "Value"}
}
message_type {name: "SessionLog" field {name: "status" number: 1 type: TYPE_INT32}}
message_type {
  name: "Event"
  field {name: "wall_time" number: 1 type: TYPE_DOUBLE}
  field {name: "step" number: 2 type: TYPE_INT64}
  field {name: "file_version" number: 3 type: TYPE_STRING}
  field {name: "summary" number: 5 type_name: "Summary"}
  field {name: "session_log" number: 7 type_name: "SessionLog"}
}
"""
_START = 1  # SessionLog.START


class MetricsFile:
    """A run's metrics.jsonl, which is read as rows are added to it.

    Args:
      path: its path, which may be in a bucket.
    """

    def __init__(self, path: str):
        self.path = path
        self._end = 0  # of what was read
        self._last = b""  # the last line that was read
        self._lines = 0
        self._status: tuple[int, int] | None = None

    def new_rows(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the rows since the last call, and whether they begin with the file's first row.

        They do in the first call, and after a run has removed rows in order to repeat steps.  An
        incomplete last line, which a run is writing or was killed while writing, is left out.

        Raises:
          InputError: if the file cannot be read, or is not in JSON Lines format.
        """
        try:
            status = files.status(self.path)
            if status == self._status:
                return [], False
            with files.open_file(self.path) as file:
                file.seek(max(self._end - len(self._last), 0))
                is_first = not self._end or file.read(len(self._last)) != self._last
                if is_first:
                    file.seek(0)
                    self._end = self._lines = 0
                content = file.read()
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be read ({error.strerror}); give a model folder, or its {NAME}"
            ) from None
        self._status, rows = status, []
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                if not isinstance(row, dict) or "step" not in row:
                    raise ValueError("expected an object with the key step")
            except ValueError as error:  # not UTF-8, or not JSON
                raise InputError(
                    f"{self.path}: not a {NAME} (line {self._lines + 1}: {error}); give a model "
                    f"folder, or its {NAME}"
                ) from None
            rows.append(row)
            self._end, self._last, self._lines = self._end + len(line), line, self._lines + 1
        return rows, is_first


def read_rows(path: str) -> list[dict[str, Any]]:
    """Return the rows of a file metrics.jsonl, each a dict from metric names to values.

    Args:
      path: the file, or the model folder that contains it.

    Raises:
      InputError: if the file cannot be read, is not in JSON Lines format, or has no rows.
    """
    file = MetricsFile(os.path.join(path, NAME) if files.is_folder(path) else path)
    rows, _ = file.new_rows()
    if not rows:
        raise InputError(f"{file.path} has no rows yet; train the model first")
    return rows


def find_runs(folder: str, depth: int = DEPTH) -> dict[str, str]:
    """Return the paths of the metrics of all runs in a folder, by those of the runs inside of it.

    A run that has ended before its first step may have no metrics, but it has a status.

    Args:
      folder: the folder, which may be in a bucket, or itself the model folder of a run.
      depth: largest number of folders between it and a run.
    """
    path = os.path.join(folder, NAME)
    if files.is_file(path) or files.is_file(os.path.join(folder, run_status.NAME)):
        whole = folder if is_uri(folder) else os.path.abspath(folder)
        return {os.path.basename(whole.rstrip("/")): path}
    result = {}
    for name in sorted(files.names(folder)) if depth else ():
        inside = os.path.join(folder, name)
        if files.is_folder(inside):
            for other, path in find_runs(inside, depth - 1).items():
                result[name if other == name else os.path.join(name, other)] = path
    return result


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a table of runs says about one.

    The training loss is the mean, and tokens per second and MFU are the medians, of the last
    `RECENT` steps.  The best validation loss is the lowest mean over the validation sets.
    """

    def recent(name: str) -> list[float]:
        return [row[name] for row in rows[-RECENT:] if name in row]

    validations = [
        statistics.fmean(losses)
        for row in rows
        if (losses := [row[name] for name in row if name.startswith("val/loss_")])
    ]
    seconds: dict[str, float] = {}
    for row in rows:
        seconds |= {name: row[name] for name in row if name.startswith(goodput.PREFIX)}
    last = rows[-1] if rows else {}
    losses, speeds, mfus = map(recent, ("train/loss", "train/tokens_per_sec", "train/mfu"))
    return {
        "step": last.get("step", 0),
        "tokens": last.get("train/tokens"),
        LOSS: statistics.fmean(losses) if losses else None,
        "best validation": min(validations, default=None),
        "tokens/s": statistics.median(speeds) if speeds else None,
        "MFU": statistics.median(mfus) if mfus else None,
        "hours": sum(seconds.values()) / 3600,
    }


def seconds_left(rows: list[dict[str, Any]], total: int) -> float | None:
    """Return about how long a run takes until step `total`, by its last `RECENT` steps.

    Time outside of steps, as for validation, is left out.  None if there are too few steps.
    """
    name = f"{goodput.PREFIX}steps"
    timed = [(row["step"], row[name]) for row in rows[-RECENT:] if name in row]
    if len(timed) < 2 or timed[-1][0] == timed[0][0]:
        return None
    (first, before), (last, after) = timed[0], timed[-1]
    return max(total - last, 0) * (after - before) / (last - first)


def last_alert(rows: list[dict[str, Any]]) -> str:
    """Describe the newest alert of a run's hooks, as "step 21: loss 9"; "" if there is none."""
    for row in reversed(rows):
        alerts = [
            f"{name.removeprefix(ALERT)} {value:.5g}"
            for name, value in row.items()
            if name.startswith(ALERT)
        ]
        if alerts:
            return f"step {row['step']}: {', '.join(alerts)}"
    return ""


class EventFile:
    """A file that TensorBoard reads, with the metrics of one run.

    Args:
      folder: where to write it.  The event files of earlier calls are deleted.
    """

    def __init__(self, folder: str):
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(folder):
            if name.startswith("events.out.tfevents.") and name.endswith(".run"):
                os.unlink(os.path.join(folder, name))
        # TensorBoard reads files of new names only.
        name = f"events.out.tfevents.{time.time_ns():020}.run"
        self._path = os.path.join(folder, name)
        with open(self._path, "wb") as file:
            file.write(_event(file_version="brain.Event:2"))

    def write(self, rows: Iterable[dict[str, Any]], changed: float, *, is_first: bool) -> None:
        """Append rows.

        Args:
          changed: the time of the last row, in seconds since 1970.
          is_first: whether the rows replace all earlier ones.
        """
        rows, events = list(rows), []
        name = f"{goodput.PREFIX}steps"
        end = rows[-1].get(name, 0.0) if rows else 0.0
        for number, row in enumerate(rows):
            place = {"wall_time": changed - end + row.get(name, end), "step": row["step"]}
            if is_first and not number:
                events.append(_event(**place, session_log={"status": _START}))
            values = [
                {"tag": key, "simple_value": value}
                for key, value in row.items()
                if key != "step" and isinstance(value, (int, float))
            ]
            events.append(_event(**place, summary={"value": values}))
        with open(self._path, "ab") as file:
            file.write(b"".join(events))


def _event(**fields: Any) -> bytes:
    message = message_class(_EVENT, "mesh_transformer.event.Event")
    return framed(message(**fields).SerializeToString())
