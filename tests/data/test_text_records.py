"""Records from text, compared with a simple in-memory reference implementation."""

import io
import itertools
import json
import lzma
import os
import random
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import zstandard

from mesh_transformer.cli import completion_records
from mesh_transformer.cli import text_records as script
from mesh_transformer.data import documents as text_documents
from mesh_transformer.data.record_set import Position, RecordSet
from mesh_transformer.data.tokenizer import load_tokenizer, train_tokenizer
from mesh_transformer.util import InputError
from tests.support.fake_gcs import gcs_server

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

SEQ = 16
END = 50256
WORDS = ["To", "be,", "or", "not", "question!\n", "'tis", "don't", "caf\u00e9", "42", "\u4e2d"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture
def documents():
    """Thirty documents of 1 to 89 words, some of which contain newlines."""
    generator = np.random.default_rng(5)
    lengths = generator.integers(1, 90, 30)
    return [" ".join(generator.choice(WORDS, length)) for length in lengths]


def write_files(folder, documents, files=4):
    """Write the documents to .txt files, several per file; return them grouped by file."""
    folder.mkdir(exist_ok=True)
    groups = [documents[start::files] for start in range(files)]
    for number, group in enumerate(groups):
        (folder / f"{number}.txt").write_text("<|endoftext|>".join(group), encoding="utf-8")
    return groups


def create(tmp_path, *options, source="in", seq=SEQ):
    """Run the script; return the sequences listed by its index file."""
    out = tmp_path / "out"
    arguments = [str(tmp_path / source), "set", "--output-dir", str(out), "--seq", str(seq)]
    script.main([*arguments, *map(str, options)])
    sequences = read(out / "set.index", seq)
    assert (out / "set.index").read_text() == f"set_{len(sequences)}.tfrecords\n"
    return sequences


def read(index, seq):
    records = RecordSet(str(index), seq, n_vocab=50257)
    rows = [records.row(record) for record, _ in records.records(Position(), repeat=False)]
    return np.stack([np.append(row["obs"], row["target"][-1]) for row in rows])


def packed(tokens, length=SEQ + 1):
    """Return the complete sequences of a token list, and the remaining tokens."""
    whole = len(tokens) // length * length
    return [tokens[start : start + length] for start in range(0, whole, length)], tokens[whole:]


def expected_sequences(groups, tokenizer, epochs=1, seed=10, shuffled=True, minimum=0):
    """Return the expected records, computed in memory with lists."""
    generator = random.Random(seed)
    groups = list(groups)
    if shuffled:
        generator.shuffle(groups)
    encoded = [[*tokenizer.encode(text), END] for group in groups for text in group]
    remainder, result = [], []
    for _ in range(epochs):
        if shuffled:
            generator.shuffle(encoded)
        sequences, remainder = packed(
            remainder + [token for document in encoded for token in document]
        )
        sequences = [sequence for sequence in sequences if len(set(sequence)) >= minimum]
        if shuffled:
            generator.shuffle(sequences)
        result += sequences
    return np.array(result, np.uint32)


def test_records_in_order_are_the_tokenized_text_split_into_sequences(
    tmp_path, documents, tokenizer
):
    groups = write_files(tmp_path / "in", documents)
    whole = "<|endoftext|>".join(itertools.chain(*groups)) + "<|endoftext|>"
    sequences, _ = packed(tokenizer.encode(whole))
    np.testing.assert_array_equal(create(tmp_path, "--preserve-data-order"), sequences)


@pytest.mark.quick(2)
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("seed", [10, 11])
@pytest.mark.parametrize("minimum", [0, 13])
def test_shuffled_and_repacked_records(tmp_path, documents, tokenizer, epochs, seed, minimum):
    groups = write_files(tmp_path / "in", documents)
    actual = create(
        tmp_path, "--n-repack-epochs", epochs, "--seed", seed, "--min-unique-tokens", minimum
    )
    expected = expected_sequences(groups, tokenizer, epochs, seed, minimum=minimum)
    np.testing.assert_array_equal(actual, expected)


def test_repacking_in_order_continues_with_the_remainder(tmp_path, documents, tokenizer):
    groups = write_files(tmp_path / "in", documents)
    actual = create(tmp_path, "--preserve-data-order", "--n-repack-epochs", 3)
    once = [token for text in itertools.chain(*groups) for token in [*tokenizer.encode(text), END]]
    np.testing.assert_array_equal(actual, packed(once * 3)[0])


@pytest.mark.slow
def test_same_seed_gives_the_same_file_and_another_seed_a_different_one(tmp_path, documents):
    write_files(tmp_path / "in", documents)
    first, again = (create(tmp_path, "--seed", 1) for _ in range(2))
    other = create(tmp_path, "--seed", 2, "--new")
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == [
        "set.index",
        "set.manifest.json",
        "set.offsets",
        f"set_{len(first)}.tfrecords",
    ]


def test_skipped_sequences_are_printed_with_verbose(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("no no no no no no no no " + " ".join(WORDS) * 3)
    create(tmp_path, "--preserve-data-order", "--min-unique-tokens", 4, "--verbose", seq=5)
    assert "skipped, 2 distinct tokens: 'no no no no no no'" in capsys.readouterr().out


def tar_of(texts, mode, **options):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, **options) as archive:
        folder = tarfile.TarInfo("texts")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for number, content in enumerate(texts):
            content = content if isinstance(content, bytes) else content.encode()
            suffix = "xz" if content.startswith(b"\xfd7zXZ") else "txt"
            member = tarfile.TarInfo(f"texts/{number}.{suffix}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def json_lines(documents):
    return "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in documents).encode()


def compressed_json(documents):
    """Return two zstandard frames; a reader that stops after the first loses half."""
    halves = documents[:15], documents[15:]
    return b"".join(zstandard.compress(json_lines(half)) for half in halves)


FORMATS = {
    "a.jsonl.zst": compressed_json,
    "b.jsonl.zst": lambda texts: zstandard.compress(
        "\n\n".join(map(json.dumps, texts)).encode()  # bare strings, blank lines between
    ),
    "a.tar.gz": lambda texts: tar_of(texts, "w:gz"),
    "a.txt": lambda texts: "<|endoftext|>".join(texts).encode(),
    "a.xz": lambda texts: lzma.compress("<|endoftext|>".join(texts).encode()),
    "a.tar.xz": lambda texts: tar_of(texts, "w:xz"),
    "nested.tar.xz": lambda texts: tar_of(
        [tar_of(texts[:9], "w:xz"), tar_of(texts[9:], "w:xz")], "w:xz"
    ),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_records(tmp_path, documents, tokenizer, name):
    (tmp_path / name).write_bytes(FORMATS[name](documents))
    actual = create(tmp_path, "--preserve-data-order", source=name)
    expected = expected_sequences([documents], tokenizer, shuffled=False)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", ["a\nb", "x/a\u2028", " a", "a "])
def test_names_that_an_index_cannot_list_are_refused(tmp_path, name):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "completion": "b", "text": "c"}\n')
    for main in (script.main, completion_records.main):
        with pytest.raises(InputError, match="the name of the record set is "):
            main([str(tmp_path / "in.jsonl"), name, "--output-dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_only_known_files_of_a_folder_are_read_in_order_of_name(tmp_path, documents, tokenizer):
    (tmp_path / "in").mkdir()
    for name in FORMATS:
        (tmp_path / "in" / name).write_bytes(FORMATS[name](documents))
    (tmp_path / "in" / "ignored.html").write_text("not text")
    actual = create(tmp_path, "--preserve-data-order")
    expected = expected_sequences([documents] * len(FORMATS), tokenizer, shuffled=False)
    np.testing.assert_array_equal(actual, expected)


def test_list_of_paragraphs_is_joined(tmp_path, tokenizer):
    line = json.dumps({"text": ["one two", "three four"]})
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(line.encode()))
    actual = create(tmp_path, source="a.jsonl.zst", seq=2)
    tokens = [*tokenizer.encode("one two\n\nthree four"), END]
    np.testing.assert_array_equal(
        np.sort(actual.ravel()), np.sort(np.concatenate(packed(tokens, 3)[0]))
    )


def test_half_a_surrogate_pair_does_not_stop_the_script(tmp_path, tokenizer):
    content = zstandard.compress(rb'{"text": "a \ud83d b c d"}')
    (tmp_path / "a.jsonl.zst").write_bytes(content)
    actual = create(tmp_path, source="a.jsonl.zst", seq=4)
    assert tokenizer.decode(actual[0]) == "a ? b c d"


@pytest.mark.quick(1)
@pytest.mark.parametrize("breaks", [["\n", "\n\n", " \n", "  "], [" ", "  ", "\t"]])
@pytest.mark.parametrize("limit", [1, 7, 50])
def test_documents_split_into_pieces_have_the_same_tokens(
    tmp_path, monkeypatch, tokenizer, limit, breaks
):
    # Limits far below a document's length force splits, also inside runs of spaces and separators.
    generator = np.random.default_rng(limit)
    parts = ["word", " don't", "<|endoftext|>", "<|end", "7", "\u00e9", *breaks]
    text = "".join(generator.choice(parts, 2000))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    documents = [document for document in text.split("<|endoftext|>") if document]
    expected = expected_sequences([documents], tokenizer, shuffled=False)
    monkeypatch.setattr(text_documents, "PIECE_CHARACTERS", limit)
    pieces = list(text_documents.split_documents(io.StringIO(text), "<|endoftext|>"))
    assert len(pieces) > len(documents)
    assert sum(is_end for _, is_end in pieces) == len(documents)
    actual = create(tmp_path, "--preserve-data-order", source="a.txt")
    np.testing.assert_array_equal(actual, expected)


def test_windows_line_endings_become_newlines(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(b"one two\r\nthree\r\n")
    actual = create(tmp_path, "--preserve-data-order", source="a.txt", seq=5)
    assert tokenizer.decode(actual[0]) == "one two\nthree\n<|endoftext|>"


def test_ftfy_repairs_garbled_text_first(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("caf\u00c3\u00a9 \ufb01ne", encoding="utf-8")
    tokens = [*tokenizer.encode("caf\u00e9 fine"), END]
    actual = create(tmp_path, "--normalize-with-ftfy", source="a.txt", seq=len(tokens) - 1)
    np.testing.assert_array_equal(actual, [tokens])


@pytest.mark.parametrize(
    ("spaced", "joined"),
    [
        ("a well @-@ known 1 @,@ 200 @.@ 5 m", "a well-known 1,200.5 m"),
        ("He said : go ; now ! why ? yes , so . End", "He said: go; now! why? yes, so. End"),
        ("( in brackets ) [ and ] { these }", "(in brackets) [and] {these}"),
        ('the " quoted words " here', 'the "quoted words" here'),
        ("the ' quoted words ' here", "the 'quoted words' here"),
        ("the dogs ' bones", "the dogs' bones"),
        ("= = = = Title = = = =", "==== Title ===="),
        ("= = = Title = = =", "=== Title ==="),
        ("= = Title = =", "== Title =="),
        ("at 20 \u00b0 C \n next", "at 20\u00b0C\nnext"),
        ("there were N of John 's", "there were 1 of John's"),
        ("in the ' 90s", "in the ' 90s"),
    ],
)
def test_wikitext_spacing_is_undone(spaced, joined):
    assert text_documents.wikitext_detokenize(spaced) == joined


def test_wikitext_option_is_applied_to_the_records(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("so , it goes")
    tokens = [*tokenizer.encode("so, it goes"), END]
    option = "--normalize-with-wikitext-detokenize"
    actual = create(tmp_path, option, source="a.txt", seq=len(tokens) - 1)
    np.testing.assert_array_equal(actual, [tokens])


@pytest.mark.slow
def test_tokenizer_can_be_loaded_from_a_folder(tmp_path, documents, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    write_files(tmp_path / "in", documents)
    actual = create(tmp_path, "--tokenizer", tmp_path / "tokenizer")
    np.testing.assert_array_equal(actual, create(tmp_path))


@pytest.mark.slow
def test_text_in_a_bucket_gives_the_same_records(tmp_path, documents):
    text = tmp_path / "in"
    write_files(text, documents)
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    (text / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    (text / "b.xz").write_bytes(lzma.compress(documents[0].encode()))
    (text / "c.tar.gz").write_bytes(tar_of(documents, "w:gz"))
    create(tmp_path)
    command = [sys.executable, "-m", "mesh_transformer", "records", "gs://bucket/in", "set"]
    with gcs_server(tmp_path) as (gcs, environment):
        for path in text.iterdir():
            gcs._put(("bucket", f"in/{path.name}"), path.read_bytes())
        process = subprocess.run(
            [*command, "--output-dir", str(tmp_path / "other"), "--seq", str(SEQ)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert process.returncode == 0, process.stderr
    for path in (tmp_path / "out").iterdir():
        assert (tmp_path / "other" / path.name).read_bytes() == path.read_bytes()


BAD_FILES = {
    "cut.jsonl.zst": (lambda: zstandard.compress(b'{"text": "a b'), "line 1 is not JSON"),
    "key.jsonl.zst": (lambda: zstandard.compress(b'{"body": "a"}'), "line 1 has no text"),
    "noise.jsonl.zst": (lambda: b"not zstandard at all", "damaged or cut short"),
    "cut.tar.gz": (lambda: tar_of(["a" * 9999], "w:gz")[:-9], "damaged or cut short"),
    "noise.tar.gz": (lambda: b"not gzip", "damaged or cut short"),
    "cut.xz": (lambda: lzma.compress(b"abc " * 9999)[:-30], "damaged or cut short"),
    "latin.txt": (lambda: "caf\u00e9 a".encode("latin-1"), r"document 1 holds the bytes .*UTF-8"),
    "empty.txt": (lambda: b"", "all its files are empty"),
    "short.txt": (lambda: b"so few words", "found 4 tokens, but one sequence needs 17"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", BAD_FILES)
def test_error_names_a_bad_file_and_nothing_is_left(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content())
    with pytest.raises(InputError, match=f"{re.escape(name)}.*{message}") as caught:
        create(tmp_path, source=name)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_missing_input_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        create(tmp_path, source="absent")


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(InputError, match=r"no text found, expected files ending in \.txt"):
        create(tmp_path)


def test_text_with_too_few_distinct_tokens_is_refused(tmp_path, documents):
    write_files(tmp_path / "in", documents)
    with pytest.raises(InputError, match="has at least 18 distinct ones"):
        create(tmp_path, "--min-unique-tokens", 18)


def test_text_shorter_than_a_sequence_is_refused(tmp_path, documents):
    write_files(tmp_path / "in", documents[:1])
    with pytest.raises(InputError, match=r"tokens, but one sequence needs 10001; add text"):
        create(tmp_path, seq=10000)


@pytest.mark.slow
def test_a_finished_set_is_replaced_only_by_one_with_the_same_options(tmp_path, documents, capsys):
    write_files(tmp_path / "in", documents)
    first = create(tmp_path)
    assert "replaced" not in capsys.readouterr().out
    np.testing.assert_array_equal(create(tmp_path), first)
    assert "set.index; replaced an earlier set of this name\n" in capsys.readouterr().out
    (tmp_path / "in" / "more.txt").write_text(" ".join(documents))  # more text is no mistake
    assert len(create(tmp_path)) > len(first)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    other = tmp_path / "tokenizer"
    train_tokenizer(documents, 300).save_pretrained(other)
    for options, line in (
        (["--seed", 3], "was created with --seed 10; give another name or the same options"),
        (["--tokenizer", other], "was created with --tokenizer gpt2; give another name"),
    ):
        with pytest.raises(InputError, match=line):
            create(tmp_path, *options)
        assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    create(tmp_path, "--seed", 3, "--new")


def test_an_output_folder_that_is_a_file_is_refused(tmp_path, documents):
    write_files(tmp_path / "in", documents)
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        create(tmp_path)


@pytest.mark.slow
def test_script_exits_with_status_2_and_one_line(tmp_path):
    command = [sys.executable, str(SCRIPTS / "create_finetune_tfrecords.py"), "absent", "set"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 2
    assert result.stderr == "error: absent: no such file or folder; check the path\n"
