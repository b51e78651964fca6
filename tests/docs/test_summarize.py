"""All code and commands of docs/summarize.md, run with a smaller model; ROUGE scores."""

import json
import re
import sys
from pathlib import Path

import pytest

from mesh_transformer.config import Config
from mesh_transformer.transformer_shard import CausalTransformer
from scripts import score_summaries
from tests.support.documents import ROOT, new_place, python_commands, run_here

sys.path.insert(0, str(ROOT / "scripts"))

TINY = {"layers": 1, "d_model": 32, "pe_rotary_dims": 4, "per_replica_batch": 2, "val_batches": 1}
# One device compiles in less time; the test of docs/finetune.md uses a mesh.
TINY |= {"tpu_size": 1, "cores_per_replica": 1}
FEWER = {"scripts/score_summaries.py": ["--limit", "5"]}


def test_scores_match_rouge_computed_by_hand():
    truths = ["the cat sat on the mat", "a b c d", "running dogs"]
    summaries = ["the cat lay on a mat", "d c b a", "a dog runs"]
    results = score_summaries.scored(truths, summaries)
    # Shared words per pair, of 6 and 6, 4 and 4, and 2 and 3 words (the stems are run and dog).
    f1 = [4 / 6, 1, 2 * (2 / 3) / (2 / 3 + 1)]
    assert results["rouge1"]["f1"] == pytest.approx(sum(f1) / 3)
    assert results["rouge1"]["recall"] == pytest.approx((4 / 6 + 1 + 1) / 3)
    assert results["rouge2"]["f1"] == pytest.approx((1 / 5 + 0 + 0) / 3)  # only "the cat" matches
    assert results["rougeL"]["precision"] == pytest.approx((4 / 6 + 1 / 4 + 1 / 3) / 3)
    lines = score_summaries.table(results, 3).splitlines()
    assert lines[0].startswith("3 examples ")
    assert [line.split()[0] for line in lines[1:]] == ["ROUGE-1", "ROUGE-2", "ROUGE-L"]


@pytest.mark.slow
def test_the_recipe_runs(tmp_path, monkeypatch, capsys):
    new_place(tmp_path, monkeypatch, ("tiny.json", "tiny_summaries.json"), **TINY, total_steps=1)
    Path("data").symlink_to(ROOT / "data")
    page = (ROOT / "docs" / "summarize.md").read_text(encoding="utf-8")
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})
    page_commands = python_commands("summarize.md")
    assert len(page_commands) == 7
    # The first command is also in docs/finetune.md; save an untrained model instead of running it.
    assert page_commands.pop(0) == ["device_train.py", "--config", "configs/tiny.json"]
    network = CausalTransformer(Config.load("configs/tiny.json"))
    network.save("runs/tiny")
    network.wait()
    for words in page_commands:
        run_here([*words, *FEWER.get(words[0], [])], monkeypatch, capsys)
    printed = capsys.readouterr().out
    assert "train_2000.tfrecords: 2000 records of 64 tokens" in printed
    assert printed.count("5 examples") == 2
    scores = json.loads(Path("runs/news_data/scores.json").read_text())
    summaries = [example["summary"] for example in scores["examples"]]
    truths = [example["completion"] for example in scores["examples"]]
    assert scores["count"] == len(summaries) == 5
    for metric, values in score_summaries.scored(truths, summaries).items():
        assert scores[metric] == values
