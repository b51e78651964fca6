"""The code of docs/own-loop.md, run as written."""

import math

import numpy as np
import pytest

from tests.support.pages import reader


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch):
    with reader(tmp_path, monkeypatch) as person:
        person.follow("docs/own-loop.md")
        names = person.names
    assert names["losses"][-1] < 0.3  # from log 32: the model has learnt to count
    assert float(names["value"]) == pytest.approx(math.log(2), abs=1e-6)
    assert names["attribution"].shape == (64, 16, 64)
    assert np.abs(names["attribution"]).max() > 0
    assert names["norms"].shape == (8,)
    assert names["by_layer"].shape == (4,)
    assert (names["by_layer"] > 0).all()
