"""What tests expect of a refusal: what it names, and what to do, but not the sentence."""

import contextlib
from collections.abc import Iterator

import pytest

from mesh_transformer.util import InputError


@contextlib.contextmanager
def refused(named: str, remedy: str) -> Iterator[None]:
    """Expect an InputError of one line that has the text `named`, and after it the text `remedy`.

    Args:
      named: what is wrong, such as a key, a flag or a file, with its value if the line has it.
      remedy: what is expected in its place, or what to do.
    """
    with pytest.raises(InputError) as caught:
        yield
    line = str(caught.value)
    assert "\n" not in line
    assert named in line, line
    assert remedy in line.partition(named)[2], line
