"""The commands of docs/training.md, run as written with a smaller model, and its figures."""

import json
import math
import re
from pathlib import Path

import jax
import pytest

from mesh_transformer.config import Config
from mesh_transformer.evaluation import all_steps
from mesh_transformer.model import transformer
from mesh_transformer.training.optimizer import Optimizer
from tests.support.pages import ROOT, reader

PAGE = (ROOT / "docs/training.md").read_text(encoding="utf-8")
TINY = {"layers": 1, "d_model": 32, "pe_rotary_dims": 4, "n_vocab": 50304, "val_batches": 1}
TINY |= {"total_steps": 6, "warmup_steps": 2, "val_every": 2, "ckpt_every": 3}


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch, ("tiny.json",), **TINY) as person:
        person.follow("docs/training.md")
    for name in ("wsd", "muon", "ramp", "kept"):
        lines = Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, 7))
    assert json.loads(Path("runs/kept/best").read_text())["set"] == "shakespeare"
    rows = Path(f"runs/kept/{all_steps.NAME}").read_text().splitlines()
    steps = sorted(int(path.name[5:]) for path in Path("runs/kept").glob("step_*"))
    assert [json.loads(row)["step"] for row in rows] == steps
    assert "ROMEO:" in capsys.readouterr().out


def test_the_sizes_of_the_moments_are_as_described():
    table = re.findall(r"^\| `(\w+)`(?: \(default\))? \|.*?\| ([\d.]+) GB", PAGE, re.MULTILINE)
    assert len(table) == 5
    for optimizer, size in table:
        config = Config.load("6B_roto_256").replace(optimizer=optimizer)
        moments = Optimizer(config, transformer.declarations(config)).moments()
        entries = sum(math.prod(moment.shape) for moment in jax.tree.leaves(moments))
        assert f"{4 * entries / 1e9:.{len(size.partition('.')[2])}f}" == size
