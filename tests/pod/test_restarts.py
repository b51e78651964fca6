"""Restarts of training runs and their limits."""

import errno
import random
import re
from typing import Any

import jax
import pytest

from mesh_transformer.pod import restarts
from mesh_transformer.pod.faults import PermanentError, RaisedError, host_error
from mesh_transformer.training import loop
from mesh_transformer.training.goodput import Ledger
from mesh_transformer.util import HostError, InputError, StoppedError


class Attempt:
    """A fake network whose training reaches a step and then raises `error`, if there is one."""

    def __init__(self, reaches: int, error: BaseException | None):
        self.reaches, self.error = reaches, error
        self.step = 0
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def attempts(monkeypatch):
    """Return `run`, a list of the networks that it makes and a list of the seconds that it waits.

    `run(plan)` calls `restarts.train`.  Each element of the plan is one attempt: the step that it
    reaches, and the error that it then raises or None.
    """
    waits: list[float] = []
    monkeypatch.setattr(restarts.time, "sleep", waits.append)

    def attempt(network: Attempt, folder: str, **options: Any) -> None:
        assert isinstance(options.pop("ledger"), Ledger)
        assert options == {"max_steps": 7}
        network.step = network.reaches
        if network.error is not None:
            raise network.error

    monkeypatch.setattr(loop, "train", attempt)
    made: list[Attempt] = []

    def run(plan: list[tuple[int, BaseException | None]], **options: Any) -> None:
        pending = iter(plan)

        def make() -> Any:
            reaches, error = next(pending)
            if reaches < 0:  # fails before there is a network
                assert error is not None
                raise error
            assert all(network.closed for network in made)
            made.append(Attempt(reaches, error))
            return made[-1]

        restarts.train(make, "folder", max_steps=7, **options)
        assert next(pending, None) is None

    return run, made, waits


def test_host_failure_is_retried_and_progress_resets_the_count(attempts, capsys):
    run, made, waits = attempts
    failed = HostError("host 1 died")
    run([(5, failed), (-1, failed), (5, failed), (6, failed), (6, failed), (7, None)], retries=3)
    assert waits == [1, 2, 4, 1, 2]
    assert len(made) == 5
    printed = capsys.readouterr().err
    assert printed.count("host 1 died\nrestarting all hosts in") == 5


def test_run_gives_up_after_failures_without_progress(attempts):
    run, made, waits = attempts
    failed = HostError("host 1 died")
    with pytest.raises(StoppedError, match=r"^host 1 died; giving up after 4 failures") as caught:
        run([(5, failed), (4, failed), (5, failed), (-1, failed)], retries=3)
    assert not isinstance(caught.value, HostError)
    assert waits == [1, 2, 4]
    assert all(network.closed for network in made)


def test_an_error_that_a_live_host_raises_again_is_not_retried_again(attempts):
    run, _, waits = attempts
    plan = [(1, "host 0: OSError: port 1234"), (2, "host 0: OSError: port 77"), (2, "host 1: X")]
    plan += [(-1, "host 0: OSError: port 8"), (2, "host 0: OSError: port 9")]
    with pytest.raises(StoppedError, match=r"port 9; giving up after 4 failures without progress"):
        run([(reached, RaisedError(text)) for reached, text in plan])
    assert waits == [1, 1, 2, 4]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EACCES, "Permission denied"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile ..."),
    ],
)
def test_an_error_that_a_restart_cannot_cure_ends_the_run(attempts, error):
    run, _, waits = attempts
    with pytest.raises(PermanentError, match=line_of(error)):
        run([(5, host_error("host 1", error))])
    assert waits == []


def line_of(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"^{re.escape(f'host 1: {type(error).__name__}: {text}')}"


UNREACHABLE = "UNAVAILABLE: The following tasks are unhealthy: 1"
CLOSED = "Gloo all-reduce failed: [pair.cc:553] Connection closed by peer [127.0.0.1]:"


@pytest.mark.parametrize(
    "make",
    [
        lambda port: ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        lambda port: ConnectionResetError("Connection lost"),
        lambda port: OSError(errno.EHOSTUNREACH, "No route to host"),
        lambda port: OSError(errno.EADDRINUSE, f"Address already in use: {port}"),
        lambda port: TimeoutError("timed out"),
        lambda port: jax.errors.JaxRuntimeError(f"{UNREACHABLE} at {port}: NOT_FOUND"),
        lambda port: jax.errors.JaxRuntimeError(f"FAILED_PRECONDITION: Error: {CLOSED}{port}"),
        lambda port: jax.errors.JaxRuntimeError(f"INTERNAL: {'a long text ' * 30}{CLOSED}{port}"),
        lambda port: ValueError(f"UNKNOWN: {CLOSED}{port}"),
        lambda port: ValueError("UNKNOWN: Gloo context initialization failed: connect timeout"),
    ],
)
def test_errors_of_the_network_are_retried_however_often_they_occur(attempts, make):
    """Each could be another fault of a bad hour, so that two of them prove nothing."""
    run, _, waits = attempts
    ports = random.Random(0).sample(range(1024, 65536), 6)
    run([*((5, host_error("host 1", make(port))) for port in ports), (7, None)])
    assert len(waits) == 6
    with pytest.raises(StoppedError, match=r"^host 1: .*; giving up after 9 failures"):
        run([(5, host_error("host 1", make(1)))] * 9)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("INVALID_ARGUMENT: not JAX's"),
        OSError(errno.EIO, "Input/output error"),
        RuntimeError("[gloo/transport/tcp/device.cc:99] rv == 0. -2"),  # its own address
    ],
)
def test_an_unknown_error_is_retried_once(attempts, error):
    run, _, waits = attempts
    run([(5, host_error("host 1", error)), (6, None)])
    assert len(waits) == 1
    with pytest.raises(StoppedError, match=f"{line_of(error)}; giving up after 2 failures"):
        run([(5, host_error("host 1", error))] * 2)


@pytest.mark.parametrize("error", [InputError("bad"), StoppedError("not finite"), KeyError("x")])
def test_other_errors_are_not_retried(attempts, error):
    run, made, waits = attempts
    with pytest.raises(type(error)) as caught:
        run([(5, error)])
    assert caught.value is error
    assert waits == []
    assert made[0].closed


def test_keyboard_interrupt_does_not_wait_for_a_save(attempts):
    run, made, _ = attempts
    with pytest.raises(KeyboardInterrupt):
        run([(5, KeyboardInterrupt())])
    assert not made[0].closed  # closing it would wait for a save


def test_waits_are_bounded(attempts):
    run, _, waits = attempts
    with pytest.raises(StoppedError):
        run([(0, HostError("x"))] * 11, retries=10)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


def test_an_evaluation_of_all_steps_continues_on_new_hosts(monkeypatch, tmp_path):
    monkeypatch.setattr(restarts.time, "sleep", lambda _: None)
    monkeypatch.chdir(tmp_path)
    calls: list[Any] = []

    def evaluate_all(network: Attempt, folder: str, saved_steps: Any) -> None:
        calls.append((network, folder, saved_steps()))
        if len(calls) == 1:
            raise HostError("host 1 died")

    monkeypatch.setattr(restarts.all_steps, "evaluate_all", evaluate_all)
    made: list[Any] = []

    def make() -> Any:
        made.append(Attempt(0, None))
        return made[-1]

    restarts.evaluate_all(make, "model")
    # The hosts have another working folder.
    assert calls == [(network, f"{tmp_path}/model", []) for network in made]
    assert [network.closed for network in made] == [True, True]
