"""Two thousand requests of every bad kind at once, and good ones beside them."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mesh_transformer.serving import gate
from tests.hostile_requests import BODIES, WRONG
from tests.live_server import SECONDS, Live, check_error, connected, post, wait_for

pytest_plugins = ["tests.live_fixtures"]


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
