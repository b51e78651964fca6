"""The training loop: resume, train, validate, save and log.

The loop uses a network only through the interface `TrainableNetwork`, so the same code trains in a
single process and on a TPU pod.
"""

import contextlib
import functools
import math
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from mesh_transformer.data.loader import describe_batch
from mesh_transformer.evaluation import harness, validation
from mesh_transformer.model import flops
from mesh_transformer.network import TrainableNetwork, TrainSet
from mesh_transformer.storage.access import AnyPath, local_path, set_aside
from mesh_transformer.training.agreement import Agreement
from mesh_transformer.training.goodput import Ledger
from mesh_transformer.training.metrics import (
    MetricsLog,
    NoiseScale,
    NoLog,
    StepClock,
    row_of,
    start_wandb,
)
from mesh_transformer.training.optimizer import schedule_changes
from mesh_transformer.util import DamagedError, HostError, InputError, StoppedError

IN_FLIGHT = 2  # steps dispatched before the oldest one's loss is read
MOST_STEPS_BETWEEN_SAVES = 8  # longest pause between attempts to save, while saving fails

NetworkLike = TypeVar("NetworkLike", bound=TrainableNetwork)


def train(
    network: TrainableNetwork,
    folder: AnyPath,
    *,
    max_steps: int | None = None,
    tune_model_path: AnyPath | None = None,
    fresh_opt: bool = False,
    fall_back: bool = False,
    ledger: Ledger | None = None,
    agreement: Agreement | None = None,
) -> None:
    """Train until the global step is `max_steps` (default: the config's `total_steps`).

    Training resumes from the newest checkpoint in `folder`.  If there is none, training starts from
    the model at `tune_model_path`, or from freshly initialised weights if no path is given.  With
    `fresh_opt`, the Adam moments at `tune_model_path` are not loaded.  When a LoRA run resumes and
    its base model has moved, `tune_model_path` must be the base model's new location.

    If the newest checkpoint is damaged, DamagedError is raised.  With `fall_back`, the damaged
    checkpoint is renamed to step_N.damaged, and training resumes from the newest intact one.

    `ledger` (default: a new one) measures how the run spends its time.  The measured seconds are
    logged before each save or validation and at the end, when a summary is also printed.

    `agreement` makes several processes that run this function on one network decide alike (default:
    this process decides alone).

    A checkpoint is saved every `ckpt_every` steps and at the end of training.  On SIGTERM, Ctrl-C
    or SIGHUP (the terminal closes), a checkpoint is saved and `train` returns.  If an error ends
    training, a checkpoint is saved first, unless the error is a StoppedError.  If a save fails, the
    failure is reported and the save is retried later, while training continues.  No other process
    may write to `folder` during training.

    Raises:
      InputError: if an input cannot be used, if the last save fails twice, or if any save fails and
        the config's `on_save_failure` is "stop".
      StoppedError: if a loss or gradient norm is not finite and the config does not set
        `skip_nonfinite`, or if `max_skipped` updates in a row were skipped.  That step and later
        steps are not saved.  Also if a host fails after this process has received a signal.
      HostError: if a host fails, or receives SIGTERM, before this process has received a signal.
        If it was SIGTERM, a checkpoint was saved first.
    """
    config, folder = network.config, local_path(folder)
    base = None if tune_model_path is None else os.fspath(tune_model_path)
    total = config.total_steps if max_steps is None else max_steps
    config.replace(total_steps=total).require_to_train()
    assert config.train_set is not None
    assert total is not None
    if total < 1:
        key = "total_steps" if max_steps is None else "--max-steps"
        raise InputError(f"{key} is {total}, expected at least 1")
    saved = False
    agreement = agreement or Agreement()
    with agreement.stop_signals() as received:
        try:
            with closing(network):
                _train(
                    network,
                    folder,
                    total,
                    base,
                    fresh_opt,
                    fall_back,
                    ledger or Ledger(),
                    agreement,
                    received,
                )
                saved = True
        except HostError as error:
            if saved:  # the host failed while closing: nothing is lost
                return
            if not received:
                raise
            raise StoppedError(
                f"stopped by {signal.Signals(received[0]).name} without saving: {error}; start "
                "again to resume from the newest checkpoint"
            ) from None


def _train(
    network: TrainableNetwork,
    folder: str,
    total: int,
    tune_model_path: str | None,
    fresh_opt: bool,
    fall_back: bool,
    ledger: Ledger,
    agreement: Agreement,
    received: list[int],
) -> None:
    """Train until step `total` or until a signal is received, then save.

    Args:
      received: the list of the signals received so far (see `Agreement.stop_signals`).
    """
    config = network.config
    val_sets = {} if config.val_batches == 0 else config.val_set
    with contextlib.ExitStack() as stack:
        wandb = start_wandb(folder, config) if agreement.writes else None
        if wandb is not None:
            stack.callback(wandb.close)
        eval_tasks = harness.load_harness(config)
        loader = stack.enter_context(contextlib.closing(network.open_train_set()))
        for path in val_sets.values():  # report an unusable set now, not after hours
            validation.open_set(network, path).close()
        with ledger.spending("restore"):
            network.claim(folder)
            aux = _restore(network, folder, tune_model_path, fall_back, agreement)
            if aux is None:
                start_weights(network, tune_model_path, fresh_opt)
        if aux is None:
            aux = {}
        elif tune_model_path is not None and not config.lora_rank:
            print(f"resuming {folder} from step {network.step}: {tune_model_path} is not loaded")
        if changes := schedule_changes(config, aux.get("config", {})):
            print(f"resuming {folder} with another learning rate schedule: {changes}")
        has_scores = bool(val_sets or eval_tasks)
        unscored = agreement.once(lambda: _unscored(folder, network, has_scores)) if aux else None
        unsaved = bool(aux.pop("unsaved", False))  # the state comes from memory, not from storage
        if network.step >= total and unscored is None and not unsaved:
            print(f"{folder} is at step {network.step} of {total}: nothing left to train")
            return
        if "loader" in aux:
            loader.restore(aux["loader"])
        noise = NoiseScale(config.noise_scale_alpha, *network.noise_batches)
        if "noise" in aux:
            noise.restore(aux["noise"])
        logged = network.step - (unscored is not None)
        log = NoLog()
        if agreement.writes:
            log = MetricsLog(folder, logged, wandb, aux.get("wandb"))
        stack.callback(log.close)
        ledger.resume(log.earlier, network.step)
        log.earlier.clear()  # a long run has many
        run = _Run(network, folder, loader, val_sets, eval_tasks, log, noise, ledger, total, logged)
        run.agreement = agreement
        run.skipped = run.skipped | aux.get("skipped", {})
        run.saved = -1 if unsaved else run.saved
        run.run(received, unscored)


def _restore(
    network: TrainableNetwork, folder: str, base: str | None, fall_back: bool, agreement: Agreement
) -> dict[str, Any] | None:
    """Restore the newest checkpoint in `folder`, and return the result of `network.restore`.

    `base` is the new path of a LoRA run's base model, or None if the base model has not moved.
    With `fall_back`, damaged checkpoints are renamed, and the newest intact one is restored.
    """
    while True:
        try:
            return network.restore(folder, base)
        except DamagedError as error:
            if error.previous is None or os.path.dirname(error.step) != folder:
                raise
            if not fall_back:
                message = f"{error}; --fall-back resumes from that step"
                raise DamagedError(message, *error.args[1:]) from None
            name = agreement.once(functools.partial(set_aside, error.step))
            print(f"{error}; falling back to {error.previous}, {name} is kept", file=sys.stderr)


def _unscored(folder: str, network: TrainableNetwork, has_scores: bool) -> dict[str, Any] | None:
    """Return the metrics row of the restored step if that step must still be validated, else None.

    The step must still be validated if the config's `val_every` requires a validation at this step,
    but the row has no validation results because the run was interrupted.

    Args:
      has_scores: whether the run has validation sets or evaluation tasks.
    """
    if not has_scores or network.step % network.config.val_every:
        return None
    row = row_of(folder, network.step)
    missing = row is not None and not any(name.startswith(("val/", "eval/")) for name in row)
    return row if missing else None


@contextlib.contextmanager
def closing(network: NetworkLike) -> Iterator[NetworkLike]:
    """Close `network` when the context ends; closing waits for the last save to finish.

    If the context ends with a KeyboardInterrupt or SystemExit, the network is not closed.
    """
    wait = True
    try:
        yield network
    except (KeyboardInterrupt, SystemExit):  # a second signal; the first is only recorded
        wait = False
        raise
    finally:
        if wait:
            network.close()


def start_weights(network: TrainableNetwork, path: str | None, fresh_opt: bool) -> None:
    """Load the model at `path`, or create one if `path` is None; see `train` for `fresh_opt`."""
    if path is None:
        network.init()
    else:
        network.load(path, fresh_opt=fresh_opt)


class _Step(NamedTuple):
    """A training step that was started; its results may not be ready yet.

    Attributes:
      number: the step's number, from 1.
      metrics: the step's metrics, as `TrainableNetwork.train` returns them.
      before, after: the training set's positions before and after the step's batch.
    """

    number: int
    metrics: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]


class _Run:
    """The training loop of one call of `train`, with the state that all steps share.

    `total` is the step to train to, and `logged` the last step whose metrics have been logged.
    """

    def __init__(
        self,
        network: TrainableNetwork,
        folder: str,
        loader: TrainSet,
        val_sets: dict[str, str],
        eval_tasks: harness.Harness | None,
        log: MetricsLog | NoLog,
        noise: NoiseScale,
        ledger: Ledger,
        total: int,
        logged: int,
    ):
        self.network = network
        self.config = network.config
        self.folder = folder
        self.loader = loader
        self.val_sets = val_sets
        self.eval_tasks = eval_tasks
        self.log = log
        self.noise = noise
        self.ledger = ledger
        self.agreement = Agreement()
        self.total = total
        self.pending: deque[_Step] = deque()  # the steps whose metrics have not been read
        self.skipped = {"total": 0, "in_row": 0}  # numbers of skipped updates
        self.saved = network.step  # the newest checkpoint's step, or this run's first step if none
        self.saving = False  # whether the last save may still be in progress
        self.save_pause = 0  # steps between attempts to save, after a failure
        self.save_again_at: int | None = None
        self.peak = network.peak_flops
        self.clock = StepClock()
        self.bar = tqdm(total=total, initial=logged, unit="step", dynamic_ncols=True)

    def run(self, received: list[int], unscored: dict[str, Any] | None) -> None:
        """Train until the last step or until a signal is received, then save.

        Args:
          received: the list of the signals received so far (see `Agreement.stop_signals`).
          unscored: the restored step's metrics row if that step must still be validated, else None.
        """
        with self.bar, self.ledger.spending("compile"), self._summary():
            try:
                if self.saved < 0:  # restored from memory
                    self._save()
                if unscored is not None:
                    self._score(unscored, received)
                while self.network.step < self.total and not received:
                    self._step(received)
            except StoppedError:  # a non-finite loss or lost hosts: do not save
                raise
            except Exception as error:
                if self.agreement.can_save(error):
                    self._save_before_end()
                raise
            self._finish()
        if received:
            name, step = signal.Signals(received[0]).name, self.network.step
            where = f"and saved at step {step}" if step else "before the first step"
            print(f"{name}: stopped {where}; start again to resume")
        else:
            print(f"{self.folder}: trained to step {self.network.step}")

    @contextlib.contextmanager
    def _summary(self) -> Iterator[None]:
        """Print how the run spent its time when the context ends.

        Nothing is printed after a HostError, or after an error before the first completed step.
        """
        first = self.network.step
        try:
            yield
        except HostError:
            raise
        except Exception:
            if self.network.step > first:
                self.bar.write(self.ledger.summary())
            raise
        self.bar.write(self.ledger.summary())

    def _step(self, received: list[int]) -> None:
        """Run one update, then any validation or save that is scheduled for this step."""
        network, config = self.network, self.config
        before = self.loader.state()
        with self.ledger.spending("data"):
            sample = self.loader.get_samples()
        metrics = network.train(sample)
        self.pending.append(_Step(network.step, metrics, before, self.loader.state()))
        self._log(self._rows(IN_FLIGHT))
        if network.notice and not received:
            self._save_before_end()
            raise HostError(f"{network.notice}, so its machine is about to shut down")
        if network.step % config.val_every == 0 and (self.val_sets or self.eval_tasks):
            self._validate(received)
        if config.memory_every and network.step % config.memory_every == 0:
            self._keep()
        if network.save_failed and (error := self._failure_of_save()) is not None:
            self._save_later(error)
        if network.step % config.ckpt_every == 0 or network.step == self.save_again_at:
            self._save()

    def _finish(self) -> None:
        """Log the pending metrics and save the last step.

        Raises:
          InputError: if saving fails twice.
        """
        self._log(self._rows(0))
        if (error := self._failure_of_save()) is None and self.network.step != self.saved:
            error = self._failure_of(self._begin_save) or self._failure_of_save()
        if error is not None:
            self._report(f"{error}; retrying once")
            self._begin_save()
            self._wait()
        self.log.upload()

    def _save_before_end(self) -> None:
        """Save before an error ends the run, so that training can resume from this step."""
        try:
            self._finish()
        except Exception as save_error:
            self._report(f"the run ends without saving its last step: {save_error}")

    def _rows(self, left: int) -> Iterator[dict[str, float]]:
        """Return an iterator over the metrics rows of the pending steps except the `left` newest.

        The call waits until these steps have finished.  The iterator builds one row at a time, so
        that earlier rows can be logged even if building a later row raises StoppedError.
        """
        read = []
        while len(self.pending) > left:
            step = self.pending.popleft()
            values = {name: float(value) for name, value in step.metrics.items()}
            self.clock.record_finished((later.metrics for later in self.pending), read=1)
            read.append((step, values, self.clock.pop_seconds()))
            self.ledger.switch("steps")  # the first step, which compiles, is over
        self.clock.record_finished(later.metrics for later in self.pending)
        return (self._row(*measured) for measured in read)

    def _row(self, step: _Step, values: dict[str, float], seconds: float) -> dict[str, float]:
        """Return a step's metrics row, without the metrics whose values are not finite.

        Raises:
          StoppedError: if a loss or gradient norm is not finite and the config does not set
            `skip_nonfinite`, or if `max_skipped` updates in a row were skipped.
        """
        self._count_skipped(step, values)
        row: dict[str, float] = {"step": step.number}
        for name in ("loss", "last_loss", "grad_norm", "learning_rate"):
            if math.isfinite(values[name]):
                row[f"train/{name}"] = values[name]
        if self.config.skip_nonfinite or self.config.skip_spikes:
            row["train/skipped"] = self.skipped["total"]
        sequences = self.config.gradient_accumulation_steps * self.network.batch_size
        row["train/tokens_per_sec"] = sequences * self.config.seq / seconds
        if self.peak is not None:
            row["train/mfu"] = flops.mfu(self.config, row["train/tokens_per_sec"], self.peak)
        row |= {name: value for name, value in values.items() if name.startswith("host_seconds/")}
        row |= self.noise.update(values["grad_square_micro"], values["grad_norm"] ** 2)
        return row | self.ledger.metrics(complete=step.number == self.network.step)

    def _count_skipped(self, step: _Step, values: dict[str, float]) -> None:
        """Count and report the step if its update was skipped.

        Raises:
          StoppedError: if the run must stop because of this step (see `_row`).
        """
        config = self.config
        is_finite = math.isfinite(values["loss"] + values["grad_norm"])
        if is_finite and not values["skipped"]:
            self.skipped = self.skipped | {"in_row": 0}
            return
        self.skipped = {name: count + 1 for name, count in self.skipped.items()}
        assert config.train_set is not None
        records = describe_batch(config.train_set, step.before, step.after)
        problem = (
            f"step {step.number}: loss is {values['loss']}, gradient norm {values['grad_norm']}; "
            f"its batch is {records}"
        )
        can_continue = is_finite or config.skip_nonfinite
        if can_continue and self.skipped["in_row"] < config.max_skipped:
            self._report(f"{problem}; its update is skipped")
            return
        remedy = "lower lr, check the data, or set skip_nonfinite"
        if can_continue:
            count = self.skipped["in_row"]
            remedy = f"{count} updates in a row were skipped; lower lr, or check the data"
        raise StoppedError(
            f"{problem}; this step is not saved, and any checkpoints in {self.folder} are of "
            f"earlier steps; {remedy}"
        )

    def _log(self, rows: Iterable[dict[str, float]]) -> None:
        for row in rows:
            self.log.write(row)
            shown = {"loss": f"{row['train/loss']:.4f}" if "train/loss" in row else "skipped"}
            shown["tok/s"] = f"{row['train/tokens_per_sec']:,.0f}"
            if self.peak is not None and "train/mfu" in row:
                shown["MFU"] = f"{row['train/mfu']:.1%} of {self.peak / 1e12:,.4g} TFLOP/s"
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update()

    def _validate(self, received: list[int]) -> None:
        """Validate the network; log the pending metrics, with the results in the newest row."""
        older = len(self.pending) - 1
        rows = self._rows(0)
        self._log(islice(rows, older))
        self._score(next(rows), received)

    def _score(self, newest: dict[str, Any], received: list[int]) -> None:
        """Validate on all validation sets and lm-eval tasks, and log the results with `newest`.

        If a signal or an error interrupts the validation, `newest` is logged without results, and
        the resumed run validates that step again.

        Args:
          newest: the newest step's metrics row.
          received: the list of the signals received so far; a signal interrupts the validation.
        """
        scores: dict[str, float] = {}
        summary = []

        def stopped() -> bool:
            return bool(received)

        kind = self.ledger.switch("validation")
        try:
            for name, path in self.val_sets.items():
                loss = validation.score(self.network, path, stopped=stopped).loss
                scores[f"val/loss_{name}"] = loss
                summary.append(f"validation loss {name} {loss:.4f}")
            if self.eval_tasks:
                results = self.eval_tasks.results(self.network, stopped)
                if results is None:
                    raise validation.StoppedScoringError
                task_scores = harness.metric_values(results)
                scores |= {f"eval/{name}": value for name, value in task_scores.items()}
                summary += [f"{name} {value:.4f}" for name, value in task_scores.items()]
            newest = newest | scores
        except validation.StoppedScoringError:
            summary = []
        finally:
            self.ledger.switch(kind)
            self._log([newest])
        if summary:
            self.bar.write(f"step {self.network.step}: {', '.join(summary)}")
        self.clock.restart()

    def _save(self) -> None:
        """Start saving a checkpoint of this step; a failed save is retried later."""
        self._log(self._rows(0))  # raises if a loss is not finite, before anything is saved
        # Wait for the previous save first: its failure must not prevent this one.
        error = self._failure_of_save()
        if error is not None:
            self._stop_if_configured(error)
            self._report(str(error))
        self.save_again_at = None
        if self.network.step != self.saved:
            error = self._failure_of(self._begin_save)
            if error is not None:
                self._save_later(error)

    def _keep(self) -> None:
        """Start copying the state to the memory of the hosts, if the network has several."""
        self._log(self._rows(0))  # raises if a loss is not finite
        with self.ledger.spending("save"):
            problem = self.network.keep(self._state())
        if problem:
            self._report(f"the last copy in the hosts' memory is not complete: {problem}")
        self.clock.restart()

    def _state(self) -> dict[str, Any]:
        """Return the loop's own state, which each checkpoint holds beside the network's state."""
        return {
            "loader": self.loader.state(),
            "noise": self.noise.state(),
            "skipped": self.skipped,
            "wandb": self.log.wandb_id,
        }

    def _begin_save(self) -> None:
        """Start saving a checkpoint of the network and of the loop's own state."""
        with self.ledger.spending("save"):
            self.network.save(self.folder, self._state())
        self.saved, self.saving = self.network.step, True
        self.log.upload()
        self.clock.restart()

    def _failure_of_save(self) -> InputError | None:
        """Wait for the save in progress, if any; return its error if it failed, else None."""
        if not self.saving:
            return None
        error = self._failure_of(self._wait)
        self.saving = False
        if error is None:
            self.save_pause = 0
        else:
            self.saved = -1
        return error

    def _wait(self) -> None:
        with self.ledger.spending("save"):
            self.network.wait()

    @staticmethod
    def _failure_of(action: Callable[[], None]) -> InputError | None:
        try:
            action()
        except InputError as error:
            return error
        return None

    def _stop_if_configured(self, error: InputError) -> None:
        """Raise the error of a failed save if the config's `on_save_failure` is "stop"."""
        if self.config.on_save_failure == "stop":
            raise error

    def _save_later(self, error: InputError) -> None:
        """Schedule another attempt after a failed save; the pauses between attempts increase."""
        self._stop_if_configured(error)
        self.save_pause = min(2 * self.save_pause or 1, MOST_STEPS_BETWEEN_SAVES)
        self.save_again_at = self.network.step + self.save_pause
        self._report(
            f"{error}; training continues, next attempt to save at step {self.save_again_at}"
        )

    def _report(self, line: str) -> None:
        self.bar.write(line, file=sys.stderr)
