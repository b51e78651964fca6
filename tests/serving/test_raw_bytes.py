"""Bytes that are no valid HTTP, or come at the wrong time: none puts a traceback in the log."""

import contextlib
import http.client
import itertools
import json
import logging
import random
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from mesh_transformer.serving import server
from tests.support.live_server import SECONDS, Live, connected, post, wait_for

pytest_plugins = ["tests.support.live_fixtures"]

CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
WITH_BODY = b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
NO_SIZE = b"no size\r\n"
STREAM = {"prompt": "Hello", "max_tokens": 20, "seed": 1, "stream": True}


@pytest.fixture
def errors(live) -> Iterator[list[logging.LogRecord]]:
    """The errors that the server and its event loop log.  There must be none."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: records.append(record)
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio", "mesh_transformer")]
    for logger in loggers:
        logger.addHandler(handler)
    yield records
    for logger in loggers:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == []


def all_received(connection: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            received += part
    return bytes(received)


def settled(live: Live) -> None:
    """Wait until all connections but that of `live.http` are closed, and nothing is generated."""
    live.http.close()
    live.http = type(live.http)(base_url=live.url, timeout=SECONDS)
    wait_for(lambda: not live.server.server_state.connections)
    wait_for(lambda: not live.server.server_state.tasks)
    wait_for(lambda: not live.engine.active and not live.engine.waiting)


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "apart"])
@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (CHUNKED, [400]),
        (CHUNKED.replace(b"\r\n", b"\r\nExpect: 100-continue\r\n", 1), [400]),
        (CHUNKED.replace(b"application/json", b"text/plain"), [415]),
        (WITH_BODY, [200]),
        (WITH_BODY.replace(b"/health", b"/other"), [404]),
        (WITH_BODY.replace(b"\r\n", b"\r\nConnection: close\r\n", 1), [200]),
        (GET + WITH_BODY, [200, 200]),
    ],
    ids=["read", "expected", "refused", "unread", "no path", "close", "second"],
)
def test_a_body_with_an_invalid_chunk_ends_the_connection(live, errors, head, expected, apart):
    with connected(live) as connection:
        connection.sendall(head + (b"" if apart else NO_SIZE))
        begin = b""
        if apart and expected != [400]:  # the response has begun, and is complete
            while statuses(begin) != expected:
                begin += connection.recv(1)
        elif apart and b"Expect" in head:
            while not begin.endswith(b"\r\n\r\n"):
                begin += connection.recv(1)
            begin = b""
        connection.sendall(NO_SIZE if apart else b"")
        received = begin + all_received(connection)
    # Bytes that come at once are read before the answer to the request is made.
    assert statuses(received) == expected if apart else statuses(received)[-1] == 400
    settled(live)


def test_what_follows_the_last_request_of_a_connection_is_ignored(live, errors):
    last = post(STREAM).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    expected = None
    for more in (b"", b"\r\n", NO_SIZE, GET):
        live.network.allowed.clear()
        with connected(live) as connection:
            connection.sendall(last)
            wait_for(lambda: live.network.waits)
            connection.sendall(more)
            live.network.allowed.set()
            received = all_received(connection)
        assert statuses(received) == [200]
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        received = re.sub(rb'"(id|created)": [^,]*', b"", received)
        expected = expected or received.partition(b"data: ")[2]
        assert received.partition(b"data: ")[2] == expected
    settled(live)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff\r\n\r\n",
        NO_SIZE + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Header\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
    ids=lambda garbage: ascii(garbage[:60]),
)
def test_a_request_on_a_kept_connection_that_is_invalid_is_refused(live, errors, garbage):
    with connected(live) as connection:  # after the answer
        connection.sendall(GET)
        with http.client.HTTPResponse(connection) as response:
            response.begin()
            response.read()
        connection.sendall(garbage)
        assert statuses(all_received(connection)) == [400]
    with connected(live) as connection:  # together with the request
        connection.sendall(GET + post(STREAM) + garbage)
        assert statuses(all_received(connection)) == [200, 200, 400]
    with connected(live) as connection:  # while the answer is streamed
        connection.sendall(post(STREAM))
        received = connection.recv(1)
        connection.sendall(garbage)
        assert statuses(received + all_received(connection)) == [200, 400]
    settled(live)


HOSTS = ["localhost", "[x", "", "a b", "localhost:x", "[::1]:99999", "é"]
TARGETS = ["/other", "/health/", "*", "//[", "[x", "/%ff%00", "http://[/", "?"]


def test_a_strange_target_or_host_is_refused(live, serve, errors, tmp_path):
    (tmp_path / "keys").write_text("right\n")
    servers = [live, serve(keys=str(tmp_path / "keys"))]
    for server_of, host, target in itertools.product(servers, HOSTS, TARGETS):
        with connected(server_of) as connection:
            head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode())
            (status,) = statuses(all_received(connection))
        assert status in (307, 400, 404, 421), (host, target)


PIECES = [
    *(b"GET ", b"POST ", b"HEAD ", b"OPTIONS ", b"CONNECT ", b"PUT ", b"\xff ", b" "),
    *(b"/", b"/health", b"/v1/completions", b"/v1/models/", b"*", b"/%ff", b"[x", b"http://[a"),
    *(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b" HTTP/2.0\r\n", b"\r\n"),
    *(b"Host: localhost\r\n", b"Host: [x\r\n", b"Host:\r\n", b"Bad\r\n", b"X: \xff\r\n"),
    *(b"Content-Length: 0\r\n", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n"),
    *(b"Connection: close\r\n", b"Connection: upgrade\r\n", b"Connection: keep-alive\r\n"),
    *(b"Upgrade: websocket\r\n", b"Upgrade: h2c\r\n", b"Expect: 100-continue\r\n"),
    *(b"Content-Type: application/json\r\n", b"Origin: https://page.example\r\n"),
    *(b"Access-Control-Request-Method: POST\r\n", b"Authorization: \xff\r\n"),
    *(b"\r\n", b"\r\n\r\n", b"2\r\n{}\r\n", b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"zz\r\n", b"\n"),
    *(b"{}", b"\x16\x03\x01", b"\x00" * 9, b"A" * 70_000),
]


def mutated(rng: random.Random, valid: list[bytes]) -> list[bytes]:
    """Return the parts of a connection's bytes: requests with pieces put in, lost or changed."""
    data = bytearray(b"".join(rng.choices(valid, k=rng.randrange(1, 4))))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            data[at:at] = rng.choice(PIECES)
        elif kind == 1:
            del data[at : at + rng.choice([1, 2, 9, 40])]
        elif kind == 2 and at < len(data):
            data[at] = rng.randrange(256)
        else:
            line = data.rfind(b"\r\n", 0, at) + 2 if data.rfind(b"\r\n", 0, at) >= 0 else 0
            data[line:line] = rng.choice(PIECES)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(3)))
    edges = [0, *cuts, len(data)]
    return [bytes(data[begin:end]) for begin, end in itertools.pairwise(edges)]


def some_requests() -> list[bytes]:
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in (b'{"prompt":', b' "a"}')]
    whole: dict[str, Any] = {"prompt": "a", "max_tokens": 3, "echo": True, "logprobs": 2}
    return [
        GET,
        GET.replace(b"1.1", b"1.0"),
        GET.replace(b"GET", b"HEAD"),
        GET.replace(b"/health", b"/"),
        GET.replace(b"/health", b"/metrics"),
        post(STREAM),
        post(whole),
        post(whole).replace(b"\r\n", b"\r\nExpect: 100-continue\r\n", 1),
        post(STREAM).replace(b"\r\n", b"\r\nConnection: close\r\n", 1),
        CHUNKED + b"".join(chunks) + b"0\r\n\r\n",
        WITH_BODY + b"".join(chunks) + b"0\r\n\r\n",
        b"OPTIONS /complete HTTP/1.1\r\nHost: localhost\r\nOrigin: https://page.example\r\n"
        b"Access-Control-Request-Method: POST\r\n\r\n",
    ]


@pytest.mark.quick(5)
@pytest.mark.parametrize("seed", range(10))
def test_no_bytes_cause_a_traceback(live, errors, monkeypatch, seed):
    monkeypatch.setattr(server, "UNREAD_SECONDS", 0.05)
    rng, valid = random.Random(seed), some_requests()
    for _ in range(60):
        parts, ending = mutated(rng, valid), rng.randrange(4)
        with connected(live) as connection, contextlib.suppress(OSError):
            for part in parts:
                connection.sendall(part)
                if rng.random() < 0.3:
                    connection.settimeout(rng.choice([0.001, 0.02]))
                    with contextlib.suppress(TimeoutError):
                        connection.recv(2**16)
                    connection.settimeout(SECONDS)
            if ending == 0:
                connection.shutdown(socket.SHUT_WR)
                all_received(connection)
            elif ending == 1:  # closes with a reset
                linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        assert not errors, (parts, ending)
    settled(live)
    assert not errors
    with connected(live) as connection:
        connection.sendall(post(STREAM).replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        assert statuses(all_received(connection)) == [200]
    assert json.loads(live.http.get("/health").text)["status"] == "ok"
