"""Streamed text: multi-byte characters, stop sequences and arbitrary chunks."""

from typing import Any

import numpy as np
import pytest

from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.generation.text_stream import TextStream
from tests.support.llama_tokenizers import LLAMA_LIKE, PIECES

TEXT = "naïve 日本語 👩‍👩‍👧‍👦 café 🇨🇭 \ufffd ok\n\n𐍈\tend"


def by_bytes(tokens: list[int]) -> str:
    """Decode tokens that are bytes."""
    return bytes(tokens).decode("utf-8", errors="replace")


def chunks(rng: np.random.Generator, tokens: list[int]) -> list[list[int]]:
    cuts = np.flatnonzero(rng.random(len(tokens)) < rng.choice([0.1, 0.5, 1.0])) + 1
    return [list(part) for part in np.split(np.asarray(tokens), cuts)]


def streamed(stream: TextStream, parts: list[list[int]]) -> list[str]:
    return [*(stream.push(part) for part in parts), stream.finish()]


@pytest.mark.quick(5)
@pytest.mark.parametrize("seed", range(20))
def test_joined_pieces_equal_the_decoded_text(seed):
    rng = np.random.default_rng(seed)
    tokenizer: Any = load_tokenizer()
    for decode, tokens in (
        (by_bytes, list(TEXT.encode())),
        (tokenizer.decode, tokenizer(TEXT)["input_ids"]),
        # Random tokens, most of which are not valid text.
        (by_bytes, rng.integers(0, 256, 300).tolist()),
        (tokenizer.decode, rng.integers(0, 50257, 300).tolist()),
    ):
        pieces = streamed(TextStream(decode), chunks(rng, tokens))
        assert "".join(pieces) == decode(tokens)


def test_pieces_contain_only_complete_characters():
    stream = TextStream(by_bytes)
    pieces = [stream.push([byte]) for byte in "aé日👍b".encode()]
    assert pieces == ["a", "", "é", "", "", "日", "", "", "", "👍", "b"]
    assert stream.finish() == ""


def test_an_incomplete_character_is_returned_by_finish():
    stream = TextStream(by_bytes)
    assert stream.push(list("a日".encode())[:-1]) == "a"
    assert stream.finish() == "\ufffd"


def test_invalid_bytes_do_not_hold_back_later_text():
    stream = TextStream(by_bytes)
    assert [stream.push([0x80]) for _ in range(5)] == ["", "", "", "\ufffd", "\ufffd"]
    assert stream.push(list(b"ok")) == "\ufffd\ufffd\ufffdok"


def reference_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Return the text before the first stop sequence, and that sequence, character by character.

    If several stop sequences end at the same character, the longest is used.
    """
    for end in range(len(text) + 1):
        matches = [sequence for sequence in stop if text[:end].endswith(sequence)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("seed", range(50))
def test_stop_sequences_end_the_text_for_any_chunks(seed):
    rng = np.random.default_rng(seed)
    text = "".join(rng.choice(list("ab日"), 40))
    lengths = rng.integers(2, 6, rng.integers(1, 4))
    stop = ["".join(rng.choice(list("ab日"), length)) for length in lengths]
    stream = TextStream(by_bytes, stop)
    pieces = streamed(stream, chunks(rng, list(text.encode())))
    assert ("".join(pieces), stream.stopped) == reference_stop(text, stop)


def test_a_partial_stop_sequence_is_held_back_until_it_fails_to_match():
    stream = TextStream(by_bytes, ["\n\nQ:"])
    assert stream.push(list(b"A: 4\n\n")) == "A: 4"
    assert stream.push(list(b"B")) == "\n\nB"
    assert stream.push(list(b"\n\nQ")) == ""
    assert stream.push(list(b": no")) == ""
    assert (stream.stopped, stream.push([65]), stream.finish()) == ("\n\nQ:", "", "")


def test_finish_returns_a_partial_stop_sequence():
    stream = TextStream(by_bytes, ["END"])
    assert stream.push(list(b"the EN")) == "the "
    assert stream.finish() == "EN"


def test_an_empty_stop_sequence_is_ignored():
    stream = TextStream(by_bytes, [""])
    assert stream.push(list(b"on")) == "on"


def test_a_decoder_that_strips_the_first_space_is_supported():
    def decode(tokens: list[int]) -> str:
        return "".join([" one", " two", " three"][token] for token in tokens).lstrip()

    pieces = streamed(TextStream(decode), [[0], [1], [2]])
    assert "".join(pieces) == "one two three"


@pytest.mark.quick(12)
@pytest.mark.parametrize("kind", [*LLAMA_LIKE, "gpt2"])
@pytest.mark.parametrize("seed", range(5))
def test_text_after_a_prompt_is_what_its_tokens_add_to_the_prompt_s_text(kind, seed):
    """Also the space at its start, which these decoders leave out at the start of a text."""
    rng = np.random.default_rng(seed)
    tokenizer: Any = LLAMA_LIKE[kind]() if kind in LLAMA_LIKE else load_tokenizer()
    spaces = 0
    for _ in range(60):
        if rng.random() < 0.5:
            text = "".join(rng.choice(PIECES, rng.integers(2, 20)))
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            tokens = rng.integers(260, len(tokenizer), rng.integers(2, 30)).tolist()
        cut = int(rng.integers(len(tokens)))
        prompt = tokenizer.decode(tokens[:cut])
        if prompt.endswith("\ufffd"):  # within a character
            continue
        expected = tokenizer.decode(tokens)[len(prompt) :]
        stream = TextStream(tokenizer.decode, before=tokens[:cut])
        assert "".join(streamed(stream, chunks(rng, tokens[cut:]))) == expected
        spaces += expected.startswith(" ")
    assert spaces > 3


def test_tokens_without_text_do_not_hide_the_text_before_them():
    """Such as those that a padded vocabulary adds."""

    def decode(tokens: list[int]) -> str:
        return "".join(["", " one", " two"][token] for token in tokens).lstrip()

    for before in ([], [1, 0, 0]):
        for parts in ([[1], *[[0]] * 20, [2]], [[0], [1, 0], [0], [0, 2]], [[0] * 20, [2]]):
            text = decode([*before, *(token for part in parts for token in part)])
            pieces = streamed(TextStream(decode, before=before), parts)
            assert "".join(pieces) == text[len(decode(before)) :]
