"""Long documents have the tokens of whole ones for every kind of tokenizer, also if cleaned."""

import json
from itertools import chain

import ftfy
import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from mesh_transformer.cli.text_records import main
from mesh_transformer.data import corpus, cuts, documents
from mesh_transformer.data.corpus import Tokenizing
from mesh_transformer.data.cuts import cuts_of
from mesh_transformer.data.documents import Piece, cleaner, recut, wikitext_detokenize
from mesh_transformer.data.record_set import Position, RecordSet
from mesh_transformer.data.tokenizer import (
    END_OF_TEXT,
    byte_tokenizer,
    character_tokenizer,
    encode_batch,
    load_tokenizer,
)

# What tokenizers treat in their own ways: spaces and line ends in runs, punctuation before them,
# contractions, digits, other scripts, marks that combine, invisible characters, special tokens.
PARTS = (
    *("word", "Some", "a", "don't", "'ll", "I'VE", "x1y22", "2024", "3.14", "_", "e-mail", "end."),
    *(" ", " ", " ", " ", "  ", "    ", "\n", "\n\n", " \n", "\t", "\r", "\u00a0", "\u3000"),
    *("\u00e9", "e\u0301", " \u0301", "\ufb01ne", "\u00bd", "\u4e2d\u6587", "\u3002", "\uff0c"),
    *("\u2581", "\U0001f600", "\u200b", "\ufffd", "\u0e44\u0e17\u0e22", "\u0130", "\u2017"),
    *("\u00a8", "\x1c", "\x85", "<|im_start|>", "<mask>", "<tag>", "<|unknown|>", "<|end"),
    *("&amp;", "<b>", " , ", "= =", "\u00c3\u00a9"),
)
SPECIAL = [END_OF_TEXT, "<unk>", "[UNK]"]


def random_text(generator, size):
    """Return a text of about `size` characters; some parts are frequent in it, and some absent."""
    weights = generator.gamma(0.5, size=len(PARTS))
    count = size // 2 + 1
    return "".join(generator.choice(PARTS, count, p=weights / weights.sum()))[:size]


def trained(tokenizer, trainer, **options):
    generator = np.random.default_rng(1)
    text = [random_text(generator, 3000) for _ in range(10)]
    tokenizer.train_from_iterator(
        text, trainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False, **options)
    )
    return tokenizer


def bpe(pre_tokenizer=None, normalizer=None, added=(), **model):
    tokenizer = Tokenizer(models.BPE(**model))
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained(tokenizer, trainers.BpeTrainer, initial_alphabet=alphabet, max_token_length=12)
    tokenizer.add_tokens(list(added))
    return tokenizer


def other(model, trainer, pre_tokenizer, normalizer, **options):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizer, normalizer
    return trained(tokenizer, trainer, **options)


def byte_level(**options):
    return pre_tokenizers.ByteLevel(**({"add_prefix_space": False} | options))


def split_by(pattern):
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([words, byte_level(use_regex=False)])


def sequence(*steps):
    return pre_tokenizers.Sequence(list(steps))


SPACES = [AddedToken(" " * count, normalized=False) for count in (2, 3, 4, 8)]
LLAMA_2 = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
METASPACE = pre_tokenizers.Metaspace
# {kind: (function that builds a tokenizer, whether it is known to split)}
BUILD = {
    "gpt2": (lambda: bpe(byte_level()), True),
    "gpt2 with a prefix space": (lambda: bpe(byte_level(add_prefix_space=True)), True),
    "llama3": (lambda: bpe(split_by(cuts.WORDS[1])), True),
    "qwen2": (lambda: bpe(split_by(cuts.WORDS[2]), normalizers.NFC()), True),
    "another pattern": (lambda: bpe(split_by(r"\w+\s*|[^\w]+")), False),
    "digits first": (lambda: bpe(sequence(pre_tokenizers.Digits(True), byte_level())), True),
    "neox": (
        lambda: bpe(
            byte_level(),
            normalizers.NFC(),
            [*SPACES, AddedToken("<mask>", lstrip=True), AddedToken("<|im_start|>")],
        ),
        True,
    ),
    "a token that takes the spaces after it": (
        lambda: bpe(byte_level(), added=[AddedToken("<tag>", rstrip=True)]),
        False,
    ),
    "a token with a space inside": (lambda: bpe(byte_level(), added=["word a"]), False),
    "a token with a digit inside": (lambda: bpe(byte_level(), added=["x1y"]), True),
    "compatibility forms": (lambda: bpe(byte_level(), normalizers.NFKC()), True),
    "accents left out": (lambda: bpe(byte_level(), normalizers.StripAccents()), False),
    "metaspace": (lambda: bpe(METASPACE(prepend_scheme="always")), True),
    "metaspace first": (lambda: bpe(METASPACE(prepend_scheme="first")), True),
    "metaspace unsplit": (lambda: bpe(METASPACE(prepend_scheme="first", split=False)), False),
    "llama2": (lambda: bpe(normalizer=LLAMA_2, unk_token="<unk>", fuse_unk=True), False),
    "unigram": (
        lambda: other(
            models.Unigram(),
            trainers.UnigramTrainer,
            METASPACE(),
            normalizers.NFKC(),
            unk_token="<unk>",
        ),
        True,
    ),
    "unigram without spaces": (
        lambda: other(
            models.Unigram(),
            trainers.UnigramTrainer,
            sequence(pre_tokenizers.WhitespaceSplit(), METASPACE()),
            normalizers.Replace(Regex(" {2,}"), " "),
            unk_token="<unk>",
        ),
        False,
    ),
    "bert": (
        lambda: other(
            models.WordPiece(unk_token="[UNK]"),  # type: ignore[call-arg]
            trainers.WordPieceTrainer,
            pre_tokenizers.BertPreTokenizer(),
            normalizers.BertNormalizer(),
        ),
        True,
    ),
    "bert with gpt2's words": (
        lambda: bpe(byte_level(), normalizers.BertNormalizer(lowercase=False)),
        False,
    ),
}
KINDS = [*BUILD, "gpt-j", "bytes", "characters"]
# One for each way to split text, for the test with large documents.
SOME_KINDS = [
    *("gpt-j", "gpt2 with a prefix space", "llama3", "neox"),
    *("metaspace", "metaspace unsplit", "unigram", "llama2", "bert"),
]


@pytest.fixture(scope="module")
def tokenizers():
    """{kind: tokenizer}"""
    built = {
        kind: PreTrainedTokenizerFast(tokenizer_object=build(), eos_token=END_OF_TEXT)
        for kind, (build, _) in BUILD.items()
    }
    return built | {
        "gpt-j": load_tokenizer(),
        "bytes": byte_tokenizer(),
        "characters": character_tokenizer(["".join(PARTS)]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_crosses_a_place_to_cut(tokenizers, kind):
    tokenizer, generator = tokenizers[kind], np.random.default_rng(0)
    places, is_known = cuts_of(tokenizer), BUILD.get(kind, (None, True))[1]
    assert (places is not None) == is_known
    if places is None:
        return
    texts = [random_text(generator, generator.integers(2, 40)) for _ in range(5000)]
    ends = [places.last(text) for text in texts]
    heads = [text[:end] for text, end in zip(texts, ends, strict=True)]
    tails = [text[end:] for text, end in zip(texts, ends, strict=True)]
    encoded = (encode_batch(tokenizer, list(part)) for part in (texts, heads, tails))
    for text, end, whole, head, tail in zip(texts, ends, *encoded, strict=True):
        assert head + tail == whole, (text, end)
    assert sum(end > 0 for end in ends) > 1000


@pytest.mark.parametrize("kind", ["gpt-j", "llama3"])
def test_text_without_spaces_is_cut_too(tokenizers, kind):
    places = cuts_of(tokenizers[kind])
    for text in ("a1b2" * 9000, "one\ntwo\n" * 9000, "\u4e2d\u6587\uff0c\u4e2d\u3002" * 9000):
        pieces = [piece.text for piece in recut([Piece(text, True)], places)]
        assert max(map(len, pieces)) < 3 * documents.PIECE_CHARACTERS
        assert "".join(pieces) == text
        [whole] = encode_batch(tokenizers[kind], [text])
        assert [*chain(*encode_batch(tokenizers[kind], pieces))] == whole


def write_documents(folder, texts):
    """Write documents to a file of each of two kinds; return the paths."""
    half, paths = len(texts) // 2, [folder / "a.jsonl", folder / "b.txt"]
    paths[0].write_text("".join(json.dumps(text) + "\n" for text in texts[:half]))
    paths[1].write_text(END_OF_TEXT.join(texts[half:]), encoding="utf-8", newline="")
    return [str(path) for path in paths]


def tokenized(folder, paths, tokenizer, clean=None):
    """Return the tokens of each document, as `records` writes them."""
    (folder / "work").mkdir()
    made = Tokenizing(folder / "work", paths, tokenizer, {}, clean, False).run()
    starts = zip(made.starts.tolist(), made.sizes.tolist(), strict=True)
    return [made.tokens[start : start + size].tolist() for start, size in starts]


def newlines(text):
    return text.replace("\r\n", "\n").replace("\r", "\n")


@pytest.mark.quick(12)
@pytest.mark.parametrize("size", [1, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_records_have_the_tokens_of_whole_documents(tmp_path, monkeypatch, tokenizers, kind, size):
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", size)
    monkeypatch.setattr(corpus, "BATCH_PIECES", 20)
    generator, tokenizer = np.random.default_rng(size), tokenizers[kind]
    texts = [random_text(generator, int(generator.integers(1, 400))) for _ in range(40)]
    actual = tokenized(tmp_path, write_documents(tmp_path, texts), tokenizer)
    whole = encode_batch(tokenizer, [newlines(text) for text in texts])
    assert actual == [[*tokens, tokenizer.eos_token_id] for tokens in whole]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_60_documents_of_up_to_a_megabyte_have_the_tokens_of_whole_ones(tmp_path, tokenizers, kind):
    generator, tokenizer = np.random.default_rng(5), tokenizers[kind]
    sizes = np.exp(generator.uniform(0, np.log(10**6), 59)).astype(int)
    texts = [random_text(generator, int(size)) for size in [*sizes, 10**6]]
    actual = tokenized(tmp_path, write_documents(tmp_path, texts), tokenizer)
    whole = encode_batch(tokenizer, [newlines(text) for text in texts])
    assert actual == [[*tokens, tokenizer.eos_token_id] for tokens in whole]


@pytest.mark.parametrize("kind", ["gpt-j", "characters", "llama2"])
@pytest.mark.parametrize("steps", [(True, False), (False, True), (True, True)])
def test_documents_are_cleaned_as_a_whole(tmp_path, monkeypatch, tokenizers, kind, steps):
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 20)
    generator, tokenizer = np.random.default_rng(3), tokenizers[kind]
    texts = [random_text(generator, int(generator.integers(1, 500))) for _ in range(20)]
    expected = [newlines(text) for text in texts]
    if steps[0]:
        expected = [ftfy.fix_text(text, normalization="NFKC") for text in expected]
    if steps[1]:
        expected = [wikitext_detokenize(text) for text in expected]
    if kind == "characters":
        tokenizer = character_tokenizer(expected)
    actual = tokenized(tmp_path, write_documents(tmp_path, texts), tokenizer, cleaner(*steps))
    whole = encode_batch(tokenizer, expected)
    assert actual == [[*tokens, tokenizer.eos_token_id] for tokens in whole]


def test_the_command_tokenizes_a_long_document_as_a_whole(tmp_path, tokenizers):
    tokenizers["gpt2 with a prefix space"].save_pretrained(tmp_path / "tokenizer")
    text = "Some words in a line.\n\n" * 2000
    (tmp_path / "a.txt").write_text(text)
    flags = ["--output-dir", str(tmp_path), "--tokenizer", str(tmp_path / "tokenizer")]
    main([str(tmp_path / "a.txt"), "a", "--seq", "16", "--preserve-data-order", *flags])
    records = RecordSet(str(tmp_path / "a.index"), 16, None)
    rows = [records.row(record) for record, _ in records.records(Position(), repeat=False)]
    actual = [token for row in rows for token in [*row["obs"], row["target"][-1]]]
    [whole] = encode_batch(load_tokenizer(tmp_path / "tokenizer"), [text])
    assert actual == [*whole, 0][: len(actual)]
    assert len(whole) - len(actual) < 17
