"""Create training records from prompts and completions, with loss on the completions only.

Each line of a .jsonl file is an object with the strings `prompt` and `completion`; other tables
have columns of these names, unless other names are given.  The two strings are tokenised separately
and joined without a separator, so include any space or newline between them in one of the strings.

A record holds one prompt, its completion, the end-of-text token, and padding.  Its features are
`input_ids`, `labels` (the next tokens) and `input_mask`, which is 1 where the label is a token of
the completion or the end-of-text token after it.

With `--pack`, a record holds as many pairs of prompt and completion as fit, which wastes less
computation on padding.  An additional feature, `segment_ids`, numbers the pairs in a record.  Pairs
do not attend to each other, so each trains as it would in its own record.

Records are in the order of the input lines.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from mesh_transformer.cli.arguments import Parser, add_record_arguments, input_help
from mesh_transformer.data.documents import unknown_error
from mesh_transformer.data.inputs import (
    BadInputError,
    BadInputHandler,
    find_files,
    format_counts,
    open_input,
)
from mesh_transformer.data.tables import TABLE_TYPES, Columns, read_rows, replace_surrogates
from mesh_transformer.data.tfrecords import write_set
from mesh_transformer.data.tokenizer import alphabet, encode_batch, load_tokenizer
from mesh_transformer.util import InputError

PAIR = ("prompt", "completion")  # default names of the columns
TOKENIZER_BATCH = 1000  # pairs per call of the tokenizer, which uses all cores


class Pair(NamedTuple):
    """A prompt and its completion.

    Attributes:
      where: the file and line of the pair, for error messages.
    """

    where: str
    prompt: str
    completion: str


@dataclasses.dataclass(frozen=True)
class Text:
    """A tokenised pair of prompt and completion.

    Attributes:
      tokens: the tokens of the prompt, those of the completion, and the end-of-text token.
      prompt: the number of tokens in the prompt.
    """

    tokens: list[int]
    prompt: int

    def __len__(self) -> int:
        """Return the number of positions that the pair takes in a record.

        The end-of-text token takes no position, because it is only a label and never an input.
        """
        return len(self.tokens) - 1


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("input_path", help=input_help(TABLE_TYPES))
    parser.add_argument(
        "name",
        help="name of the record set, written as NAME_<number of records>.tfrecords and NAME.index",
    )
    add_record_arguments(parser)
    for name in PAIR:
        parser.add_argument(
            f"--{name}-column",
            default=name,
            metavar="NAME",
            help=f"column of the {name}s, or their key in .jsonl files (default %(default)s)",
        )
    parser.add_argument(
        "--pack",
        action="store_true",
        help="put as many pairs into a record as fit; they do not attend to each other",
    )
    return parser.parse_args(arguments)


def no_pairs_error(path: str, bad: BadInputHandler) -> InputError:
    """Return the error to raise if the files at `path` have no usable prompt and completion.

    Args:
      bad: the handler that has counted the unusable lines, for the message.
    """
    skipped = f" (skipped: {format_counts(bad.counts)})" if bad.count else ""
    return InputError(
        f'{path}: found no pairs{skipped}; give files with lines like {{"prompt": "...", '
        '"completion": "..."}'
    )


def read_pairs(
    path: str,
    bad: BadInputHandler,
    progress: Callable[[int], object],
    names: tuple[str, str] = PAIR,
) -> Iterator[Pair]:
    """Yield the pairs of prompt and completion in a file.

    Args:
      bad: called for each unusable line.
      progress: called repeatedly with the number of bytes read since the previous call.
      names: the names of the columns of the prompts and of the completions.
    """
    columns = Columns((names,), "name the columns with --prompt-column and --completion-column")
    with open_input(path, bad) as raw:
        before = 0
        for where, value in read_rows(raw, path, columns, bad):
            progress(raw.tell() - before)
            before = raw.tell()
            try:
                yield pair_of(value, where, names)
            except BadInputError as error:
                bad(error)


def pair_of(value: Any, where: str, names: tuple[str, str]) -> Pair:
    """Return the prompt and completion of a row.

    Args:
      value: a dict of columns, or the parsed JSON of a line.
      where: the file and the line or row, for the error message.
      names: the names of the columns of the prompts and of the completions.

    Raises:
      BadInputError: if a string is missing or the completion is empty.
    """
    mapping = value if isinstance(value, dict) else {}
    texts = [mapping[key] for key in names if isinstance(mapping.get(key), str)]
    if len(texts) < 2 or not texts[1]:
        raise BadInputError(
            "no pair",
            f"{where}: expected strings `{names[0]}` and `{names[1]}`; only `{names[0]}` may be "
            "empty",
        )
    return Pair(where, *map(replace_surrogates, texts))


def read_records(
    pairs: Iterable[Pair], tokenizer, seq: int, bad: BadInputHandler, *, pack: bool
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the training records of the pairs, each as a dict of features (see `record`).

    Each record holds one pair or, if `pack` is true, as many consecutive pairs as fit.

    Args:
      seq: tokens per record.
      bad: called for each pair that is longer than `seq` tokens.
    """
    texts: list[Text] = []
    for text in tokenized(pairs, tokenizer, seq, bad):
        if texts and not (pack and sum(map(len, texts)) + len(text) <= seq):
            yield record(texts, tokenizer.eos_token_id, seq, pack=pack)
            texts = []
        texts.append(text)
    if texts:
        yield record(texts, tokenizer.eos_token_id, seq, pack=pack)


def tokenized(pairs: Iterable[Pair], tokenizer, seq: int, bad: BadInputHandler) -> Iterator[Text]:
    """Yield the tokenised pairs that fit in `seq` tokens, and call `bad` for each longer pair."""
    pairs = with_known_characters(pairs, tokenizer, bad)
    while batch := list(islice(pairs, TOKENIZER_BATCH)):
        prompts, completions = (
            encode_batch(tokenizer, [pair[field] for pair in batch]) for field in (1, 2)
        )
        for pair, prompt, completion in zip(batch, prompts, completions, strict=True):
            text = Text([*prompt, *completion, tokenizer.eos_token_id], len(prompt))
            if len(text) <= seq:
                yield text
            else:
                length = f"{len(prompt)} tokens of prompt and {len(completion)} of completion"
                limit = f"--seq {seq} has room for {seq} in total"
                bad(BadInputError("too long", f"{pair.where}: {length}, {limit}"))


def with_known_characters(pairs: Iterable[Pair], tokenizer, bad: BadInputHandler) -> Iterator[Pair]:
    """Yield the pairs without characters that the tokenizer lacks, and call `bad` for the others.

    Only tokenizers of characters lack any.
    """
    known = alphabet(tokenizer)
    for pair in pairs:
        text = f"{pair.prompt}{pair.completion}".replace(tokenizer.eos_token, "")
        if known and (error := unknown_error(pair.where, text, known)):
            bad(error)
        else:
            yield pair


def record(texts: list[Text], end: int, seq: int, *, pack: bool) -> dict[str, np.ndarray]:
    """Return a record as a dict from each feature's name to an array of shape [seq].

    Each array holds the values of the first text, then those of the second, and so on, followed by
    padding.  If `pack` is true, the record also has the feature `segment_ids`.

    Args:
      texts: the tokenised pairs in the record; one pair if `pack` is false.
      end: the id of the end-of-text token, which also serves as padding.
    """
    columns = {
        "input_ids": [text.tokens[:-1] for text in texts],
        "labels": [text.tokens[1:] for text in texts],
        "input_mask": [[i >= text.prompt for i in range(1, len(text) + 1)] for text in texts],
    }
    if pack:  # the texts are segments 1, 2 and so on, and the padding is segment 0
        columns["segment_ids"] = [[n] * len(text) for n, text in enumerate(texts, 1)]
    padding = dict.fromkeys(columns, 0) | {"input_ids": end, "labels": end}
    return {
        name: np.array([*chain(*parts), *[padding[name]] * (seq - sum(map(len, texts)))], int)
        for name, parts in columns.items()
    }


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    tokenizer = load_tokenizer(options.tokenizer)
    if tokenizer.eos_token is None:
        raise InputError(f"tokenizer {options.tokenizer} has no end-of-text token; give another")
    bad = BadInputHandler(options.skip_bad)
    files = find_files(options.input_path, TABLE_TYPES, options.split, options.subset)
    names = (options.prompt_column, options.completion_column)
    with tqdm(unit="B", unit_scale=True, desc="tokenizing") as bar:
        pairs = (pair for file in files for pair in read_pairs(file, bad, bar.update, names))
        rows = read_records(pairs, tokenizer, options.seq, bad, pack=options.pack)
        first = next(rows, None)
        if first is None:
            raise no_pairs_error(options.input_path, bad)
        written, index, count = write_set(options.output_dir, options.name, chain([first], rows))
    skipped = f"; skipped: {format_counts(bad.counts)}" if bad.count else ""
    print(f"{written}: {count} records of {options.seq} tokens; listed in {index}{skipped}")
