"""The commands of docs/from-maxtext.md, run as written; its config keys exist."""

import re
from pathlib import Path

import pytest

from mesh_transformer.config import Config
from tests.support.pages import ROOT, reader

# Of the right column, what is no config key.
WORDS = {
    "full",
    "dots",
    "none",
    "moments",
    "params",
    "dpo",
    "objective",
    "mesh-transformer records",
}


def keys(text: str) -> set[str]:
    """Return the words in code of the right column of the table of keys."""
    table = text.partition("## Keys")[2].partition("##")[0]
    cells = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")][1:]
    spans = re.findall(r"`([^`]+)`", " ".join(cells))
    return {re.split(r"[ :]", span)[0] for span in spans if not span.startswith("-")} - WORDS


def test_the_page_names_config_keys():
    named = keys((ROOT / "docs/from-maxtext.md").read_text("utf-8"))
    assert len(named) > 30
    assert named - set(Config.__dataclass_fields__) - {"mesh-transformer"} == set()


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch) as person:
        person.follow("docs/from-maxtext.md")
    printed = capsys.readouterr().out
    assert "dp 4 x mp 2" in printed
    assert "ZeRO 3" in printed
    assert Path("runs/tiny/step_2").is_dir()
