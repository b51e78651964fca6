"""Metrics logs: restarts, failing disks and buckets, wandb; and restoring the noise scale."""

import contextlib
import http.server
import json
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.training import metrics, wandb_upload
from mesh_transformer.training.metrics import NAME, MetricsLog, NoiseScale, start_wandb
from mesh_transformer.util import InputError
from tests.support.waiting import SECONDS, wait_until

ROOT = Path(__file__).resolve().parents[2]

CONFIG = Config(layers=1, d_model=8, n_heads=1, n_vocab=8)


def open_log(folder, step=0, config=CONFIG, wandb_id=None):
    return MetricsLog(str(folder), step, start_wandb(str(folder), config), wandb_id)


def rows_in(folder):
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


def test_a_row_is_in_the_file_as_soon_as_write_returns(tmp_path):
    log = open_log(tmp_path / "new" / "folder")
    rows = [{"step": step, "train/loss": random.Random(step).random()} for step in (1, 2, 3)]
    for count, row in enumerate(rows, 1):
        log.write(row)
        assert rows_in(tmp_path / "new" / "folder") == rows[:count]
    log.close()
    assert os.listdir(tmp_path / "new" / "folder") == [NAME]


@pytest.mark.parametrize("restored", [0, 1, 4, 9])
def test_a_restart_removes_later_rows_and_an_incomplete_line(tmp_path, restored):
    rows = [{"step": step, "train/loss": 1 / step} for step in range(1, 7)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    torn = json.dumps({"step": 1, "train/loss": 0.25})[:-7]
    (tmp_path / NAME).write_text(text + torn)
    log = open_log(tmp_path, restored)
    kept = [row for row in rows if row["step"] <= restored]
    assert rows_in(tmp_path) == kept
    log.write({"step": restored + 1})
    log.close()
    assert rows_in(tmp_path) == [*kept, {"step": restored + 1}]


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/metrics\.jsonl cannot be written \(File exists"):
        open_log(tmp_path / "file")


def test_rows_are_kept_in_memory_while_the_disk_is_full(tmp_path, capsys):
    log = open_log(tmp_path)
    log.write({"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, limits[1]))
    try:
        for step in (2, 3):
            log.write({"step": step, "train/loss": "x" * 40})
            assert (tmp_path / NAME).read_text() == '{"step": 1}\n'  # without a partial row
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = capsys.readouterr().err
    warning = "metrics.jsonl: File too large; training continues; new metrics are kept in memory"
    assert message.count(warning) == 1
    log.write({"step": 4})
    assert [row["step"] for row in rows_in(tmp_path)] == [1, 2, 3, 4]
    log.close()


def test_rows_that_cannot_be_written_are_reported_as_lost(tmp_path, capsys):
    log = open_log(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, limits[1]))
    try:
        log.write({"step": 1, "train/loss": "x" * 40})
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "metrics.jsonl: File too large; 1 rows are lost" in capsys.readouterr().err
    open_log(tmp_path, 1).close()
    assert rows_in(tmp_path) == []


# Model folders in a bucket.


class Bucket:
    """A fake bucket, stored in a local folder, whose writes can be made to fail or hang.

    Attributes:
      failures: the exceptions that the next writes raise.
      allowed: while this event is cleared, writes wait.
      written: an event that is set after each successful write.
    """

    def __init__(self, folder):
        self.folder = folder
        self.failures: list[Exception] = []
        self.allowed = threading.Event()
        self.allowed.set()
        self.written = threading.Event()

    def path(self, where):
        return Path(where) if "://" not in str(where) else Remote(self, str(where))


class Remote:
    def __init__(self, bucket, uri):
        self.bucket, self.uri = bucket, uri
        self.file = bucket.folder / uri.split("://")[1]

    def __truediv__(self, name):
        return Remote(self.bucket, f"{self.uri}/{name}")

    def __str__(self):
        return self.uri

    def exists(self):
        return self.file.exists()

    def read_text(self):
        return self.file.read_text()

    def write_bytes(self, content):
        self.bucket.allowed.wait()
        if self.bucket.failures:
            raise self.bucket.failures.pop(0)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_bytes(content)
        self.bucket.written.set()


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    fake_bucket = Bucket(tmp_path / "bucket")
    monkeypatch.setattr(metrics, "epath", SimpleNamespace(Path=fake_bucket.path))
    monkeypatch.setattr(metrics, "RETRY_SECONDS", (0.01, 0.01))
    monkeypatch.chdir(tmp_path)
    return fake_bucket


def write_and_upload(folder, restored, steps):
    log = open_log("gs://b/model", restored)
    for step in steps:
        log.write({"step": step, "by": Path.cwd().name})
    log.upload()
    log.close()


def test_no_rows_are_lost_when_the_driver_changes(bucket, tmp_path, monkeypatch):
    """Each driver machine has a local copy of the log, which may be out of date."""

    def driver(name, restored, steps):
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        write_and_upload(name, restored, steps)
        return [(row["step"], row["by"]) for row in rows_in(bucket.folder / "b" / "model")]

    driver("A", 0, range(1, 4))
    driver("B", 3, range(4, 8))
    rows_after_a = driver("A", 7, range(8, 10))
    assert rows_after_a == [(n, "A") for n in (1, 2, 3)] + [(n, "B") for n in range(4, 8)] + [
        (8, "A"),
        (9, "A"),
    ]
    # If rows were not uploaded, the local copy, which has more rows, is used.
    (bucket.folder / "b" / "model" / NAME).write_text('{"step": 1, "by": "A"}\n')
    assert driver("A", 9, [10]) == [*rows_after_a, (10, "A")]
    # If both copies cover the same steps, the uploaded copy is used.
    rows = [{"step": n, "by": "other"} for n in range(1, 11)]
    (bucket.folder / "b" / "model" / NAME).write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert driver("A", 10, []) == [(n, "other") for n in range(1, 11)]


def test_failing_or_hanging_uploads_delay_nothing(bucket, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(metrics, "CLOSE_SECONDS", 60.0)
    bucket.failures = [PermissionError(13, "Permission denied"), RuntimeError("503")]
    bucket.allowed.clear()
    log = open_log("gs://b/model")
    for step in range(1, 50):
        log.write({"step": step})
        log.upload()  # returns immediately, although no upload can start
    bucket.allowed.set()
    assert bucket.written.wait(60)
    log.close()
    assert len(rows_in(bucket.folder / "b" / "model")) == 49
    message = capsys.readouterr().err
    assert message.count("gs://b/model/metrics.jsonl cannot be written (Permission denied)") == 1
    assert "503" not in message


def test_an_upload_that_never_finishes_is_abandoned(bucket, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(metrics, "CLOSE_SECONDS", 0.2)
    bucket.allowed.clear()
    write_and_upload("A", 0, [1])
    assert "not uploaded; the metrics are in runs/b/model/metrics.jsonl" in capsys.readouterr().err
    assert [row["step"] for row in rows_in(tmp_path / "runs" / "b" / "model")] == [1]
    bucket.allowed.set()


# wandb.


@pytest.fixture
def wandb_folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    # On a busy machine, importing wandb may take long.
    monkeypatch.setattr(wandb_upload, "CLOSE_SECONDS", 120.0)
    return tmp_path


def records_in(path):
    """Yield the records of a wandb file, which is a 7-byte header and a log in LevelDB's format."""
    content, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left  # the rest of the block is too short for a header
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield record
            record = b""


def rows_sent_to_wandb(folder, run_id):
    """Return the (step, loss) pairs in all offline runs with the ID `run_id`."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for path in sorted(folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb")):
        for data in records_in(path):
            record: Any = vars(wandb_internal_pb2)["Record"]()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                rows.append((items["_step"], items.get("train/loss")))
    return rows


@pytest.mark.slow
def test_offline_wandb_needs_no_network_and_resumes_the_same_run(wandb_folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    # Any attempt to contact a server fails immediately.
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    config = CONFIG.replace(wandb_project="project")
    log = open_log(wandb_folder / "model", config=config)
    first = log.wandb_id
    log.write({"step": 1, "train/loss": 2.0})
    log.close()
    log = open_log(wandb_folder / "model", 1, config, first)
    assert log.wandb_id == first
    log.write({"step": 2, "train/loss": 1.0})
    log.close()
    assert rows_sent_to_wandb(wandb_folder, first) == [(1, 2.0), (2, 1.0)]
    assert rows_in(wandb_folder / "model") == [
        {"step": 1, "train/loss": 2.0},
        {"step": 2, "train/loss": 1.0},
    ]


def children(pid):
    """Return the child processes of a process (Linux only)."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                pids.append(int(path.parent.name))
    return pids


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["all of it", "its service"])
def test_wandb_is_restarted_if_it_dies_and_loses_no_later_rows(wandb_folder, monkeypatch, victim):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb_upload, "RETRY_SECONDS", (0.01, 0.01))
    log = open_log(wandb_folder / "model", config=CONFIG.replace(wandb_project="project"))
    upload = log._wandb
    assert upload is not None
    log.write({"step": 1, "train/loss": 1.0})
    wait_until(lambda: upload.sent == 1, "the row was not sent")
    assert upload._process is not None
    pid = upload._process.pid
    services = children(pid)
    assert services
    for process_id in services if victim == "its service" else [pid, *services]:
        os.kill(process_id, signal.SIGKILL)
    for step in (2, 3):
        log.write({"step": step, "train/loss": 1 / step})
    log.close()
    assert rows_sent_to_wandb(wandb_folder, log.wandb_id)[-2:] == [(2, 0.5), (3, 1 / 3)]
    assert [row["step"] for row in rows_in(wandb_folder / "model")] == [1, 2, 3]


FAKE_WANDB = """
import os

class Settings:
    def __init__(self, **_): pass

def login(**_): pass

class init:
    step, url = 0, "https://wandb.example"
    def __init__(self, **_): pass
    def log(self, row, step):
        with open(os.environ["SENT"], "a") as file:
            file.write(f"{step}\\n")
    def finish(self):
        with open(os.environ["SENT"], "a") as file:
            file.write("finished\\n")
"""


def test_remaining_rows_are_sent_to_wandb_after_the_run_has_ended(tmp_path):
    package = tmp_path / "wandb"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE_WANDB)
    errors = "class UsageError(Exception): pass\nAuthenticationError = UsageError\n"
    (package / "errors.py").write_text(errors)
    path, sent = tmp_path / "metrics.jsonl", tmp_path / "sent"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 31)))
    process = subprocess.Popen(
        [sys.executable, "-m", "mesh_transformer.training.wandb_upload"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "SENT": str(sent)},
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    task = {"path": str(path), "project": "p", "name": "n", "config": {}, "id": "i", "after": 0}
    process.stdout.close()  # the run has ended and no longer reads the output
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.close()
    assert process.wait(SECONDS) == 0
    assert sent.read_text().splitlines() == [*map(str, range(1, 31)), "finished"]


@pytest.mark.slow
def test_an_unreachable_wandb_is_reported_once_and_delays_nothing(
    wandb_folder, monkeypatch, capsys
):
    """Resume a run with a wrong API key, while the server cannot be reached."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    monkeypatch.setattr(wandb_upload, "RETRY_SECONDS", (0.01, 0.01))
    monkeypatch.setattr(wandb_upload, "CLOSE_SECONDS", 0.0)
    config = CONFIG.replace(wandb_project="project")
    log = open_log(wandb_folder / "model", config=config, wandb_id="abc")
    assert log.wandb_id == "abc"
    log.write({"step": 1})
    upload: Any = log._wandb
    wait_until(lambda: upload._warned, "no warning was printed")
    log.write({"step": 2})
    log.close()
    message = capsys.readouterr().err
    assert message.count("; training continues, and its metrics are in ") == 1
    assert [row["step"] for row in rows_in(wandb_folder / "model")] == [1, 2]


@pytest.fixture
def no_account(tmp_path, monkeypatch):
    """Remove all of wandb's settings and keys; yields the path of .netrc, which does not exist."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".netrc"


MISSING = "no API key for {host} in WANDB_API_KEY or ~/.netrc"
KEY = "0123456789" * 4
KEYS = {  # (API key, .netrc, problem)
    "none": (None, None, MISSING),
    "another host's": (None, f"machine example.com login user password {KEY}", MISSING),
    "unreadable file": (None, "machine", MISSING),
    "short": (KEY[1:], None, "the API key in WANDB_API_KEY is malformed"),
    "short and prefixed": (f"local-{KEY[1:]}", None, "the API key in WANDB_API_KEY is malformed"),
    "other characters": (f"{KEY}!", None, "the API key in WANDB_API_KEY is malformed"),
    "short in .netrc": (
        None,
        f"machine {{host}} login user password {KEY[1:]}",
        "the API key in {netrc} is malformed",
    ),
    "well-formed": (KEY, "machine {host} login user password short", None),
    "prefixed": (f"local-{KEY}", None, None),
    "a token": ("head-er.pay-load.sig-nature", None, None),
    "well-formed in .netrc": (None, f"machine {{host}} login user password {KEY}", None),
}


@pytest.mark.parametrize("host", ["api.wandb.ai", "api.forge.coreweave.com", "wandb.example:8080"])
@pytest.mark.parametrize("case", KEYS)
def test_a_wrong_key_is_known_without_the_server(no_account, monkeypatch, case, host):
    key, content, problem = KEYS[case]
    if host == "wandb.example:8080":
        monkeypatch.setenv("WANDB_BASE_URL", f"https://{host}")
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    if content is not None:
        no_account.write_text(content.format(host=host))
    shown = host.replace("forge.coreweave.com", "wandb.ai")
    expected = problem and problem.format(host=shown, netrc=no_account)
    assert wandb_upload.key_problem() == expected


def test_keys_are_judged_as_wandb_judges_them():
    """Random keys around the shortest valid length, of all kinds of characters."""
    validation = pytest.importorskip("wandb.sdk.lib.wbauth.validation")
    rng = np.random.default_rng(8)
    for _ in range(300):
        size = rng.integers(35, 50)
        key = "".join(rng.choice(list("abcXYZ019_-."), size, p=[0.108] * 9 + [0.01] * 2 + [0.008]))
        assert wandb_upload.is_well_formed(key) == (validation.check_api_key(key) is None), key


@pytest.mark.parametrize("folder", ["wandb", ".config/wandb"])
@pytest.mark.parametrize("setting", ["mode = offline", f"api_key = {KEY}"])
def test_settings_files_of_wandb_are_read(no_account, setting, folder):
    path = no_account.parent / folder / "settings"
    path.parent.mkdir(parents=True)
    path.write_text("[default]\n")
    assert wandb_upload.key_problem() is not None
    path.write_text(f"[default]\n{setting}\n")
    assert wandb_upload.key_problem() is None


def test_training_without_a_wandb_account_continues(no_account, tmp_path, capsys):
    log = open_log(tmp_path / "model", config=CONFIG.replace(wandb_project="project"))
    assert log._wandb is None
    log.write({"step": 1})
    log.close()
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        "wandb: no API key for api.wandb.ai in WANDB_API_KEY or ~/.netrc; training continues, and "
        f"its metrics are in {tmp_path}/model/metrics.jsonl (log in with `wandb login`, or set "
        "WANDB_MODE to offline or disabled)"
    )
    assert rows_in(tmp_path / "model") == [{"step": 1}]


class _Refusing(http.server.BaseHTTPRequestHandler):
    """A wandb server that knows no API key."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b'{"errors": [{"message": "user is not logged in"}]}')


@pytest.mark.slow
def test_a_refused_key_is_reported_before_the_log_is_opened(wandb_folder, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(wandb_upload, "RETRY_SECONDS", (0.01, 0.01))
    config, folder = CONFIG.replace(wandb_project="project"), str(wandb_folder / "model")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        upload: Any = start_wandb(folder, config)
        wait_until(lambda: upload._warned, "no warning was printed")
        log = MetricsLog(folder, 0, upload, None)
        log.write({"step": 1})
        log.close()
        upload._thread.join()
        server.shutdown()
        thread.join()
    [line] = [line for line in capsys.readouterr().err.splitlines() if "training continues" in line]
    assert re.match(r"wandb: Failed to authenticate with http://.*: user is not logged in; ", line)
    assert rows_in(Path(folder)) == [{"step": 1}]


def test_disabled_wandb_creates_no_run(wandb_folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    log = open_log(wandb_folder / "model", config=CONFIG.replace(wandb_project="project"))
    log.write({"step": 1})
    log.close()
    assert not list(wandb_folder.glob("wandb/*run-*"))
    assert rows_in(wandb_folder / "model") == [{"step": 1}]


def test_the_noise_scale_resumes_from_its_state():
    rng = random.Random(5)
    norms = [(rng.uniform(2, 3), rng.uniform(1, 2)) for _ in range(20)]
    uninterrupted, interrupted = NoiseScale(0.1, 2, 16), NoiseScale(0.1, 2, 16)
    expected = [uninterrupted.update(*pair) for pair in norms]
    actual = [interrupted.update(*pair) for pair in norms[:7]]
    resumed = NoiseScale(0.1, 2, 16)
    resumed.restore(json.loads(json.dumps(interrupted.state())))
    actual += [resumed.update(*pair) for pair in norms[7:]]
    assert actual == expected
    fresh = NoiseScale(0.1, 2, 16)
    fresh.restore(json.loads(json.dumps(NoiseScale(0.1, 2, 16).state())))
    assert fresh.update(*norms[0]) == expected[0]
