"""Answers in a given format: JSON, or JSON that fits a schema.

Before each token of such an answer, the tokens are found that the format allows to come next, and
the network chooses among these.  llguidance does the parsing.
"""

import functools
import json
from typing import Any

import llguidance.numpy
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from mesh_transformer.serving.answer import TokenTexts
from mesh_transformer.serving.engine import ConstraintError
from mesh_transformer.util import InputError, brief

# No white space but a space after each comma and colon; with more, a model may never end.
STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT = {"type": "object"}
END = b"<end>"
KEPT_SCHEMAS = 32  # number of schemas whose parsers are kept, the most recently used ones
SAMPLE = 'The cat, and {"a": "b c"}'
NO_TOKEN = "the tokenizer has no token that may come next"


class Format:
    """The format of one answer, an `engine.Constraint`.

    Args:
      matcher: the state of the parser.
      n_vocab: the model's vocabulary size.

    Raises:
      ConstraintError: at construction, if no token may come first.
    """

    def __init__(self, matcher: LLMatcher, n_vocab: int):
        self._matcher = matcher
        self._n_vocab = n_vocab
        self.allowed = self._next()

    def copy(self) -> "Format":
        """Return the format of another answer, with the same tokens so far."""
        return Format(self._matcher.deep_copy(), self._n_vocab)

    def add(self, token: int) -> bool:
        """Add a token to the answer, and return whether no token may follow.

        Raises:
          ConstraintError: if the token may not come next, if no token may follow although the
            answer is incomplete, or if the parser has reached one of its limits.
        """
        self._matcher.consume_token(token)
        self._check()
        if self._matcher.is_stopped():
            return True
        self.allowed = self._next()
        return False

    def _next(self) -> np.ndarray:
        """Return the tokens that may come next, as bits [W]."""
        bits = np.zeros(llguidance.numpy.get_bitmask_shape(1, self._n_vocab + 1), np.int32)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, bits)
        self._check()
        words = bits[0].view(np.uint32)[: -(-self._n_vocab // 32)]
        words[-1] &= 2**32 - 1 >> -self._n_vocab % 32  # without END
        if not words.any():
            raise ConstraintError(NO_TOKEN)
        return words

    def _check(self) -> None:
        if self._matcher.is_error():
            message = self._matcher.get_error().partition("<state>")[0]
            if message.startswith("NoExtension"):
                message = NO_TOKEN
            raise ConstraintError(brief(message, 200))


class Grammars:
    """The formats that a model's answers may have.

    Args:
      words: the texts of the tokenizer's tokens.
      n_vocab: the model's vocabulary size, which may be larger than the tokenizer's.
    """

    def __init__(self, words: TokenTexts, n_vocab: int):
        self._words = words
        self._n_vocab = n_vocab
        self._parsed = functools.lru_cache(KEPT_SCHEMAS)(self._parse)

    def json(self, schema: dict[str, Any] | None) -> Format:
        """Return the format of an answer that is JSON and fits a schema.

        The first call takes about a second, and a new complex schema up to a second.

        Args:
          schema: a JSON schema; None allows any JSON object.

        Raises:
          InputError: if the schema is invalid, has a keyword that is not supported, or needs tokens
            that the model does not have.
        """
        return self._parsed(json.dumps(ANY_OBJECT if schema is None else schema)).copy()

    def _parse(self, text: str) -> Format:
        """Return the format of an answer for a JSON schema, given as text."""
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, defaults=STYLE)
        except ValueError as error:
            raise InputError(brief(str(error), 200)) from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InputError(brief(matcher.get_error(), 200))
        try:
            return Format(matcher, self._n_vocab)
        except ConstraintError as error:
            raise InputError(str(error)) from None

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        tokens = self._words.tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
        parts = b"".join(bytes(self._words.bytes_of(number)) for number in tokens)
        if parts != self._words.text(tokens).encode():
            raise InputError("the texts of this model's tokens do not add up to that of an answer")
        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._words, self._n_vocab)))


class _Vocabulary:
    """The bytes of each token, in the form that llguidance expects.

    If the tokenizer has no end-of-text token, the last token, `END`, stands for it.  Its id is
    outside the model's vocabulary.
    """

    bos_token_id = None

    def __init__(self, words: TokenTexts, n_vocab: int):
        self._words = words
        special = {*words.special, *range(len(words.tokenizer), n_vocab + 1)}
        self.eos_token_id = n_vocab if words.end is None else words.end
        self.tokens = [*(bytes(words.bytes_of(number)) for number in range(n_vocab)), END]
        self.special_token_ids = sorted(special)

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self._words.tokenizer(text, add_special_tokens=False)["input_ids"]
