"""The server over HTTP, as its clients meet it; its network's every token is known beforehand."""

import contextlib
import json
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from mesh_transformer.serving import gate
from mesh_transformer.serving.app import create_app
from mesh_transformer.serving.engine import Engine
from mesh_transformer.serving.gate import Keys
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.server import listen, make_server
from mesh_transformer.serving.service import Service
from mesh_transformer.tokenizer import load_tokenizer
from mesh_transformer.util import InputError
from tests.fake_network import FakeNetwork

# Words, and characters of two to four bytes that are several tokens each.
SCRIPT = (
    "Once 世界 upon a 🎉🎊 time, Grüße naïve ⵣ end.\n\n"
    "Next — “day” 日本語 one ∑∞ two 🧑\u200d🚀 three "
)
SECONDS = 30


class Live:
    """A server in a thread, and a client of it."""

    def __init__(self, network: FakeNetwork, tokenizer: Any, keys: str | None, **options: Any):
        metrics = Metrics(options.setdefault("rows", 8))
        self.network = network
        self.tokenizer = tokenizer
        self.engine = Engine(network, metrics, **options)
        self.service = Service("fake", self.engine, tokenizer, metrics, most_tokens=500)
        listening = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        app = create_app(self.service, Keys(keys), ["https://page.example"])
        self.server = make_server(app, drain_seconds=5)
        self.thread = threading.Thread(target=self.server.run, args=([listening],))
        self.thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=SECONDS)
        while not self.server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self.network.allowed.set()
        self.http.close()
        self.server.should_exit = True
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()

    def ask(self, **body: Any) -> dict[str, Any]:
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, **body: Any) -> Iterator[dict[str, Any]]:
        with self.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in answer.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        for line in lines:
            yield json.loads(line.removeprefix("data: "))

    def text(self, prompt: list[int], seed: int, length: int) -> str:
        """The whole answer to a prompt."""
        return self.tokenizer.decode(self.network.answer(prompt, seed, length))

    def refused(self, body: Any, path: str = "/v1/completions", **options: Any) -> tuple[int, Any]:
        """The status and the error of a request that must not succeed."""
        sent = {"content": body} if isinstance(body, bytes | str) else {"json": body}
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        answer = self.http.post(path, headers=headers, **sent, **options)
        return answer.status_code, check_error(answer)


def check_error(answer: httpx.Response) -> dict[str, Any]:
    """The error in an answer, which must have OpenAI's shape."""
    assert answer.status_code >= 400, answer.text
    error = answer.json()
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert error["error"]["message"]
    return error["error"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def serve(tokenizer) -> Iterator[Callable[..., Live]]:
    with contextlib.ExitStack() as stack:

        def start(keys: str | None = None, **options: Any) -> Live:
            network = FakeNetwork(tokenizer(SCRIPT)["input_ids"])
            live = Live(network, tokenizer, keys, **options)
            stack.callback(live.stop)
            return live

        yield start


@pytest.fixture(scope="module")
def live(serve) -> Live:
    return serve()


def connected(live: Live) -> socket.socket:
    """A bare connection, to be closed."""
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


def post(body: Any, path: str = "/v1/completions") -> bytes:
    """A request as it goes over the wire."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def wait_for(condition: Callable[[], Any]) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < SECONDS
        time.sleep(0.005)


@contextlib.contextmanager
def held(live: Live, count: int) -> Iterator[Callable[[], None]]:
    """`count` requests that are under way, held back until the given function is called."""
    live.network.allowed.clear()
    with ThreadPoolExecutor(count) as pool:
        asked = []
        for _ in range(count):
            asked.append(pool.submit(live.ask, prompt="held", max_tokens=3))
            # The first is in a call of the network, the others wait behind it.
            wait_for(lambda: live.network.waits and live.engine.waiting == len(asked) - 1)
        yield live.network.allowed.set
        live.network.allowed.set()
        for answer in asked:
            assert answer.result(SECONDS)["choices"]


# Answers.


@pytest.mark.parametrize("prompt", ["Hello there", [15496, 612], "", "世"])
def test_prompt_of_text_or_tokens(live, prompt):
    tokens = live.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    tokens = tokens or [50256]
    found = live.ask(prompt=prompt, max_tokens=40, seed=3)
    assert found["object"] == "text_completion"
    assert found["model"] == "fake"
    [choice] = found["choices"]
    assert choice == {
        "index": 0,
        "text": live.text(tokens, 3, 40),
        "logprobs": None,
        "finish_reason": "length",
    }
    assert found["usage"] == {
        "prompt_tokens": len(tokens),
        "completion_tokens": 40,
        "total_tokens": len(tokens) + 40,
    }


def test_several_prompts_with_several_answers(live):
    prompts = ["One", "Two and more", "Three"]
    found = live.ask(prompt=prompts, n=2, max_tokens=9, seed=5)
    texts = {choice["index"]: choice["text"] for choice in found["choices"]}
    tokens = [live.tokenizer(prompt)["input_ids"] for prompt in prompts]
    assert texts == {
        at: live.text(tokens[at // 2], 5 + at % 2, 9) for at in range(2 * len(prompts))
    }
    assert found["usage"]["prompt_tokens"] == sum(map(len, tokens))
    assert found["usage"]["completion_tokens"] == 6 * 9
    assert live.ask(prompt=tokens, n=2, max_tokens=9, seed=5)["choices"] == found["choices"]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 3])
def test_streamed_pieces_are_whole_characters_and_join_to_the_answer(live, echo, logprobs):
    for seed in range(40):
        body = {"prompt": "Say: ", "max_tokens": 30, "seed": seed, "echo": echo, "n": 2}
        body |= {"logprobs": logprobs}
        whole = live.ask(**body)["choices"]
        pieces = [event["choices"][0] for event in live.stream(**body)]
        for choice in whole:
            mine = [piece for piece in pieces if piece["index"] == choice["index"]]
            assert "".join(piece["text"] for piece in mine) == choice["text"]
            assert [p["finish_reason"] for p in mine] == [None] * (len(mine) - 1) + ["length"]
            if logprobs is not None:
                for key, values in choice["logprobs"].items():
                    assert [v for piece in mine for v in piece["logprobs"][key]] == values


def test_usage_at_a_streams_end(live):
    body = {"prompt": "a b c", "max_tokens": 5, "seed": 1}
    events = list(live.stream(**body, stream_options={"include_usage": True}))
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == live.ask(**body)["usage"]


def test_stop_sequences_end_the_text_before_them(live):
    rng = random.Random(0)
    prompt, length = [1], 40
    for _ in range(150):
        seed = rng.randrange(200)
        text = live.text(prompt, seed, length)
        begin = rng.randrange(len(text) - 8)
        stops = [text[begin : begin + rng.randint(1, 8)], "never there", text[:3] + "§"]
        rng.shuffle(stops)
        wanted = min((text.partition(stop)[0] for stop in stops), key=len)
        body = {"prompt": prompt, "seed": seed, "max_tokens": length, "stop": stops, "logprobs": 0}
        [choice] = live.ask(**body)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (wanted, "stop")
        pieces = [event["choices"][0] for event in live.stream(**body)]
        assert "".join(piece["text"] for piece in pieces) == wanted
        assert all(offset < len(wanted) for offset in choice["logprobs"]["text_offset"])
    assert live.ask(prompt=prompt, seed=seed, max_tokens=length, stop="§")["choices"][0][
        "text"
    ] == live.text(prompt, seed, length)


def test_end_of_text_ends_the_answer_unless_ignored(live, monkeypatch):
    script = live.tokenizer("one two<|endoftext|> three four")["input_ids"]
    monkeypatch.setattr(live.network, "script", script)
    body = {"prompt": [1], "seed": len(script) - 1, "max_tokens": 5, "logprobs": 1}
    [choice] = live.ask(**body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")
    assert choice["logprobs"]["tokens"] == ["one", " two", "<|endoftext|>"]
    [choice] = live.ask(**body, ignore_eos=True)["choices"]
    assert choice["text"] == "one two<|endoftext|> three four"


def test_logprobs_stand_beside_their_text(live):
    for seed in range(30):
        found = live.ask(prompt="Hi", max_tokens=25, seed=seed, logprobs=2)
        [choice] = found["choices"]
        logprobs, text = choice["logprobs"], choice["text"]
        numbers = live.network.answer(live.tokenizer("Hi")["input_ids"], seed, 25)
        # f32 in the network, decimal in JSON: the same to the last digit that both have.
        np.testing.assert_allclose(
            logprobs["token_logprobs"], [-1 - number / 50400 for number in numbers], rtol=1e-6
        )
        for number, name, top, offset in zip(
            numbers,
            logprobs["tokens"],
            logprobs["top_logprobs"],
            logprobs["text_offset"],
            strict=True,
        ):
            assert top == {"!": -0.1, '"': -0.2, name: pytest.approx(-1 - number / 50400)}
            if name.startswith("bytes:"):
                assert re.fullmatch(r"bytes:(\\x[0-9a-f]{2})+", name)
            else:
                assert text[offset : offset + len(name)] == name
        raw = b"".join(
            bytes.fromhex(name[6:].replace("\\x", "")) if name[:6] == "bytes:" else name.encode()
            for name in logprobs["tokens"]
        )
        assert raw.decode(errors="replace") == text


def test_echo_scores_the_prompt(live):
    prompt = live.tokenizer("The 世界 is 🎉 big")["input_ids"]
    body = {"prompt": prompt, "seed": 2, "echo": True, "logprobs": 1}
    [one] = live.ask(**body, max_tokens=1)["choices"]
    [none] = live.ask(**body, max_tokens=0)["choices"]
    answer = live.text(prompt, 2, 1)
    assert (none["text"], one["text"]) == ("The 世界 is 🎉 big", "The 世界 is 🎉 big" + answer)
    for key in one["logprobs"]:
        assert one["logprobs"][key][:-1] == none["logprobs"][key]
    logits = live.network.logits(np.zeros((1, 1)))[0, 0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum())
    assert none["logprobs"]["token_logprobs"][0] is None
    # f32 against f64 over a vocabulary of 50400.
    found = none["logprobs"]["token_logprobs"][1:]
    np.testing.assert_allclose(found, logprobs[prompt[1:]], rtol=1e-5)
    assert max(none["logprobs"]["top_logprobs"][1].values()) == pytest.approx(logprobs.max())
    assert none["logprobs"]["text_offset"][:2] == [0, 3]


def test_the_original_servers_request(live):
    tokens = live.tokenizer("eleutherai")["input_ids"]
    body = {"context": "eleutherai", "top_p": 0.9, "temp": 0.75}
    answer = live.http.post("/complete", json=body | {"seed": 4})
    found = answer.json()
    assert found["completion"] == live.text(tokens, 4, 500)[: len(found["completion"])]
    assert set(found) == {"context", "completion", "time"}
    # Of a context that is too long the last 64 tokens are used.
    context = "word " * 5000
    found = live.http.post("/complete", json={"context": context, "length": 8, "seed": 1}).json()
    assert found["completion"] == live.text([0] * 64, 1, 8)


def test_seeds_of_openais_range(live):
    body = {"prompt": "x", "max_tokens": 12}
    texts = [live.ask(**body, seed=seed)["choices"] for seed in (-1, 2**32 - 1, 2**64 - 1)]
    assert texts[0] == texts[1] == texts[2]
    several = {live.ask(**body)["choices"][0]["text"] for _ in range(8)}
    assert len(several) > 1  # without a seed each request has one of its own


# Clients of others.


def test_openai_client(live, serve, tmp_path):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "fake", "prompt": "Hello", "max_tokens": 20, "seed": 7}
        whole = client.completions.create(**asked, logprobs=2, n=2, echo=True)
        assert whole.choices[0].text == "Hello" + live.text([15496], 7, 20)
        assert len(whole.choices[1].logprobs.tokens) == 21
        pieces = list(client.completions.create(**asked, stream=True))
        assert "".join(p.choices[0].text for p in pieces) == live.text([15496], 7, 20)
        assert [model.id for model in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").id == "fake"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-3.5-turbo-instruct", prompt="")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(**asked | {"max_tokens": 10**6})
        with pytest.raises(openai.BadRequestError, match="beams"):
            client.completions.create(**asked, extra_body={"beams": 3})
    (tmp_path / "keys").write_text("# ours\nsecret-1\n\nsecret-2\n")
    locked = serve(keys=str(tmp_path / "keys"))
    for key, right in [("secret-1", True), ("secret-2", True), ("secret-3", False), ("# ours", 0)]:
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0) as client:
            if right:
                assert client.completions.create(**asked).choices[0].text
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.completions.create(**asked)
    for path in ("/health", "/metrics", "/"):
        assert locked.http.get(path).status_code == 200
    for headers in ({}, {"Authorization": "Basic secret-1"}, {"Authorization": "secret-1"}):
        status, error = locked.refused({"context": "x"}, "/complete", headers=headers)
        assert (status, error["code"]) == (401, "invalid_api_key")


def test_key_files_that_hold_nothing(tmp_path):
    (tmp_path / "empty").write_text("\n# none\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, found in [("empty", "holds no key"), ("absent", "cannot be read"), ("bytes", "read")]:
        with pytest.raises(InputError, match=found):
            Keys(str(tmp_path / name))


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(live):
    def curl(path: str, body: dict[str, Any], *options: str) -> str:
        command = ["curl", "-sS", "--max-time", "30", *options, live.url + path]
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout

    wanted = live.text([15496], 1, 9)
    asked = {"prompt": "Hello", "max_tokens": 9, "seed": 1}
    assert json.loads(curl("/v1/completions", asked))["choices"][0]["text"] == wanted
    lines = curl("/v1/completions", asked | {"stream": True}, "-N").split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2]]
    assert "".join(pieces) == wanted
    asked = {"context": "Hello", "top_p": 0.9, "temp": 0.7, "length": 9, "seed": 1}
    assert json.loads(curl("/complete", asked))["completion"] == wanted


@pytest.mark.slow
def test_lm_eval_local_completions(live):
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    client = LocalCompletionsAPI(
        base_url=f"{live.url}/v1/completions",
        model="fake",
        tokenizer_backend=None,
        tokenized_requests=False,
        num_concurrent=1,
    )
    until = Instance("generate_until", {}, ("Hello", {"until": ["🎉"], "max_gen_toks": 40}), 0)
    [text] = client.generate_until([until])
    # Its own seed is 1234.
    assert text == live.text([15496], 1234, 40).partition("🎉")[0]


# What is refused.

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


def test_metrics_are_prometheus(live):
    from prometheus_client.parser import text_string_to_metric_families

    before = live.http.get("/metrics").text
    live.ask(prompt="x", max_tokens=7)
    live.http.get("/no/such/path/at/all")
    after = live.http.get("/metrics").text

    def values(text: str) -> dict[Any, float]:
        return {
            (sample.name.removeprefix("mesh_transformer_"), *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def more(*key: str) -> float:
        return values(after)[key] - values(before).get(key, 0)

    assert more("generated_tokens_total") == 7
    assert more("prompt_tokens_total") == 1
    assert more("http_responses_total", "/v1/completions", "200") == 1
    assert more("http_responses_total", "other", "404") == 1
    assert more("time_to_first_token_seconds_count") == 1
    assert values(after)["rows",] == 8


def test_page_names_no_other_place(live):
    answer = live.http.get("/")
    assert answer.headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert not re.findall(r"(?:https?:)?//[a-z]", answer.text)
    assert live.http.get("/health").json() == {"status": "ok", "model": "fake"}
