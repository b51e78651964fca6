"""A run that a driver looks after: begun anew where asked, gone on with where a host failed."""

import contextlib
import re
import sys
import time
from collections.abc import Callable

from etils import epath

from mesh_transformer import training
from mesh_transformer.metrics import NAME
from mesh_transformer.util import HostError, InputError, StoppedError

RETRIES = 8
LONGEST_WAIT = 60.0
_STEP = re.compile(r"step_\d+(\.orbax-checkpoint-tmp.*)?")


def train(
    make: Callable[[], training.Network],
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
    furthest, failures = -1, 0
    while True:
        reached = furthest
        try:
            with contextlib.closing(make()) as network:
                try:
                    return training.train(
                        network,
                        folder,
                        max_steps=max_steps,
                        tune_model_path=tune_model_path,
                        fresh_opt=fresh_opt,
                    )
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
      InputError: where the answer is no, nobody is there to answer, or it cannot be deleted.
    """
    root = epath.Path(folder)
    found = [] if not root.is_dir() else [p for p in root.iterdir() if _is_of_a_run(p.name)]
    if not found:
        return
    if not yes:
        _ask(folder, sorted(path.name for path in found))
    try:
        for path in found:
            _delete(path)
    except OSError as error:
        raise InputError(f"--new: {error.filename} cannot be deleted: {error.strerror}") from None


def _is_of_a_run(name: str) -> bool:
    return name == NAME or bool(_STEP.fullmatch(name))


def _ask(folder: str, names: list[str]) -> None:
    if not sys.stdin.isatty():
        raise InputError(
            f"--new would delete {', '.join(names)} in {folder}, and nobody is there to agree; "
            "give --yes too"
        )
    answer = input(f"--new deletes {', '.join(names)} in {folder}. Delete them? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise InputError(f"{folder} is as it was; leave --new out to go on with its run")


def _delete(path: epath.Path) -> None:
    """Deletes a step folder, the files that say it is whole first, or a file."""
    if not path.is_dir():
        path.unlink()
        return
    for child in path.iterdir():
        if not child.is_dir():
            child.unlink()
    path.rmtree()
