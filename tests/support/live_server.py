"""A server on a fake network with known tokens, for tests that use it over HTTP."""

import contextlib
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from mesh_transformer.data.chat import ChatTemplate, read_template
from mesh_transformer.serving.app import create_app
from mesh_transformer.serving.batches import Batches
from mesh_transformer.serving.engine import Engine
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.requests import Keys
from mesh_transformer.serving.server import listen, make_server
from mesh_transformer.serving.service import Service
from tests.support.fake_network import FakeNetwork
from tests.support.waiting import SECONDS, wait_until


class Live:
    """A server in a thread, and an HTTP client for it."""

    def __init__(self, network: Any, tokenizer: Any, keys: str | None, **options: Any):
        metrics, hosts = Metrics(options.setdefault("rows", 8)), options.pop("hosts", ())
        drain_seconds = options.pop("drain_seconds", 5)
        template = options.pop("template", None)
        if not isinstance(template, ChatTemplate):
            template = read_template(tokenizer, template)
        names = dict.fromkeys(options.pop("names", ["fake"]), 0)
        names |= {name: number for number, name in enumerate(options.pop("adapters", ()), 1)}
        any_name, ends = options.pop("any_name", False), options.pop("ends", {})
        sampling, batch_folder = options.pop("sampling", {}), options.pop("batch_folder", None)
        self.network = network
        self.tokenizer = tokenizer
        self.engine = Engine(network, metrics, **options)
        self.service = Service(
            names,
            self.engine,
            tokenizer,
            metrics,
            500,
            template,
            any_name,
            ends,
            sampling,
        )
        listening = listen("127.0.0.1", 0)
        self.address = listening.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.log = io.StringIO()
        origins = ["https://page.example"]
        batches = Batches(self.service, batch_folder) if batch_folder else None
        app = create_app(self.service, Keys(keys), origins, hosts, self.log, batches)
        self.server = make_server(app, drain_seconds)
        self.thread = threading.Thread(target=self.server.run, args=([listening],))
        self.thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=SECONDS)
        while not self.server.started:
            time.sleep(0.01)

    def close(self) -> None:
        if isinstance(self.network, FakeNetwork):
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

    def logged(self, name: str) -> dict[str, Any]:
        """Return the log's line about the request `name`, written after its response is sent."""

        def find() -> list[dict[str, Any]]:
            lines = map(json.loads, self.log.getvalue().splitlines())
            return [line for line in lines if line["id"] == name]

        (line,) = wait_until(find, f"the line about {name}")
        return line

    def text(self, prompt: list[int], seed: int, length: int) -> str:
        """Return the complete answer to a prompt."""
        return self.tokenizer.decode(self.network.answer(prompt, seed, length))

    def refused(self, body: Any, path: str = "/v1/completions", **options: Any) -> tuple[int, Any]:
        """Send a request that must fail; returns its status and its error."""
        sent = {"content": body} if isinstance(body, bytes | str) else {"json": body}
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        answer = self.http.post(path, headers=headers, **sent, **options)
        return answer.status_code, check_error(answer)


def check_error(answer: httpx.Response) -> dict[str, Any]:
    """Return the error in an answer, and check that it has OpenAI's format."""
    assert answer.status_code >= 400, answer.text
    error = answer.json()
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert error["error"]["message"]
    return error["error"]


def connected(live: Live) -> socket.socket:
    """Return a plain connection, which the caller must close."""
    return socket.create_connection(live.address, timeout=SECONDS)


def post(body: Any, path: str = "/v1/completions") -> bytes:
    """Return the bytes of a POST request."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def wait_for(condition: Callable[[], Any]) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < SECONDS
        time.sleep(0.005)


@contextlib.contextmanager
def held(live: Live, count: int) -> Iterator[Callable[[], None]]:
    """Run `count` requests, which are held back until the yielded function is called."""
    live.network.allowed.clear()
    with ThreadPoolExecutor(count) as pool:
        answers = []
        for _ in range(count):
            answers.append(pool.submit(live.ask, prompt="held", max_tokens=3))
            # The first request waits in a call of the network, the others in the queue.
            wait_for(lambda: live.network.waits and live.engine.waiting == len(answers) - 1)
        yield live.network.allowed.set
        live.network.allowed.set()
        for answer in answers:
            assert answer.result(SECONDS)["choices"]
