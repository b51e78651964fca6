"""Upload of a run's metrics.jsonl to wandb from a separate process.

The process is separate so that no failure of wandb affects training.  The training process starts
the upload process as `python -m mesh_transformer.training.wandb_upload`.  The upload process sends
rows as they are added to the file.  It ends when its standard input is closed, which happens even
if the training process is killed by SIGKILL.  If the upload process fails during training, the
training process restarts it after a pause.  The pause doubles with each restart, up to a limit.
"""

import configparser
import contextlib
import json
import netrc
import os
import re
import select
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import IO, Any

from tqdm import tqdm

from mesh_transformer import extras
from mesh_transformer.config import Config
from mesh_transformer.util import start_thread

TOKEN = r"[\w-]+\.[\w-]+\.[\w-]+"  # a JSON web token, used in place of an API key
# wandb's default servers.  Newer versions use FORGE, and also accept keys stored for HOST.
FORGE, HOST = "api.forge.coreweave.com", "api.wandb.ai"
CLOSE_SECONDS = 15.0  # longest wait for the last rows to be sent
RETRY_SECONDS = (10.0, 600.0)  # first and longest pause before a restart
POLL_SECONDS = 1.0  # between checks of the file for new rows
PERMANENT_FAILURE = 3  # exit status if a restart would fail too (no account, a wrong key)


class WandbUpload:
    """Background upload of a metrics file to a wandb run.

    The constructor starts the upload process, which checks the API key while the run loads its data
    and weights.  No rows are sent until `begin` is called.

    Args:
      path: the metrics.jsonl to follow.

    Attributes:
      sent: the last step whose row was passed to wandb.  wandb may not have stored the row yet.
    """

    def __init__(self, path: str, config: Config):
        self._path = os.path.abspath(path)
        self._config = config
        self._task: dict[str, Any] | None = None
        self.sent = 0
        self._warned = False
        self._closing = threading.Event()
        self._lock = threading.Lock()  # for `_task` and `_process`
        self._process: subprocess.Popen[str] | None = None
        self._thread = start_thread(
            self._supervise, name="wandb", failed=lambda error: self._warn(repr(error))
        )

    def begin(self, run_id: str, after: int) -> None:
        """Begin to send rows.

        Args:
          run_id: the id of the wandb run, which is resumed if it exists.
          after: only the rows of steps after this one are sent.
        """
        self.sent = after
        task = {
            "path": self._path,
            "project": self._config.wandb_project,
            "name": self._config.name,
            "config": self._config.as_dict(),
            "id": run_id,
            "after": after,
        }
        with self._lock:
            self._task = task
            self._send_task()

    def _send_task(self) -> None:
        """Send the settings passed to `begin` to the upload process.

        Do nothing if `begin` has not been called yet, or if the process has not been started yet.
        """
        if self._task is not None and self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError, ValueError):  # the process may have died already
                self._process.stdin.write(json.dumps(self._task) + "\n")
                self._process.stdin.flush()

    def _supervise(self) -> None:
        """Run the upload process, and restart it when it fails.

        After `close` has been called, the process is restarted at most once.
        """
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
        """Run the upload process until it ends; return its exit status and its error message."""
        reason = ""
        try:
            process = subprocess.Popen(
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
            with self._lock:
                self._process = process
                self._send_task()
            assert process.stdout is not None
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
            warn(reason, self._path)

    def _end_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.close()

    def close(self) -> None:
        """Tell the upload process to send the last rows and end; wait up to `CLOSE_SECONDS`.

        If the process has not ended by then, it continues in the background.  If `begin` was never
        called, `close` does not wait.  Calling `close` again does nothing.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._end_input()
        if self._task is None:
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _print_error("wandb: the last metrics are still being sent in the background")


def warn(problem: str, path: str) -> None:
    """Print to stderr why a run's metrics are not uploaded to wandb, and what to do.

    Args:
      problem: the reason, such as the result of `key_problem`.
      path: the run's metrics.jsonl.
    """
    _print_error(
        f"wandb: {problem}; training continues, and its metrics are in {path} "
        "(log in with `wandb login`, or set WANDB_MODE to offline or disabled)"
    )


def _print_error(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


def key_problem() -> str | None:
    """Return a description of the problem if the wandb API key is missing or malformed, else None.

    This function checks the places where wandb looks for the key, without the slow import of wandb
    and without contacting the server.  It also returns None if no key is needed.
    """
    if not is_online() or _setting("identity_token_file"):
        return None
    host = urllib.parse.urlsplit(_setting("base_url") or f"https://{FORGE}").netloc
    hosts = (FORGE, HOST) if host == FORGE else (host,)
    usual = os.environ.get("NETRC") or "~/.netrc"
    file = os.path.expanduser(usual)
    if not os.path.exists(file):
        file = os.path.expanduser("~/_netrc")
    places = {"WANDB_API_KEY": _setting("api_key"), file: _netrc_password(file, hosts)}
    for place, key in places.items():
        if key:
            return None if is_well_formed(key) else f"the API key in {place} is malformed"
    return f"no API key for {hosts[-1]} in WANDB_API_KEY or {usual}"


def is_well_formed(key: str) -> bool:
    """Return whether an API key, or a JSON web token in place of a key, has a valid form.

    A key may begin with a prefix and a dash, as the keys of self-hosted wandb servers do.
    """
    prefix, dash, secret = key.partition("-")
    return bool(re.fullmatch(r"[\w-]{40,}", secret if dash else prefix) or re.fullmatch(TOKEN, key))


def is_online() -> bool:
    """Return whether wandb contacts its server; the user can turn this off with WANDB_MODE."""
    return _setting("mode") not in ("offline", "dryrun", "disabled")


def _setting(name: str) -> str | None:
    """Return a setting of wandb from the environment or wandb's settings files; None if not set."""
    if value := os.environ.get(f"WANDB_{name.upper()}"):
        return value
    folders = (
        os.path.join(os.environ.get("WANDB_DIR") or ".", "wandb"),
        os.environ.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb"),
    )
    for folder in folders:
        parser = configparser.ConfigParser(interpolation=None)
        with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
            parser.read(os.path.join(folder, "settings"), encoding="utf-8")
        if value := parser.get("default", name, fallback=None):
            return value
    return None


def _netrc_password(file: str, hosts: Sequence[str]) -> str | None:
    """Return a .netrc file's password for the first listed of `hosts`; None if none is listed."""
    try:
        content = netrc.netrc(file)
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return None
    entries = filter(None, map(content.authenticators, hosts))
    return next((password for _, _, password in entries), None)


def main() -> None:
    """Send the rows of a metrics file to wandb until standard input is closed.

    This function checks the API key, and then waits for the first line of standard input.  The line
    is a JSON object with the file's path and the settings of the wandb run (see
    `WandbUpload.begin`).
    Rows that are in the file when standard input is closed are still sent.
    """
    out = os.dup(1)
    os.dup2(2, 1)  # only `report` may write to the training process; stderr is discarded

    def report(line: str) -> None:
        with contextlib.suppress(OSError):  # the run may have ended before the last rows are sent
            os.write(out, f"{line}\n".encode())

    permanent: tuple[type[BaseException], ...] = ()
    try:
        import wandb
        from wandb.errors import AuthenticationError, UsageError

        permanent = (AuthenticationError, UsageError)
        if is_online():
            # Not permanent: wandb raises AuthenticationError even if the server does not answer.
            try:
                wandb.login(verify=True)
            except AuthenticationError as error:
                raise RuntimeError(str(error)) from None
        line = sys.stdin.readline()
        if not line:  # the run ended before it began to train
            return
        task = json.loads(line)
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
        text = extras.missing(error) if isinstance(error, ImportError) else None
        text = text or " ".join(str(error).split())[:300] or type(error).__name__
        report(f"failed: {text}")
        # A normal exit would run wandb's clean-up, which may wait for a service that is gone.
        os._exit(PERMANENT_FAILURE if isinstance(error, permanent) else 1)


def _rows(path: str, after: int) -> Iterator[dict[str, Any]]:
    """Yield the metrics file's rows of steps later than `after`, as they are added to the file.

    The iterator ends when standard input is closed and all rows have been yielded.
    """
    with open(path, encoding="utf-8") as file:
        ending = False
        while True:
            yield from _new_rows(file, after)
            if ending:
                return
            ending = bool(select.select([sys.stdin], [], [], POLL_SECONDS)[0])


def _new_rows(file: IO[str], after: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of steps later than `after` that were added to the file since the last call.

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
