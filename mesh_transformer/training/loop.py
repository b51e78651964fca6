"""The training loop: resume, train, validate, save and log.

The loop uses a network only through the interface `TrainableNetwork`, so the same code trains in a
single process and on a TPU pod.
"""

import contextlib
import math
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from mesh_transformer.data.loader import describe_batch
from mesh_transformer.data.storage import AnyPath, local_path
from mesh_transformer.evaluation import harness, validation
from mesh_transformer.model import flops
from mesh_transformer.network import TrainableNetwork, TrainSet
from mesh_transformer.training.metrics import MetricsLog, NoiseScale, StepClock, row_of, start_wandb
from mesh_transformer.util import HostError, InputError, StoppedError

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
) -> None:
    """Train until the global step is `max_steps` (default: the config's `total_steps`).

    Training resumes from the newest checkpoint in `folder`.  If there is none, training starts from
    the model at `tune_model_path`, or from freshly initialised weights if no path is given.  With
    `fresh_opt`, the Adam moments at `tune_model_path` are not loaded.  When a LoRA run resumes and
    its base model has moved, `tune_model_path` must be the base model's new location.

    A checkpoint is saved every `ckpt_every` steps and at the end of training.  On SIGTERM, Ctrl-C
    or SIGHUP (the terminal closes), a checkpoint is saved and `train` returns.  If an error ends
    training, a checkpoint is saved first, unless the error is a StoppedError.  A failed save is
    reported and retried while training continues.  No other process may write to `folder` during
    training.

    Raises:
      InputError: if an input cannot be used, or if the last save fails twice.
      StoppedError: if a loss or gradient norm is not finite; nothing is saved from that step on.
        Also if a host fails after a signal was received.
      HostError: if a host fails before any signal was received.
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
    with _stop_signals() as received:
        try:
            with closing(network):
                _train(network, folder, total, base, fresh_opt, received)
                saved = True
        except HostError as error:
            if saved:  # the host failed while closing: nothing is lost
                return
            if not received:
                raise
            raise StoppedError(
                f"{signal.Signals(received[0]).name}: stopped, but not saved: {error}; start again "
                "to resume from the newest checkpoint"
            ) from None


def _train(
    network: TrainableNetwork,
    folder: str,
    total: int,
    tune_model_path: str | None,
    fresh_opt: bool,
    received: list[int],
) -> None:
    """Train until step `total` or until a signal is in `received`, then save."""
    config = network.config
    val_sets = {} if config.val_batches == 0 else config.val_set
    with contextlib.ExitStack() as stack:
        wandb = start_wandb(folder, config)
        if wandb is not None:
            stack.callback(wandb.close)
        eval_tasks = harness.load_harness(config)
        loader = stack.enter_context(contextlib.closing(network.open_train_set()))
        for path in val_sets.values():  # report an unusable set now, not after hours
            validation.open_set(network, path).close()
        network.claim(folder)
        aux = network.restore(folder, tune_model_path)
        if aux is None:
            start_weights(network, tune_model_path, fresh_opt)
            aux = {}
        elif tune_model_path is not None and not config.lora_rank:
            print(f"resuming {folder} from step {network.step}: {tune_model_path} is not loaded")
        unscored = _unscored(folder, network, bool(val_sets or eval_tasks)) if aux else None
        if network.step >= total and unscored is None:
            print(f"{folder} is at step {network.step} of {total}: nothing left to train")
            return
        if "loader" in aux:
            loader.restore(aux["loader"])
        noise = NoiseScale(config.noise_scale_alpha, *network.noise_batches)
        if "noise" in aux:
            noise.restore(aux["noise"])
        logged = network.step - (unscored is not None)
        log = MetricsLog(folder, logged, wandb, aux.get("wandb"))
        stack.callback(log.close)
        run = _Run(network, folder, loader, val_sets, eval_tasks, log, noise, total, logged)
        run.skipped = run.skipped | aux.get("skipped", {})
        run.run(received, unscored)


def _unscored(folder: str, network: TrainableNetwork, has_scores: bool) -> dict[str, Any] | None:
    """Return the metrics row of the restored step if that step was saved before it was scored.

    Returns None if the step was scored, or if the schedule scores other steps only.

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

    If a second signal arrives inside the context, the network is not closed.
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
    """Load the model at `path` into the network, or initialise fresh weights if `path` is None."""
    if path is None:
        network.init()
    else:
        network.load(path, fresh_opt=fresh_opt)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Yield a list that collects the numbers of received SIGTERM, SIGINT and SIGHUP signals.

    After the first signal, the previous handlers of SIGTERM and SIGINT (Ctrl-C) are restored.  A
    second Ctrl-C therefore raises KeyboardInterrupt, and code that created a TPU can still delete
    it.  Interrupting a save is safe, because the previous checkpoint stays intact.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python handles signals only on its main thread.
        return
    stops: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
    handlers: dict[int, Any] = {n: signal.getsignal(n) for n in (*stops, signal.SIGHUP)}
    if handlers[signal.SIGHUP] is signal.SIG_IGN:  # as under nohup
        del handlers[signal.SIGHUP]

    def restore(numbers: Iterable[int]) -> None:
        for number in numbers:
            signal.signal(number, handlers[number])

    def receive(number: int, frame: object) -> None:
        received.append(number)
        restore(stops)  # not SIGHUP: a closing terminal may send it twice

    for number in handlers:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        restore(handlers)


class _Step(NamedTuple):
    """A dispatched step.

    Attributes:
      number: the step's number, from 1.
      metrics: its metrics, as `TrainableNetwork.train` returns them.
      before, after: the training set's positions before and after its batch.
    """

    number: int
    metrics: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]


class _Run:
    """One call of `train`, with the state that its steps share."""

    def __init__(
        self,
        network: TrainableNetwork,
        folder: str,
        loader: TrainSet,
        val_sets: dict[str, str],
        eval_tasks: harness.Harness | None,
        log: MetricsLog,
        noise: NoiseScale,
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
        """Train until the last step or until a signal is in `received`, then save.

        Args:
          unscored: the restored step's metrics row, if scoring at that step was interrupted.
        """
        with self.bar:
            try:
                if unscored is not None:
                    self._score(unscored, received)
                while self.network.step < self.total and not received:
                    self._step(received)
            except StoppedError:  # a non-finite loss or lost hosts: do not save
                raise
            except Exception:
                self._save_before_end()
                raise
            self._finish()
        if received:
            name, step = signal.Signals(received[0]).name, self.network.step
            where = f"and saved at step {step}" if step else "before the first step"
            print(f"{name}: stopped {where}; start again to resume")
        else:
            print(f"{self.folder}: trained to step {self.network.step}")

    def _step(self, received: list[int]) -> None:
        """Run one update; then validate and save, each only if it is due at this step."""
        network, config = self.network, self.config
        before = self.loader.state()
        sample = self.loader.get_samples()
        metrics = network.train(sample)
        self.pending.append(_Step(network.step, metrics, before, self.loader.state()))
        self._log(self._rows(IN_FLIGHT))
        if network.step % config.val_every == 0 and (self.val_sets or self.eval_tasks):
            self._validate(received)
        if network.save_failed and (error := self._failure_of_save()) is not None:
            self._save_later(error)
        if network.step % config.ckpt_every == 0 or network.step == self.save_again_at:
            self._save()

    def _finish(self) -> None:
        """Save the last step; if that fails twice, raise InputError."""
        self._log(self._rows(0))
        if (error := self._failure_of_save()) is None and self.network.step != self.saved:
            error = self._failure_of(self._begin_save) or self._failure_of_save()
        if error is not None:
            self._report(f"{error}; retrying once")
            self._begin_save()
            self.network.wait()
        self.log.upload()

    def _save_before_end(self) -> None:
        """Save before an error ends the run, so that training can resume from this step."""
        try:
            self._finish()
        except Exception as save_error:
            self._report(f"the run ends without saving its last step: {save_error}")

    def _rows(self, left: int) -> Iterator[dict[str, float]]:
        """Return the metrics rows of all pending steps except the `left` newest.

        This waits for the metrics of these steps, but builds the rows lazily.  If building a row
        raises StoppedError, the caller has therefore already received, and can log, the rows before
        it.
        """
        read = []
        while len(self.pending) > left:
            step = self.pending.popleft()
            values = {name: float(value) for name, value in step.metrics.items()}
            self.clock.record_finished((later.metrics for later in self.pending), read=1)
            read.append((step, values, self.clock.pop_seconds()))
        self.clock.record_finished(later.metrics for later in self.pending)
        return (self._row(*measured) for measured in read)

    def _row(self, step: _Step, values: dict[str, float], seconds: float) -> dict[str, float]:
        """Return a step's metrics; those that are not finite are left out.

        Raises:
          StoppedError: for a non-finite loss or gradient norm, unless the config sets
            `skip_nonfinite` and fewer than `max_skipped` updates in a row were skipped.
        """
        self._count_skipped(step, values)
        row: dict[str, float] = {"step": step.number}
        for name in ("loss", "last_loss", "grad_norm", "learning_rate"):
            if math.isfinite(values[name]):
                row[f"train/{name}"] = values[name]
        if self.config.skip_nonfinite:
            row["train/skipped"] = self.skipped["total"]
        sequences = self.config.gradient_accumulation_steps * self.network.batch_size
        row["train/tokens_per_sec"] = sequences * self.config.seq / seconds
        if self.peak is not None:
            row["train/mfu"] = flops.mfu(self.config, row["train/tokens_per_sec"], self.peak)
        row |= {name: value for name, value in values.items() if name.startswith("host_seconds/")}
        return row | self.noise.update(values["grad_square_micro"], values["grad_norm"] ** 2)

    def _count_skipped(self, step: _Step, values: dict[str, float]) -> None:
        """Count and report the step if its update was skipped; stop the run if it may not be."""
        config = self.config
        if math.isfinite(values["loss"] + values["grad_norm"]):
            self.skipped = self.skipped | {"in_row": 0}
            return
        self.skipped = {name: count + 1 for name, count in self.skipped.items()}
        assert config.train_set is not None
        records = describe_batch(config.train_set, step.before, step.after)
        problem = (
            f"step {step.number}: loss is {values['loss']}, gradient norm {values['grad_norm']}; "
            f"its batch is {records}"
        )
        if config.skip_nonfinite and self.skipped["in_row"] < config.max_skipped:
            self._report(f"{problem}; its update is skipped")
            return
        remedy = "lower lr, check the data, or set skip_nonfinite"
        if config.skip_nonfinite:
            count = self.skipped["in_row"]
            remedy = f"{count} updates in a row were skipped; lower lr, or check the data"
        raise StoppedError(
            f"{problem}; checkpoints in {self.folder} are from earlier steps; {remedy}"
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
        """Score the network and log all pending rows; the newest row includes the scores."""
        older = len(self.pending) - 1
        rows = self._rows(0)
        self._log(islice(rows, older))
        self._score(next(rows), received)

    def _score(self, newest: dict[str, Any], received: list[int]) -> None:
        """Score validation sets and lm-eval tasks, and log the newest step's row with the scores.

        If a signal or an error interrupts the scoring, the row is logged without scores.  When the
        run is resumed, it scores that step again.

        Args:
          newest: the newest step's metrics row.
        """
        scores: dict[str, float] = {}
        summary = []

        def stopped() -> bool:
            return bool(received)

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

    def _begin_save(self) -> None:
        """Start saving a checkpoint, with the loader's position, noise averages and wandb id."""
        aux = {
            "loader": self.loader.state(),
            "noise": self.noise.state(),
            "skipped": self.skipped,
            "wandb": self.log.wandb_id,
        }
        self.network.save(self.folder, aux)
        self.saved, self.saving = self.network.step, True
        self.log.upload()
        self.clock.restart()

    def _failure_of_save(self) -> InputError | None:
        """Wait for a save in progress; return its error if it failed, else None."""
        if not self.saving:
            return None
        error = self._failure_of(self.network.wait)
        self.saving = False
        if error is None:
            self.save_pause = 0
        else:
            self.saved = -1
        return error

    @staticmethod
    def _failure_of(action: Callable[[], None]) -> InputError | None:
        try:
            action()
        except InputError as error:
            return error
        return None

    def _stop_if_configured(self, error: InputError) -> None:
        """Raise the error of a failed save if it shall stop the run."""
        if self.config.on_save_failure == "stop":
            raise error

    def _save_later(self, error: InputError) -> None:
        """Schedule a save after a failed one: at the next step, then after increasing pauses."""
        self._stop_if_configured(error)
        self.save_pause = min(2 * self.save_pause or 1, MOST_STEPS_BETWEEN_SAVES)
        self.save_again_at = self.network.step + self.save_pause
        self._report(
            f"{error}; training continues, next attempt to save at step {self.save_again_at}"
        )

    def _report(self, line: str) -> None:
        self.bar.write(line, file=sys.stderr)
