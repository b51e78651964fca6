"""`mesh-transformer train --every-host` as users run it: processes that form one mesh."""

import contextlib
import functools
import json
import os
import random
import re
import runpy
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from mesh_transformer import CausalTransformer
from mesh_transformer.checkpoint.native import find
from mesh_transformer.cli import train
from mesh_transformer.config import Config
from mesh_transformer.data import references
from mesh_transformer.data.loader import open_train_set
from mesh_transformer.evaluation import harness
from mesh_transformer.pod.every_host import find_place
from mesh_transformer.pod.meeting import Place
from mesh_transformer.training import loop
from mesh_transformer.util import InputError
from tests.long.every_host import Interruption, interrupt
from tests.long.interruptions import ROOT, command, training
from tests.support import made_tasks
from tests.support.every_host import Processes, every_host
from tests.support.small_run import (
    assert_same_rows,
    damage_step,
    mixed_values,
    rows_of,
    run_values,
    write_config,
)
from tests.support.waiting import SECONDS
from tests.training.test_objectives import config_of, write_preferences
from tests.training.test_rollouts import write_values

# f32 rounds to 6e-8, and several processes add in a different order than one, over 30 updates.
OTHER_PROCESSES = 1e-5
RESUME = "start again to resume"


def run_to_end(folder: Path, config: str, count: int, *flags: str, **options: Any) -> Processes:
    with every_host(folder, config, count, *flags, **options) as run:
        assert run.wait() == [0] * count, [run.log(index)[-3000:] for index in range(count)]
        # Only process 0 prints.
        assert [run.lines(index) for index in range(1, count)] == [[]] * (count - 1)
    return run


def last_line(run: Processes, index: int) -> str:
    return run.lines(index)[-1]


def train_here(monkeypatch, config: str, folder: Path, *flags: str) -> None:
    """Run device_train.py in this process, on 8 virtual devices."""
    words = ["device_train.py", "--config", config, "--model-dir", str(folder), *flags]
    monkeypatch.setattr("sys.argv", words)
    runpy.run_path(str(ROOT / "device_train.py"))["main"]()


def assert_close_rows(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in actual] == [row["step"] for row in expected]
    for row, base in zip(actual, expected, strict=True):
        # The noise scale is a quotient of differences, so its rounding errors are larger.
        for name in (name for name in base if not name.startswith("noise/")):
            assert row[name] == pytest.approx(base[name], rel=OTHER_PROCESSES), (name, row["step"])
        assert row.keys() == base.keys()


def test_lines_of_processes_do_not_include_those_of_gloo(tmp_path):
    """Gloo's threads print at the same time, in the pieces that jaxlib contains."""
    rng = random.Random(0)
    for _ in range(100):
        message = ["[Gloo] Rank ", "1", " is connected to ", "3", " peer ranks. "]
        message += ["Expected number of connected peer ranks is : ", "3", "\n"]
        threads = [list(message) for _ in range(3)]
        text = ""
        while remaining := [thread for thread in threads if thread]:
            text += rng.choice(remaining).pop(0)
        (tmp_path / "0.log").write_text(f"resuming\n\r10%|#| 3/30{text}3 files were read\n")
        lines = Processes(tmp_path, tmp_path, []).lines(0)
        assert lines == ["resuming", "3 files were read"], text


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_a_step_from_which_any_run_resumes(
    tmp_path, monkeypatch
):
    values = mixed_values(tmp_path, total_steps=10, val_batches=0, layers=1)
    config = write_config(tmp_path / "config.json", values)
    with every_host(tmp_path, config, 2) as run:
        run.wait_for_step(4)
        stopped = random.Random(1).randrange(2)
        run.all[stopped].send_signal(signal.SIGTERM)
        assert run.wait() == [0, 0], run.log(stopped)
        saved = find(str(run.folder))
        line = f"SIGTERM: stopped and saved at step {saved.number}; {RESUME}"
        assert last_line(run, 0) == line
        assert run.lines(1) == []
    rows = rows_of(run.folder)
    assert rows[-1]["step"] == saved.number
    loader = open_train_set(Config(**values), values["per_replica_batch"] * 2)
    for _ in range(saved.number):
        loader.get_samples()
    assert saved.aux["loader"] == loader.state()
    loader.close()
    train_here(monkeypatch, config, run.folder)
    actual = rows_of(run.folder)
    assert actual[: saved.number] == rows
    assert [row["step"] for row in actual] == list(range(1, 11))


# For each version, the config and the numbers of processes.
VERSIONS = {
    "1": (mixed_values, {"hosts_read": True}, (1, 2)),
    "2": (run_values, {"zero": 3, "version": 2}, (4,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_rows_are_those_of_a_pod_and_of_one_process(tmp_path, monkeypatch, version):
    make, changes, counts = VERSIONS[version]
    config = write_config(tmp_path / "config.json", make(tmp_path, total_steps=12, **changes))
    train_here(monkeypatch, config, tmp_path / "one")
    for count in counts:
        folder = tmp_path / f"{count} processes"
        run_to_end(folder, config, count)
        if count == 1:
            assert_same_rows(rows_of(folder / "model"), rows_of(tmp_path / "one"))
            continue
        pod = tmp_path / f"pod of {count}"
        with training(pod, *command(config, pod, hosts=count)) as driver:
            assert driver.process.wait(SECONDS) == 0, driver.log.read_text()[-3000:]
        assert_same_rows(rows_of(folder / "model"), rows_of(pod))
        assert_close_rows(rows_of(folder / "model"), rows_of(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("hosts_read", [False, True])
def test_preferences_have_the_rows_of_one_process(tmp_path, monkeypatch, hosts_read):
    """With KTO, whose estimate of a KL divergence is a mean over all replicas."""
    records = write_preferences(tmp_path, "kto", 20)
    sets = {"train_set": records, "val_set": {"held_out": records}, "val_batches": 2}
    short = {"total_steps": 3, "val_every": 3, "tpu_size": 8, "cores_per_replica": 4}
    values = config_of("kto", **sets, **short, hosts_read=hosts_read, dtype="float32").as_dict()
    config = write_config(tmp_path / "config.json", values)
    train_here(monkeypatch, config, tmp_path / "one")
    expected = rows_of(tmp_path / "one")
    Path(references.file_of(records)).unlink()
    run_to_end(tmp_path / "two", config, 2)
    for row, base in zip(rows_of(tmp_path / "two" / "model"), expected, strict=True):
        names = [name for name in base if name.startswith(("train/", "val/"))]
        assert {"train/kl", "train/rewards/rejected"} < set(names)
        for name in set(names) - {"train/tokens_per_sec"}:
            assert row[name] == pytest.approx(base[name], rel=1e-4, abs=1e-5), name


@pytest.mark.slow
def test_a_host_that_dies_in_a_rollout_changes_no_bit(tmp_path):
    """The two processes and this one run the same virtual mesh; rollouts take most of the time."""
    changes = {"virtual_mesh": [2, 1], "tpu_size": 2, "rollout_updates": 2, "ckpt_every": 1}
    config = write_config(tmp_path / "config.json", write_values(tmp_path) | changes)
    with every_host(tmp_path, config, 2) as run:
        run.wait_for_step(3)
        run.all[1].kill()
        assert run.wait()[0] == 1
    assert run.steps() < 6
    run_to_end(tmp_path, config, 2)
    values = json.loads(Path(config).read_text()) | {"tpu_size": 1}
    network = CausalTransformer(values, devices=jax.devices()[:1], init=False)
    loop.train(network, tmp_path / "one")
    assert_same_rows(rows_of(run.folder), rows_of(tmp_path / "one"))
    samples = [(folder / "samples.jsonl").read_text() for folder in (run.folder, tmp_path / "one")]
    assert samples[0] == samples[1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[str, Path]:
    """Return a config, and the folder of an uninterrupted run of two processes."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(folder / "config.json", mixed_values(folder))
    run_to_end(folder, config, 2)
    return config, folder / "model"


@pytest.mark.slow
def test_a_run_recovers_from_every_kind_of_interruption(uninterrupted, tmp_path):
    config, expected = uninterrupted
    for interruption in (
        Interruption("SIGKILL", 1, 3),
        Interruption("metrics", 1),
        Interruption("SIGKILL", 0, 9),
        Interruption("SIGTERM", 1, 12),
        Interruption("MetricsLog.__init__", 0),
        Interruption("SIGSTOP", 1, 16),
        Interruption("place", 1),
    ):
        print(interrupt(tmp_path, config, 2, interruption))
    run = run_to_end(tmp_path, config, 2)
    assert_same_rows(rows_of(run.folder), rows_of(expected))


@pytest.mark.slow
def test_a_killed_run_whose_positions_are_split_over_processes_keeps_its_bits(tmp_path):
    changes = {"cores_per_replica": 2, "context_parallel": 4, "total_steps": 12, "ckpt_every": 3}
    config = write_config(tmp_path / "config.json", mixed_values(tmp_path, **changes))
    folders = tmp_path / "calm", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
    calm = run_to_end(folders[0], config, 2)
    interrupt(folders[1], config, 2, Interruption("SIGKILL", 1, 5))
    killed = run_to_end(folders[1], config, 2)
    assert_same_rows(rows_of(killed.folder), rows_of(calm.folder))


@pytest.mark.slow
def test_a_slow_process_is_waited_for(uninterrupted, tmp_path):
    """It starts half a minute late, and is later suspended for less than the heartbeat."""
    config, expected = uninterrupted
    slow = random.Random(3).randrange(2)
    with every_host(tmp_path, config, 2, "--heartbeat", "100") as run:
        for step, seconds in ((0, 30.0), (9, 35.0)):
            run.wait_for_step(step)
            run.all[slow].send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            run.all[slow].send_signal(signal.SIGCONT)
        assert run.wait() == [0, 0], run.log(0) + run.log(1)
    assert_same_rows(rows_of(run.folder), rows_of(expected))


@pytest.mark.slow
def test_signals_to_some_of_four_processes_stop_all_at_the_same_step(tmp_path, monkeypatch):
    config = write_config(tmp_path / "config.json", run_values(tmp_path, total_steps=14))
    with every_host(tmp_path, config, 4) as run:
        run.wait_for_step(5)
        for process in random.Random(0).sample(run.all, 3):
            process.send_signal(signal.SIGTERM)
        assert run.wait() == [0] * 4, run.log(0)
    saved = find(str(run.folder)).number
    assert last_line(run, 0) == f"SIGTERM: stopped and saved at step {saved}; {RESUME}"
    for folder in (run.folder, tmp_path / "one"):
        train_here(monkeypatch, config, folder)
    assert_close_rows(rows_of(run.folder), rows_of(tmp_path / "one"))


@pytest.mark.slow
def test_a_record_that_one_process_cannot_read_is_met_after_a_save(tmp_path):
    """Each process has its own copy of the records; one of them is damaged late in the file."""
    copies = [tmp_path / "a", tmp_path / "b"]
    copies[0].mkdir()
    values = run_values(copies[0], val_batches=0, ckpt_every=100)
    values |= {"train_set": "train.index", "val_set": {}, "total_steps": 20}
    shutil.copytree(copies[0], copies[1])
    config = write_config(tmp_path / "config.json", values)
    path = copies[1] / "train_two.tfrecords"  # begins with the 38th record
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with every_host(tmp_path, config, 2, cwd=copies) as run:
        assert run.wait() == [2, 2], run.log(0)
        name = r"process 1 \(.*\): "
        assert re.search(f"^error: {name}.*train_two.tfrecords", last_line(run, 0)), run.log(0)
        saved = find(str(run.folder)).number
        # 61 records are 7 batches of 8 and a part; the step of the damaged one is never reached.
        assert 1 <= saved <= 7
        assert [row["step"] for row in rows_of(run.folder)] == list(range(1, saved + 1))
    path.write_bytes((copies[0] / path.name).read_bytes())
    run = run_to_end(tmp_path, config, 2, cwd=copies)
    run_to_end(tmp_path / "whole", config, 2, cwd=copies)
    assert_same_rows(rows_of(run.folder), rows_of(tmp_path / "whole" / "model"))


@pytest.mark.slow
def test_a_save_that_fails_in_one_process_is_retried_in_all(uninterrupted, tmp_path):
    config, expected = uninterrupted
    fault = "mesh_transformer.checkpoint.native:tree_checksums:2:OSError"
    run = run_to_end(tmp_path, config, 2, faults={1: fault})
    assert_same_rows(rows_of(run.folder), rows_of(expected))
    assert "saving step 14 failed: broken by the test (host 1)" in run.log(0)
    with every_host(
        tmp_path / "stop", config, 2, "--set", "on_save_failure=stop", faults={1: fault}
    ) as run:
        assert run.wait() == [2, 2]
        assert "saving step 14 failed: broken by the test (host 1)" in last_line(run, 0)
        assert find(str(run.folder)).number in (7, 14)  # it is tried again at the end


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside_once(uninterrupted, tmp_path):
    config, expected = uninterrupted
    run = run_to_end(tmp_path, config, 2, "--max-steps", "14")
    damage_step(run.folder / "step_14")
    with every_host(tmp_path, config, 2) as run:
        assert run.wait() == [2, 2]
        assert last_line(run, 0).endswith("; --fall-back resumes from that step")
    run = run_to_end(tmp_path, config, 2, "--fall-back")
    assert "falling back to step_7, step_14.damaged is kept" in run.log(0)
    assert_same_rows(rows_of(run.folder), rows_of(expected))


@pytest.mark.slow
def test_ctrl_c_saves_and_a_second_one_does_not_wait(uninterrupted, tmp_path):
    config, expected = uninterrupted
    with every_host(tmp_path, config, 2, "--stop-status", "75") as run:
        run.wait_for_step(9)
        run.all[1].send_signal(signal.SIGINT)
        assert run.wait() == [75, 75]
        assert "SIGINT: stopped and saved at step" in last_line(run, 0)
    # The first Ctrl-C cannot be agreed on, because the other process is suspended.
    with every_host(tmp_path, config, 2, "--heartbeat", "60") as run:
        run.wait_for_step(16)
        run.all[0].send_signal(signal.SIGSTOP)
        for _ in range(2):
            run.all[1].send_signal(signal.SIGINT)
        run.all[0].send_signal(signal.SIGCONT)
        statuses = run.wait()
        # The second signal may arrive before the first one has been handled, and is then lost.
        assert statuses in ([0, 0], [130, 130], [1, 130], [1, -2]), run.log(0) + run.log(1)
        assert "Traceback" not in run.log(1)
    run = run_to_end(tmp_path, config, 2)
    assert_same_rows(rows_of(run.folder), rows_of(expected))


@pytest.mark.slow
def test_evaluation_gives_the_results_of_one_process(tmp_path, monkeypatch, capsys):
    values = run_values(tmp_path, total_steps=4, val_every=2, ckpt_every=3, eval_harness_limit=6)
    monkeypatch.chdir(made_tasks.FOLDER)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    values["eval_harness_tasks"] = ["choice.yaml", "generation.yaml", "rolling.yaml"]
    values["tokenizer"] = made_tasks.save_tokenizer(tmp_path / "tokenizer")
    config = write_config(tmp_path / "config.json", values)
    train_here(monkeypatch, config, tmp_path / "one")
    folders = [made_tasks.FOLDER] * 2
    run = run_to_end(tmp_path, config, 2, cwd=folders)
    rows = rows_of(run.folder)
    assert_close_rows(rows, rows_of(tmp_path / "one"))
    assert {"eval/made_choice/acc", "eval/made_rolling/bits_per_byte"} < rows[-1].keys()
    assert any(name.startswith("eval/made_generation/chrf") for name in rows[1])

    capsys.readouterr()
    train_here(monkeypatch, config, run.folder, "--mode", "eval")
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    harness.load_harness.cache_clear()
    scored = run_to_end(tmp_path, config, 2, "--mode", "eval", cwd=folders)
    actual = [line.split() for line in scored.log(0).splitlines()]
    for expected in filter(None, printed):
        assert any(similar(line, expected) for line in actual), (expected, scored.log(0))


def similar(line: list[str], expected: list[str]) -> bool:
    """Return whether the words of two lines are equal, and their numbers about equal."""

    def matches(word: str, other: str) -> bool:
        if not re.fullmatch(r"[\d.]+%?", other):
            return word == other
        # The last printed digit may differ.
        return float(word.rstrip("%")) == pytest.approx(float(other.rstrip("%")), abs=2e-4)

    return len(line) == len(expected) and all(map(matches, line, expected))


@pytest.mark.slow
def test_slurm_is_detected(tmp_path):
    config = write_config(tmp_path / "config.json", run_values(tmp_path, val_batches=0))
    job = str(random.Random(os.getpid()).randrange(10**6))

    def slurm(index: int) -> dict[str, str]:
        names = {"JOB_ID": job, "STEP_NODELIST": "localhost", "NTASKS": "2"}
        names |= {"PROCID": str(index), "LOCALID": str(index)}
        return {f"SLURM_{name}": value for name, value in names.items()}

    detected = {"places": [(), ()], "environment": [slurm(0), slurm(1)]}
    run = run_to_end(tmp_path, config, 2, "--max-steps", "3", **detected)
    assert len(rows_of(run.folder)) == 3


def test_flags_that_contradict_each_other_are_refused(monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    monkeypatch.setattr(
        "mesh_transformer.pod.every_host.detect_cluster",
        lambda *arguments: (arguments[0], None, None, None),
    )
    place = functools.partial(find_place, seconds=1)
    with pytest.raises(InputError, match="requires --coordinator, --process-count; give all"):
        place(None, None, 0)
    with pytest.raises(InputError, match="requires --coordinator, --process-count, --process-in"):
        place(None, None, None)
    with pytest.raises(InputError, match="--coordinator is node7, expected HOST:PORT"):
        place("node7", 2, 0)
    with pytest.raises(InputError, match=r"--process-index is 2, expected 0 to 1 \(--process-c"):
        place("node7:1", 2, 2)
    assert place("node7:81", 2, 1) == (Place("node7:81", 2, 1), None)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "[::1]:80")
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2,3")
    found, ids = place(None, 2, 0)
    assert (found.host, found.port, found.bind_host, ids) == ("::1", 80, "::1", [2, 3])
    monkeypatch.setattr("sys.argv", ["train", "--config", "tiny", "--process-count", "2"])
    with pytest.raises(InputError, match="--process-count requires --every-host; give both, or"):
        train.parse_args()


@pytest.mark.parametrize(
    ("step", "signals", "status"),
    [(10, [15], None), (5, [15], 75), (5, [], None)],
    ids=["complete", "stopped by a signal", "stopped early"],
)
def test_the_stop_status_is_for_runs_that_a_signal_stops(
    monkeypatch, tmp_path, step, signals, status
):
    config = write_config(tmp_path / "config.json", run_values(tmp_path, total_steps=10))
    words = ["--config", config, "--model-dir", str(tmp_path), "--every-host"]
    monkeypatch.setattr("sys.argv", ["train", *words, "--stop-status", "75"])
    network = SimpleNamespace(step=step, signals=signals)
    monkeypatch.setattr(train, "_network", lambda *_: contextlib.nullcontext(network))
    monkeypatch.setattr("mesh_transformer.training.loop.train", lambda *_, **__: None)
    expected = contextlib.nullcontext() if status is None else pytest.raises(SystemExit)
    with expected as caught:
        assert train.main() is None
    assert caught is None or caught.value.code == status


def test_the_address_where_process_0_listens(monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    hosts = {"localhost": "127.0.0.1", "10.0.0.7": "10.0.0.7", "node7": "", "[fd00::7]": "fd00::7"}
    for host, expected in hosts.items():
        assert Place(f"{host}:8476", 2, 0).bind_host == expected
    for chosen, expected in {"0.0.0.0:1": "", "[::]:1": "", "10.0.0.8:1": "10.0.0.8"}.items():
        monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", chosen)
        assert Place("node7:8476", 2, 0).bind_host == expected
