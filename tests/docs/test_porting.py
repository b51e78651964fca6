"""The code of docs/porting.md that replaces the original's notebook, run on a tiny model."""

from pathlib import Path

import jax
import numpy as np
import pytest

from mesh_transformer.checkpoint import original
from mesh_transformer.config import Config
from mesh_transformer.transformer_shard import CausalTransformer
from tests.support.pages import reader

TINY = {"layers": 2, "d_model": 32, "n_heads": 8, "pe_rotary_dims": 4, "seq": 32}


@pytest.mark.slow
def test_the_code_of_the_notebook_runs(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch, ("example_config.json",), **TINY) as person:
        config = Config.load("configs/example_config.json")
        state = jax.tree.map(np.asarray, CausalTransformer(config).state)
        slim = {"params": state["params"], "step": state["step"]}
        original.write("model", slim, config, dtype="bfloat16")
        Path("model/step_0").rename("step_383500")
        person.follow("docs/porting.md")
    printed = capsys.readouterr().out
    assert "512 tokens in" in printed
    assert "64 tokens in" in printed
    assert "\nEleutherAI is" in printed
    network, infer = person.names["network"], person.names["infer"]
    assert network.state["params"]["embed"]["embedding"]["w"].dtype == "bfloat16"
    first, second = (infer("EleutherAI is", gen_len=8)[0] for _ in range(2))
    assert first != second  # each call uses a new seed
