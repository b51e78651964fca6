"""The texts of answers: with the prompt's, they are the texts of all tokens."""

import numpy as np
import pytest

from mesh_transformer.serving.answer import PART, Answer, Echo, TokenTexts
from mesh_transformer.serving.progress import Progress, Token
from tests.support.llama_tokenizers import LLAMA_LIKE, PIECES


@pytest.mark.parametrize("kind", LLAMA_LIKE)
@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_and_its_answer_are_the_text_of_all_tokens(kind, seed):
    """With tokenizers that leave out the space at the start of a text, and in logprobs too."""
    rng = np.random.default_rng(seed)
    tokenizer = LLAMA_LIKE[kind]()
    words, spaces = TokenTexts(tokenizer), 0
    for _ in range(60):
        texts = ["".join(rng.choice(PIECES, rng.integers(0, 12))) for _ in "ab"]
        prompt = tokenizer(texts[0])["input_ids"]
        answer = tokenizer(texts[1], add_special_tokens=False)["input_ids"]
        whole = tokenizer.decode([*prompt, *answer], skip_special_tokens=True)
        expected = whole[len(tokenizer.decode(prompt, skip_special_tokens=True)) :]
        for echo in (None, Echo(words, prompt)):
            made = Answer(words, prompt, [], words.ends, echo)
            cuts = np.flatnonzero(rng.random(len(answer)) < 0.5)
            parts = [part.tolist() for part in np.split(np.array(answer, int), cuts)]
            pieces = [made.feed(Progress([*map(Token, part)])) for part in parts]
            pieces.append(made.feed(Progress(ended=True)))
            assert "".join(piece.text for piece in pieces) == (whole if echo else expected)
            offsets = [spot for piece in pieces for spot in piece.token_offsets]
            assert len(offsets) == len(answer) + (len(prompt) if echo else 0)
        names = [words[number] for number in answer]
        if prompt[1:] and not any(name.startswith(PART) for name in names):
            assert "".join(names) == expected
        spaces += expected.startswith(" ")
    assert spaces > 3


def test_tokens_that_are_bytes_are_named_as_bytes():
    words = TokenTexts(LLAMA_LIKE["llama"]())
    number = words.tokenizer.convert_tokens_to_ids("<0xE6>")
    assert (words[number], words.bytes_of(number)) == ("bytes:\\xe6", [0xE6])
