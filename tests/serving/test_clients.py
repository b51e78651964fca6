"""Requests that clients of OpenAI's API have sent by default, as recorded, sent again."""

import json
from typing import Any

import pytest

from tests.conftest import DATA
from tests.support.live_server import Live

pytest_plugins = ["tests.support.live_fixtures"]

# Client and version -> requests, each with the status that it must get.  Long texts are shortened.
CLIENTS: dict[str, list[dict[str, Any]]] = json.loads(
    (DATA / "client_bodies.json").read_text("utf-8")
)
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def live(serve) -> Live:
    names = ["fake", "dummy"]  # huggingface_hub has no name for the model of a local server
    return serve(template="plain", pooling="last", names=names, network={"window": 512})


def prompts_of(live: Live, body: dict[str, Any]) -> list[list[int]]:
    """Return the prompts of a request as token ids."""
    if "messages" in body:
        texts = []
        for message in body["messages"]:
            content = message["content"]
            if isinstance(content, list):
                content = "".join(part["text"] for part in content)
            answers = message["role"] == "assistant"
            content = content.strip() + END if answers else content
            texts.append(f"{message['role'].capitalize()}: {content}")
        prompts = ["\n\n".join([*texts, "Assistant:"])]
    else:
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    return [live.tokenizer(x)["input_ids"] if isinstance(x, str) else x for x in prompts]


def texts_of(response: Any, body: dict[str, Any]) -> dict[int, str]:
    """Return the text of each answer; check what the response of a stream ends with."""
    if not body.get("stream"):
        events = [response.json()]
    else:
        *lines, end = [line for line in response.text.split("\n\n") if line]
        assert end == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        options = body.get("stream_options") or {}
        assert ("usage" in events[0]) == bool(options)
        assert bool(events[0].get("usage")) == options.get("continuous_usage_stats", False)
    texts: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        message = choice.get("message") or choice.get("delta") or choice
        texts[choice["index"]] = texts.get(choice["index"], "") + message.get("content", "")
        texts[choice["index"]] += message.get("text", "")
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_requests_of_a_client_are_answered(live, client):
    for request in CLIENTS[client]:
        path, body = request["path"], request.get("body")
        if body is not None and path != "/v1/embeddings":
            body |= {"seed": 7}
        response = live.http.request(request["method"], path, json=body)
        assert response.status_code == request["status"], response.text
        if request["status"] == 400:  # tools are not supported
            assert response.json()["error"]["param"] in ("tools", "tool_choice")
        elif path == "/v1/embeddings":
            texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
            assert len(response.json()["data"]) == len(texts)
        elif body is not None:
            check_texts(live, body, texts_of(response, body))


def check_texts(live: Live, body: dict[str, Any], actual: dict[int, str]) -> None:
    """Check the texts of a request's answers, with the seed 7."""
    length = body.get("max_tokens") or body["max_completion_tokens"]
    prompts, n = prompts_of(live, body), body.get("n") or 1
    assert sorted(actual) == list(range(len(prompts) * n))
    stops = body.get("stop") or []
    for index, text in actual.items():
        prompt = prompts[index // n]
        if (body.get("response_format") or {}).get("type") in ("json_object", "json_schema"):
            assert text.startswith("{")
            continue
        expected = live.text(prompt, 7 + index, length)
        for stop in stops if isinstance(stops, list) else [stops]:
            expected = expected.partition(stop)[0]
        assert text == (live.tokenizer.decode(prompt) if body.get("echo") else "") + expected
