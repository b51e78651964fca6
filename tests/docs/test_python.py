"""The code of docs/python.md, run as written."""

from pathlib import Path

import pytest

from tests.support.pages import reader


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch) as person:
        person.follow("docs/python.md")
        names = person.names
    # 3 4 5 are followed by 6 to 13: the model has learnt to count.
    assert names["answer"].tolist() == [[6, 7, 8, 9, 10, 11, 12, 13]]
    assert dict(names["network"].mesh.shape) == {"dp": 2, "mp": 4}
    assert names["losses"][-1] < names["losses"][0]
    assert len(names["losses"]) == 3
    assert Path("runs/counting/step_60").is_dir()
    assert "{'dp': 2, 'mp': 4}" in capsys.readouterr().out
