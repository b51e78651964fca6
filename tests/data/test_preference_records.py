"""Records of preferences: which texts are in a record, which tokens count, and bad rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh_transformer.cli import completion_records
from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.util import InputError

SEQ = 48


def make(folder: Path, rows: list[Any], kind: str, *flags: str) -> list[dict[int, tuple[str, str]]]:
    """Return the texts of each record by segment number, whole and only the part with loss."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(path), "made", "--output-dir", str(folder), "--seq", str(SEQ)]
    completion_records.main([*words, "--preferences", kind, *flags])
    tokenizer: Any = load_tokenizer()
    records = []
    for batch in TFRecordNewInputs(str(folder / "made.index"), 1, SEQ, repeat=False):
        obs, target = batch["obs"][0], batch["target"][0]
        segments, mask = batch["segment_ids"][0], batch["loss_mask"][0].astype(bool)
        texts = {}
        for number in sorted(set(segments.tolist()) - {0}):
            at = segments == number
            assert np.diff(np.flatnonzero(at)).max() == 1
            whole = [*obs[at][:1], *target[at]]
            texts[number] = (tokenizer.decode(whole), tokenizer.decode(target[at & mask]))
        assert not mask[segments == 0].any()
        records.append(texts)
    return records


def text(prompt: str, answer: str) -> tuple[str, str]:
    return f"{prompt}{answer}<|endoftext|>", f"{answer}<|endoftext|>"


def test_pairs_are_packed_whole(tmp_path: Path) -> None:
    pairs = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": " 0"} for n in range(9)]
    records = make(tmp_path, pairs, "pairs", "--pack")
    assert len(records) < 9
    groups = [
        {number % 3: record[number] for number in record if (number - 1) // 3 == group}
        for record in records
        for group in range((max(record) - 1) // 3 + 1)
    ]
    expected = [{1: text(p["prompt"], p["chosen"]), 2: text(p["prompt"], " 0")} for p in pairs]
    assert groups == expected
    assert make(tmp_path, pairs, "pairs") == expected  # one group per record
    assert json.loads((tmp_path / "made.manifest.json").read_text())["preferences"] == "pairs"


def test_labels_get_the_answer_of_another_row(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a:", "completion": " one", "label": True},
        {"prompt": "b:", "completion": " two", "label": False},
        {"prompt": "c:", "completion": " three", "label": "true"},
    ]
    (record,) = make(tmp_path, rows, "labels", "--pack")
    assert record == {
        1: text("a:", " one"),
        3: text("a:", " three"),
        5: text("b:", " two"),
        6: text("b:", " one"),
        7: text("c:", " three"),
        9: text("c:", " two"),
    }


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_only_the_last_answer_of_a_conversation_counts(tmp_path: Path) -> None:
    before = [message("user", "Hi"), message("assistant", "Yes?"), message("user", "Who?")]
    good, bad = [message("assistant", "Me.")], [message("assistant", "You.")]
    rows = [
        {"prompt": before, "chosen": good, "rejected": bad},
        {"chosen": before + good, "rejected": before + bad},
        {"prompt": "Who?", "chosen": good, "rejected": bad},
        {"prompt": "Hi", "chosen": before + good, "rejected": before + bad},
        {"prompt": before, "chosen": "Me.", "rejected": bad},
    ]
    one, two, three, four, five = make(tmp_path, rows[:1], "pairs") + [
        make(tmp_path, [row], "pairs")[0] for row in rows[1:]
    ]
    context = "User: Hi\n\nAssistant: Yes?<|endoftext|>\n\nUser: Who?\n\nAssistant:"
    assert one == {1: text(context, " Me."), 2: text(context, " You.")}
    assert one == two == four == five
    short = "User: Who?\n\nAssistant:"
    assert three == {1: text(short, " Me."), 2: text(short, " You.")}


@pytest.mark.parametrize(
    ("row", "kind", "part"),
    [
        ({"prompt": "a", "chosen": "b"}, "pairs", "expected `prompt` and `chosen` and `rejected`"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "pairs", "only a prompt may be empty"),
        ({"prompt": "a", "chosen": ["b"], "rejected": ["c"]}, "pairs", "list of messages"),
        ({"prompt": 1, "chosen": "b", "rejected": "c"}, "pairs", "strings or lists of messages"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "labels", "expected true or false"),
        ({"prompt": "a", "completion": "b"}, "labels", "expected true or false in `label`"),
        ({"prompt": "x " * 30, "chosen": "b", "rejected": "c"}, "pairs", "2 answers, --seq 48"),
    ],
)
def test_bad_rows_are_named_or_skipped(
    tmp_path: Path, row: Any, kind: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=r"rows\.jsonl: line 1: .*" + part):
        make(tmp_path, [row], kind)
    good = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "b", "label": True}
    assert len(make(tmp_path, [row, good], kind, "--skip-bad")) == 1
    assert "skipped: " in capsys.readouterr().out
    with pytest.raises(InputError, match=r"found no preferences \(skipped: "):
        make(tmp_path, [row], kind, "--skip-bad")
