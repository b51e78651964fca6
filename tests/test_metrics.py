"""The run's log: what a restart finds in it, and a noise scale that goes on where it was."""

import json
import os
import random
import resource

import pytest

from mesh_transformer.config import Config
from mesh_transformer.metrics import NAME, MetricsLog, NoiseScale
from mesh_transformer.util import InputError

CONFIG = Config(layers=1, d_model=8, n_heads=1, n_vocab=8)


def opened(folder, step=0, config=CONFIG, wandb_id=None):
    return MetricsLog(str(folder), config, step, wandb_id)


def rows_in(folder):
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


def test_a_row_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    log = opened(tmp_path / "new" / "folder")
    rows = [{"step": step, "train/loss": random.Random(step).random()} for step in (1, 2, 3)]
    for count, row in enumerate(rows, 1):
        log.write(row)
        assert rows_in(tmp_path / "new" / "folder") == rows[:count]
    log.close()
    assert os.listdir(tmp_path / "new" / "folder") == [NAME]


@pytest.mark.parametrize("restored", [0, 1, 4, 9])
def test_a_restart_cuts_the_rows_past_its_step_and_a_torn_line(tmp_path, restored):
    rows = [{"step": step, "train/loss": 1 / step} for step in range(1, 7)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    torn = json.dumps({"step": 1, "train/loss": 0.25})[:-7]
    (tmp_path / NAME).write_text(text + torn)
    log = opened(tmp_path, restored)
    kept = [row for row in rows if row["step"] <= restored]
    assert rows_in(tmp_path) == kept
    log.write({"step": restored + 1})
    log.close()
    assert rows_in(tmp_path) == [*kept, {"step": restored + 1}]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/metrics\.jsonl: cannot be written \(File exists"):
        opened(tmp_path / "file")


def test_a_full_disk_is_one_line_and_the_rows_before_it_stay(tmp_path):
    log = opened(tmp_path)
    log.write({"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, limits[1]))
    try:
        with pytest.raises(InputError, match=r"metrics\.jsonl: File too large; make room"):
            log.write({"step": 2, "train/loss": "x" * 40})
        log.close()  # Has the unwritten rest of the row, and says nothing more of it.
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    opened(tmp_path, 1).close()
    assert rows_in(tmp_path) == [{"step": 1}]


@pytest.fixture
def wandb_folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    return tmp_path


def test_wandb_offline_needs_no_network_and_goes_on_with_the_same_run(wandb_folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    # Whatever tried to reach a server would fail here at once.
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    config = CONFIG.replace(wandb_project="project")
    log = opened(wandb_folder / "model", config=config)
    first = log.wandb_id
    log.write({"step": 1, "train/loss": 2.0})
    log.close()
    log = opened(wandb_folder / "model", 1, config, first)
    assert log.wandb_id == first
    log.write({"step": 2, "train/loss": 1.0})
    log.close()
    runs = [path.name for path in wandb_folder.glob("wandb/offline-run-*")]
    assert runs
    # Two starts in one second: the second folder's name ends in -1.
    assert all(name.removesuffix("-1").endswith(str(first)) for name in runs)
    assert rows_in(wandb_folder / "model") == [
        {"step": 1, "train/loss": 2.0},
        {"step": 2, "train/loss": 1.0},
    ]


def test_wandb_disabled(wandb_folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    log = opened(wandb_folder / "model", config=CONFIG.replace(wandb_project="project"))
    log.write({"step": 1})
    log.close()
    assert not list(wandb_folder.glob("wandb/*run-*"))
    assert rows_in(wandb_folder / "model") == [{"step": 1}]


def test_the_noise_scale_goes_on_from_its_state():
    rng = random.Random(5)
    norms = [(rng.uniform(2, 3), rng.uniform(1, 2)) for _ in range(20)]
    whole, part = NoiseScale(0.1, 2, 16), NoiseScale(0.1, 2, 16)
    expected = [whole.update(*pair) for pair in norms]
    found = [part.update(*pair) for pair in norms[:7]]
    resumed = NoiseScale(0.1, 2, 16)
    resumed.restore(json.loads(json.dumps(part.state())))
    found += [resumed.update(*pair) for pair in norms[7:]]
    assert found == expected
    fresh = NoiseScale(0.1, 2, 16)
    fresh.restore(json.loads(json.dumps(NoiseScale(0.1, 2, 16).state())))
    assert fresh.update(*norms[0]) == expected[0]
