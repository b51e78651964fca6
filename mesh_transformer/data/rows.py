"""Rows of tables as prompts with completions, conversations or preferences, and their texts.

Rows are tokenised here, or file by file on other machines; the texts are the same.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from tqdm import tqdm

from mesh_transformer.data.chat import BESIDE, ChatTemplate, Conversation
from mesh_transformer.data.completions import Encoder, Pair, Text
from mesh_transformer.data.inputs import BadInputError, BadInputHandler, format_counts
from mesh_transformer.data.parts import Collecting, Part, Parts, Result, Work, Workers, report
from mesh_transformer.data.preferences import Answers, encode
from mesh_transformer.data.tables import Columns, rows_of
from mesh_transformer.data.teacher import Alternatives, TeacherTokens
from mesh_transformer.data.tokenizer import fingerprint
from mesh_transformer.storage import files
from mesh_transformer.util import InputError

SHAREGPT = "conversations"  # the column of messages in ShareGPT's format
ALPACA = ("instruction", "output")


class Names(NamedTuple):
    """The names of the columns."""

    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"
    chosen: str = "chosen"
    rejected: str = "rejected"
    label: str = "label"

    @property
    def preferences(self) -> dict[str, tuple[str, str, str]]:
        """The columns of each kind of preferences."""
        return {
            "pairs": (self.prompt, self.chosen, self.rejected),
            "labels": (self.prompt, self.completion, self.label),
        }


def no_pairs_error(path: str, bad: BadInputHandler, kind: str | None = None) -> InputError:
    """Return the error to raise if the files at `path` have no usable row of the expected kind."""
    skipped = f" (skipped: {format_counts(bad.counts)})" if bad.count else ""
    if kind is not None:
        columns = ", ".join(Names().preferences[kind])
        return InputError(f"{path}: found no preferences{skipped}; give rows with {columns}")
    return InputError(
        f'{path}: found no pairs{skipped}; give files with lines like {{"prompt": "...", '
        '"completion": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}'
    )


def read_texts(
    path: str, bad: BadInputHandler, progress: Callable[[int], object], names: Names
) -> Iterator[Pair | Conversation]:
    """Yield the pair or conversation in each row of a file; see `rows_of` for the arguments."""
    flags = "name the columns with --messages-column, or --prompt-column and --completion-column"
    choices = ((names.messages,), (names.prompt, names.completion), (SHAREGPT,), ALPACA)
    columns = Columns(choices, flags, BESIDE)
    for where, value in rows_of(path, columns, bad, progress):
        try:
            yield _text(value, where, names)
        except BadInputError as error:
            bad(error)


def read_preferences(
    path: str, kind: str, bad: BadInputHandler, progress: Callable[[int], object], names: Names
) -> Iterator[Answers]:
    """Yield the prompt and answers in each row of a file; `kind` is "pairs" or "labels"."""
    columns = names.preferences[kind]
    of = {"pairs": Answers.of_pair, "labels": Answers.of_label}[kind]
    choices = (columns, columns[1:])  # conversations may have no column of prompts
    flags = "name the columns with --prompt-column, --chosen-column and so on"
    for where, value in rows_of(path, Columns(choices, flags), bad, progress):
        try:
            yield of(value, where, columns)
        except BadInputError as error:
            bad(error)


def _text(value: Any, where: str, names: Names) -> Pair | Conversation:
    """Return the pair or conversation in a row; see `Pair.of` for the errors."""
    keys = value.keys() if isinstance(value, dict) else ()
    logprobs = value["logprobs"] if "logprobs" in keys else None
    if names.messages in keys:
        return Conversation.of(value[names.messages], where, value)._replace(logprobs=logprobs)
    if not {names.prompt, names.completion} <= set(keys):
        if SHAREGPT in keys:
            return Conversation.of(value[SHAREGPT], where, value)
        if set(ALPACA) <= set(keys):
            return Conversation.of_instruction(value, where)
    return Pair.of(value, where, names.prompt, names.completion)._replace(logprobs=logprobs)


def read_pairs(
    path: str, bad: BadInputHandler, progress: Callable[[int], object]
) -> Iterator[Pair]:
    """Yield the pair in each row of a file; see `read_texts`."""
    for text in read_texts(path, bad, progress, Names()):
        if isinstance(text, Pair):
            yield text
        else:
            bad(BadInputError("no pair", f"{text.where}: expected a prompt and a completion"))


Group = list[Text]  # the texts of a row, which a record holds together


@dataclasses.dataclass(frozen=True)
class RowWork(Work):
    """How rows are tokenised.

    Attributes:
      tokenizer: a tokenizer of transformers.
      seq: the maximum number of tokens of a text.
      kind: of preferences; None for pairs and conversations.
      names: the names of the columns.
      template: the chat template that was given, and its source; both empty if there was none.
      teacher_tokens: the number of tokens that a teacher finds most likely; 0 for no teacher.
    """

    tokenizer: Any
    seq: int
    kind: str | None
    names: Names
    template: tuple[str, str] = ("", "")
    teacher_tokens: int = 0

    @functools.cached_property
    def settings(self) -> list[Any]:
        own = (self.seq, self.kind, self.names, self.template, self.teacher_tokens)
        return [fingerprint(self.tokenizer), *own]

    def encoder(self, bad: BadInputHandler) -> Encoder:
        """Return what tokenises the rows."""
        text, source = self.template
        template = ChatTemplate(self.tokenizer, text, source) if text else None
        count = self.teacher_tokens
        teacher = TeacherTokens(self.tokenizer, count) if count else None
        return Encoder(self.tokenizer, self.seq, bad, template, teacher)

    def groups(
        self, encoder: Encoder, paths: Iterable[str], progress: Callable[[int], object]
    ) -> Iterator[Group]:
        """Yield the texts of the rows of files; see `rows_of` for `progress`."""
        if self.kind is None:
            read = functools.partial(read_texts, bad=encoder.bad, progress=progress)
            items = (row for path in paths for row in read(path, names=self.names))
            yield from ([text] for text in encoder.texts(items))
            return
        read = functools.partial(read_preferences, bad=encoder.bad, progress=progress)
        for path in paths:  # a prompt with a label gets the answer to another one of its file
            yield from encode(encoder, read(path, kind=self.kind, names=self.names))

    def reader(self) -> "_RowReader":
        return _RowReader(self)


class _RowReader:
    """Tokenises the rows of one file after another; see `Reader`."""

    contents: ClassVar[tuple[str, ...]] = ("groups",)

    def __init__(self, work: RowWork):
        self._work = work

    def result(self, part: Part, folder: Path) -> Result:
        bad = Collecting()
        encoder, result = self._work.encoder(bad), Result()
        try:
            with open(folder / "groups", "w", encoding="utf-8") as file:
                for group in self._work.groups(encoder, [part.path], lambda _: None):
                    result.documents += 1
                    result.tokens += sum(len(text.tokens) for text in group)
                    file.write(json.dumps([_stored(text) for text in group]) + "\n")
        except InputError as error:
            result.failure = str(error)
        result.skipped, result.errors = dict(bad.counts), bad.errors
        result.counts = {name: getattr(encoder, name) for name in COUNTS}
        result.counts["templates"] = int(encoder.template is not None)
        if encoder.teacher is not None:
            result.counts |= {name: getattr(encoder.teacher, name) for name in TEACHER_COUNTS}
        return result


COUNTS = ("cut", "parts", "several")  # of an `Encoder`
TEACHER_COUNTS = ("known", "counted")  # of `TeacherTokens`


def _stored(text: Text) -> list[Any]:
    """Return a text as JSON values; f32 numbers keep their bits."""
    teacher = text.teacher and [array.tolist() for array in text.teacher]
    return [text.tokens, [int(has_loss) for has_loss in text.has_loss], text.place, teacher]


def _restored(value: list[Any]) -> Text:
    tokens, has_loss, place, teacher = value
    if teacher is not None:
        ids, logprobs = teacher
        teacher = Alternatives(np.array(ids, np.int64), np.array(logprobs, np.float32))
    return Text(tokens, [bool(one) for one in has_loss], place, teacher)


def groups_of_parts(
    work: RowWork, workers: Workers, encoder: Encoder, paths: Iterable[str], bar: tqdm
) -> Iterator[Group]:
    """Yield what `RowWork.groups` yields, and count as it does, by means of workers.

    Args:
      encoder: has the counts, and is called for rows that cannot be used.
    """
    parts = Parts(work, workers)
    whole = (Part(path, *files.status(path)) for path in paths)
    for part, result in parts.in_order(whole, bar):
        report(part, result, 0, encoder.bad)
        with parts.content(part, result) as file:
            for line in file:
                yield [_restored(value) for value in json.loads(line)]
        for name in COUNTS:
            setattr(encoder, name, getattr(encoder, name) + result.counts[name])
        if result.counts["templates"]:
            encoder.template = encoder.template or ChatTemplate(work.tokenizer)
        if encoder.teacher is not None:
            for name in TEACHER_COUNTS:
                total = getattr(encoder.teacher, name) + result.counts[name]
                setattr(encoder.teacher, name, total)
