"""Show the state of runs in a table, draw their metrics, or publish these while they train.

A run is a folder with a metrics.jsonl or a status.json, which may be in a bucket.  Runs are looked
for in the given folders and in their subfolders.  With --follow, the command waits for new metrics
until it is interrupted.
"""

import argparse
import contextlib
import datetime
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mesh_transformer import status_lines
from mesh_transformer.checkpoint.step_folders import committed_steps
from mesh_transformer.cli.arguments import Parser, natural, positive
from mesh_transformer.performance import pictures
from mesh_transformer.storage import files
from mesh_transformer.storage.access import is_uri
from mesh_transformer.training import run_status, runs
from mesh_transformer.training.metrics import NAME
from mesh_transformer.util import InputError

if TYPE_CHECKING:
    from mesh_transformer.training.exporter import Newest

LOSS = "train/loss"
SMOOTHED = 50  # points of a curve, about


def parse_args() -> argparse.Namespace:
    parser = Parser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="folder that contains runs")
    parser.add_argument("--picture", help="PNG or SVG file in which to draw a metric of all runs")
    parser.add_argument(
        "--metric", default=LOSS, help="metric to draw, such as val/loss_NAME (default %(default)s)"
    )
    parser.add_argument(
        "--tensorboard", metavar="DIR", help="folder in which to write all metrics for TensorBoard"
    )
    parser.add_argument(
        "--port",
        type=natural,
        help="port at which to serve the newest metrics to Prometheus; implies --follow",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address at which to serve them; 0.0.0.0 for all (default %(default)s)",
    )
    parser.add_argument("--follow", action="store_true", help="continue with new metrics and runs")
    parser.add_argument(
        "--every",
        type=positive,
        default=10,
        metavar="SECONDS",
        help="time between two looks for new metrics (default %(default)s)",
    )
    return parser.parse_args()


class Watched:
    """The runs in some folders, and what is published of them.

    Args:
      tensorboard: the folder for TensorBoard's files, or None.
      newest: gets the newest metrics, or None.

    Attributes:
      rows: the rows of each run, by its name.
    """

    def __init__(
        self,
        folders: list[str],
        tensorboard: str | None = None,
        newest: "Newest | None" = None,
    ):
        self._folders, self._tensorboard, self._newest = folders, tensorboard, newest
        self._files: dict[str, runs.MetricsFile] = {}
        self._events: dict[str, runs.EventFile] = {}
        self._problems: dict[str, str] = {}
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def update(self) -> None:
        """Look for new runs and new rows.

        Runs that have vanished are forgotten.  Of those that cannot be read, the problem is printed
        when it appears.
        """
        before, self._files = self._files, {}
        for name, path in self._all():
            self._files[name] = before.get(name) or runs.MetricsFile(path)
        self.rows = {name: rows for name, rows in self.rows.items() if name in self._files}
        for name, file in self._files.items():
            try:
                if self.rows.get(name) or files.is_file(file.path):
                    rows, is_first = file.new_rows()
                    if rows:
                        self._publish(name, file, rows, is_first)
                if name not in self.rows and run_status.read(_folder(file.path)):
                    self.rows[name] = []
                self._problems.pop(name, None)
            except (InputError, OSError) as error:
                if self._problems.get(name) != str(error):
                    print(f"{error}", file=sys.stderr)
                self._problems[name] = str(error)
        if self._newest is not None:
            self._newest.keep(self.rows)

    def _all(self) -> Iterator[tuple[str, str]]:
        for folder in self._folders:
            for name, path in runs.find_runs(folder).items():
                whole = name if len(self._folders) == 1 else os.path.join(folder, name)
                parts = whole.replace("://", "/").split("/")
                yield "/".join(part for part in parts if part not in ("", ".", "..")), path

    def _publish(
        self, name: str, file: runs.MetricsFile, rows: list[dict[str, Any]], is_first: bool
    ) -> None:
        if is_first:
            self.rows[name] = []
        self.rows[name].extend(rows)
        if self._newest is not None:
            self._newest.update(name, rows, is_first=is_first)
        if self._tensorboard is not None:
            if name not in self._events:
                self._events[name] = runs.EventFile(os.path.join(self._tensorboard, name))
            changed = files.status(file.path)[1] / 1e9
            self._events[name].write(rows, changed, is_first=is_first)

    def table(self) -> str:
        """Return a table with a line per run, and lines about runs that need attention."""
        lines, remarks = [], []
        for name, rows in self.rows.items():
            path = self._files[name].path
            folder = _folder(path)
            written = path if files.is_file(path) else f"{folder}/{run_status.NAME}"
            changed = files.status(written)[1] / 1e9
            when = datetime.datetime.fromtimestamp(changed).strftime("%Y-%m-%d %H:%M")
            status, saved = run_status.read(folder), committed_steps(folder)
            left = None
            if status.get("state") == "running":
                left = runs.seconds_left(rows, status["total_steps"])
            more = {
                "hours left": left and left / 3600,
                "saved": saved[-1] if saved else None,
                "state": status.get("state"),
            }
            lines.append([name, *map(_text, (runs.summary(rows) | more).items()), when])
            remarks += [f"{name}: {line}" for line in _remarks(folder, status, rows)]
        columns = ["run", *runs.summary([]), "hours left", "saved", "state", "last change"]
        widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)]
        aligned = [
            [cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]
            for cells in (columns, *lines)
        ]
        return "\n".join([*("  ".join(cells) for cells in aligned), *remarks])


def _folder(path: str) -> str:
    return path.removesuffix(f"/{NAME}")


def _remarks(folder: str, status: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what the user of a run should know: how it failed, damaged checkpoints, alerts."""
    match status.get("state"):
        case "failed":
            yield f"failed with status {status['status']}: {status['reason']}"
        case "killed":
            yield f"ended without notice on {status['host']}; start it again to resume"
        case "stopped":
            reason = status.get("reason", run_status.SIGNAL)
            advice = "start it again" if reason == run_status.SIGNAL else "raise --max-steps"
            yield f"stopped at step {status['step']} by {reason}; {advice} to resume"
    damaged = [name for name in files.names(folder) if re.match(r"step_\d+\.damaged", name)]
    if damaged:
        yield f"damaged checkpoints: {', '.join(sorted(damaged))}"
    if alert := runs.last_alert(rows):
        yield f"last alert: {alert}"


def _text(item: tuple[str, Any]) -> str:
    name, value = item
    if value is None or isinstance(value, str):
        return value or "-"
    formats = {"tokens/s": ",.0f", "MFU": ".1%", "hours": ".2f", "hours left": ".2f"}
    return format(value, formats.get(name, ",d" if isinstance(value, int) else ".4f"))


def draw(rows: dict[str, list[dict[str, Any]]], metric: str, picture: str) -> None:
    """Draw a metric of all runs by step; frequent values are averaged.

    Raises:
      InputError: if no run has it.
    """
    figure, axes = pictures.pyplot().subplots(figsize=(8, 4.5), layout="constrained")
    for name, own in rows.items():
        points = [(row["step"], row[metric]) for row in own if metric in row]
        size = -(-len(points) // SMOOTHED)
        parts = [points[at : at + size] for at in range(0, len(points), size or 1)]
        means = [[sum(values) / len(part) for values in zip(*part, strict=True)] for part in parts]
        if means:
            axes.plot(*zip(*means, strict=True), label=name, marker="." if size == 1 else None)
    if not axes.lines:
        known = sorted({key for own in rows.values() for row in own for key in row} - {"step"})
        raise InputError(f"--metric {metric}: no run has it; expected one of {', '.join(known)}")
    axes.set(xlabel="step", ylabel=metric)
    axes.grid(alpha=0.3)
    axes.legend()
    pictures.save(figure, picture)


def main() -> None:
    args = parse_args()
    if args.tensorboard and is_uri(args.tensorboard):
        raise InputError(f"--tensorboard {args.tensorboard}: give a local folder")
    newest = None
    if args.port is not None:
        from mesh_transformer.training.exporter import Newest

        newest = Newest()
    watched = Watched(args.folders, args.tensorboard, newest)
    watched.update()
    follow = args.follow or newest is not None
    if not watched.rows and not follow:
        raise InputError(
            f"{args.folders[0]}: no run with a row or a state in this folder or its subfolders; "
            "give a folder that contains model folders"
        )
    if watched.rows:
        print(watched.table(), flush=True)
        if args.picture:
            draw(watched.rows, args.metric, args.picture)
            print(f"wrote {args.picture}", flush=True)
    if newest is not None:
        port = newest.serve(args.port or 0, args.host)
        print(f"metrics for Prometheus: http://{args.host}:{port}/metrics", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        if follow:
            status_lines.end()
        while follow:
            time.sleep(args.every)
            watched.update()
            if args.picture and watched.rows:
                draw(watched.rows, args.metric, args.picture)
