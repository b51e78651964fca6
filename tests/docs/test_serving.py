"""The commands of docs/serving.md, run as written on a small model."""

import socket

import pytest

from mesh_transformer.transformer_shard import CausalTransformer
from tests.support.pages import reader

MODEL = {"layers": 1, "d_model": 16, "n_heads": 2, "n_vocab": 50400, "seq": 64, "pe_rotary_dims": 8}


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, capfd):
    for port in (5000, 5001, 5002):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                pytest.skip(f"another program uses port {port}, which the page's commands name")
    with reader(tmp_path, monkeypatch) as person:
        network = CausalTransformer(MODEL | {"dtype": "float32"})
        network.save("runs/tiny")
        network.close()
        tuned = CausalTransformer(MODEL | {"dtype": "float32", "lora_rank": 2}, init=False)
        tuned.load("runs/tiny")
        tuned.save("runs/tuned")
        tuned.close()
        person.follow("docs/serving.md")
    printed = capfd.readouterr().out
    assert '"text_completion"' in printed
    assert '"completion"' in printed
    assert '"model": "tuned"' in printed
    assert '{"name": "' in printed
    assert len(person.names["answer"].data[0].embedding) == MODEL["d_model"]
