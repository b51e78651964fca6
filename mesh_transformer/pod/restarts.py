"""Training runs and servers that survive host failures by restarting all hosts."""

import functools
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from etils import epath

from mesh_transformer.calls import Call, Result
from mesh_transformer.checkpoint.source import saved_steps
from mesh_transformer.checkpoint.step_folders import BEST, delete_step, own_steps
from mesh_transformer.config import Config
from mesh_transformer.data.loader import TFRecordNewInputs, open_train_set
from mesh_transformer.evaluation import all_steps, validation
from mesh_transformer.generation.batch import NewBatch
from mesh_transformer.network import Eval, Network, TrainableNetwork
from mesh_transformer.pod.faults import RaisedError
from mesh_transformer.storage.access import local_path, reason
from mesh_transformer.storage.locks import lock_folder
from mesh_transformer.training import loop
from mesh_transformer.training.goodput import Ledger
from mesh_transformer.training.metrics import NAME
from mesh_transformer.util import HostError, InputError, StoppedError

if TYPE_CHECKING:
    from mesh_transformer.pod.cluster import TPUCluster

ATTEMPTS = 3  # maximum attempts per call; each retry uses new hosts
SECONDS_BETWEEN = 5.0  # between two attempts


class RestartingCluster(Network):
    """A `TPUCluster` for servers that restarts all hosts after a host failure.

    If a host fails during `batch` or `eval`, or has failed earlier, all hosts are restarted and the
    call is retried.  If a host fails during `score`, `embed` or a method of a batch, HostError is
    raised, and the next call of `batch` or `eval` restarts the hosts.

    Args:
      make: function that returns a new cluster with its weights loaded.
    """

    def __init__(self, make: "Callable[[], TPUCluster]"):
        self._make = make
        self._closed = False
        self._cluster = make()
        self.config = self._cluster.config
        self.dp, self.batch_size = self._cluster.dp, self._cluster.batch_size

    @property
    def adapters(self) -> int:
        """Number of LoRA adapters that each text may choose from."""
        return self._cluster.adapters

    def run(self, call: Call[Result]) -> Result:
        """Run a call; see `TPUCluster.run`.

        Raises:
          HostError: if a host fails during another call than `Eval` and `NewBatch`, if all
            `ATTEMPTS` attempts fail, or if `close` has been called.
        """
        is_retried = isinstance(call, Eval | NewBatch)
        if is_retried:
            return self._call_with_retries(lambda cluster: cluster.run(call))
        return self._cluster.run(call)

    def _call_with_retries(self, call: "Callable[[TPUCluster], Result]") -> "Result":
        """Return `call(cluster)`; after a host failure, retry the call on new hosts.

        Raises:
          HostError: after `ATTEMPTS` failures, or if `close` has been called.
        """
        failures = 0
        while True:
            try:
                if self._cluster.ended:
                    if self._closed:
                        raise HostError("the hosts have been shut down because `close` was called")
                    print("restarting all hosts", file=sys.stderr, flush=True)
                    self._cluster = self._make()
                    if self._closed:  # another thread called `close` during the start
                        self._cluster.kill()
                return call(self._cluster)
            except HostError as error:
                failures += 1
                if failures == ATTEMPTS or self._closed:
                    raise
                print(error, file=sys.stderr, flush=True)
                time.sleep(SECONDS_BETWEEN)

    def close(self) -> None:
        """Shut down the hosts immediately, even during a call, and never restart them."""
        self._closed = True
        self._cluster.kill()


RETRIES = 8  # maximum number of consecutive restarts without progress
LONGEST_WAIT = 60.0  # seconds between two attempts


def train(
    make: Callable[[], TrainableNetwork],
    folder: str,
    *,
    max_steps: int | None = None,
    tune_model_path: str | None = None,
    fresh_opt: bool = False,
    fall_back: bool = False,
    validate: bool = True,
    ledger: Ledger | None = None,
    retries: int = RETRIES,
) -> None:
    """Run `training.loop.train`, and restart it on a new network after each host failure.

    Every attempt resumes from the newest saved state.  The wait before a new attempt is 1 s at
    first, and doubles after each failure without progress, up to `LONGEST_WAIT` seconds.  An
    attempt makes progress if it reaches a step that no earlier attempt has reached.

    The arguments not listed here are those of `training.loop.train`.

    Args:
      make: function that returns a new network; called for each attempt.
      retries: maximum number of consecutive restarts without progress.

    Raises:
      StoppedError: if a host fails again after `retries` restarts without progress, or if
        `training.loop.train` raises StoppedError for another reason.
    """

    ledger = ledger or Ledger()

    def attempt(network: TrainableNetwork) -> None:
        loop.train(
            network,
            folder,
            max_steps=max_steps,
            tune_model_path=tune_model_path,
            fresh_opt=fresh_opt,
            fall_back=fall_back,
            validate=validate,
            ledger=ledger,
        )

    _run_with_retries(make, attempt, retries, ledger)


def validate(make: Callable[[], TrainableNetwork], path: str, *, retries: int = RETRIES) -> None:
    """Run `validation.validate`, and restart it on a new network after each host failure.

    Args:
      make: function that returns a new network; called for each attempt.
      path: path of the model to validate.
      retries: maximum number of consecutive restarts without progress.
    """

    def attempt(network: TrainableNetwork) -> None:
        validation.validate(network, path)

    _run_with_retries(make, attempt, retries, Ledger())


def evaluate_all(
    make: Callable[[], TrainableNetwork], folder: str, *, retries: int = RETRIES
) -> None:
    """Run `all_steps.evaluate_all`, and restart it on a new network after each host failure.

    Args:
      make: function that returns a new network; called for each attempt.
      folder: the model folder.
      retries: maximum number of consecutive restarts without progress.
    """
    folder = local_path(folder)

    def attempt(network: TrainableNetwork) -> None:
        all_steps.evaluate_all(network, folder, functools.partial(saved_steps, folder))

    _run_with_retries(make, attempt, retries, Ledger())


def _run_with_retries(
    make: Callable[[], TrainableNetwork],
    attempt: Callable[[TrainableNetwork], None],
    retries: int,
    ledger: Ledger,
) -> None:
    """Call `attempt` with a new network from `make`, and repeat this after each host failure.

    If a host raises the same `RaisedError` twice without progress in between, it is not repeated
    again.

    See `train` for the waits between two attempts, and for `retries`.  `ledger` counts the seconds
    of the waits and of the calls of `make`.
    """
    furthest, failures, previous = -1, 0, ""
    while True:
        reached = furthest
        try:
            with ledger.spending("machines"):
                made = make()
            with loop.closing(made) as network:
                try:
                    return attempt(network)
                finally:
                    reached = network.step
        except HostError as error:
            if reached > furthest:
                furthest, failures, previous = reached, 0, ""
            failures += 1
            # Ports and process ids in an error differ between attempts.
            text = re.sub(r"\d+", "", str(error)) if isinstance(error, RaisedError) else ""
            repeated, previous = text and text == previous, text
            if failures > retries or repeated:
                raise StoppedError(
                    f"{error}; giving up after {failures} failures without progress"
                ) from None
            wait = min(2.0 ** (failures - 1), LONGEST_WAIT)
            print(
                f"{error}\nrestarting all hosts in {wait:.0f} s from the newest saved state "
                f"(restart {failures} of {retries} before step {furthest + 1})",
                file=sys.stderr,
                flush=True,
            )
            with ledger.spending("machines"):
                time.sleep(wait)


def delete_run(folder: str, *, yes: bool) -> None:
    """Delete a run's checkpoints, metrics and results; other files in the folder are kept.

    Args:
      folder: the run's model folder.
      yes: delete without asking the user for confirmation.

    Raises:
      InputError: if the user declines, if the user cannot be asked because standard input is not a
        terminal, if another process writes to the folder, or if a file cannot be deleted.
    """
    folder = local_path(folder)
    steps = own_steps(folder)
    records = [epath.Path(folder) / name for name in (NAME, BEST, all_steps.NAME)]
    names = sorted(path.name for path in (*steps, *records) if path.exists())
    if not names:
        return
    with lock_folder(folder):
        if not yes:
            _ask(folder, names)
        try:
            for path in steps:
                delete_step(path)
            for path in records:
                path.unlink(missing_ok=True)
        except OSError as error:
            failed_path = error.filename or folder
            raise InputError(
                f"--new: {failed_path} cannot be deleted: {reason(error)}; delete it manually"
            ) from None


def check_records(config: Config, *, validate: bool = True) -> None:
    """Raise InputError if this process cannot read the config's training or validation records.

    Call this before creating a TPU, so that a wrong path is reported before the TPU costs money.
    If the config sets `hosts_read`, the training records are not checked, because only the hosts
    need access to them.

    Args:
      validate: whether the run uses the validation records.
    """
    if not config.hosts_read:
        open_train_set(config, 1).close()
    if validate and config.val_batches:
        for path in config.val_set.values():
            TFRecordNewInputs(path, 1, config.seq, n_vocab=config.n_vocab, repeat=False).close()


def _ask(folder: str, names: list[str]) -> None:
    if not sys.stdin.isatty():
        raise InputError(
            f"--new would delete {', '.join(names)} in {folder}, but cannot ask for confirmation "
            "because standard input is not a terminal; add --yes to delete without confirmation"
        )
    try:
        answer = input(f"--new will delete {', '.join(names)} in {folder}. Continue? [y/N] ")
    except EOFError:  # Ctrl-D
        answer = "no"
    if answer.strip().lower() not in ("y", "yes"):
        raise InputError(f"nothing was deleted in {folder}; omit --new to resume the run there")
