"""Records of prompt/completion pairs: which tokens have loss, and all refusals."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

from mesh_transformer.cli import completion_records as script
from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.util import InputError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

SEQ = 12
END = 50256
PAIRS = [
    ("To be, or not", " to be"),
    ("", "caf\u00e9"),
    ("a b c d e f g h i", " j k l"),  # 12 tokens, so that the end of text is the 13th
    ("Q: \u4e2d?\nA:", " yes<|endoftext|>no"),
]


def lines_of(pairs):
    return [json.dumps({"prompt": prompt, "completion": text}) for prompt, text in pairs]


def create(tmp_path, content: bytes, *flags, name="pairs.jsonl"):
    source = tmp_path / "in" / name
    source.parent.mkdir(exist_ok=True)
    source.write_bytes(content)
    script.main(
        [str(source), "set", "--output-dir", str(tmp_path / "out"), "--seq", str(SEQ), *flags]
    )
    return read(tmp_path)


def read(tmp_path):
    index = str(tmp_path / "out" / "set.index")
    loader = TFRecordNewInputs(index, 1, SEQ, n_vocab=50257, repeat=False)
    return [{key: rows[0] for key, rows in batch.items()} for batch in loader]


def joined(lines):
    return "\n".join(lines).encode() + b"\n"


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.zst"])
def test_completion_and_end_of_text_have_loss(tmp_path, name):
    content = joined(["", *lines_of(PAIRS)])
    compressed = zstandard.ZstdCompressor().compress(content)
    rows = create(tmp_path, compressed if name.endswith("zst") else content, name=name)
    encode = load_tokenizer()
    assert len(rows) == len(PAIRS)
    for row, (prompt, completion) in zip(rows, PAIRS, strict=True):
        before, after = encode(prompt)["input_ids"], encode(completion)["input_ids"]
        tokens = [*before, *after, END]
        assert (
            row["target"][row["loss_mask"] == 1].tolist()
            == (tokens if before else tokens[1:])[len(before) :]
        )
        whole = np.array(tokens + [END] * (SEQ + 1 - len(tokens)))
        np.testing.assert_array_equal(row["obs"], whole[:-1])
        np.testing.assert_array_equal(row["target"], whole[1:])


def test_end_of_text_that_a_completion_has_is_not_doubled(tmp_path):
    plain = create(tmp_path, joined(lines_of(PAIRS)))
    ended = create(tmp_path, joined(lines_of([(a, f"{b}<|endoftext|>") for a, b in PAIRS])))
    for row, expected in zip(ended, plain, strict=True):
        for key, array in expected.items():
            np.testing.assert_array_equal(row[key], array)


BAD = [
    ('{"prompt": "a"', "line 2 is not JSON"),
    ('{"prompt": "a"}', "line 2: expected strings `prompt` and `completion`"),
    ('{"question": "a", "answer": "b"}', "line 2: .*; found the keys question, answer"),
    ('{"instruction": "a", "output": ""}', "line 2: expected strings `instruction`, `output`"),
    ('{"conversations": [{"from": "gpt"}]}', "line 2: expected .*, found the keys from"),
    ('{"prompt": "a", "completion": 3}', "line 2: expected strings `prompt` and `completion`"),
    ('{"prompt": "a", "completion": ""}', "line 2: expected strings .* only `prompt` may be empty"),
    ("[1]", "line 2: expected strings `prompt` and `completion`"),
    (
        '{"prompt": "a b c d e f g h i j", "completion": " k l m"}',
        "line 2: 10 tokens of prompt and 3 of completion, --seq 12 has room for 12 in total",
    ),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("line", "message"), BAD, ids=str)
def test_bad_line_is_reported_or_skipped_and_counted(tmp_path, capsys, line, message):
    first, last = lines_of(PAIRS[:2])
    content = joined([first, line, last])
    with pytest.raises(InputError, match=message) as caught:
        create(tmp_path, content)
    assert str(caught.value).startswith(str(tmp_path / "in" / "pairs.jsonl"))
    assert str(caught.value).endswith("--skip-bad")
    assert not list(tmp_path.glob("out/*"))
    assert len(create(tmp_path, content, "--skip-bad")) == 2
    out = capsys.readouterr().out
    assert re.search(rf"skipped: .*{message}", out)
    assert re.search(r"; skipped: 1 (not JSON|no pair|too long|no messages)$", out.strip())


def test_invalid_utf8_is_reported_or_skipped(tmp_path):
    content = joined(lines_of(PAIRS[:1])) + b'{"prompt": "\xff", "completion": "b"}\n'
    with pytest.raises(InputError, match=r"line 2 holds the bytes b'\\xff', expected UTF-8 text"):
        create(tmp_path, content)
    assert len(create(tmp_path, content, "--skip-bad")) == 1


@pytest.mark.parametrize("content", [b"", b"\n\n", b"{}\n"])
def test_file_without_pairs_is_refused(tmp_path, content):
    with pytest.raises(
        InputError, match=r'no pairs.*; give files with lines like {"prompt": "..."'
    ):
        create(tmp_path, content, "--skip-bad")
    assert not (tmp_path / "out").exists()


def test_truncated_file_is_refused(tmp_path):
    content = zstandard.ZstdCompressor().compress(joined(lines_of(PAIRS * 50)))
    with pytest.raises(InputError, match=r"pairs\.jsonl\.zst"):
        create(tmp_path, content[:-20], name="pairs.jsonl.zst")
