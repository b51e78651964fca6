"""The tokenizers of bytes and of characters, everywhere a tokenizer is used."""

import json
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from mesh_transformer.cli import completion_records, new_tokenizer, text_records
from mesh_transformer.data import corpus, documents
from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.record_set import tokenizer_of
from mesh_transformer.data.tokenizer import (
    UNKNOWN,
    Tokenizer,
    bytes_of_tokens,
    character_tokenizer,
    encode_batch,
    fingerprint,
    load_tokenizer,
)
from mesh_transformer.generation.text_stream import TextStream
from mesh_transformer.serving.answer import TokenTexts
from mesh_transformer.util import InputError

END = "<|endoftext|>"
TEXT = "na\u00efve \u65e5\u672c\u8a9e \U0001f469\u200d\U0001f469 \ufffd \u0120ok\r\n\n\t 12 \u0416"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The two tokenizers, and the same as transformers loads them from a folder."""
    made: dict[str, Any] = {"bytes": load_tokenizer("bytes"), "chars": character_tokenizer([TEXT])}
    for name in list(made):
        folder = str(tmp_path_factory.mktemp(name))
        made[name].save_pretrained(folder)
        made[f"saved {name}"] = AutoTokenizer.from_pretrained(folder)
        assert fingerprint(made[f"saved {name}"]) == fingerprint(made[name])
    return made


def texts(count, alphabet=None):
    generator = np.random.default_rng(0)
    points = [*range(1, 0x300), *range(0x4E00, 0x4E80), *range(0x1F600, 0x1F640)]
    choices = sorted(alphabet) if alphabet else list(map(chr, points))
    return ["".join(generator.choice(choices, 300)) for _ in range(count)]


@pytest.mark.parametrize("name", ["bytes", "saved bytes"])
def test_tokens_of_bytes_are_the_bytes(tokenizers, name):
    tokenizer = tokenizers[name]
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.bos_token_id) == (257, 256, 256)
    for text in [TEXT, "", " ", "\0", "don't  ", *texts(20)]:
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode())
        assert encode_batch(tokenizer, [text]) == [ids]
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode(f"a{END}b") == [97, 256, 98]
    generator = np.random.default_rng(1)
    for length in range(1, 200):
        content = generator.integers(0, 256, length).astype(np.uint8).tobytes()
        assert tokenizer.decode(list(content)) == content.decode(errors="replace")


@pytest.mark.parametrize("name", ["chars", "saved chars"])
def test_tokens_of_characters_are_numbered_in_sorted_order(tokenizers, name):
    tokenizer, characters = tokenizers[name], sorted(set(TEXT))
    number_of = {character: number for number, character in enumerate(characters)}
    assert len(tokenizer) == len(characters) + 2
    assert tokenizer.convert_ids_to_tokens([len(characters), len(characters) + 1]) == [END, UNKNOWN]
    for text in [TEXT, "", " ", *texts(20, set(TEXT))]:
        ids = tokenizer(text)["input_ids"]
        assert ids == [number_of[character] for character in text]
        assert encode_batch(tokenizer, [text]) == [ids]
        assert tokenizer.decode(ids) == text
    end, unknown = tokenizer.eos_token_id, tokenizer.unk_token_id
    expected = [number_of["o"], unknown, unknown, end, number_of["k"]]
    assert tokenizer.encode(f"oqq{END}k") == expected
    assert tokenizer.decode(expected, skip_special_tokens=True) == "ok"


def test_a_tokenizer_of_characters_depends_only_on_which_occur():
    shuffled = "".join(np.random.default_rng(2).permutation(list(TEXT)))
    assert fingerprint(character_tokenizer([shuffled, TEXT])) == fingerprint(
        character_tokenizer(iter(TEXT))
    )
    with pytest.raises(InputError, match="there is none; add text"):
        character_tokenizer([""])


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", ["bytes", "chars"])
def test_text_is_streamed_as_it_is_decoded(tokenizers, name, seed):
    rng = np.random.default_rng(seed)
    decode = tokenizers[name].decode
    for tokens in (tokenizers[name].encode(TEXT), rng.integers(0, len(tokenizers[name]), 300)):
        stream, tokens = TextStream(decode), list(map(int, tokens))
        cuts = np.flatnonzero(rng.random(len(tokens)) < 0.5)
        pieces = [stream.push(list(part)) for part in np.split(np.array(tokens), cuts)]
        assert "".join(pieces) + stream.finish() == decode(tokens)
    stop = TextStream(decode, ["\u8a9e "])
    written = "".join(stop.push([token]) for token in tokenizers[name].encode(TEXT))
    assert written + stop.finish() == TEXT.partition("\u8a9e ")[0]


@pytest.mark.parametrize("name", ["bytes", "chars"])
def test_bytes_per_token_add_up_to_the_bytes_of_the_text(tokenizers, name):
    tokenizer = tokenizers[name]
    counts = bytes_of_tokens(tokenizer, 300)
    assert counts[tokenizer.encode(TEXT + END)].sum() == len(TEXT.encode())
    assert counts[tokenizer.all_special_ids].sum() == counts[len(tokenizer) :].sum() == 0


def test_token_texts_in_a_server_s_answers(tokenizers):
    words = TokenTexts(tokenizers["bytes"])
    assert [words[97], words[10], words[0xE6], words[256]] == ["a", "\n", "bytes:\\xe6", END]
    words = TokenTexts(tokenizers["chars"])
    assert [words[number] for number in tokenizers["chars"].encode(TEXT)] == list(TEXT)


@pytest.mark.parametrize("name", ["bytes", "chars"])
def test_tokenizer_is_saved_with_a_model(tokenizers, small, tmp_path, monkeypatch, name):
    source = "bytes"
    if name == "chars":
        source = str(tmp_path / "chars")
        tokenizers[name].save_pretrained(source)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes").mkdir()  # a folder of this name does not take the tokenizer's place
    (tmp_path / "bytes" / "tokenizer.json").write_text("{}")
    config = small(tokenizer=source, n_vocab=320)
    (tmp_path / "model").mkdir()
    Tokenizer.of(None, config, must_fit=True).save(str(tmp_path / "model"))
    assert fingerprint(load_tokenizer(tmp_path / "model")) == fingerprint(tokenizers[name])
    with pytest.raises(InputError, match="tokens, more than n_vocab 16"):
        Tokenizer.of(None, small(tokenizer=source, n_vocab=16), must_fit=True)


def records(out, seq, n_vocab):
    loader = TFRecordNewInputs(str(out / "set.index"), 1, seq, n_vocab=n_vocab, repeat=False)
    return np.concatenate([np.append(batch["obs"], batch["target"][:, -1:], 1) for batch in loader])


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_records_are_the_bytes_or_characters_of_the_text(tmp_path, capsys, kind):
    (tmp_path / "in.txt").write_text(TEXT * 30 + END + TEXT * 2, encoding="utf-8", newline="")
    source, text = "bytes", TEXT.replace("\r\n", "\n")  # as in every text file
    if kind == "characters":
        source = str(tmp_path / "tokenizer")
        new_tokenizer.main([str(tmp_path / "in.txt"), source, "--kind", "characters"])
        assert f"{len(set(text)) + 2} tokens" in capsys.readouterr().out
    flags = ["--seq", "20", "--tokenizer", source, "--preserve-data-order"]
    text_records.main([str(tmp_path / "in.txt"), "set", "--output-dir", str(tmp_path), *flags])
    tokenizer = load_tokenizer(source)
    actual = records(tmp_path, 20, len(tokenizer))
    whole = text * 30 + END + text * 2 + END
    assert tokenizer.decode(actual.ravel()) == tokenizer.decode(
        tokenizer.encode(whole)[: actual.size]
    )
    assert actual.size > tokenizer.encode(whole).index(tokenizer.eos_token_id)
    assert tokenizer_of(str(tmp_path / "set.index")) == source


def test_size_is_only_for_bpe(tmp_path):
    arguments = [str(tmp_path), str(tmp_path / "out"), "--kind", "characters", "--size", "300"]
    with pytest.raises(InputError, match="--size is for --kind bpe"):
        new_tokenizer.main(arguments)


class Stopped(BaseException):
    """An exception that ends a run and that no handler catches."""


@pytest.fixture
def with_unknown(tmp_path, monkeypatch):
    """Documents in several pieces, some with characters that the tokenizer lacks.

    Returns a function that makes records of them, and the documents without such characters.
    """
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 64)
    monkeypatch.setattr(corpus, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(corpus, "SAVE_EVERY", 1)
    good = ["to be or not to be " * n for n in (20, 1, 30, 9)]
    bad = [good[0] + "\u00e9" + good[2], "q", good[2] + " z " + good[2] + "q", "\u00e9" + good[0]]
    everything = [text for pair in zip(good, bad, strict=True) for text in pair]
    (tmp_path / "in.txt").write_text(END.join(everything), encoding="utf-8")
    character_tokenizer(good).save_pretrained(tmp_path / "tokenizer")

    def create(out, *flags):
        options = ["--seq", "20", "--tokenizer", str(tmp_path / "tokenizer"), *flags]
        text_records.main([str(tmp_path / "in.txt"), "set", "--output-dir", str(out), *options])
        return {path.name: path.read_bytes() for path in out.iterdir()}

    return create, good


def test_unknown_character_in_text_is_named_or_its_document_left_out(
    tmp_path, with_unknown, capsys
):
    create, good = with_unknown
    with pytest.raises(
        InputError,
        match=r"in\.txt: document 2 has the character '\u00e9', which the tokenizer lacks \(train "
        r"it on this text, too\); fix the input, or skip such input with --skip-bad",
    ):
        create(tmp_path / "out")
    skipped = create(tmp_path / "skipped", "--skip-bad", "--preserve-data-order")
    assert "document 6 has the character 'z'" in capsys.readouterr().out
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    expected = tokenizer.encode("".join(text + END for text in good))
    actual = records(tmp_path / "skipped", 20, len(tokenizer)).ravel()
    np.testing.assert_array_equal(actual, expected[: len(actual)])
    manifest = json.loads(skipped["set.manifest.json"])
    assert manifest["skipped"] == {"unknown characters": 4}
    assert (manifest["documents"], manifest["tokens"]) == (4, len(expected))


def test_interrupted_run_that_leaves_out_documents_is_resumed(tmp_path, monkeypatch, with_unknown):
    create, _ = with_unknown
    expected = create(tmp_path / "whole", "--skip-bad")
    original = corpus.Progress.save
    for last in range(1, 40):
        saves = iter(range(last))

        def save(*arguments, saves=saves):
            if next(saves, None) is None:
                raise Stopped
            original(*arguments)

        monkeypatch.setattr(corpus.Progress, "save", save)
        try:
            create(tmp_path / str(last), "--skip-bad")
            break
        except Stopped:
            monkeypatch.setattr(corpus.Progress, "save", original)
        assert create(tmp_path / str(last), "--skip-bad") == expected, last
    assert last >= 8


def test_unknown_character_in_a_pair_is_named_or_skipped(tmp_path, capsys):
    character_tokenizer(["ab c"]).save_pretrained(tmp_path / "tokenizer")
    pairs = [("a", " b"), ("a", " x"), ("y", " b"), ("a", f"b{END}c")]
    lines = [json.dumps({"prompt": prompt, "completion": text}) + "\n" for prompt, text in pairs]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    arguments = [str(tmp_path / "in.jsonl"), "set", "--output-dir", str(tmp_path), "--seq", "8"]
    arguments += ["--tokenizer", str(tmp_path / "tokenizer")]
    with pytest.raises(InputError, match=r"in\.jsonl: line 2 has the character 'x', which the"):
        completion_records.main(arguments)
    completion_records.main([*arguments, "--skip-bad"])
    assert "2 records of 8 tokens" in capsys.readouterr().out
