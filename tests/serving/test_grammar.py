"""Answers in a given format: `response_format` over HTTP, with random choices of a network."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jsonschema
import numpy as np
import openai
import pytest
from pydantic import BaseModel

from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import (
    byte_tokenizer,
    character_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from mesh_transformer.serving.answer import TokenTexts
from mesh_transformer.serving.engine import ConstraintError
from mesh_transformer.serving.grammar import Grammars
from mesh_transformer.util import InputError
from tests.support.hostile_requests import response_format
from tests.support.live_server import check_error
from tests.support.mixes import bits_of

pytest_plugins = ["tests.support.live_fixtures"]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["old", "new"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    {
        "type": "array",
        "items": {"type": "integer", "minimum": -5, "maximum": 900},
        "minItems": 2,
        "maxItems": 2,
    },
    {"anyOf": [{"const": "yes"}, {"type": "null"}]},
]
CHARACTERS = '{}[]":, -.eE+0123456789 abcdefghijklmnopqrstuvwxyz'
TOKENIZERS = {
    "GPT-2": (load_tokenizer, 50400),
    "bytes": (byte_tokenizer, 257),
    "characters": (lambda: character_tokenizer([CHARACTERS]), 64),
    "trained": (lambda: train_tokenizer([json.dumps(SCHEMAS)] * 3, 300), 320),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def grammars(request) -> tuple[Grammars, TokenTexts, int]:
    make, n_vocab = TOKENIZERS[request.param]
    words = TokenTexts(make())
    return Grammars(words, n_vocab), words, n_vocab


def tokens_in(bits: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.quick(3)
@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_every_choice_of_allowed_tokens_fits_the_schema(grammars, number):
    made, words, n_vocab = grammars
    original = made.json(json.dumps(SCHEMAS[number]))
    for seed in range(10):
        rng, form, answer = np.random.default_rng(seed), original.copy(), []
        for _ in range(150):
            allowed = tokens_in(form.allowed)
            assert allowed
            assert max(allowed) < n_vocab
            token = int(rng.choice(allowed))
            if token == words.end:
                break
            answer.append(token)
            if form.add(token):
                break
        else:
            pytest.fail(f"{words.text(answer)!r} does not end")
        jsonschema.validate(json.loads(words.text(answer)), SCHEMAS[number])


def test_a_wrong_token_and_an_impossible_continuation_are_errors():
    words = TokenTexts(character_tokenizer(['{"a}']))
    made = Grammars(words, 16)
    form = made.json()
    with pytest.raises(ConstraintError):
        form.add(words.tokenizer("a")["input_ids"][0])
    with pytest.raises(InputError, match="no token"):
        made.json(json.dumps({"type": "boolean"}))  # there is no t or f


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"type": "string", "pattern": "(?<=a)b"}, "look-around"),
        ({"not": {}}, 'Unimplemented keys: ["not"]'),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"enum": []}, ""),
        ({"maximum": 10**400}, ""),
    ],
)
def test_invalid_schemas_are_refused_in_one_line(live, schema, words):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    status, error = live.refused({"prompt": "a", "response_format": form})
    assert (status, error["param"]) == (400, "response_format")
    assert error["message"].startswith("response_format: ")
    assert words in error["message"]
    assert error["message"].isprintable()


@pytest.mark.parametrize(
    "form",
    [
        "json_object",
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "text", "json_schema": {"name": "x", "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": []}},
    ],
    ids=str,
)
def test_other_formats_are_refused(live, form):
    status, error = live.refused({"prompt": "a", "response_format": form})
    assert (status, error["param"]) == (400, "response_format")
    assert "expected an object whose type is text, json_object, or json_schema" in error["message"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [{}, {"stream": True}, {"fixed_shapes": True}])
def test_answers_fit_the_schema_and_neighbours_are_as_without(serve, options):
    live = serve(fixed_shapes=options.pop("fixed_shapes", False), speculate=2)
    prompts = ["Say: ", "Tell me more", "x"]
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        answers = client.completions.create(
            model="fake",
            prompt=prompts[0],
            n=3,
            max_tokens=150,
            seed=5,
            extra_body={"response_format": response_format(PERSON)},
            **options,
        )
        texts, finish = [""] * 3, [""] * 3
        for answer in answers if options else [answers]:
            for choice in answer.choices:
                texts[choice.index] += choice.text
                finish[choice.index] = choice.finish_reason or finish[choice.index]
    assert finish == ["stop"] * 3
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    # Requests with and without a format at the same time.
    live.network.calls.clear()
    live.network.allowed.clear()
    bodies = [
        {"prompt": prompt, "max_tokens": 40, "seed": seed}
        | ({"response_format": {"type": "json_object"}} if seed % 2 else {})
        for seed, prompt in itertools.product(range(2), prompts)
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        running = [pool.submit(live.ask, **body) for body in bodies]
        live.network.allowed.set()
        for body, future in zip(bodies, running, strict=True):
            (choice,) = future.result()["choices"]
            if "response_format" in body:
                assert choice["text"].startswith('{"')
            else:
                prompt = live.tokenizer(body["prompt"])["input_ids"]
                assert choice["text"] == live.text(prompt, body["seed"], 40)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stream", [False, True])
def test_an_end_token_that_is_ordinary_ends_no_answer_in_a_format(serve, stream):
    tokens = load_tokenizer()([*'{}":, an1'])["input_ids"]
    live = serve(network={"end_tokens": [number for (number,) in tokens]})
    body = {"prompt": "Say: ", "n": 4, "max_tokens": 150, "seed": 3}
    body["response_format"] = response_format(PERSON)
    if stream:
        texts, finish = [""] * 4, [""] * 4
        for event in live.stream(**body):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
                finish[choice["index"]] = choice["finish_reason"]
    else:
        choices = live.ask(**body)["choices"]
        texts = [choice["text"] for choice in choices]
        finish = [choice["finish_reason"] for choice in choices]
    assert finish == ["stop"] * 4
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


def test_an_ordinary_token_is_no_end_for_the_grammar_of_a_tokenizer_without_one():
    tokenizer = character_tokenizer([CHARACTERS])
    tokenizer.eos_token = None
    (end,) = tokenizer("}", add_special_tokens=False)["input_ids"]
    config = Config(layers=1, d_model=64, n_heads=1, n_vocab=64, end_tokens=[end])
    words = TokenTexts(tokenizer, config)
    assert words.ends == {end}
    form = Grammars(words, 64).json(json.dumps({"const": {"a": 1}}))
    for token in tokenizer('{"a": 1', add_special_tokens=False)["input_ids"]:
        assert not form.add(token)
    assert tokens_in(form.allowed) == [end]
    assert form.add(end)


class Person(BaseModel):
    """A schema as OpenAI's client makes it."""

    age: Literal[3, 50]
    ok: bool


@pytest.mark.slow
def test_a_chat_answers_in_json(serve, tmp_path):
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    live = serve(template=str(tmp_path / "template"))
    talk = [{"role": "user", "content": "Hello"}]
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.parse(
            model="fake", messages=talk, response_format=Person, max_tokens=20
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Person)


@pytest.mark.slow
def test_an_answer_that_is_cut_ends_with_length_and_one_that_cannot_go_on_with_an_error(serve):
    live = serve()
    body = {"prompt": "Say: ", "seed": 1, "max_tokens": 5}
    (choice,) = live.ask(**body, response_format=response_format(PERSON))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith('{"name": ')
    # ignore_eos does not apply to the end of a complete answer.
    yes = response_format({"const": "yes"})
    (choice,) = live.ask(**body, response_format=yes, ignore_eos=True)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ('"yes"', "stop")
    assert live.engine.active == 0


def test_an_answer_that_cannot_be_continued_is_an_error_of_its_request_alone(serve, monkeypatch):
    live = serve()

    def fail(_, token: int) -> bool:
        raise ConstraintError("too complex")

    monkeypatch.setattr("mesh_transformer.serving.grammar.Format.add", fail)
    body = {"prompt": "Say: ", "max_tokens": 9, "response_format": {"type": "json_object"}}
    answer = live.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert check_error(answer)["message"] == "response_format: too complex; change the schema"
    assert live.ask(prompt="a", max_tokens=3)["choices"]
    assert live.engine.active == 0


def test_bits_are_read_as_they_are_written():
    assert tokens_in(bits_of(np.array([0, 31, 32, 50399]), 50400)) == [0, 31, 32, 50399]
