"""Weights that are NaN or infinite: every endpoint answers 500, and /health says why."""

import json
from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.transformer_shard import CausalTransformer
from tests.conftest import SMALL
from tests.support.live_server import Live, check_error

TOKEN = 200  # the token whose embedding may overflow
CONFIG = SMALL | {"layers": 1, "n_vocab": 264, "seq": 32, "cores_per_replica": 1, "tpu_size": 1}
MESSAGES = [{"role": "user", "content": "ab"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "abc", "max_tokens": 3}),
    "several": ("/v1/completions", {"prompt": ["abc", "d"], "n": 2, "max_tokens": 3}),
    "logprobs": ("/v1/completions", {"prompt": "abc", "max_tokens": 3, "logprobs": 2}),
    "scores": (
        "/v1/completions",
        {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1},
    ),
    "stream": ("/v1/completions", {"prompt": "abc", "max_tokens": 3, "stream": True}),
    "json": (
        "/v1/completions",
        {"prompt": "abc", "max_tokens": 9, "response_format": {"type": "json_object"}},
    ),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
    "chat logprobs": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 3},
    ),
    "chat stream": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 3, "stream": True},
    ),
    "embeddings": ("/v1/embeddings", {"input": ["abc", "d"]}),
    "base64": ("/v1/embeddings", {"input": "abc", "encoding_format": "base64"}),
    "complete": ("/complete", {"context": "abc", "length": 3}),
}


def serve(place: tuple[str, str, str], index: Any, value: float, *, warm: bool) -> Live:
    """Return a server on a network with one value of its weights replaced."""
    network = CausalTransformer(CONFIG, devices=jax.devices()[:1])
    assert network.state is not None
    leaf = network.state["params"][place[0]][place[1]]
    leaf[place[2]] = leaf[place[2]].at[index].set(value)
    tokenizer = load_tokenizer("bytes")
    live = Live(network, tokenizer, None, template="plain", pooling="mean", rows=4)
    if warm:
        live.engine.warm_up()
    return live


def strictly(text: str) -> Any:
    """Parse JSON, which has no NaN and no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in {text}")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_every_answer_is_an_error_that_names_the_weights(value):
    live = serve(("layers", "layer/q", "w"), (0, 3, 5), value, warm=True)
    try:
        health = live.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        for name, (path, body) in REQUESTS.items():
            status, error = live.refused(body, path)
            assert status == 500, name
            for message in (error["message"], health.json()["reason"]):
                assert "of the weights layers/0/layer/q/w are NaN or infinite" in message, name
            assert error["type"] == "server_error", name
    finally:
        live.close()


@pytest.mark.slow
def test_the_first_request_finds_such_weights_without_a_warm_up():
    live = serve(("layers", "layer/q", "w"), (0, 3, 5), np.nan, warm=False)
    try:
        assert live.http.get("/health").status_code == 200
        with live.http.stream("POST", "/v1/completions", json=REQUESTS["stream"][1]) as answer:
            [line] = [line for line in answer.iter_lines() if line]
        error = strictly(line.removeprefix("data: "))["error"]
        assert "of the weights layers/0/layer/q/w are NaN or infinite" in error["message"]
        assert live.http.get("/health").status_code == 503
        assert live.refused(REQUESTS["stream"][1])[0] == 500
    finally:
        live.close()


def greedy(name: str) -> dict[str, int]:
    """Return what makes a request greedy: random answers may contain `TOKEN` and overflow."""
    if name in ("embeddings", "base64"):
        return {}
    return {"temp": 0} if name == "complete" else {"temperature": 0}


@pytest.mark.slow
def test_only_requests_that_overflow_get_an_error():
    live = serve(("embed", "embedding", "w"), TOKEN, 3e38, warm=True)
    try:
        for name, (path, body) in REQUESTS.items():
            field = "input" if "input" in body else "prompt"
            if field in body:
                body = body | {field: [[65, TOKEN, 66]]}
                with live.http.stream("POST", path, json=body) as answer:
                    text = answer.read().decode()
                if body.get("stream"):
                    error = strictly(text.strip().removeprefix("data: "))["error"]
                else:
                    assert answer.status_code == 500, name
                    error = check_error(answer)
                assert error["message"].endswith("an activation has overflowed; change the prompt")
            if name == "json":
                continue  # the other prompts need not end within 9 tokens
            answer = live.http.post(path, json=REQUESTS[name][1] | greedy(name))
            assert answer.status_code == 200, name
            for line in answer.text.splitlines() if "stream" in name else [answer.text]:
                if line.removeprefix("data: ") not in ("", "[DONE]"):
                    strictly(line.removeprefix("data: "))
        assert live.http.get("/health").status_code == 200
    finally:
        live.close()
