"""Runs and servers that outlive their hosts: restarted when a host fails."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from etils import epath

from mesh_transformer.checkpoint.native import delete_step, own_steps
from mesh_transformer.config import Config
from mesh_transformer.data.loader import TFRecordNewInputs, open_train_set
from mesh_transformer.data.storage import FolderLock, local_path, reason
from mesh_transformer.evaluation import validation
from mesh_transformer.generation.decode import Chosen
from mesh_transformer.network import TrainableNetwork
from mesh_transformer.pod.batch import ClusterBatch
from mesh_transformer.training import loop
from mesh_transformer.training.metrics import NAME
from mesh_transformer.util import HostError, InputError, StoppedError

if TYPE_CHECKING:
    from mesh_transformer.pod.cluster import TPUCluster

ATTEMPTS = 3  # on end at which new hosts may fail before they have a batch
SECONDS_BETWEEN = 5.0

Answer = TypeVar("Answer")


class LastingCluster:
    """A cluster whose hosts are all made anew, for the next question, once one of them has failed.

    Args:
      make: gives a new cluster, with its weights.
    """

    def __init__(self, make: "Callable[[], TPUCluster]"):
        self._make = make
        self._closed = False
        self._cluster = make()
        self.config = self._cluster.config
        self.dp = self._cluster.dp

    def batch(self, rows: int) -> ClusterBatch:
        """As `TPUCluster.batch`; HostError where new hosts fail too."""
        return self._lasting(lambda cluster: cluster.batch(rows))

    def eval(self, sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As `TPUCluster.eval`; HostError where new hosts fail too."""
        return self._lasting(lambda cluster: cluster.eval(sample))

    def _lasting(self, ask: "Callable[[TPUCluster], Answer]") -> "Answer":
        failures = 0
        while True:
            try:
                if self._cluster.ended:
                    if self._closed:
                        raise HostError("the hosts have been ended")
                    print("all hosts start again", file=sys.stderr, flush=True)
                    self._cluster = self._make()
                    if self._closed:  # meanwhile
                        self._cluster.kill()
                return ask(self._cluster)
            except HostError as error:
                failures += 1
                if failures == ATTEMPTS or self._closed:
                    raise
                print(error, file=sys.stderr, flush=True)
                time.sleep(SECONDS_BETWEEN)

    @property
    def batch_size(self) -> int:
        """As `TPUCluster.batch_size`."""
        return self._cluster.batch_size

    def score(self, tokens: np.ndarray, alternatives: int) -> Chosen:
        """As `TPUCluster.score`."""
        return self._cluster.score(tokens, alternatives)

    def close(self) -> None:
        """Ends the hosts at once and for good, whatever they do: there is nothing to save."""
        self._closed = True
        self._cluster.kill()


RETRIES = 8
LONGEST_WAIT = 60.0


def train(
    make: Callable[[], TrainableNetwork],
    folder: str,
    *,
    max_steps: int | None = None,
    tune_model_path: str | None = None,
    fresh_opt: bool = False,
    retries: int = RETRIES,
) -> None:
    """As `training.train`, with a new network from `make` after each failure of a host.

    Every attempt goes on from the newest checkpoint.  After `retries` failures on end at which
    the run was no further than at one before, it gives up; between them the wait doubles.

    Raises:
      StoppedError: when it gives up, and where `training.train` raises it.
    """

    def attempt(network: TrainableNetwork) -> None:
        loop.train(
            network,
            folder,
            max_steps=max_steps,
            tune_model_path=tune_model_path,
            fresh_opt=fresh_opt,
        )

    _until_done(make, attempt, retries)


def validate(make: Callable[[], TrainableNetwork], path: str, *, retries: int = RETRIES) -> None:
    """As `validation.validate`, again on a new network where a host failed."""

    def attempt(network: TrainableNetwork) -> None:
        validation.validate(network, path)

    _until_done(make, attempt, retries)


def _until_done(
    make: Callable[[], TrainableNetwork],
    attempt: Callable[[TrainableNetwork], None],
    retries: int,
) -> None:
    furthest, failures = -1, 0
    while True:
        reached = furthest
        try:
            with loop.closing(make()) as network:
                try:
                    return attempt(network)
                finally:
                    reached = network.step
        except HostError as error:
            if reached > furthest:
                furthest, failures = reached, 0
            failures += 1
            if failures > retries:
                raise StoppedError(
                    f"{error}; given up after {failures} failures without a step of progress"
                ) from None
            wait = min(2.0 ** (failures - 1), LONGEST_WAIT)
            print(
                f"{error}\nall hosts start again in {wait:.0f} s, from the newest checkpoint "
                f"(failure {failures} of {retries} before step {furthest + 1})",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(wait)


def begin_anew(folder: str, *, yes: bool) -> None:
    """Deletes a run's checkpoints and metrics, once the user agrees (`yes`: has agreed).

    Nothing else in the folder is touched.

    Raises:
      InputError: where the answer is no, nobody is there to answer, another process writes there,
        or it cannot be deleted.
    """
    folder = local_path(folder)
    steps, metrics = own_steps(folder), epath.Path(folder) / NAME
    names = sorted(path.name for path in (*steps, metrics) if path.exists())
    if not names:
        return
    with FolderLock(folder):
        if not yes:
            _ask(folder, names)
        try:
            for path in steps:
                delete_step(path)
            metrics.unlink(missing_ok=True)
        except OSError as error:
            where = error.filename or folder
            raise InputError(f"--new: {where} cannot be deleted: {reason(error)}") from None


def check_records(config: Config) -> None:
    """Raises InputError where the driver cannot read the config's records.

    For a driver, before it makes a TPU; it does not look where the hosts are to read them.
    """
    if not config.hosts_read:
        open_train_set(config, 1).close()
    if config.val_batches:
        for path in config.val_set.values():
            TFRecordNewInputs(path, 1, config.seq, n_vocab=config.n_vocab, repeat=False).close()


def _ask(folder: str, names: list[str]) -> None:
    if not sys.stdin.isatty():
        raise InputError(
            f"--new would delete {', '.join(names)} in {folder}, and nobody is there to agree; "
            "give --yes too"
        )
    try:
        answer = input(f"--new deletes {', '.join(names)} in {folder}. Delete them? [y/N] ")
    except EOFError:  # Ctrl-D
        answer = "no"
    if answer.strip().lower() not in ("y", "yes"):
        raise InputError(f"{folder} is as it was; leave --new out to go on with its run")
