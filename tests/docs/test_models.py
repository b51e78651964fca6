"""The code and the tables of docs/models.md."""

import re

import pytest

from mesh_transformer.checkpoint.source import Source
from mesh_transformer.config import Config
from mesh_transformer.families import BLOCKS, PRESETS
from mesh_transformer.mesh.declaration import padded_size
from mesh_transformer.model.flops import n_params
from tests.support.pages import ROOT, reader

PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
TINY = {"total_steps": 4, "warmup_steps": 1, "val_batches": 1, "per_replica_batch": 1}


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch, ("tiny.json",), **TINY) as person:
        person.follow("docs/models.md")
    assert "ROMEO:" in capsys.readouterr().out
    config = Source("runs/pythia").config
    assert (config.block, config.layers, config.d_model, config.seq) == ("neox", 6, 128, 64)


@pytest.mark.slow
def test_the_tables_list_every_block_and_preset_with_its_size():
    blocks = PAGE.partition("Under a mesh")[0]
    assert re.findall(r"^\| `(\w+)` \| (?!a layer)\D", blocks, re.MULTILINE) == [
        "gptj",
        "neox",
        "gpt2",
        "llama",
        "geglu",
    ]
    assert {"gptj", "neox", "gpt2", "llama", "geglu"} == {*BLOCKS}
    sizes = {}
    for names, counts in re.findall(
        r"^\| (`[\w.-]+`(?:, `.+`)?) \| ([\d, ]+) \|", PAGE, re.MULTILINE
    ):
        stem = re.match(r"`(\w+)", names)[1]
        for name, count in zip(names.split(", "), counts.split(", "), strict=True):
            name = name.strip("`")
            sizes[stem + name if name.startswith("-") else name] = int(count.replace(",", ""))
    expected = {name: round(n_params(Config.load(None, model=name)) / 1e6) for name in PRESETS}
    assert sizes == expected


def test_the_padding_of_gpt2_xl_is_as_described():
    config = Config.load("gpt2-xl")
    padded = padded_size(config.n_heads, 8), padded_size(config.n_vocab, 8)
    assert f"{config.n_heads} heads and {config.n_vocab} tokens; on mp = 8" in PAGE
    assert f"to {padded[0]} heads and {padded[1]} tokens" in PAGE
