"""A run whose newest checkpoint is damaged names the one before it, and can resume from it."""

import pytest

from mesh_transformer.config import Config
from mesh_transformer.training import loop
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import DamagedError
from tests.support.fake_gcs import gcs_server
from tests.support.small_run import (
    assert_same_rows,
    damage_step,
    parse_rows,
    rows_of,
    run_values,
)


def train(config: Config, folder, steps: int, **options) -> None:
    loop.train(CausalTransformer(config, init=False), folder, max_steps=steps, **options)


@pytest.mark.slow
def test_training_falls_back_to_the_newest_intact_step(tmp_path, capsys):
    config = Config(**run_values(tmp_path, tpu_size=1, cores_per_replica=1, ckpt_every=2))
    train(config, tmp_path / "whole", 10)
    folder = tmp_path / "run"
    train(config, folder, 8)
    for step in (6, 8):
        damage_step(folder / f"step_{step}")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(DamagedError) as caught:
        train(config, folder, 10)
    assert str(caught.value).startswith(f"checkpoint {folder}/step_8")
    assert str(caught.value).endswith("step before it; --fall-back resumes from that step")
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    train(config, folder, 10, fall_back=True)
    lines = capsys.readouterr().err
    assert "falling back to step_6, step_8.damaged is kept" in lines
    assert "falling back to step_4, step_6.damaged is kept" in lines
    assert_same_rows(rows_of(folder), rows_of(tmp_path / "whole"))
    steps = {path.name for path in folder.glob("step_*")}
    assert steps == {"step_6", "step_8", "step_10", "step_6.damaged", "step_8.damaged"}


@pytest.mark.slow
def test_the_only_step_is_never_set_aside(tmp_path):
    config = Config(**run_values(tmp_path, tpu_size=1, cores_per_replica=1))
    folder = tmp_path / "run"
    train(config, folder, 2)
    damage_step(folder / "step_2")
    with pytest.raises(DamagedError, match=r"step_2.*; copy the step again$"):
        train(config, folder, 4, fall_back=True)
    assert (folder / "step_2").is_dir()


@pytest.mark.slow
def test_a_damaged_step_in_a_bucket_is_set_aside(tmp_path, monkeypatch, capsys):
    config = Config(**run_values(tmp_path, tpu_size=1, cores_per_replica=1, ckpt_every=2))
    train(config, tmp_path / "whole", 8)
    monkeypatch.chdir(tmp_path)  # which gets a copy of the metrics
    with gcs_server(tmp_path) as (gcs, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        train(config, "gs://bucket/run", 6)
        moved = {name: stored for (_, name), stored in gcs.objects.items() if "/step_6/" in name}
        for name, stored in moved.items():
            if "/d/" in name and stored.content:
                middle = len(stored.content) // 2
                flipped = bytes([stored.content[middle] ^ 1])
                stored.content = stored.content[:middle] + flipped + stored.content[middle + 1 :]
        train(config, "gs://bucket/run", 8, fall_back=True)
        assert "falling back to step_4, step_6.damaged is kept" in capsys.readouterr().err
        for name, stored in moved.items():
            kept = name.replace("/step_6/", "/step_6.damaged/")
            assert gcs.objects[("bucket", kept)].content == stored.content
    rows = parse_rows((tmp_path / "runs/bucket/run/metrics.jsonl").read_text())
    assert_same_rows(rows, rows_of(tmp_path / "whole"))
