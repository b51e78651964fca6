"""Resuming of interrupted runs of create_finetune_tfrecords.py, and the manifest of the set."""

import hashlib
import json
import os
import shutil
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import zstandard

from mesh_transformer.cli import text_records as script
from mesh_transformer.data import corpus, documents, packing, text_set
from mesh_transformer.data.inputs import BadInputHandler
from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.tokenizer import character_tokenizer, load_tokenizer
from mesh_transformer.util import InputError
from tests.long import killed_tokenizing

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

SEQ = 16


class Stopped(BaseException):
    """An exception that ends a run and that no handler in the script catches."""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture
def source(tmp_path, monkeypatch, tokenizer):
    """A folder of several kinds of text; pieces, batches and save intervals are made small."""
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 64)
    monkeypatch.setattr(corpus, "BATCH_CHARACTERS", 800)
    monkeypatch.setattr(corpus, "SAVE_EVERY", 1)
    monkeypatch.setattr(script, "load_tokenizer", lambda name: tokenizer)
    killed_tokenizing.write_text(tmp_path / "in")
    return tmp_path / "in"


def create(source, out, *options):
    script.main([str(source), "set", "--output-dir", str(out), "--seq", str(SEQ), *options])
    return contents(out)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def stop_at(monkeypatch, place, name, number):
    """Patch a function to end the run at its `number`-th call."""
    original = getattr(place, name)
    remaining = iter(range(number - 1, -1, -1))

    def stopping(*arguments, **options):
        if not next(remaining):
            monkeypatch.setattr(place, name, original)
            raise Stopped
        return original(*arguments, **options)

    monkeypatch.setattr(place, name, stopping)


PLACES = {
    "before a save": (corpus.Progress, "save"),
    "behind a save": (corpus.Tokenizing, "_write"),
    "while a file is read": (corpus, "read_pieces"),
    "before a part": (packing, "write_records"),
    "at the end": (text_set, "publish"),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--sequences-per-file", "40", "--n-repack-epochs", "2")])
def test_run_that_is_stopped_and_resumed_writes_the_same_bytes(
    tmp_path, monkeypatch, source, options
):
    expected = create(source, tmp_path / "whole", *options)
    for place, (where, name) in PLACES.items():
        out = tmp_path / place
        for number in (1, 3):
            stop_at(monkeypatch, where, name, number)
            try:
                create(source, out, *options)
                assert number > 1, place  # fewer calls than 3 are possible, but not none
            except Stopped:
                assert not list(out.glob("*.tfrecords"))
        assert create(source, out, *options) == expected, place


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "characters"])
def test_run_that_leaves_out_and_cleans_documents_is_resumed_after_any_save(
    tmp_path, monkeypatch, tokenizer, kind
):
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 64)
    monkeypatch.setattr(corpus, "BATCH_CHARACTERS", 400)
    monkeypatch.setattr(corpus, "SAVE_EVERY", 1)
    long = "to be , or not to be ; " * 30
    parts = [long, "short", f"{long}caf\udce9", "\udcff", f"z{long}", f"{long}z", "end", long]
    text = "<|endoftext|>".join(parts).encode(errors="surrogateescape")
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "in" / name).write_bytes(text)
    known = character_tokenizer([long, "short", "end"])  # not the letter z
    monkeypatch.setattr(
        script, "load_tokenizer", lambda _: known if kind == "characters" else tokenizer
    )
    options = ("--normalize-with-wikitext-detokenize", "--skip-bad")
    expected = create(tmp_path / "in", tmp_path / "whole", *options)
    manifest = json.loads(expected["set.manifest.json"])
    assert manifest["documents"] == 2 * (4 if kind == "characters" else 6)
    stopped = 0
    for number in count(1):
        try:
            stop_at(monkeypatch, corpus.Progress, "save", number)
            made = create(tmp_path / "in", tmp_path / str(number), *options)
            assert made == expected
            break
        except Stopped:
            stopped += 1
        assert create(tmp_path / "in", tmp_path / str(number), *options) == expected
    assert stopped > 5


@pytest.mark.slow
def test_run_stopped_during_the_clean_up_starts_again(tmp_path, monkeypatch, source):
    expected = create(source, tmp_path / "out")
    stop_at(monkeypatch, shutil, "rmtree", 1)
    with pytest.raises(Stopped):
        create(source, tmp_path / "out")
    (partial,) = (tmp_path / "out").glob("*.partial")
    next(path for path in partial.iterdir() if path.name != "lock").unlink()
    assert create(source, tmp_path / "out") == expected


@pytest.mark.slow
def test_finished_files_are_not_read_again(tmp_path, monkeypatch, source):
    stop_at(monkeypatch, corpus, "read_pieces", 3)
    with pytest.raises(Stopped):
        create(source, tmp_path / "out")
    read, original = [], documents.read_pieces

    def record(path, *arguments):
        read.append(path)
        return original(path, *arguments)

    monkeypatch.setattr(corpus, "read_pieces", record)
    create(source, tmp_path / "out")
    # One file is finished; a second may be too, if its completion was saved before the stop.
    assert 1 <= len(list(source.iterdir())) - len(read) <= 2


@pytest.mark.slow
def test_result_does_not_depend_on_batches_files_or_cores(tmp_path, monkeypatch, source):
    expected = create(source, tmp_path / "one")
    monkeypatch.setattr(corpus, "BATCH_CHARACTERS", 1 << 20)
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 1 << 14)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # one core
    assert create(source, tmp_path / "two") == expected
    create(source, tmp_path / "three", "--sequences-per-file", "7")
    assert len(list((tmp_path / "three").glob("*.tfrecords"))) > 3
    np.testing.assert_array_equal(records(tmp_path / "one"), records(tmp_path / "three"))


def records(folder):
    loader = TFRecordNewInputs(str(folder / "set.index"), 1, SEQ, repeat=False)
    return np.concatenate([batch["obs"] for batch in loader])


def test_manifest_matches_the_files(tmp_path, source):
    (source / "bad.jsonl").write_bytes(b'{"text": "a b"}\n{"text": 3}\n[\n')
    out = tmp_path / "out"
    create(source, out, "--skip-bad", "--sequences-per-file", "100")
    manifest = json.loads((out / "set.manifest.json").read_text())
    assert (out / "set.index").read_text().split() == [entry["name"] for entry in manifest["files"]]
    for entry, folder in [(entry, out) for entry in manifest["files"]] + [
        (entry, source) for entry in manifest["sources"]
    ]:
        path = folder / entry["name"]
        assert entry["bytes"] == path.stat().st_size
        assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    rows = records(out)
    assert (
        manifest["sequences"]
        == len(rows)
        == manifest["tokens"] // manifest["tokens_per_sequence"]
        == sum(entry["sequences"] for entry in manifest["files"])
    )
    for key in ("documents", "tokens"):
        assert manifest[key] == sum(entry[key] for entry in manifest["sources"])
    assert manifest["skipped"] == {"no text": 1, "not JSON": 1}
    (bad,) = (entry for entry in manifest["sources"] if entry["name"] == "bad.jsonl")
    assert (bad["documents"], bad["skipped"]) == (1, manifest["skipped"])


@pytest.mark.slow
def test_bad_file_can_be_repaired_or_skipped_after_an_interrupted_run(tmp_path, source):
    path, good = source / "9.txt", b"a good line\n" * 200
    path.write_bytes(good + b"caf\xe9")
    options = ("--preserve-data-order",)  # so that 9.txt is read last
    for _ in range(2):
        with pytest.raises(InputError, match=r"9\.txt: document 1 holds the bytes .*--skip-bad$"):
            create(source, tmp_path / "out", *options)
    skipped = create(source, tmp_path / "out", *options, "--skip-bad")
    path.unlink()
    without = create(source, tmp_path / "without", *options)
    assert [skipped[name] for name in without if name.endswith("s")] == [
        without[name] for name in without if name.endswith("s")
    ]
    path.write_bytes(good + b"caf\xe9")
    with pytest.raises(InputError):
        create(source, tmp_path / "mended", *options)
    assert (tmp_path / "mended" / "set.partial" / "progress.json").exists()
    path.write_bytes(good)
    assert create(source, tmp_path / "mended", *options) == create(
        source, tmp_path / "whole", *options
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda source: ["--seed", "3"], "seed.*"),
        (lambda source: ["--min-unique-tokens", "3"], "min_unique_tokens"),
        (lambda source: os.utime(source / "0.txt", (1, 1)), "0.txt"),
        (lambda source: (source / "8.txt").write_text("more"), "files"),
    ],
    ids=["seed", "option", "file", "folder"],
)
def test_run_with_other_settings_or_files_is_not_resumed(
    tmp_path, monkeypatch, source, change, difference
):
    stop_at(monkeypatch, packing, "write_records", 1)
    with pytest.raises(Stopped):
        create(source, tmp_path / "out")
    changed = change(source)
    options = changed if isinstance(changed, list) else []
    with pytest.raises(
        InputError, match=f"differs from the interrupted one in {difference};.*--new$"
    ):
        create(source, tmp_path / "out", *options)
    assert create(source, tmp_path / "out", *options, "--new") == create(
        source, tmp_path / "whole", *options
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize("damage", ["{}", "[", '{"sources": [{}], "current": null}'])
def test_damaged_progress_file_is_refused(tmp_path, monkeypatch, source, damage):
    stop_at(monkeypatch, packing, "write_records", 1)
    with pytest.raises(Stopped):
        create(source, tmp_path / "out")
    (tmp_path / "out" / "set.partial" / "progress.json").write_text(damage)
    with pytest.raises(InputError, match=r"progress\.json: not a progress file of.*--new"):
        create(source, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("version", [None, 1, 3])
def test_a_run_that_another_version_began_is_not_resumed(tmp_path, monkeypatch, source, version):
    stop_at(monkeypatch, packing, "write_records", 1)
    with pytest.raises(Stopped):
        create(source, tmp_path / "out")
    path = tmp_path / "out" / "set.partial" / "progress.json"
    values = json.loads(path.read_text())
    values["settings"] |= {"pieces": version}
    if version is None:  # as of version 1.0
        del values["settings"]["pieces"], values["settings"]["text_column"]
    path.write_text(json.dumps(values))
    line = r"set\.partial: another version of mesh-transformer began this run.*start over"
    with pytest.raises(InputError, match=line):
        create(source, tmp_path / "out")
    assert create(source, tmp_path / "out", "--new") == create(source, tmp_path / "whole")


def test_two_runs_cannot_write_the_same_set_at_once(tmp_path, source):
    with (
        text_set.work_folder(tmp_path / "out" / "set.partial", False),
        pytest.raises(InputError, match="another run uses this folder"),
    ):
        create(source, tmp_path / "out")


def test_long_documents_are_read_in_small_pieces(tmp_path):
    """Pieces stay short for a line of spaces, a single long word, and well compressed documents."""
    frame = zstandard.compress(json.dumps({"text": "to be or not " * 5000}).encode() + b"\n")
    (tmp_path / "a.jsonl.zst").write_bytes(frame * 10)
    (tmp_path / "b.txt").write_text(" " * 3_000_000)
    (tmp_path / "c.txt").write_text("\u4e2d" * 1_500_000)
    longest = 0
    for name in "a.jsonl.zst", "b.txt", "c.txt":
        bad = BadInputHandler(False)
        for piece in documents.read_pieces(str(tmp_path / name), "<|end|>", bad, int):
            longest = max(longest, len(piece.text))
    assert longest <= 2 * documents.PIECE_CHARACTERS


@pytest.mark.slow
def test_run_that_is_killed_at_any_moment_writes_the_same_bytes(tmp_path):
    killed_tokenizing.check(tmp_path, kills=5)
