"""Limits of the work for one request: sizes in its body, and what is left to do once it ends."""

import json
import random
import string
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from mesh_transformer.serving import errors, requests
from mesh_transformer.serving.requests import (
    ChatRequest,
    CompletionRequest,
    ContextRequest,
    EmbeddingRequest,
)
from mesh_transformer.util import brief
from tests.support.hostile_requests import CHAT, REPEATED, repeated
from tests.support.live_server import SECONDS, connected, post

pytest_plugins = ["tests.support.live_fixtures"]
KINDS = [CompletionRequest, ChatRequest, EmbeddingRequest, ContextRequest]
MOST_ERRORS = 1000


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the nodes of a pydantic schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for item in schema:
            yield from nodes(item)


@pytest.mark.parametrize("kind", KINDS)
def test_every_list_and_object_in_a_body_is_limited(kind):
    # Keys of `before` are those of functions that run before the node they contain.
    limited = [node["schema"] for node in nodes(kind.__pydantic_core_schema__) if is_limited(node)]
    for node in nodes(kind.__pydantic_core_schema__):
        if node["type"] == "list":
            assert "max_length" in node
            assert node.get("fail_fast") or node.get("items_schema", ANY)["type"] == "any", node
        if node["type"] == "dict" and node["values_schema"]["type"] != "any":
            assert node in limited, node
        if node["type"] == "model":
            assert issubclass(node["cls"], requests._StrictModel)


ANY = {"type": "any"}


def is_limited(node: dict[str, Any]) -> bool:
    return node["type"] == "function-before" and "_few_keys" in str(node["function"])


@pytest.mark.parametrize("name", REPEATED)
def test_a_wrong_body_has_few_errors(name):
    path, body = repeated(name, 2**18)
    kind = ChatRequest if path == CHAT else CompletionRequest
    try:
        requests.prompts_of(requests.parse(kind, body).prompt)  # type: ignore[attr-defined]
    except requests.ApiError as refused:
        error = refused
    else:
        assert name in ("ids", "digits in lists")  # a model has no such tokens
        return
    assert error.status == 400
    assert len(str(error)) < 1000
    if "digits" not in name:
        assert number_of_errors(kind, body) <= MOST_ERRORS


def number_of_errors(kind: type[BaseModel], body: bytes) -> int:
    try:
        kind.model_validate(from_json(body))
    except ValidationError as errors:
        return errors.error_count()
    except requests.ApiError:  # of the first wrong message
        return 1
    return 0


@pytest.mark.parametrize("seed", range(20))
def test_sizes_of_bodies_count_what_is_outside_of_texts(monkeypatch, seed):
    rng = random.Random(seed)

    def text() -> str:
        return "".join(rng.choices('"\\[]{},:é世a', k=rng.randrange(8)))

    def value(depth: int) -> Any:
        kind = rng.choice(["text", "number", "list", "object"] if depth else ["text", "number"])
        if kind == "list":
            return [value(depth - 1) for _ in range(rng.randrange(5))]
        if kind == "object":
            return {text(): value(depth - 1) for _ in range(rng.randrange(5))}
        return text() if kind == "text" else rng.choice([1, -2.5e3, True, None])

    def size(item: Any) -> int:
        if isinstance(item, dict):
            return 1 + sum(1 + size(content) for content in item.values())
        if isinstance(item, list):
            return 1 + sum(map(size, item))
        return isinstance(item, str)

    for _ in range(50):
        made = value(5)
        body = json.dumps(made, ensure_ascii=rng.random() < 0.5).encode()
        for most in (size(made), size(made) - 1):
            monkeypatch.setattr(requests, "MOST_VALUES", most)
            assert requests._few_values(body) == (size(made) <= most)
        assert errors.shown(made) == brief(json.dumps(made, ensure_ascii=False))
    prompt = {"prompt": '{["' * 100000}
    monkeypatch.setattr(requests, "MOST_VALUES", 3)
    assert requests.parse(CompletionRequest, json.dumps(prompt).encode()).prompt == prompt["prompt"]


@pytest.fixture
def held_parse(monkeypatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold the parsing of bodies until the second event is set; the first says that it began."""
    began, go_on, parse = threading.Event(), threading.Event(), requests.from_json

    def held(body: bytes, **options: Any) -> Any:
        began.set()
        assert go_on.wait(SECONDS)
        return parse(body, **options)

    monkeypatch.setattr(requests, "from_json", held)
    yield began, go_on
    go_on.set()


def long_body() -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 2, "user": "u" * 2**17}


def test_other_clients_are_answered_while_a_body_is_parsed(live, held_parse):
    began, go_on = held_parse
    answers: list[httpx.Response] = []
    ask = threading.Thread(
        target=lambda: answers.append(live.http.post("/v1/completions", json=long_body()))
    )
    ask.start()
    assert began.wait(SECONDS)
    with httpx.Client(base_url=live.url, timeout=SECONDS) as client:
        assert client.get("/health").json()["status"] == "ok"
    go_on.set()
    ask.join(SECONDS)
    assert answers[0].status_code == 200


def test_a_client_that_leaves_while_its_body_is_parsed_ends_its_request(live, held_parse):
    began, go_on = held_parse
    name = "".join(random.choices(string.ascii_lowercase, k=10))
    with connected(live) as connection:
        request = post(long_body()).replace(b"\r\n", f"\r\nX-Request-Id: {name}\r\n".encode(), 1)
        connection.sendall(request)
        assert began.wait(SECONDS)
    line = live.logged(name)  # written although the parsing goes on
    assert (line["status"], go_on.is_set()) == (499, False)
    assert "prompt_tokens" not in line  # nothing was begun
