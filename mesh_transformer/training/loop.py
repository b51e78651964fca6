"""The training loop: resume, train, validate, save and log.

The loop uses a network only through the interface `TrainableNetwork`, so the same code trains in a
single process and on a TPU pod.
"""

import contextlib
import dataclasses
import math
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from tqdm import tqdm

from mesh_transformer import status_lines
from mesh_transformer.data.batches import cut_to_bucket
from mesh_transformer.data.tokenizer import tokenizer_remark
from mesh_transformer.evaluation import harness, validation
from mesh_transformer.network import TrainableNetwork, TrainSet
from mesh_transformer.storage.access import AnyPath, local_path
from mesh_transformer.training import references
from mesh_transformer.training.best import BestStep
from mesh_transformer.training.goodput import Ledger
from mesh_transformer.training.hooks import Hook, call_hooks, load_hook
from mesh_transformer.training.metrics import (
    MetricsLog,
    StepClock,
    check_log,
    row_of,
    start_wandb,
)
from mesh_transformer.training.objectives import Head, head_of
from mesh_transformer.training.profile import ProfiledSteps
from mesh_transformer.training.resume import ended_line, is_validated, restore, unscored_row
from mesh_transformer.training.rollouts import Rollouts
from mesh_transformer.training.rows import MetricsRows, Step, check_same_batch
from mesh_transformer.training.run_status import RunStatus
from mesh_transformer.training.samples import Samples
from mesh_transformer.training.saver import Saver
from mesh_transformer.training.schedule import schedule_changes, warmup_remark
from mesh_transformer.util import (
    DivergedError,
    HostError,
    InputError,
    InterruptedWorkError,
    NonFiniteError,
    StoppedError,
    UncountedWarning,
    stop_signals,
)

IN_FLIGHT = 2  # steps dispatched before the oldest one's loss is read

NetworkLike = TypeVar("NetworkLike", bound=TrainableNetwork)


def train(
    network: TrainableNetwork,
    folder: AnyPath,
    *,
    max_steps: int | None = None,
    tune_model_path: AnyPath | None = None,
    fresh_opt: bool = False,
    fall_back: bool = False,
    validate: bool = True,
    val_sets: Mapping[str, Any] | None = None,
    prompts: Any = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    temporary: bool = False,
    ledger: Ledger | None = None,
    profile: range | None = None,
) -> None:
    """Train until the global step is `max_steps` (default: the config's `total_steps`).

    Training resumes from the newest checkpoint in `folder`.  If there is none, training starts from
    the model at `tune_model_path` (default: the config's), or else from random weights.  With
    `fresh_opt`, the optimizer's state at `tune_model_path` is not loaded.  When a LoRA run resumes
    and its base model has moved, `tune_model_path` must be the base model's new location.

    If the newest checkpoint is damaged, DamagedError is raised.  With `fall_back`, the damaged
    checkpoint is renamed to step_N.damaged, and training resumes from the newest intact one.

    Without `validate`, no validation sets and lm-eval tasks are used.  `val_sets` replaces the
    config's `val_set`; its values are what `validation.open_set` accepts.  `prompts` replaces
    `train_set` if the config's objective samples answers.  `on_row` is called with the metrics row
    of each step, after the config's `hooks`.  `temporary` means that `folder` will be deleted, so
    that messages do not name it.

    `ledger` (default: a new one) measures how the run spends its time.  The measured seconds are
    logged before each save or validation and at the end, when a summary is also printed.

    Of the steps in `profile`, a trace is written to the folder `profile` in `folder`; see
    `ProfiledSteps`.

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
        Also if the network could have a larger mesh.  In the last two cases, the step is saved.
    """
    config, folder = network.config, local_path(folder)
    tune_model_path = config.tune_model_path if tune_model_path is None else tune_model_path
    total = config.require_to_train(max_steps)
    if total < 1:
        raise InputError(f"--max-steps is {total}, expected at least 1")
    if profile and profile[-1] > total:
        raise InputError(
            f"--profile: there is no step {profile[-1]}, as the run ends at step {total}"
        )
    saved = False
    val_sets = config.val_set if val_sets is None else val_sets
    network.signals.clear()  # of an earlier run
    with stop_signals(network.signals):
        try:
            with closing(network):
                _train(
                    network,
                    folder,
                    total,
                    tune_model_path=None if tune_model_path is None else os.fspath(tune_model_path),
                    fresh_opt=fresh_opt,
                    fall_back=fall_back,
                    val_sets=val_sets if validate and config.val_batches else {},
                    prompts=config.train_set if prompts is None else prompts,
                    validate=validate,
                    hooks=[*map(load_hook, config.hooks), *([] if on_row is None else [on_row])],
                    temporary=temporary,
                    ledger=ledger or Ledger(),
                    profile=profile,
                )
                saved = True
        except HostError as error:
            if saved:  # the host failed while closing: nothing is lost
                return
            if not network.signals:
                raise
            name = signal.Signals(network.signals[0]).name
            raise StoppedError(
                f"stopped by {name} without saving: {error}; start again to resume from the newest "
                "checkpoint"
            ) from None


def _train(
    network: TrainableNetwork,
    folder: str,
    total: int,
    *,
    tune_model_path: str | None,
    fresh_opt: bool,
    fall_back: bool,
    val_sets: Mapping[str, Any],
    prompts: Any,
    validate: bool,
    hooks: list[Hook],
    temporary: bool,
    ledger: Ledger,
    profile: range | None,
) -> None:
    """Train until step `total` or until a signal is received, then save."""
    config = network.config
    with contextlib.ExitStack() as stack:
        wandb = start_wandb(folder, config)
        if wandb is not None:
            stack.callback(wandb.close)
        eval_tasks = harness.load_harness(config) if validate else None
        samples = Samples(network) if validate and config.sample_prompts else None
        head = head_of(config, network.objective)
        if head is not None and head.by_token:
            opened: TrainSet = Rollouts(network, prompts, folder, head)
        else:
            opened = network.open_train_set()
        loader = stack.enter_context(contextlib.closing(opened))
        compares = head is not None and head.needs_reference and not head.by_token
        sets = [] if not compares else references.record_sets(config, loader, val_sets)
        for source in val_sets.values():  # report an unusable set now, not after hours
            references.check_set(network, source, head)
        if remark := tokenizer_remark(config):
            print(remark, file=sys.stderr)
        with ledger.spending("restore"):
            network.claim(folder)
            check_log(folder)
            status = stack.enter_context(RunStatus(network, folder, total))
            reference = None
            if compares and config.reference != "base":
                network.load(config.reference, only_params=True)
                reference = references.prepare(network, sets)
            aux = restore(network, folder, tune_model_path, fall_back)
            if aux is None or network.step < total:
                network.claim(folder, room=True)
            if aux is None:
                ledger.relabel("restore", "init")  # there was nothing to restore
                start_weights(network, tune_model_path, fresh_opt)
            status.begin()
            if compares and reference is None:
                reference = references.prepare(network, sets, (aux or {}).get("reference"))
        if aux is None:
            aux = {}
        elif tune_model_path is not None and not config.lora_rank:
            print(f"resuming {folder} from step {network.step}: {tune_model_path} is not loaded")
        if remark := warmup_remark(config):
            print(remark)
        if changes := schedule_changes(config, aux.get("config", {})):
            print(f"resuming {folder} with another learning rate schedule: {changes}")
        if changes := check_same_batch(network, aux, folder):
            print(f"resuming {folder} with {changes}")
        best = BestStep(config)
        best.restore(aux.get("best"))
        unscored = None
        if aux and (val_sets or eval_tasks) and is_validated(config, network.step, total):
            unscored = unscored_row(row_of(folder, network.step), network.step, best)
        if best.step is not None:
            # The step is saved.  This updates the record of the best step if a kill prevented it.
            network.save(folder, {"best": best.state()})
        ended = ended_line(network.step, total, best)
        if ended and unscored is None:
            print(f"{'the network' if temporary else folder} is at step {network.step}{ended}")
            return
        if "loader" in aux or network.step:
            loader.restore(aux.get("loader"), network.step)
        if aux and network.step and "loader" not in aux:
            print(f"{folder} has no position in the data; records are read from the first one")
        logged = network.step - (unscored is not None)
        log = MetricsLog(folder, logged, wandb, aux.get("wandb"))
        stack.callback(log.close)
        ledger.resume(log.earlier, network.step)
        log.earlier.clear()  # a long run has many
        run = _Run(
            network=network,
            folder=folder,
            loader=loader,
            val_sets=val_sets,
            eval_tasks=eval_tasks,
            best=best,
            samples=samples,
            log=log,
            status=status,
            hooks=hooks,
            saved=aux,
            ledger=ledger,
            total=total,
            logged=logged,
            temporary=temporary,
            head=head,
            reference=reference,
            profile=profile,
        )
        # Not earlier: `claim` may have added filters, which stay until the process ends.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncountedWarning)  # the loop reports these steps itself
            run.run(unscored)


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
            with status_lines.doing("finishing the last save"):
                network.close()


def start_weights(network: TrainableNetwork, path: str | None, fresh_opt: bool) -> None:
    """Load the model at `path`, or create one if `path` is None; see `train` for `fresh_opt`."""
    if path is None:
        network.init()
    else:
        network.load(path, fresh_opt=fresh_opt)


@dataclasses.dataclass(kw_only=True)
class _Run:
    """The training loop of one call of `train`, with the state that all steps share.

    `total` is the step to train to, and `logged` the last step whose metrics have been logged.
    `saved` is what the checkpoint that the run continues holds beside the network's state.
    `head` is the objective, and `reference` the digest of its reference's weights, if any.
    """

    network: TrainableNetwork
    folder: str
    loader: TrainSet
    val_sets: Mapping[str, Any]
    eval_tasks: harness.Harness | None
    samples: Samples | None
    best: BestStep
    log: MetricsLog
    status: RunStatus
    hooks: list[Hook]
    saved: dict[str, Any]
    ledger: Ledger
    total: int
    logged: int
    temporary: bool
    head: Head | None
    reference: str | None
    profile: range | None

    def __post_init__(self):
        network = self.network
        self.config, self.signals = network.config, network.signals
        self.pending: deque[Step] = deque()  # the steps whose metrics have not been read
        # What `MetricsRows.row` makes rows of, for the steps that are read but not logged.
        self.read: deque[tuple[Step, dict[str, float], float]] = deque()
        self.saver = Saver(network, self.folder, self._state, self.best, self.ledger, self._report)
        self.first = network.step + 1
        self.clock = StepClock()
        unsaved = f"; this step is not saved, any checkpoints in {self.folder} are of earlier steps"
        self.rows = MetricsRows(
            network, self.ledger, "" if self.temporary else unsaved, self._report, self.saved
        )
        counts = {"total": self.total, "initial": self.logged, "unit": "step"}
        self.bar = tqdm(**counts, dynamic_ncols=True, postfix="compiling the first step")
        self.profiled = ProfiledSteps(network, self.folder, self.profile, self._report)

    def run(self, unscored: dict[str, Any] | None) -> None:
        """Train until the last step, until `early_stop` or until a signal is received, then save.

        Args:
          unscored: the restored step's metrics row if that step must still be validated, else None.
        """
        with self.bar, self.ledger.spending("compile"), self._summary():
            try:
                if unscored is not None:
                    self._score(unscored)
                while self.network.step < self.total and not (self.signals or self.best.is_over):
                    self._step()
                if not is_validated(self.config, self.network.step, self.total):
                    self._show_samples()
                self._log_steps(0)  # a hook may fail, which is an error like others
            except (StoppedError, NonFiniteError):  # not finite, or lost hosts: do not save
                raise
            except Exception:
                self._save_before_end()
                raise
            self._finish()
        print(self._outcome())

    def _outcome(self) -> str:
        """Say where training ended, and why."""
        step, where = self.network.step, "" if self.temporary else f"{self.folder}: "
        if self.signals:
            name = signal.Signals(self.signals[0]).name
            if self.temporary:
                return f"{name}: stopped at step {step}"
            saved = f"and saved at step {step}" if step else "before the first step"
            return f"{name}: stopped {saved}; start again to resume"
        if step < self.total:
            return f"{where}stopped at step {step}: {self.best.reason()}"
        return f"{where}trained to step {step}"

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

    def _step(self) -> None:
        """Run one update, then any validation or save that is scheduled for this step."""
        network, config = self.network, self.config
        self.saver.restart_if_larger()
        before, kind = self.loader.state(), "data"
        if isinstance(self.loader, Rollouts) and self.loader.is_used:
            self._log_steps(0)  # sampling would wait for these steps
            kind = "rollouts"
        with self.ledger.spending(kind):
            try:
                sample = self.loader.get_samples()
                if sample:  # else the hosts have it
                    sample = cut_to_bucket(sample, config.length_buckets)
            except InterruptedWorkError:
                return  # the signal ends the run
            except NonFiniteError:
                self._log_steps(0)  # raises a clearer error if a loss was not finite
                raise
            except StopIteration:
                self._report("the data have ended")
                self.total = network.step
                return
        # A pod's sample is a placeholder: the hosts read the records, in sequences of `seq` tokens.
        length = sample["obs"].shape[-1] if sample else config.seq
        self.profiled.before_step()
        metrics = network.train(sample)
        self.profiled.after_step()
        if isinstance(self.loader, Rollouts):
            metrics = metrics | self.loader.metrics
        self.pending.append(Step(network.step, length, metrics, before, self.loader.state()))
        if network.step == self.first:
            float(metrics["loss"])  # wait, so that the time of compilation is this step's alone
        self._log_steps(IN_FLIGHT)
        if network.notice and not self.signals:
            self._save_before_end()
            raise HostError(f"{network.notice}, so its machine is about to shut down")
        if is_validated(config, network.step, self.total):
            if self.val_sets or self.eval_tasks:
                self._validate()
            self._show_samples()
        self.saver.save_if_due(self._save)

    def _finish(self) -> None:
        """Log the pending metrics and save the last step.

        Raises:
          InputError: if saving fails twice.
        """
        self.profiled.end()
        self._log_steps(0)
        self.saver.save_last()
        self.log.upload()

    def _save_before_end(self) -> None:
        """Save before an error ends the run, so that training can resume from this step."""
        self.hooks = []  # one of them may be the error, and would fail again
        try:
            self._finish()
        except Exception as save_error:
            self._report(f"the run ends without saving its last step: {save_error}")

    def _log_steps(self, left: int, *, but: int = 0) -> None:
        """Log the pending steps except the `left` newest, after waiting until they have finished.

        Rows are built and logged one by one: if one raises an error, the next call logs the rest.

        Args:
          but: number of the finished steps, the newest, that are read but not logged.
        """
        while len(self.pending) > left:
            step = self.pending.popleft()
            values = {name: float(value) for name, value in step.metrics.items()}
            self.clock.record_finished((later.metrics for later in self.pending), read=1)
            self.read.append((step, values, self.clock.pop_seconds()))
            self.ledger.switch("steps")  # the first step, which compiles, is over
        self.clock.record_finished(later.metrics for later in self.pending)
        while len(self.read) > but:
            self._log(self._next_row())

    def _next_row(self) -> dict[str, float]:
        """Return the metrics row of the oldest step that is read but not logged."""
        return self.rows.row(*self.read.popleft())

    def _log(self, row: dict[str, Any]) -> None:
        before = dict(row)
        self.status.finished(row["step"])
        try:
            call_hooks(self.hooks, row)
        except BaseException:
            self.log.write(before)
            raise
        self.log.write(row)
        shown = {"loss": f"{row['train/loss']:.4f}" if "train/loss" in row else "skipped"}
        shown["tok/s"] = f"{row['train/tokens_per_sec']:,.0f}"
        if self.rows.peak is not None and "train/mfu" in row:
            shown["MFU"] = f"{row['train/mfu']:.1%} of {self.rows.peak / 1e12:,.4g} TFLOP/s"
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()

    def _validate(self) -> None:
        """Validate the network; log the pending metrics, with the results in the newest row."""
        self._log_steps(0, but=1)
        self._score(self._next_row())

    def _score(self, newest: dict[str, Any]) -> None:
        """Validate on all validation sets and lm-eval tasks, and log the results with `newest`.

        If a signal or an error interrupts the validation, `newest` is logged without results, and
        the resumed run validates that step again.

        Args:
          newest: the newest step's metrics row.
        """
        scores: dict[str, float] = {}
        summary, is_best = [], False

        def stopped() -> bool:
            return bool(self.signals)

        kind = self.ledger.switch("validation")
        try:
            for name, path in self.val_sets.items():
                if self.head is None or self.head.by_token:
                    result = validation.score(self.network, path, stopped=stopped)
                    loss = result.loss
                    scores |= result.position_metrics(name)
                else:
                    results = references.score(self.network, path, self.head, stopped=stopped)
                    loss = results.pop("loss")
                    scores |= {f"val/{key}_{name}": value for key, value in results.items()}
                scores[f"val/loss_{name}"] = loss
                summary.append(f"validation loss {name} {loss:.4f}")
            if self.eval_tasks:
                results = self.eval_tasks.results(self.network, stopped, share=False)
                if results is None:
                    raise InterruptedWorkError
                task_scores = harness.metric_values(results)
                scores |= {f"eval/{name}": value for name, value in task_scores.items()}
                summary += [f"{name} {value:.4f}" for name, value in task_scores.items()]
            is_best = self.best.add(self.network.step, newest | scores)
            # NaN, the loss of a set without tokens, is not JSON.
            newest = newest | {k: score for k, score in scores.items() if math.isfinite(score)}
        except InterruptedWorkError:
            summary = []
        except NonFiniteError as error:
            if not self.config.skip_nonfinite:
                raise DivergedError(
                    f"step {self.network.step}: validation: {error}{self.rows.unsaved}; lower lr, "
                    "or check the data"
                ) from None
            summary = [f"validation: {error}"]
        finally:
            self.ledger.switch(kind)
            self._log(newest)
        if summary:
            self.bar.write(f"step {self.network.step}: {', '.join(summary)}")
        if is_best:
            self._save(again=True)
        self.clock.restart()

    def _show_samples(self) -> None:
        """Print texts that the network writes now, if the config asks for any."""
        if self.samples is not None and not self.signals:
            self._log_steps(0)
            shown = self.bar.postfix
            self.bar.set_postfix_str("sampling")  # which compiles the first time
            with self.ledger.spending("samples"):
                self.bar.write(self.samples.report())
            self.bar.set_postfix_str(shown or "")
            self.clock.restart()

    def _save(self, *, again: bool = False) -> None:
        """Start saving a checkpoint of this step; see `Saver.save`."""
        self._log_steps(0)  # raises if a loss is not finite, before anything is saved
        self.saver.save(again=again)
        self.log.upload()
        self.clock.restart()

    def _state(self) -> dict[str, Any]:
        """Return the loop's own state, which each checkpoint holds beside the network's state."""
        return {
            "loader": self.loader.state(),
            **self.rows.state(),
            "best": self.best.state(),
            "wandb": self.log.wandb_id,
            **({} if self.reference is None else {"reference": self.reference}),
        }

    def _report(self, line: str) -> None:
        self.bar.write(line, file=sys.stderr)
