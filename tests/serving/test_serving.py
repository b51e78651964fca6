"""The server over HTTP, on a fake network whose tokens are all known in advance."""

import asyncio
import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest

from mesh_transformer.serving.requests import ChatRequest, CompletionRequest, ContextRequest
from tests.support.fake_network import FakeNetwork
from tests.support.live_server import Live
from tests.support.llama_tokenizers import LLAMA_LIKE

pytest_plugins = ["tests.support.live_fixtures"]

# Answers.


@pytest.mark.parametrize("prompt", ["Hello there", [15496, 612], "", "世"])
def test_prompt_can_be_text_or_tokens(live, prompt):
    tokens = live.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    tokens = tokens or [50256]
    answer = live.ask(prompt=prompt, max_tokens=40, seed=3)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    [choice] = answer["choices"]
    assert choice == {
        "index": 0,
        "text": live.text(tokens, 3, 40),
        "logprobs": None,
        "finish_reason": "length",
    }
    assert answer["usage"] == {
        "prompt_tokens": len(tokens),
        "completion_tokens": 40,
        "total_tokens": len(tokens) + 40,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_several_prompts_with_several_answers_each(live):
    prompts = ["One", "Two and more", "Three"]
    answer = live.ask(prompt=prompts, n=2, max_tokens=9, seed=5)
    texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
    tokens = [live.tokenizer(prompt)["input_ids"] for prompt in prompts]
    assert texts == {
        index: live.text(tokens[index // 2], 5 + index, 9) for index in range(2 * len(prompts))
    }
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))
    assert answer["usage"]["completion_tokens"] == 6 * 9
    assert live.ask(prompt=tokens, n=2, max_tokens=9, seed=5)["choices"] == answer["choices"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 3])
def test_streamed_pieces_are_whole_characters_and_add_up_to_the_answer(live, echo, logprobs):
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


@pytest.mark.parametrize("kind", LLAMA_LIKE)
def test_without_a_prompt_an_answer_begins_a_text(kind):
    tokenizer = LLAMA_LIKE[kind]()
    live = Live(FakeNetwork(range(9), n_vocab=len(tokenizer)), tokenizer, None)
    try:
        answer = live.ask(max_tokens=1, echo=True, logprobs=0)
        assert answer["choices"][0]["logprobs"]["tokens"][0] == "<s>"
        assert answer["usage"]["prompt_tokens"] == 1
    finally:
        live.close()


def test_usage_is_reported_at_the_end_of_a_stream(live):
    body = {"prompt": "a b c", "max_tokens": 5, "seed": 1}
    events = list(live.stream(**body, stream_options={"include_usage": True}))
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == live.ask(**body)["usage"]


@pytest.mark.slow
def test_stop_sequences_end_the_text_before_them(live):
    rng = random.Random(0)
    prompt, length = [1], 40
    for _ in range(150):
        seed = rng.randrange(200)
        text = live.text(prompt, seed, length)
        begin = rng.randrange(len(text) - 8)
        stops = [text[begin : begin + rng.randint(1, 8)], "never there", text[:3] + "§"]
        rng.shuffle(stops)
        # The stop sequence that ends first counts, because the text is not generated further.
        ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
        expected = text[: min(ends)[0]].removesuffix(min(ends, key=lambda e: (e[0], -len(e[1])))[1])
        body = {"prompt": prompt, "seed": seed, "max_tokens": length, "stop": stops, "logprobs": 0}
        [choice] = live.ask(**body)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
        pieces = [event["choices"][0] for event in live.stream(**body)]
        assert "".join(piece["text"] for piece in pieces) == expected
        assert all(offset < len(expected) for offset in choice["logprobs"]["text_offset"])
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
    assert choice["text"] == "one two three four"  # as transformers skips special tokens


def test_logprobs_match_their_text(live):
    for seed in range(30):
        answer = live.ask(prompt="Hi", max_tokens=25, seed=seed, logprobs=2)
        [choice] = answer["choices"]
        logprobs, text = choice["logprobs"], choice["text"]
        numbers = live.network.answer(live.tokenizer("Hi")["input_ids"], seed, 25)
        # f32 in the network and decimal in JSON, so equal up to the precision of f32.
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
    [longer] = live.ask(**body, max_tokens=1)["choices"]
    [prompt_only] = live.ask(**body, max_tokens=0)["choices"]
    answer = live.text(prompt, 2, 1)
    assert (prompt_only["text"], longer["text"]) == (
        "The 世界 is 🎉 big",
        "The 世界 is 🎉 big" + answer,
    )
    for key in longer["logprobs"]:
        assert longer["logprobs"][key][:-1] == prompt_only["logprobs"][key]
    logprobs = live.network.logprobs()
    assert prompt_only["logprobs"]["token_logprobs"][0] is None
    assert prompt_only["logprobs"]["token_logprobs"][1:] == logprobs[prompt[1:]].tolist()
    assert max(prompt_only["logprobs"]["top_logprobs"][1].values()) == pytest.approx(logprobs.max())
    assert prompt_only["logprobs"]["text_offset"][:2] == [0, 3]


def test_sampling_settings_reach_the_network(live):
    given = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": 9}
    given |= {"typical_p": 0.5}
    penalties = {"repetition_penalty": 1.5, "presence_penalty": -2, "frequency_penalty": 0.75}
    live.ask(prompt="Hi", max_tokens=2, logit_bias={"5": -3.5, "0": 100}, **given, **penalties)
    settings = live.network.settings
    assert [row[0] for row in settings[:9]] == [0.25, 7, 0.5, 1.5, 9, 0.125, -2, 0.75, 0.5]
    assert settings.biased_BN[0, :2].tolist() == [5, 0]
    assert settings.bias_BN[0, :3].tolist() == [-3.5, 100, 0]


def test_original_servers_request_format(live):
    tokens = live.tokenizer("eleutherai")["input_ids"]
    body = {"context": "eleutherai", "top_p": 0.9, "temp": 0.75}
    answer = live.http.post("/complete", json=body | {"seed": 4})
    result = answer.json()
    assert result["completion"] == live.text(tokens, 4, 500)[: len(result["completion"])]
    assert set(result) == {"context", "completion", "time"}
    # Only the last 64 tokens of a context that is too long are used.
    context = "word " * 5000
    result = live.http.post("/complete", json={"context": context, "length": 8, "seed": 1}).json()
    as_text = {"context": context, "length": 8, "seed": 1, "top_p": "0.9", "temp": "1"}
    assert live.http.post("/complete", json=as_text).json()["completion"] == result["completion"]
    assert result["completion"] == live.text([0] * 64, 1, 8)


def test_seeds_outside_32_bits_are_reduced(live):
    body = {"prompt": "x", "max_tokens": 12}
    texts = [live.ask(**body, seed=seed)["choices"] for seed in (-1, 2**32 - 1, 2**64 - 1)]
    assert texts[0] == texts[1] == texts[2]
    several = {live.ask(**body)["choices"][0]["text"] for _ in range(8)}
    assert len(several) > 1  # each request without a seed gets a random one


def test_each_answer_has_its_own_seed(serve, monkeypatch):
    """However the answers of a request are asked for, with a seed and without."""
    live, requests = serve(template="plain"), []
    monkeypatch.setattr(live.engine, "submit", requests.extend)

    def seeds(begin: Callable[[Any], Any], body: Any) -> list[int]:
        requests.clear()
        asyncio.run(begin(body))
        return [request.settings.seed for request in requests]

    prompts, talk = ["Once upon"] * 6, [{"role": "user", "content": "Hello"}]
    for path, count, kind, body in (
        (live.service.completion, 6, CompletionRequest, {"prompt": prompts}),
        (live.service.completion, 24, CompletionRequest, {"prompt": prompts, "n": 4}),
        (live.service.completion, 8, CompletionRequest, {"prompt": prompts[0], "n": 8}),
        (live.service.chat, 8, ChatRequest, {"messages": talk, "n": 8}),
        (live.service.continuation, 1, ContextRequest, {"context": "Once upon"}),
    ):
        several = [seeds(path, kind(**body)) for _ in range(3)]
        assert len({seed for each in several for seed in each}) == 3 * count
        last = 2**32 - 3
        assert seeds(path, kind(**body, seed=last)) == [(last + n) % 2**32 for n in range(count)]


# Third-party clients.


def test_openai_client(live, serve, tmp_path):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        request = {"model": "fake", "prompt": "Hello", "max_tokens": 20, "seed": 7}
        whole = client.completions.create(**request, logprobs=2, n=2, echo=True)
        assert whole.choices[0].text == "Hello" + live.text([15496], 7, 20)
        assert len(whole.choices[1].logprobs.tokens) == 21
        pieces = list(client.completions.create(**request, stream=True))
        assert "".join(p.choices[0].text for p in pieces) == live.text([15496], 7, 20)
        assert [model.id for model in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").id == "fake"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-3.5-turbo-instruct", prompt="")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(**request | {"max_tokens": 10**6})
        with pytest.raises(openai.BadRequestError, match="beams"):
            client.completions.create(**request, extra_body={"beams": 3})
    (tmp_path / "keys").write_text("# ours\nsecret-1\n\nsecret-2\n")
    locked = serve(keys=str(tmp_path / "keys"))
    for key, right in [("secret-1", True), ("secret-2", True), ("secret-3", False), ("# ours", 0)]:
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0) as client:
            if right:
                assert client.completions.create(**request).choices[0].text
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.completions.create(**request)
    for path in ("/health", "/metrics", "/"):
        assert locked.http.get(path).status_code == 200
    for headers in ({}, {"Authorization": "Basic secret-1"}, {"Authorization": "secret-1"}):
        status, error = locked.refused({"context": "x"}, "/complete", headers=headers)
        assert (status, error["code"]) == (401, "invalid_api_key")


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(live):
    def curl(path: str, body: dict[str, Any], *options: str) -> str:
        command = ["curl", "-sS", "--max-time", "30", *options, live.url + path]
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout

    expected = live.text([15496], 1, 9)
    request = {"prompt": "Hello", "max_tokens": 9, "seed": 1}
    assert json.loads(curl("/v1/completions", request))["choices"][0]["text"] == expected
    lines = curl("/v1/completions", request | {"stream": True}, "-N").split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2]]
    assert "".join(pieces) == expected
    request = {"context": "Hello", "top_p": 0.9, "temp": 0.7, "length": 9, "seed": 1}
    assert json.loads(curl("/complete", request))["completion"] == expected


def test_lm_eval_local_completions(live, tmp_path):
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    live.tokenizer.save_pretrained(tmp_path)
    client = LocalCompletionsAPI(
        base_url=f"{live.url}/v1/completions",
        model="fake",
        tokenizer_backend="huggingface",
        tokenizer=str(tmp_path),
        num_concurrent=1,
        max_length=64,
    )
    logprobs = live.network.logprobs()
    texts = [("The answer is", " yes or no"), ("", "Hello there"), ("One", " 世界")]
    requests = [Instance("loglikelihood", {}, text, 0) for text in texts]
    for (_, end), (actual, greedy) in zip(texts, client.loglikelihood(requests), strict=True):
        tokens = live.tokenizer(end)["input_ids"]
        assert actual == pytest.approx(logprobs[tokens].sum())
        assert not greedy
    until = Instance("generate_until", {}, ("Hello", {"until": ["🎉"], "max_gen_toks": 40}), 0)
    [text] = client.generate_until([until])
    # lm-eval uses the seed 1234.
    assert text == live.text([15496], 1234, 40).partition("🎉")[0]


def test_each_request_has_an_id_and_a_line_in_the_log(live):
    body = {"prompt": "Hello there", "max_tokens": 7, "n": 2}
    for stream in (False, True):
        name = f"mine-{stream}"
        response = live.http.post(
            "/v1/completions", json=body | {"stream": stream}, headers={"X-Request-Id": name}
        )
        assert response.headers["x-request-id"] == name
        line = live.logged(name)
        assert line.pop("seconds") > 0
        assert line.pop("time").endswith("+00:00")
        assert line == {
            "id": name,
            "client": "127.0.0.1",
            "method": "POST",
            "path": "/v1/completions",
            "status": 200,
            "prompt_tokens": 2,
            "completion_tokens": 14,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
    refused = live.http.post("/v1/completions", json={"beams": 2})
    assert live.logged(refused.headers["x-request-id"])["status"] == 400
    for bad in ("a b", "x" * 129, ""):
        response = live.http.get("/health", headers={"X-Request-Id": bad})
        assert response.headers["x-request-id"].startswith("req-")
    assert "Hello" not in live.log.getvalue()


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


def test_head_is_answered_as_get_without_the_body(live):
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/fake", "/openapi.json"):
        head, get = live.http.head(path), live.http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["Content-Type"] == get.headers["Content-Type"]
        if path != "/metrics":  # which changes
            assert head.headers["Content-Length"] == str(len(get.content))
        assert live.logged(head.headers["x-request-id"])["method"] == "HEAD"
    assert live.http.head("/v1/completions").status_code == 405
    assert live.http.head("/none").status_code == 404
    assert live.ask(prompt="x", max_tokens=3)["choices"]


def test_page_refers_to_no_other_site(live):
    answer = live.http.get("/")
    assert answer.headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert not re.findall(r"(?:https?:)?//[a-z]", answer.text)
    assert live.http.get("/health").json() == {"status": "ok", "model": "fake"}


def test_the_models_settings_apply_where_a_request_has_none(serve):
    live = serve(sampling={"temp": 0.25, "top_k": 5, "repetition_penalty": 1.5})

    def used(**body):
        live.ask(prompt="a", max_tokens=1, **body)
        settings = live.network.settings
        names = ("temp_B", "top_k_B", "penalty_B", "top_p_B")
        return [float(np.ravel(getattr(settings, name))[0]) for name in names]

    assert used() == [0.25, 5, 1.5, 1]
    assert used(temperature=1, top_p=0.5) == [1, 5, 1.5, 0.5]
    assert used(temperature=0.0, top_k=0, repetition_penalty=1)[0] == 0
