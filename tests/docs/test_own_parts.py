"""The code of docs/own-parts.md, run as written."""

import pytest

from tests.support.pages import reader, write_files


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write_files("docs/own-parts.md", tmp_path)
    with reader(tmp_path, monkeypatch) as person:
        person.follow("docs/own-parts.md")
        rows = person.names["rows"]
    assert len(rows) == 60
    assert rows[-1]["train/loss"] < 0.1 < rows[0]["train/loss"]  # the model has learnt to count
    assert "train/grad_norm/layer_1" in rows[-1]
