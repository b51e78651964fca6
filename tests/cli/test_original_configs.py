"""Every config file of mesh-transformer-jax trains a step: its sizes are shrunk by --set alone."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from mesh_transformer.__main__ import main
from mesh_transformer.data.tfrecords import write_set
from tests.conftest import DATA

CONFIGS = sorted((DATA / "original/configs").glob("*.json"))
SIZES = {
    "layers": 1,
    "d_model": 32,
    "n_heads": 2,
    "n_vocab": 128,
    "pe_rotary_dims": 8,
    "seq": 16,
    "tpu_size": 2,
    "cores_per_replica": 2,
    "per_replica_batch": 1,
    "gradient_accumulation_steps": 1,
    "total_steps": 1,
    "val_batches": 1,
    "eval_harness_tasks": "[]",  # their data sets would be downloaded
}


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_of_the_original_trains_a_step(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")  # tests/training/test_metrics.py has no account
    values = json.loads(path.read_text())
    val_set = values["val_set"]
    rng = np.random.default_rng(0)
    for index in [
        values["train_set"],
        *([val_set] if isinstance(val_set, str) else val_set.values()),
    ]:
        write_set("data", index.removesuffix(".index"), rng.integers(0, 128, (4, 17)))
    sizes = [word for key, value in SIZES.items() for word in ("--set", f"{key}={value}")]
    words = ["train", "--config", str(path), "--model_dir", "model", *sizes]
    monkeypatch.setattr(sys, "argv", ["mesh-transformer", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    (row,) = [json.loads(line) for line in Path("model/metrics.jsonl").read_text().splitlines()]
    assert row["step"] == 1
    assert 3 < row["train/loss"] < 7  # ln(128) is 4.9
