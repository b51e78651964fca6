"""What the server refuses, how, and that good requests beside it are unharmed."""

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from mesh_transformer.serving import gate
from mesh_transformer.serving.gate import Keys
from mesh_transformer.util import InputError
from tests.live_server import SECONDS, Live, check_error, connected, held, post, wait_for

pytest_plugins = ["tests.live_fixtures"]

WRONG = [
    {"prompt": 3},
    {"prompt": None},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": [[1], "a"]},
    {"prompt": [1, "a"]},
    {"prompt": [1, True]},
    {"prompt": [1.0]},
    {"prompt": [-1]},
    {"prompt": [50400]},
    {"prompt": [10**30]},
    {"prompt": [[[1]]]},
    {"prompt": ["a"] * 129},
    {"prompt": {"a": 1}},
    {"prompt": [1] * 65},
    {"prompt": "word " * 100},
    {"max_tokens": -1},
    {"max_tokens": 501},
    {"max_tokens": 0},
    {"max_tokens": 1.5},
    {"max_tokens": "5"},
    {"max_tokens": True},
    {"max_tokens": 10**30},
    {"temperature": -0.1},
    {"temperature": "hot"},
    {"temperature": 1e400},
    {"top_p": 1.1},
    {"top_p": -0.1},
    {"top_k": -1},
    {"top_k": 2**31},
    {"repetition_penalty": 0},
    {"n": 0},
    {"n": 129},
    {"n": 2, "best_of": 3},
    {"n": 100, "prompt": ["a", "b", "c"]},
    {"stop": ""},
    {"stop": ["a"] * 17},
    {"stop": [1]},
    {"stop": "a" * 257},
    {"logprobs": 6},
    {"logprobs": True},
    {"logprobs": -1},
    {"seed": 2**64},
    {"seed": 0.5},
    {"stream": "yes"},
    {"stream_options": {"other": 1}},
    {"suffix": "end"},
    {"presence_penalty": 1},
    {"logit_bias": {"50256": -100}},
    {"beams": 2},
    {"model": 5},
]


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


BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"prompt"',
    b'{"prompt": "a"} more',
    b'{"prompt": NaN}',
    b'{"temperature": NaN}',
    b'{"temperature": Infinity}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "a\x00b"}',
    b"[" * 100000,
    b'{"a":' * 50000,
    b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"seed": ' + b"9" * 10000 + b"}",
    b"\x1f\x8b\x08gzip",
    json.dumps({"prompt": "a"}).encode("utf-16"),
]


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
    live.network.seconds = 0.002
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
    live = serve()
    live.network.failures = [RuntimeError("device lost"), RuntimeError("still lost")]
    assert live.refused({"prompt": "x"})[0] == 500
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


# Many at once.


class Hostile:
    """Requests that must fail, each with the statuses that it may be answered with."""

    def __init__(self, live: Live, seed: int):
        self.live = live
        self.rng = random.Random(seed)
        self.kinds = [
            self.wrong_value,
            self.wrong_body,
            self.cut_json,
            self.changed_bytes,
            self.unknown_field,
            self.deep,
            self.huge_body,
            self.huge_prompt,
            self.wrong_key,
            self.wrong_media,
            self.wrong_place,
            self.no_http,
            self.leaves_mid_body,
            self.leaves_mid_stream,
            self.leaves_before_the_answer,
        ]

    def run(self, number: int) -> str | None:
        """One request; what was wrong with its answer, if anything."""
        kind = self.kinds[number % len(self.kinds)]
        try:
            statuses, answer = kind()
            if answer is None or answer.status_code in statuses:
                if answer is not None:
                    check_error(answer)
                return None
            return f"{kind.__name__}: {answer.status_code} {answer.text[:200]}"
        except Exception as error:  # of any kind: it is what the test is about
            return f"{kind.__name__}: {type(error).__name__} {error}"

    def post(self, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        path = self.rng.choice(["/v1/completions", "/complete"])
        headers = {"Content-Type": "application/json", "Authorization": "Bearer right"} | headers
        return self.live.http.post(path, content=content, headers=headers)

    def good(self) -> dict[str, Any]:
        return {"prompt": "Hello", "max_tokens": 20, "stream": self.rng.random() < 0.5}

    def wrong_value(self):
        body = json.dumps(self.good() | self.rng.choice(WRONG)).replace("Infinity", "1e400")
        return {400}, self.post(body.encode())

    def wrong_body(self):
        return {400}, self.post(self.rng.choice(BODIES))

    def cut_json(self):
        content = json.dumps(self.good()).encode()
        return {400}, self.post(content[: self.rng.randrange(len(content))])

    def changed_bytes(self):
        content = bytearray(b'{"prompt": "\xc3\xa9", "beams": 1}')
        for _ in range(3):
            content[self.rng.randrange(len(content))] = self.rng.randrange(256)
        return {400}, self.post(bytes(content) + b"}")

    def unknown_field(self):
        name = "".join(self.rng.choices("abcdef\u00e9\u4e16_$.", k=self.rng.randint(1, 300)))
        return {400}, self.post(self.good() | {name: 1})

    def deep(self):
        opening, closing = self.rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
        depth = self.rng.choice([10, 1000, 100000])
        return {400}, self.post(b'{"prompt": ' + opening * depth + b"1" + closing * depth + b"}")

    def huge_body(self):
        size = self.rng.choice([gate.BODY_BYTES + 1, 8 * 2**20])
        return {413}, self.post(b'{"prompt": "' + b"a" * size + b'"}')

    def huge_prompt(self):
        unit = self.rng.choice(["a", "word ", "\n", "\u4e16"])
        prompt: Any = unit * (2**20 // len(unit.encode()))
        if self.rng.random() < 0.3:
            prompt = [1] * 200000
        return {400, 413}, self.post({"prompt": prompt})  # escaped, some are beyond the limit

    def wrong_key(self):
        key = self.rng.choice(["", "Bearer", "Bearer wrong", "Bearer r\u00efght", "Basic cmlnaHQ6"])
        return {401}, self.post(self.good(), Authorization=key.encode("latin-1"))

    def wrong_media(self):
        kind = self.rng.choice(["text/plain", "", "application/xml", "application/jsonp"])
        return {415}, self.post(self.good(), **{"Content-Type": kind})

    def wrong_place(self):
        method = self.rng.choice(["GET", "PUT", "DELETE", "PATCH", "POST"])
        path = self.rng.choice(["/v1/chat/completions", "/..%2f..%2fetc/passwd", "/v1/%00"])
        path = "/v1/completions" if self.rng.random() < 0.5 and method != "POST" else path
        return {404, 405}, self.live.http.request(method, path)

    def no_http(self):
        with connected(self.live) as connection:
            connection.sendall(
                self.rng.choice([b"\x16\x03\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"{}\n\n"])
            )
            connection.settimeout(SECONDS)
            found = connection.recv(1000)
        assert found.startswith(b"HTTP/1.1 400 "), found
        return {400}, None

    def _leave(self, body: dict[str, Any], cut: int | None, heard: int) -> tuple[set[int], None]:
        request = post(body).replace(b"\r\n", b"\r\nAuthorization: Bearer right\r\n", 1)
        with connected(self.live) as connection:
            connection.sendall(request[:cut])
            if heard:
                connection.recv(heard)
        return set(), None

    def leaves_mid_body(self):
        return self._leave(self.good(), -self.rng.randint(1, 10), 0)

    def leaves_mid_stream(self):
        return self._leave(self.good() | {"stream": True, "max_tokens": 400}, None, 100)

    def leaves_before_the_answer(self):
        return self._leave(self.good() | {"max_tokens": 400}, None, 0)


@pytest.mark.slow
def test_two_thousand_hostile_requests(serve, tmp_path):
    (tmp_path / "keys").write_text("right\n")
    live = serve(keys=str(tmp_path / "keys"), rows=4)
    live.network.seconds = 0.001
    live.http.headers["Authorization"] = "Bearer right"
    wanted = {seed: live.text([15496], seed, 30) for seed in range(50)}
    stop, harmed, served = threading.Event(), [], 0

    def good() -> None:
        nonlocal served
        while not stop.is_set():
            seed = random.randrange(50)
            body = {"prompt": "Hello", "max_tokens": 30, "seed": seed}
            answer = live.http.post("/v1/completions", json=body)
            if answer.status_code != 200 or answer.json()["choices"][0]["text"] != wanted[seed]:
                harmed.append((answer.status_code, answer.text[:200]))
            served += 1

    beside = [threading.Thread(target=good) for _ in range(3)]
    for thread in beside:
        thread.start()
    hostile = Hostile(live, seed=0)
    with ThreadPoolExecutor(8) as pool:
        complaints = [found for found in pool.map(hostile.run, range(2000)) if found]
    stop.set()
    for thread in beside:
        thread.join(SECONDS)
    assert not complaints, complaints[:5]
    assert not harmed, harmed[:5]
    assert served > 100
    # What its clients left is not served on for nobody.
    wait_for(lambda: live.engine.active == live.engine.waiting == 0)
    assert live.http.get("/health").json()["status"] == "ok"
