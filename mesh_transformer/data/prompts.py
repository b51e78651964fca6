"""Prompts for rollouts: rows of a table with `prompt` or `messages`, and any other columns."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mesh_transformer.data.chat import ANSWERS, ChatTemplate
from mesh_transformer.data.documents import unknown_error
from mesh_transformer.data.file_types import TABLE_TYPES
from mesh_transformer.data.inputs import BadInputError, BadInputHandler, find_files
from mesh_transformer.data.special_tokens import beginning, start_token, with_beginning
from mesh_transformer.data.tables import Columns, replace_surrogates, rows_of
from mesh_transformer.data.tokenizer import alphabet, encode_batch
from mesh_transformer.util import InputError, join_keys


class Prompt(NamedTuple):
    """A prompt, its token ids, and the row that it is from.

    Attributes:
      where: the file and the line or row, for error messages.
    """

    where: str
    text: str
    tokens: list[int]
    row: dict[str, Any]


class _Refusing(BadInputHandler):
    def __call__(self, error: BadInputError) -> None:
        raise error


def read_prompts(
    source: str | Iterable[Mapping[str, Any]], tokenizer: Any, template: str | None, longest: int
) -> list[Prompt]:
    """Return the prompts in tables or in a list of rows.

    A row has a string `prompt`, or a list of messages, as `messages` or `prompt`, which the chat
    template renders up to the beginning of the answer.

    Args:
      source: a path, as for `completion-records`, or the rows.
      template: the text of the chat template; None for that of `ChatTemplate`.
      longest: the maximum number of tokens of a prompt.

    Raises:
      InputError: if a row has no prompt, or one that is too long, or there are no rows.
    """
    rows = list(_rows(source))
    chat: ChatTemplate | None = None
    texts, known = [], alphabet(tokenizer)
    for where, row in rows:
        value = row.get("messages", row.get("prompt")) if isinstance(row, Mapping) else None
        if isinstance(value, list) and value and value[-1].get("role") != ANSWERS:
            chat = chat or ChatTemplate(tokenizer, template)
            text = chat.prompt(value)
        elif isinstance(value, str):
            text = replace_surrogates(value)
        else:
            raise InputError(
                f"{where}: expected a string `prompt`, or a list `messages` whose last one is no "
                f"answer; found the keys {join_keys(row if isinstance(row, Mapping) else {})}"
            )
        if known and (error := unknown_error(where, text, known)):
            raise error
        texts.append(text)
    first, prompts = beginning(tokenizer), []
    for (where, row), text, ids in zip(rows, texts, encode_batch(tokenizer, texts), strict=True):
        is_plain = isinstance(row.get("messages", row.get("prompt")), str)
        tokens = (with_beginning(first, ids) if is_plain else ids) or [start_token(tokenizer)]
        if len(tokens) > longest:
            raise InputError(
                f"{where}: {len(tokens)} tokens of prompt, expected at most {longest}, so that an "
                "answer fits seq; shorten it, or lower answer_tokens"
            )
        prompts.append(Prompt(where, text, tokens, dict(row)))
    if not prompts:
        raise InputError(f"{source if isinstance(source, str) else 'data'} has no prompts")
    return prompts


def _rows(source: str | Iterable[Any]) -> Iterator[tuple[str, Any]]:
    if not isinstance(source, str):
        yield from ((f"prompt {number} of data", row) for number, row in enumerate(source))
        return
    for path in find_files(source, TABLE_TYPES):
        yield from rows_of(path, Columns((), ""), _Refusing(False), lambda _: None)
