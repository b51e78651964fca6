"""All code and commands of docs/summarize.md, run with a smaller model; ROUGE scores."""

import json
from pathlib import Path

import pytest

from scripts import score_summaries
from tests.support.pages import reader

TINY = {"layers": 1, "d_model": 32, "pe_rotary_dims": 4, "per_replica_batch": 2, "val_batches": 1}
# One device compiles in less time; the test of docs/finetune.md uses a mesh.
TINY |= {"tpu_size": 1, "cores_per_replica": 1}


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
    configs = ("tiny.json", "tiny_summaries.json")
    with reader(tmp_path, monkeypatch, configs, **TINY, total_steps=1) as person:
        person.follow("docs/summarize.md")
    printed = capsys.readouterr().out
    assert "train_2000.tfrecords: 2000 records of 64 tokens" in printed
    assert printed.count("100 examples") == 2
    scores = json.loads(Path("runs/news_data/scores.json").read_text())
    summaries = [example["summary"] for example in scores["examples"]]
    truths = [example["completion"] for example in scores["examples"]]
    assert scores["count"] == len(summaries) == 100
    for metric, values in score_summaries.scored(truths, summaries).items():
        assert scores[metric] == values
