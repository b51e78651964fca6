"""Corpora whose parts are tokenised in any order: the same bytes as those of one process."""

import contextlib
import gzip
import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_transformer.cli import text_records as script
from mesh_transformer.data import documents, parts, text_parts, text_set
from mesh_transformer.data.documents import read_pieces
from mesh_transformer.data.inputs import BadInputHandler
from mesh_transformer.data.spans import Span, ends_of_spans
from mesh_transformer.data.tokenizer import character_tokenizer, load_tokenizer
from mesh_transformer.util import InputError
from tests.long import killed_tokenizing
from tests.support.fake_gcs import gcs_server
from tests.support.shuffled_workers import ShuffledWorkers, Stopped

END = "<|endoftext|>"
SEQ = 16


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer()


@pytest.fixture(autouse=True)
def small(monkeypatch, gpt2):
    """Make pieces and parts small, and let no worker change this process."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 64)
    monkeypatch.setattr(text_parts, "PART_BYTES", 300)
    monkeypatch.setattr(text_parts, "SAVE_EVERY", 3)
    monkeypatch.setattr(script, "load_tokenizer", lambda name: gpt2)
    parts._reader.cache_clear()


@pytest.fixture
def create(monkeypatch):
    """Create a set with the command; by means of workers if there are any."""

    def create(source, out, workers, *options):
        monkeypatch.setattr(script, "ray_workers", lambda _: contextlib.nullcontext(workers))
        script.main([str(source), "set", "--output-dir", str(out), "--seq", str(SEQ), *options])
        return killed_tokenizing.contents(out)

    return create


def write_large_files(folder: Path, seed: int) -> None:
    """Write texts and JSON Lines with all kinds of line ends and characters."""
    generator = random.Random(seed)
    words = [*killed_tokenizing.WORDS, "a\r\nb", "\r", "\ufeff", "<|endof", "|>", "\U0001f600"]
    texts = [
        generator.choice(["", "\ufeff"]) + " ".join(generator.choices(words, k=length))
        for length in generator.choices([0, 1, 9, 40, 300], [4, 4, 8, 8, 1], k=60)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "large.txt").write_bytes(END.join(texts).encode())
    lines = [json.dumps(generator.choice([text, {"text": text}])) for text in texts]
    lines.insert(generator.randrange(len(lines)), "")
    (folder / "large.jsonl").write_bytes("\n".join(lines).encode())
    with gzip.open(folder / "large.txt.gz", "wb") as file:
        file.write(END.join(texts[:9]).encode())
    (folder / "empty.txt").touch()


@pytest.mark.parametrize("seed", range(3))
def test_parts_in_any_order_give_the_bytes_of_one_process(tmp_path, create, seed):
    killed_tokenizing.write_text(tmp_path / "in")
    write_large_files(tmp_path / "in", seed)
    options = [(), ("--preserve-data-order",), ("--normalize-with-wikitext-detokenize",)][seed]
    expected = create(tmp_path / "in", tmp_path / "one", None, *options)
    workers = ShuffledWorkers(seed)
    assert create(tmp_path / "in", tmp_path / "many", workers, *options) == expected
    assert {part.path for part in workers.parts} == set(map(str, (tmp_path / "in").iterdir()))
    assert sum(part.path.endswith("large.txt") for part in workers.parts) > 10
    assert sum(part.path.endswith("large.jsonl") for part in workers.parts) > 10
    assert len(set(workers.parts)) == len(workers.parts)


@pytest.mark.parametrize("separator", ["#", "<e>", "#\u00e9#", "aba", "\n", "<\r>"])
def test_spans_have_the_documents_of_the_whole_file(tmp_path, separator):
    generator = random.Random(separator)
    alphabet = [separator, separator[0], separator[-1], "x", "\u00e9", "\ufeff", "\r", "\n", "\r\n"]
    for number in range(60):
        pieces = [one.encode() for one in generator.choices(alphabet, k=generator.randrange(80))]
        pieces.insert(0, b"\xef\xbb\xbf" * generator.randrange(2))
        pieces.insert(generator.randrange(len(pieces)), b"\xc3" * generator.randrange(2))
        path = tmp_path / f"{number}.txt"
        path.write_bytes(b"".join(pieces))
        size = path.stat().st_size

        def texts(path, span=None, separator=separator):
            bad = BadInputHandler(skip=True)
            read: list[str] = [""]
            for piece in read_pieces(str(path), separator, bad, lambda _: None, span=span):
                read[-1] += piece.text
                read += [""] * piece.is_end
            return read[:-1]

        with open(path, "rb") as file:
            ends = list(ends_of_spans(file, str(path), separator, generator.randrange(1, 20)))
        assert ends[-1] == size
        assert ends == sorted(set(ends))
        spans = [Span(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        assert [text for span in spans for text in texts(path, span)] == texts(path)
        assert sum(span.lines for span in spans) == path.read_bytes().count(b"\n")
        if separator in ("aba", "\n", "<\r>"):
            assert len(spans) == 1


def test_end_of_a_span_is_found_across_the_blocks_that_are_read(monkeypatch):
    monkeypatch.setattr("mesh_transformer.data.spans.BLOCK", 3)
    for start in range(1, 20):
        text = b"x" * start + b"<e>" + b"y" * 9
        assert list(ends_of_spans(io.BytesIO(text), "a.txt", "<e>", 1)) == [start + 3, len(text)]
        lines = b"x" * start + b"\n" + b"y" * 9
        assert list(ends_of_spans(io.BytesIO(lines), "a.jsonl", "", 1)) == [start + 1, len(lines)]


BAD = {
    "text": ("large.txt", END, [b"\xff bytes", b"caf\xe9"]),
    "lines": ("large.jsonl", "\n", [b'{"other": 1}', b"{", b'"\xff"', b'{"text": null}']),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("count", [1, 2, 30])
def test_bad_input_is_reported_as_by_one_process(tmp_path, capsys, create, kind, count):
    write_large_files(tmp_path / "in", 5)
    generator = random.Random(count)
    name, separator, bad = BAD[kind]
    path = tmp_path / "in" / name
    texts = path.read_bytes().split(separator.encode())
    for _ in range(count):
        texts.insert(generator.randrange(len(texts)), generator.choice(bad))
    path.write_bytes(separator.encode().join(texts))

    def skipped():
        return re.findall("^skipped: .*: .*", capsys.readouterr().out, re.MULTILINE)

    with pytest.raises(InputError) as one:
        create(tmp_path / "in", tmp_path / "stopped", None)
    with pytest.raises(InputError) as many:
        create(tmp_path / "in", tmp_path / "many", ShuffledWorkers(count))
    assert str(many.value) == str(one.value)
    skipped()
    expected = create(tmp_path / "in", tmp_path / "one", None, "--skip-bad")
    lines = skipped()
    assert len(lines) == min(count, 20)
    # The set of many processes is resumed.  No part that it has finished is tokenised again.
    workers = ShuffledWorkers(count)
    assert create(tmp_path / "in", tmp_path / "many", workers, "--skip-bad") == expected
    assert skipped() == lines
    assert create(tmp_path / "in", tmp_path / "new", ShuffledWorkers(1), "--skip-bad") == expected


def test_unknown_characters_are_reported_as_by_one_process(tmp_path, monkeypatch, create):
    known = character_tokenizer(["known text"])
    monkeypatch.setattr(script, "load_tokenizer", lambda name: known)
    texts = ["known text " * 9] * 30
    texts[17] = "z"
    (tmp_path / "a.txt").write_text(known.eos_token.join(texts), encoding="utf-8")
    errors = []
    for workers in (None, ShuffledWorkers(0)):
        with pytest.raises(InputError) as error:
            create(tmp_path / "a.txt", tmp_path / f"{workers is None}", workers)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert "document 18 has the character 'z'" in errors[0]


def test_missing_column_is_reported_as_by_one_process(tmp_path, create):
    killed_tokenizing.write_text(tmp_path / "in")
    errors = []
    for workers in (None, ShuffledWorkers(0)):
        with pytest.raises(InputError) as error:
            create(tmp_path / "in" / "4.csv", tmp_path / "out", workers, "--text-column", "id")
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(2))
def test_no_finished_part_is_tokenised_again(tmp_path, create, seed):
    write_large_files(tmp_path / "in", seed)
    expected = create(tmp_path / "in", tmp_path / "one", None)
    begun, out = [], tmp_path / "many"
    for calls in (1, 2, 15, 0, None):
        workers = ShuffledWorkers(seed, calls)
        ends = contextlib.nullcontext() if calls is None else pytest.raises(Stopped)
        with ends:
            assert create(tmp_path / "in", out, workers) == expected
        begun += workers.parts
    assert len(begun) == len(set(begun)) > 30
    assert sorted(path.name for path in out.iterdir()) == sorted(expected)


def test_damaged_part_is_tokenised_again(tmp_path, create):
    write_large_files(tmp_path / "in", 1)
    expected = create(tmp_path / "in", tmp_path / "one", None)
    out = tmp_path / "many"
    with pytest.raises(Stopped):
        create(tmp_path / "in", out, ShuffledWorkers(1, 9))
    stored = sorted((out / "set.partial" / text_set.PARTS).iterdir())
    stored[0].write_bytes(stored[0].read_bytes()[:-1])
    stored[1].write_bytes(b"")
    assert create(tmp_path / "in", out, ShuffledWorkers(1)) == expected


def test_one_process_and_many_resume_each_other(tmp_path, monkeypatch, create):
    monkeypatch.setattr("mesh_transformer.data.corpus.BATCH_CHARACTERS", 400)
    monkeypatch.setattr("mesh_transformer.data.corpus.SAVE_EVERY", 1)
    killed_tokenizing.write_text(tmp_path / "in")
    write_large_files(tmp_path / "in", 2)
    expected = create(tmp_path / "in", tmp_path / "whole", None)
    left, original = iter(range(20, -1, -1)), text_set.Tokenizing._write

    def write(*arguments):
        if not next(left):
            raise Stopped
        return original(*arguments)

    first = tmp_path / "one first"
    with monkeypatch.context() as patch:
        patch.setattr(text_set.Tokenizing, "_write", write)
        with pytest.raises(Stopped):
            create(tmp_path / "in", first, None)
    progress = json.loads((first / "set.partial" / "progress.json").read_text("utf-8"))
    assert progress["sources"]
    assert progress["current"]
    assert create(tmp_path / "in", first, ShuffledWorkers(3)) == expected
    second = tmp_path / "many first"
    with pytest.raises(Stopped):
        create(tmp_path / "in", second, ShuffledWorkers(3, 40))
    progress = json.loads((second / "set.partial" / "progress.json").read_text("utf-8"))
    assert progress["sources"]
    assert create(tmp_path / "in", second, None) == expected


def test_file_that_differs_on_a_worker_is_named(tmp_path, monkeypatch, create):
    write_large_files(tmp_path / "in", 1)
    path = tmp_path / "in" / "large.txt"
    original = parts.finish

    def changed(shared, part):
        if part.path == str(path):
            path.write_text("other text")
        return original(shared, part)

    monkeypatch.setattr(parts, "finish", changed)
    with pytest.raises(InputError, match=r"large\.txt has 10 bytes on a worker, expected the"):
        create(path, tmp_path / "out", ShuffledWorkers(1))


def test_missing_files_of_a_worker_are_named(tmp_path, monkeypatch, create):
    write_large_files(tmp_path / "in", 1)
    original, path = parts.finish, tmp_path / "in" / "large.txt.gz"

    def elsewhere(shared, part):
        path.rename(tmp_path / "moved")
        try:
            return original(shared, part)
        finally:
            (tmp_path / "moved").rename(path)

    def unshared(shared, part):
        result = original(shared, part)
        for file in (tmp_path / "out" / "set.partial" / text_set.PARTS).iterdir():
            file.unlink()
        return result

    for finish, line in (
        (elsewhere, "cannot be read on a worker"),
        (unshared, "is not here; give"),
    ):
        monkeypatch.setattr(parts, "finish", finish)
        with pytest.raises(InputError, match=line):
            create(path, tmp_path / "out", ShuffledWorkers(1), "--new")


PROGRAM = """
import contextlib, sys
from mesh_transformer.cli import arguments, main
from mesh_transformer.data import split, text_parts
from tests.support.shuffled_workers import ShuffledWorkers, Stopped

text_parts.PART_BYTES = split.PART_BYTES = 2000
split.FRAME_BYTES = 1000
calls = int(sys.argv.pop(1))
workers = ShuffledWorkers(1, calls if calls >= 0 else None)
arguments.ray_workers = lambda _: contextlib.nullcontext(workers)
try:
    main.main()
except Stopped:
    print(len(workers.parts), "parts")
"""
COMMANDS = {
    "records": ("set", "--seq", str(SEQ), "--output-dir"),
    "split": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_input_and_output_may_be_in_a_bucket(tmp_path, name):
    write_large_files(tmp_path / "in", 1)
    root = Path(__file__).parents[2]

    def run(calls, place, environment):
        words = [str(calls), name, f"{place}/in", *COMMANDS[name], f"{place}/out"]
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words],
            cwd=tmp_path,
            env=os.environ | environment | {"PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    run(-1, tmp_path, {})
    with gcs_server(tmp_path) as (gcs, environment):
        for path in (tmp_path / "in").iterdir():
            gcs._put(("bucket", f"in/{path.name}"), path.read_bytes())
        for calls in (5, -1):
            printed = run(calls, "gs://bucket", environment)
            stored = {
                name.removeprefix("out/"): stored.content
                for (_, name), stored in gcs.objects.items()
                if name.startswith("out/") and not name.endswith("/")
            }
            if calls > 0:
                assert printed == "5 parts\n"
                assert len(stored) == 5
                assert all(".partial/" in name for name in stored)
    assert stored == killed_tokenizing.contents(tmp_path / "out")
