"""The commands and Python of docs/finetune.md, run as written with a smaller model."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mesh_transformer
from mesh_transformer.data.tokenizer import load_tokenizer
from tests.support.pages import reader, runnable
from tests.support.smollm2 import write_tiny_copy

CONFIGS = ("tiny.json", "tiny_finetune.json", "tiny_lora.json")
TINY = {"layers": 2, "d_model": 32, "pe_rotary_dims": 4, "val_batches": 2}


def test_accuracy_counts_answers_that_are_correct_to_the_end(tmp_path, monkeypatch, capsys):
    tokenizer = load_tokenizer()

    def generate(prompts, lengths, count, settings):
        assert set(lengths) == {prompts.shape[1]}
        assert settings == {"temp": 0}
        rows = []
        for prompt in tokenizer.batch_decode(prompts):
            result = eval(prompt.replace(" ", "").removesuffix("="))
            text = "".join(f" {digit}" for digit in str(result)) + tokenizer.eos_token
            rows.append(tokenizer(text)["input_ids"])
        actual = np.array(rows)
        assert actual.shape == (160, count)
        actual[:40, -1] = actual[:40, 0]  # right digits, but the answer does not end
        return actual

    monkeypatch.setattr(mesh_transformer, "load", lambda _: SimpleNamespace(generate=generate))
    with reader(tmp_path, monkeypatch) as person:
        for block in runnable("docs/finetune.md"):
            if block.language == "python" and ".fit(" not in block.text:
                person.run(block)
    assert capsys.readouterr().out.count("75.0% of the held-out") == 4


PAGE = runnable("docs/finetune.md")
VILLAGES = next(number for number, block in enumerate(PAGE) if "Arnmoor" in block.text)


@pytest.mark.slow
def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch, CONFIGS, **TINY, total_steps=3) as person:
        for block in PAGE[:VILLAGES]:
            person.run(block)
    printed = capsys.readouterr().out
    assert printed.count("train_180.tfrecords: 180 records of 64 tokens") == 2
    assert printed.count("bits/byte") == 2  # in the two tables
    assert printed.count("2 7 + 4 8 =") == 1
    assert printed.count("% of the held-out") == 4
    assert printed.count("logits differ by") == 3
    assert Path("runs/exported_differences/model.safetensors").is_file()
    for name in ("sums", "differences"):
        lines = Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


@pytest.mark.slow
def test_the_guide_for_chat_models_runs(tmp_path, monkeypatch, capsys):
    """With a tiny random model that has SmolLM2's tokenizer and chat template."""
    write_tiny_copy(tmp_path / "smollm2.gguf")
    (tmp_path / "reader").mkdir()
    with reader(tmp_path / "reader", monkeypatch) as person:
        Path("smollm2.gguf").symlink_to(tmp_path / "smollm2.gguf")
        for block in PAGE[VILLAGES:]:
            text = block.text.replace("total_steps=30", "total_steps=3").replace(
                "val_every=15", "val_every=3"
            )
            person.run(dataclasses.replace(block, text=text))
    printed = capsys.readouterr().out
    assert printed.count("chat template: the tokenizer's") == 2
    assert printed.count("bits/byte") == 2  # in the two tables
    assert Path("runs/villages_peft/adapter_model.safetensors").is_file()
    assert Path("villages.gguf").is_file()
