"""Requests that the server refuses or ends, overload, and failures of the network."""

import asyncio
import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import ClientDisconnect

from mesh_transformer.serving import requests, server
from mesh_transformer.serving.app import unless_disconnected
from mesh_transformer.serving.requests import CompletionRequest, ContextRequest, Keys
from mesh_transformer.serving.server import TimeoutProtocol
from mesh_transformer.util import InputError
from tests.support.fake_network import FakeNetwork
from tests.support.hostile_requests import BODIES, WRONG, WRONG_CONTEXT
from tests.support.live_server import SECONDS, Live, check_error, connected, held, post, wait_for

pytest_plugins = ["tests.support.live_fixtures"]


def check_message(error: dict[str, Any]) -> None:
    """Check that an error about a body is one line of our own that says what to send."""
    message = error["message"]
    assert message.isprintable()
    assert len(message) < 330
    match = re.fullmatch(r"(.*?): .+?(?:, expected |; | is outside ).+", message)
    assert match
    assert match[1] == (error["param"] or "the body")
    assert not re.search(
        "Input should|inputs|permitted|required|pydantic|line 1 col.*line", message
    )


@pytest.mark.quick(77)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: ascii(wrong)[:60])
@pytest.mark.parametrize("stream", [False, True])
def test_error_names_the_wrong_field(live, wrong, stream):
    body = json.dumps({"stream": stream} | wrong).replace("Infinity", "1e400")
    status, error = live.refused(body)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] in wrong
    check_message(error)


@pytest.mark.parametrize("wrong", WRONG_CONTEXT, ids=str)
def test_error_of_complete_names_the_wrong_field(live, wrong):
    status, error = live.refused(wrong, "/complete")
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == ([*wrong] or ["context"])[-1]
    check_message(error)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: str(body[:24]))
@pytest.mark.parametrize("path", ["/v1/completions", "/complete"])
def test_body_that_is_no_valid_request_is_refused(live, body, path):
    status, error = live.refused(body, path)
    assert (status, error["type"]) == (400, "invalid_request_error")
    check_message(error)


def test_errors_show_what_was_found_and_expected(live):
    for body, message in [
        ({"top_k": "5"}, 'top_k: found "5", expected a whole number from 0 to 2147483647'),
        ({"top_p": 2}, "top_p: found 2, expected a number from 0 to 1"),
        ({"stop": [None]}, "stop: found [null], expected a text of 1 to 256 characters, or a list"),
        ({"beams": 2}, "beams: found an unknown key, expected only model, temperature, top_p,"),
        ({"n": 2, "best_of": 3}, "best_of: found 3, expected the value of n (2), or no value"),
        ([1], 'the body: found [1], expected a JSON object such as {"prompt": "Hello",'),
        ('{"a": NaN}', "the body: found no valid JSON at line 1 column 7, expected a JSON object"),
        ("[" * 999, "the body: found JSON nested too deeply at line 1 column 202, expected"),
    ]:
        assert live.refused(body)[1]["message"].startswith(message)
    for body, message in [
        ({}, "context: found no value, expected a text"),
        ({"context": None}, "context: found null, expected a text"),
    ]:
        assert live.refused(body, "/complete")[1]["message"] == message


def test_null_is_the_default_of_every_optional_field(live):
    defaults = {"seed": 3}
    for key in {*CompletionRequest.model_fields, "beams"} - {"seed"}:
        assert live.ask(**defaults, **{key: None})["choices"] == live.ask(**defaults)["choices"]
    assert live.ask(seed=None)["choices"]
    assert live.ask(stream_options={"include_usage": None})["choices"]
    defaults = {"context": "Hello", "seed": 3}
    for key in {*ContextRequest.model_fields, "beams"} - {"context", "seed"}:
        answers = [
            live.http.post("/complete", json=body).json()["completion"]
            for body in (defaults, defaults | {key: None})
        ]
        assert answers[0] == answers[1]


def test_long_bodies_are_refused(live):
    long = b'{"prompt": "' + b"a" * 3 * 2**20 + b'"}'
    assert live.refused(long)[0] == 413
    chunks = (long[begin : begin + 65536] for begin in range(0, len(long), 65536))
    answer = live.http.post(
        "/v1/completions", content=chunks, headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, check_error(answer)["type"]) == (413, "invalid_request_error")
    status, error = live.refused({"prompt": "a " * 500000})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "1000000 characters" in error["message"]


def test_wrong_media_type_path_method_or_model_is_refused(live):
    status, error = live.refused("{}", headers={"Content-Type": "text/plain"})
    assert status == 415
    assert error["message"] == "Content-Type: found text/plain, expected application/json"
    answer = live.http.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.headers["Allow"] == "POST"
    assert check_error(answer)["message"] == "GET /v1/completions: expected the method POST"
    assert live.http.get("/v1/models/other").status_code == 404
    assert live.http.get("/v1/models/fake").json()["id"] == "fake"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_chat_is_refused_with_the_path_for_prompts(live, serve, tmp_path, path):
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]}
    status, error = live.refused(body, path)
    assert (status, error["param"], error["code"]) == (404, "model", "not_a_chat_model")
    assert error["message"] == (
        "fake is a base model without a chat template; send a prompt to POST /v1/completions"
    )
    assert live.refused(b"not read", path)[1] == error
    (tmp_path / "keys").write_text("right\n")
    assert serve(keys=str(tmp_path / "keys")).refused(body, path)[0] == 401


def test_openai_client_explains_that_the_model_cannot_chat(live):
    message: Any = {"role": "user", "content": "Hello"}
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match=r"fake is a base model .* /v1/completions"):
            client.chat.completions.create(model="fake", messages=[message])
        with pytest.raises(openai.NotFoundError, match="/v1/embeddings: not served"):
            client.embeddings.create(model="fake", input="Hello")


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/images", "/v1/moderations", "/v1/images/generations", "/v1/edits"),
        *("/v1/audio/speech", "/v1/fine_tuning/jobs", "/v1/engines", "/chat"),
        "/a%0Ab" + "%E2%80%A8" * 1000,
    ],
)
def test_other_paths_are_answered_with_those_that_are_served(live, path):
    for method in ("GET", "POST"):
        answer = live.http.request(method, path)
        message = check_error(answer)["message"]
        assert answer.status_code == 404
        assert message.isprintable()
        assert message.startswith(f"{method} {path[:2]}")
        assert message.endswith(
            ": not served, expected one of GET /, GET /health, GET /openapi.json, GET /metrics, "
            "GET /v1/models, GET /v1/models/{name}, POST /v1/completions, POST /complete"
        )


def test_only_allowed_origins_get_cors_headers(live):
    headers = {"Access-Control-Request-Method": "POST"}
    for origin, allowed in [("https://page.example", True), ("https://other.example", False)]:
        answer = live.http.options("/complete", headers=headers | {"Origin": origin})
        assert ("access-control-allow-origin" in answer.headers) == allowed


def test_slow_body_and_slow_head_time_out(serve, monkeypatch):
    default = server.HEAD_SECONDS
    monkeypatch.setattr(requests, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)
    live = serve()

    def slow() -> Iterator[bytes]:
        for _ in range(20):
            yield b" "
            time.sleep(0.05)

    answer = live.http.post(
        "/v1/completions", content=slow(), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 408
    check_error(answer)
    with connected(live) as connection:
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            for letter in b"GET /health HTTP/1.1":
                connection.send(bytes([letter]))
                time.sleep(0.05)
        assert connection.recv(100) == b""
        assert time.monotonic() - begin < default


def test_an_idle_connection_is_kept_longer_than_clients_reuse_it(serve, monkeypatch):
    assert min(server.IDLE_SECONDS, 60) > httpx.Limits().keepalive_expiry  # 5 s in httpx
    live = serve()

    def ask(connection: socket.socket) -> None:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with http.client.HTTPResponse(connection) as response:
            response.begin()
            assert response.status == 200
            response.read()  # the rest may arrive later than the head

    with connected(live) as connection:
        ask(connection)
        (served,) = live.server.server_state.connections
        wait_for(lambda: served._awaited == "next")
        remaining = served._deadline.when() - served.loop.time()
        assert remaining > server.IDLE_SECONDS - SECONDS
        assert served.timeout_keep_alive_task.when() >= served._deadline.when() - SECONDS
        ask(connection)
        monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
        connection.sendall(b"GET")  # from here on, a slow head
        assert connection.recv(100) == b""


def all_received(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(2**16), b""))


def test_a_long_head_is_refused_and_the_client_can_read_the_error(live):
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 2**20
    with connected(live) as connection:
        connection.sendall(head)
        answer, _, body = all_received(connection).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")
    message = "the head is longer than 65536 bytes; send a shorter one"
    assert json.loads(body)["error"]["message"] == message
    # The same in many short lines, and in the path.
    for part in (b"X: a\r\n" * 2**17, b"\r\n"):
        with connected(live) as connection:
            path = b"/" + b"a" * (2**20 if part == b"\r\n" else 0)
            connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + part)
            assert all_received(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.quick(1)
@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"{}\n\n"])
def test_what_is_no_http_is_refused(live, sent):
    with connected(live) as connection:
        connection.sendall(sent)
        answer = all_received(connection)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"message":"no valid HTTP request"' in answer
        # The rest is read for a short time.
        wait_for(lambda: not drip([connection]))


def drip(connections: list[socket.socket]) -> list[socket.socket]:
    """Send a byte on each connection; returns those that the server has not closed."""
    alive = []
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(b"x")
            alive.append(connection)
    return alive


UNREAD = [
    # These are answered before the body is read: one has no key, the other path takes no body.
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
]


@pytest.mark.parametrize("head", UNREAD, ids=["refused", "answered"])
def test_connection_with_an_unread_body_is_closed(serve, monkeypatch, tmp_path, head):
    monkeypatch.setattr(server, "UNREAD_SECONDS", 0.2)
    (tmp_path / "keys").write_text("right\n")
    live = serve(keys=str(tmp_path / "keys"))
    with contextlib.closing(connected(live)) as connection:
        connection.sendall(head + b"Content-Length: 1000000000\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 ")
        wait_for(lambda: not drip([connection]))


def test_connection_with_an_unread_answer_is_closed(serve, monkeypatch):
    monkeypatch.setattr(server, "READ_SECONDS", 0.2)
    live = serve(network={"window": 2048})
    with contextlib.closing(socket.socket()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(live.address)
        body = {"prompt": [464] * 2000, "n": 16, "max_tokens": 1, "echo": True, "logprobs": 5}
        connection.sendall(post(body))
        wait_for(lambda: not live.server.server_state.connections)


def test_slow_clients_do_not_block_others(serve, monkeypatch):
    live = serve()
    monkeypatch.setattr(TimeoutProtocol, "most", 20)
    with contextlib.ExitStack() as stack:
        slow = []
        for number in range(60):
            slow.append(stack.enter_context(contextlib.closing(connected(live))))
            slow[-1].sendall([b"POST /v1/completions HTTP/1.1\r\n", UNREAD[1]][number % 2])
            if number % 10 == 9:
                # On a new connection, because one that is kept open may be closed to make room.
                assert httpx.get(f"{live.url}/health", timeout=SECONDS).status_code == 200
                # One more may just have been accepted, before room was made for it.
                assert len(live.server.server_state.connections) <= 20 + 1
    assert live.ask(prompt="x", max_tokens=2)["choices"]


def test_connection_that_has_been_slow_longest_makes_room_at_once():
    """Each new connection closes another one, although a close is only reported later."""
    ended: list[float] = []

    class Waiting:
        def __init__(self, since: float):
            self._awaited, self._since = "head", since
            self.transport = SimpleNamespace(abort=lambda: ended.append(since))

    new = SimpleNamespace(connections={Waiting(since) for since in (3.0, 1.0, 2.0)})
    TimeoutProtocol._make_room(new)
    TimeoutProtocol._make_room(new)
    assert ended == [1.0, 2.0]
    assert len(new.connections) == 1


def test_work_for_a_disconnected_client_is_cancelled():
    cancelled = []

    class Gone:
        async def receive(self):
            return {"type": "http.disconnect"}

    async def work():
        try:
            await asyncio.sleep(SECONDS)
        except asyncio.CancelledError:
            cancelled.append("work")
            raise

    async def answer():
        with pytest.raises(ClientDisconnect):
            await unless_disconnected(Gone(), work())
        await asyncio.sleep(0)
        # Checked before the loop ends, which cancels all remaining tasks.
        assert cancelled == ["work"]

    asyncio.run(answer())


def test_requests_cut_off_by_the_shutdown_get_an_error(serve, capsys):
    live = serve(drain_seconds=1)
    started, call, held_back = threading.Event(), live.network.call, []

    def second_decode_waits(*what):
        if ("decode", 4) in live.network.calls and not held_back:
            held_back.append(live.network.allowed.clear())
        call(*what)

    live.network.call = second_decode_waits

    def streamed() -> list[str]:
        body = {"prompt": "a", "max_tokens": 400, "stream": True}
        with live.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            started.set()
            return [first, *filter(None, lines)]

    with ThreadPoolExecutor(2) as pool:
        stream = pool.submit(streamed)
        assert started.wait(SECONDS)
        wait_for(lambda: held_back)  # before that, a free row could take the next request at once
        whole = pool.submit(live.http.post, "/v1/completions", json={"prompt": "b"})
        wait_for(lambda: live.engine.waiting == 1)
        live.server.should_exit = True
        answer = whole.result(SECONDS)
        assert answer.status_code == 503
        assert check_error(answer)["message"] == "the server has stopped"
        assert "the server has stopped" in stream.result(SECONDS)[-1]
    wait_for(lambda: not live.thread.is_alive())
    assert "Traceback" not in capsys.readouterr().err


def test_unknown_host_names_are_refused_by_a_server_without_keys(serve, tmp_path):
    (tmp_path / "keys").write_text("right\n")
    plain, named = serve(), serve(hosts=["model.example"])
    locked = serve(keys=str(tmp_path / "keys"))
    for host, accepted in [
        ("127.0.0.1:80", True),
        ("[::1]:5000", True),
        ("10.1.2.3", True),
        ("LocalHost:1", True),
        ("a.localhost", True),
        (socket.gethostname(), True),
        ("evil.example", False),
        ("evil.example:5000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("model.example", False),
        ("", False),
    ]:
        answer = plain.http.get("/health", headers={"Host": host})
        assert answer.status_code == (200 if accepted else 421), host
        if not accepted:
            assert "--allow-host" in check_error(answer)["message"]
    assert named.http.get("/health", headers={"Host": "Model.Example:5000"}).status_code == 200
    # A health check over HTTP/1.0 sends no Host; browsers always send one.
    with connected(plain) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in connection.recv(100)
    # With keys, any host name is allowed, because a foreign page does not know the key.
    assert locked.http.get("/health", headers={"Host": "evil.example"}).status_code == 200


def test_api_description_requires_a_key_if_there_are_keys(live, serve, tmp_path):
    (tmp_path / "keys").write_text("right\n")
    locked = serve(keys=str(tmp_path / "keys"))
    assert "/v1/completions" in live.http.get("/openapi.json").json()["paths"]
    for path in ("/openapi.json", "/v1/models", "/v1/models/fake"):
        assert locked.http.get(path).status_code == 401
        headers = {"Authorization": "Bearer right"}
        assert locked.http.get(path, headers=headers).status_code == 200


def test_a_key_file_may_begin_with_a_byte_order_mark(serve, tmp_path):
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbfright\n")
    live = serve(keys=str(tmp_path / "keys"))
    headers = {"Authorization": "Bearer right"}
    assert live.http.get("/v1/models", headers=headers).status_code == 200


def test_unusable_key_files_are_input_errors(tmp_path):
    (tmp_path / "empty").write_text("\n# none\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, message in [
        ("empty", "contains no key"),
        ("absent", "cannot be read"),
        ("bytes", "read"),
    ]:
        with pytest.raises(InputError, match=message):
            Keys(str(tmp_path / name))


# Echoed prompts.


class Counting:
    """A tokenizer that records how many tokens it decodes, and in which thread."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.decoded: list[tuple[str, int]] = []

    def decode(self, numbers: list[int], **options: Any) -> str:
        self.decoded.append((threading.current_thread().name, len(numbers)))
        return self._tokenizer.decode(numbers, **options)

    def __call__(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("token", [464, 222], ids=["text", "part of a character"])
def test_echo_is_decoded_once_outside_the_event_loop(tokenizer, token):
    counting = Counting(tokenizer)
    script = tokenizer("one two three")["input_ids"]
    with contextlib.closing(Live(FakeNetwork(script, window=1024), counting, None)) as live:
        live.ask(prompt="warm", max_tokens=1)
        counting.decoded.clear()
        prompt = [token] * 1000
        answer = live.ask(prompt=prompt, n=16, max_tokens=1, echo=True, logprobs=0)
    texts = {choice["text"].removesuffix(" two") for choice in answer["choices"]}
    assert len(answer["choices"]) == 16
    assert all(text.startswith(tokenizer.decode(prompt)) for text in texts)
    beside = [count for thread, count in counting.decoded if thread.startswith("text")]
    others = [count for thread, count in counting.decoded if not thread.startswith("text")]
    # Up to 12 calls of 9 tokens per prompt token: proportional to the prompt, not to the answers.
    assert sum(beside) < 150 * len(prompt)
    # The last tokens of the prompt, whatever its length, twice per answer.
    assert sum(others) < 200 * 16


def test_a_refused_prompt_is_not_decoded(tokenizer):
    counting = Counting(tokenizer)
    network = FakeNetwork(tokenizer("one two three")["input_ids"])
    with contextlib.closing(Live(network, counting, None, rows=1, queue=1)) as live, held(live, 2):
        counting.decoded.clear()
        status, _ = live.refused({"prompt": [222] * 60, "echo": True})
        assert (status, counting.decoded) == (429, [])


# Under load.


def test_a_stalled_network_is_unhealthy_until_it_answers(serve):
    live = serve(rows=1, stall_seconds=0.2)
    with ThreadPoolExecutor(1) as pool:
        live.network.allowed.clear()
        answer = pool.submit(live.ask, prompt="x", max_tokens=2)
        wait_for(lambda: live.http.get("/health").status_code == 503)
        reason = live.http.get("/health").json()["reason"]
        assert "limit 0.2 s" in reason
        live.network.allowed.set()
        assert answer.result(SECONDS)["choices"]
    assert live.http.get("/health").status_code == 200


def test_recompiling_after_a_failure_is_no_stall(serve):
    live = serve(rows=1, stall_seconds=0.2)
    live.network.seconds = 0.3  # for each of the many calls that compile everything
    live.network.failures = [RuntimeError("device lost")]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(live.refused, {"prompt": "x"})
        calls = len(live.network.calls)
        wait_for(lambda: len(live.network.calls) > calls + 4)
        assert live.http.get("/health").status_code == 200
        live.network.seconds = 0.0
        assert answer.result(SECONDS)[0] == 500


def test_full_queue_answers_with_retry_after(serve):
    live = serve(rows=1, queue=3)
    with held(live, count=4) as finish:
        for stream in (False, True):
            body = {"prompt": "x", "stream": stream}
            answer = live.http.post("/v1/completions", json=body)
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
            assert check_error(answer)["code"] == "queue_full"
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.RateLimitError):
            client.completions.create(model="fake", prompt="")
        finish()
    assert live.ask(prompt="x", max_tokens=3)["choices"]


def test_disconnected_client_frees_its_place(serve):
    live = serve(rows=1, queue=2)
    live.network.seconds = 0.05  # per call: slow enough that all three are there at once
    for stream in (False, True):
        connections = []
        for _ in range(3):
            body = {"prompt": "x", "max_tokens": 500, "stream": stream}
            connections.append(connected(live))
            connections[-1].sendall(post(body))
        wait_for(lambda: live.engine.waiting == 2)
        for connection in connections:
            connection.close()
        wait_for(lambda: not live.engine.waiting and not live.engine.active)
        # Each call takes 50 ms, so the three would take 20 s.  They end long before that.
        decodes = [call for call in live.network.calls if call[0] == "decode"]
        assert len(decodes) < 125
        live.network.calls.clear()


def test_network_failure_is_a_500_and_the_next_request_succeeds(live):
    for stream in (False, True):
        live.network.failures = [RuntimeError("device lost")]
        body = {"prompt": "x", "stream": stream}
        answer = live.http.post("/v1/completions", json=body)
        text = answer.text.removeprefix("data: ")
        assert json.loads(text)["error"]["type"] == "server_error"
        assert "device lost" not in text
        assert answer.status_code == (200 if stream else 500)
        assert live.ask(prompt="x", seed=1)["choices"]


def test_permanent_network_failure_makes_the_server_unavailable(serve):
    live = serve(rows=1)
    live.network.allowed.clear()
    with ThreadPoolExecutor(2) as pool:
        served = pool.submit(live.refused, {"prompt": "x"})
        wait_for(lambda: live.network.waits)
        waiting = pool.submit(live.refused, {"prompt": "x"})
        wait_for(lambda: live.engine.waiting == 1)
        live.network.failures = [RuntimeError("device lost"), RuntimeError("still lost")]
        live.network.allowed.set()
        assert served.result(SECONDS)[0] == 500
        assert waiting.result(SECONDS)[0] == 503
    status, error = live.refused({"prompt": "x"})
    assert (status, error["type"]) == (503, "server_error")
    assert live.http.get("/health").status_code == 503


@pytest.mark.slow
def test_fixed_position_embeddings_limit_the_length(serve):
    live = serve(network={"pe": "fixed"})
    assert live.ask(prompt=[1] * 60, max_tokens=5)["choices"]
    for path, body in [
        ("/v1/completions", {"prompt": [1] * 60, "max_tokens": 6}),
        ("/complete", {"context": "a b c", "length": 63}),
    ]:
        status, error = live.refused(body, path)
        assert (status, error["code"]) == (400, "context_length_exceeded")
