"""Folders that are created atomically: completely or not at all."""

import errno
import os
import subprocess
import sys

import pytest

from mesh_transformer.checkpoint import atomic_folder as module
from mesh_transformer.checkpoint.atomic_folder import atomic_folder
from mesh_transformer.util import InputError
from tests.support.waiting import wait_until


def fill(folder, size=10):
    os.makedirs(os.path.join(folder, "inner"))
    with open(os.path.join(folder, "inner", "file"), "wb") as file:
        file.write(b"x" * size)


def test_folder_gets_its_name_only_at_the_end(tmp_path):
    with atomic_folder(str(tmp_path / "new" / "model")) as temporary:
        fill(temporary)
        assert not (tmp_path / "new" / "model").exists()
    assert (tmp_path / "new" / "model" / "inner" / "file").read_bytes() == b"x" * 10
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, InputError])
def test_nothing_is_left_if_filling_the_folder_fails(tmp_path, error):
    def fill_half(folder):
        fill(folder)
        raise error

    with pytest.raises(error), atomic_folder(str(tmp_path / "model")) as temporary:
        fill_half(temporary)
    assert not list(tmp_path.iterdir())


def test_existing_folder_is_kept(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(InputError, match="model already exists"):
        atomic_folder(str(tmp_path / "model")).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_error_names_a_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    message = (
        "model cannot be written: Not a directory; no partial folder is left; choose another path$"
    )
    with pytest.raises(InputError, match=message):
        atomic_folder(str(tmp_path / "file" / "model")).__enter__()


def test_every_file_and_folder_is_flushed_before_the_rename(tmp_path, monkeypatch):
    flushed, flush = set(), os.fsync

    def record(descriptor):
        flushed.add(os.fstat(descriptor).st_ino)
        flush(descriptor)

    rename = os.rename

    def check_and_rename(source, target):
        inner = os.path.join(source, "inner")
        assert {os.stat(path).st_ino for path in (source, inner, f"{inner}/file")} <= flushed
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "rename", check_and_rename)
    with atomic_folder(str(tmp_path / "model")) as temporary:
        fill(temporary)
    assert tmp_path.stat().st_ino in flushed


KILLED = """
import os, signal, sys
from mesh_transformer.checkpoint.atomic_folder import atomic_folder
with atomic_folder(sys.argv[1]) as folder:
    os.mkdir(os.path.join(folder, "inner"))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_temporary_folder_of_a_killed_process_is_deleted(tmp_path):
    """Temporary folders of running processes, other hosts and other model folders are kept."""
    path = str(tmp_path / "model")
    assert subprocess.run([sys.executable, "-c", KILLED, path], check=False).returncode == -9
    (leftover,) = tmp_path.iterdir()
    dead = leftover.name.split(".")[-2]
    running = leftover.name.replace(f".{dead}.", f".{os.getppid()}.")
    # As if left by an earlier process with this process's number.
    own = leftover.name.replace(f".{dead}.", f".{os.getpid()}.")
    kept = {running, f".model.elsewhere.{dead}.tmp", leftover.name.replace("model", "models")}
    for name in (own, *kept):
        (tmp_path / name).mkdir()
    with atomic_folder(path) as temporary:
        fill(temporary)
    assert {entry.name for entry in tmp_path.iterdir()} == {"model", *kept}


def test_failed_flush_leaves_nothing(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with (
        pytest.raises(InputError, match=r"No space left on device, [\d,]+ bytes free; no partial"),
        atomic_folder(str(tmp_path / "model")) as temporary,
    ):
        fill(temporary)
    assert not list(tmp_path.iterdir())


def test_files_are_flushed_in_the_background_while_being_written(tmp_path, monkeypatch):
    flushed, flush = [], os.fsync

    def record(descriptor):
        flushed.append(os.fstat(descriptor).st_ino)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    with atomic_folder(str(tmp_path / "model")) as temporary:
        fill(temporary)
        file = os.stat(os.path.join(temporary, "inner", "file")).st_ino
        wait_until(lambda: file in flushed, "a flush")
        with open(os.path.join(temporary, "inner", "file"), "ab") as more:
            more.write(b"more")
        wait_until(lambda: flushed.count(file) > 1, "a second flush")


def test_failed_background_flush_is_reported_at_the_end(tmp_path, monkeypatch):
    failed, flush = [], os.fsync

    def fail_once(descriptor):
        if not failed:
            failed.append(True)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fail_once)
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    with (
        pytest.raises(InputError, match="model cannot be written: Input/output error"),
        atomic_folder(str(tmp_path / "model")) as temporary,
    ):
        fill_until(temporary, lambda: failed)
    assert not list(tmp_path.iterdir())


def fill_until(folder, condition):
    fill(folder)
    wait_until(condition, "the expected state of the disk")


def test_full_disk_leaves_nothing(small_disk):
    folder = small_disk("1m")
    with (
        pytest.raises(InputError, match="model cannot be written: No space left on device"),
        atomic_folder(str(folder / "model")) as temporary,
    ):
        fill(temporary, 2_000_000)
    assert not list(folder.iterdir())
