"""Prompts for rollouts: rows of a table with `prompt` or `messages`, and any other columns."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mesh_transformer.data.chat import ANSWERS, ChatTemplate, Message, messages_of
from mesh_transformer.data.documents import unknown_error
from mesh_transformer.data.inputs import BadInputError
from mesh_transformer.data.special_tokens import beginning, start_token, with_beginning
from mesh_transformer.data.tables import all_rows, replace_surrogates
from mesh_transformer.data.tokenizer import alphabet, encode_batch
from mesh_transformer.util import InputError, join_keys


class Prompt(NamedTuple):
    """A prompt, its token ids, and the row that it is from; `where` is that row's file and line."""

    where: str
    text: str
    tokens: list[int]
    row: dict[str, Any]


def prompt_of(row: Any, where: str) -> str | list[Message]:
    """Return the prompt in a row: a text in `prompt`, or the messages in `messages` or `prompt`.

    Raises:
      InputError: if the row has none.
    """
    row = row if isinstance(row, Mapping) else {}
    messages = row.get("messages")
    value = row.get("prompt") if messages is None else messages
    if value is None:
        raise InputError(
            f"{where}: expected `prompt`, a text, or `messages`, a list; found the keys "
            f"{join_keys(row)}"
        )
    if isinstance(value, str) and messages is None:
        return replace_surrogates(value)
    return messages_of(value, where, dict(row))


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
    rows = [(f"prompt {number} of data", row) for number, row in enumerate(source)]
    if isinstance(source, str):
        rows = all_rows(source)
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
                f"{where}: the prompt has {len(tokens)} tokens, expected at most {longest}: seq "
                "+ 1 - answer_tokens; shorten it, or lower answer_tokens"
            )
        prompts.append(Prompt(where, text, tokens, row))
    if not prompts:
        raise InputError("no prompts to sample answers to; give at least one row")
    return prompts


def _text(where: str, row: Any, chat: ChatTemplate) -> tuple[str, bool]:
    """Return the text of a row's prompt, and whether a template made it."""
    prompt = prompt_of(row, where)
    if isinstance(prompt, str):
        return prompt, False
    if not prompt or prompt[-1]["role"] == ANSWERS:
        raise InputError(f"{where}: expected a list of messages that does not end with an answer")
    try:
        return chat.prompt(prompt), True
    except BadInputError as error:
        raise InputError(f"{where}: {error}") from error
