"""A run on two hosts with every path in a bucket, whose hosts are killed and told to end."""

import json
import re

import numpy as np
import pytest

from mesh_transformer.checkpoint.native import Checkpoints
from tests.long.interruptions import MODEL, Interruption, interrupt, uninterrupted
from tests.support.fake_gcs import gcs_server


@pytest.mark.slow
def test_a_run_in_a_bucket_ends_like_a_local_one(tmp_path, monkeypatch):
    _, whole = uninterrupted(tmp_path)
    folder = tmp_path / "run"
    for path in (folder, tmp_path / "gcs"):
        path.mkdir()
    (folder / MODEL).write_text("gs://bucket/model")
    with gcs_server(tmp_path / "gcs") as (gcs, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for path in [*tmp_path.glob("*.tfrecords"), *tmp_path.glob("*.index")]:
            gcs._put(("bucket", f"data/{path.name}"), path.read_bytes())
        text = re.sub(f"{tmp_path}/", "gs://bucket/data/", (tmp_path / "config.json").read_text())
        assert len(json.loads(text)["train_set"]) == 2
        (folder / "config.json").write_text(text)
        plan = [Interruption("SIGKILL", 5, 0), Interruption("SIGTERM", 15, 1)]
        for interruption, outcome in zip(
            plan, interrupt(str(folder / "config.json"), whole, folder, plan), strict=True
        ):
            print(f"{interruption}: {outcome.seconds:.1f} s; {outcome.line}")
        with (
            Checkpoints("gs://bucket/model", read_only=True) as remote,
            Checkpoints(str(whole), read_only=True) as local,
        ):
            assert remote.steps() == local.steps()
            saved, expected = remote.saved(), local.saved()
            assert saved.leaves.keys() == expected.leaves.keys()
            for path in expected.leaves:
                values = np.asarray(saved.open_leaf(path))
                np.testing.assert_array_equal(values, np.asarray(expected.open_leaf(path)))
        assert gcs.objects[("bucket", "model/metrics.jsonl")].content.count(b"\n") == 30
