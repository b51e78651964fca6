"""The commands from text to a converted model give the same with every path in a bucket."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_gcs import gcs_server
from tests.support.small_run import VALUES, parse_rows, run_values

ROOT = Path(__file__).parents[2]
SEQ = VALUES["seq"]
# Runs commands in one process, as imports would take most of the time of many.
PROGRAM = """
    import contextlib, io, json, sys
    from mesh_transformer.cli import main as cli

    for sys.argv in json.load(sys.stdin):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert not cli.main(), sys.argv
        print(json.dumps(printed.getvalue()))
"""
STEPS = 6
SETTINGS = {
    "total_steps": STEPS,
    "ckpt_every": 2,
    "val_every": 3,
    "per_replica_batch": 1,
    "tpu_size": 4,
    "cores_per_replica": 2,
}
COMMANDS = """
    split {root}/text {root}/parts --validation 0.2
    tokenizer {root}/parts/train.jsonl.zst {root}/tokenizer --size 300
    records {root}/parts/train.jsonl.zst train --output-dir {root}/sets --seq {seq} --tokenizer {root}/tokenizer
    records {root}/parts/val.jsonl.zst val --output-dir {root}/sets --seq {seq} --tokenizer {root}/tokenizer
    completion-records {root}/pairs.jsonl pairs --output-dir {root}/pairs --seq {seq} --tokenizer {root}/tokenizer
    config --train {root}/sets/train.index --val {root}/sets/val.index --topology v3-8 --output {root}/new.json
    train --config {root}/config.json --set train_set={root}/sets/train.index --model-dir {root}/run
    train --config {root}/config.json --set train_set={root}/pairs --model-dir {root}/tuned --tune-model-path {root}/run
    convert --from native {root}/tuned --to original {root}/original
    convert --from original {root}/original/step_6 --to hf {root}/hf --config {root}/config.json
    plot {root}/run/metrics.jsonl loss.png
"""  # noqa: E501


def words(count: int) -> str:
    rng = np.random.default_rng(0)
    return " ".join("".join(rng.choice(list("aeinrst"), 4)) for _ in range(count))


def inputs(root: str) -> dict[str, bytes]:
    values = (
        VALUES
        | SETTINGS
        | {
            "n_vocab": 512,
            "tokenizer": f"{root}/tokenizer",
            "val_set": {"held_out": f"{root}/sets/val.index"},
        }
    )
    texts = [words(60) for _ in range(20)]
    pairs = [{"prompt": text[:10], "completion": text[10:20]} for text in texts]
    return {f"text/{number}.txt": text.encode() for number, text in enumerate(texts)} | {
        "pairs.jsonl": "".join(f"{json.dumps(pair)}\n" for pair in pairs).encode(),
        "config.json": json.dumps(values).encode(),
    }


def run_all(folder: Path, root: str, environment: dict[str, str]) -> list[list[str]]:
    """Run the commands in `folder`; return what each printed, with `root` for the root."""
    lines = COMMANDS.format(root=root, seq=SEQ).strip().splitlines()
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        cwd=folder,
        # `config` creates JAX's devices, which are then too few for `train`.
        env=os.environ | environment | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "4"},
        input=json.dumps([["mesh-transformer", *line.split()] for line in lines]),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert process.returncode == 0, process.stderr
    printed = [json.loads(line).replace(root, "{root}") for line in process.stdout.splitlines()]
    assert len(printed) == len(lines)
    return [
        [line for line in text.splitlines() if not line.startswith("time ")] for text in printed
    ]


def comparable(files: dict[str, bytes]) -> dict[str, object]:
    """Return what must be equal: metrics without times; no native checkpoints, whose files differ.

    The conversions compare the values of these checkpoints.
    """
    contents: dict[str, object] = {}
    for name, content in files.items():
        if name.endswith("metrics.jsonl"):
            contents[name] = parse_rows(content.decode())
        elif name.endswith(".manifest.json"):  # has the paths of the sources
            manifest = json.loads(content)  # that of completion-records names no files
            contents[name] = (manifest.get("files"), manifest["tokenizer"]["encoding"])
        elif name.endswith("status.json"):  # has times
            contents[name] = json.loads(content)["state"]
        elif "/step_" not in name or name.startswith("original/"):
            contents[name] = content
    return contents


@pytest.mark.slow
def test_every_path_may_be_in_a_bucket(tmp_path):
    local, elsewhere = tmp_path / "local", tmp_path / "elsewhere"
    for folder in (local, elsewhere, local / "text"):
        folder.mkdir()
    for name, content in inputs(str(local)).items():
        (local / name).write_bytes(content)
    expected = run_all(local, str(local), {})
    with gcs_server(tmp_path) as (gcs, environment):
        for name, content in inputs("gs://bucket/root").items():
            gcs._put(("bucket", f"root/{name}"), content)
        actual = run_all(elsewhere, "gs://bucket/root", environment)
        stored = {
            name.removeprefix("root/"): stored.content
            for (_, name), stored in gcs.objects.items()
            if not name.endswith("/")
        }
        new_config = json.loads(stored.pop("new.json"))
        del stored["config.json"]
    assert actual == expected
    on_disk = {
        str(path.relative_to(local)): path.read_bytes()
        for path in local.rglob("*")
        if (path.is_file() and path.parent != local) or path.name == "pairs.jsonl"
    }
    assert comparable(stored) == comparable(on_disk)
    assert new_config["train_set"] == "gs://bucket/root/sets/train.index"
    assert len(comparable(stored)["run/metrics.jsonl"]) >= STEPS
    # Only the picture and a copy of the metrics are in the working folder.
    assert sorted(os.listdir(elsewhere)) == ["loss.png", "runs"]


@pytest.mark.slow
def test_a_second_run_in_a_bucket_s_model_folder_is_refused(tmp_path):
    values = run_values(tmp_path, **SETTINGS | {"total_steps": 10**6, "val_every": 10**6})
    (tmp_path / "config.json").write_text(json.dumps(values))
    command = [sys.executable, "-m", "mesh_transformer", "train", "--config", "config.json"]
    command += ["--model-dir", "gs://bucket/run"]
    with gcs_server(tmp_path) as (gcs, environment):
        options: dict[str, Any] = {
            "cwd": tmp_path,
            "env": os.environ | environment | {"PYTHONPATH": str(ROOT)},
            "text": True,
        }
        with subprocess.Popen(command, stderr=subprocess.PIPE, **options) as first:
            assert first.stderr is not None
            # The bar appears when training starts, with the folder locked.
            assert any("/1000000 [" in line for line in first.stderr)
            reader = threading.Thread(target=first.stderr.read)
            reader.start()
            second = subprocess.run(command, capture_output=True, timeout=600, **options)
            first.send_signal(signal.SIGINT)
            reader.join()
        assert first.returncode == 0
        assert second.returncode == 2
        assert re.search(
            rf"^error: model folder gs://bucket/run is in use by process {first.pid} on ",
            second.stderr,
            re.MULTILINE,
        )
        assert ("bucket", "run/.lock") not in gcs.objects
