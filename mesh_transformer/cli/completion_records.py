"""Create training records from prompts and completions, or chats, with loss on the answers only.

A row of a table is a pair or a conversation:

* A pair has the strings `prompt` and `completion`.  The two are tokenised separately and joined
  without a separator, so include any space or newline between them in one of the strings.
* A conversation has `messages`, a list of objects with the strings `role` and `content`.  A chat
  template renders it as text (see `data/chat.py`), and the loss counts each message with the role
  `assistant`.  The text is tokenised as a whole, and a token counts if it has a character of an
  answer.  A conversation that is too long for a record is cut into several after answers.

ShareGPT's `conversations`, whose messages have `from` and `value`, and Alpaca's `instruction`,
`input`, `output` and `history` are conversations too.  A column `system` is their system message.

A record holds the text, the end-of-text token, and padding.  Its features are `input_ids`, `labels`
(the next tokens) and `input_mask`, which is 1 where the label counts in the loss.

With `--pack`, a record holds as many texts as fit, which wastes less computation on padding.  An
additional feature, `segment_ids`, numbers the texts in a record.  Texts do not attend to each
other, so each trains as it would in its own record.

With `--teacher-tokens`, records also have the tokens that a teacher finds most likely at each
position (see `data/teacher.py`).

With `--preferences`, a record holds the texts of a prompt with its answers (see
`data/preferences.py`), which are strings, or lists of messages for the chat template.

Records are in the order of the rows.
"""

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from tqdm import tqdm

from mesh_transformer.cli.arguments import Parser, add_record_arguments, input_help, positive
from mesh_transformer.data.chat import BESIDE, Conversation, read_template
from mesh_transformer.data.completions import Encoder, Pair, pack_texts
from mesh_transformer.data.file_types import TABLE_TYPES
from mesh_transformer.data.inputs import (
    BadInputError,
    BadInputHandler,
    find_files,
    format_counts,
)
from mesh_transformer.data.preferences import Answers, encode, pack_groups
from mesh_transformer.data.same_tokenizer import encoding
from mesh_transformer.data.tables import Columns, rows_of
from mesh_transformer.data.teacher import TeacherTokens
from mesh_transformer.data.tfrecords import write_set
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.storage import files
from mesh_transformer.util import InputError

SHAREGPT = "conversations"  # the column of messages in ShareGPT's format
ALPACA = ("instruction", "output")
PLURALS = ("prompts", "completions", "messages", "chosen answers", "rejected answers", "labels")


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


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("input_path", help=input_help(TABLE_TYPES))
    parser.add_argument(
        "name",
        help="name of the record set, written as NAME_<number of records>.tfrecords and NAME.index",
    )
    add_record_arguments(parser)
    for name, plural in zip(Names._fields, PLURALS, strict=True):
        parser.add_argument(
            f"--{name}-column",
            default=name,
            metavar="NAME",
            help=f"column of the {plural}, or their key in .jsonl files (default %(default)s)",
        )
    parser.add_argument(
        "--preferences",
        choices=tuple(Names().preferences),
        help="the rows have a prompt with a chosen and a rejected answer, or a prompt with a "
        "completion and its label, true or false; for the config key objective",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja template of conversations, or plain (default: the tokenizer's, or else plain)",
    )
    parser.add_argument(
        "--teacher-tokens",
        type=positive,
        metavar="K",
        help="store the K tokens that a teacher finds most likely, from the column logprobs of "
        "`answers --top-logprobs`; for the config key teacher",
    )
    parser.add_argument(
        "--pack",
        action="store_true",
        help="put as many texts into a record as fit; they do not attend to each other",
    )
    return parser.parse_args(arguments)


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


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    tokenizer: Any = load_tokenizer(options.tokenizer)
    if tokenizer.eos_token is None:
        raise InputError(f"tokenizer {options.tokenizer} has no end-of-text token; give another")
    bad = BadInputHandler(options.skip_bad)
    template = read_template(tokenizer, options.chat_template)
    inputs = find_files(options.input_path, TABLE_TYPES, options.split, options.subset)
    names = Names(*(getattr(options, f"{name}_column") for name in Names._fields))
    kind, end = options.preferences, tokenizer.eos_token_id
    teacher = None
    if options.teacher_tokens is not None:
        if kind is not None:
            raise InputError("--teacher-tokens excludes --preferences; leave one of them out")
        teacher = TeacherTokens(tokenizer, options.teacher_tokens)
    encoder = Encoder(tokenizer, options.seq, bad, template, teacher)
    total = sum(map(files.size, inputs))
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing") as bar:
        if kind is None:
            rows = (row for file in inputs for row in read_texts(file, bad, bar.update, names))
            records = pack_texts(encoder.texts(rows), end, options.seq, pack=options.pack)
        else:
            read = functools.partial(read_preferences, kind=kind, names=names)
            answers = (row for f in inputs for row in read(f, bad=bad, progress=bar.update))
            records = pack_groups(encode(encoder, answers), end, options.seq, pack=options.pack)
        first = next(records, None)
        if first is None:
            raise no_pairs_error(options.input_path, bad, kind)
        written, index, count = write_set(options.output_dir, options.name, chain([first], records))
    made = {"name": options.tokenizer or "gpt2", "encoding": encoding(tokenizer)}
    path = f"{index.removesuffix('.index')}.manifest.json"
    manifest = {"tokenizer": made} | ({"preferences": kind} if kind else {})
    files.write_text(path, json.dumps(manifest, indent=2) + "\n")
    notes = [f"chat template: {encoder.template.source}"] if encoder.template else []
    if encoder.cut:
        notes.append(f"cut: {encoder.cut} conversations into {encoder.parts} parts")
    if encoder.several:
        notes.append(
            f"{encoder.several} conversations in one text per answer, as the chat template changes "
            "earlier messages"
        )
    if bad.count:
        notes.append(f"skipped: {format_counts(bad.counts)}")
    if teacher is not None:
        share = f"{teacher.known:,} of {teacher.counted:,}"
        notes.append(f"the teacher's probabilities are known for {share} tokens of answers")
    contents = f"{count} records of {options.seq} tokens; listed in {index}"
    print("; ".join([f"{written}: {contents}", *notes]))
