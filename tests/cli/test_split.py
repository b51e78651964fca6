"""mesh-transformer split: no text is lost, the choice is by document, and errors leave nothing."""

import datetime
import gzip
import io
import json
import lzma
import random
import re
import tarfile
from array import array
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from mesh_transformer.cli import completion_records, text_records
from mesh_transformer.cli import split as command
from mesh_transformer.data import split_parts
from mesh_transformer.data.documents import read_pieces
from mesh_transformer.data.inputs import BadInputHandler
from mesh_transformer.data.split import choose, split
from mesh_transformer.data.split_parts import Writing
from mesh_transformer.util import InputError

WORDS = ["To", "be,", "caf\u00e9", "\u4e2d\u6587", "\U0001f600", "end.\n", "end.\n\n", "'tis"]


def texts_of(generator, count, most=200):
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, most))) for _ in range(count)]


def documents(path):
    """Return the documents of a file as `records` reads them."""
    result, parts = [], []
    for piece in read_pieces(str(path), "<|endoftext|>", BadInputHandler(False), lambda _: None):
        parts.append(piece.text)
        if piece.is_end:
            result.append("".join(parts))
            parts = []
    return result


def both(folder):
    return [documents(Path(folder) / f"{name}.jsonl.zst") for name in ("train", "val")]


def size(texts):
    return sum(len(text.encode()) for text in texts)


def test_each_document_is_in_one_part_whatever_the_file_type(tmp_path):
    generator = random.Random(1)
    texts = texts_of(generator, 60)
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("<|endoftext|>".join(texts[:10]))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[10:20])
    (folder / "b.jsonl").write_text(lines)
    lines = "".join(json.dumps(text) + "\n" for text in texts[20:30])
    (folder / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    (folder / "d.xz").write_bytes(lzma.compress("<|endoftext|>".join(texts[30:40]).encode()))
    with gzip.open(folder / "e.tar.gz", "wb") as raw, tarfile.open(fileobj=raw, mode="w") as tar:
        for number, text in enumerate(texts[40:]):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    (folder / "README.md").write_text("not text")

    parts = split(str(folder), str(tmp_path / "out"), validation=0.2)
    train, validation = both(tmp_path / "out")
    assert sorted(train + validation) == sorted(texts)  # nothing is cut
    assert [t for t in texts if t in train] == train  # in reading order
    assert 0.1 * size(texts) <= size(validation) <= 0.2 * size(texts)
    assert [(part.documents, part.bytes) for part in parts] == [
        (len(train), size(train)),
        (len(validation), size(validation)),
    ]


def test_the_seed_decides(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(f'"document {n:3}"\n' for n in range(100)))
    read = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        split(str(tmp_path / "in.jsonl"), str(tmp_path / name), seed=seed, validation=0.5)
        read.append([(tmp_path / name / f"{p}.jsonl.zst").read_bytes() for p in ("train", "val")])
    assert read[0] == read[1] != read[2]
    assert both(tmp_path / "one")[1] != sorted(both(tmp_path / "one")[0])


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_near_the_target(seed):
    generator = random.Random(seed)
    sizes = array("q", [generator.choice([-1, 0, 5, 50, 5000]) for _ in range(30)] + [10])
    total = sum(s for s in sizes if s > 0)
    target = round(0.1 * total)
    choice = choose(sizes, 0.1, seed)
    taken = sum(sizes[number] for number in choice.documents)
    assert all(sizes[number] > 0 for number in choice.documents)
    assert choice.cut not in choice.documents
    if choice.cut is None:
        assert target / 2 <= taken <= target
    else:
        assert taken + choice.cut_bytes == target
        assert sizes[choice.cut] > choice.cut_bytes


@pytest.mark.parametrize(
    ("unit", "ending"), [("line\n\nnext line ", "\n\n"), ("a line\n", "\n"), ("a word ", " ")]
)
def test_one_document_is_cut_at_the_best_boundary(tmp_path, unit, ending):
    text = unit * 3000
    (tmp_path / "in.txt").write_text(text)
    split(str(tmp_path / "in.txt"), str(tmp_path / "out"), validation=0.3)
    [train], [validation] = both(tmp_path / "out")
    assert train + validation == text
    assert train.endswith(ending)
    assert 0 <= 0.3 * len(text) - len(validation) <= 2 * len(unit)


@pytest.mark.parametrize("seed", range(5))
def test_long_documents_are_copied_in_pieces(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(split_parts, "LINE_CHARACTERS", 1000)
    monkeypatch.setattr(split_parts, "WINDOW_CHARACTERS", 500)
    generator = random.Random(seed)
    [text] = texts_of(generator, 1, most=50_000)
    text = generator.choice(["", "\u4e2d" * 40_000]) + text
    (tmp_path / "in.txt").write_text(text, encoding="utf-8")
    split(str(tmp_path / "in.txt"), str(tmp_path / "out"), validation=0.4)
    train, validation = both(tmp_path / "out")
    assert "".join(train + validation) == text
    assert validation


def call(capsys, *words):
    command.main([*map(str, words)])
    return capsys.readouterr().out.splitlines()


def test_the_command_prints_bytes(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('"1234567890"\n' * 10)
    lines = call(capsys, tmp_path / "in.jsonl", tmp_path / "out", "--validation", 0.2)
    assert lines == [
        f"train  80 bytes (80.0%) in 8 documents: {tmp_path}/out/train.jsonl.zst",
        f"val    20 bytes (20.0%) in 2 documents: {tmp_path}/out/val.jsonl.zst",
    ]
    again = call(capsys, tmp_path / "in.jsonl", tmp_path / "out", "--validation", 0.2)
    assert again == [f"{line} (replaced)" for line in lines]


def test_the_command_names_the_files_that_it_leaves_out(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.txt", "b.pdf", "c.py", ".hidden"):
        (folder / name).write_text("word " * 100)
    lines = call(capsys, folder, tmp_path / "out", "--validation", 0.2)
    assert lines[0] == "left out: 1 hidden (.hidden), 2 of other types (b.pdf, c.py)"
    assert [line.partition(" in ")[2].partition(":")[0] for line in lines[1:]] == ["1 document"] * 2


@pytest.mark.parametrize(
    ("name", "contents", "options", "message"),
    [
        ("a.txt", b"", (), "found 0 bytes of text in 0 documents, too little"),
        ("a.txt", b"short", (), "found 5 bytes of text in 1 documents, too little"),
        ("a.txt", b"\xff" * 50, (), "a.txt: document 1 holds the bytes"),
        ("a.jsonl", b'"text"\n{', (), "a.jsonl: line 2 is not JSON"),
        ("a.jsonl", b'{"no": 1}', ("--skip-bad",), r"\(skipped: 1 no text\), too little"),
        ("a.jsonl.zst", b"damaged", (), "a.jsonl.zst: damaged or cut short"),
        ("a.doc", b"text", (), "no text found, expected files ending in"),
        ("a.txt", b"text" * 9, ("--validation", "1"), "validation is 1.0, expected a fraction"),
    ],
)
def test_errors_leave_nothing(tmp_path, name, contents, options, message):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / name).write_bytes(contents)
    with pytest.raises(InputError, match=message) as raised:
        command.main([str(folder), str(tmp_path / "out"), *options])
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("count", [9, 11])
def test_a_failure_while_writing_leaves_the_earlier_files(tmp_path, monkeypatch, count):
    (tmp_path / "in.jsonl").write_text('"1234567890"\n' * 10)
    split(str(tmp_path / "in.jsonl"), str(tmp_path / "out"), validation=0.2)
    before = both(tmp_path / "out")
    original = Writing.write

    def write(self, part, *arguments):
        (tmp_path / "in.jsonl").write_text('"1234567890"\n' * count)
        original(self, part, *arguments)

    monkeypatch.setattr(Writing, "write", write)
    with pytest.raises(InputError, match=r"in\.jsonl changed while it was read"):
        split(str(tmp_path / "in.jsonl"), str(tmp_path / "out"), validation=0.5)
    assert both(tmp_path / "out") == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "train.jsonl.zst",
        "val.jsonl.zst",
    ]


def test_bad_documents_are_skipped(tmp_path):
    (tmp_path / "in.jsonl").write_text('"1234567890"\n{"no": 1}\n' * 10)
    split(str(tmp_path / "in.jsonl"), str(tmp_path / "out"), validation=0.2, skip_bad=True)
    assert [len(part) for part in both(tmp_path / "out")] == [8, 2]


def test_the_folder_of_the_text_is_refused(tmp_path):
    (tmp_path / "in.txt").write_text("text " * 100)
    with pytest.raises(InputError, match="is also the folder of the text; choose another"):
        split(str(tmp_path), str(tmp_path))


@pytest.mark.parametrize("rows", [[], ["--rows"]])
def test_text_that_a_part_would_replace_is_refused(tmp_path, monkeypatch, rows):
    lines = b'{"text": "a b c d"}\n' * 20
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl.zst").write_bytes(zstandard.compress(lines))
    (tmp_path / "link.jsonl.zst").symlink_to("val.jsonl.zst")
    monkeypatch.chdir(tmp_path)
    for text in ("train.jsonl.zst", str(tmp_path / "val.jsonl.zst"), "link.*", "tra*"):
        with pytest.raises(InputError, match="would be replaced by its own part; choose another"):
            command.main([text, ".", *rows])
    for name in ("train", "val"):
        assert (tmp_path / f"{name}.jsonl.zst").read_bytes() == zstandard.compress(lines)
    command.main(["train.jsonl.zst", "parts", *rows])
    assert sum(map(len, both("parts"))) == 20


@pytest.mark.slow
def test_records_of_a_folder_are_those_of_its_files(tmp_path):
    """Without a name, `records` makes a set per file, as with the files' names."""
    (tmp_path / "in.jsonl").write_text("".join(f'"document {n:3}"\n' for n in range(100)))
    split(str(tmp_path / "in.jsonl"), str(tmp_path), validation=0.3)
    (tmp_path / "in.jsonl").unlink()
    out = ["--seq", "8", "--output-dir"]
    text_records.main([str(tmp_path), *out, str(tmp_path / "one")])
    for name in ("train", "val"):
        file = str(tmp_path / f"{name}.jsonl.zst")
        text_records.main([file, name, *out, str(tmp_path / "two")])
    contents = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    ]
    assert contents[0] == contents[1]
    assert {"train.index", "val.index"} < contents[0].keys()


def test_records_of_files_with_equal_names_are_refused(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text('"text"')
    with pytest.raises(InputError, match=r"a\.txt and .*a\.jsonl would both create"):
        text_records.main([str(tmp_path), "--output-dir", str(tmp_path)])


def rows_in(path):
    with zstandard.open(path, "rt") as file:
        return [json.loads(line) for line in file]


ROWS = [
    {"prompt": f"{n} + 1 =", "completion": f" caf\u00e9 {n + 1}", "id": n, "tags": ["a", None]}
    for n in range(60)
]


def write_rows(path, rows):
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(lzma.compress(lines.encode()))


@pytest.mark.parametrize("name", ["in.jsonl.xz", "in.json", "in.parquet"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_assigned_whole_with_all_their_columns(tmp_path, capsys, name, seed):
    write_rows(tmp_path / name, ROWS)
    flags = ("--rows", "--validation", 0.2, "--seed", seed)
    lines = call(capsys, tmp_path / name, tmp_path / "out", *flags)
    train, validation = (rows_in(tmp_path / "out" / f"{p}.jsonl.zst") for p in ("train", "val"))
    assert sorted([*train, *validation], key=lambda row: row["id"]) == ROWS
    assert [row for row in ROWS if row in train] == train
    assert 8 <= len(validation) <= 12
    assert f"in {len(train)} rows: " in lines[0]
    assert f"in {len(validation)} rows: " in lines[1]
    out = ["--output-dir", str(tmp_path), "--seq", "32", "--tokenizer", "bytes"]
    completion_records.main([str(tmp_path / "out" / "train.jsonl.zst"), "train", *out])
    assert (tmp_path / f"train_{len(train)}.tfrecords").exists()


def test_rows_with_bytes_are_refused_and_dates_are_text(tmp_path, capsys):
    day = datetime.date(2020, 1, 2)
    write_rows(tmp_path / "days.parquet", [row | {"day": day} for row in ROWS])
    call(capsys, tmp_path / "days.parquet", tmp_path / "days", "--rows")
    assert {row["day"] for row in rows_in(tmp_path / "days" / "train.jsonl.zst")} == {"2020-01-02"}
    for cell in (b"\x89PNG", {"bytes": b"a", "path": None}, [b"a"]):
        path = tmp_path / "images.parquet"
        write_rows(path, [row | {"image": cell} for row in ROWS])
        with pytest.raises(InputError, match="row 1: column image holds bytes, expected text or"):
            command.main([str(path), str(tmp_path / "new"), "--rows"])
        assert not (tmp_path / "new").exists()


def test_the_share_of_few_rows_is_one_row_at_least(tmp_path, capsys):
    for count in (2, 3, 7):
        write_rows(tmp_path / "in.jsonl.xz", ROWS[:count])
        call(capsys, tmp_path / "in.jsonl.xz", tmp_path / "out", "--rows")
        assert len(rows_in(tmp_path / "out" / "val.jsonl.zst")) == 1
    write_rows(tmp_path / "in.jsonl.xz", ROWS[:1])
    for path, flags, message in (
        (tmp_path / "in.jsonl.xz", [], "found 1 rows, expected at least 2; add rows"),
        (tmp_path / "in.jsonl.xz", ["--text-column", "a"], "--text-column is not used with --rows"),
        (tmp_path / "in.txt", [], "no text found, expected files ending in .jsonl"),
    ):
        (tmp_path / "in.txt").write_text("text")
        with pytest.raises(InputError, match=re.escape(message)):
            command.main([str(path), str(tmp_path / "new"), "--rows", *flags])
        assert not (tmp_path / "new").exists()
