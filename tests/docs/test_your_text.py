"""All commands of docs/your-text.md, run as written on a small text, with one step of training."""

import json
import random
from pathlib import Path

import pytest

from mesh_transformer.performance import recipe
from tests.support.pages import reader

WORDS = ("the", "king", "and", "queen", "of", "France", "shall", "speak", "no more", "to night")


@pytest.mark.slow
def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "SIZES", (recipe.Size("tiny", 1, 32, 4, 3e-3),))
    monkeypatch.setattr(recipe, "CPU_SLOWDOWN", 1e9)  # the time limit allows for one step only
    with reader(tmp_path, monkeypatch) as person:
        Path("my_text").mkdir()
        text = " ".join(random.Random(3).choices(WORDS, k=8000)).replace(" the", "\n\nthe")
        Path("my_text/one.txt").write_text(text)  # at least 64 sequences: tests have 8 devices
        person.follow("docs/your-text.md")
    printed = capsys.readouterr().out
    for line in ("bytes (", "listed in mine/val.index", "next: mesh-transformer train", "ROMEO:"):
        assert line in printed
    assert json.loads(Path("mine.json").read_text())["total_steps"] == 1
    rows = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1]
    assert Path("loss.png").stat().st_size > 1000
