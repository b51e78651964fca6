"""Buckets that do not exist or cannot be reached are reported before anything is read from them."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh_transformer.config import Config
from mesh_transformer.storage import access
from mesh_transformer.util import InputError
from tests.support.fake_gcs import gcs_server
from tests.support.small_run import run_values, write_config

ROOT = Path(__file__).parents[2]
UNREACHABLE = (
    r"gs://no-such-bucket/run\S*: Google Cloud Storage cannot be reached \(Connection refused\); "
    r"check the network and https_proxy, or use a local folder"
)


@pytest.fixture(autouse=True)
def _forget_buckets() -> Iterator[None]:
    access._bucket_exists.cache_clear()
    yield
    access._bucket_exists.cache_clear()


@pytest.fixture
def gcs(tmp_path, monkeypatch):
    with gcs_server(tmp_path) as (server, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Yield a port on which nothing listens and that no other process can take."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.slow
def test_a_bucket_is_asked_for_once(gcs):
    for path in ("gs://bucket/run", "gs://bucket/run/step_1", "gs://bucket"):
        access.check_bucket(path)
    assert gcs.requests == 1


@pytest.mark.parametrize("path", ["runs/gs", "s3://bucket/run", "/gs:/x"])
def test_other_paths_are_not_asked_for(path, closed_port, monkeypatch):
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{closed_port}")
    access.check_bucket(path)


def test_a_missing_bucket_is_reported(gcs):
    gcs.missing = {"no-such-bucket"}
    with pytest.raises(InputError) as caught:
        access.check_bucket("gs://no-such-bucket/run")
    assert str(caught.value) == (
        "gs://no-such-bucket/run: there is no bucket no-such-bucket; check the name, or create it "
        "(gcloud storage buckets create gs://no-such-bucket)"
    )
    with pytest.raises(InputError, match="names no bucket; expected gs://<bucket>/<folder>"):
        access.check_bucket("gs:///run")


@pytest.mark.quick(2)
@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_a_refused_request_does_not_mean_that_a_bucket_is_missing(gcs, status):
    """The request has no credentials, so most buckets refuse it."""
    gcs.fault = lambda: status
    access.check_bucket("gs://bucket/run")


def test_an_untrusted_certificate_is_left_to_the_clients(gcs, monkeypatch):
    monkeypatch.delenv("CURL_CA_BUNDLE")
    access.check_bucket("gs://bucket/run")
    assert gcs.requests == 0


@pytest.mark.parametrize("path", ["https://example.com/run.json", "s3://bucket/run.json", "://"])
def test_configs_with_other_uris_are_refused(path):
    with pytest.raises(InputError, match=f"config {path}: expected a local file or gs://"):
        Config.load(path)


def test_a_config_in_a_bucket_is_read(gcs):
    gcs._put(("bucket", "run.json"), b"{}")
    with pytest.raises(InputError, match=r"config gs://bucket/run\.json: required key 'layers'"):
        Config.load("gs://bucket/run.json")
    with pytest.raises(InputError, match=r"config gs://bucket/none\.json cannot be read \(No such"):
        Config.load("gs://bucket/none.json")


def test_an_unreachable_storage_is_tried_again_and_then_reported(closed_port, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setattr(access.time, "sleep", pauses.append)
    with pytest.raises(InputError) as caught:
        access.check_bucket("gs://no-such-bucket/run")
    assert re.fullmatch(UNREACHABLE, str(caught.value))
    assert tuple(pauses) == access.BUCKET_PAUSES


COMMANDS = {
    "model": "device_train.py --config {config} --model-dir {uri}",
    "records": "device_train.py --config {config} --model-dir {folder} --set train_set={uri}.index",
    "tune": "device_train.py --config {config} --model-dir {folder} --tune-model-path {uri}",
    "sample": "device_sample.py --model-path {uri} --prompt x",
    "config": "device_train.py --config {uri}.json --model-dir {folder}",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [name if name == "model" else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS],
)
def test_commands_report_an_unreachable_bucket_in_one_line(where, closed_port, tmp_path):
    values = run_values(tmp_path, tpu_size=1, cores_per_replica=1)
    config, folder = write_config(tmp_path / "config.json", values), tmp_path / "model"
    command = COMMANDS[where].format(config=config, folder=folder, uri="gs://no-such-bucket/run")
    proxy = f"http://127.0.0.1:{closed_port}"
    process = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT,
        env=os.environ | {"https_proxy": proxy, "http_proxy": proxy, "no_proxy": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    [line] = process.stderr.splitlines()
    assert re.fullmatch(f"error: {UNREACHABLE}", line)
    assert (process.returncode, process.stdout) == (2, "")


class _Stubborn:
    """A folder in a bucket whose first deletions fail."""

    def __init__(self, failures: int, *, leaves_nothing: bool = False):
        self.failures, self.leaves_nothing, self.calls = failures, leaves_nothing, 0

    def __fspath__(self) -> str:
        return "gs://bucket/folder"

    def rmtree(self) -> None:
        self.calls += 1
        if self.calls > 1 and self.leaves_nothing:
            raise FileNotFoundError
        if self.calls <= self.failures:
            raise RuntimeError("could not fully delete dir")


@pytest.mark.parametrize(
    ("folder", "calls"),
    [(_Stubborn(0), 1), (_Stubborn(2), 3), (_Stubborn(2, leaves_nothing=True), 2)],
)
def test_a_folder_in_a_bucket_is_deleted_again_if_something_is_left(monkeypatch, folder, calls):
    monkeypatch.setattr(access, "BUCKET_PAUSES", (0.0, 0.0))
    access.delete_tree(folder)
    assert folder.calls == calls
    with pytest.raises(RuntimeError, match="could not fully delete"):
        access.delete_tree(_Stubborn(3))
