"""The README's commands and Python, run as written with a smaller model."""

from pathlib import Path

import pytest

from tests.support.pages import reader

TINY = {"layers": 1, "d_model": 32, "pe_rotary_dims": 4, "per_replica_batch": 1, "val_batches": 1}
# One device compiles in less time.
TINY |= {"tpu_size": 1, "cores_per_replica": 1, "total_steps": 3}


@pytest.mark.slow
def test_the_readme_runs(tmp_path, monkeypatch, capsys):
    with reader(tmp_path, monkeypatch, ("tiny.json",), **TINY) as person:
        person.follow("README.md")
    assert "ROMEO:" in capsys.readouterr().out
    assert Path("loss.png").stat().st_size > 1000
