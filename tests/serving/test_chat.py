"""Conversations over HTTP, on a fake network whose tokens are all known in advance."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from mesh_transformer.data.tokenizer import load_tokenizer
from tests.support.fake_network import FakeNetwork
from tests.support.live_server import Live, check_error

pytest_plugins = ["tests.support.live_fixtures"]

# A template that, like many, refuses conversations whose roles do not alternate.
TEMPLATE = """\
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate') }}
{%- endif -%}
<{{ message.role }}>{{ message.content }}
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}
"""
TALK = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": "?"}]},
]
TEXT = {"type": "text", "text": "a"}
CONTINUED = {"continue_final_message": True}
RENDERED = "<user>Hello<assistant>Hi!<user>Who?<assistant>"


@pytest.fixture(scope="module")
def chat(serve, tmp_path_factory) -> Live:
    path = tmp_path_factory.mktemp("chat") / "template.jinja"
    path.write_text(TEMPLATE)
    return serve(template=str(path))


@pytest.fixture
def client(chat) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chat.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(chat: Live, messages: Any = TALK, **body: Any) -> dict[str, Any]:
    response = chat.http.post("/v1/chat/completions", json={"messages": messages} | body)
    assert response.status_code == 200, response.text
    return response.json()


def test_messages_are_rendered_and_answered(chat):
    prompt = chat.tokenizer(RENDERED)["input_ids"]
    answer = ask(chat, max_tokens=20, seed=3, n=2)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    for index, choice in enumerate(answer["choices"]):
        content = chat.text(prompt, 3 + index, 20)
        assert choice == {
            "index": index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 40,
        "total_tokens": len(prompt) + 40,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_answers_equal_those_to_the_rendered_prompt(chat):
    text = chat.text(chat.tokenizer(RENDERED)["input_ids"], 8, 30)
    options = {"max_tokens": 30, "seed": 8, "stop": text[20:24], "temperature": 0.5}
    completion = chat.ask(prompt=RENDERED, **options)["choices"][0]
    choice = ask(chat, **options)["choices"][0]
    assert choice["message"]["content"] == completion["text"]
    assert choice["finish_reason"] == completion["finish_reason"] == "stop"


def test_an_answer_fills_the_context_by_default(chat):
    answer = ask(chat, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == chat.network.config.window
    assert answer["choices"][0]["finish_reason"] == "length"


def test_openai_client_streams_and_reads_logprobs(chat, client):
    request: dict[str, Any] = {"model": "fake", "messages": TALK, "seed": 5}
    request |= {"max_completion_tokens": 25, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**request).choices[0]
    chunks = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage.completion_tokens == 25
    pieces = [chunk.choices[0] for chunk in chunks[:-1]]
    assert [piece.delta.role for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    assert "".join(piece.delta.content for piece in pieces) == whole.message.content
    assert pieces[-1].finish_reason == whole.finish_reason == "length"
    tokens = whole.logprobs.content
    streamed = [token for piece in pieces for token in piece.logprobs.content]
    assert streamed == tokens
    numbers = chat.network.answer(chat.tokenizer(RENDERED)["input_ids"], 5, 25)
    answer = b"".join(bytes(token.bytes) for token in tokens)  # the last character may be cut
    assert answer.decode(errors="replace") == chat.tokenizer.decode(numbers)
    assert [token.logprob for token in tokens] == pytest.approx([-1 - n / 50400 for n in numbers])
    assert all([top.token for top in token.top_logprobs] == ["!", '"'] for token in tokens)


def test_the_plain_template_is_that_of_completion_records(serve):
    plain = serve(template="plain")
    # The model's own answer begins with a space, which must not be doubled in the next turn.
    talk = [TALK[0], {"role": "assistant", "content": " Hi!"}, TALK[2]]
    answer = ask(plain, talk, max_tokens=9, seed=1)
    rendered = "User: Hello\n\nAssistant: Hi!<|endoftext|>\n\nUser: Who?\n\nAssistant:"
    prompt = plain.tokenizer(rendered)["input_ids"]
    assert answer["choices"][0]["message"]["content"] == plain.text(prompt, 1, 9)
    assert plain.tokenizer.eos_token_id in prompt


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "messages: found no value, expected a list of 1 to 1024 messages"),
        ({"messages": []}, "messages: found [], expected a list of 1 to 1024 messages"),
        ({"messages": "Hello"}, 'messages: found "Hello", expected a list of 1 to 1024 messages'),
        ({"messages": TALK * 342}, "messages: found [{"),
        ({"messages": TALK[1:]}, "messages: the chat template fails: roles must alternate; change"),
        ({"messages": TALK, "max_tokens": 501}, "max_tokens: found 501, expected at most 500"),
        (
            {"messages": TALK, "max_completion_tokens": 501},
            "max_completion_tokens: found 501, expected at most 500",
        ),
        (
            {"messages": TALK, "top_logprobs": 2},
            "top_logprobs: found 2, expected no value unless logprobs is true",
        ),
        (
            {"messages": [{"role": "user", "content": "many words " * 100}]},
            "messages: 207 tokens, but the model's context is 64 tokens; shorten the messages",
        ),
        (
            {"messages": TALK, "tools": [{}]},
            "tools: found [{}], expected no value, as the chat template has no such variable",
        ),
        ({"messages": TALK, "tools": ["a"]}, 'tools: found ["a"], expected a list of at most 128'),
        (
            {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking: found false, expected no value, as the chat",
        ),
        (
            {"messages": TALK, "chat_template_kwargs": {"add_generation_prompt": False}},
            "messages: the chat template fails: ",
        ),
        (
            {"messages": TALK, "chat_template_kwargs": dict.fromkeys(map(str, range(65)))},
            "chat_template_kwargs: found {",
        ),
        ({"messages": TALK, "store": True}, "store: found true, expected false, as nothing is"),
        (
            {"messages": TALK, "functions": [{}]},
            "functions: found [{}], expected no tools, as they",
        ),
        ({"messages": TALK, "top_logprobs": 21}, "top_logprobs: found 21, expected a whole number"),
        (
            {"messages": TALK, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt: found true, expected no value or false if continue_final_mess",
        ),
        (
            {"messages": [*TALK, {"role": "assistant", "content": " "}], **CONTINUED},
            'messages[3].content: found " ", expected a text to continue',
        ),
        (
            {"messages": TALK, "response_format": {"type": "xml"}},
            'response_format: found {"type": "xml"}, expected an object whose type is text, json',
        ),
        ({"messages": TALK, "prompt": "a"}, "prompt: found an unknown key, expected only model,"),
        ({"messages": TALK, "model": "gpt-4"}, "the model 'gpt-4' does not exist; use 'fake'"),
    ],
)
def test_errors_name_the_field(chat, wrong, message):
    for stream in (False, True):
        response = chat.http.post("/v1/chat/completions", json=wrong | {"stream": stream})
        assert check_error(response)["message"].startswith(message)


@pytest.mark.parametrize(
    ("message", "place", "problem"),
    [
        ("a", "", 'found "a", expected an object with the keys role and content'),
        ({"content": "a"}, ".role", "found no value, expected a text of 1 to 64 characters"),
        ({"role": "", "content": "a"}, ".role", 'found "", expected a text of 1 to 64'),
        ({"role": "user"}, ".content", "found no value, expected a text, or a list of at most"),
        ({"role": "user", "content": None}, ".content", "found no value, expected a text, or a"),
        ({"role": "user", "content": 5}, ".content", "found 5, expected a text, or a list of at"),
        ({"role": "user", "content": [{}] * 1025}, ".content", "found [{}, {}, "),
        ({"role": "user", "content": ["a"]}, ".content[0]", 'found "a", expected an object with'),
        (
            {"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": "x"}}]},
            ".content[1].type",
            'found "image_url", expected text',
        ),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text", "found no value, ex"),
        (
            {"role": "user", "content": [TEXT, TEXT | {"cache": True}]},
            ".content[1].cache",
            "found an unknown key, expected only type, text",
        ),
        ({"role": "user", "content": "a", "type": "image"}, ".type", 'found "image", expected mes'),
        (
            {"role": "user", "content": "a", "na\nme": 1},
            ".na\\nme",
            "found an unknown key, expected",
        ),
        (
            {"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]},
            ".tool_calls",
            'found [{"id": "x"}], expected an empty list, as calls are part of the text',
        ),
    ],
)
def test_errors_name_the_message(chat, message, place, problem):
    for before in (0, 2):
        body = {"messages": [TALK[at % 2] for at in range(before)] + [message, "not read"]}
        status, error = chat.refused(body, "/v1/chat/completions")
        where = f"messages[{before}]{place}"
        assert (status, error["param"]) == (400, where)
        assert error["message"].startswith(f"{where}: {problem}")
        assert error["message"].isprintable()
        assert len(error["message"]) < 330


@pytest.mark.parametrize("content", ["Well,", "Well, ", " Well"])
def test_a_final_message_can_be_continued(serve, chat, content):
    """The answer continues the content, in the text of the template up to it."""
    talk = [*TALK, {"role": "assistant", "content": content}]
    answer = ask(chat, talk, seed=1, max_tokens=9, **CONTINUED)
    prompt = chat.tokenizer(RENDERED + content)["input_ids"]
    assert answer["choices"][0]["message"]["content"] == chat.text(prompt, 1, 9)
    assert answer == ask(
        chat, talk, seed=1, max_tokens=9, add_generation_prompt=False, **CONTINUED
    ) | {key: answer[key] for key in ("id", "created")}
    plain = serve(template="plain")  # which removes the space at both ends
    answer = ask(plain, talk[-2:], seed=1, max_tokens=9, **CONTINUED)
    prompt = plain.tokenizer(f"User: Who?\n\nAssistant: {content.strip()}")["input_ids"]
    assert answer["choices"][0]["message"]["content"] == plain.text(prompt, 1, 9)


def test_a_prompt_without_the_beginning_of_an_answer(chat):
    answer = ask(chat, seed=1, max_tokens=9, add_generation_prompt=False)
    prompt = chat.tokenizer(RENDERED.removesuffix("<assistant>"))["input_ids"]
    assert answer["choices"][0]["message"]["content"] == chat.text(prompt, 1, 9)
    for default in ({"add_generation_prompt": True}, {"continue_final_message": False}):
        [choice] = ask(chat, seed=1, max_tokens=9, **default)["choices"]
        assert [choice] == ask(chat, seed=1, max_tokens=9)["choices"]


def test_a_token_has_up_to_20_alternatives(chat):
    for count in (0, 6, 20):
        options = {"seed": 1, "max_tokens": 5, "logprobs": True, "top_logprobs": count}
        [choice] = ask(chat, **options)["choices"]
        for token in choice["logprobs"]["content"]:
            words = [chat.tokenizer.decode([number]) for number in range(count)]
            assert [top["token"] for top in token["top_logprobs"]] == words


def test_usage_so_far_is_in_every_event(live, chat):
    """vLLM's extension, which guidellm asks for."""
    stream = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = live.stream(prompt="Say: ", max_tokens=30, seed=1, n=2, stream_options=stream)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 60
    assert last["usage"] == events[-1]["usage"]
    body = {"messages": TALK, "max_tokens": 9, "stream": True, "stream_options": stream}
    lines = chat.http.post("/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-2:] == [9, 9]


def test_a_model_can_have_several_names_or_any(serve):
    several = serve(names=["one", "two/2"], adapters=["tuned"])
    listed = [model["id"] for model in several.http.get("/v1/models").json()["data"]]
    assert listed == ["one", "two/2", "tuned"]
    body = {"prompt": "Say: ", "seed": 1, "max_tokens": 3}
    for name in ("one", "two/2"):
        answer = several.ask(**body, model=name)
        assert answer["model"] == name
        assert answer["choices"] == several.ask(**body)["choices"]
        assert several.http.get(f"/v1/models/{name}").json()["id"] == name
        assert not several.network.settings.adapter_B.any()
    assert several.ask(**body)["model"] == "one"
    status, error = several.refused(body | {"model": "three"})
    assert status == 404
    assert "use 'one' or 'two/2' or 'tuned'" in error["message"]
    anything = serve(names=["one"], any_name=True, adapters=["tuned"])
    for name in ("gpt-4o", "dummy", ""):
        assert anything.ask(**body, model=name)["model"] == (name or "one")
        assert not anything.network.settings.adapter_B.any()
    anything.ask(**body, model="tuned")
    assert anything.network.settings.adapter_B.tolist() == [1]


def test_an_answer_can_be_sent_back_as_a_message(chat, client):
    """With the keys of the client's own class, most of which are null."""
    request: dict[str, Any] = {"model": "fake", "seed": 5, "max_tokens": 4}
    first = client.chat.completions.create(messages=TALK[:1], **request).choices[0].message
    messages = [TALK[0], first.model_dump(), TALK[2]]
    assert None in messages[1].values()
    second = client.chat.completions.create(messages=messages, **request)
    rendered = f"<user>Hello<assistant>{first.content}<user>Who?<assistant>"
    prompt = chat.tokenizer(rendered)["input_ids"]
    assert second.choices[0].message.content == chat.text(prompt, 5, 4)


def test_values_that_change_nothing_are_accepted(chat):
    neutral = {
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "modalities": ["text"],
        "store": False,
        "metadata": {},
        "service_tier": "flex",
        "stream_options": {"include_obfuscation": False},
        "functions": [],
        "function_call": "auto",
        "top_logprobs": 0,
        "reasoning_effort": "low",
        "verbosity": "high",
        "prompt_cache_key": "a",
        "prompt_cache_retention": "24h",
        "safety_identifier": "b",
        "prediction": None,
        "anything": None,
    }
    choices = [ask(chat, seed=1, max_tokens=5, **body)["choices"] for body in ({}, neutral)]
    assert choices[0] == choices[1]
    more = {"type": "message", "tool_calls": [], "refusal": "", "annotations": [], "other": None}
    talk = [message | more for message in TALK]
    assert ask(chat, talk, seed=1, max_tokens=5)["choices"] == choices[0]
    refused = [TALK[0], {"role": "assistant", "content": None, "refusal": "Hi!"}, TALK[2]]
    assert ask(chat, refused, seed=1, max_tokens=5)["choices"] == choices[0]


def test_paths_of_a_server_that_can_chat(chat):
    error = chat.refused({"input": "Hello"}, "/v1/responses")[1]
    assert error["message"] == (
        "POST /v1/responses: not served; send messages to POST /v1/chat/completions"
    )
    described = json.loads(chat.http.get("/openapi.json").text)
    assert "/v1/chat/completions" in described["paths"]


# Reasoning, and other variables of templates.

THINKING = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages -%}
<{{ message.role }}>{{ message.content }}
{%- if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>
{%- if enable_thinking is false %}<think></think>{% endif %}
{%- if opened %}<think>\n{% endif %}{% endif -%}
"""
REASONING, CONTENT = "Is 2 < 3? Yes; so </b> is not a mark.", "The answer is 3."
ANSWER = f"<think>\n{REASONING}\n</think>\n\n{CONTENT}"


@pytest.fixture(scope="module", params=[False, True], ids=["ordinary", "special"])
def thinking(request, tmp_path_factory) -> Iterator[Live]:
    """A server whose answers with the right seed are `ANSWER`; its marks may be special tokens."""
    tokenizer: Any = load_tokenizer()
    if request.param:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    path = tmp_path_factory.mktemp("thinking") / "template.jinja"
    path.write_text(THINKING)
    live = Live(
        FakeNetwork(tokenizer(ANSWER + tokenizer.eos_token)["input_ids"], window=256),
        tokenizer,
        None,
        template=str(path),
    )
    yield live
    live.close()


def answer_at(live: Live, rendered: str, at: int = 0, **body: Any) -> dict[str, Any]:
    """Return a request whose rendered prompt is `rendered`, and whose answer begins at a token."""
    seed = (at - len(live.tokenizer(rendered)["input_ids"])) % len(live.network.script)
    return body | {"messages": TALK[:1], "seed": seed}


def test_reasoning_is_separated_in_whole_answers_and_in_streams(thinking):
    request = answer_at(thinking, "<user>Hello<assistant>", max_completion_tokens=200)
    [choice] = ask(thinking, request.pop("messages"), **request)["choices"]
    expected = {"role": "assistant", "content": CONTENT, "refusal": None}
    assert choice["message"] == expected | {"reasoning_content": REASONING}
    assert choice["finish_reason"] == "stop"
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none") as client:
        chunks = client.chat.completions.create(
            model="fake", messages=TALK[:1], **request, stream=True
        )
        deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    assert "".join(delta["content"] for delta in deltas) == CONTENT
    reasoning = [delta.get("reasoning_content") or "" for delta in deltas]
    assert "".join(reasoning) == REASONING
    assert sum(map(bool, reasoning)) > 2
    # An answer that is cut in its reasoning has no content.
    [choice] = ask(thinking, TALK[:1], **request | {"max_completion_tokens": 6})["choices"]
    assert choice["message"]["content"] == ""
    assert REASONING.startswith(choice["message"]["reasoning_content"])
    # JSON has no marks.
    form = {"response_format": {"type": "json_object"}}
    [choice] = ask(thinking, TALK[:1], **request | form | {"max_completion_tokens": 9})["choices"]
    assert "reasoning_content" not in choice["message"]


def test_values_of_variables_reach_the_template(thinking):
    """A prompt may open the reasoning itself, or close it."""
    opened = answer_at(
        thinking, "<user>Hello<assistant><think>\n", 2, chat_template_kwargs={"opened": True}
    )
    message = ask(thinking, opened.pop("messages"), **opened)["choices"][0]["message"]
    assert message["content"] == CONTENT
    assert REASONING in message["reasoning_content"]
    closed = answer_at(
        thinking,
        "<user>Hello<assistant><think></think>",
        -8,
        chat_template_kwargs={"enable_thinking": False},
        tools=[{"type": "function"}],
        tool_choice="none",
    )
    answer = ask(thinking, closed.pop("messages"), **closed)
    assert answer["choices"][0]["message"]["content"].endswith(CONTENT[-9:])
    assert "reasoning_content" not in answer["choices"][0]["message"]
    counts = [
        ask(thinking, TALK[:1], max_tokens=1, **body)["usage"]["prompt_tokens"]
        for body in ({}, {"tools": [{"type": "function"}]})
    ]
    text = '[{"type": "function"}]<user>Hello<assistant>'
    assert counts[1] == len(thinking.tokenizer(text)["input_ids"]) > counts[0]
    assert thinking.http.get("/v1/models").json()["data"][0]["thinking"] is True


def test_reasoning_that_is_sent_back_reaches_the_template(thinking):
    talk = [TALK[0], {"role": "assistant", "content": "Hi", "reasoning_content": "why"}, TALK[2]]
    text = "<user>Hello<assistant>Hi(why)<user>Who?<assistant>"
    usage = ask(thinking, talk, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == len(thinking.tokenizer(text)["input_ids"])
