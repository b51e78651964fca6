"""The training loop: metrics, checkpoints, signals and resuming, with fake and real networks."""

import itertools
import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import mesh_transformer
from mesh_transformer.config import Config
from mesh_transformer.data.loader import TFRecordNewInputs, open_train_set
from mesh_transformer.training import loop, metrics
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import HostError, InputError, StoppedError
from tests.conftest import random_batch
from tests.support.small_run import assert_same_rows, rows_of, run_values, write_set

# Relative tolerance: f32 rounds to 6e-8, and another mesh only changes the order of the additions,
# over 20 updates.
OTHER_MESH = 1e-5


class Number:
    """A device scalar that records at which step it is read."""

    def __init__(self, network: "Counter", value: float):
        self.network, self.value = network, value
        self.made = network.step

    def __float__(self) -> float:
        self.network.reads.append((self.made, self.network.step))
        return self.value

    def is_ready(self) -> bool:
        return self.made < self.network.step


def whole_records(sample: dict[str, np.ndarray]) -> np.ndarray:
    """Return records [..., T + 1]: the input tokens followed by the last target token."""
    return np.concatenate((sample["obs"], sample["target"][..., -1:]), axis=-1)


class Counter:
    """A fake network whose loss is 1 / step and whose checkpoints are entries of a dict."""

    batch_size, dp = 4, 1
    noise_batches = (4, 8)
    objective = None
    peak_flops = 1e9

    def __init__(self, config: Config, saved: dict[int, Any] | None = None):
        self.config = config
        self.step = 0
        self.saved = {} if saved is None else saved
        self.signals: list[int] = []
        self.reads: list[tuple[int, int]] = []  # (step of the loss, step at which it was read)
        self.seen: list[np.ndarray] = []
        self.calls: list[str] = []
        self.before_step: Callable[[int], None] = lambda step: None
        self.loss: Callable[[int], float] = lambda step: 1 / step

    def init(self) -> None:
        self.calls.append("init")

    def load(self, path: str, *, fresh_opt: bool = False) -> None:
        self.calls.append(f"load {path} {fresh_opt}")

    def open_train_set(self) -> TFRecordNewInputs:
        return open_train_set(self.config, self.batch_size)

    def train(self, sample: dict[str, np.ndarray]) -> dict[str, Any]:
        self.before_step(self.step + 1)
        np.testing.assert_array_equal(sample["obs"][..., 1:], sample["target"][..., :-1])
        self.seen.append(whole_records(sample))
        self.step += 1
        names = ("last_loss", "grad_norm", "grad_norm_micro", "grad_square_micro", "learning_rate")
        return {
            "loss": Number(self, self.loss(self.step)),
            **dict.fromkeys(names, Number(self, 0.5)),
            "skipped": Number(self, 0.0),
            "counted": Number(self, 1.0),
        }

    def eval(self, sample: dict[str, np.ndarray]) -> dict[str, Any]:
        shape = sample["obs"].shape
        return {"all_loss": np.full(shape, 1.5), "correct": np.zeros(shape, bool)}

    def generate(self, *_: Any) -> np.ndarray:
        raise NotImplementedError

    def claim(self, folder: str, *, room: bool = False) -> None:
        if not room:
            self.calls.append(f"claim {Path(folder).name}")

    save_failed = False
    notice = ""
    larger = ""

    def larger_mesh(self) -> str:
        return self.larger

    def save(self, folder: str, aux: dict[str, Any] | None = None) -> None:
        # As in `Checkpoints.save`, nothing is saved again.
        self.saved.setdefault(self.step, json.loads(json.dumps(aux)))

    def wait(self) -> None:
        self.calls.append("wait")

    def restore(self, folder: str, base: str | None = None) -> dict[str, Any] | None:
        if not self.saved:
            return None
        self.step = max(self.saved)
        return self.saved[self.step]

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def counter(tmp_path) -> Callable[..., Counter]:
    values = run_values(tmp_path)

    def make(saved: dict[int, Any] | None = None, **changes: Any) -> Counter:
        return Counter(Config(**(values | changes)), saved)

    return make


def test_losses_by_position_are_metrics_of_the_validated_steps(counter, tmp_path):
    loop.train(counter(val_every=4, val_by_position=True), str(tmp_path), max_steps=9)
    losses = {row["step"]: row.get("val_position/held_out/0-127") for row in rows_of(tmp_path)}
    assert losses == {step: None if step % 4 else 1.5 for step in range(1, 10)}


def test_the_last_step_is_validated_but_not_where_a_run_only_stops(counter, tmp_path):
    def validated(folder):
        return [row["step"] for row in rows_of(folder) if "val/loss_held_out" in row]

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    loop.train(counter(val_every=4, total_steps=10), str(whole))
    assert validated(whole) == [4, 8, 10]
    network = counter(val_every=4, total_steps=10)
    loop.train(network, str(stopped), max_steps=7)
    assert validated(stopped) == [4]
    loop.train(counter(network.saved, val_every=4, total_steps=10), str(stopped))
    assert_same_rows(rows_of(stopped), rows_of(whole))


def test_the_last_step_is_validated_later_if_a_kill_prevented_it(counter, tmp_path):
    loop.train(network := counter(val_every=4, total_steps=10), str(tmp_path))
    whole, path = rows_of(tmp_path), tmp_path / "metrics.jsonl"
    *lines, last = path.read_text().splitlines()
    unscored = {key: x for key, x in json.loads(last).items() if not key.startswith("val/")}
    assert len(unscored) == len(json.loads(last)) - 1
    path.write_text("\n".join([*lines, json.dumps(unscored)]) + "\n")
    loop.train(counter(network.saved, val_every=4, total_steps=10), str(tmp_path))
    assert_same_rows(rows_of(tmp_path), whole)


def test_losses_are_read_only_after_later_steps_are_dispatched(counter, tmp_path):
    network = counter(ckpt_every=1000, val_set=None)
    loop.train(network, str(tmp_path))
    # The last losses are read at the end, when no more steps are dispatched.
    assert {step_of_loss: at for step_of_loss, at in network.reads if at < 30} == {
        step: step + loop.IN_FLIGHT for step in range(1, 30 - loop.IN_FLIGHT)
    }
    assert {step_of_loss for step_of_loss, _ in network.reads} == set(range(1, 31))


def test_the_first_step_ends_before_the_second_is_dispatched(counter, tmp_path):
    network = counter(ckpt_every=1000, val_set=None)
    loop.train(network, str(tmp_path), max_steps=6)
    assert network.reads[0] == (1, 1)
    network = counter({6: network.saved[6]}, ckpt_every=1000, val_set=None)
    loop.train(network, str(tmp_path), max_steps=12)
    assert network.reads[0] == (7, 7)


@pytest.mark.parametrize("peak", [1e9, None])
def test_rows_have_the_documented_keys(counter, tmp_path, capsys, peak):
    network = counter(ckpt_every=7)
    network.peak_flops = peak
    loop.train(network, str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert ("MFU" in capsys.readouterr().err) == (peak is not None)
    train = ("loss", "last_loss", "grad_norm", "learning_rate", "tokens_per_sec", "sequences")
    train = (*train, "tokens")
    always = {"step", *(f"train/{name}" for name in train)}
    if peak is not None:
        always.add("train/mfu")
    for row in rows:
        names = {name for name in row if not name.startswith(("noise/", "seconds/"))}
        assert names == always | ({"val/loss_held_out"} if row["step"] % 10 == 0 else set())
        assert {"noise/grad_square", "noise/covariance_trace"} <= row.keys()
        assert row["train/loss"] == 1 / row["step"]
        assert row.get("val/loss_held_out", 1.5) == 1.5
    assert sorted(network.saved) == [7, 14, 21, 28, 30]
    assert network.calls == [f"claim {tmp_path.name}", "init", *["wait"] * 5, "close"]


def test_training_without_validation_needs_no_validation_sets(counter, tmp_path):
    tasks = ["a_task_that_does_not_exist"]
    network = counter(val_set={"x": "nowhere.index"}, eval_harness_tasks=tasks)
    loop.train(network, str(tmp_path), validate=False)
    assert network.step == 30
    assert not [name for row in rows_of(tmp_path) for name in row if name.startswith("val/")]


def test_a_missing_wandb_key_is_reported_before_anything_is_loaded(
    counter, tmp_path, monkeypatch, capsys
):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    network = counter(wandb_project="project", ckpt_every=7)
    errors, open_train_set = [], network.open_train_set

    def opened():
        errors.append(capsys.readouterr().err)
        return open_train_set()

    network.open_train_set = opened
    loop.train(network, str(tmp_path / "model"))
    [[line]] = [text.splitlines() for text in errors]
    assert line.startswith("wandb: no API key for api.wandb.ai in WANDB_API_KEY or ~/.netrc; ")
    assert "wandb: " not in capsys.readouterr().err
    assert network.step == 30


@pytest.mark.parametrize("stops", [(1, 2, 30), (13, 14, 29, 30)])
def test_every_record_is_read_once_across_restarts(counter, tmp_path, stops):
    uninterrupted = counter(ckpt_every=5)
    loop.train(uninterrupted, str(tmp_path / "whole"))
    saved: dict[int, Any] = {}
    seen = []
    for stop in stops:
        network = counter(saved, ckpt_every=5)
        loop.train(network, str(tmp_path / "parts"), max_steps=stop)
        seen += network.seen
    np.testing.assert_array_equal(np.stack(seen), np.stack(uninterrupted.seen))
    assert_same_rows(rows_of(tmp_path / "parts"), rows_of(tmp_path / "whole"))
    # Training covers more than one epoch, and every epoch has the same order of records.
    records = np.concatenate(uninterrupted.seen).reshape(-1, 17)
    assert len(records) > 3 * 61
    np.testing.assert_array_equal(records[61:], records[:-61])


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_saves_a_checkpoint_and_returns(counter, tmp_path, capsys, number):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    before = [signal.getsignal(stop_signal) for stop_signal in STOP_SIGNALS]
    network = counter()
    network.before_step = lambda step: os.kill(os.getpid(), number) if step == 6 else None
    if number == signal.SIGHUP:  # a shell that exits sends it a second time
        network.wait = lambda: os.kill(os.getpid(), number)
    loop.train(network, str(tmp_path))
    assert max(network.saved) == network.step == 6
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 7))
    message = f"{number.name}: stopped and saved at step 6"
    assert message in capsys.readouterr().out
    assert [signal.getsignal(stop_signal) for stop_signal in STOP_SIGNALS] == before


def test_under_nohup_sighup_is_ignored(counter, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    network = counter()
    network.before_step = lambda step: os.kill(os.getpid(), signal.SIGHUP) if step == 6 else None
    try:
        loop.train(network, str(tmp_path))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert network.step == 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_calls_the_previous_handler(counter, tmp_path, number):
    """Ctrl-C raises and SIGTERM calls its previous handler; neither waits for a save."""

    def previous_handler(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, previous_handler)
    # Background jobs of a shell ignore SIGINT.
    previous_sigint_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    network = counter()
    network.before_step = lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 6 else None
    network.wait = lambda: os.kill(os.getpid(), number)
    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            loop.train(network, str(tmp_path))
        assert signal.getsignal(signal.SIGTERM) is previous_handler
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, previous_sigint_handler)
    assert max(network.saved) == 6
    assert network.calls == ["claim " + tmp_path.name, "init"]


def test_a_signal_before_the_first_step_stops_without_saving(counter, tmp_path, capsys):
    network = counter()
    network.init = lambda: os.kill(os.getpid(), signal.SIGINT)
    loop.train(network, str(tmp_path))
    assert network.saved == {}
    assert network.seen == []
    assert "SIGINT: stopped before the first step; " in capsys.readouterr().out


def test_a_host_failure_after_a_signal_still_stops_the_run(counter, tmp_path):
    """A stop signal must not lead to another attempt, even before the first step."""
    network = counter()

    def fails(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise HostError("host 1 died")

    network.restore = fails
    with pytest.raises(StoppedError, match="by SIGTERM without saving: host 1 died") as error:
        loop.train(network, str(tmp_path))
    assert not isinstance(error.value, HostError)


def test_a_host_failure_after_the_last_save_is_ignored(counter, tmp_path):
    network = counter()
    network.before_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 6 else None

    def fails() -> None:
        raise HostError("host 1 died")

    network.close = fails
    loop.train(network, str(tmp_path))
    assert max(network.saved) == 6


def test_a_host_that_announces_its_end_saves_this_step_first(counter, tmp_path):
    saved: dict[int, Any] = {}
    network = counter(saved, ckpt_every=100)
    before_step = {5: "", 6: "host 1 received SIGTERM"}

    def before(step: int) -> None:
        network.notice = before_step.get(step, "")

    network.before_step = before
    with pytest.raises(HostError, match=r"^host 1 received SIGTERM, so its machine is about to"):
        loop.train(network, str(tmp_path))
    assert sorted(saved) == [6]
    assert network.calls[-2:] == ["wait", "close"]
    loop.train(counter(saved, ckpt_every=100), str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 31))


@pytest.mark.parametrize("since", [4, 7, 8, 28, 29])
def test_a_run_restarts_on_a_larger_mesh_after_a_save_but_not_at_its_end(counter, tmp_path, since):
    saved: dict[int, Any] = {}
    network = counter(saved, ckpt_every=7)

    def before(step: int) -> None:
        network.larger = "a larger mesh" if step >= since else ""

    network.before_step = before
    if since > 28:
        loop.train(network, str(tmp_path))
        assert network.step == 30
        return
    with pytest.raises(HostError, match=r"^a larger mesh$"):
        loop.train(network, str(tmp_path))
    assert max(saved) == network.step == -(-since // 7) * 7


def test_a_run_whose_save_fails_does_not_restart_on_a_larger_mesh(counter, tmp_path, capsys):
    network = counter(ckpt_every=7)
    network.before_step = lambda step: setattr(network, "larger", "a larger mesh")
    failures = [InputError("the bucket is down")]
    wait = network.wait

    def fails_once() -> None:
        wait()
        if failures and network.step == 7:
            network.saved.clear()
            raise failures.pop()

    network.wait = fails_once
    with pytest.raises(HostError, match=r"^a larger mesh$"):
        loop.train(network, str(tmp_path))
    assert max(network.saved) == network.step == 8
    assert "the bucket is down; training continues" in capsys.readouterr().err


def test_training_off_the_main_thread_ignores_signals(counter, tmp_path):
    network = counter()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loop.train, network, str(tmp_path)).result()
    assert network.step == 30


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("step", [1, 8, 9, 30])
def test_a_non_finite_loss_stops_the_run_without_saving(counter, tmp_path, loss, step):
    network = counter(ckpt_every=4)
    network.loss = lambda at: loss if at == step else 1 / at
    with pytest.raises(StoppedError, match=rf"^step {step}: loss is {loss}, ") as error:
        loop.train(network, str(tmp_path))
    assert "\n" not in str(error.value)
    assert max(network.saved, default=0) == (step - 1) // 4 * 4
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, step))
    assert network.calls[-1] == "close"


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
@pytest.mark.parametrize("step", [1, 8, 9, 30])
def test_a_non_finite_gradient_norm_stops_the_run_without_saving(counter, tmp_path, norm, step):
    network = counter(ckpt_every=4)
    original_train = network.train

    def train(sample: Any) -> dict[str, Any]:
        metrics = original_train(sample)
        if network.step == step:
            metrics["grad_norm"] = Number(network, norm)
        return metrics

    network.train = train
    with pytest.raises(StoppedError, match=rf"^step {step}: loss is .*, gradient norm {norm}; "):
        loop.train(network, str(tmp_path))
    assert max(network.saved, default=0) == (step - 1) // 4 * 4
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, step))


@pytest.mark.parametrize("record", [8 * 6, 8 * 6 + 7])
def test_a_corrupt_record_loses_no_steps_and_training_resumes_after_repair(
    counter, tmp_path, record
):
    undamaged = counter(ckpt_every=1000)
    loop.train(undamaged, str(tmp_path / "whole"))
    saved: dict[int, Any] = {}
    network = counter(saved, ckpt_every=1000)
    path = Path(str(network.config.train_set)).parent / "train_two.tfrecords"
    good = path.read_bytes()
    frame = len(good) // 24 * (record - 37)
    path.write_bytes(good[: frame + 20] + b"\xff" + good[frame + 21 :])
    # At the start, the loop only checks that two batches exist, not their contents.
    message = r"train_two\.tfrecords: corrupt record at byte \d+ \(wrong checksum\)"
    for _ in range(2):  # A restart reports the same error and changes nothing.
        with pytest.raises(InputError, match=message):
            loop.train(counter(saved, ckpt_every=1000), str(tmp_path / "parts"))
        assert list(saved) == [6]
        assert [row["step"] for row in rows_of(tmp_path / "parts")] == list(range(1, 7))
    path.write_bytes(good)
    loop.train(counter(saved, ckpt_every=1000), str(tmp_path / "parts"))
    assert_same_rows(rows_of(tmp_path / "parts"), rows_of(tmp_path / "whole"))


def test_a_corrupt_validation_record_loses_no_steps(counter, tmp_path):
    network = counter(ckpt_every=1000, val_batches=3)
    path = Path(network.config.val_set["held_out"]).parent / "val_one.tfrecords"
    content = path.read_bytes()
    frame = len(content) // 13
    path.write_bytes(content[: 9 * frame + 20] + b"\xff" + content[9 * frame + 21 :])
    with pytest.raises(InputError, match=r"val_one\.tfrecords: corrupt record at byte"):
        loop.train(network, str(tmp_path))
    assert list(network.saved) == [10]
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 11))


def test_bad_records_are_reported_even_if_the_hosts_have_exited(counter, tmp_path):
    network = counter(ckpt_every=1000, val_every=1000)
    loader = network.open_train_set()
    sample = loader.get_samples()
    loader.close()
    answers = [sample, sample, InputError("train_one.tfrecords: corrupt")]

    def get_samples():
        answer = answers.pop(0)
        if isinstance(answer, InputError):
            raise answer
        return answer

    def wait():
        raise HostError("the hosts have been ended")

    loader.get_samples, network.wait = get_samples, wait
    network.open_train_set = lambda: loader
    with pytest.raises(InputError, match=r"train_one\.tfrecords: corrupt"):
        loop.train(network, str(tmp_path))


# Failing saves.


class Storage:
    """Makes the saves of some steps of a `Counter` fail, immediately or in the background.

    Attributes:
      tried: the steps of all saves, in order.
    """

    def __init__(self, network: Counter, fails: Callable[[int], str | None]):
        self.network, self.fails = network, fails
        self.tried: list[int] = []
        self.save, network.save, network.wait = network.save, self.begin, self.wait

    def error(self, step: int) -> InputError:
        return InputError(f"model: saving step {step} failed: disk full")

    def begin(self, folder: str, aux: dict[str, Any] | None = None) -> None:
        assert not self.network.save_failed, "an earlier failure was not handled"
        step = self.network.step
        self.tried.append(step)
        if (how := self.fails(step)) == "at once":
            raise self.error(step)
        if how == "later":
            self.network.save_failed = True
        else:
            self.save(folder, aux)

    def wait(self) -> None:
        if self.network.save_failed:
            self.network.save_failed = False
            raise self.error(self.tried[-1])


def test_a_resumed_run_says_that_it_does_not_load_the_given_model(counter, tmp_path, capsys):
    saved = {}
    loop.train(counter(saved), str(tmp_path), max_steps=3)
    capsys.readouterr()
    network = counter(saved)
    loop.train(network, str(tmp_path), max_steps=6, tune_model_path="pretrained")
    line = f"resuming {tmp_path} from step 3: pretrained is not loaded\n"
    assert capsys.readouterr().out.startswith(line)
    assert not any(call.startswith("load") for call in network.calls)


@pytest.mark.parametrize("how", ["at once", "later"])
def test_a_failed_save_is_retried_at_the_next_step(counter, tmp_path, capsys, how):
    network = counter(ckpt_every=7)
    storage = Storage(network, lambda step: how if step == 14 else None)
    loop.train(network, str(tmp_path))
    retry = 15 if how == "at once" else 16  # a background failure is noticed at step 15
    assert storage.tried == [7, 14, retry, 21, 28, 30]
    assert sorted(network.saved) == [7, retry, 21, 28, 30]
    message = (
        "saving step 14 failed: disk full; training continues, next attempt to save at step "
        f"{retry}"
    )
    assert message in capsys.readouterr().err
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 31))


@pytest.mark.parametrize("how", ["at once", "later"])
@pytest.mark.parametrize("recovers", [False, True])
def test_a_failed_save_can_stop_the_run(counter, tmp_path, capsys, how, recovers):
    network, failures = counter(ckpt_every=7, on_save_failure="stop"), []

    def fails(step: int) -> str | None:
        failures.append(step)
        return None if step < 14 or (recovers and len(failures) > 2) else how

    storage = Storage(network, fails)
    with pytest.raises(InputError, match="saving step 14 failed: disk full"):
        loop.train(network, str(tmp_path))
    # The newest step is saved before the run ends, if the storage works again by then.
    end = 14 if how == "at once" else 15  # a background failure is noticed at step 15
    assert sorted(network.saved) == ([7, end] if recovers else [7])
    assert storage.tried[:3] == [7, 14, end]
    assert network.step == end


@pytest.mark.parametrize("how", ["at once", "later"])
@pytest.mark.parametrize("ends", [41, 42, 45, 53, 70, 79])
def test_saves_succeed_within_10_steps_after_storage_recovers(counter, tmp_path, how, ends):
    network = counter(ckpt_every=40, total_steps=90, val_set=None)
    storage = Storage(network, lambda step: how if step < ends else None)
    loop.train(network, str(tmp_path))
    assert storage.tried[0] == 40
    assert ends <= min(network.saved) <= ends + 10
    assert max(network.saved) == 90


@pytest.mark.parametrize("how", ["at once", "later"])
def test_the_interval_between_retried_saves_grows(counter, tmp_path, how):
    network = counter(ckpt_every=100, total_steps=150, val_set=None)
    storage = Storage(network, lambda step: how if step < 150 else None)
    loop.train(network, str(tmp_path))
    gaps = np.diff([step for step in storage.tried if step < 150])
    delay = how == "later"  # a background failure is noticed one step later
    assert gaps[:3].tolist() == [1 + delay, 2 + delay, 4 + delay]
    assert set(gaps[3:]) == {8 + delay}


def test_warnings_that_claim_silences_stay_silent_after_the_run(counter, tmp_path):
    """Writes of a failed save may end after the run; `claim` silences their messages."""
    network = counter(ckpt_every=1000, val_set=None)
    network.claim = lambda *_, **__: warnings.filterwarnings("ignore", "late", RuntimeWarning)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        warnings.warn("late", RuntimeWarning, stacklevel=1)
        loop.train(network, str(tmp_path), max_steps=2)
        warnings.warn("late", RuntimeWarning, stacklevel=1)
    assert [str(each.message) for each in shown] == ["late"]


@pytest.mark.parametrize("how", ["at once", "later"])
def test_a_failed_last_save_is_retried_once(counter, tmp_path, how):
    fails = [how]
    network = counter(ckpt_every=1000)
    storage = Storage(network, lambda step: fails.pop() if fails else None)
    loop.train(network, str(tmp_path / "once"))
    assert (storage.tried, list(network.saved)) == ([30, 30], [30])
    network = counter(ckpt_every=1000)
    storage = Storage(network, lambda step: how)
    with pytest.raises(InputError, match=r"saving step 30 failed: disk full$"):
        loop.train(network, str(tmp_path / "never"))
    assert storage.tried == [30, 30]
    assert [row["step"] for row in rows_of(tmp_path / "never")] == list(range(1, 31))


@pytest.mark.parametrize("at", [14, 15, 16, 20])
def test_a_signal_saves_even_if_the_previous_save_failed(counter, tmp_path, at):
    network, fails = counter(ckpt_every=7), ["later"]
    Storage(network, lambda step: fails.pop() if step == 14 and fails else None)
    network.before_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == at else None
    loop.train(network, str(tmp_path))
    assert max(network.saved) == network.step == at


def test_a_signal_ends_one_run_and_not_the_next_one_of_the_same_network(counter, tmp_path):
    network = counter()
    network.before_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 9 else None
    loop.train(network, str(tmp_path))
    assert network.step == 9
    network.before_step = lambda step: None
    loop.train(network, str(tmp_path))
    assert network.step == 30


@pytest.mark.parametrize("failing", ["train", "eval", "open_train_set"])
def test_a_run_that_ends_with_an_error_saves_its_last_step(counter, tmp_path, failing):
    network = counter(ckpt_every=1000, val_every=10)
    original = getattr(network, failing)

    def fails(*arguments: Any) -> Any:
        if network.step == 10:
            raise RuntimeError("unforeseen")
        return original(*arguments)

    setattr(network, failing, fails)
    if failing == "open_train_set":
        loader = original()
        loader.get_samples = lambda read=loader.get_samples: (
            fails() if network.step == 10 else read()
        )
        network.open_train_set = lambda: loader
    with pytest.raises(RuntimeError, match="unforeseen"):
        loop.train(network, str(tmp_path))
    assert list(network.saved) == [10]
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 11))


@pytest.mark.parametrize("at", range(5, 13))
def test_an_error_of_on_row_loses_no_row(counter, tmp_path, at):
    """Before a save (step 7) and a validation (step 10), several rows are logged at a time."""

    def on_row(row: dict[str, Any]) -> None:
        if row["step"] == at:
            raise RuntimeError("no more rows, please")

    network = counter(ckpt_every=7)
    with pytest.raises(RuntimeError, match="no more rows"):
        loop.train(network, str(tmp_path), on_row=on_row)
    loop.train(counter(network.saved), str(tmp_path))
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 31))


@pytest.mark.parametrize("total", [10, 15])
def test_an_interrupted_validation_is_repeated_after_resuming(counter, tmp_path, total):
    loop.train(counter(val_every=10, val_batches=4), str(tmp_path / "whole"), max_steps=total)
    evaluated = []

    def interrupted_network(saved: dict[int, Any], interrupt: Callable[[], Any]) -> Any:
        network = counter(saved, ckpt_every=1000, val_every=10, val_batches=4)
        original_eval = network.eval

        def evaluate(sample: Any) -> Any:
            evaluated.append(network.step)
            if len(evaluated) == 2:
                interrupt()
            return original_eval(sample)

        network.eval = evaluate
        return network

    model = str(tmp_path / "model")
    stopped = interrupted_network({}, lambda: os.kill(os.getpid(), signal.SIGTERM))
    loop.train(stopped, model, max_steps=total)
    assert evaluated == [10, 10]
    assert max(stopped.saved) == 10
    assert "val/loss_held_out" not in rows_of(model)[-1]
    # An error interrupts the validation again.
    evaluated.clear()
    with pytest.raises(ZeroDivisionError):
        loop.train(interrupted_network(stopped.saved, lambda: 1 // 0), model, max_steps=total)
    assert [row["step"] for row in rows_of(model)] == list(range(1, 11))
    loop.train(counter(stopped.saved, val_every=10, val_batches=4), model, max_steps=total)
    assert_same_rows(rows_of(model), rows_of(tmp_path / "whole"))


def test_invalid_settings_are_refused_before_training(counter, tmp_path):
    cases = [
        ({"train_set": None}, {}, "training needs the key 'train_set'"),
        ({"total_steps": None}, {}, "training needs the key 'total_steps'"),
        ({}, {"max_steps": 0}, "--max-steps is 0, expected at least 1"),
    ]
    for changes, arguments, message in cases:
        network = counter(**changes)
        with pytest.raises(InputError, match=message):
            loop.train(network, str(tmp_path / "model"), **arguments)
        assert network.calls == []
    assert not (tmp_path / "model").exists()


def test_a_finished_run_reports_it_and_changes_nothing(counter, tmp_path, capsys):
    saved: dict[int, Any] = {}
    loop.train(counter(saved), str(tmp_path), max_steps=9)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    for stop, said in ((9, " of 9"), (5, ", past 5")):
        network = counter(saved)
        loop.train(network, str(tmp_path), max_steps=stop)
        captured = capsys.readouterr()
        assert captured.out == f"{tmp_path} is at step 9{said}: nothing left to train\n"
        assert captured.err == ""
        assert network.seen == []
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_different_record_set_is_refused_before_anything_changes(counter, tmp_path):
    saved: dict[int, Any] = {}
    loop.train(counter(saved), str(tmp_path), max_steps=9)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    other = write_set(tmp_path, "other")
    with pytest.raises(InputError, match=r"other\.index lists other files than when"):
        loop.train(counter(saved, train_set=other), str(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert max(saved) == 9


def test_only_a_new_run_loads_tune_model_path(counter, tmp_path):
    saved: dict[int, Any] = {}
    network = counter(saved)
    options: dict[str, Any] = {"tune_model_path": "there", "fresh_opt": True}
    loop.train(network, str(tmp_path), max_steps=3, **options)
    assert network.calls[1] == "load there True"
    network = counter(saved)
    loop.train(network, str(tmp_path), **options)
    assert not [call for call in network.calls if call.startswith(("load", "init"))]
    assert len(network.seen) == 27


class TimedMetric:
    """A metric of a step; reading it waits until the step has finished."""

    def __init__(self, network: "Timed", ends: float, value: float):
        self.network, self.ends, self.value = network, ends, value

    def __float__(self) -> float:
        self.network.now = max(self.network.now, self.ends)
        return self.value

    def is_ready(self) -> bool:
        return self.network.now >= self.ends


class Timed(Counter):
    """A network with a simulated clock, whose steps run one after another for random durations.

    `train` returns when at most `depth` steps besides the newest are unfinished.
    """

    now, depth = 0.0, 0

    def begin(self, depth: int, seed: int) -> None:
        self.depth, self.rng = depth, np.random.default_rng(seed)
        self.seconds: list[float] = []
        self.ends = [0.0]
        self.pauses: list[tuple[int, float]] = []  # (step before the pause, seconds)

    def train(self, sample: dict[str, np.ndarray]) -> dict[str, Any]:
        metrics = super().train(sample)
        self.now = max(self.now + 1e-3, self.ends[max(0, self.step - 1 - self.depth)])
        self.seconds.append(self.rng.uniform(0.5, 1.5))
        self.ends.append(max(self.now, self.ends[-1]) + self.seconds[-1])
        return {
            name: TimedMetric(self, self.ends[-1], value.value) for name, value in metrics.items()
        }

    def eval(self, sample: dict[str, np.ndarray]) -> dict[str, Any]:
        self.pause(3.0)
        return super().eval(sample)

    def save(self, folder: str, aux: dict[str, Any] | None = None) -> None:
        self.pause(20.0)
        super().save(folder, aux)

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append((self.step, seconds))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_step_times_add_up_to_the_elapsed_time(counter, tmp_path, monkeypatch, depth):
    """Check each step's time, and the sums between pauses for saves and validation.

    The times must be correct however long after their step the metrics are read.
    """
    network = Timed(counter().config)
    network.begin(depth, seed=depth)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: network.now))
    loop.train(network, str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tokens = network.config.gradient_accumulation_steps * network.batch_size * network.config.seq
    actual = np.array([tokens / row["train/tokens_per_sec"] for row in rows])
    # Dispatching a step takes one millisecond, so its end is noticed up to that much late.
    np.testing.assert_allclose(actual, network.seconds, atol=5e-3)
    stops = sorted({step for step, _ in network.pauses})
    assert stops == [7, 10, 14, 20, 21, 28, 30]
    paused = 0.0
    for first, last in itertools.pairwise([0, *stops]):
        # The clock has not advanced since the newest step was read; f64 rounds to 1e-16.
        wall = network.ends[last] - network.ends[first] - paused
        np.testing.assert_allclose(actual[first:last].sum(), wall, rtol=1e-9)
        paused = sum(seconds for step, seconds in network.pauses if step == last)


# Real networks.  The other runs are compared with the run of the fixture `base`.

MESHES = {
    "2x4": {},
    "1x8": {"cores_per_replica": 8, "per_replica_batch": 4},
    "4x2": {"cores_per_replica": 2, "per_replica_batch": 1},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Return a folder with `model`, trained to step 40, and `half`, its copy at step 20."""
    folder = tmp_path_factory.mktemp("base")
    values = run_values(folder, anneal_steps=60, total_steps=40, ckpt_every=20)
    train_here(values, folder / "model")
    shutil.copytree(folder / "model", folder / "half")
    shutil.rmtree(folder / "half" / "step_40")
    return folder, values


def train_here(values: dict[str, Any], folder: Path, **options: Any) -> list[np.ndarray]:
    """Train a real network and return the records that it read."""
    network = CausalTransformer(Config(**values), init=False)
    seen: list[np.ndarray] = []
    train = network.train

    def recording_train(sample: dict[str, np.ndarray]) -> dict[str, Any]:
        seen.append(whole_records(sample))
        return train(sample)

    network.train = recording_train  # type: ignore[method-assign]
    loop.train(network, str(folder), **options)
    return [record for batch in seen for record in batch.reshape(-1, batch.shape[-1])]


def test_a_warmup_that_the_run_does_not_reach_is_remarked(counter, tmp_path, capsys):
    remark = (
        "warmup_steps 12 is more than total_steps 3: the learning rate only reaches 0.1, not lr "
        "0.4; lower warmup_steps"
    )
    for warmup, expected in ((3, []), (12, [remark])):
        values = {"warmup_steps": warmup, "total_steps": 3, "lr": 0.4, "anneal_steps": None}
        loop.train(counter({}, **values), str(tmp_path / str(warmup)))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warmup")]
        assert lines == expected


@pytest.mark.slow
def test_an_extended_run_says_that_its_learning_rates_change(base, tmp_path, capsys):
    folder, values = base
    run = tmp_path / "run"
    shutil.copytree(folder / "half", run)
    train_here(values | {"total_steps": 21}, run)  # anneal_steps stays 60
    assert "schedule" not in capsys.readouterr().out
    train_here(values | {"total_steps": 22, "anneal_steps": None, "lr": 1e-3}, run)
    line = f"resuming {run} with another learning rate schedule: lr is 0.001, was 0.01, "
    assert f"{line}anneal_steps is 19, was 60\n" in capsys.readouterr().out


def relative_difference(actual_folder: Path, expected_folder: Path, first: int) -> float:
    """Return the largest relative difference of losses and gradient norms from step `first` on."""
    names = ("train/loss", "train/last_loss", "train/grad_norm", "val/loss_held_out")
    pairs = zip(
        rows_of(actual_folder)[first - 1 :], rows_of(expected_folder)[first - 1 :], strict=True
    )
    return max(
        abs(actual[name] / expected[name] - 1)
        for actual, expected in pairs
        for name in names
        if name in expected
    )


@pytest.mark.slow
def test_a_checkpoint_without_a_position_in_the_data_says_so(base, tmp_path, capsys):
    folder, values = base
    network = CausalTransformer(Config(**values), init=False)
    network.restore(str(folder / "half"))
    network.save(str(tmp_path / "model"))  # as in Python, without the loop
    network.close()
    seen = train_here(values | {"total_steps": 21}, tmp_path / "model")
    line = f"{tmp_path / 'model'} has no position in the data; records are read from the first one"
    assert line in capsys.readouterr().out
    expected = TFRecordNewInputs(values["train_set"], 8, values["seq"])
    first = whole_records(expected.get_samples())
    expected.close()
    np.testing.assert_array_equal(np.stack(seen)[: len(first)], first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("1x8", {}),
        ("4x2", {}),
        ("1x8", {"partitioning": "jit", "zero": 1}),
        ("4x2", {"partitioning": "jit", "zero": 3}),
        ("2x4", {"zero": 3}),
    ],
)
def test_resuming_on_another_mesh_gives_the_same_records_and_losses(base, tmp_path, mesh, changes):
    folder, values = base
    shutil.copytree(folder / "half", tmp_path / "model")
    changed = values | MESHES[mesh] | changes
    seen = train_here(changed, tmp_path / "model")
    # From step 21 on, each step reads 2 microbatches of 4 records.
    expected = TFRecordNewInputs(values["train_set"], 8, values["seq"])
    batches = [whole_records(expected.get_samples()) for _ in range(40)]
    expected.close()
    np.testing.assert_array_equal(np.stack(seen), np.concatenate(batches[20:]))
    difference = relative_difference(tmp_path / "model", folder / "model", 21)
    print(f"{mesh} {changes}: largest relative difference {difference:.1e}")
    assert difference < OTHER_MESH
    assert_same_rows(rows_of(tmp_path / "model")[:20], rows_of(folder / "model")[:20])


@pytest.mark.slow
def test_a_diverged_run_stops_and_can_be_resumed(base, tmp_path):
    folder, values = base
    shutil.copytree(folder / "half", tmp_path / "model")
    # Such a large learning rate gives weights whose products overflow f32.
    wild = values | {"lr": 1e30, "end_lr": 1e30, "ckpt_every": 1000}
    with pytest.raises(StoppedError, match=r"^step 22: loss is (nan|inf), gradient norm"):
        train_here(wild, tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").glob("step_*")]
    assert max(int(path.name[5:]) for path in (tmp_path / "model").glob("step_*")) == 20
    train_here(values, tmp_path / "model")
    assert_same_rows(rows_of(tmp_path / "model"), rows_of(folder / "model"))


def moments(network: CausalTransformer) -> list[np.ndarray]:
    assert network.state is not None
    return [np.asarray(leaf) for leaf in jax.tree.leaves(network.state["opt_state"])]


@pytest.mark.slow
def test_fine_tuning_starts_at_step_0_with_or_without_the_moments(base, tmp_path):
    folder, values = base
    config = Config(**values)
    tuned, fresh = (CausalTransformer(config, init=False) for _ in range(2))
    trained = CausalTransformer(config, init=False)
    trained.restore(str(folder / "half"))
    tuned.load(str(folder / "half"))
    fresh.load(str(folder / "half"), fresh_opt=True)
    assert (trained.step, tuned.step, fresh.step) == (20, 0, 0)
    for actual, expected in zip(moments(tuned), moments(trained), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert all(not leaf.any() for leaf in moments(fresh))
    trained.close()

    loop.train(tuned, str(tmp_path), max_steps=2, tune_model_path=str(folder / "half" / "step_20"))
    first, second = rows_of(tmp_path)
    assert first["step"] == 1
    assert (first["train/learning_rate"], second["train/learning_rate"]) == (
        0.0,
        pytest.approx(config.lr / 3, rel=1e-6),  # f32
    )
    metrics = tuned.train(random_batch(config, 2, 4))
    assert {"loss", "last_loss", "grad_norm", "grad_norm_micro"} <= metrics.keys()
    assert all(isinstance(x, jax.Array) and x.shape == () for x in metrics.values())
    # The data restarts too, so the first batch is the one that the pretrained run read first.
    assert first["train/loss"] < rows_of(folder / "half")[0]["train/loss"]


@pytest.mark.slow
def test_load_gives_the_same_model_with_and_without_a_config(base):
    folder, values = base
    model = {key: values[key] for key in ("layers", "d_model", "n_heads", "n_vocab", "seq")}
    model |= {"pe_rotary_dims": 4, "dtype": "float32"}
    path = str(folder / "half")
    networks = {
        "its own": mesh_transformer.load(path),
        "one device": CausalTransformer(model, devices=jax.devices()[:1], init=False),
        "no mesh": mesh_transformer.load(path, model),
        "one of its steps": mesh_transformer.load(f"{path}/step_20", Config(**values)),
    }
    networks["one device"].load(path)
    batch = random_batch(Config(**values), 5)
    results = {name: network.eval(batch) for name, network in networks.items()}
    expected = results.pop("its own")
    assert {k: v.shape for k, v in expected.items()} == {
        "loss": (5,),
        "last_loss": (5,),
        "all_loss": (5, 16),
        "correct": (5, 16),
    }
    for actual in results.values():
        for key in ("loss", "last_loss", "all_loss"):  # f32 sums in a different order
            np.testing.assert_allclose(actual[key], expected[key], rtol=1e-5)
        np.testing.assert_array_equal(actual["correct"], expected["correct"])
    for rows in (1, 2, 3, 7):
        partial = networks["its own"].eval({key: tokens[:rows] for key, tokens in batch.items()})
        np.testing.assert_allclose(
            partial["all_loss"], expected["all_loss"][: min(rows, 5)], rtol=1e-5
        )
