"""Prompts for rollouts, from tables and from lists."""

import json
from pathlib import Path
from typing import Any

import pytest

from mesh_transformer.data.chat import PLAIN
from mesh_transformer.data.prompts import read_prompts
from mesh_transformer.data.tokenizer import byte_tokenizer, character_tokenizer
from mesh_transformer.util import InputError

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "sum": 2},
    {"messages": [{"role": "user", "content": "Add é."}], "sum": [3]},
    {"prompt": [{"role": "user", "content": "Add é."}]},
    {"prompt": ""},
]
CHAT = "User: Add é.\n\nAssistant:"


@pytest.mark.parametrize("kind", ["list", "jsonl"])
def test_rows_become_prompts(kind: str, tmp_path: Path) -> None:
    source: Any = ROWS
    if kind == "jsonl":
        source = str(tmp_path / "prompts.jsonl")
        Path(source).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    prompts = read_prompts(source, byte_tokenizer(), PLAIN, 40)
    assert [prompt.text for prompt in prompts] == ["1+1=", CHAT, CHAT, ""]
    # An empty prompt is the token after which a text begins.
    assert [bytes(x.tokens).decode() for x in prompts[:3]] == ["1+1=", CHAT, CHAT]
    assert prompts[3].tokens == [256]
    assert [prompt.row for prompt in prompts] == ROWS
    assert "2" in prompts[1].where or "1" in prompts[1].where


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"prompt": 3}, "expected a list of messages"),
        ({"text": "a"}, "found the keys text"),
        ([1], "expected `prompt`, a text, or `messages`"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "that does not end with an answer"),
        ({"prompt": "a" * 9}, "the prompt has 9 tokens, expected at most 8"),
    ],
)
def test_other_rows_are_refused(row: Any, part: str) -> None:
    with pytest.raises(InputError, match=f"prompt 1 of data: .*{part}"):
        read_prompts([{"prompt": "a"}, row], byte_tokenizer(), None, 8)


def test_tables_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\nno JSON\n')
    with pytest.raises(InputError, match=r"line 2"):
        read_prompts(str(path), byte_tokenizer(), None, 8)
    with pytest.raises(InputError, match="no prompts to sample"):
        read_prompts([], byte_tokenizer(), None, 8)
    with pytest.raises(InputError, match="prompt 0 of data"):
        read_prompts([{"prompt": "é"}], character_tokenizer(["a"]), None, 8)
