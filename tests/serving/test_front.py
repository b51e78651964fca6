"""The address of several replicas, which here are applications on fake networks."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest

from mesh_transformer.serving import limits
from mesh_transformer.serving.errors import ApiError
from mesh_transformer.serving.front import TRIES, create_front, prefixes_of
from mesh_transformer.serving.limits import KeyLimits
from mesh_transformer.serving.metrics import merged
from mesh_transformer.serving.requests import Keys
from mesh_transformer.serving.server import listen, make_server
from tests.support.live_server import check_error
from tests.support.waiting import SECONDS, wait_until


class FakeReplicas:
    """Replicas whose responses are the elements of `script`, one for each request.

    An element is a list of messages, ConnectionError (the replica dies), or None (it never
    answers).
    """

    def __init__(self, *script: Any):
        self.script, self.requests, self.ended = list(script), [], 0

    def names(self) -> list[str]:
        return ["one", "two"]

    async def ask(
        self, scope: Any, body: bytes = b"", prefixes: Any = (), replica: str | None = None
    ) -> AsyncGenerator[list[dict[str, Any]]]:
        self.requests.append((scope["path"], body, list(prefixes), replica))
        try:
            for item in self.script.pop(0):
                if item is ConnectionError:
                    raise ConnectionError("a replica died")
                if item is None:
                    await asyncio.sleep(SECONDS)
                yield [item]
        finally:
            self.ended += 1


def start(kind: str = "application/json", status: int = 200) -> dict[str, Any]:
    headers = [(b"content-type", kind.encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(text: str, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


@contextlib.contextmanager
def client(replicas: FakeReplicas, **options: Any) -> Iterator[httpx.Client]:
    keys = Keys(options.pop("keys", None))
    app = create_front(replicas, keys, 100, **options)
    listening = listen("127.0.0.1", 0)
    server = make_server(app, 5)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    url = "http://{}:{}".format(*listening.getsockname())
    try:
        with httpx.Client(base_url=url, timeout=SECONDS) as http:
            wait_until(lambda: server.started, "the server starts")
            yield http
    finally:
        server.should_exit = True
        thread.join(SECONDS)


BODY = {"prompt": "Once upon a time"}
WHOLE = [start(), part("yes")]


def test_a_request_is_sent_again_until_its_response_has_begun():
    # A replica may also die after the head of a response, which is not sent alone.
    replicas = FakeReplicas([ConnectionError], [start(status=500), ConnectionError], WHOLE)
    with client(replicas) as http:
        response = http.post("/v1/completions", json=BODY)
        assert (response.status_code, response.text) == (200, "yes")
        assert [json.loads(body) for _, body, _, _ in replicas.requests] == [BODY] * 3
        replicas.script = [[ConnectionError]] * TRIES
        response = http.post("/v1/completions", json=BODY)
        assert response.status_code == 503
        assert "have died" in check_error(response)["message"]
        replicas.script = [[], []]
        text = http.get("/metrics").text
        assert "mesh_transformer_front_retried_requests_total 5.0" in text
        assert 'mesh_transformer_front_refused_requests_total{status="503"} 1.0' in text


def test_a_stream_that_has_begun_ends_with_an_error_event():
    events = [start("text/event-stream; charset=utf-8"), part("data: 1\n\n", more=True)]
    replicas = FakeReplicas([*events, ConnectionError])
    with client(replicas) as http:
        response = http.post("/v1/completions", json=BODY)
    first, last = response.text.strip().split("\n\n")
    assert first == "data: 1"
    assert "has died" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert len(replicas.requests) == 1


def test_another_response_that_has_begun_is_not_taken_for_complete():
    replicas = FakeReplicas([start(), part("[1, 2", more=True), ConnectionError])
    with client(replicas) as http, pytest.raises(httpx.RemoteProtocolError):
        http.post("/v1/completions", json=BODY)


def test_a_replica_that_dies_after_its_response_does_no_harm():
    with client(FakeReplicas([*WHOLE, ConnectionError])) as http:
        assert http.post("/v1/completions", json=BODY).text == "yes"


def test_a_request_ends_when_its_client_leaves():
    replicas = FakeReplicas([None])
    with client(replicas) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=BODY, timeout=0.2)
        wait_until(lambda: replicas.ended, "the request ends")


def test_health_and_metrics_are_those_of_all_replicas():
    ok, failed = {"status": "ok", "model": "m"}, {"status": "failed", "reason": "stalled"}
    bodies = [[start(), part(json.dumps(state))] for state in (ok, failed)]
    replicas = FakeReplicas(*bodies)
    with client(replicas) as http:
        response = http.get("/health")
        assert (response.status_code, response.json()) == (
            200,
            ok | {"replicas": {"one": ok, "two": failed}},
        )
        replicas.script = [bodies[1], [ConnectionError]]
        response = http.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "failed")
        assert response.json()["replicas"]["two"]["reason"] == "no answer"
        assert [name for *_, name in replicas.requests] == ["one", "two"] * 2
        text = "# HELP a_total A\n# TYPE a_total counter\na_total 2.0\n"
        replicas.script = [[start(), part(text)], [start(), part(text.replace("2.0", "3.0"))]]
        text = http.get("/metrics").text
        assert text.endswith('a_total{replica="one"} 2.0\na_total{replica="two"} 3.0\n')
        assert "mesh_transformer_front_replicas 2.0" in text


def test_merged_metrics_keep_labels_and_describe_each_metric_once():
    text = '# HELP h H\n# TYPE h histogram\nh_bucket{le="+Inf",path="a b{"} 4.0\nh_sum 1.5\n'
    expected = (
        "# HELP h H\n# TYPE h histogram\n"
        'h_bucket{replica="x",le="+Inf",path="a b{"} 4.0\nh_sum{replica="x"} 1.5\n'
    )
    assert merged({"x": text}) == expected
    assert (
        merged({"x": text, "y": text})
        == expected + "\n".join(expected.replace('"x"', '"y"').splitlines()[2:]) + "\n"
    )
    assert merged({}) == ""


def test_keys_are_checked_before_a_replica_is_asked(tmp_path):
    (tmp_path / "keys").write_text("secret\nother\n")
    replicas = FakeReplicas([None], WHOLE, WHOLE)
    options = {"keys": str(tmp_path / "keys"), "limits": KeyLimits(concurrent=1)}
    with client(replicas, **options) as http:
        assert http.post("/v1/completions", json=BODY).status_code == 401
        assert not replicas.requests
        headers = {"Authorization": "Bearer secret"}

        def hang() -> None:
            with contextlib.suppress(httpx.ReadTimeout), httpx.Client(base_url=http.base_url) as c:
                c.post("/v1/completions", json=BODY, headers=headers, timeout=SECONDS)

        thread = threading.Thread(target=hang, daemon=True)
        thread.start()
        wait_until(lambda: replicas.requests, "the first request is in progress")
        response = http.post("/v1/completions", json=BODY, headers=headers)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        other = {"Authorization": "Bearer other"}
        assert http.post("/v1/completions", json=BODY, headers=other).text == "yes"


def test_a_key_may_send_a_number_of_requests_per_minute(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(limits.time, "monotonic", lambda: now[0])
    limit = KeyLimits(per_minute=2)
    for key in ("a", "a", "b"):
        with limit.request(key):
            now[0] += 1
    with pytest.raises(ApiError) as caught, limit.request("a"):
        pass
    assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "57"})
    now[0] = 160.0
    with limit.request("a"):
        pass
    with pytest.raises(ApiError), limit.request("a"):
        pass


def test_prompts_have_the_hashes_of_their_common_beginning():
    def of(**body: Any) -> list[int]:
        return prefixes_of(json.dumps(body).encode())

    def common(one: list[int], other: list[int]) -> int:
        same = [first == second for first, second in zip(one, other, strict=False)]
        return [*same, False].index(False)

    text = "".join(chr(97 + number % 26) for number in range(2000))
    whole = of(model="m", prompt=text)
    assert whole == of(prompt=text, model="m", max_tokens=3, stream=True)
    assert common(whole, of(model="other", prompt=text)) == 0
    # Beginnings of 1000 letters have hashes up to the last length below, which is 1/8 shorter.
    shared = common(whole, of(model="m", prompt=text[:1000] + "?" + text[1000:]))
    assert shared == common(whole, of(model="m", prompt=text[:1000]))
    assert 20 < shared < len(whole) - 5
    turns = [{"role": "user", "content": text}]
    first = of(messages=turns)
    second = of(messages=[*turns, {"role": "assistant", "content": "yes"}])
    assert common(first, second) == len(first) - 1  # all but the hash of the whole
    assert prefixes_of(b"\xff") == prefixes_of(b"[1]") == []
    assert of(prompt="short") == of(prompt="short") != of(prompt="other")
