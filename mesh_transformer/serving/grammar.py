"""Answers in a given format: JSON, or JSON that fits a schema, without delay to other answers.

Before each token of such an answer, the tokens are found that the format allows to come next, and
the network chooses among these.  llguidance does the parsing.
"""

import asyncio
import collections
import dataclasses
import functools
import json
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance.numpy
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from mesh_transformer.serving.answer import TokenTexts
from mesh_transformer.serving.engine import ConstraintError
from mesh_transformer.serving.errors import ApiError
from mesh_transformer.serving.requests import ResponseFormat
from mesh_transformer.serving.trial import Trials, Vocabulary, compiled
from mesh_transformer.util import InputError, brief

ANY_OBJECT = json.dumps({"type": "object"})
END = b"<end>"
PARSER_BYTES = 2**23  # memory that a parser may take while answers are generated
KEPT_BYTES = 2**28  # memory for the parsers of the most recently used schemas
MOST_BYTES = 2**30  # memory for these and for the parsers of all other answers
MOST_NEW = 32  # maximum number of new schemas that wait to be compiled
RETRY_SECONDS = 5  # after which a refused client may try again
SAMPLE = 'The cat, and {"a": "b c"}'
NO_TOKEN = "the tokenizer has no token that may come next"


@dataclasses.dataclass(eq=False)
class _Parser:
    """The parser of a schema, shared by the formats of its answers.

    Attributes:
      size: the memory that it may take, in bytes.
      failed: whether an answer has met one of the parser's limits, as all later ones would.
    """

    size: int
    failed: bool = False


class Format:
    """The format of one answer, an `engine.Constraint`.

    Args:
      matcher: the state of the parser.
      n_vocab: the model's vocabulary size.
      ends: the ids of the tokens that may end the answer where the first of them may.
      parser: the parser.
      allowed: the tokens that may come next, if they are known.

    Raises:
      ConstraintError: at construction, if no token may come first.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        n_vocab: int,
        ends: Sequence[int],
        parser: _Parser,
        allowed: np.ndarray | None = None,
    ):
        self._matcher = matcher
        self._n_vocab, self._ends = n_vocab, ends
        self.parser = parser
        self.allowed = self._next() if allowed is None else allowed

    def copy(self) -> "Format":
        """Return the format of another answer, with the same tokens so far."""
        matcher = self._matcher.deep_copy()
        return Format(matcher, self._n_vocab, self._ends, self.parser, self.allowed)

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
        if self._ends and words[self._ends[0] // 32] >> self._ends[0] % 32 & 1:
            for end in self._ends:
                words[end // 32] |= 1 << end % 32
        if not words.any():
            raise ConstraintError(NO_TOKEN)
        return words

    def _check(self) -> None:
        if self._matcher.is_error():
            self.parser.failed = True
            message = self._matcher.get_error().partition("<state>")[0]
            if message.startswith("NoExtension"):
                message = NO_TOKEN
            raise ConstraintError(brief(message, 200))


class FullError(Exception):
    """The parsers of other answers take all the memory that there is for them."""


class Grammars:
    """The formats that a model's answers may have.

    Args:
      words: the texts of the tokenizer's tokens.
      n_vocab: the model's vocabulary size, which may be larger than the tokenizer's.
    """

    def __init__(self, words: TokenTexts, n_vocab: int):
        self._words = words
        self._n_vocab = n_vocab
        self._kept: collections.OrderedDict[str, Format] = collections.OrderedDict()
        self._parsers: weakref.WeakSet[_Parser] = weakref.WeakSet()
        self._lock = threading.Lock()

    def kept(self, schema: str) -> Format | None:
        """Return the format of an answer that fits a schema, if the schema's parser is kept."""
        with self._lock:
            form = self._kept.get(schema)
            if form is None:
                return None
            self._kept.move_to_end(schema)
            if form.parser.failed:
                del self._kept[schema]
                return None
            return form.copy()

    def json(self, schema: str = ANY_OBJECT, left: threading.Event | None = None) -> Format:
        """Return the format of an answer that is JSON and fits a schema.

        The first call takes seconds, and a new complex schema up to `TRIAL_SECONDS` of processor
        time twice.  Only one thread may call this.

        Args:
          schema: a JSON schema as text.
          left: is set when the client leaves.

        Raises:
          InputError: if the schema is invalid, has a keyword that is not supported, takes too long
            or too much memory to compile, or needs tokens that the model does not have.
          FullError: if the parsers of other answers take all the memory.
          LeftError: if the client has left.
          OSError: if the schema could not be tried; another call may succeed.
        """
        form = self.kept(schema)
        if form is not None:
            return form
        size = PARSER_BYTES + len(schema)
        if schema != ANY_OBJECT:
            outcome = self._trials.run(schema, left or threading.Event())
            if outcome.error is not None:
                raise InputError(brief(outcome.error.partition("<state>")[0], 200))
            size += outcome.size
        with self._lock:
            if sum(parser.size for parser in self._parsers) + size > MOST_BYTES:
                raise FullError
        form = self._parse(schema, size)
        with self._lock:
            self._parsers.add(form.parser)
            self._kept[schema] = form
            while sum(kept.parser.size for kept in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return form.copy()

    def close(self) -> None:
        """End the process that tries schemas, from the thread that calls `json`."""
        if "_trials" in self.__dict__:
            self._trials.close()

    def _parse(self, schema: str, size: int) -> Format:
        """Return the format of an answer to a schema that has passed its trial."""
        words, n_vocab = self._words, self._n_vocab
        # The parser knows only the first of the tokens that end an answer.
        ends = (words.end, *(words.ends & words.special.keys()))
        known = [end for end in ends if end is not None and end < n_vocab]
        try:
            return Format(compiled(self._tokenizer, schema), n_vocab, known, _Parser(size))
        except (ValueError, ConstraintError) as error:
            raise InputError(brief(str(error).partition("<state>")[0], 200)) from None

    @functools.cached_property
    def _trials(self) -> Trials:
        return Trials(self._vocabulary)

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._vocabulary.tokenizer()

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        """The tokens, with `END` in place of the end-of-text token if the tokenizer has none.

        The id of `END` is outside the model's vocabulary.
        """
        words, n_vocab = self._words, self._n_vocab

        def encode(text: str) -> list[int]:
            return words.tokenizer(text, add_special_tokens=False)["input_ids"]

        tokens = encode(SAMPLE)
        parts = b"".join(bytes(words.bytes_of(number)) for number in tokens)
        if parts != words.text(tokens).encode():
            raise InputError("the texts of this model's tokens do not add up to that of an answer")
        special = {*words.special, *range(len(words.tokenizer), n_vocab + 1)}
        return Vocabulary(
            [*(bytes(words.bytes_of(number)) for number in range(n_vocab)), END],
            sorted(special),
            n_vocab if words.end is None else words.end,
            encode,
        )


class Formats:
    """Finds the formats of answers; a new schema is compiled in a thread for schemas alone.

    Args:
      words: the texts of the tokenizer's tokens.
      n_vocab: the model's vocabulary size.
      run_in_thread: runs short work in another thread.
    """

    def __init__(
        self,
        words: TokenTexts,
        n_vocab: int,
        run_in_thread: Callable[[Callable[[], str]], Awaitable[str]],
    ):
        self._grammars = Grammars(words, n_vocab)
        self._run_in_thread = run_in_thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="schema")
        self._new = 0  # number of new schemas

    async def format(self, chosen: ResponseFormat | None) -> Format | None:
        """Return the format of the answers to a request; None if they may be any text.

        Raises:
          ApiError: if the format's schema is invalid, not supported or too large (status 400), or
            if too many schemas are waiting or in use (429), or the process for schemas ended (503).
        """
        if chosen is None or chosen.type == "text":
            return None
        schema = ANY_OBJECT
        if chosen.json_schema is not None:
            work = functools.partial(json.dumps, chosen.json_schema.content)
            schema = await self._run_in_thread(work)
        return self._grammars.kept(schema) or await self._compiled(schema)

    async def _compiled(self, schema: str) -> Format:
        """Return the format of a new schema, after those that are waiting already."""
        if self._new >= MOST_NEW:
            raise _busy(f"{self._new} schemas are waiting already")
        left = threading.Event()
        work = functools.partial(self._grammars.json, schema, left)
        self._new += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except InputError as error:
            message = f"response_format: {error}; change the schema"
            raise ApiError(400, message, param="response_format") from None
        except FullError:
            raise _busy("the schemas in use take all the memory for schemas") from None
        except OSError as error:
            raise ApiError(503, f"response_format: {error}; send the request again") from error
        finally:
            self._new -= 1
            left.set()

    def close(self) -> None:
        """End the thread, once it has nothing left to do, and its process."""
        self._thread.submit(self._grammars.close)
        self._thread.shutdown(wait=False)


def _busy(problem: str) -> ApiError:
    headers: dict[str, Any] = {"Retry-After": str(RETRY_SECONDS)}
    message = f"response_format: {problem}; try again in {RETRY_SECONDS} s"
    return ApiError(429, message, param="response_format", headers=headers)
