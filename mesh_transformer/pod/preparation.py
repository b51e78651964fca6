"""What a driver does before it creates machines: check the records, and delete a run with --new."""

import contextlib
import sys

from etils import epath

from mesh_transformer import status_lines
from mesh_transformer.checkpoint.step_folders import BEST, delete_step, own_steps
from mesh_transformer.config import Config
from mesh_transformer.data.loader import TFRecordNewInputs, open_train_set
from mesh_transformer.evaluation import all_steps
from mesh_transformer.storage.access import local_path, reason
from mesh_transformer.storage.locks import lock_folder
from mesh_transformer.training import run_status
from mesh_transformer.training.metrics import NAME
from mesh_transformer.util import InputError


def check_records(config: Config, *, validate: bool = True) -> None:
    """Raise InputError if this process cannot read the config's training or validation records.

    The first records of each set are read.  Call this before creating a TPU, so that a wrong path
    or a set of another `seq` is reported before the TPU costs money.
    If the config sets `hosts_read`, the training records are not checked, because only the hosts
    need access to them; nor are prompts.

    Args:
      validate: whether the run uses the validation records.
    """
    if not (config.hosts_read or config.has_rollouts):
        kind = config.objective_kind
        with contextlib.closing(open_train_set(config.replace(shuffle_buffer=0), 1)) as batches:
            if kind is None or not kind.needs_reference:  # which the run has yet to compute
                batches.get_samples()
    if validate and config.val_batches:
        for path in config.val_set.values():
            opened = TFRecordNewInputs(path, 1, config.seq, n_vocab=config.n_vocab, repeat=False)
            with contextlib.closing(opened) as batches:
                next(batches)


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
    records = [epath.Path(folder) / name for name in (NAME, BEST, all_steps.NAME, run_status.NAME)]
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


def _ask(folder: str, names: list[str]) -> None:
    if not sys.stdin.isatty():
        raise InputError(
            f"--new would delete {', '.join(names)} in {folder}, but cannot ask for confirmation "
            "because standard input is not a terminal; add --yes to delete without confirmation"
        )
    try:
        with status_lines.paused():
            answer = input(f"--new will delete {', '.join(names)} in {folder}. Continue? [y/N] ")
    except EOFError:  # Ctrl-D
        answer = "no"
    if answer.strip().lower() not in ("y", "yes"):
        raise InputError(f"nothing was deleted in {folder}; omit --new to resume the run there")
