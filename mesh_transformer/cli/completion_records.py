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
import json
import os
from itertools import chain
from typing import Any

from tqdm import tqdm

from mesh_transformer.cli.arguments import (
    Parser,
    add_record_arguments,
    input_help,
    positive,
    ray_workers,
)
from mesh_transformer.data.chat import template_text
from mesh_transformer.data.completions import pack_texts
from mesh_transformer.data.file_types import TABLE_TYPES
from mesh_transformer.data.inputs import BadInputHandler, find_files, format_counts
from mesh_transformer.data.preferences import pack_groups
from mesh_transformer.data.record_offsets import write_offsets
from mesh_transformer.data.rows import Names, RowWork, groups_of_parts, no_pairs_error
from mesh_transformer.data.same_tokenizer import encoding
from mesh_transformer.data.tfrecords import write_set
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.storage import files
from mesh_transformer.storage.access import local_path
from mesh_transformer.util import InputError

PLURALS = ("prompts", "completions", "messages", "chosen answers", "rejected answers", "labels")


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


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    tokenizer: Any = load_tokenizer(options.tokenizer)
    if tokenizer.eos_token is None:
        raise InputError(f"tokenizer {options.tokenizer} has no end-of-text token; give another")
    bad = BadInputHandler(options.skip_bad)
    inputs = find_files(options.input_path, TABLE_TYPES, options.split, options.subset)
    names = Names(*(getattr(options, f"{name}_column") for name in Names._fields))
    kind, end = options.preferences, tokenizer.eos_token_id
    if options.teacher_tokens is not None and kind is not None:
        raise InputError("--teacher-tokens excludes --preferences; leave one of them out")
    chosen = options.chat_template
    folder = local_path(os.path.join(options.output_dir, f"{options.name}.rows.partial"))
    template = ("", "") if chosen is None else (template_text(chosen), chosen)
    own = (options.seq, kind, names, template, options.teacher_tokens or 0)
    work = RowWork(folder, os.getcwd(), tokenizer, *own)
    encoder = work.encoder(bad)
    total = sum(map(files.size, inputs))
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing") as bar,
        ray_workers(options.ray) as workers,
    ):
        if workers is None:
            groups = work.groups(encoder, inputs, bar.update)
        else:
            groups = groups_of_parts(work, workers, encoder, inputs, bar)
        if kind is None:
            texts = chain.from_iterable(groups)
            records = pack_texts(texts, end, options.seq, pack=options.pack)
        else:
            records = pack_groups(groups, end, options.seq, pack=options.pack)
        first = next(records, None)
        if first is None:
            raise no_pairs_error(options.input_path, bad, kind)
        replaced = files.is_file(f"{os.path.join(options.output_dir, options.name)}.index")
        all_records = chain([first], records)
        written, index, count = write_set(
            options.output_dir, options.name, all_records, write_offsets
        )
        if workers is not None:
            files.delete(folder)
    made = {"name": options.tokenizer or "gpt2", "encoding": encoding(tokenizer)}
    path = f"{index.removesuffix('.index')}.manifest.json"
    manifest = {"tokenizer": made} | ({"preferences": kind} if kind else {})
    files.write_text(path, json.dumps(manifest, indent=2) + "\n")
    notes = ["replaced an earlier set of this name"] if replaced else []
    if encoder.template:
        notes.append(f"chat template: {encoder.template.source}")
    if encoder.cut:
        notes.append(f"cut: {encoder.cut} conversations into {encoder.parts} parts")
    if encoder.several:
        notes.append(
            f"{encoder.several} conversations in one text per answer, as the chat template changes "
            "earlier messages"
        )
    if bad.count:
        notes.append(f"skipped: {format_counts(bad.counts)}")
    if encoder.teacher is not None:
        share = f"{encoder.teacher.known:,} of {encoder.teacher.counted:,}"
        notes.append(f"the teacher's probabilities are known for {share} tokens of answers")
    contents = f"{count} records of {options.seq} tokens; listed in {index}"
    print("; ".join([f"{written}: {contents}", *notes]))
