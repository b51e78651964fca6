"""The tokens that end answers: as for transformers, whoever generates, and kept by conversions."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mesh_transformer
from mesh_transformer.checkpoint.conversion import convert
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.evaluation.network_lm import NetworkLM
from mesh_transformer.generation.sampling_settings import check_defaults
from mesh_transformer.serving.repl import Repl, Settings
from mesh_transformer.util import InputError
from tests.support.live_server import Live
from tests.support.torch_models import torch_model

LENGTH = 16
END, TURN, START = 256, 257, 258  # the tokenizer's end of text, and the tokens around messages
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.content }}<|turn|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder whose answers end with one of two tokens, or not at all."""
    path = tmp_path_factory.mktemp("ends") / "model"
    tokenizer: Any = load_tokenizer("bytes")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|start|>"]})
    tokenizer.chat_template = TEMPLATE
    network = torch_model(layers=1, vocab=259, seq=64, seed=1)
    with torch.no_grad():
        network.lm_head.bias[END:] += 3
        network.lm_head.bias[:END] -= 2 * (torch.arange(END) > 127)  # mostly ASCII
    network.generation_config.eos_token_id = [TURN, END]
    network.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def network(folder) -> Any:
    return mesh_transformer.load(folder, changes={"dtype": "float32"})


@pytest.fixture(scope="module")
def answers(folder) -> dict[str, list[int]]:
    """Random prompts, each with the tokens of the answer that transformers generates."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    rng, result = np.random.default_rng(0), {}
    for _ in range(12):
        prompt = bytes(rng.integers(97, 123, rng.integers(1, 9)).tolist()).decode()
        ids = torch.tensor([list(prompt.encode())])
        options = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0}
        result[prompt] = model.generate(ids, **options)[0, len(prompt) :].tolist()
    last = [tokens[-1] for tokens in result.values()]
    assert {END, TURN} < set(last)
    assert any(token not in (END, TURN) for token in last)
    assert any(START in tokens for tokens in result.values())
    return result


def text_of(folder: Path, tokens: list[int]) -> str:
    return load_tokenizer(folder).decode(tokens, skip_special_tokens=True)


@pytest.mark.slow
def test_generate_ends_as_transformers_does(network, answers):
    rows = [prompt.encode().rjust(9) for prompt in answers]
    tokens = np.array([list(row) for row in rows])
    actual = network.generate(tokens, [len(p) for p in answers], LENGTH, {"temp": 0})
    expected = [row + row[-1:] * (LENGTH - len(row)) for row in answers.values()]
    assert actual.tolist() == expected


@pytest.mark.slow
def test_the_terminal_ends_as_transformers_does(network, folder, answers):
    repl = Repl(network, load_tokenizer(folder), Settings(temp=0, length=LENGTH))
    for prompt, tokens in answers.items():
        pieces = list(repl.answer(prompt))
        assert "".join(piece for piece, _ in pieces) == text_of(folder, tokens)
        assert sum(count for _, count in pieces) == len(tokens) - (tokens[-1] in (END, TURN))


@pytest.mark.slow
def test_lm_eval_ends_as_its_own_model_does(network, folder, answers):
    from lm_eval.models.huggingface import HFLM

    def requests() -> list[Any]:
        stops = (["\n"], ["<|start|>"], ["e", "th"])
        return [
            SimpleNamespace(args=(prompt, {"until": list(stop), "max_gen_toks": LENGTH}))
            for prompt in answers
            for stop in stops
        ]

    theirs: Any = HFLM(
        pretrained=str(folder), dtype="float32", max_length=64, device="cpu", batch_size=1
    )
    ours = NetworkLM(network, load_tokenizer(folder))
    assert ours.generate_until(requests(), True) == theirs.generate_until(requests(), True)


@pytest.fixture(scope="module")
def live(network, folder) -> Any:
    server = Live(network, load_tokenizer(folder), None, template=str(folder / TEMPLATE_FILE))
    yield server
    server.close()


@pytest.mark.slow
def test_the_server_ends_as_transformers_does(live, folder, answers):
    request = {"prompt": list(answers), "max_tokens": LENGTH, "temperature": 0, "logprobs": 0}
    answer = live.ask(**request)
    for choice, tokens in zip(answer["choices"], answers.values(), strict=True):
        ended = tokens[-1] in (END, TURN)
        assert choice["text"] == text_of(folder, tokens)
        assert choice["finish_reason"] == ("stop" if ended else "length")
        assert len(choice["logprobs"]["tokens"]) == len(tokens)
        assert choice["logprobs"]["text_offset"][-1] <= len(choice["text"])
    usage = answer["usage"]["completion_tokens"]
    assert usage == sum(map(len, answers.values()))
    # A stop sequence that is a special token's name ends the answer at this token.
    for choice, tokens in zip(
        live.ask(**request, stop="<|start|>")["choices"], answers.values(), strict=True
    ):
        kept = tokens[: tokens.index(START)] if START in tokens else tokens
        assert choice["text"] == text_of(folder, kept)


@pytest.mark.slow
@pytest.mark.parametrize("end", [END, TURN])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_an_answer_in_a_format_may_end_with_each_of_them(live, end, kind):
    schema = {"name": "x", "schema": {"type": kind, "minimum": 1}}  # 0 would be complete
    form = {"type": "json_schema", "json_schema": schema}
    biases = {str(number): 100 if number == end else -100 for number in (END, TURN)}
    answer = live.ask(prompt=["a", "b"], response_format=form, logit_bias=biases, logprobs=0)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert float(choice["text"]) == json.loads(choice["text"])
        assert choice["logprobs"]["tokens"][-1] == live.service.words[end]


@pytest.mark.slow
def test_chats_end_as_transformers_does(live, folder, answers):
    """The answer to a message is that to the rendered text, which has special tokens already."""
    for message in list(answers)[:4]:
        body = {"messages": [{"role": "user", "content": message}], "temperature": 0}
        response = live.http.post("/v1/chat/completions", json=body | {"max_tokens": LENGTH})
        (choice,) = response.json()["choices"]
        prompt = [START, *message.encode(), TURN, START]
        expected = live.network.generate([prompt], [len(prompt)], LENGTH, {"temp": 0})[0].tolist()
        at = next((at for at, token in enumerate(expected) if token in (END, TURN)), LENGTH)
        assert choice["message"]["content"] == text_of(folder, expected[:at])
        assert choice["finish_reason"] == ("stop" if at < LENGTH else "length")
        assert response.json()["usage"]["prompt_tokens"] == len(prompt)


def test_conversions_keep_the_end_tokens(folder, tmp_path):
    native, again = tmp_path / "native", tmp_path / "again"
    convert(folder, "hf", native, "native")
    assert Source(native).config.end_tokens == [TURN, END]
    convert(native, "native", again, "hf")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((again / name).read_text())["eos_token_id"] == [TURN, END]
    assert Source(again).config.end_tokens == [TURN, END]


@pytest.mark.parametrize("template", [None, "{% for m in messages %}[{{ m.content }}]{% endfor %}"])
def test_conversions_keep_the_chat_template_and_the_sampling_settings(folder, tmp_path, template):
    """A template that is given once, too: in native checkpoints and for transformers."""
    from transformers import AutoTokenizer, GenerationConfig

    source, native = tmp_path / "source", tmp_path / "native"
    shutil.copytree(folder, source)
    own = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.5}
    path = source / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | own | {"do_sample": True}))
    convert(source, "hf", native, "native", chat_template=template)
    config = Source(native).config
    assert config.sampling == {"temp": 0.6, "top_k": 20, "repetition_penalty": 1.5}
    assert config.chat_template == (template or TEMPLATE)
    folders = [tmp_path / "once", tmp_path / "twice"]
    convert(native, "native", folders[0], "hf")
    convert(folders[0], "hf", folders[1], "hf")
    for name in (path.name for path in folders[0].iterdir()):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    theirs = GenerationConfig.from_pretrained(folders[0])
    assert {name: getattr(theirs, name) for name in own} == own
    assert theirs.do_sample
    assert theirs.eos_token_id == [TURN, END]
    messages = [{"role": "user", "content": "Hello"}]
    text = AutoTokenizer.from_pretrained(folders[0]).apply_chat_template(messages, tokenize=False)
    assert text == ("[Hello]" if template else "<|start|>Hello<|turn|>")
    # Another tokenizer has another template, unless it has none.
    convert(native, "native", tmp_path / "other", "native", tokenizer=str(folder))
    assert Source(tmp_path / "other").config.chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("sampling", "samples"),
    [({"temp": 0}, False), ({"repetition_penalty": 1.5}, False), ({"top_k": 5}, True)],
)
def test_exports_sample_for_transformers_only_if_the_model_does(
    folder, tmp_path, sampling, samples
):
    from transformers import GenerationConfig

    config = Source(folder).config.replace(sampling=sampling)
    convert(folder, "hf", tmp_path / "again", "hf", config=config)
    theirs = GenerationConfig.from_pretrained(tmp_path / "again")
    assert bool(theirs.do_sample) == samples
    assert theirs.top_k in (None, 50, sampling.get("top_k"))
    assert (theirs.repetition_penalty or 1) == sampling.get("repetition_penalty", 1)
    assert Source(tmp_path / "again").config.sampling == ({"temp": 1} if samples else {}) | sampling


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temp": 0}),
        ({"temperature": 0.6, "repetition_penalty": 1.5}, {"temp": 0, "repetition_penalty": 1.5}),
        ({"do_sample": True}, {"temp": 1}),
        ({"do_sample": True, "top_k": 20}, {"temp": 1, "top_k": 20}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"do_sample": True, "top_k": -1}, {"temp": 1, "top_k": -1}),
    ],
)
def test_settings_mean_what_they_mean_to_transformers(folder, tmp_path, theirs, ours):
    """Wrong ones stop neither training nor conversions, but what samples refuses them."""
    shutil.copytree(folder, tmp_path / "own")
    path = tmp_path / "own" / "generation_config.json"
    path.write_text(json.dumps(theirs))
    config = Source(tmp_path / "own").config
    assert config.sampling == ours
    convert(tmp_path / "own", "hf", tmp_path / "again", "hf")
    assert Source(tmp_path / "again").config.sampling == ours
    if ours.get("top_k") != -1:
        check_defaults(config.sampling)
        return
    with pytest.raises(InputError, match=r"sampling: .*top_k.*--set sampling="):
        check_defaults(config.sampling)


def test_only_sampling_settings_with_known_names_are_accepted(folder):
    with pytest.raises(InputError, match="sampling has 'temperature', expected settings of temp,"):
        Source(folder).config.replace(sampling={"temperature": 0.5})


def test_a_model_that_is_loaded_with_a_config_keeps_its_end_tokens(folder):
    """Unless the config has its own, or another tokenizer, whose ids have other meanings."""
    own = Source(folder).config.replace(dtype="float32", end_tokens=None)
    for config, expected in (
        (own, [TURN, END]),
        (own.replace(end_tokens=[START]), [START]),
        (own.replace(tokenizer="bytes"), None),
    ):
        assert mesh_transformer.load(folder, config).config.end_tokens == expected
    assert mesh_transformer.load(folder, own, changes={"end_tokens": None}).config == own
