"""Records from tables and datasets: the same documents give the same bytes, and all refusals."""

import csv
import gzip
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import feather, parquet

from mesh_transformer.cli import completion_records, new_tokenizer, text_records
from mesh_transformer.cli.split import main as split_main
from mesh_transformer.data.documents import read_pieces
from mesh_transformer.data.file_types import FILE_TYPES
from mesh_transformer.data.inputs import BadInputHandler, find_files, find_set, find_sets
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.storage import files
from mesh_transformer.util import InputError
from tests.support.fake_gcs import gcs_server
from tests.support.fake_hub import COMMIT, NAME, hub_server

SEQ = 16
WORDS = [
    "To",
    "be,",
    '"or"',
    "not\n",
    "\n\nquestion;",
    "\t'tis",
    "caf\u00e9",
    "4,2",
    "\u4e2d",
    "\\n",
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(autouse=True)
def one_tokenizer(monkeypatch, tokenizer):
    for script in (text_records, completion_records):
        monkeypatch.setattr(script, "load_tokenizer", lambda _: tokenizer)


def texts(count, seed=0):
    """Documents of 1 to 60 words, with quotes, separators and line breaks inside."""
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, generator.integers(1, 60))) for _ in range(count)]


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def separated(rows, delimiter):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode("utf-8-sig" if delimiter == "," else "utf-8")


def stream(table):
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue()


def write_txt(path, rows):
    path.mkdir()
    for number, row in enumerate(rows):
        (path / f"{number:03}.txt").write_text(row["text"], encoding="utf-8", newline="")


def save(path, rows, shards=3):
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(path, num_shards=min(shards, len(rows)))


def save_dict(path, rows):
    save(path / "train", rows)
    save(path / "test", [{"text": "other"}], 1)
    (path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


def write_parquet(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=11)


def write_bytes(make):
    return lambda path, rows: path.write_bytes(make(rows))


KINDS = {
    "in.jsonl": write_bytes(jsonl),
    "in.jsonl.gz": write_bytes(lambda rows: gzip.compress(jsonl(rows))),
    "in.csv": write_bytes(lambda rows: separated(rows, ",")),
    "in.csv.zst": write_bytes(lambda rows: zstandard.compress(separated(rows, ","))),
    "in.tsv.gz": write_bytes(lambda rows: gzip.compress(separated(rows, "\t"))),
    "in.parquet": write_parquet,
    "in.arrow": write_bytes(lambda rows: stream(pyarrow.Table.from_pylist(rows))),
    "file/in.arrow": lambda path, rows: feather.write_feather(
        pyarrow.Table.from_pylist(rows), path, chunksize=7
    ),
    "texts": write_txt,
    "saved": save,
    "splits": save_dict,
}


def create(source, out, *options):
    """Run the command; return the contents of the files it writes, except the manifest."""
    text_records.main([str(source), "set", "--output-dir", str(out), "--seq", str(SEQ), *options])
    return {path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".json"}


def write(folder, kind, rows):
    path = folder / kind
    path.parent.mkdir(parents=True, exist_ok=True)
    KINDS[kind](path, rows)
    return path


def options_for(kind):
    return ("--split", "train") if kind == "splits" else ()


@pytest.mark.slow
def test_the_same_documents_give_the_same_records_in_every_format(tmp_path):
    rows = [{"id": number, "text": text} for number, text in enumerate(texts(60))]
    expected = None
    for kind in KINDS:
        source = write(tmp_path, kind, rows)
        out = tmp_path / f"out {kind.replace('/', ' ')}"
        actual = create(source, out, "--preserve-data-order", *options_for(kind))
        expected = expected or actual
        assert actual == expected, kind
    assert expected is not None
    assert len(expected) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["in.csv", "in.parquet", "in.arrow", "in.jsonl.gz"])
def test_columns_are_named_and_other_columns_have_no_effect(tmp_path, kind):
    rows = [{"body": text, "text": "no", "n": "1"} for text in texts(40, seed=1)]
    source = write(tmp_path, kind, rows)
    plain = write(tmp_path, "in.jsonl", [{"text": row["body"]} for row in rows])
    actual = create(source, tmp_path / "out", "--text-column", "body")
    assert actual == create(plain, tmp_path / "plain")
    with pytest.raises(InputError, match="already exists, but was created with --text-column"):
        create(source, tmp_path / "out")


@pytest.mark.slow
def test_line_ends_in_cells_are_those_of_text_files(tmp_path):
    rows = [{"text": "a\r\nb\rc\n\nd\n" * 9}] * 3
    kinds = ["texts", "in.jsonl", "in.csv", "in.parquet", "in.arrow"]
    order = "--preserve-data-order"
    outs = [create(write(tmp_path, kind, rows), tmp_path / f"out {kind}", order) for kind in kinds]
    assert all(out == outs[0] for out in outs)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "texts"])
def test_missing_column_is_one_line_that_lists_the_columns(tmp_path, kind):
    source = write(tmp_path, kind, [{"id": "1", "body": "b"}])
    with pytest.raises(InputError) as caught:
        create(source, tmp_path / "out", *options_for(kind))
    message = str(caught.value)
    assert re.search(r"in\.|\.arrow", message)
    assert re.search("no (column|text).* id, body: name .*with --text-column", message)
    assert "\n" not in message


def broken_text(path, _):
    """A table whose second row is not UTF-8, and whose third has no text."""
    cells = pyarrow.array([b"to be", b"caf\xe9", None, b"or not " * 30])
    column = pyarrow.StringArray.from_buffers(4, *cells.buffers()[1:], cells.buffers()[0])
    table = pyarrow.table({"text": column})
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        path.write_bytes(stream(table))


BROKEN_ROWS = ["row 2 holds the bytes b'\\xe9'", "row 3 has no text, text is null"]
BROKEN = {
    "in.parquet": (broken_text, BROKEN_ROWS),
    "in.arrow": (broken_text, BROKEN_ROWS),
    "in.csv": (
        lambda path, _: path.write_bytes(
            b'id,text\n1,"a\nb"\n2,caf\xe9\n3\n4,a,b\n\n5,' + b"or not " * 30 + b"\n"
        ),
        [
            "line 4 holds the bytes b'\\xe9'",
            "line 5: found 1 values, but the first row names 2 columns",
            "line 6: found 3 values",
        ],
    ),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", BROKEN)
def test_bad_rows_are_named_or_skipped_and_counted(tmp_path, capsys, kind):
    make, messages = BROKEN[kind]
    make(tmp_path / kind, None)
    with pytest.raises(InputError, match=re.escape(f"{kind}: {messages[0]}")) as caught:
        create(tmp_path / kind, tmp_path / "out")
    assert str(caught.value).endswith("--skip-bad")
    create(tmp_path / kind, tmp_path / "out", "--skip-bad")
    printed = capsys.readouterr().out
    for message in messages:
        assert f"skipped: {tmp_path / kind}: {message}" in printed
    manifest = json.loads((tmp_path / "out" / "set.manifest.json").read_text())
    assert manifest["documents"] == 2
    assert sum(manifest["skipped"].values()) == len(messages)


def pieces(path):
    return list(read_pieces(str(path), "<|endoftext|>", BadInputHandler(False), int))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "kind", ["in.csv.zst", "in.jsonl.gz", "in.parquet", "in.arrow", "file/in.arrow"]
)
def test_table_cut_or_changed_anywhere_gives_one_line_or_rows(tmp_path, kind):
    path = write(tmp_path, kind, [{"text": text} for text in texts(30)])
    content, whole, messages = path.read_bytes(), pieces(path), []
    generator = np.random.default_rng(0)
    for position in generator.integers(0, len(content), 150):
        path.write_bytes(content[:position])
        with pytest.raises(
            InputError, match=re.escape(f"{path}: damaged or cut short: ")
        ) as caught:
            pieces(path)
        assert "\n" not in str(caught.value)
        changed = bytearray(content)
        changed[position] ^= 1 << generator.integers(8)
        path.write_bytes(changed)
        try:
            pieces(path)  # the formats have no checksums of the text
        except InputError as error:
            messages.append(str(error))
    assert messages
    assert all(re.match(f"{re.escape(str(path))}.*$", message) for message in messages)
    path.write_bytes(content)
    assert pieces(path) == whole


@pytest.mark.quick(2)
@pytest.mark.parametrize("content", [b"", b"id\n", b'text\n"to be', b'text\nto "be" or\n"a" b\n'])
def test_bad_csv_is_refused(tmp_path, content):
    (tmp_path / "in.csv").write_bytes(content)
    with pytest.raises(InputError, match=r"in\.csv(: damaged.*line \d|.* has no column text)"):
        create(tmp_path / "in.csv", tmp_path / "out")


def test_long_cells_are_read_and_a_quote_that_is_never_closed_is_found(tmp_path, monkeypatch):
    path = tmp_path / "in.csv"
    path.write_text(f'text\n"{"a " * 200_000}"\n')
    assert "".join(piece.text for piece in pieces(path)) == "a " * 200_000
    monkeypatch.setattr("mesh_transformer.data.tables.LONGEST_LINE", 1000)
    with pytest.raises(InputError, match="damaged or cut short: line 2: field larger than"):
        pieces(path)


@pytest.mark.parametrize("kind", ["in.parquet", "in.arrow", "in.csv", "in.jsonl.gz"])
def test_a_table_is_read_in_parts(tmp_path, monkeypatch, kind):
    """When the first document is there, most of the file has not been read."""
    generator = np.random.default_rng(0)
    rows = [{"text": generator.bytes(5_000).hex()} for _ in range(200)]
    path = write(tmp_path, kind, rows)
    opened, original = [], files.open_file

    def counted(path):
        opened.append(Counted(original(path)))
        return opened[0]

    monkeypatch.setattr(files, "open_file", counted)
    read = read_pieces(str(path), "<|endoftext|>", BadInputHandler(False), int)
    next(read)
    first = opened[0].read_bytes
    assert first < path.stat().st_size / 2
    assert sum(1 for _ in read) == 199


class Counted(io.BufferedReader):
    """A file that counts the bytes that are read from it."""

    def __init__(self, file):
        super().__init__(file.detach(), 1 << 12)
        self.read_bytes = 0

    def _count(self, data):
        self.read_bytes += len(data)
        return data

    def read(self, size=-1, /):
        return self._count(super().read(size))

    def readline(self, size=-1, /):
        return self._count(super().readline(size))

    def read1(self, size=-1, /):
        return self._count(super().read1(size))


def test_progress_adds_up_to_the_size_of_the_file(tmp_path):
    for kind in ("in.parquet", "in.csv", "in.arrow", "in.jsonl.gz"):
        path = write(tmp_path, kind, [{"text": text} for text in texts(50)])
        steps = []
        list(read_pieces(str(path), "<|endoftext|>", BadInputHandler(False), steps.append))
        assert sum(steps) == path.stat().st_size


@pytest.mark.slow
def test_pairs_are_read_from_every_table(tmp_path):
    rows = [{"q": f"{number} + 1 =", "a": f" {number + 1}", "n": "x"} for number in range(20)]
    outs = []
    for kind in [kind for kind in KINDS if kind not in ("texts", "splits")]:
        source, out = write(tmp_path, kind, rows), tmp_path / f"out {kind.replace('/', ' ')}"
        flags = ["--prompt-column", "q", "--completion-column", "a", "--seq", "12"]
        completion_records.main([str(source), "set", "--output-dir", str(out), *flags])
        outs.append((out / "set_20.tfrecords").read_bytes())
    assert all(out == outs[0] for out in outs)
    with pytest.raises(InputError, match=r"nor prompt and completion, .*; it has q, a, n: name"):
        completion_records.main([str(tmp_path / "in.csv"), "set", "--output-dir", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["in.jsonl", "in.parquet", "in.arrow", "in.csv"])
def test_columns_of_sharegpt_and_alpaca_are_conversations(tmp_path, kind):
    questions = [(f"add {n}", f"1 and {n}" if n % 2 else "") for n in range(12)]
    pairs = [(f"{a}\n\n{b}" if b else a, a) for a, b in questions]
    messages = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs
    ]
    sharegpt = [[{"from": "human", "value": q}, {"from": "gpt", "value": a}] for q, a in pairs]
    alpaca = [{"instruction": a, "input": b, "output": a} for a, b in questions]
    is_csv = kind == "in.csv"  # cells are texts
    rows = {
        "messages": [{"messages": json.dumps(m) if is_csv else m} for m in messages],
        "sharegpt": [{"conversations": json.dumps(m) if is_csv else m} for m in sharegpt],
        "alpaca": alpaca,
        "named": [{"answer": json.dumps(m) if is_csv else m, "n": 1} for m in sharegpt],
    }
    made = {}
    for name, each in rows.items():
        source, out = write(tmp_path / name, kind, each), tmp_path / name / "out"
        flags = ["--messages-column", "answer"] if name == "named" else []
        completion_records.main(
            [str(source), "set", "--output-dir", str(out), "--seq", "32", *flags]
        )
        made[name] = (out / "set_12.tfrecords").read_bytes()
    assert len(set(made.values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["in.jsonl", "in.parquet", "in.arrow", "in.csv"])
def test_columns_beside_a_conversation_are_part_of_it(tmp_path, kind):
    generator, number = np.random.default_rng(7), 12
    systems = [f"speak {n}" if n % 3 else "" for n in range(number)]
    turns = [
        [[f"q{n}{i}", f"a{n}{i}"] for i in range(generator.integers(1, 4))] for n in range(number)
    ]
    messages = [
        [{"role": "system", "content": system}] * bool(system)
        + [
            {"role": role, "content": text}
            for turn in conversation
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        for system, conversation in zip(systems, turns, strict=True)
    ]
    without = [[m for m in each if m["role"] != "system"] for each in messages]
    sharegpt = [[{"from": m["role"], "value": m["content"]} for m in each] for each in without]
    is_csv = kind == "in.csv"  # cells are texts
    cell = json.dumps if is_csv else lambda value: value
    rows = {
        "messages": [{"messages": cell(each)} for each in messages],
        "apart": [
            {"messages": cell(each), "system": s} for each, s in zip(without, systems, strict=True)
        ],
        "sharegpt": [
            {"system": s, "conversations": cell(each), "tools": "[]"}
            for each, s in zip(sharegpt, systems, strict=True)
        ],
        "alpaca": [
            {"instruction": q, "history": cell(history), "output": a, "system": s}
            for (*history, (q, a)), s in zip(turns, systems, strict=True)
        ],
    }
    made = {}
    for name, each in rows.items():
        source, out = write(tmp_path / name, kind, each), tmp_path / name / "out"
        completion_records.main([str(source), "set", "--output-dir", str(out), "--seq", "128"])
        made[name] = (out / f"set_{number}.tfrecords").read_bytes()
    assert len(set(made.values())) == 1


def test_columns_that_cannot_be_part_of_a_conversation_are_refused(tmp_path):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    system = {"role": "system", "content": "one"}
    alpaca = {"instruction": "q", "output": "a"}
    refused = [
        ({"messages": [system, *chat], "system": "two"}, "one system message"),
        ({"messages": chat, "tools": [{"name": "f"}]}, "the column tools would not be in the text"),
        ({"conversations": chat, "functions": "[{}]"}, "the column functions would not be"),
        *(
            (alpaca | {"history": h}, "`history` to be a list of pairs")
            for h in (3, "[3]", [["q"]])
        ),
    ]
    for row, message in refused:
        source = write(tmp_path, "in.jsonl", [row])
        with pytest.raises(InputError, match=f"in.jsonl: line 1: .*{message}"):
            completion_records.main([str(source), "set", "--output-dir", str(tmp_path / "out")])
    source = write(tmp_path, "in.jsonl", [{"messages": [system, *chat], "system": "one"}])
    completion_records.main([str(source), "set", "--output-dir", str(tmp_path / "out")])


@pytest.mark.slow
def test_each_file_of_a_pattern_and_each_split_of_a_dataset_makes_a_set(tmp_path, capsys):
    rows = [{"text": text} for text in texts(60)]
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "README.md").touch()
    for name in ("train-0", "train-1", "test-0"):
        write_parquet(data / f"{name}.parquet", rows)
    pattern = str(data / "train-*")
    assert find_files(pattern, FILE_TYPES) == [str(data / f"train-{n}.parquet") for n in (0, 1)]
    assert [each.name for each in find_sets(pattern, FILE_TYPES)] == ["train-0", "train-1"]
    assert find_set(str(data), FILE_TYPES).left_out == "left out: 1 README or LICENSE (README.md)"
    flags = ["--output-dir", str(tmp_path / "out"), "--seq", str(SEQ)]
    text_records.main([str(data), *flags])
    assert "left out: 1 README or LICENSE (README.md)" in capsys.readouterr().out
    saved = write(tmp_path, "splits", rows * 2)
    text_records.main([str(saved), *flags, "--split", "train"])
    names = {path.stem for path in (tmp_path / "out").glob("*.index")}
    assert names == {"train-0", "train-1", "test-0", "train"}
    with pytest.raises(InputError, match=r"has the splits train, test; choose one with --split$"):
        text_records.main([str(saved), "set", *flags])
    with pytest.raises(InputError, match=r"no such split; choose one of train, test$"):
        text_records.main([str(saved), *flags, "--split", "validation"])
    with pytest.raises(InputError, match=r"--split train: .*not a dataset with splits"):
        text_records.main([str(data), "set", *flags, "--split", "train"])
    with pytest.raises(InputError, match=r"--split train: .*not a dataset with splits"):
        text_records.main([str(saved / "train"), "set", *flags, "--split", "train"])
    with pytest.raises(InputError, match="--subset a: only a dataset on the hub"):
        text_records.main([str(data), "set", *flags, "--subset", "a"])
    with pytest.raises(InputError, match="no text found"):
        text_records.main([str(data / "val-*"), "set", *flags])
    with pytest.raises(InputError, match="or give hf:owner/name for a dataset on the"):
        text_records.main(["owner/name", "set", *flags])


def damage_state(path, change):
    state = json.loads((path / "state.json").read_text())
    change(state)
    (path / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "data-00001-of-00003.arrow").unlink(), "00001.*no such file, but"),
        (lambda path: (path / "state.json").write_text("["), "state.json: not a file of a saved"),
        (lambda path: (path / "state.json").write_text("{}"), "state.json: not a file of a saved"),
        (
            lambda path: damage_state(path, lambda s: s.update(_indices_data_files=[{}])),
            "stored with a selection of its rows",
        ),
    ],
)
def test_damaged_saved_dataset_is_refused(tmp_path, damage, message):
    path = write(tmp_path, "saved", [{"text": text} for text in texts(9)])
    damage(path)
    with pytest.raises(InputError, match=message):
        create(path, tmp_path / "out")


def test_selected_rows_of_a_dataset_are_saved_and_read(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    rows = [{"text": text} for text in texts(40)]
    datasets.Dataset.from_list(rows).select(range(1, 40, 2)).save_to_disk(tmp_path / "odd")
    plain = write(tmp_path, "in.jsonl", rows[1::2])
    assert create(tmp_path / "odd", tmp_path / "out") == create(plain, tmp_path / "plain")


def test_split_and_tokenizer_read_tables(tmp_path, monkeypatch, capsys):
    rows = [{"body": text, "n": 1} for text in texts(50)]
    plain = write(tmp_path, "in.jsonl", [{"text": row["body"]} for row in rows])
    flags = ("--text-column", "body")
    source = write(tmp_path, "in.parquet", rows)
    for path, options in ((source, flags), (plain, ())):
        split_main([str(path), str(tmp_path / f"parts {path.name}"), *options])
        folder = str(tmp_path / f"tokenizer {path.name}")
        new_tokenizer.main([str(path), folder, "--size", "280", *options])
    for name in ("parts", "tokenizer"):
        first, second = (
            {file.name: file.read_bytes() for file in (tmp_path / f"{name} {kind}").iterdir()}
            for kind in ("in.parquet", "in.jsonl")
        )
        assert first == second


@pytest.mark.slow
def test_tables_and_datasets_are_read_from_a_bucket(tmp_path):
    rows = [{"text": text} for text in texts(60)]
    program = (
        "import sys\n"
        "from mesh_transformer.cli.text_records import main\n"
        "for source in 'splits', 'in.parquet', 'in.csv.zst', 'in.arrow':\n"
        "    options = ['--split', 'train'] if source == 'splits' else []\n"
        "    out = ['--output-dir', sys.argv[1] + source, '--seq', '16', '--preserve-data-order']\n"
        "    main([f'gs://bucket/{source}', 'set', *out, *options])\n"
    )
    kinds = ("splits", "in.parquet", "in.csv.zst", "in.arrow")
    with gcs_server(tmp_path) as (gcs, environment):
        for kind in kinds:
            path = write(tmp_path, kind, rows)
            for file in [path] if path.is_file() else path.rglob("*.*"):
                name = file.relative_to(tmp_path).as_posix()
                gcs._put(("bucket", name), file.read_bytes())
        process = subprocess.run(
            [sys.executable, "-c", program, f"{tmp_path}/out "],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert process.returncode == 0, process.stderr
    expected = create(tmp_path / "in.csv.zst", tmp_path / "plain", "--preserve-data-order")
    for kind in kinds:
        for name, content in expected.items():
            assert (tmp_path / f"out {kind}" / name).read_bytes() == content, kind


def hub_files(rows):
    table = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    card = (
        "---\nconfigs:\n"
        "- config_name: en\n  data_files:\n"
        "  - split: train\n    path: en/train-*\n  - split: test\n    path: en/test-*\n"
        "- config_name: fr\n  data_files:\n  - split: train\n    path: fr/*\n---\n"
    )
    names = ("en/train-0.parquet", "en/test-0.parquet", "fr/train-0.parquet")
    return {"README.md": card.encode(), **dict.fromkeys(names, table.getvalue())}


@pytest.mark.slow
def test_a_dataset_of_the_hub_is_read_from_the_cache(tmp_path, monkeypatch):
    import datasets

    rows = [{"text": text} for text in texts(60)]
    cache = tmp_path / f"owner___stories/en/0.0.0/{COMMIT}"
    save(cache / "train", rows)
    save(cache / "test", rows[:9])
    calls = []

    def load_dataset(name, subset, *, split, revision, keep_in_memory):
        calls.append((name, subset, split, revision, keep_in_memory))
        names = ("train", "test") if split is None else (split,)
        loaded: Any = {name: datasets.load_from_disk(cache / name) for name in names}
        for part in loaded.values():
            part.info.config_name = "en"
        return loaded if split is None else loaded[split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    plain = create(cache / "train", tmp_path / "plain")
    flags = ("--subset", "en", "--split", "train")
    assert create(f"hf:{NAME}@v1", tmp_path / "out", *flags) == plain
    with pytest.raises(InputError, match=f"with the dataset {NAME} en train; give"):
        create("hf:owner/other", tmp_path / "out", *flags)
    text_records.main([f"hf:{NAME}", "--output-dir", str(tmp_path / "all"), "--seq", "16"])
    assert sorted(path.name for path in (tmp_path / "all").glob("*.index")) == [
        "test.index",
        "train.index",
    ]
    assert [calls[0], calls[-1]] == [
        (NAME, "en", "train", "v1", False),
        (NAME, None, None, None, False),
    ]
    manifest = json.loads((tmp_path / "out/set.manifest.json").read_text())
    assert manifest["dataset"] == {"name": NAME, "subset": "en", "commit": "", "split": "train"}


@pytest.mark.slow
def test_a_dataset_is_downloaded_from_the_hub_by_name(tmp_path):
    """The package datasets downloads it from a fake hub; later runs need no network."""
    rows = [{"text": text} for text in texts(60)]
    program = (
        "import sys\n"
        "from mesh_transformer.cli.text_records import main\n"
        "from mesh_transformer.util import InputError\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    try:\n"
        "        main(line.split())\n"
        "    except InputError as error:\n"
        "        print('error:', error)\n"
    )
    runs = [
        f"hf:{NAME} --subset en --output-dir all",
        f"hf:{NAME}@{COMMIT} one --subset fr --output-dir one",
        f"hf:{NAME} set --output-dir none",
        f"hf:{NAME} set --subset en --output-dir none",
        f"hf:{NAME} --subset en --split nil --output-dir none",
        f"hf:{NAME} --subset en --split train[:9] --output-dir none",
        "hf:owner/absent --output-dir none",
    ]
    with hub_server(hub_files(rows)) as (hub, environment):
        here = {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": os.getcwd()}

        def run(lines, **more):
            process = subprocess.run(
                [sys.executable, "-c", program],
                input="".join(f"{line} --seq {SEQ}\n" for line in lines),
                env=os.environ | environment | here | more,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert process.returncode == 0, process.stderr
            return process.stdout.splitlines()

        printed = run(runs)
        requests = len(hub.requests)
        offline = run([runs[0].replace("all", "again")], HF_HUB_OFFLINE="1")
        assert len(hub.requests) == requests
    plain = create(write(tmp_path, "in.jsonl", rows), tmp_path / "plain")
    for name in ("all/train", "all/test", "one/one", "again/train"):
        index = tmp_path / f"{name}.index"
        record = index.with_name(index.read_text().strip())
        assert record.read_bytes() in plain.values(), name
    manifest = json.loads((tmp_path / "all/train.manifest.json").read_text())
    expected = {"name": NAME, "subset": "en", "commit": COMMIT, "split": "train"}
    assert manifest["dataset"] == expected
    assert [line.replace("again/", "all/") for line in offline] == printed[:2]
    errors = [line for line in printed if line.startswith("error: ")]
    for error, message in zip(
        errors,
        [
            f"hf:{NAME}: Config name is missing.*'en', 'fr'",
            f"hf:{NAME} has the splits train, test; choose one with --split",
            f'hf:{NAME}: Unknown split "nil".*train.*test',
            "expected the name of one whole split",
            "hf:owner/absent: .*doesn't exist",
        ],
        strict=True,
    ):
        assert re.match(f"error: {message}|error: --split.*{message}", error), error
    assert not (tmp_path / "none").exists()


def test_table_without_pyarrow_is_refused(tmp_path, monkeypatch):
    write_parquet(tmp_path / "in.parquet", [{"text": "a"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"in\.parquet: package pyarrow is missing; .*\[records\]"):
        create(tmp_path / "in.parquet", tmp_path / "out")


def test_hub_without_the_package_or_with_a_folder_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["set", "--output-dir", "out"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        InputError, match=r"hf:owner/name: package datasets is missing; .*\[datasets\]"
    ):
        text_records.main(["hf:owner/name", *flags])
    Path("owner/name").mkdir(parents=True)
    with pytest.raises(InputError, match="has the same name"):
        text_records.main(["hf:owner/name", *flags])
