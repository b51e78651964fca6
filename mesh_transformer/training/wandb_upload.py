"""Sends a run's metrics.jsonl to wandb from a process of its own.

No failure of wandb reaches the run: `python -m mesh_transformer.training.wandb_upload` follows the
file and ends when its standard input does, which even a SIGKILL of the run closes.  Where it fails
it is started again, after longer and longer pauses, as long as the run lasts.
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

CLOSE_SECONDS = 15.0  # for the last rows to be sent, while the run waits
RETRY_SECONDS = (10.0, 600.0)  # between starts: at first, at most
LOOK_SECONDS = 1.0  # between looks at the file
HOPELESS = 3  # exit status: another try would fail too (no account, a wrong key)


class WandbUpload:
    """The run on wandb of a metrics file, sent in the background.

    Args:
      path: the metrics.jsonl to follow.
      run_id: the run on wandb, which is resumed where there is one.
      after: rows of later steps are sent.

    Attributes:
      sent: the last step that wandb was given; it may not have kept it.
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
        """Starts the process, and again where it fails, until the run ends and once after that."""
        pause = RETRY_SECONDS[0]
        while True:
            last = self._closing.is_set()
            status, why = self._run()
            if status == 0:
                return
            self._warn(why or f"its process ended with status {status}")
            if status == HOPELESS or last:
                return
            self._closing.wait(pause)
            pause = min(2 * pause, RETRY_SECONDS[1])

    def _run(self) -> tuple[int, str]:
        """The exit status of one process, and what it said of a failure."""
        why = ""
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "mesh_transformer.training.wandb_upload"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C is the run's
            )
        except OSError as error:
            return 1, str(error.strerror)
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):  # it has died already
                process.stdin.write(json.dumps(self._task) + "\n")
                process.stdin.flush()
            if self._closing.is_set():
                self._end_input()
            for line in process.stdout:
                kind, _, text = line.rstrip("\n").partition(" ")
                if kind == "failed:":
                    why = text
                elif kind == "sent:":
                    self.sent = int(text)
                elif kind == "url:":
                    _say(f"wandb: {text}")
        return process.returncode, why

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            _say(
                f"wandb: {why}; the run goes on, and {self._task['path']} has its metrics "
                "(WANDB_MODE=offline or disabled avoids this)"
            )

    def _end_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.close()

    def close(self) -> None:
        """Has the last rows sent; leaves the process to it where that takes long."""
        self._closing.set()
        self._end_input()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _say("wandb: the last metrics are still being sent, in the background")


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


def main() -> None:
    """Sends the rows of the task on standard input until that ends; then the rest, and exits."""
    task = json.loads(sys.stdin.readline())
    out = os.dup(1)
    os.dup2(2, 1)  # what wandb prints is nobody's
    import wandb
    from wandb.errors import AuthenticationError, UsageError

    def tell(line: str) -> None:
        with contextlib.suppress(OSError):  # of a run that has ended, and left the rest to us
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
            tell(f"url: {run.url}")
        # A resumed run says how far it is; what is known there already would be refused.
        for row in _rows(task["path"], max(task["after"], run.step - 1)):
            run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])
            tell(f"sent: {row['step']}")
        run.finish()
    except BaseException as error:
        tell(f"failed: {' '.join(str(error).split())[:300] or type(error).__name__}")
        # wandb's own clean-up may wait for a service that is gone.
        os._exit(HOPELESS if isinstance(error, UsageError | AuthenticationError) else 1)


def _rows(path: str, after: int) -> Iterator[dict[str, Any]]:
    """The file's rows of steps past `after`, as they come; ends soon after standard input does."""
    with open(path, encoding="utf-8") as file:
        ending = False
        while True:
            yield from _whole_rows(file, after)
            if ending:
                return
            ending = bool(select.select([sys.stdin], [], [], LOOK_SECONDS)[0])


def _whole_rows(file: IO[str], after: int) -> Iterator[dict[str, Any]]:
    """What has been added in whole lines; a part of one is read again next time."""
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
