"""Conversations: messages of a table's row, rendered as text by a chat template.

A chat template is a program in the language Jinja, in the form that transformers uses.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, cycle, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from mesh_transformer.data.inputs import BadInputError, BadInputHandler
from mesh_transformer.data.reasoning import CLOSE, OPEN, Reasoning
from mesh_transformer.data.tables import replace_surrogates
from mesh_transformer.data.tokenizer import answer_spans, chat_template, check_chat_template
from mesh_transformer.storage.files import open_file
from mesh_transformer.util import InputError, brief, join_keys

# With the strings `role` and `content`; an answer whose `weight` is 0 does not count in the loss.
Message = dict[str, Any]
ANSWERS = "assistant"  # the role whose messages count in the loss
# The roles of ShareGPT's messages, which have `from` and `value` for `role` and `content`.
SHAREGPT_ROLES = {"human": "user", "gpt": ANSWERS, "chatgpt": ANSWERS, "bing": ANSWERS}
# Columns beside a conversation that are part of its text, or without which it means something else.
BESIDE = ("system", "input", "history", "tools", "functions")
SYSTEM = ("system", "developer")  # roles of a message that applies to the whole conversation
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the tag at the beginning of an answer
# The template for tokenizers without one of their own.
PLAIN = """\
{% for message in messages %}
{% if not loop.first %}{{ '\\n\\n' }}{% endif %}
{{ message.role | capitalize }}:
{%- if message.role == 'assistant' %}
{% generation %} {{ message.content | trim }}{{ eos_token }}{% endgeneration %}
{% else %} {{ message.content }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '\\n\\n' }}Assistant:{% endif %}
"""


class Segment(NamedTuple):
    """Part of a text, and whether its tokens count in the loss."""

    text: str
    has_loss: bool


def messages_of(value: Any, where: str, row: dict[str, Any] | None = None) -> list[Message]:
    """Return the messages in a cell of a table; see `Conversation.of`, which requires an answer."""
    messages = []
    for entry in _with_system(_entries(value), row or {}, where):
        message = _message(entry)
        if message is None:
            keys = f", found the keys {join_keys(entry)}" if isinstance(entry, dict) else ""
            expected = "expected a list of messages, each with the strings role and content"
            raise BadInputError("no messages", f"{where}: {expected}{keys}")
        if (weight := message.get("weight", 1)) not in (0, 1):
            expected = f"the weight of a message is {brief(repr(weight))}, expected 0 or 1"
            raise BadInputError("no messages", f"{where}: {expected}")
        messages.append(message)
    return messages


class Conversation(NamedTuple):
    """The messages of a conversation, the last of which is an answer.

    Attributes:
      where: the file and line or row of the conversation, for error messages.
      logprobs: what a server sent with the last answer; see `teacher`.
    """

    where: str
    messages: list[Message]
    logprobs: Any = None

    @classmethod
    def of(cls, value: Any, where: str, row: dict[str, Any] | None = None) -> "Conversation":
        """Return the conversation in a cell of a table, without messages after the last answer.

        The row's column `system`, if it has one, is the system message.

        Args:
          value: a list of dicts with the strings `role` and `content` (or `from` and `value`, as
            ShareGPT has them), this list as JSON, or a dict of lists, as early versions of the
            package datasets stored lists of dicts.
          where: the file and the line or row, for error messages.
          row: all columns of the cell's row.

        Raises:
          BadInputError: if the value is something else, or no message is an answer; if the row has
            another system message than the conversation, or tools.
        """
        messages = messages_of(value, where, row)
        ends = [end for end, message in enumerate(messages, 1) if _counts(message)]
        if not ends and any(message["role"] == ANSWERS for message in messages):
            raise BadInputError("no answer", f"{where}: every answer has the weight 0")
        if not ends:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages)) or "none"
            raise BadInputError(
                "no answer", f"{where}: no message has the role {ANSWERS}, found {roles}"
            )
        return cls(where, messages[: ends[-1]])

    @classmethod
    def of_instruction(cls, row: dict[str, Any], where: str) -> "Conversation":
        """Return the conversation in a row with Alpaca's columns.

        The question is the `instruction` and, if there is one, the `input` after an empty line.
        The answer is the `output`.  `history` is a list of earlier pairs of question and answer.

        Raises:
          BadInputError: if a string is missing, or the question or the answer is empty.
        """
        parts = [row.get("instruction"), row.get("input") or "", row.get("output")]
        if not all(isinstance(part, str) for part in parts) or not parts[2] or not any(parts[:2]):
            expected = "expected strings `instruction`, `output` and optionally `input`"
            raise BadInputError("no pair", f"{where}: {expected}; only one of them may be empty")
        turn = ["\n\n".join(filter(None, parts[:2])), parts[2]]
        texts = chain(*_history(row.get("history"), where), turn)
        roles = zip(cycle(("user", ANSWERS)), texts, strict=False)
        messages = [{"role": role, "content": text} for role, text in roles]
        return cls.of(messages, where, row)

    def parts(
        self, length: Callable[["Conversation"], int], longest: int, bad: BadInputHandler
    ) -> Iterator["Conversation"]:
        """Cut a long conversation, after answers, into the fewest parts of limited length.

        Each part begins with the system message, if there is one.

        Args:
          length: returns the number of tokens of a conversation.
          longest: the maximum number of tokens of a part.
          bad: called for each answer that is too long, with the messages before it, for a part of
            its own.  It is left out.
        """
        system = [message for message in self.messages[:1] if message["role"] in SYSTEM]
        rest = self.messages[len(system) :]
        ends = [end for end, message in enumerate(rest, 1) if _counts(message)]
        part: Conversation | None = None
        for start, end in pairwise([0, *ends]):
            longer = part and self._replace(messages=[*part.messages, *rest[start:end]])
            if longer and length(longer) <= longest:
                part = longer
                continue
            if part:
                yield part
            part = self._replace(messages=[*system, *rest[start:end]])
            if (tokens := length(part)) > longest:
                where = f"{self.where}: message {len(system) + end}"
                size = f"{tokens} tokens with the messages before it since the last answer"
                bad(BadInputError("too long", f"{where}: {size}, --seq {longest} is shorter"))
                part = None
        if part:
            yield part


def _entries(value: Any) -> list[Any]:
    """Return the list of messages in a cell of a table; [None] if there is no list."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if isinstance(value, dict) and all(isinstance(column, list) for column in value.values()):
        if len(set(map(len, value.values()))) > 1:
            return [None]
        rows = zip(*value.values(), strict=True)
        return [dict(zip(value, row, strict=True)) for row in rows]
    return value if isinstance(value, list) else [None]


def _with_system(entries: list[Any], row: dict[str, Any], where: str) -> list[Any]:
    """Return the messages of a row, with the row's column `system` as the first one."""
    for name in ("tools", "functions"):
        if row.get(name) not in (None, "", "[]", "null", []):
            problem = f"{where}: the column {name} would not be in the text; render it yourself"
            raise BadInputError("no messages", f"{problem} as part of a system message")
    system = row.get("system")
    if system is None or system == "":
        return entries
    first = _message(entries[0]) if entries else None
    if first and first["role"] in SYSTEM:
        if first["content"] == system:
            return entries
        problem = "expected one system message, found one in the column system and another one"
        raise BadInputError("no messages", f"{where}: {problem} in the conversation")
    return [{"role": "system", "content": system}, *entries]


def _history(value: Any, where: str) -> list[Any]:
    """Return the pairs of questions and answers in Alpaca's column `history`."""
    turns = [] if value in (None, "") else _entries(value)
    if not all(isinstance(turn, list) and list(map(type, turn)) == [str, str] for turn in turns):
        expected = "expected `history` to be a list of pairs, a question and its answer each"
        raise BadInputError("no pair", f"{where}: {expected}")
    return turns


def _message(value: Any) -> Message | None:
    """Return a message of a conversation; None if it has no `role` or `content`."""
    if isinstance(value, dict) and value.get("role") is None and isinstance(value.get("from"), str):
        role = SHAREGPT_ROLES.get(value["from"], value["from"])
        others = {key: value[key] for key in value if key not in ("from", "value")}
        value = others | {"role": role, "content": value.get("value")}
    keys = ("role", "content")
    if not isinstance(value, dict) or not all(isinstance(value.get(key), str) for key in keys):
        return None
    # In a table, all messages have the same keys, and null for those that were absent.
    present = {key: value for key, value in value.items() if value is not None}
    return present | {"content": replace_surrogates(value["content"])}


def _counts(message: Message) -> bool:
    """Return whether a message is an answer that counts in the loss."""
    return message["role"] == ANSWERS and message.get("weight", 1) != 0


def _failure(error: Exception, where: str = "") -> BadInputError:
    """Return the error to raise for an exception of a chat template."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return BadInputError("template", f"{where}the chat template fails: {reason}")


class ChatTemplate:
    """Renders conversations as text.

    Args:
      template: the template; None for the tokenizer's own or, if it has none, `PLAIN`.
      source: the file of the template.

    Attributes:
      source: where the template is from, to be printed.
      thinks: whether answers may begin with reasoning between marks.

    Raises:
      InputError: at construction, if the template is not valid.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, source: str = ""):
        own = None if template else chat_template(tokenizer)
        self.template = template or own or PLAIN
        self.source = source if template else "the tokenizer's" if own else "plain"
        self._tokenizer = tokenizer
        self.thinks = OPEN in self.template or CLOSE in self.template
        self._is_marked = bool(MARKED.search(self.template))
        check_chat_template(self.template)

    def texts(self, conversation: Conversation) -> list[list[Segment]]:
        """Return the text of a conversation up to the end of its last answer, in segments.

        The loss counts what the template marks by `{% generation %}`.  In a template without such
        marks, it counts the text that an answer adds to the prompt for it, which is the
        conversation before it, rendered with `add_generation_prompt`; white space after an
        end-of-text token does not count.  A template without marks that changes earlier text when a
        message is added, such as Qwen3's, gives several texts.  Each answer has loss in one of
        them, in which the text before it is the prompt for it.

        Raises:
          BadInputError: if the template cannot render the conversation, or if a template without
            marks changes the prompt for an answer when the answer is added.
        """
        try:
            texts = (
                [self._marked(conversation)] if self._is_marked else self._by_answer(conversation)
            )
        except InputError:
            raise
        except Exception as error:  # the template is a program
            raise _failure(error, f"{conversation.where}: ") from error
        for segments in texts:
            while segments and not segments[-1].has_loss:
                segments.pop()
            if not any(segment.text for segment in segments):
                raise BadInputError(
                    "template", f"{conversation.where}: the chat template renders no answer"
                )
        return texts

    def takes(self, name: str) -> bool:
        """Return whether the template has a variable of this name (or at least the word)."""
        return name.isidentifier() and bool(re.search(rf"\b{name}\b", self.template))

    def reasoning(self, prompt: str, continued: str = "") -> Reasoning | None:
        """Return what separates the reasoning in an answer; None if there is none.

        Args:
          prompt: the text of the prompt.
          continued: the beginning of the answer, if the prompt has it.
        """
        begun = continued.lstrip().startswith(OPEN) and CLOSE not in continued
        is_open = begun or prompt.rstrip().endswith(OPEN)
        return Reasoning(is_open) if self.thinks else None

    def prompt(
        self,
        messages: list[Message],
        *,
        add: bool = True,
        unfinished: bool = False,
        values: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the text of a conversation, and what comes before the next answer.

        Args:
          add: whether to add what comes before an answer.
          unfinished: whether the last message is the beginning of the answer, after whose content
            the text ends.
          values: of other variables of the template, such as `tools` or `enable_thinking`.

        Raises:
          BadInputError: if the template cannot render the conversation.
        """
        options = {"add_generation_prompt": add, "continue_final_message": unfinished}
        try:
            return self._rendered(messages, **options, **values)
        except Exception as error:  # the template is a program
            raise _failure(error) from error

    def _rendered(self, messages: list[Message], **options: Any) -> str:
        return self._tokenizer.apply_chat_template(
            messages, chat_template=self.template, tokenize=False, **options
        )

    def _marked(self, conversation: Conversation) -> list[Segment]:
        text, spans = answer_spans(self._tokenizer, conversation.messages, self.template)
        answers = [message for message in conversation.messages if message["role"] == ANSWERS]
        if not all(map(_counts, answers)):
            if len(spans) != len(answers):
                problem = f"the chat template marks {len(spans)} of {len(answers)} answers"
                raise BadInputError(
                    "template", f"{conversation.where}: {problem}, some of weight 0"
                )
            spans = [span for span, answer in zip(spans, answers, strict=True) if _counts(answer)]
        segments, position = [], 0
        for start, end in spans:
            segments += [Segment(text[position:start], False), Segment(text[start:end], True)]
            position = end
        return segments

    def _by_answer(self, conversation: Conversation) -> list[list[Segment]]:
        messages, texts, last = conversation.messages, [], ""
        end = self._tokenizer.eos_token or ""
        for number, message in enumerate(messages):
            if not _counts(message):
                continue
            prompt = self._rendered(messages[:number], add_generation_prompt=True)
            whole = self._rendered(messages[: number + 1])
            if not whole.startswith(prompt):
                raise BadInputError(
                    "template",
                    f"{conversation.where}: the chat template changes earlier text when message "
                    f"{number + 1} is added; mark the answers in it by {{% generation %}}",
                )
            if end and whole.rstrip().endswith(end):
                whole = whole.rstrip()
            if not texts or not prompt.startswith(last):
                texts, last = [*texts, []], ""
            texts[-1].append(Segment(prompt[len(last) :], False))
            texts[-1].append(Segment(whole[len(prompt) :], True))
            last = whole
        return texts


def read_template(tokenizer: Any, path: str | None) -> ChatTemplate | None:
    """Return the chat template that `--chat-template` chooses; None if `path` is None.

    Args:
      path: the path of a file, or "plain" for `PLAIN`.

    Raises:
      InputError: if the file cannot be read, or is not a template.
    """
    return None if path is None else ChatTemplate(tokenizer, template_text(path), path)


def template_text(path: str) -> str:
    """Return the chat template in a file, or `PLAIN` if `path` is "plain".

    Raises:
      InputError: if the file cannot be read, or is not a template.
    """
    if path == "plain":
        return PLAIN
    text = text_in(path, "--chat-template")
    try:
        check_chat_template(text)
    except InputError as error:
        raise InputError(f"--chat-template {path}: {error}") from error
    return text


def text_in(path: str, flag: str) -> str:
    """Return the text in a file; an InputError names the flag that gave its path."""
    try:
        with open_file(path) as file:
            return file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"{flag} {path} cannot be read ({reason})") from error


def template_to_chat(tokenizer: Any, choice: str | None) -> ChatTemplate | None:
    """Return the template to chat with; None if the model cannot chat.

    If the tokenizer's own template is not valid, the reason is printed.

    Args:
      choice: as for `read_template`, or "none"; None for the tokenizer's own template, if any.

    Raises:
      InputError: as `read_template`.
    """
    if choice is not None:
        return None if choice == "none" else read_template(tokenizer, choice)
    try:
        return None if chat_template(tokenizer) is None else ChatTemplate(tokenizer)
    except InputError as error:
        print(f"no chat: {error}; or give --chat-template", file=sys.stderr, flush=True)
        return None
