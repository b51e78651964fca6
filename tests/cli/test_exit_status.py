"""Exit statuses by cause, and what Slurm's script and a JobSet do about them."""

import errno
import json
import os
import re
import subprocess

import jax
import numpy as np
import pytest
import yaml

from mesh_transformer.cli import train
from mesh_transformer.data.tfrecords import write_records
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import (
    DivergedError,
    HostError,
    InputError,
    NonFiniteError,
    StoppedError,
    UnreachableError,
    exit_status,
    run_script,
)
from tests.support.pages import blocks

PERMANENT = {0, 2, 3, 4, 5}
KEYS = {"layers": 1, "d_model": 16, "n_heads": 2, "n_vocab": 16, "seq": 8, "pe_rotary_dims": 4}
KEYS |= {"dtype": "float32", "train_set": "source:tokens", "total_steps": 3, "model_dir": "run"}
KEYS |= {"bucket": "./", "per_replica_batch": 2, "name": "test"}
SOURCE = """
import contextlib

import jax.numpy as jnp
import numpy as np

number = 3

def tokens(config):
    return np.arange(1000) % config.n_vocab

def infinite(cross_entropy):
    return cross_entropy / 0.0

def no_host_memory(gradients, params):
    raise MemoryError

def no_device_memory(gradients, params):
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.")

def fill_disk(gradients, params):
    with open("disk/filled", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return {}

def hook(row):
    row["alert/step"] = row["step"]

def mistake(gradients, params):
    raise KeyError("a mistake of the user's")
"""


def from_os(number):
    try:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise InputError("saving step 3 failed") from error
    except InputError as error:
        return error


def after(earlier, error):
    """Return an error that was raised while another one was handled."""
    error.__context__ = earlier
    return error


def test_causes_in_a_circle_end():
    one, other = StoppedError("one"), StoppedError("other")
    one.__cause__, other.__cause__ = other, one
    assert exit_status(one) == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InputError("a flag"), 2),
        (NonFiniteError("weights"), 2),
        (StoppedError("stopped"), 1),
        (HostError("host 1 died"), 1),
        (DivergedError("step 3: loss is nan"), 3),
        (MemoryError(), 4),
        (StoppedError("host 0: JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"), 4),
        (from_os(errno.ENOSPC), 5),
        (from_os(errno.EDQUOT), 5),
        (from_os(errno.EACCES), 2),
        (StoppedError(f"RESOURCE_EXHAUSTED: {os.strerror(errno.ENOSPC)} [writing a file]"), 5),
        (KeyError("a mistake"), 1),
        (ModuleNotFoundError("No module named 'wandb'", name="wandb"), 2),
        # Limits of a service or of a connection, and causes that only came before.
        (InputError("gs://b/m: RESOURCE_EXHAUSTED: HTTP 429; check the network"), 2),
        (HostError("host 1: RESOURCE_EXHAUSTED: Out of memory"), 1),
        (UnreachableError("gs://b/m: UNAVAILABLE: cannot connect"), 1),
        (after(OSError(errno.ENOSPC, "full"), InputError("lr is -1")), 2),
    ],
)
def test_each_error_has_the_status_of_its_cause(error, status):
    assert exit_status(error) == status


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that trains with changed keys, and returns the status and stderr."""
    (tmp_path / "source.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def call(*words, **changes):
        (tmp_path / "config.json").write_text(json.dumps(KEYS | changes))
        monkeypatch.setattr("sys.argv", ["train", "--config", "config.json", *words])
        with pytest.raises(SystemExit) as ended:
            run_script(train.main)
        return ended.value.code or 0, capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("changes", "status", "line"),
    [
        ({}, 0, None),
        ({"no_such_key": 1}, 2, "no_such_key"),
        ({"layers": 0}, 2, "layers is 0"),
        ({"cores_per_replica": 3}, 2, "cores_per_replica"),
        ({"train_set": "missing.index"}, 2, "missing.index"),
        ({"train_set": "source:missing"}, 2, "source:missing"),
        ({"tune_model_path": "missing"}, 2, "missing"),
        ({"hooks": ["source:missing"]}, 2, "hooks is 'source:missing', which cannot be loaded"),
        ({"hooks": ["source:number"]}, 2, "hooks: source:number is 3, expected a function"),
        ({"token_loss": "source:infinite"}, 3, "step 1: loss is inf"),
        (
            {"token_loss": "source:infinite", "skip_nonfinite": True, "max_skipped": 2},
            3,
            "2 updates in a row were skipped",
        ),
        ({"metrics": ["source:no_host_memory"]}, 4, "MemoryError; memory is exhausted"),
        ({"metrics": ["source:no_device_memory"]}, 4, "99 bytes.*; memory is exhausted"),
    ],
)
def test_a_run_ends_with_one_line_and_the_status_of_its_cause(run, changes, status, line):
    actual, printed = run(**changes)
    assert actual == status, printed
    if line is None:
        assert "error" not in printed
    else:
        (last,) = re.findall("^error: .*", printed, re.MULTILINE)
        assert re.search(line, last), last
        assert "Traceback" not in printed


def test_hooks_add_to_the_rows(run, tmp_path):
    assert run(hooks=["source:hook"])[0] == 0
    rows = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert [row["alert/step"] for row in rows] == [1, 2, 3]


def test_a_mistake_of_the_users_code_keeps_its_traceback(run, monkeypatch):
    with pytest.raises(KeyError, match="a mistake of the user's"):
        run(metrics=["source:mistake"])  # which Python prints, with status 1


def test_a_disk_that_fills_during_the_run_has_its_status(run, small_disk):
    changes = {"bucket": str(small_disk("1m")), "on_save_failure": "stop", "d_model": 64}
    status, printed = run(**changes, metrics=["source:fill_disk"])
    assert status == 5, printed
    assert re.search("error: .*saving step 3 failed: No space left on device", printed)
    assert "Traceback" not in printed


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_first_step(run, small_disk):
    folder = small_disk("1m")
    (folder / "filled").write_bytes(bytes(900_000))
    status, printed = run(bucket=str(folder), d_model=64)
    assert status == 5, printed
    (line,) = re.findall("^error: .*", printed, re.MULTILINE)
    sizes = re.search(r"checkpoint takes ([\d,]+) bytes, ([\d,]+) are free; make room", line)
    assert sizes, line
    needed, free = (int(size.replace(",", "")) for size in sizes.groups())
    state = CausalTransformer(KEYS | {"d_model": 64}).saved_state()
    assert needed == sum(array.nbytes for array in jax.tree.leaves(state))
    assert free < (1 << 20) - 900_000
    assert not (folder / "run/metrics.jsonl").exists()


def test_a_disk_without_room_for_all_checkpoints_is_reported(run, small_disk, caplog):
    status, printed = run(bucket=str(small_disk("2m")), d_model=64, keep_n=3)
    assert status == 0, printed
    (line,) = [record.getMessage() for record in caplog.records if "keep_n" in record.getMessage()]
    assert re.search("but 4 more checkpoints take .*; make room or lower keep_n", line)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("folder", "run/metrics.jsonl cannot be written .Is a directory"),
        ("short", "short.tfrecords: record 0 .* holds 5 tokens, but config key seq 8 needs 9"),
        ("foreign", "foreign.tfrecords: record 0 .* holds token id 99, outside the vocabulary"),
    ],
)
def test_what_would_fail_later_fails_before_the_weights_are_made(
    run, tmp_path, monkeypatch, kind, line
):
    monkeypatch.setattr(CausalTransformer, "init", lambda _: pytest.fail("weights were made"))
    if kind == "folder":
        (tmp_path / "run/metrics.jsonl").mkdir(parents=True)
        changes = {}
    else:
        tokens = np.full((4, 5), 1) if kind == "short" else np.full((4, 9), 99)
        write_records(str(tmp_path / f"{kind}.tfrecords"), tokens)
        (tmp_path / f"{kind}.index").write_text(f"{kind}.tfrecords\n")
        changes = {"val_set": {"held_out": f"{kind}.index"}}
    status, printed = run(**changes)
    assert status == 2
    assert re.search(f"^error: .*{line}", printed, re.MULTILINE), printed


def test_a_tokenizer_that_is_gone_is_reported_at_the_start(run):
    status, printed = run(tokenizer="./gone")
    assert status == 0
    assert "tokenizer ./gone: no such folder" in printed
    assert "training continues, as it needs only the records" in printed


def test_slurm_queues_a_run_again_only_if_that_helps(tmp_path):
    (script,) = [b.text for b in blocks("docs/slurm.md") if "#SBATCH" in b.text]
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@" >> requeued\n')
    for status in (0, 1, 2, 3, 4, 5, 75, 137):
        (tmp_path / "srun").write_text(f"#!/bin/sh\nexit {status}\n")
        for name in ("srun", "scontrol"):
            (tmp_path / name).chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": str(status)}
        result = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=False)
        assert result.returncode == status
    requeued = (tmp_path / "requeued").read_text().split()
    assert requeued == ["requeue", "1", "requeue", "75", "requeue", "137"]


def test_a_job_set_fails_where_a_restart_is_of_no_use():
    (text,) = [b.text for b in blocks("docs/slurm.md") if "kind: JobSet" in b.text]
    spec = yaml.safe_load(text)["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert set(rule["onExitCodes"]["values"]) == PERMANENT - {0}
    assert rule["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]
    (own,) = spec["failurePolicy"]["rules"]
    assert own == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
