"""All code and commands of docs/finetune.md, run with a smaller model."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.documents import ROOT, new_place, python_commands, run_here

TINY = {"layers": 2, "d_model": 32, "pe_rotary_dims": 4, "per_replica_batch": 2, "val_batches": 2}


CONFIGS = ("tiny.json", "tiny_finetune.json", "tiny_lora.json")


@pytest.mark.slow
def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    new_place(tmp_path, monkeypatch, CONFIGS, **TINY, total_steps=3)
    shutil.copytree(ROOT / "data", "data")
    page = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})

    guide_commands = python_commands("finetune.md")
    assert len(guide_commands) == 11
    for words in guide_commands:
        run_here(words, monkeypatch, capsys)
    printed = capsys.readouterr().out
    assert "train_800.tfrecords: 800 records of 64 tokens" in printed
    assert printed.count("bits/byte") == 2  # in the two tables
    assert printed.count("17 + 8 =") == 1
    assert printed.count("logits differ by") == 2
    assert Path("runs/exported_lora/model.safetensors").is_file()
    rows = [json.loads(line) for line in Path("runs/sums/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
