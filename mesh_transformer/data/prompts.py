"""Prompts for rollouts: rows of a table with `prompt` or `messages`, and any other columns."""

from collections.abc import Iterable, Mapping
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
    """A prompt, its token ids, and the row that it is from; `where` is that row's file and line."""

    where: str
    text: str
    tokens: list[int]
    row: dict[str, Any]


class _Refusing(BadInputHandler):
    def __call__(self, error: BadInputError) -> None:
        raise error


def read_prompts(
    source: str | Iterable[Any], tokenizer: Any, template: str | None, longest: int
) -> list[Prompt]:
    """Return the prompts in tables, or in a list of rows.

    A row has a string `prompt`, or a list of messages, as `messages` or `prompt`, which the chat
    template renders up to the beginning of the answer.

    Args:
      source: a path, as for `completion-records`, or the rows.
      template: the text of the chat template; None for the default of `ChatTemplate`.
      longest: the maximum number of tokens of a prompt.

    Raises:
      InputError: if a row has no prompt, or one that is too long, or there are no rows.
    """
    if isinstance(source, str):
        every = Columns((), ""), _Refusing(False), lambda _: None
        rows = [row for path in find_files(source, TABLE_TYPES) for row in rows_of(path, *every)]
    else:
        rows = [(f"prompt {number} of data", row) for number, row in enumerate(source)]
    chat = ChatTemplate(tokenizer, template)
    texts, first = [_text(where, row, chat) for where, row in rows], beginning(tokenizer)
    known, prompts = alphabet(tokenizer), []
    for (where, row), (text, whole), tokens in zip(
        rows, texts, encode_batch(tokenizer, [text for text, _ in texts]), strict=True
    ):
        if known and (error := unknown_error(where, text, known)):
            raise error
        tokens = (tokens if whole else with_beginning(first, tokens)) or [start_token(tokenizer)]
        if len(tokens) > longest:
            raise InputError(
                f"{where}: {len(tokens)} tokens of prompt, expected at most {longest}, so that an "
                "answer fits seq; shorten it, or lower answer_tokens"
            )
        prompts.append(Prompt(where, text, tokens, row))
    if not prompts:
        raise InputError("no prompts to sample answers to; give at least one row")
    return prompts


def _text(where: str, row: Any, chat: ChatTemplate) -> tuple[str, bool]:
    """Return the text of a row's prompt, and whether a template made it."""
    row = row if isinstance(row, Mapping) else {}
    value = row.get("messages", row.get("prompt"))
    if isinstance(value, str):
        return replace_surrogates(value), False
    try:
        if isinstance(value, list) and value[-1]["role"] != ANSWERS:
            return chat.prompt(value), True
    except BadInputError as error:
        raise InputError(f"{where}: {error}") from error
    except (LookupError, TypeError):  # no messages
        pass
    raise InputError(
        f"{where}: expected a string `prompt`, or a list `messages` whose last one is no answer; "
        f"found the keys {join_keys(row)}"
    )
