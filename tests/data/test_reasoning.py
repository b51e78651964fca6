"""The reasoning of answers: the same, however the text is cut into pieces."""

import re

import numpy as np
import pytest

from mesh_transformer.data.reasoning import Reasoning

PARTS = ["<think>", "</think>", "\n", " ", "a", "<", "</thi", "nk>", "b.", "\r\n", ">"]


def separated(text: str, *, is_open: bool = False) -> tuple[str, str]:
    """Return the reasoning and the content of a complete answer."""
    match = re.match(r"\s*<think>", text)
    if not is_open:
        if match is None:
            return "", text
        text = text[match.end() :]
    reasoning, _, content = text.partition("</think>")
    return reasoning.lstrip("\r\n").rstrip(), content.lstrip()


def pushed(text: str, cuts: list[int], *, is_open: bool = False) -> tuple[str, str]:
    separator, ends = Reasoning(is_open), [*cuts, len(text)]
    pieces = zip([0, *cuts], ends, strict=True)
    pairs = [separator.push(text[start:end], last=end is ends[-1]) for start, end in pieces]
    assert pairs  # the reasoning comes before the content
    first = next((at for at, (_, content) in enumerate(pairs) if content), len(pairs))
    assert not any(reasoning for reasoning, _ in pairs[first + 1 :])
    return "".join(pair[0] for pair in pairs), "".join(pair[1] for pair in pairs)


@pytest.mark.parametrize("is_open", [False, True])
def test_pieces_give_what_the_whole_text_gives(is_open):
    rng = np.random.default_rng(0)
    for number in range(2000):
        text = "".join(rng.choice(PARTS, rng.integers(1, 12)))
        text = "<think>" * (number % 2) + text
        cuts = sorted(rng.integers(0, len(text), rng.integers(0, 8)).tolist())
        expected = separated(text, is_open=is_open)
        assert pushed(text, cuts, is_open=is_open) == expected, (text, cuts)
        assert pushed(text, [*range(1, len(text))], is_open=is_open) == expected, text


def test_text_is_held_back_no_longer_than_necessary():
    separator = Reasoning()
    pieces = ["<th", "ink>\n", "Why", " </", "b> so", "\n", "</think>", "\n\n", "Yes", "."]
    expected = [("", ""), ("", ""), ("Why", ""), ("", ""), (" </b> so", ""), ("", "")]
    expected += [("", ""), ("", ""), ("", "Yes"), ("", ".")]
    assert [separator.push(piece) for piece in pieces] == expected
