"""The config key `exact`: a token has the same probability in every program, bit for bit."""

import numpy as np
import pytest

from tests.long import one_probability


@pytest.mark.slow
def test_a_token_has_the_same_probability_everywhere():
    found = one_probability.differences(8, 60, 6, seed=1, seq=128)
    assert not any(found)
