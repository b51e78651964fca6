"""The commands and Python of docs/assistant.md, run as written with a tiny model and few steps.

`tests/long/assistant.py` runs them with SmolLM2.
"""

import dataclasses
import re
from pathlib import Path

import pytest

from tests.support.pages import reader, runnable
from tests.support.smollm2 import write_tiny_copy


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch):
    write_tiny_copy(tmp_path / "smollm2.gguf")
    (tmp_path / "reader").mkdir()
    with reader(tmp_path / "reader", monkeypatch) as person:
        Path("smollm2.gguf").symlink_to(tmp_path / "smollm2.gguf")
        for block in runnable("docs/assistant.md"):
            text = re.sub(r"total_steps=\d+", "total_steps=2", block.text)
            text = re.sub(r"anneal_steps=\d+", "anneal_steps=1", text)
            text = text.replace("terms[1400:]", "terms[1590:]")
            person.run(dataclasses.replace(block, text=text))
        results = person.names["results"]
    assert [result["prompts"] for result in results.values()] == [10] * 4
    assert Path("runs/add_grpo/samples.jsonl").is_file()
