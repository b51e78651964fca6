"""The command `runs`: its table, picture, TensorBoard files and Prometheus metrics."""

import contextlib
import json
import os
import re
import signal
import urllib.request
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.util import event_pb2 as messages

from mesh_transformer.cli import runs as command
from mesh_transformer.config import Config
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.storage import locks
from mesh_transformer.storage.locks import lock_folder
from mesh_transformer.training import exporter, loop, run_status
from mesh_transformer.training.runs import LOSS, MetricsFile, find_runs, seconds_left, summary
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError, StoppedError
from tests.support.multihost import ROOT
from tests.support.small_run import run_values
from tests.training.test_loop import Counter


def random_rows(seed, count=5, first=1):
    rng = np.random.default_rng(seed)
    return [
        {
            "step": step,
            "train/loss": float(rng.uniform(1, 9)),
            "train/tokens": 64 * step,
            "train/tokens_per_sec": float(rng.uniform(100, 900)),
            "seconds/steps": 2.0 * step,
        }
        for step in range(first, first + count)
    ]


def put(folder, rows):
    """Write the metrics of a run as the run itself does."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / "draft"
    draft.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    draft.rename(folder / "metrics.jsonl")


def scalars(folder):
    """Return the values by tag and step in event files, read with TensorFlow's messages.

    As in TensorBoard, the start of a session removes values from its step on.
    """
    (path,) = folder.iterdir()
    result: dict[str, dict[int, float]] = {}
    event_pb2: Any = messages  # whose classes are made at import
    records = tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
    first, *events = map(event_pb2.Event.FromString, records)
    assert first.file_version == "brain.Event:2"
    for event in events:
        if event.session_log.status == event_pb2.SessionLog.START:
            result = {
                tag: {step: x for step, x in values.items() if step < event.step}
                for tag, values in result.items()
            }
        for value in event.summary.value:
            result.setdefault(value.tag, {})[event.step] = value.simple_value
    # The rows were written just now.
    assert -1 < path.stat().st_mtime - max(event.wall_time for event in events) < 3600
    return result


def columns(rows, keys):
    return {key: {row["step"]: np.float32(row[key]) for row in rows if key in row} for key in keys}


def test_a_file_is_read_as_it_grows_and_again_after_rows_were_removed(tmp_path):
    rows, file = random_rows(0), MetricsFile(str(tmp_path / "metrics.jsonl"))
    put(tmp_path, rows[:2])
    assert file.new_rows() == (rows[:2], True)
    assert file.new_rows() == ([], False)
    with open(tmp_path / "metrics.jsonl", "a") as out:
        text = json.dumps(rows[3])
        for part, expected in (
            (json.dumps(rows[2]) + "\n" + text[:20], (rows[2:3], False)),
            (text[20:], ([], False)),
            ("\n", (rows[3:4], False)),
        ):
            out.write(part)
            out.flush()
            assert file.new_rows() == expected
    again = rows[:2] + random_rows(1, 9, first=3)  # resumed from step 2, and longer than before
    put(tmp_path, again)
    assert file.new_rows() == (again, True)


def test_runs_are_found_in_subfolders(tmp_path):
    for name in ("one", "sweep/two", "sweep/three/four", "a/b/c/too_deep"):
        put(tmp_path / name, random_rows(0))
    put(tmp_path / "one" / "step_5", random_rows(0))  # inside a run
    assert set(find_runs(str(tmp_path))) == {"one", "sweep/two", "sweep/three/four"}
    assert set(find_runs(str(tmp_path / "one"))) == {"one"}
    assert find_runs(str(tmp_path / "missing")) == {}


def test_the_summary_of_a_run():
    rows = random_rows(2, 200)
    rows[9] |= {"val/loss_a": 3.0, "val/loss_b": 5.0, "seconds/start": 10.0}
    rows[19] |= {"val/loss_a": 4.5, "val/loss_b": 3.9, "seconds/start": 20.0}
    result = summary(rows)
    assert result[LOSS] == pytest.approx(np.mean([row["train/loss"] for row in rows[100:]]))
    assert result["best validation"] == 4.0
    speeds = [row["train/tokens_per_sec"] for row in rows[100:]]
    assert result["tokens/s"] == pytest.approx(np.median(speeds))
    assert result["hours"] == pytest.approx((400 + 20) / 3600)
    assert (result["step"], result["tokens"], result["MFU"]) == (200, 12800, None)


def names_of(metrics):
    """Return the names of all samples that a server's metrics have."""
    names = set(metrics.registry._names_to_collectors)
    assert "mesh_transformer_http_responses_total" in names
    return names


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["runs", *map(str, words)])
    command.main()


@pytest.mark.slow
def test_a_table_and_tensorboards_files(tmp_path, monkeypatch, capsys):
    rows = {"small": random_rows(3), "more/large": random_rows(4, 130)}
    rows["small"][2]["val/loss_x"] = 2.5
    for name, own in rows.items():
        put(tmp_path / "all" / name, own)
    out = tmp_path / "out"
    run(monkeypatch, tmp_path / "all", "--tensorboard", out, "--picture", tmp_path / "x.svg")
    header, *lines, wrote = capsys.readouterr().out.splitlines()
    assert wrote == f"wrote {tmp_path / 'x.svg'}"
    assert re.split("  +", header)[:4] == ["run", "step", "tokens", LOSS]
    cells = [re.split("  +", line) for line in lines]
    assert [line[0] for line in cells] == ["more/large", "small"]
    assert [line[1] for line in cells] == ["130", "5"]
    assert cells[1][4] == "2.5000"
    for name, own in rows.items():
        keys = {key for row in own for key in row} - {"step"}
        assert scalars(out / name) == columns(own, keys)
    assert "more/large" in (tmp_path / "x.svg").read_text()


def test_tensorboard_shows_the_rows_of_a_resumed_run_only(tmp_path):
    first, second = random_rows(5, 8), random_rows(6, 8, first=4)
    put(tmp_path / "run", first)
    watched = command.Watched([str(tmp_path)], str(tmp_path / "out"))
    watched.update()
    put(tmp_path / "run", first[:3] + second[:2])
    watched.update()
    put(tmp_path / "run", first[:3] + second)
    watched.update()
    keys = ("train/loss", "seconds/steps")
    actual = scalars(tmp_path / "out" / "run")
    assert {key: actual[key] for key in keys} == columns(first[:3] + second, keys)


def test_a_run_that_vanishes_or_is_damaged_does_not_stop_the_others(tmp_path, capsys):
    for name in "abc":
        put(tmp_path / "all" / name, random_rows(0, 2))
    newest = exporter.Newest()
    watched = command.Watched([str(tmp_path / "all")], newest=newest)
    watched.update()
    (tmp_path / "all/a/metrics.jsonl").unlink()
    put(tmp_path / "all/b", [{"no": "step"}])
    put(tmp_path / "all/c", random_rows(0, 3))
    for _ in range(2):
        watched.update()
    assert set(newest.values) == {"b", "c"}
    assert newest.values["c"]["step"] == 3
    assert capsys.readouterr().err.count("b/metrics.jsonl: not a metrics.jsonl (line 1") == 1


def test_files_for_tensorboard_stay_in_their_folder(tmp_path, monkeypatch):
    put(tmp_path / "all/a", random_rows(0))
    put(tmp_path / "b", random_rows(1))
    monkeypatch.chdir(tmp_path / "all")
    for folders in (["..", "../b"], [str(tmp_path)], ["a", "../all"]):
        command.Watched(folders, str(tmp_path / "out")).update()
    events = set(tmp_path.rglob("events.out*"))
    assert events
    assert all(path.is_relative_to(tmp_path / "out") for path in events)


def test_prometheus_gets_the_newest_values(tmp_path):
    newest = exporter.Newest()
    rows = random_rows(7)
    rows[1]["val/loss_my set"] = 1.5
    put(tmp_path / "a", rows)
    put(tmp_path / "b", random_rows(8, 3))
    watched = command.Watched([str(tmp_path)], newest=newest)
    watched.update()
    port = newest.serve(0)
    try:
        text = urllib.request.urlopen(f"http://localhost:{port}/metrics").read().decode()
        with pytest.raises(InputError, match=r"cannot be used .* give another with --port"):
            exporter.Newest().serve(port)
    finally:
        newest.close()
    assert f'mesh_transformer_train_loss{{run="a"}} {rows[-1]["train/loss"]}\n' in text
    assert 'mesh_transformer_step{run="b"} 3.0\n' in text
    assert 'mesh_transformer_val_loss_my_set{run="a"} 1.5\n' in text
    assert 'mesh_transformer_val_loss_my_set{run="b"}' not in text
    put(tmp_path / "a", rows[:1])  # resumed before the validation
    watched.update()
    assert "val/loss_my set" not in newest.values["a"]


def test_the_dashboard_shows_metrics_that_there_are():
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    shown = set(re.findall(r"mesh_transformer_(\w+)", json.dumps(board["panels"])))
    served = {name.removeprefix("mesh_transformer_") for name in names_of(Metrics(1))}
    documented = re.findall(r"`((?:train|val)/\w+)", (ROOT / "docs" / "training.md").read_text())
    trained = {name.replace("/", "_") for name in documented}
    assert shown - served - trained == set()
    assert shown & served
    assert shown & trained


def table(folder):
    """Return the cells of each run by column, and the lines below the table."""
    watched = command.Watched([str(folder)])
    watched.update()
    header, *lines = watched.table().splitlines()
    columns, count = re.split("  +", header), len(watched.rows)
    cells = [dict(zip(columns, re.split("  +", line), strict=True)) for line in lines[:count]]
    return {own["run"]: own for own in cells}, lines[count:]


@pytest.fixture
def train(tmp_path):
    """Return a function that trains a fake network of ten steps in a folder, and may fail."""
    config = Config(**run_values(tmp_path, total_steps=10, val_every=4))

    def call(name, before=lambda step: None, loss=lambda step: 1 / step, **options):
        network = Counter(config)
        network.before_step, network.loss = before, loss
        with contextlib.suppress(StoppedError, RuntimeError, ValueError):
            loop.train(network, tmp_path / "runs" / name, **options)
        return network

    return call


def test_the_state_of_runs(train, tmp_path):
    folder, during = tmp_path / "runs", {}

    def fail(step):
        if step == 6:
            raise ValueError("a mistake\nwith more lines")

    def look(step):
        if step == 9:
            hours = [{"step": n, "seconds/steps": 3600.0 * n} for n in range(1, 9)]
            put(folder / "running", hours)
            (folder / "running" / ".lock").write_text(json.dumps(locks._owner()))
            during.update(table(folder)[0])

    def never(step):
        raise ValueError("no first row")

    network = train("complete")
    train("empty", before=never)
    assert not (folder / "empty" / "metrics.jsonl").read_text()
    (folder / "empty" / "metrics.jsonl").unlink()  # as after an error before the first batch
    train("halted", max_steps=4)
    train("nan", loss=lambda step: np.nan if step == 5 else 1.0)
    train("mistake", before=fail)
    train("stopped", before=lambda step: step == 3 and os.kill(os.getpid(), signal.SIGTERM))
    train("running", before=look)
    assert network.step == 10
    (folder / "complete" / "step_10.damaged").mkdir()
    (folder / "complete" / "step_8").mkdir()
    (folder / "complete" / "step_8" / "commit_success.txt").touch()
    put(folder / "unknown", [*random_rows(0, 3), {"step": 4, "alert/loss": 9.25}])
    killed = folder / "killed"
    put(killed, random_rows(0, 3))
    (killed / "status.json").write_text(json.dumps({"state": "running", "host": "far"}))
    runs, lines = table(folder)
    assert {name: own["state"] for name, own in runs.items()} == {
        "complete": "complete",
        "empty": "failed",
        "halted": "stopped",
        "killed": "killed",
        "mistake": "failed",
        "nan": "failed",
        "running": "complete",
        "stopped": "stopped",
        "unknown": "-",
    }
    assert {name for name, own in runs.items() if own["saved"] != "-"} == {"complete"}
    assert runs["complete"]["saved"] == "8"
    assert (during["running"]["state"], during["running"]["hours left"]) == ("running", "2.00")
    complete, empty, halted, killed, mistake, nan, stopped, unknown = lines
    assert complete == "complete: damaged checkpoints: step_10.damaged"
    assert empty == "empty: failed with status 1: ValueError: no first row"
    limit = "--max-steps, of 10 steps; raise --max-steps to resume"
    assert halted == f"halted: stopped at step 4 by {limit}"
    assert killed == "killed: ended without notice on far; start it again to resume"
    assert mistake == "mistake: failed with status 1: ValueError: a mistake"
    assert nan.startswith("nan: failed with status 3: step 5: loss is nan")
    assert stopped == "stopped: stopped at step 3 by a signal; start it again to resume"
    steps = {name: run_status.read(str(folder / name)).get("step") for name in ("nan", "mistake")}
    assert steps == {"nan": 4, "mistake": 5}  # not those that were only started
    assert unknown == "unknown: last alert: step 4: loss 9.25"


def test_the_time_left():
    times = np.cumsum([3.0] * 150 + [2.0] * 150)
    rows = [{"step": step, "seconds/steps": time} for step, time in enumerate(times, 1)]
    assert seconds_left(rows, 1000) == pytest.approx(2 * 700)  # by the newest steps
    assert seconds_left(rows, 200) == 0
    assert seconds_left(rows[:1], 1000) is None


def test_a_run_that_is_refused_leaves_the_status_of_the_one_that_runs(train, tmp_path):
    train("run")
    status = (tmp_path / "runs/run/status.json").read_text()
    with lock_folder(tmp_path / "runs/run"):
        config = Config(**run_values(tmp_path, total_steps=20))
        with pytest.raises(InputError, match="in use"):
            loop.train(CausalTransformer(config, init=False), tmp_path / "runs/run")
        assert run_status.read(f"{tmp_path}/runs/run") == json.loads(status)
    assert (tmp_path / "runs/run/status.json").read_text() == status


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"no run with a row .*; give a folder"):
        run(monkeypatch, tmp_path)
    put(tmp_path, random_rows(0))
    with pytest.raises(InputError, match="--metric lss: no run has it; expected one of seconds/st"):
        run(monkeypatch, tmp_path, "--metric", "lss", "--picture", tmp_path / "x.svg")
