"""Evaluation of all checkpoints of a model folder, for `--mode eval_all`."""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from mesh_transformer.evaluation import harness, validation
from mesh_transformer.evaluation.validation import Scores
from mesh_transformer.network import TrainableNetwork
from mesh_transformer.storage import files
from mesh_transformer.storage.access import is_uri, reason
from mesh_transformer.util import DamagedError, InputError

# Config keys that rows of earlier versions lack, with the values that these had.
LATER = {
    "chat_template": None,
    "packed_positions": "restart",
    "separate_documents": False,
    "val_by_position": False,
}
NAME = "evaluations.jsonl"  # in the model folder; one row per evaluated step


def evaluate_all(
    network: TrainableNetwork, folder: str, saved_steps: Callable[[], list[int]]
) -> None:
    """Evaluate a model folder's checkpoints in ascending order, and print one row per step.

    The rows are also appended to `evaluations.jsonl` in the folder.  Steps that have a row already
    are not evaluated again, so a stopped evaluation continues where it stopped.  A row counts only
    if the step has not been saved anew since, and if it was made with the same batch size and the
    same config keys for validation sets, lm-eval tasks and precision.  Damaged steps are reported
    and skipped.

    Args:
      folder: the model folder.
      saved_steps: a function that returns the numbers of the folder's steps, ascending.

    Raises:
      InputError: if the config has neither validation sets nor lm-eval tasks, or an objective that
        compares texts, or the folder has no steps or cannot be written.
    """
    config = network.config
    if config.objective is not None and not config.has_rollouts:
        raise InputError(
            f"--mode eval_all: objective is {config.objective}, but it scores every token; give "
            "--mode eval, or --set objective=null"
        )
    evaluation = validation.Evaluation(network)
    path, settings = os.path.join(folder, NAME), _settings(network)
    rows = _rows(path)
    known = {
        (row["step"], row.get("state")): row
        for row in rows
        if _completed(row.get("settings")) == settings
    }
    steps = saved_steps()
    if not steps:
        raise InputError(f"--mode eval_all: {folder} has no step_<N> folders; give a model folder")
    table, damaged = _Table(), 0
    for step in steps:
        state = _state(folder, step)
        row = known.get((step, state))
        if row is None:
            try:
                network.load(os.path.join(folder, f"step_{step}"), only_params=True)
            except InputError as error:
                if not isinstance(error, DamagedError) and step in saved_steps():
                    raise
                damaged += 1  # or deleted, by a run that is in progress
                print(f"step {step} is skipped: {error}", file=sys.stderr)
                continue
            row = {"step": step} | _values(*evaluation.run(network))
            row |= {"settings": settings, "state": state}
            rows.append(row)
            _write(path, rows)
        table.print(row)
    print(f"{path}: {len(steps) - damaged} steps evaluated, {damaged} skipped")


def _completed(settings: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings of a row, also of a version that did not record the later ones."""
    return settings and LATER | settings


def _settings(network: TrainableNetwork) -> dict[str, Any]:
    """Return what a row's values depend on, besides the step: config keys, and the batch size."""
    keys = ("val_set", "val_batches", "seq", "eval_harness_tasks", "eval_harness_limit")
    keys += ("tokenizer", "end_tokens", "dtype", "weight_bits", "int8_cache", *LATER)
    settings = {key: getattr(network.config, key) for key in keys}
    return settings | {"val_batch": validation.batch_size(network)}


def _state(folder: str, step: int) -> str | None:
    """Return a digest of a step's checksums, which differ if the step is saved again; None if it
    has none."""
    path = os.path.join(folder, f"step_{step}", "checksums.json")
    try:
        with files.open_file(path) as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None


def _values(scores_by_set: dict[str, Scores], results: dict[str, Any] | None) -> dict[str, float]:
    """Return a row's values; losses and task metrics are called as in metrics.jsonl."""
    values: dict[str, float] = {}
    for name, scores in scores_by_set.items():
        numbers = {"loss": scores.loss, "accuracy": scores.correct / max(scores.tokens, 1)}
        if scores.bytes:
            numbers["bits_per_byte"] = scores.nats / math.log(2) / scores.bytes
        values |= {f"val/{kind}_{name}": value for kind, value in numbers.items()}
        values |= scores.position_metrics(name)
    if results is not None:
        values |= {f"eval/{key}": value for key, value in harness.metric_values(results).items()}
    return {key: value for key, value in values.items() if math.isfinite(value)}


class _Table:
    """A table that is printed row by row; its columns are those of the first row."""

    def __init__(self) -> None:
        self._columns: list[str] = []

    def print(self, row: dict[str, Any]) -> None:
        if not self._columns:
            self._columns = [name for name in row if "/" in name]
            print(f"{'step':>10}", *(f"{name:>18}" for name in self._columns))
        cells = [f"{row[name]:18.4f}" if name in row else f"{'-':>18}" for name in self._columns]
        print(f"{row['step']:>10}", *cells, flush=True)


def _rows(path: str) -> list[dict[str, Any]]:
    """Return the rows of an earlier evaluation; incomplete lines are left out."""
    try:
        with files.open_file(path) as file:
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _write(path: str, rows: list[dict[str, Any]]) -> None:
    """Replace the file with all rows, which appear together."""
    try:
        files.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        assert not is_uri(path)
        raise InputError(f"{path} cannot be written ({reason(error)}); make room") from error
