"""What the server refuses, how, and that good requests beside it are unharmed."""

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from mesh_transformer.serving import gate
from mesh_transformer.serving.gate import Keys
from mesh_transformer.util import InputError
from tests.hostile_requests import BODIES, WRONG
from tests.live_server import SECONDS, check_error, connected, held, post, wait_for

pytest_plugins = ["tests.live_fixtures"]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:60])
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_value_is_named(live, wrong, stream):
    body = json.dumps({"stream": stream} | wrong).replace("Infinity", "1e400")
    status, error = live.refused(body)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] in wrong
    assert error["message"].startswith(error["param"])
    assert len(error["message"]) < 300


@pytest.mark.parametrize("body", BODIES, ids=lambda body: str(body[:24]))
@pytest.mark.parametrize("path", ["/v1/completions", "/complete"])
def test_body_that_is_no_such_json(live, body, path):
    status, error = live.refused(body, path)
    assert (status, error["type"]) == (400, "invalid_request_error")


def test_long_bodies(live):
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


def test_other_media_paths_and_methods(live):
    assert live.refused("{}", headers={"Content-Type": "text/plain"})[0] == 415
    assert live.refused({}, "/v1/chat/completions")[0] == 404
    answer = live.http.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.headers["Allow"] == "POST"
    check_error(answer)
    assert live.http.get("/v1/models/other").status_code == 404
    assert live.http.get("/v1/models/fake").json()["id"] == "fake"


def test_pages_elsewhere_must_be_allowed(live):
    asked = {"Access-Control-Request-Method": "POST"}
    for origin, allowed in [("https://page.example", True), ("https://other.example", False)]:
        answer = live.http.options("/complete", headers=asked | {"Origin": origin})
        assert ("access-control-allow-origin" in answer.headers) == allowed


def test_slow_body_and_slow_head(serve, monkeypatch):
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.3)
    monkeypatch.setattr("mesh_transformer.serving.server.HEADER_SECONDS", 0.3)
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
        assert time.monotonic() - begin < 5


def test_key_files_that_hold_nothing(tmp_path):
    (tmp_path / "empty").write_text("\n# none\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, found in [("empty", "holds no key"), ("absent", "cannot be read"), ("bytes", "read")]:
        with pytest.raises(InputError, match=found):
            Keys(str(tmp_path / name))


# Under load.


def test_full_queue_says_when_to_come_back(serve):
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


def test_client_that_leaves_frees_its_place(serve):
    live = serve(rows=1, queue=2)
    live.network.seconds = 0.05  # a call: slow enough for all three to be there at once
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
        decodes = len(live.network.calls)
        assert decodes < 3 * 500 / live.engine.steps


def test_failing_network_is_a_500_and_the_next_request_goes_well(live):
    for stream in (False, True):
        live.network.failures = [RuntimeError("device lost")]
        body = {"prompt": "x", "stream": stream}
        answer = live.http.post("/v1/completions", json=body)
        text = answer.text.removeprefix("data: ")
        assert json.loads(text)["error"]["type"] == "server_error"
        assert "device lost" not in text
        assert answer.status_code == (200 if stream else 500)
        assert live.ask(prompt="x", seed=1)["choices"]


def test_network_that_fails_for_good(serve):
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


def test_fixed_positions_end(serve):
    live = serve(network={"pe": "fixed"})
    assert live.ask(prompt=[1] * 60, max_tokens=4)["choices"]
    for path, body in [
        ("/v1/completions", {"prompt": [1] * 60, "max_tokens": 5}),
        ("/complete", {"context": "a b c", "length": 62}),
    ]:
        status, error = live.refused(body, path)
        assert (status, error["code"]) == (400, "context_length_exceeded")
