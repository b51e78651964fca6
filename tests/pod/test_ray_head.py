"""`RayHead`: a full object store, servers that die, and clients without the token."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.pod import ray_head
from mesh_transformer.pod.launch import LocalNodes, build_model
from mesh_transformer.pod.ray_head import RayHead
from mesh_transformer.util import HostError, StoppedError
from tests.conftest import random_batch
from tests.long.interruptions import members, sessions_of
from tests.support.small_run import VALUES
from tests.support.waiting import wait_until

CONFIG = Config(**VALUES)
STORE = 80 << 20  # bytes; about the minimum that Ray accepts
PIECE = 10 << 20


@pytest.fixture
def spill_folder(small_disk, monkeypatch) -> Iterator[Path]:
    """A small disk as Ray's folder, with a short path: socket paths have up to 107 characters."""
    with tempfile.TemporaryDirectory() as name:
        short = Path(name) / "ray"
        short.symlink_to(small_disk("200m"))
        monkeypatch.setenv("RAY_TMPDIR", str(short))
        yield short


def fill(held: list[Any], count: int) -> None:
    """Put `count` pieces into the object store, and add them to `held`, which keeps them there."""
    import ray

    for _ in range(count):
        held.append(ray.put(np.full(PIECE, len(held), np.uint8)))


def tiled(batch: dict[str, np.ndarray], times: int) -> dict[str, np.ndarray]:
    return {name: np.tile(rows, (times, 1)) for name, rows in batch.items()}


@pytest.mark.slow
def test_full_store_spills_and_full_disk_is_a_one_line_error(spill_folder):
    batch = random_batch(CONFIG, 4)
    with RayHead(STORE):
        from mesh_transformer.pod.hosts import local_hosts

        with closing(build_model(CONFIG, local_hosts(CONFIG, 2))) as cluster:
            cluster.init()
            held: list[Any] = []
            fill(held, 10)  # 20 MiB more than fit
            large = tiled(batch, 2000)  # too large to be sent with a call without the store
            actual = cluster.eval(large)["loss"].reshape(2000, 4)[-1]
            # f32 rounds to 6e-8; a batch of another size is summed in a different order.
            np.testing.assert_allclose(actual, cluster.eval(batch)["loss"], rtol=1e-5)
            with pytest.raises(Exception, match="disk is full"):
                fill(held, 40)
            # Usually the call is refused, but a host can also die of the full disk.
            with pytest.raises(StoppedError, match=r"disk that .* spills to \(RAY_TMPDIR") as error:
                cluster.eval(tiled(batch, 100_000))
            assert "\n" not in str(error.value)
            assert cluster.ended
    assert not sessions_of(os.getpid())


def test_ray_gets_a_short_folder_where_the_paths_of_its_sockets_would_be_too_long(monkeypatch):
    longest = "/" + "f" * (ray_head.LONGEST_FOLDER - 1)
    added = "/ray/session_2026-01-01_00-00-00_123456_4194304/sockets/plasma_store.10"
    assert len(longest + added) <= 107
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", longest)
    with ray_head._short_folder():
        assert "RAY_TMPDIR" not in os.environ
    monkeypatch.setenv("TMPDIR", f"{longest}f")
    with ray_head._short_folder():
        folder = os.environ["RAY_TMPDIR"]
        assert len(folder) <= len(longest)
        assert os.path.isdir(folder)
    assert not os.path.exists(folder)
    assert "RAY_TMPDIR" not in os.environ
    monkeypatch.setenv("RAY_TMPDIR", f"{longest}f")  # the user's own choice
    with ray_head._short_folder():
        assert os.environ["RAY_TMPDIR"] == f"{longest}f"


def test_a_folder_that_does_not_exist_is_not_full(monkeypatch, tmp_path):
    """A host's error is reported, not that of the look at the disk."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "gone"))
    assert not ray_head.spill_disk_is_full()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_dead_head_ends_completely_and_is_replaced(name, capfd):
    with RayHead() as head:
        (session,) = sessions_of(os.getpid())
        address = head.address
        head.revive()
        assert head.address == address
        # Soon after the start, Ray's client would wait minutes for a dead server.
        time.sleep(2.0)
        titles = members(session).items()
        (pid,) = [pid for pid, title in titles if os.path.basename(title) == name]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not members(session), "end of its other processes", 10.0)
        wait_until(lambda: head.revive() or head.address != address, "a new head", 60.0)
        assert f"Ray's head has died ({name} died); starting a new one" in capfd.readouterr().err
        fill([], 1)
    assert not sessions_of(os.getpid())


JOIN = """
import sys
import ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False)
    print("joined", len(ray.nodes()))
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.slow
def test_clients_without_the_token_are_refused(tmp_path):
    """The clients run at the same time, because each retries for as long as Ray's client does."""
    with RayHead() as head:
        own = os.environ["RAY_AUTH_TOKEN"]
        ways = {
            "the token": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": own},
            "another": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": own[::-1]},
            "none": {"RAY_AUTH_MODE": "token"},
            "no mode": {"RAY_AUTH_MODE": "disabled"},
        }
        others = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
        clients = {
            way: subprocess.Popen(
                [sys.executable, "-c", JOIN, head.address],
                env=others | {"HOME": str(tmp_path)} | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for way, variables in ways.items()
        }
        outputs = {
            way: client.communicate(timeout=240)[0].strip() for way, client in clients.items()
        }
    assert outputs == {
        "the token": "joined 1",
        "another": "ConnectionError",
        "none": "AuthenticationError",
        "no mode": "ConnectionError",
    }


@pytest.mark.parametrize("error", [ProcessLookupError, FileNotFoundError])
def test_process_that_ends_during_the_listing_is_no_member(monkeypatch, error):
    session = os.getsid(0)
    assert os.getpid() in ray_head._members(session)

    def ended(path: Path, **_: Any) -> str:
        raise error(path)

    monkeypatch.setattr(Path, "read_text", ended)
    assert ray_head._members(session) == {}


def test_a_head_that_does_not_start_leaves_no_folder(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", f"/{'f' * ray_head.LONGEST_FOLDER}")
    monkeypatch.setattr(ray_head, "_require_token", lambda: None)
    folders = []

    def fails(head: RayHead) -> None:
        folders.append(os.environ["RAY_TMPDIR"])
        raise StoppedError("Ray cannot start on this machine")

    monkeypatch.setattr(RayHead, "_start_once", fails)
    # The error keeps the frames alive, and with them a context that was not closed.
    with pytest.raises(StoppedError, match=r"^Ray cannot start") as error:
        RayHead()
    assert error.tb is not None
    assert "RAY_TMPDIR" not in os.environ
    assert len(folders) == 2  # it was tried twice
    assert not os.path.exists(folders[0])


@pytest.mark.slow
def test_a_host_that_has_joined_twice_is_named(capfd):
    once, twice = "127.0.0.3", "127.0.0.2"
    with RayHead(machines=[twice, twice, once]) as head:
        from mesh_transformer.pod.hosts import joined_hosts, missing_hosts

        wait_until(lambda: missing_hosts([once]) == [], "the other host")
        line = f"^2 Ray nodes have joined as host {twice}; stop Ray there, and start it once$"
        with pytest.raises(HostError, match=line):
            joined_hosts([twice, once], 1.0)
        present = LocalNodes(CONFIG, head, [twice, once], 1.0)()
        assert [host.address for host in present.hosts] == [once]
        assert line[1:-1] in capfd.readouterr().err
