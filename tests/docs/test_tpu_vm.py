"""The code of docs/tpu-vm.md, docs/gpu.md and docs/results.md that needs neither TPU nor GPU."""

from pathlib import Path

import jax
import numpy as np
import pytest

from mesh_transformer.checkpoint import original
from mesh_transformer.config import Config
from mesh_transformer.transformer_shard import CausalTransformer
from tests.support.pages import reader

TINY = {"layers": 1, "d_model": 32, "n_heads": 8, "pe_rotary_dims": 4, "total_steps": 2}
TINY |= {"gradient_accumulation_steps": 1, "tpu_size": 8, "val_batches": 1, "val_every": 2}


def write_original(config: Config) -> None:
    """Write a checkpoint of the original's format as step_383500."""
    state = jax.tree.map(np.asarray, CausalTransformer(config).state)
    original.write("model", state, config)
    Path("model/step_0").rename("step_383500")


@pytest.mark.slow
def test_the_page_on_a_tpu_vm_runs(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch, ("6B_finetune_v3-8.json",), **TINY) as person:
        write_original(Config.load("configs/6B_finetune_v3-8.json"))
        for name in ("train", "held_out"):
            Path("my_text", name).mkdir(parents=True)
            Path("my_text", name, "one.txt").write_text("a herd of unicorns " * 2000)
        Path("data").unlink()  # the page writes its records to a data/ of its own
        person.follow("docs/tpu-vm.md")
        assert Path("exported/model.safetensors").is_file()
    assert "EleutherAI is" in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_on_gpus_runs(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch, ("6B_roto_256.json",), **TINY, seq=64) as person:
        write_original(Config.load("configs/6B_roto_256.json"))
        person.follow("docs/gpu.md")
    assert capsys.readouterr().out.count("EleutherAI is") == 2
