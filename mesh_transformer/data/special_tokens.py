"""The special tokens around texts: those before a text, and those that end an answer.

All prompts and records are tokenised alike (see docs/records.md).  A text begins with the special
tokens that its tokenizer puts before a text, such as a beginning-of-sequence token.  Special tokens
that the tokenizer puts after a text are not added: a prompt is to be continued, and a document in
records ends with the end-of-text token.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Set
from typing import Any

from mesh_transformer.config import Config

# The name of a token that is one byte, as in Llama 2's tokenizer.
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return {id: name} of the tokens that `skip_special_tokens` of transformers leaves out."""
    added = tokenizer.added_tokens_decoder.items()
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return named | {number: token.content for number, token in added if token.special}


def end_tokens(tokenizer: Any, config: Config | None) -> frozenset[int]:
    """Return the ids of the tokens that end an answer: the config's, and the end-of-text token."""
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return frozenset([*own, *((config and config.end_tokens) or ())])


def before_end(tokens: Iterable[int], ends: Set[int]) -> list[int]:
    """Return the tokens of an answer before the first that ends it; all if none does."""
    return list(itertools.takewhile(lambda token: token not in ends, tokens))


def beginning(tokenizer: Any) -> list[int]:
    """Return the ids of the special tokens that a tokenizer puts before a text."""
    for text in _texts(tokenizer):  # the first text that has a token
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        if plain:
            whole = tokenizer(text)["input_ids"]
            starts = range(len(whole) - len(plain) + 1)
            start = next((at for at in starts if whole[at : at + len(plain)] == plain), 0)
            return list(whole[:start])
    return []


def _texts(tokenizer: Any) -> Iterator[str]:
    yield "a"
    yield from tokenizer.get_vocab()


def with_beginning(first: list[int], tokens: list[int]) -> list[int]:
    """Return a text's tokens after the tokens `first`, unless the text begins with them anyway."""
    return tokens if tokens[: len(first)] == first else [*first, *tokens]


def prompt_tokens(
    tokenizer: Any, prompt: str, *, whole: bool = False, first: list[int] | None = None
) -> list[int]:
    """Return the token ids of a prompt.

    An empty prompt gives the token after which the model begins a new text.

    Args:
      whole: whether the prompt has its special tokens already, as the text of a chat template has.
      first: the result of `beginning`, if it is known.
    """
    tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not whole:
        tokens = with_beginning(beginning(tokenizer) if first is None else first, tokens)
    return tokens or [start_token(tokenizer)]


def start_token(tokenizer: Any) -> int:
    """Return the id of the token after which a model begins a new text."""
    ids = (*beginning(tokenizer)[-1:], tokenizer.bos_token_id, tokenizer.eos_token_id, 0)
    return next(number for number in ids if number is not None)
