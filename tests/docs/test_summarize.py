"""All code and commands of docs/summarize.md, run with a smaller model; ROUGE scores."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import load_tokenizer
from scripts import score_summaries
from tests.support.pages import reader

TINY = {"layers": 1, "d_model": 32, "pe_rotary_dims": 4, "per_replica_batch": 2, "val_batches": 1}
# One device compiles in less time; the test of docs/finetune.md uses a mesh.
TINY |= {"tpu_size": 1, "cores_per_replica": 1}


@pytest.mark.slow
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
    one = score_summaries.scored(["a b"], ["a b"])  # which has no standard error
    assert one["rouge1"] == {"f1": 1, "precision": 1, "recall": 1}
    row = score_summaries.table(one, 1).splitlines()[1]
    assert row.split() == ["ROUGE-1", "1.0000", "-", "1.0000", "1.0000"]


def test_summaries_end_at_each_token_that_ends_answers(monkeypatch):
    tokenizer: Any = load_tokenizer("bytes")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|think|>"]})
    turn, think = 257, 258
    config = Config(layers=1, d_model=8, n_heads=1, n_vocab=259, seq=16, end_tokens=[turn])
    network = SimpleNamespace(config=config, batch_size=2, batch=lambda rows: None)
    made = [[*b"ab", turn, *b"cd"], [think, *b"x", tokenizer.eos_token_id, *b"yz"]]

    def stream(_, prompts, *arguments, **options):
        for column in zip(*made[: len(prompts)], strict=True):
            assert column[0] != ord("d")  # both have ended
            yield np.array(column)[:, None]

    monkeypatch.setattr("mesh_transformer.generation.stream.stream_tokens", stream)
    assert score_summaries.summaries(network, tokenizer, ["long", "p"], 5) == ["ab", "x"]


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
