"""Processes of a run that no driver has started find each other; threads imitate them."""

import contextlib
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mesh_transformer.pod.meeting import (
    MOST_BYTES,
    Connection,
    Place,
    accept_others,
    connect_to_leader,
)
from mesh_transformer.util import InputError
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


def connect(place: Place, facts: dict[str, Any], seconds: float = SECONDS) -> Any:
    """Return what this process gets: process 0 the others, and another process its connection."""
    own = connect_to_leader if place.index else accept_others
    return own(place, facts, seconds=seconds, heartbeat=10)


def meet(processes: int, host: str = "127.0.0.1", **changes: Any) -> list[Any]:
    """Return what each process gets; `changes` are functions index -> argument."""
    address = f"{host}:{free_port()}"

    def join(index: int) -> Any:
        arguments: dict[str, Any] = {"address": address, "count": processes, "index": index}
        arguments["facts"] = {"lr": 0.1}
        arguments |= {name: change(index) for name, change in changes.items()}
        facts, seconds = arguments.pop("facts"), arguments.pop("seconds", SECONDS)
        return connect(Place(**arguments), facts, seconds)

    return together(processes, join)


def close(met: list[Any]) -> None:
    for connection in (*[peer.connection for peer in met[0][1]], *[own for own, _ in met[1:]]):
        connection.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_process_0_exchanges_messages_with_each_other_one(host):
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    met = meet(4, host)
    peers = met[0][1]
    assert [hosts for _, hosts in met[1:]] == [[socket.gethostname()] * 4] * 3
    for index, peer in enumerate(peers, start=1):
        connection, _ = met[index]
        for number in range(20):
            peer.connection.send({"to": index, "number": number})
            assert connection.receive() == {"to": index, "number": number}
            connection.send([index, number])
            assert peer.connection.receive() == [index, number]
    close(met)
    with pytest.raises(OSError, match="closed"):
        peers[0].connection.receive()


def test_process_0_knows_the_addresses_at_which_processes_reach_each_other():
    for host in ("127.0.0.1", "127.0.0.2", own_address()):
        met = meet(3, host)
        address, peers = met[0]
        assert {address, *[peer.address for peer in peers]} == {host}
        close(met)


def own_address() -> str:
    """Return an address of this machine that is not a loopback address, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return probe.getsockname()[0]
    return "127.0.0.1"


def refused(line: str, **changes: Any) -> None:
    """Check that all processes get an error that begins with this line."""
    results = meet(3, **changes)
    assert all(isinstance(result, InputError) for result in results), results
    assert {str(result)[: len(line)] for result in results} == {line}


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


STRANGE = (
    [],
    np.arange(3),
    {"index": 1},
    {"index": float("inf"), "count": 3, "host": "a", "facts": {}},
    {"index": 1, "count": 3, "host": "a", "facts": {"lr": np.arange(3)}},
    {"index": 1, "count": 3, "host": "a", "facts": {"lr": float("nan")}},
)


def test_strangers_are_ignored_and_a_restarted_process_is_accepted():
    port = free_port()
    with ThreadPoolExecutor(3) as pool:

        def join(index: int) -> Any:
            return pool.submit(connect, Place(f"127.0.0.1:{port}", 3, index), {})

        first = join(0)

        def reach() -> socket.socket | None:
            with contextlib.suppress(OSError):
                return socket.create_connection(("127.0.0.1", port))
            return None

        with wait_until(reach, "process 0 listens") as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            for hello in STRANGE:
                strange = Connection(wait_until(reach, "process 0 listens"), 10)
                strange.send(hello)
            ended = wait_until(reach, "process 0 listens")
            hello = {"index": 1, "count": 3, "host": "a", "facts": {}}
            killed = Connection(ended, 10)
            killed.send(hello)
            killed.close()
        # Connections are accepted in the order in which they were made.
        met = [each.result() for each in (first, join(1), join(2))]
    close(met)


def test_a_process_does_not_wait_forever_for_the_start():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = Place(f"127.0.0.1:{silent.getsockname()[1]}", 2, 1)
        with pytest.raises(InputError, match=r"127.* has not begun the run within 1 s; see its"):
            connect(place, {}, 1)


def test_process_0_that_cannot_be_reached_or_cannot_listen_is_an_error():
    place = Place(f"127.0.0.1:{free_port()}", 2, 1)
    with pytest.raises(InputError, match=r"process 0 cannot be reached at 127.* within 1 s \(Conn"):
        connect(place, {}, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = Place(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0)
        with pytest.raises(InputError, match=r"process 0 cannot listen at 127.*: Address already"):
            connect(place, {}, 1)


def test_messages_that_are_too_long_or_damaged_end_the_connection():
    long = (MOST_BYTES + 1).to_bytes(8, "big")
    for sent in (long, b"GET / HTTP/1.1\r\n\r\n", bytes(7) + b"\3\xc7\1\2", bytes(7) + b"\1\xc1"):
        here, there = socket.socketpair()
        with there:
            there.sendall(sent)
            connection = Connection(here, 10)
            there.shutdown(socket.SHUT_WR)
            with pytest.raises(OSError, match=r"message|closed"):
                connection.receive(MOST_BYTES)
            connection.close()
