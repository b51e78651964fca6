"""The commands of docs/plan.md and docs/benchmarks.md that need no TPU, run as written."""

import pytest

from tests.support.pages import reader


@pytest.mark.slow
def test_the_page_on_plans_runs(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch, ("tiny.json",), layers=1) as person:
        person.follow("docs/plan.md")
    assert "fits" in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_on_benchmarks_runs(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch, ("tiny.json",)) as person:
        person.follow("docs/benchmarks.md")
    assert "tokens/s" in capsys.readouterr().out
