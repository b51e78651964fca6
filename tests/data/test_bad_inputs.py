"""BadInputHandler input to every data reader: one line and status 2, or a count; never a hang."""

import gzip
import io
import json
import lzma
import re
import signal
import struct
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import zstandard

from mesh_transformer.cli import completion_records, text_records
from mesh_transformer.data import documents as text_documents
from mesh_transformer.data import tables
from mesh_transformer.data.inputs import BadInputHandler
from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.tfrecords import write_records
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.storage.access import tensorflow
from mesh_transformer.util import InputError, run_script

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

SCRIPTS = {"text": text_records, "pairs": completion_records}
SEQ = 8
# Far more than any case takes on a busy machine, so only a hang reaches it.
SECONDS = 300
LIMIT = 5000  # bytes per line, in place of the readers' own limit


@pytest.fixture(autouse=True)
def time_limit():
    def late(*_):
        raise AssertionError(f"not finished within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, tokenizer):
    """A function that runs a script on a file with the given content, beside a good file.

    Returns the exit status and the last line of output.
    """

    def run_on(kind: str, name: str, content: bytes, *flags: str) -> tuple[int, str]:
        folder = tmp_path / "in"
        folder.mkdir(exist_ok=True)
        (folder / "0_good.jsonl").write_bytes(GOOD[kind] * 9)
        (folder / name).write_bytes(content)
        monkeypatch.setattr(SCRIPTS[kind], "load_tokenizer", lambda _: tokenizer)
        arguments = [str(folder), "set", "--output-dir", str(tmp_path / "out"), "--seq", str(SEQ)]
        with pytest.raises(SystemExit) as ended:
            run_script(lambda: SCRIPTS[kind].main([*arguments, *flags]))
        out = capsys.readouterr()
        return ended.value.code or 0, (out.err if ended.value.code else out.out).splitlines()[-1]

    monkeypatch.setattr(tables, "LONGEST_LINE", LIMIT)
    return run_on


GOOD = {
    "text": b'{"text": "to be or not"}\n',
    "pairs": b'{"prompt": "to be", "completion": " or not"}\n',
}


def tar(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


LINES = {
    "not JSON": [
        b"{",
        b"to be",
        b'{"text": "a" "b"}',
        b"[" * 3000,
        b"9" * 4999,
        b'{"text": "a\nb"}',
    ],
    "not UTF-8": [b'{"text": "caf\xe9"}', b'"\xff\xfe"', b'"\xed\xa0\xbd"'],
    "no text": [b"3", b"null", b"[1]", b'{"text": null}', b'{"text": [1]}', b'{"Text": "a"}'],
    "over-long": [b'"%s"' % (b"a" * LIMIT), b" " * (3 * LIMIT)],
}
PAIRS = {
    "not JSON": [b'{"prompt": "a", "completion"', b"[" * 3000, b"9" * 4999],
    "not UTF-8": [b'{"prompt": "\xe9", "completion": "b"}'],
    "no pair": [
        b"[]",
        b'{"prompt": ["a"], "completion": "b"}',
        b'{"prompt": "", "completion": ""}',
    ],
    "over-long": [b" " * (3 * LIMIT)],
    "too long": [b'{"prompt": "a b c d e f", "completion": " g h i"}'],
}
CASES = [
    (kind, reason, line)
    for kind, lines in (("text", LINES), ("pairs", PAIRS))
    for reason in lines
    for line in lines[reason]
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason", "line"), CASES, ids=[f"{k}-{r}-{n}" for n, (k, r, _) in enumerate(CASES)]
)
@pytest.mark.parametrize("name", ["bad.jsonl", "bad.jsonl.zst"])
def test_bad_line_is_reported_or_skipped(run, name, kind, reason, line):
    content = GOOD[kind] + b"\n" + line + b"\n" + GOOD[kind]
    content = zstandard.compress(content) if name.endswith("zst") else content
    status, output = run(kind, name, content)
    assert status == 2
    assert re.match(rf"error: .*{re.escape(name)}: line 3\b.*--skip-bad$", output), output
    status, output = run(kind, name, content, "--skip-bad")
    assert status == 0
    # A newline inside a JSON string makes two bad lines out of one.
    count = 2 if line.count(b"\n") else 1
    assert output.endswith(f"; skipped: {count} {reason}"), output


TEXT = ("to be or not to be " * 40).encode()
FILES = {
    "bad.jsonl.zst": (zstandard.compress, GOOD["text"] * 40),
    "bad.xz": (lzma.compress, TEXT),
    "bad.tar.gz": (gzip.compress, tar(TEXT)),
    "bad.tar.xz": (lzma.compress, tar(TEXT)),
}
NOISE = np.random.default_rng(1).bytes(3000)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "content", [b"", b"\n", NOISE, b"cut", b"inside"], ids=lambda content: content[:6]
)
def test_damaged_file_is_reported_or_skipped(run, name, content):
    compress, whole = FILES[name]
    if content == b"cut":
        content = compress(whole)[:-5]
    elif content == b"inside":  # the compressed data is bad, not the compression
        content = compress(NOISE)
    status, output = run("text", name, content)
    assert status == 2
    assert re.match(rf"error: .*{re.escape(name)}\b.*--skip-bad$", output), output
    status, output = run("text", name, content, "--skip-bad")
    assert (status, "; skipped: " in output) == (0, True), output


@pytest.mark.parametrize("name", FILES)
def test_file_truncated_or_changed_at_any_byte_is_detected(tmp_path, name):
    compress, whole = FILES[name]
    content = compress(whole)
    path = tmp_path / name
    path.write_bytes(content)
    expected = pieces(path)
    for position in range(0, len(content), 1 if len(content) < 200 else 7):
        path.write_bytes(content[:position])
        with pytest.raises(InputError, match=re.escape(f"{path}: damaged or cut short: ")):
            pieces(path)
        changed = bytearray(content)
        changed[position] ^= 0x10
        path.write_bytes(changed)
        actual = pieces_or_none(path)
        # Some header bytes are not data (a time, a flag), and zstandard frames may lack a checksum.
        assert actual in (None, expected) or name.endswith("zst"), position


def pieces_or_none(path) -> list[text_documents.Piece] | None:
    """Return a file's pieces, or None if it is refused in one line that names it."""
    try:
        return pieces(path)
    except InputError as error:
        if str(error).startswith(f"{path}: ") and "\n" not in str(error):
            return None
        raise


def pieces(path) -> list[text_documents.Piece]:
    bad = BadInputHandler(False)
    return list(text_documents.read_pieces(str(path), "<|endoftext|>", bad, int))


@pytest.mark.slow
def test_document_with_bad_text_is_left_out(run, tmp_path, monkeypatch, tokenizer):
    # Part of each long document is tokenised before the bad bytes are read.
    monkeypatch.setattr(text_documents, "PIECE_CHARACTERS", 500)
    documents = [b"a " * 3000, b"b \xff c", b"d " * 3000 + b"\xc3", b"\xf0\x9f\x98\x80 e"]
    content = b"<|endoftext|>".join(documents)
    for name, packed in (("bad.txt", content), ("bad.tar.gz", gzip.compress(tar(content)))):
        status, output = run("text", name, packed)
        assert status == 2
        assert re.search(r"document 2 holds the bytes b'\\xff', expected UTF-8", output), output
        status, output = run("text", name, packed, "--skip-bad")
        assert status == 0
        assert output.endswith("; skipped: 2 not UTF-8")
        manifest = json.loads((tmp_path / "out" / "set.manifest.json").read_text())
        (source,) = (entry for entry in manifest["sources"] if entry["name"] == name)
        good = [tokenizer.encode(documents[index].decode()) for index in (0, 3)]
        assert (source["documents"], source["tokens"]) == (2, sum(map(len, good)) + 2)
        (tmp_path / "in" / name).unlink()


@pytest.mark.slow
def test_set_of_only_bad_text_is_an_error_with_counts(run, tmp_path):
    for kind in GOOD:
        run(kind, "bad.jsonl", b"{\n{\n", "--skip-bad")
        (tmp_path / "in" / "0_good.jsonl").unlink()
        with pytest.raises(InputError, match=r"\(skipped: 2 not JSON\)"):
            SCRIPTS[kind].main([str(tmp_path / "in"), "none", "--skip-bad"])


def framed(payload: bytes, length: int | None = None) -> bytes:
    """Return a framed record with correct checksums, even if its length field is wrong."""

    def checksum(data: bytes) -> bytes:
        import google_crc32c

        value = google_crc32c.value(data)
        return struct.pack("<I", (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    header = struct.pack("<Q", len(payload) if length is None else length)
    return header + checksum(header) + payload + checksum(payload)


def example(**features) -> bytes:
    tf = tensorflow()
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


RECORDS = {
    "a length beyond all memory": lambda: framed(b"a", 2**62),
    "a length just too long": lambda: framed(b"a", 1000),
    "no payload": lambda: framed(b""),
    "a gzip file": lambda: gzip.compress(framed(b"a")),
    "text": lambda: b"to be or not to be, that is the question",
    "floats": lambda: framed(
        example(text=tensorflow().train.Feature(float_list={"value": [1.0] * (SEQ + 1)}))
    ),
    "no tokens": lambda: framed(example(text=tensorflow().train.Feature())),
    "too many tokens": lambda: framed(
        example(text=tensorflow().train.Feature(int64_list={"value": range(99)}))
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_bad_record_is_a_one_line_error(tmp_path, name):
    good, bad = tmp_path / "good.tfrecords", tmp_path / "bad.tfrecords"
    write_records(str(good), np.ones((3, SEQ + 1), int))
    bad.write_bytes(good.read_bytes() + RECORDS[name]())
    index = tmp_path / "set.index"
    index.write_text("good.tfrecords\nbad.tfrecords\n")
    for shuffle_buffer in (0, 4):
        with pytest.raises(InputError) as caught:
            list(TFRecordNewInputs(str(index), 1, SEQ, repeat=False, shuffle_buffer=shuffle_buffer))
        message = str(caught.value)
        assert re.search(r"bad\.tfrecords: .*(record 3 |record at byte \d)", message), message
        assert "\n" not in message


@pytest.mark.parametrize(
    "content", [b"", b"\n \n", b"\xff\n", b"a\0b\n", b"a" * 10**6, b".\n", b"set.index\n", NOISE]
)
def test_bad_index_is_a_one_line_error(tmp_path, content):
    index = tmp_path / "set.index"
    index.write_bytes(content)
    with pytest.raises(InputError, match=re.escape("set.index")) as caught:
        list(TFRecordNewInputs(str(index), 1, SEQ, repeat=False))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 5000
