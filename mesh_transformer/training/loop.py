"""The one training loop: resume, train, validate, save, log.

It knows a network by its methods only (`TrainableNetwork`): one process and a pod run the same.
"""

import contextlib
import math
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from tqdm import tqdm

from mesh_transformer.data.storage import local_path
from mesh_transformer.evaluation import harness, validation
from mesh_transformer.model import flops
from mesh_transformer.network import TrainableNetwork, TrainSet
from mesh_transformer.training.metrics import MetricsLog, NoiseScale, StepClock, row_of
from mesh_transformer.util import HostError, InputError, StoppedError

IN_FLIGHT = 2  # steps dispatched before the oldest one's loss is read
MOST_STEPS_BETWEEN_SAVES = 8  # while saving fails


NetworkLike = TypeVar("NetworkLike", bound=TrainableNetwork)


def train(
    network: TrainableNetwork,
    folder: str,
    *,
    max_steps: int | None = None,
    tune_model_path: str | None = None,
    fresh_opt: bool = False,
) -> None:
    """Trains until the global step is `max_steps` (default: the config's `total_steps`).

    Goes on from the newest checkpoint in `folder`; without one starts from the weights at
    `tune_model_path`, or from fresh ones; where the base of adapters has moved since, that path
    replaces the recorded one.  Saves every `ckpt_every` steps, at the end, before any error that
    ends it, and on SIGTERM, Ctrl-C or SIGHUP (its terminal closes), after which it returns.  A save
    that fails is reported and tried again while training goes on.  No other process may write to
    `folder` meanwhile.

    Raises:
      InputError: for input that cannot be used, and where the last save fails twice.
      StoppedError: at a non-finite loss; nothing is saved after it.
    """
    config, folder = network.config, local_path(folder)
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
                _train(network, folder, total, tune_model_path, fresh_opt, received)
                saved = True
        except HostError as error:
            if saved:  # and a host failed in closing: nothing is lost
                return
            if not received:
                raise
            raise StoppedError(
                f"{signal.Signals(received[0]).name}: stopped, but not saved: {error}; start again "
                "to go on from the newest checkpoint"
            ) from None


def _train(
    network: TrainableNetwork,
    folder: str,
    total: int,
    tune_model_path: str | None,
    fresh_opt: bool,
    received: list[int],
) -> None:
    """Trains until step `total`, or until a signal is `received`; what is done is saved then."""
    config = network.config
    val_sets = {} if config.val_batches == 0 else config.val_set
    asked = harness.opened(config)
    with contextlib.closing(network.open_train_set()) as loader:
        for path in val_sets.values():  # says now, not after hours, what is wrong with it
            validation.open_set(network, path).close()
        network.claim(folder)
        aux = network.restore(folder, tune_model_path)
        if aux is None:
            start_weights(network, tune_model_path, fresh_opt)
            aux = {}
        unscored = _unscored(folder, network, bool(val_sets or asked)) if aux else None
        if network.step >= total and unscored is None:
            print(f"{folder} is at step {network.step} of {total}: nothing left to train")
            return
        if "loader" in aux:
            loader.restore(aux["loader"])
        noise = NoiseScale(config.noise_scale_alpha, *network.noise_batches)
        if "noise" in aux:
            noise.restore(aux["noise"])
        logged = network.step - (unscored is not None)
        log = MetricsLog(folder, config, logged, aux.get("wandb"))
        with contextlib.closing(log):
            run = _Run(network, folder, loader, val_sets, asked, log, noise, total, logged)
            run.run(received, unscored)


def _unscored(folder: str, network: TrainableNetwork, scores: bool) -> dict[str, Any] | None:
    """The row of the step restored, where the scores that are due in it are missing."""
    if not scores or network.step % network.config.val_every:
        return None
    row = row_of(folder, network.step)
    missing = row is not None and not any(name.startswith(("val/", "eval/")) for name in row)
    return row if missing else None


@contextlib.contextmanager
def closing(network: NetworkLike) -> Iterator[NetworkLike]:
    """Closes a network in the end, which waits for its last save, unless the user will not wait."""
    wait = True
    try:
        yield network
    except (KeyboardInterrupt, SystemExit):  # a second signal: the first one is `received`
        wait = False
        raise
    finally:
        if wait:
            network.close()


def start_weights(network: TrainableNetwork, path: str | None, fresh_opt: bool) -> None:
    """Gives the network the weights at `path`, or fresh ones."""
    if path is None:
        network.init()
    else:
        network.load(path, fresh_opt=fresh_opt)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects SIGTERM, Ctrl-C and SIGHUP; after one, the first two do what they did before.

    Ctrl-C then raises KeyboardInterrupt, so that whoever has made a TPU still deletes it.  It
    may: a save that is under way leaves the checkpoint before it good.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python takes signals on its main thread alone.
        return
    stops: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
    before: dict[int, Any] = {each: signal.getsignal(each) for each in (*stops, signal.SIGHUP)}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # as under nohup
        del before[signal.SIGHUP]

    def restore(numbers: Iterable[int]) -> None:
        for number in numbers:
            signal.signal(number, before[number])

    def receive(number: int, frame: object) -> None:
        received.append(number)
        restore(stops)  # but a terminal that closes may send SIGHUP twice

    for number in before:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        restore(before)


class _Run:
    """One call of `train`: what the loop shares."""

    def __init__(
        self,
        network: TrainableNetwork,
        folder: str,
        loader: TrainSet,
        val_sets: dict[str, str],
        asked: harness.Harness | None,
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
        self.harness = asked
        self.log = log
        self.noise = noise
        self.total = total
        self.pending: deque[tuple[int, dict[str, Any]]] = deque()
        self.saved = network.step  # the step of the newest checkpoint, or where we began
        self.saving = False  # whether it may still be under way
        self.save_pause = 0  # steps between tries to save, once one has failed
        self.save_again_at: int | None = None
        self.peak = network.peak_flops
        self.clock = StepClock()
        self.bar = tqdm(total=total, initial=logged, unit="step", dynamic_ncols=True)

    def run(self, received: list[int], unscored: dict[str, Any] | None) -> None:
        """Trains until the last step, or until a signal is `received`.

        Args:
          unscored: the row of the step restored, if a signal cut its scores short.
        """
        with self.bar:
            try:
                if unscored is not None:
                    self._score(unscored, received)
                while self.network.step < self.total and not received:
                    self._step(received)
            except StoppedError:  # of a loss that is not finite, or of hosts that are gone
                raise
            except Exception as error:
                self._save_before(error)
                raise
            self._finish()
        if received:
            name, step = signal.Signals(received[0]).name, self.network.step
            where = f"and saved at step {step}" if step else "before the first step"
            print(f"{name}: stopped {where}; start again to go on")

    def _step(self, received: list[int]) -> None:
        """One update, and what is due after it."""
        network, config = self.network, self.config
        sample = self.loader.get_samples()
        metrics = network.train(sample)
        self.pending.append((network.step, metrics))
        self._log(self._rows(IN_FLIGHT))
        if network.step % config.val_every == 0 and (self.val_sets or self.harness):
            self._validate(received)
        if network.save_failed and (error := self._failure_of_save()) is not None:
            self._save_later(error)
        if network.step % config.ckpt_every == 0 or network.step == self.save_again_at:
            self._save()

    def _finish(self) -> None:
        """Saves the last step; InputError where a second attempt fails too."""
        self._log(self._rows(0))
        if (error := self._failure_of_save()) is None and self.network.step != self.saved:
            error = self._failure_of(self._begin_save) or self._failure_of_save()
        if error is not None:
            self._report(f"{error}; trying once more")
            self._begin_save()
            self.network.wait()
        self.log.upload()

    def _save_before(self, error: Exception) -> None:
        """Saves what is done before an error ends the run: it resumes from there."""
        try:
            self._finish()
        except Exception as second:
            self._report(f"not saved before the run ends: {second}")

    def _rows(self, left: int) -> Iterator[dict[str, float]]:
        """The rows of all but the `left` newest steps; waits for their losses.

        The rows before one that raises can still be logged: they are made one by one.
        """
        read = []
        while len(self.pending) > left:
            step, found = self.pending.popleft()
            values = {name: float(value) for name, value in found.items()}
            self.clock.look(self.pending, read=1)
            read.append((step, values, self.clock.take()))
        self.clock.look(self.pending)
        return (self._row(*each) for each in read)

    def _row(self, step: int, values: dict[str, float], seconds: float) -> dict[str, float]:
        if not math.isfinite(values["loss"] + values["grad_norm"]):
            raise StoppedError(
                f"step {step}: loss is {values['loss']}, gradient norm {values['grad_norm']}; "
                f"checkpoints in {self.folder} are from before it: lower lr or look at the data"
            )
        row: dict[str, float] = {"step": step}
        for name in ("loss", "last_loss", "grad_norm", "learning_rate"):
            row[f"train/{name}"] = values[name]
        sequences = self.config.gradient_accumulation_steps * self.network.batch_size
        row["train/tokens_per_sec"] = sequences * self.config.seq / seconds
        if self.peak is not None:
            row["train/mfu"] = flops.mfu(self.config, row["train/tokens_per_sec"], self.peak)
        row |= {name: value for name, value in values.items() if name.startswith("host_seconds/")}
        return row | self.noise.update(values["grad_square_micro"], values["grad_norm"] ** 2)

    def _log(self, rows: Iterable[dict[str, float]]) -> None:
        for row in rows:
            self.log.write(row)
            shown = {"loss": f"{row['train/loss']:.4f}"}
            shown["tok/s"] = f"{row['train/tokens_per_sec']:,.0f}"
            if self.peak is not None and "train/mfu" in row:
                shown["MFU"] = f"{row['train/mfu']:.1%} of {self.peak / 1e12:,.4g} TFLOP/s"
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update()

    def _validate(self, received: list[int]) -> None:
        """Logs all rows, the newest step's with how well the network does."""
        older = len(self.pending) - 1
        rows = self._rows(0)
        self._log(islice(rows, older))
        self._score(next(rows), received)

    def _score(self, newest: dict[str, Any], received: list[int]) -> None:
        """Adds to the newest step's row how well the network does, and logs it.

        At a signal, or an error, it is logged without: the run that resumes scores the step again.
        """
        scores: dict[str, float] = {}
        told = []

        def stopped() -> bool:
            return bool(received)

        try:
            for name, path in self.val_sets.items():
                loss = validation.score(self.network, path, stopped=stopped).loss
                scores[f"val/loss_{name}"] = loss
                told.append(f"validation loss {name} {loss:.4f}")
            if self.harness:
                results = self.harness.results(self.network, stopped)
                if results is None:
                    raise validation.StoppedScoringError
                found = harness.numbers(results)
                scores |= {f"eval/{name}": value for name, value in found.items()}
                told += [f"{name} {value:.4f}" for name, value in found.items()]
            newest = newest | scores
        except validation.StoppedScoringError:
            told = []
        finally:
            self._log([newest])
        if told:
            self.bar.write(f"step {self.network.step}: {', '.join(told)}")
        self.clock.restart()

    def _save(self) -> None:
        """Begins to write a checkpoint of this step; one that fails is tried again later."""
        self._log(self._rows(0))  # a non-finite loss shows before it can be saved
        # First the last one: its failure must not keep this one from being tried.
        error = self._failure_of_save()
        if error is not None:
            self._report(str(error))
        self.save_again_at = None
        if self.network.step != self.saved:
            error = self._failure_of(self._begin_save)
            if error is not None:
                self._save_later(error)

    def _begin_save(self) -> None:
        """Begins to write a checkpoint, loader position and averages with it."""
        aux = {
            "loader": self.loader.state(),
            "noise": self.noise.state(),
            "wandb": self.log.wandb_id,
        }
        self.network.save(self.folder, aux)
        self.saved, self.saving = self.network.step, True
        self.log.upload()
        self.clock.restart()

    def _failure_of_save(self) -> InputError | None:
        """Waits for the save under way, if there is one; why it failed, if it did."""
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
    def _failure_of(act: Callable[[], None]) -> InputError | None:
        try:
            act()
        except InputError as error:
            return error
        return None

    def _save_later(self, error: InputError) -> None:
        """After a save that failed, sets the next try: at the next step, then ever later."""
        self.save_pause = min(2 * self.save_pause or 1, MOST_STEPS_BETWEEN_SAVES)
        self.save_again_at = self.network.step + self.save_pause
        self._report(f"{error}; the run goes on, and saves again at step {self.save_again_at}")

    def _report(self, line: str) -> None:
        self.bar.write(line, file=sys.stderr)
