"""What a file's name means: every kind, compressed and in archives, gives the same documents."""

import csv
import gzip
import io
import itertools
import json
import lzma
import os
import re
import tarfile

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from mesh_transformer.cli import text_records
from mesh_transformer.data import tables
from mesh_transformer.data.contents import Content
from mesh_transformer.data.documents import read_pieces
from mesh_transformer.data.file_types import (
    FILE_TYPES,
    TABLE_TYPES,
    TEXT_TYPES,
    FileType,
    is_hidden,
)
from mesh_transformer.data.inputs import BadInputHandler, find_files, find_set
from mesh_transformer.data.tfrecords import read_index
from mesh_transformer.util import InputError

WORDS = ["To be,", '"or"', "not\n", "\n\nquestion;", "\t'tis", "caf\u00e9", "4,2", "\u4e2d"]
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


def texts(count=20, seed=0):
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, generator.integers(1, 60))) for _ in range(count)]


def separated(rows, delimiter):
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerows([["text"], *([row] for row in rows)])
    return text.getvalue().encode()


def parquet_of(rows):
    sink = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": rows}), sink)
    return sink.getvalue()


def arrow_of(rows):
    table, sink = pyarrow.table({"text": rows}), io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def lines_of(rows):
    return "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()


PLAIN = {
    **{ending: lambda rows: "<|endoftext|>".join(rows).encode() for ending in TEXT_TYPES},
    ".jsonl": lines_of,
    ".ndjson": lines_of,
    ".json": lambda rows: json.dumps([{"text": row} for row in rows], indent=1).encode(),
    ".csv": lambda rows: separated(rows, ","),
    ".tsv": lambda rows: separated(rows, "\t"),
}
# {ending: a function from documents to the content of a file}
FILES = {
    **{
        kind + compression: lambda rows, kind=kind, compression=compression: COMPRESS[compression](
            PLAIN[kind](rows)
        )
        for kind, compression in itertools.product(PLAIN, COMPRESS)
    },
    ".parquet": parquet_of,
    ".arrow": arrow_of,
    ".xz": lambda rows: lzma.compress(PLAIN[".txt"](rows)),
}


def tar_of(members):
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return sink.getvalue()


def documents(path, bad=None):
    result, parts = [], []
    for piece in read_pieces(str(path), "<|endoftext|>", bad or BadInputHandler(False), int):
        parts.append(piece.text)
        if piece.is_end:
            result.append("".join(parts))
            parts = []
    return result


@pytest.mark.parametrize("ending", FILES)
@pytest.mark.parametrize("upper", [False, True])
def test_every_kind_and_compression_gives_the_same_documents(tmp_path, ending, upper):
    rows = texts()
    path = tmp_path / ("a.b" + (ending.upper() if upper and ending != ".xz" else ending))
    path = path.with_name("a.xz") if ending == ".xz" else path
    path.write_bytes(FILES[ending](rows))
    assert find_files(str(path), FILE_TYPES) == [str(path)]
    assert documents(path) == rows
    assert FileType.of(str(path)) == (path.name[: -len(ending)], *split_ending(ending))


def split_ending(ending):
    compression = next((c for c in COMPRESS if c and ending.endswith(c)), "")
    return ending.removesuffix(compression) or ".xz", compression


@pytest.mark.parametrize(
    "ending", [".tar", ".tar.gz", ".tar.xz", ".tar.zst", ".tgz", ".txz", ".xz"]
)
def test_members_of_archives_are_read_as_files_are_and_hidden_ones_are_not(tmp_path, ending):
    rows = texts()
    nested = lzma.compress(tar_of({"inside.csv": FILES[".csv"](["nested"])}))
    members = {
        f"./{number}/a{kind}": make(rows) for number, (kind, make) in enumerate(FILES.items())
    }
    members |= {"nested.xz": nested, "nested.tar.xz": nested, "no_ending": b"plain", "v1.0": b"1.0"}
    hidden = {"._a.txt": b"mac", ".x.jsonl": b"{", "b/.git/c.txt": b"no", ".html": b"<p>"}
    compression = {".tgz": ".gz", ".txz": ".xz"}.get(ending, ending.removeprefix(".tar"))
    path = tmp_path / f"a{ending}"
    path.write_bytes(COMPRESS[compression](tar_of(members | hidden)))
    assert documents(path) == rows * len(FILES) + ["nested", "nested", "plain", "1.0"]


UNKNOWN = (
    *(f"a{table}.bz2" for table in TABLE_TYPES),
    "a.parquet.gz",
    "a.arrow.xz",
    "a.html.xz",
    "a.zip",
    "a.gz",
    "a.zst",
    "a.tar.bz2",
    "a.html",
)


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_types_are_refused_and_in_a_folder_left_out(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"text")
    with pytest.raises(InputError, match=r"found, expected files ending in \.txt\[") as caught:
        find_files(str(path), FILE_TYPES)
    assert "\n" not in str(caught.value)
    (tmp_path / "b.txt").write_text("text")
    assert find_files(str(tmp_path), FILE_TYPES) == [str(tmp_path / "b.txt")]
    assert find_set(str(tmp_path), FILE_TYPES).left_out == f"left out: 1 of other types ({name})"


def test_member_of_unknown_type_is_named_or_skipped_and_counted(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(tar_of({"a.txt": b"a", "page.html": b"<p>", "b.txt": b"b"})))
    with pytest.raises(InputError, match=r"page\.html is of an unknown type.*--skip-bad"):
        documents(path)
    bad = BadInputHandler(True)
    assert documents(path, bad) == ["a", "b"]
    assert bad.counts == {"unknown type": 1}


def test_hidden_files_are_read_only_if_they_are_named(tmp_path):
    for name in ("a.txt", ".b.txt", "._a.txt"):
        (tmp_path / name).write_text(name)
    for path in (tmp_path, tmp_path / "*.txt", tmp_path / "*"):
        assert find_files(str(path), FILE_TYPES) == [str(tmp_path / "a.txt")]
    assert find_set(str(tmp_path), FILE_TYPES).left_out == "left out: 2 hidden (._a.txt, .b.txt)"
    assert documents(tmp_path / ".b.txt") == [".b.txt"]
    assert [is_hidden(path) for path in ("./a", "a/..", "a/.b/c", "._a")] == [
        False,
        False,
        True,
        True,
    ]


def test_json_files_of_a_folder_are_read_if_there_are_no_others(tmp_path):
    (tmp_path / "a.json").write_text('["one"]')
    assert find_files(str(tmp_path), FILE_TYPES) == [str(tmp_path / "a.json")]
    (tmp_path / "b.csv").write_text("text\ntwo\n")
    assert find_files(str(tmp_path), FILE_TYPES) == [str(tmp_path / "b.csv")]
    assert find_set(str(tmp_path), FILE_TYPES).left_out == "left out: 1 of other types (a.json)"
    assert find_files(str(tmp_path / "*.json"), FILE_TYPES) == [str(tmp_path / "a.json")]


def test_subfolders_markdown_and_files_without_an_ending_are_read(tmp_path):
    text, other = "Größe\n" * 2000, "left out"
    read = ["a.md", "notes", "v1.0", "b/README.txt", "b/c/d.txt", "b.txt", "data.md/e.jsonl"]
    contents = dict.fromkeys(read, text) | {"data.md/e.jsonl": '{"text": "row"}\n'}
    contents |= {".git/f.txt": other, "b/.g": other, ".h.partial/tokens": other}
    contents |= {"README.md": other, "b/Readme": other, "LICENSE": other, "b/i.html": other}
    contents |= {"set/a.index": other, "set/a.manifest.json": "{}", "run/metrics.jsonl": "{}"}
    contents |= {
        "a.manifest.json": "{}",
        "bpe/tokenizer.json": "{}",
        "bpe/merges.txt": other,
        "set.partial/tokens": other,
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "tokens").write_bytes(b"\1\0\2\0")
    (tmp_path / "latin").write_bytes("Größe".encode("latin-1"))
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "linked.txt").symlink_to(tmp_path / "b.txt")
    (tmp_path / "lost.txt").symlink_to(tmp_path / "missing")
    found = [os.path.relpath(path, tmp_path) for path in find_files(str(tmp_path), FILE_TYPES)]
    assert found == sorted([*read, "linked.txt"], key=lambda name: name.split("/"))
    assert find_set(str(tmp_path), FILE_TYPES).left_out == (
        "left out: 3 README or LICENSE (LICENSE, README.md, ...), 3 hidden (.git/, .h.partial/, "
        "...), 1 linked (loop/), 2 not UTF-8 (latin, tokens), 1 of a model or tokenizer (bpe/), "
        "2 of other types (b/i.html, lost.txt), 3 of records or a run (a.manifest.json, run/, "
        "...), 1 unfinished (set.partial/)"
    )
    for name in ("README.md", "LICENSE", "notes"):  # a file that is named is read
        path = tmp_path / name
        assert find_files(str(path), FILE_TYPES) == [str(path)]
        assert documents(path) == [contents[name]]
    assert find_files(str(tmp_path / "b*"), FILE_TYPES) == [str(tmp_path / "b.txt")]
    assert find_files(str(tmp_path), TABLE_TYPES) == [str(tmp_path / "data.md/e.jsonl")]


@pytest.mark.parametrize("ending", FILES)
def test_byte_order_mark_and_windows_line_ends_are_the_same_in_every_kind(tmp_path, ending):
    expected = "first\nsecond\n\nthird\n"
    text = "\ufeff" + expected.replace("\n", "\r\n")
    file, archive = tmp_path / f"a{ending}", tmp_path / "a.tar"
    file.write_bytes(FILES[ending]([text]))
    archive.write_bytes(tar_of({file.name: FILES[ending]([text])}))
    assert documents(file) == documents(archive) == [expected]
    if split_ending(ending)[0] in PLAIN:  # the mark of the whole file
        compression = COMPRESS[split_ending(ending)[1]]
        marked = b"\xef\xbb\xbf" + PLAIN[split_ending(ending)[0]](["a b"])
        file.write_bytes(compression(marked))
        assert documents(file) == ["a b"]


def test_zstandard_with_the_longest_window_is_read(tmp_path):
    rows = texts(200)
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=31)
    sink = io.BytesIO()
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with compressor.stream_writer(sink, closefd=False) as writer:
        writer.write(lines_of(rows))
    (tmp_path / "a.jsonl.zst").write_bytes(sink.getvalue())
    assert documents(tmp_path / "a.jsonl.zst") == rows


def items(path):
    with open(path, "rb") as raw:
        content = Content(path.name, ".json", raw)
        return [item for _, item in tables.read_rows(content, NO_COLUMNS, BadInputHandler(False))]


NO_COLUMNS = tables.Columns((), "")


def random_value(generator, depth=0):
    kind = generator.integers(6 if depth < 3 else 4)
    if kind == 0:
        return int(generator.integers(-(10**9), 10**9))
    if kind == 1:
        return [True, False, None, 1.5][generator.integers(4)] if depth else "x"
    if kind < 4:
        return " ".join(generator.choice([*WORDS, "]", "}", ",", "[", '"'], generator.integers(9)))
    values = [random_value(generator, depth + 1) for _ in range(generator.integers(4))]
    return values if kind == 4 and depth else {f"k{n}": value for n, value in enumerate(values)}


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("seed", range(5))
def test_items_of_json_are_those_of_the_json_package(tmp_path, monkeypatch, seed, size):
    monkeypatch.setattr(tables, "JSON_CHARACTERS", size)
    generator = np.random.default_rng(seed)
    values = [random_value(generator) for _ in range(generator.integers(1, 30))]
    path = tmp_path / "a.json"
    for text in (
        json.dumps(values),
        f" {json.dumps(values, indent=2, ensure_ascii=False)} \n",
        "\n".join(map(json.dumps, values)),
        "\ufeff" + "\n\n".join(json.dumps(value, indent=1) for value in values) + "\n",
    ):
        path.write_text(text, encoding="utf-8")
        assert items(path) == values
    whole = json.dumps(values, indent=1).encode()
    for end in generator.integers(1, len(whole), 40):
        path.write_bytes(whole[:end])
        with pytest.raises(tables.DamagedError, match=r"item \d+"):
            items(path)
    path.write_bytes(whole + b"[]")
    with pytest.raises(tables.DamagedError, match="after the array"):
        items(path)


def test_bad_items_of_json_are_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"text": "a"}, {"text": "caf\xe9"}, {"body": "c", "n": 1}, {"text": "d"}]')
    with pytest.raises(InputError, match=re.escape("a.json: item 2 holds the bytes b'\\xe9'")):
        documents(path)
    bad = BadInputHandler(True)
    assert documents(path, bad) == ["a", "d"]
    assert bad.counts == {"not UTF-8": 1, "no text": 1}
    path.write_bytes(b'[{"text": "a"}, {]')
    with pytest.raises(InputError, match=r"a\.json: damaged or cut short: item 2 is not JSON"):
        documents(path)


@pytest.mark.parametrize("size", [1, 3, 1 << 16])
def test_a_file_of_json_has_one_comma_between_two_items(tmp_path, monkeypatch, size):
    """Random arrays with a comma more or less, compared with the json package."""
    monkeypatch.setattr(tables, "JSON_CHARACTERS", size)
    path, generator = tmp_path / "a.json", np.random.default_rng(size)
    for line in ("[1,,2]", "[,1]", "[1,]", "[1 2]", "[,]", "[1,,]", '["a""b"]', "1, 2", "{},{}"):
        path.write_text(line)
        with pytest.raises(tables.DamagedError, match=r"item \d+ is not (JSON|followed by)"):
            items(path)
    for _ in range(200):
        count = generator.integers(1, 7)
        text = "[" + "".join(generator.choice(["1", "[2]", ",", ",", " "], count)) + "]"
        path.write_text(text)
        try:
            expected = json.loads(text)
        except ValueError:
            with pytest.raises(tables.DamagedError):
                items(path)
        else:
            assert items(path) == expected


@pytest.mark.parametrize("ending", [".tar", ".tar.zst", ".csv.xz", ".jsonl.xz", ".tar.gz"])
def test_file_cut_anywhere_is_refused_in_one_line(tmp_path, ending):
    rows = texts(8)
    path = tmp_path / f"a{ending}"
    inside = tar_of({"a.csv": FILES[".csv"](rows), "b.txt": FILES[".txt"](rows)})
    kind, compression = split_ending(ending)
    content = COMPRESS[compression](inside if kind == ".tar" else PLAIN[kind](rows))
    end = len(inside.rstrip(b"\0")) if ending == ".tar" else len(content)
    for position in np.random.default_rng(0).integers(1, end, 60):
        path.write_bytes(content[:position])
        with pytest.raises(InputError, match=re.escape(f"{path}: damaged or cut short")) as caught:
            documents(path)
        assert "\n" not in str(caught.value)


def test_damaged_header_of_a_member_does_not_end_the_archive_silently(tmp_path):
    content = bytearray(tar_of({f"{n}.txt": b"text" for n in range(3)}))
    content[2 * tarfile.BLOCKSIZE + 3] ^= 1  # in the name of the second member
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.tar: damaged.*: bad checksum at byte 1024"):
        documents(tmp_path / "a.tar")


def test_records_of_a_compressed_table_are_those_of_the_plain_one(tmp_path):
    made = []
    for ending in (".jsonl", ".jsonl.xz"):
        path = tmp_path / f"a{ending}"
        path.write_bytes(FILES[ending](texts(30)))
        out = tmp_path / ending
        flags = ["--output-dir", str(out), "--seq", "16", "--tokenizer", "bytes"]
        text_records.main([str(path), "set", *flags])
        made.append({f.name: f.read_bytes() for f in out.iterdir() if f.suffix != ".json"})
    assert made[0] == made[1]


def test_a_name_with_a_space_is_one_name_and_an_index_may_begin_with_a_mark(tmp_path, capsys):
    (tmp_path / "a b.txt").write_text("words " * 100)
    flags = ["--output-dir", str(tmp_path), "--seq", "16", "--tokenizer", "bytes"]
    text_records.main([str(tmp_path / "a b.txt"), *flags])
    [name] = [path.name for path in tmp_path.glob("*.tfrecords")]
    assert capsys.readouterr().out.startswith(f"{tmp_path / name}: ")
    index = tmp_path / "a b.index"
    expected = read_index(str(index))
    index.write_bytes(b"\xef\xbb\xbf" + index.read_bytes())
    assert read_index(str(index)) == expected == [name]
