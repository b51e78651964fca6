"""Processes that run the training loop together, imitated by threads, take the same decisions."""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mesh_transformer.pod import lockstep, meeting
from mesh_transformer.pod.every_host import AHEAD
from mesh_transformer.pod.lockstep import Lockstep, PeerError
from mesh_transformer.pod.meeting import Meeting, Place
from mesh_transformer.training.loop import IN_FLIGHT
from mesh_transformer.util import DamagedError, InputError, StoppedError
from tests.support.multihost import free_port
from tests.support.waiting import wait_until

SECONDS = 60.0  # for all processes to connect, on a busy machine


def together(count: int, act: Callable[[int], Any]) -> list[Any]:
    """Call `act` with each index, in a thread each; return the results, or what was raised."""

    def attempt(index: int) -> Any:
        try:
            return act(index)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(attempt, range(count)))


def meet(processes: int, host: str = "127.0.0.1", **changes: Any) -> list[Any]:
    """Return the meetings of all processes; `changes` are functions index -> argument."""
    address = f"{host}:{free_port()}"

    def join(index: int) -> Meeting:
        arguments: dict[str, Any] = {"address": address, "count": processes, "index": index}
        arguments["facts"] = {"lr": 0.1}
        arguments |= {name: change(index) for name, change in changes.items()}
        facts, seconds = arguments.pop("facts"), arguments.pop("seconds", SECONDS)
        return Meeting(Place(**arguments), facts, seconds=seconds, heartbeat=10)

    return together(processes, join)


def leave(meetings: list[Meeting]) -> None:
    together(len(meetings), lambda index: meetings[index].leave())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_all_receive_the_same_news_in_the_same_order(host):
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    meetings = meet(4, host)
    assert len({meeting.coordinator for meeting in meetings}) == 1
    received: list[list[Any]] = [[] for _ in meetings]
    for member, messages in zip(meetings, received, strict=True):
        member.listen(messages.append)

    def speak(index: int) -> None:
        for number in range(20):
            meetings[index].announce({"from": index, "number": number})
            meetings[index].gather(f"key {number}", [index, number])

    together(4, speak)
    wait_until(lambda: all(len(messages) == 100 for messages in received), "all messages")
    assert all(messages == received[0] for messages in received)
    news = [message for message in received[0] if "news" in message]
    assert [message["number"] for message in news] == list(range(80))
    for index in range(4):
        own = [message["news"]["number"] for message in news if message["sender"] == index]
        assert own == list(range(20))
    gathered = {m["key"]: m["gathered"] for m in received[0] if "gathered" in m}
    assert gathered == {f"key {n}": [[index, n] for index in range(4)] for n in range(20)}
    leave(meetings)


def test_a_process_knows_the_address_at_which_the_others_reach_it():
    for host in ("127.0.0.1", "127.0.0.2", own_address()):
        meetings = meet(2, host)
        assert {member.address for member in meetings} == {host}
        for member in meetings:
            member.listen([].append)
        leave(meetings)


def own_address() -> str:
    """Return an address of this machine that is not a loopback address, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return probe.getsockname()[0]
    return "127.0.0.1"


def test_a_process_that_ends_without_notice_is_named():
    meetings = meet(3)
    received: list[list[Any]] = [[] for _ in meetings]
    for member, messages in zip(meetings, received, strict=True):
        member.listen(messages.append)
    meetings[2].leave()
    meetings[1]._socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: received[0], "the loss is noticed")
    assert received[0] == [{"lost": 1}]
    assert received[2] == []
    meetings[0].leave()


def test_a_hub_that_fails_is_reported_to_all_processes(monkeypatch, capfd):
    """Its thread is needed by all processes, which would wait for its messages forever."""
    meetings = meet(3)
    received: list[list[Any]] = [[] for _ in meetings]
    for member, messages in zip(meetings, received, strict=True):
        member.listen(messages.append)
    meetings[1]._send({"gather": "a key without a value"})
    wait_until(lambda: all(received), "all processes are told")
    (line,) = {messages[0]["refused"] for messages in received}
    assert line.startswith("process 0 can no longer pass on messages between processes (KeyError:")
    assert 'values[index] = message["value"]' in capfd.readouterr().err
    leave(meetings)

    monkeypatch.setattr(meeting._Hub, "_missing", lambda hub: [][0])  # before all have connected
    refused("process 0 can no longer pass on messages between processes (IndexError: list index")


def test_processes_end_when_the_hub_fails(monkeypatch, capfd):
    """The line of process 0 says why, although only it can see the traceback."""
    statuses: list[int] = []

    def exit_now(message: str, status: int) -> None:
        statuses.append(status)

    monkeypatch.setattr(lockstep, "exit_now", exit_now)
    meetings = meet(2)
    members = list(map(Lockstep, meetings))
    meetings[1]._send({"gather": "a key without a value"})
    wait_until(lambda: len(statuses) >= 2, "both processes end")
    assert {*statuses} == {1}
    assert all(member._leaving for member in members)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    expected = "error: process 0 can no longer pass on messages between processes (KeyError:"
    assert [line[: len(expected)] for line in lines] == [expected] * 2


def refused(message: str, **changes: Any) -> None:
    """Check that all processes raise the same error, a line that contains `message`."""
    errors = meet(3, **changes)
    assert all(isinstance(error, InputError) for error in errors), errors
    lines = set(map(str, errors))
    assert len(lines) == 1
    assert message in lines.pop()


def test_processes_that_do_not_fit_are_refused_everywhere():
    def facts(index: int) -> dict[str, Any]:
        return {"lr": 0.1, "config key seq": 64 if index == 2 else 32}

    refused("config key seq is 64 in process 2, but 32 in process 0; start", facts=facts)
    missing = {"facts": lambda index: {"lr": 0.1} | ({"mode": "eval"} if index == 1 else {})}
    refused('mode is "eval" in process 1, but null in process 0; start all', **missing)
    more = {"count": lambda index: 3 + (index == 1)}
    refused("process 1 was started as one of 4 processes, process 0 as one of 3; give", **more)
    refused("two processes were started with index 1; give", index=lambda index: min(index, 1))
    lonely = {"count": lambda index: 5, "seconds": lambda index: 1.0}
    refused("processes 3, 4 of 5 have not connected to 127.0.0.1:", **lonely)


def test_strangers_are_ignored_and_a_restarted_process_is_accepted():
    port = free_port()
    with ThreadPoolExecutor(3) as pool:

        def join(index: int) -> Any:
            place = Place(f"127.0.0.1:{port}", 3, index)
            return pool.submit(Meeting, place, {}, seconds=SECONDS, heartbeat=10)

        first = join(0)

        def connect() -> socket.socket | None:
            with contextlib.suppress(OSError):
                return socket.create_connection(("127.0.0.1", port))
            return None

        with wait_until(connect, "process 0 listens") as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with wait_until(connect, "process 0 listens") as ended:
                ended.sendall(b'{"index": 1, "count": 3, "host": "a", "facts": {}}\n')
        # Connections are accepted in the order in which they were made.
        meetings = [first.result() for first in (first, join(1), join(2))]
    leave(meetings)


def test_process_0_that_cannot_be_reached_or_cannot_listen_is_an_error():
    place = Place(f"127.0.0.1:{free_port()}", 2, 1)
    with pytest.raises(InputError, match=r"process 0 cannot be reached at 127.* within 1 s \(Conn"):
        Meeting(place, {}, seconds=1, heartbeat=10)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = Place(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0)
        with pytest.raises(InputError, match=r"process 0 cannot listen at 127.*: Address already"):
            Meeting(place, {}, seconds=1, heartbeat=10)


class ExitedError(OSError):
    """Raised in place of the end of a process; as an OSError, it ends the thread that listens."""


@pytest.fixture
def ends(monkeypatch) -> list[int]:
    """Return a list of the statuses with which processes would have ended."""
    monkeypatch.setattr(meeting, "LEAVE_SECONDS", 0.2)
    statuses: list[int] = []

    def exit_now(message: str, status: int) -> None:
        statuses.append(status)
        raise ExitedError

    monkeypatch.setattr(lockstep, "exit_now", exit_now)
    return statuses


@contextlib.contextmanager
def in_lockstep(count: int) -> Iterator[list[Lockstep]]:
    members = [Lockstep(joined) for joined in meet(count)]
    yield members
    together(count, lambda index: members[index]._leave())


class Devices:
    """Imitates the devices: `run` waits for an earlier call, as the training loop does.

    That call is complete once all processes have begun it.
    """

    def __init__(self, count: int):
        self._begun, self._changed = [0] * count, threading.Condition()

    def run(self, index: int) -> None:
        with self._changed:
            self._begun[index] += 1
            self._changed.notify_all()
            reached = self._begun[index] - IN_FLIGHT
            assert self._changed.wait_for(lambda: min(self._begun) >= reached, SECONDS)


@pytest.mark.parametrize("seed", range(4))
def test_signals_take_effect_before_the_same_call(seed):
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    signals = {rng.randrange(count): rng.randint(0, 60) for _ in range(rng.randint(1, 3))}
    devices = Devices(count)
    with in_lockstep(count) as members:

        def train(index: int) -> list[tuple[int, list[int]]]:
            own, calls = members[index], 0
            seen = []
            while not own._stops:
                if calls == signals.get(index):
                    own._received.append(15)
                own.begin_call()
                seen.append((calls, list(own._stops)))
                devices.run(index)
                calls += 1
            return seen

        results = together(count, train)
    assert all(result == results[0] for result in results), results
    assert results[0][-1][0] >= min(signals.values())
    assert set(results[0][-1][1]) == {15}


def test_a_failed_save_is_noticed_before_the_same_call():
    devices = Devices(3)
    with in_lockstep(3) as members:

        def train(index: int) -> list[int]:
            own, noticed, step = members[index], [], -1
            # The news may take any number of steps, and must not be noticed twice after that.
            while (step := step + 1) < (noticed or [step])[0] + 50:
                own.begin_call(save_failed=step >= 10 * (index + 1) and not noticed)
                if own.save_failed:
                    noticed.append(step)
                    own.count_save()
                devices.run(index)
            return noticed

        results = together(3, train)
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 1
    assert results[0][0] >= 10


@pytest.mark.parametrize("seed", range(8))
def test_an_error_that_is_known_early_ends_all_processes_at_the_same_call(seed, ends):
    rng = random.Random(seed)
    count, failing, first = rng.randint(2, 4), rng.randrange(2), rng.randint(5, 20)
    devices = Devices(count)
    with in_lockstep(count) as members:

        def train(index: int) -> tuple[int, str, bool]:
            own = members[index]
            for step in range(60):
                if index == failing and step == first:
                    own.announce_bad_batch(InputError("record 7 is bad"), first + AHEAD)
                try:
                    if step % 5 == 0:  # a validation
                        with own.call():
                            devices.run(index)
                    own.begin_call(batch=step)
                except (InputError, PeerError) as error:
                    kinds = isinstance(error, PeerError) is (index != failing)
                    return step, str(error), kinds and own.can_save(error)
                devices.run(index)
                own.complete_call()
            raise AssertionError("nothing was raised")

        results = together(count, train)
        names = members[0].meeting.name(failing)
    steps, lines, saved = zip(*results, strict=True)
    assert set(steps) == {first + AHEAD}
    assert all(saved)
    for index, line in enumerate(lines):
        assert line == ("" if index == failing else f"{names}: ") + "record 7 is bad"
    assert not ends


def test_an_error_without_warning_ends_the_processes_that_have_gone_on(ends, capsys):
    gone_on = threading.Barrier(3)
    with in_lockstep(3) as members:

        def train(index: int) -> bool | None:
            own = members[index]
            for _ in range(10 + (index != 1)):
                with own.call():
                    pass
            gone_on.wait(SECONDS)
            return own.can_save(ValueError("not on the others")) if index == 1 else None

        assert together(3, train) == [None, False, None]
        wait_until(lambda: len(ends) == 2, "the other processes end")
        assert members[1].broken
        name = members[0].meeting.name(1)
    assert ends == [1, 1]
    line = f"error: {name}: ValueError: not on the others; {lockstep.ADVICE}"
    assert capsys.readouterr().err.split("\n").count(line) == 2


def test_an_error_inside_a_call_ends_the_processes_that_have_begun_it(ends):
    with in_lockstep(2) as members:

        def train(index: int) -> bool | None:
            own = members[index]
            with own.call():
                pass
            own.begin_call()
            return own.can_save(MemoryError()) if index == 1 else None

        assert together(2, train) == [None, False]
        wait_until(lambda: ends == [1], "the other process ends")


def test_a_bad_batch_that_is_not_needed_ends_nothing(ends):
    with in_lockstep(2) as members:

        def train(index: int) -> None:
            own = members[index]
            if index == 1:
                own.announce_bad_batch(InputError("record 7 is bad"), 3)
            for batch in range(3):
                own.begin_call(batch=batch)
                own.complete_call()
            own.finish()

        assert together(2, train) == [None, None]
    assert not ends


def test_an_error_where_all_processes_stand_lets_them_all_save(ends):
    with in_lockstep(3) as members:
        barrier = threading.Barrier(3)

        def train(index: int) -> tuple[str, bool]:
            own = members[index]
            for _ in range(5):
                with own.call():
                    barrier.wait(SECONDS)
            try:
                if index == 2:
                    raise ValueError("only here")
                wait_until(lambda: own._news, "the news")
                own.begin_call()
            except Exception as error:
                savable = own.can_save(error)
                with own.call():  # to save; it must not raise the error again
                    return str(error), savable and not own.broken
            raise AssertionError("nothing was raised")

        results = together(3, train)
        line = f"{members[0].meeting.name(2)}: ValueError: only here"
    assert results == [(line, True), (line, True), ("only here", True)]
    assert not ends


# For each process, what a call raises in it; then the class and line that all others raise.
OUTCOMES = {
    "nothing": ([None, None, None], None, ""),
    "input": ([None, InputError("full disk"), None], InputError, "process 1 ({}): full disk"),
    "all": ([InputError(f"disk {n}") for n in range(3)], InputError, "disk 0"),
    "stopped": ([StoppedError("lost the lock"), None, None], StoppedError, "process 0 ({}): lost"),
    "unexpected": ([None, InputError("a"), KeyError("b")], PeerError, "process 2 ({}): KeyError"),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_call_fails_in_all_processes_or_in_none(name, ends):
    errors, kind, line = OUTCOMES[name]

    def call(index: int) -> int:
        if (error := errors[index]) is not None:
            raise error
        return index

    with in_lockstep(3) as members:
        results = together(3, lambda index: members[index].together(lambda: call(index)))
        host = members[0].meeting.hosts[0]
    for index, result in enumerate(results):
        if kind is None:
            assert result == index
        elif isinstance(errors[index], KeyError):
            assert result is errors[index]
        else:
            assert type(result) is kind
            assert str(result).startswith(line.format(host))
    assert not ends


def test_damage_keeps_the_step_and_values_are_shared():
    with in_lockstep(2) as members:

        def restore(index: int) -> None:
            if index == 1:
                raise DamagedError("step_9 is damaged", "/m/step_9", "step_6")

        results = together(2, lambda i: members[i].together(lambda: restore(i)))
        values = together(2, lambda index: members[index].values({"index": index}))
        called: list[int] = []
        once = together(2, lambda index: members[index].once(lambda: called.append(index) or "a"))
    for error in results:
        assert isinstance(error, DamagedError)
        assert (error.step, error.previous) == ("/m/step_9", "step_6")
    assert values == [[{"index": 0}, {"index": 1}]] * 2
    assert (once, called) == (["a", "a"], [0])


def test_a_call_that_the_others_never_finish_ends_this_process(monkeypatch, ends):
    monkeypatch.setattr(lockstep, "SECONDS_TO_AGREE", 0.5)
    with in_lockstep(2) as members:

        def fail() -> None:
            raise InputError("cannot read")

        with pytest.raises(PeerError, match="cannot read") as caught:
            members[1].together(fail, patience=0.5)
        assert members[1].broken
        assert not members[1].can_save(caught.value)
        with pytest.raises(ExitedError):
            members[1].exit(caught.value)
        wait_until(lambda: ends == [2, 2], "both processes end")


def test_processes_end_together_after_an_error_in_one(ends, capsys):
    with in_lockstep(3) as members:

        def end(index: int) -> None:
            try:
                if index == 1:
                    raise StoppedError("loss is nan")
                members[index].finish()
            except Exception as error:
                with pytest.raises(ExitedError):
                    members[index].exit(error)

        assert together(3, end) == [None] * 3
    assert ends == [1, 1, 1]
    name = members[0].meeting.name(1)
    assert capsys.readouterr().err == f"error: {name}: loss is nan\n"


def test_messages_that_are_too_long_or_damaged_end_the_connection(monkeypatch):
    monkeypatch.setattr(meeting, "MOST_BYTES", 100)
    for sent in (b"x" * 200, b"[1]\n", b"not json\n"):
        here, there = socket.socketpair()
        with here, there:
            there.sendall(sent)
            with pytest.raises(OSError, match="message"):
                next(meeting._Lines(here).read())
