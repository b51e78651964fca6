"""Locks in buckets: one owner at a time, and a lock of an ended process is taken over.

tensorstore writes file:// URIs under the same conditions as objects in a bucket.
"""

import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mesh_transformer.storage import locks
from mesh_transformer.storage.locks import BucketLock, lock_folder
from mesh_transformer.util import InputError, StoppedError
from tests.support.fake_gcs import gcs_server

NEVER = 1e9  # seconds
IN_USE = r"^model folder file://\S+ is in use by process \d+ on \S+ since .* \(.*\); wait for it"


class Clock:
    """Takes the place of the module `time`: sleeping calls `meanwhile` and advances the time."""

    strftime = staticmethod(time.strftime)

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(locks, "time", clock)
    monkeypatch.setattr(locks, "RENEW_SECONDS", NEVER)  # the tests renew locks by `check`
    return clock


@pytest.fixture
def folder(tmp_path) -> str:
    return f"file://{tmp_path}/model"


def test_a_lock_is_refused_while_it_is_renewed(clock, folder):
    with lock_folder(folder) as owner:
        clock.meanwhile = owner.check
        with pytest.raises(InputError, match=IN_USE):
            lock_folder(folder)
        assert clock.now == locks.POLL_SECONDS
        owner.check()


def test_a_lock_whose_release_failed_is_free_for_its_own_process(clock, folder, monkeypatch):
    owner = lock_folder(folder)
    monkeypatch.setattr(owner, "_store", None)  # as if the bucket did not answer
    owner.release()
    lock_folder(folder).check()
    assert clock.now == 0


def test_a_lock_whose_renewal_was_written_but_not_answered_is_kept(clock, folder, monkeypatch):
    owner = lock_folder(folder)
    assert isinstance(owner, BucketLock)
    store = owner._store

    class Unanswering:
        read = store.read

        def write(self, *arguments: Any, **options: Any) -> Any:
            store.write(*arguments, **options).result()
            raise ValueError("UNAVAILABLE: no answer")

    monkeypatch.setattr(owner, "_store", Unanswering())
    with pytest.raises(InputError, match="cannot be renewed: UNAVAILABLE: no answer"):
        owner.check()
    monkeypatch.setattr(owner, "_store", store)
    owner.check()
    clock.meanwhile = owner.check
    with pytest.raises(InputError, match=IN_USE):
        lock_folder(folder)
    owner.release()


def test_a_bucket_that_cannot_be_written_is_named_in_one_line(tmp_path, monkeypatch):
    with gcs_server(tmp_path) as (gcs, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        gcs.fault = lambda: 403
        with pytest.raises(
            InputError, match=r"^model folder gs://bucket/model cannot be written: "
        ):
            lock_folder("gs://bucket/model")


def test_a_released_lock_is_free(clock, folder):
    for _ in range(3):
        lock_folder(folder).release()
    with lock_folder(folder) as owner:
        clock.meanwhile = owner.release  # while another process waits
        lock_folder(folder).check()


def test_a_lock_that_is_not_renewed_is_taken_over_and_its_owner_notices(clock, folder):
    owner = lock_folder(folder)
    heir = lock_folder(folder)
    assert locks.LEASE_SECONDS <= clock.now <= locks.LEASE_SECONDS + locks.POLL_SECONDS
    for _ in range(2):
        with pytest.raises(
            StoppedError, match=r"this run has lost its lock.* is in use by process"
        ):
            owner.check()
    owner.release()  # leaves the heir's lock alone
    heir.check()
    heir.release()


def test_a_lock_that_is_renewed_at_the_last_moment_is_not_taken_over(clock, folder, monkeypatch):
    owner = lock_folder(folder)
    assert isinstance(owner, BucketLock)
    write, renewals = BucketLock._write, iter([owner.check])

    def late(self, expected):
        if self is not owner and (renew := next(renewals, None)):
            renew()  # between the heir's reading and its writing
        return write(self, expected)

    monkeypatch.setattr(BucketLock, "_write", late)
    with pytest.raises(InputError, match=IN_USE):
        lock_folder(folder)
    assert clock.now >= locks.LEASE_SECONDS
    owner.check()
    owner.release()


PROGRAM = """
    import os, sys
    from mesh_transformer.storage.locks import lock_folder
    lock_folder(sys.argv[1])
    os._exit(0)
"""


def test_the_lock_of_a_process_that_has_ended_is_taken_over_at_once(clock, folder):
    program = textwrap.dedent(PROGRAM)
    subprocess.run([sys.executable, "-c", program, folder], check=True, timeout=300)
    lock_folder(folder).release()
    assert clock.now == 0


def test_the_process_of_another_machine_is_not_taken_for_ended(clock, folder, monkeypatch):
    monkeypatch.setattr(locks, "_process_space", lambda: "elsewhere")
    monkeypatch.setattr(locks.os, "getpid", lambda: 2**22 + 1)  # above any process id of Linux
    lock_folder(folder)
    monkeypatch.undo()
    monkeypatch.setattr(locks, "time", clock)
    lock_folder(folder).release()
    assert clock.now >= locks.LEASE_SECONDS


@pytest.mark.quick(15)
@pytest.mark.parametrize("seed", range(20))
def test_two_writers_never_both_hold_the_lock(clock, folder, seed):
    """In random order, they lock, renew and release, or stop for longer than the lease."""
    generator = random.Random(seed)
    held: dict[str, BucketLock] = {}

    def act(name: str, others_act: bool) -> None:
        other = "ab".replace(name, "")
        if name not in held:
            clock.meanwhile = (lambda: act(other, False)) if others_act else lambda: None
            try:
                if others_act or other not in held:
                    lock = lock_folder(folder)
                    assert isinstance(lock, BucketLock)
                    held[name] = lock
            except InputError:
                assert other in held
        elif generator.random() < 0.2:
            held.pop(name).release()
        elif generator.random() < 0.5:
            try:
                held[name].check()
            except InputError:
                held.pop(name)
        owners = sum(_holds(lock) for lock in held.values())
        assert owners <= 1

    for _ in range(30):
        act(generator.choice("ab"), True)
    for lock in held.values():
        lock.release()


def _holds(lock: BucketLock) -> bool:
    """Return whether a lock is still this one's, without renewing it."""
    return lock._store.read(locks.LOCK).result().stamp.generation == lock._generation


def test_of_threads_that_lock_at_once_one_succeeds(folder, monkeypatch):
    monkeypatch.setattr(locks, "POLL_SECONDS", 0.01)
    for _ in range(10):
        start = threading.Barrier(4)
        results: list[BucketLock | InputError] = []

        def compete(start=start, results=results) -> None:
            start.wait()
            try:
                lock = lock_folder(folder)
            except InputError as error:
                results.append(error)
                return
            assert isinstance(lock, BucketLock)
            results.append(lock)
            while len(results) < 4:
                lock.check()  # so that the others see that it is in use

        threads = [threading.Thread(target=compete) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (owner,) = (lock for lock in results if isinstance(lock, BucketLock))
        assert len(results) == 4
        owner.release()
