"""docs/finetune.md, run from its first line to its last on a smaller model."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest

from tests.documents import ROOT, python_commands

TINY = {"layers": 2, "d_model": 32, "pe_rotary_dims": 4, "per_replica_batch": 2, "val_batches": 2}


@pytest.mark.slow
def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # as where a script is started
    Path("configs").mkdir()
    shutil.copytree(ROOT / "data", "data")
    for name in ("tiny.json", "tiny_finetune.json"):
        values = json.loads((ROOT / "configs" / name).read_text()) | TINY
        Path("configs", name).write_text(json.dumps(values | {"total_steps": 3}))
    Path("my_text").mkdir()
    Path("my_text/one.txt").write_text("a herd of unicorns " * 2000)
    page = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})

    found = python_commands("finetune.md")
    assert len(found) == 9
    for script, *flags in found:
        monkeypatch.setattr("sys.argv", [script, *flags])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        assert not ended.value.code, (script, flags, capsys.readouterr())
    printed = capsys.readouterr().out
    assert "train_800.tfrecords: 800 records of 64 tokens" in printed
    assert printed.count("bits/byte") == 2  # of the two tables
    assert printed.count("17 + 8 =") == 1
    assert "logits differ by" in printed
    rows = [json.loads(line) for line in Path("runs/sums/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
