"""The commands and Python of docs/reinforcement.md, run as written with few steps."""

import json
from pathlib import Path

import pytest

from tests.support.pages import reader

CONFIGS = ("tiny_rewards.json",)


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch):
    few = {"total_steps": 2, "per_replica_batch": 16, "exact": False, "warmup_steps": 0}
    with reader(tmp_path, monkeypatch, CONFIGS, **few) as person:
        person.follow("docs/reinforcement.md")
        assert len(person.names["rewards"]) == 2
    lines = Path("runs/reversed/samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} == {1, 2}
