"""Upload of a run's metrics.jsonl to wandb from a separate process.

The process is separate so that no failure of wandb affects training.  The training process starts
it as `python -m mesh_transformer.training.wandb_upload`.  The upload process sends rows as they are
added to the file.  It ends when its standard input is closed, which happens even if the training
process is killed by SIGKILL.  If the upload process fails during training, it is restarted after a
pause, and the pauses become longer.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any

from tqdm import tqdm

from mesh_transformer.config import Config

CLOSE_SECONDS = 15.0  # longest wait for the last rows to be sent
RETRY_SECONDS = (10.0, 600.0)  # first and longest pause before a restart
POLL_SECONDS = 1.0  # between checks of the file for new rows
PERMANENT_FAILURE = 3  # exit status if a restart would fail too (no account, a wrong key)


class WandbUpload:
    """Background upload of a metrics file to a wandb run.

    Args:
      path: the metrics.jsonl to follow.
      run_id: the id of the wandb run, which is resumed if it exists.
      after: only the rows of steps after this one are sent.

    Attributes:
      sent: the last step whose row was passed to wandb.  wandb may not have stored the row yet.
    """

    def __init__(self, path: str, config: Config, run_id: str, after: int):
        self._task = {
            "path": os.path.abspath(path),
            "project": config.wandb_project,
            "name": config.name,
            "config": config.as_dict(),
            "id": run_id,
            "after": after,
        }
        self.sent = after
        self._warned = False
        self._closing = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._supervise, name="wandb", daemon=True)
        self._thread.start()

    def _supervise(self) -> None:
        """Run the upload process and restart it if it fails; after `close`, at most once."""
        pause = RETRY_SECONDS[0]
        while True:
            last = self._closing.is_set()
            status, reason = self._run()
            if status == 0:
                return
            self._warn(reason or f"the upload process exited with status {status}")
            if status == PERMANENT_FAILURE or last:
                return
            self._closing.wait(pause)
            pause = min(2 * pause, RETRY_SECONDS[1])

    def _run(self) -> tuple[int, str]:
        """Run the upload process once; return its exit status and the reason for any failure."""
        reason = ""
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "mesh_transformer.training.wandb_upload"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # so that Ctrl-C does not reach it
            )
        except OSError as error:
            return 1, str(error.strerror)
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):  # it may have died already
                process.stdin.write(json.dumps(self._task) + "\n")
                process.stdin.flush()
            if self._closing.is_set():
                self._end_input()
            for line in process.stdout:
                kind, _, text = line.rstrip("\n").partition(" ")
                if kind == "failed:":
                    reason = text
                elif kind == "sent:":
                    self.sent = int(text)
                elif kind == "url:":
                    _print_error(f"wandb: {text}")
        return process.returncode, reason

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _print_error(
                f"wandb: {reason}; training continues, and its metrics are in "
                f"{self._task['path']} (set WANDB_MODE=offline or disabled to avoid this)"
            )

    def _end_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.close()

    def close(self) -> None:
        """Tell the upload process to send the last rows and end; wait up to `CLOSE_SECONDS`.

        After that time the process continues in the background.
        """
        self._closing.set()
        self._end_input()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _print_error("wandb: the last metrics are still being sent in the background")


def _print_error(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


def main() -> None:
    """Send the rows of a metrics file to wandb until standard input is closed.

    The first line of standard input is a JSON object with the file's path and the settings of the
    wandb run (see `WandbUpload`).  Rows that are in the file when standard input is closed are
    still sent.
    """
    task = json.loads(sys.stdin.readline())
    out = os.dup(1)
    os.dup2(2, 1)  # only `report` may write to the training process; stderr is discarded
    import wandb
    from wandb.errors import AuthenticationError, UsageError

    def report(line: str) -> None:
        with contextlib.suppress(OSError):  # the run may have ended before the last rows are sent
            os.write(out, f"{line}\n".encode())

    try:
        run = wandb.init(
            project=task["project"],
            name=task["name"],
            config=task["config"],
            id=task["id"],
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        if run.url:
            report(f"url: {run.url}")
        # wandb refuses rows of steps that a resumed run already has.
        for row in _rows(task["path"], max(task["after"], run.step - 1)):
            run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])
            report(f"sent: {row['step']}")
        run.finish()
    except BaseException as error:
        report(f"failed: {' '.join(str(error).split())[:300] or type(error).__name__}")
        # A normal exit would run wandb's clean-up, which may wait for a service that is gone.
        os._exit(PERMANENT_FAILURE if isinstance(error, UsageError | AuthenticationError) else 1)


def _rows(path: str, after: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of steps after `after` as they are added, until standard input is closed."""
    with open(path, encoding="utf-8") as file:
        ending = False
        while True:
            yield from _new_rows(file, after)
            if ending:
                return
            ending = bool(select.select([sys.stdin], [], [], POLL_SECONDS)[0])


def _new_rows(file: IO[str], after: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of steps after `after` that were added to the file since the last call.

    An incomplete line at the end of the file is left for the next call.
    """
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(start)
            return
        row = json.loads(line)
        if row["step"] > after:
            yield row


if __name__ == "__main__":
    main()
