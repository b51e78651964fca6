"""`Fleet` with members that run no model, and processes that follow over real connections."""

import contextlib
import functools
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from mesh_transformer.config import Config
from mesh_transformer.pod import every_host, fleet
from mesh_transformer.pod import runner as pod_runner
from mesh_transformer.pod.every_host import ADVICE, EveryHost, follow
from mesh_transformer.pod.faults import LostError, PermanentError, RaisedError
from mesh_transformer.pod.fleet import Fleet
from mesh_transformer.pod.meeting import Connection, Peer
from mesh_transformer.pod.runner import NetworkRunner
from mesh_transformer.util import DamagedError, HostError, InputError, NonFiniteError, StoppedError
from tests.conftest import SMALL, random_batch
from tests.support.waiting import SECONDS, wait_until

CONFIG = Config(**SMALL)
SILENCE = 0.5  # seconds


def done(value: Any) -> Future[Any]:
    result: Future[Any] = Future()
    result.set_result(value)
    return result


class ThreadMember:
    """A member whose calls run in a thread; `act` is called in place of each method."""

    def __init__(self, rank: int, act: Callable[..., Any]):
        self.name = self.disks = f"host {rank}"
        self.rank, self.act = rank, act
        self.thread = ThreadPoolExecutor(1)
        self.answers = True  # whether it answers pings
        self.is_lost = False

    def send(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        return self.thread.submit(self.act, self.rank, *arguments)

    def ping(self) -> Future[Any]:
        answer = done(None) if self.answers else Future()
        if self.is_lost:
            answer = Future()
            answer.set_exception(LostError("died"))
        return answer


@contextlib.contextmanager
def fleet_of(count: int, act: Callable[..., Any], patience: float = SECONDS) -> Iterator[Any]:
    made = Fleet(CONFIG, silence=SILENCE, patience=patience)
    made.members = [ThreadMember(rank, act) for rank in range(count)]
    made.replicas = [[rank] for rank in range(count)]
    yield made
    for member in made.members:
        member.thread.shutdown(wait=False, cancel_futures=True)


@pytest.mark.parametrize("seed", range(5))
def test_members_run_calls_in_the_order_in_which_they_were_sent(seed):
    rng = random.Random(seed)
    count, calls = rng.randint(1, 5), rng.randint(5, 40)
    seen: list[list[int]] = [[] for _ in range(count)]

    def act(rank: int, number: int) -> tuple[int, int]:
        seen[rank].append(number)
        return rank, number

    with fleet_of(count, act) as made:
        sent: list[Any] = []
        for number in range(calls):
            sent.append(made._submit("run", *[(number,)] * count))
            if rng.random() < 0.3:
                made._results(sent.pop(0))
        for number, results in enumerate(sent, start=calls - len(sent)):
            assert made._results(results) == [(rank, number) for rank in range(count)]
    assert seen == [list(range(calls))] * count


# For each member, what a call raises in it; then the class and line of the leader's error, and
# whether the fleet keeps running.
OUTCOMES = {
    "one": ([None, InputError("full disk"), None], InputError, "host 1: full disk", True),
    "all": ([InputError(f"disk {n}") for n in range(3)], InputError, "disk 0", True),
    "two": ([None, InputError("a"), InputError("b")], InputError, "host 1: a", True),
    "not finite": ([NonFiniteError("NaN"), None, None], NonFiniteError, "NaN", True),
    "damaged": ([DamagedError("bad", "/m/step_9", "step_6")] * 3, DamagedError, "bad", True),
    "unexpected": (
        [None, InputError("a"), RaisedError("host 2: KeyError: b")],
        RaisedError,
        "host 2: KeyError: b",
        False,
    ),
    "permanent": ([None, PermanentError("host 1: full"), None], PermanentError, "host 1", False),
    "stopped": ([StoppedError("lost the lock"), None, None], HostError, "lost the lock", False),
    "lost": ([None, LostError("a call was lost"), None], HostError, "a call was lost", False),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_call_fails_in_the_leader_if_it_fails_in_a_member(name):
    errors, kind, line, is_running = OUTCOMES[name]

    def act(rank: int, fails: bool) -> int:
        if fails and errors[rank] is not None:
            raise errors[rank]
        return rank

    with fleet_of(3, act) as made:
        with pytest.raises(kind) as caught:
            made.call("run", *[(True,)] * 3)
        assert type(caught.value) is kind
        assert str(caught.value).startswith(line)
        if kind is DamagedError:
            assert (caught.value.step, caught.value.previous) == ("/m/step_9", "step_6")
        assert made.ended is not is_running
        if is_running:
            assert made.call("run", *[(False,)] * 3) == [0, 1, 2]
        else:
            with pytest.raises(HostError, match=r"have been shut down \(.*create a new cluster"):
                made.call("run", *[(False,)] * 3)


def test_a_member_that_died_is_the_cause_of_the_errors_of_others():
    def act(rank: int) -> None:
        raise (InputError if rank == 0 else RaisedError)("connection reset")

    with fleet_of(3, act) as made:
        made.members[1].is_lost = True
        with pytest.raises(HostError, match=r"^host 1 died$"):
            made.call("run")


def test_a_member_that_does_not_answer_ends_the_fleet_and_a_slow_one_does_not():
    wait = threading.Event()

    def act(rank: int) -> int:
        if rank == 1:
            wait.wait(SECONDS)
        return rank

    with fleet_of(2, act) as made:
        threading.Timer(4 * SILENCE, wait.set).start()
        assert made.call("run") == [0, 1]
        wait.clear()
        made.members[1].answers = False
        with pytest.raises(HostError, match=r"^host 1 does not answer$"):
            made.call("run")
        wait.set()


def test_a_call_that_takes_too_long_ends_the_fleet():
    wait = threading.Event()
    with fleet_of(2, lambda rank: wait.wait(SECONDS), patience=SILENCE) as made:
        with pytest.raises(HostError, match="a call to the hosts took more than"):
            made.call("run")
        wait.set()


def test_bad_input_of_one_member_that_others_wait_for_ends_the_fleet(monkeypatch):
    wait = threading.Event()

    def act(rank: int) -> None:
        if rank == 1:
            raise InputError("a bad record")
        wait.wait(SECONDS)

    monkeypatch.setattr(fleet, "SECONDS_TO_AGREE", 0.2)
    with fleet_of(3, act) as made:
        with pytest.raises(InputError, match=r"^host 1: a bad record$"):
            made.call("run", agree=0.2)
        assert made.ended
        wait.set()


def test_a_marker_that_a_network_file_system_shows_late_is_seen(monkeypatch, tmp_path):
    path = str(tmp_path / "model" / ".0123.shared")
    runners = [NetworkRunner(rank) for rank in range(2)]
    create = functools.partial(runners[0].call, "create_marker", path)
    monkeypatch.setattr(pod_runner.time, "sleep", lambda _: create())
    assert runners[1].call("marker_exists", path)
    runners[0].call("delete_marker", path)
    assert list((tmp_path / "model").iterdir()) == []
    (tmp_path / "other").touch()
    runners[0].call("delete_marker", str(tmp_path / "other"))
    assert (tmp_path / "other").exists()


def test_a_call_that_cannot_be_sent_to_all_members_ends_the_fleet():
    with fleet_of(3, lambda rank: rank) as made:
        made.members[1].send = lambda method, arguments: 1 / 0
        with pytest.raises(ZeroDivisionError):
            made.call("run")
        assert made.ended


def test_members_are_watched_while_others_may_report_the_same_error():
    wait = threading.Event()

    def act(rank: int) -> None:
        if rank == 0:
            raise InputError("the disk is full")
        wait.wait(SECONDS)

    with fleet_of(2, act) as made:
        answers = iter([True])  # to the first ping
        ping = made.members[1].ping
        made.members[1].ping = lambda: ping() if next(answers, False) else Future()
        with pytest.raises(HostError, match=r"^host 1 does not answer$"):
            made.call("run", agree=SECONDS)
        wait.set()


def test_a_step_that_fails_on_all_members_raises_its_error():
    """The error comes with the results of two calls: the step, and the report about it."""
    network: Any = SimpleNamespace(step=0, save_failed=False)

    def train(sample: Any) -> None:
        raise NonFiniteError("train: the weights are NaN")

    network.train = train
    runners = [NetworkRunner(rank) for rank in range(2)]
    for each in runners:
        each.network = network
    made = Fleet(CONFIG, silence=SILENCE)
    made.members = [ThreadMember(rank, lambda *_: None) for rank in range(2)]
    for member, each in zip(made.members, runners, strict=True):
        member.act = each.call
        member.send = lambda method, own, member=member: member.thread.submit(
            member.act, method, *own
        )
    made.dp, made.replicas = 2, [[0], [1]]
    batch = random_batch(CONFIG, 1, 2)
    metrics = made.train(batch)
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=r"^train: the weights are NaN$"):
            float(metrics["loss"])
    assert not made.ended
    with pytest.raises(InputError, match="'kill' is no call of a leader"):
        runners[0].call("kill")


def runner(act: Callable[..., Any], rank: int) -> Any:
    """Imitate a `NetworkRunner`: `act` is called in place of its methods."""
    return SimpleNamespace(call=lambda method, *arguments: act(rank, *arguments))


@pytest.fixture
def ends(monkeypatch) -> list[int]:
    """Return a list of the statuses with which processes would have ended."""
    statuses: list[int] = []
    monkeypatch.setattr(every_host, "exit_now", lambda _, status: statuses.append(status))
    return statuses


@contextlib.contextmanager
def processes(count: int, act: Callable[..., Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the fleet of process 0 and the other ones' results, all in threads of this process."""
    pairs = [socket.socketpair() for _ in range(1, count)]
    others = [Connection(there, 10) for _, there in pairs]
    peers = [Peer(Connection(here, 10), f"node{n}", "") for n, (here, _) in enumerate(pairs, 1)]
    led = EveryHost(CONFIG, peers, None, 10)
    led.members[0]._runner = runner(act, 0)
    led.replicas = [[rank] for rank in range(count)]
    with ThreadPoolExecutor(max(count - 1, 1)) as pool:
        following = [
            pool.submit(follow, connection, runner(act, rank), "process 0")
            for rank, connection in enumerate(others, 1)
        ]
        try:
            yield led, following
        finally:
            led.end("", 0, together=True)
            for peer in peers:
                with contextlib.suppress(OSError):
                    peer.connection.close()


def test_processes_follow_the_first_one_and_end_with_its_status(ends):
    def act(rank: int, values: Any) -> Any:
        if values == "bad":
            raise InputError("bad")
        return {"rank": rank, "values": values}

    with processes(4, act) as (led, following):
        for number in range(50):
            result = led.call("run", *[((number, rank),) for rank in range(4)])
            assert result == [{"rank": rank, "values": (number, rank)} for rank in range(4)]
        with pytest.raises(InputError, match=r"^bad$"):
            led.call("run", *[("bad",)] * 4)
        assert [member.ping().result(SECONDS) is not None for member in led.members] == [True] * 4
        led.end("", 75, together=True)
        assert [other.result(SECONDS) for other in following] == [75] * 3
    assert not ends


def test_a_signal_of_any_process_reaches_the_first_one(monkeypatch, ends):
    monkeypatch.setattr(every_host, "WAIT_SECONDS", 0.01)
    received: list[list[int]] = []
    signals = every_host.stop_signals

    @contextlib.contextmanager
    def stop_signals(_: list[int]) -> Iterator[list[int]]:
        received.append([])
        with signals(received[-1]):
            yield received[-1]

    monkeypatch.setattr(every_host, "stop_signals", stop_signals)
    with processes(3, lambda *own: own) as (led, _), signals(led.signals):
        wait_until(lambda: len(received) == 2, "the other processes follow")
        received[1].append(15)
        wait_until(lambda: led.signals, "the signal")
        assert led.signals == [15]
    assert not ends


def test_a_signal_ends_the_first_process_if_it_does_not_train(monkeypatch, ends):
    sent: list[int] = []
    # Ray sets a handler in processes that have started it.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setattr(every_host.os, "kill", lambda pid, number: sent.append(number))
    with processes(2, lambda *own: own) as (led, _):
        led.receive_signal(signal.SIGTERM)
        assert (sent, led.signals) == ([signal.SIGTERM], [])
        with every_host.stop_signals(led.signals):
            led.receive_signal(signal.SIGTERM)
        led.receive_signal(signal.SIGTERM)  # after the first one, training ends
        assert (sent, led.signals) == ([signal.SIGTERM], [signal.SIGTERM] * 2)
    signal.signal(signal.SIGTERM, before)
    assert not ends


def test_all_processes_end_when_one_ends_without_notice(ends, capsys):
    with processes(3, lambda *own: own) as (led, _):
        led.members[2]._connection._socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: len(ends) == 3, "all processes end")
    assert ends == [1] * 3
    lines = capsys.readouterr().err.split("\n")
    assert lines.count(f"error: process 2 (node2) has ended without notice; {ADVICE}") == 2
    assert lines.count(f"error: process 0 has ended without notice; {ADVICE}") == 1


def test_an_error_of_the_first_process_ends_the_others_even_during_a_call(ends, capsys):
    wait = threading.Event()

    def act(rank: int) -> None:
        if rank:
            wait.wait(SECONDS)

    with processes(3, act) as (led, _):
        led._submit("run")
        led.end("process 0: KeyError: a", 1)
        wait_until(lambda: len(ends) == 2, "the other processes end")
        wait.set()
    assert ends == [1, 1]
    assert capsys.readouterr().err.count(f"error: process 0: KeyError: a; {ADVICE}\n") == 2


def test_a_process_that_does_not_answer_is_named(ends, capsys):
    here, there = socket.socketpair()
    led = EveryHost(CONFIG, [Peer(Connection(here, 10), "node1", "")], None, 10)
    began = time.monotonic()
    led._name_silent()
    assert time.monotonic() - began >= every_host.SECONDS_AT_ABORT
    assert ends == [1]
    assert f"error: process 1 (node1) does not answer; {ADVICE}\n" in capsys.readouterr().err
    there.close()
    led._peers[0].connection.close()
