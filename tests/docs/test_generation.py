"""The code of docs/generation.md, run as written on a small model."""

import pytest

from mesh_transformer.transformer_shard import CausalTransformer
from tests.support.pages import reader

MODEL = {"layers": 1, "d_model": 32, "n_heads": 4, "n_vocab": 50400, "seq": 64, "pe_rotary_dims": 8}


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch) as person:
        network = CausalTransformer(MODEL | {"dtype": "float32"})
        network.save("runs/tiny")
        network.close()
        person.follow("docs/generation.md")
        names = person.names
    assert names["tokens"].shape == (2, 16)
    assert names["more"].shape == (4, 16)
    assert ">>>" in capsys.readouterr().out
