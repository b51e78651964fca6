"""The examples of the pages in docs/api, each run as written in a Python session of its own."""

import pytest

from tests.support.pages import reader


@pytest.mark.slow
def test_the_examples_run(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch) as person:

        def follow(page: str) -> dict:
            person.names.clear()
            person.follow(page)
            return person.names

        assert follow("docs/api/network.md")["again"].generate([[72]], [1], 1).shape == (1, 1)
        follow("docs/api/config.md")
        assert "unknown key 'layer'; did you mean 'layers'?" in capsys.readouterr().out
        follow("docs/api/functions.md")
        assert follow("docs/api/data.md")["count"] == 10
        follow("docs/api/model.md")
        assert "8,030,261,248 parameters" in capsys.readouterr().out
        logits = follow("docs/api/generation.md")["logits"]
        assert (logits > -1e10).tolist() == [[True, True, False, False]]
        assert follow("docs/api/evaluation.md")["scores"].tokens == 8 * 32
        rows = follow("docs/api/training.md")["rows"]
        assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 1
        follow("docs/api/checkpoint.md")
        assert follow("docs/api/performance.md")["result"].fits
