"""The command of docs/evaluation.md that needs no download, run as written on a small model."""

import shutil
from pathlib import Path

import pytest

from mesh_transformer.transformer_shard import CausalTransformer
from tests.support import made_tasks
from tests.support.pages import reader

MODEL = {"layers": 1, "d_model": 32, "n_heads": 4, "n_vocab": 64, "seq": 32, "pe_rotary_dims": 8}


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch) as person:
        tokenizer = made_tasks.save_tokenizer(tmp_path / "tokenizer")
        network = CausalTransformer(MODEL | {"dtype": "float32", "tokenizer": tokenizer})
        network.save("runs/tiny")
        network.close()
        shutil.copytree(made_tasks.FOLDER, "my_tasks")
        task = Path("my_tasks/choice.yaml").read_text().replace("made_choice", "my_task")
        task = task.replace("choice.jsonl", str(Path("my_tasks/choice.jsonl").resolve()))
        Path("my_tasks/my_task.yaml").write_text(task)
        person.follow("docs/evaluation.md")
    assert "my_task" in capsys.readouterr().out
