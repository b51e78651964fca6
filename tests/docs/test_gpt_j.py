"""The code of docs/gpt-j.md, run on tiny models under the names that the page uses."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from mesh_transformer.__main__ import main
from mesh_transformer.checkpoint import hf, original
from mesh_transformer.config import Config
from mesh_transformer.transformer_shard import CausalTransformer
from tests.support.pages import reader

CONFIGS = ("6B_roto_256.json", "example_config.json")
TINY = {"layers": 1, "d_model": 32, "n_heads": 8, "pe_rotary_dims": 4}
TINY |= {"total_steps": 2, "gradient_accumulation_steps": 1, "tpu_size": 8}


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch, CONFIGS, **TINY) as person:
        config = Config.load("configs/6B_roto_256.json")
        state = jax.tree.map(np.asarray, CausalTransformer(config).state)
        original.write("model", state, config)
        Path("model/step_0").rename("step_383500")
        hf.write("gpt-j-6b", state, config)
        hf.write("cut", state, config, trim_vocab=True)
        Path("my_text").mkdir()
        Path("my_text/one.txt").write_text("a herd of unicorns " * 2000)

        person.follow("docs/gpt-j.md")

        # The page also describes the last command for a model whose vocabulary was trimmed.
        words = [
            "convert",
            "--from",
            "hf",
            "cut",
            "--to",
            "original",
            "from_cut",
            "--shards",
            "8",
            "--dtype",
            "bf16",
        ]
        words += ["--config", "configs/6B_roto_256.json"]
        monkeypatch.setattr(sys, "argv", ["mesh-transformer", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        written = {"exported", "exported_slim", "from_hf", "from_cut", "runs"}
        assert written < {path.name for path in Path().iterdir()}
    printed = capsys.readouterr().out
    assert printed.count("EleutherAI is") == 2
    assert "logits differ by" in printed
