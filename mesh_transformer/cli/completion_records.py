"""Prompts and their completions to token records in which the completions alone bear loss.

Each line of the input is a JSON object with the strings `prompt` and `completion`; whatever is to
stand between the two belongs to one of them.  A record is one such pair, the end-of-text token and
padding: the features `input_ids`, `labels` (the tokens after them) and `input_mask` (1 where a
label is of the completion or ends it), as in Cerebras' records.  With `--pack` it is as many pairs
as fit, and `segment_ids` tells them apart: each trains as it would alone, and none waits for the
padding of the others.  Records keep the lines' order.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from mesh_transformer.data.documents import (
    Bad,
    BadInputError,
    find_files,
    json_lines,
    opened,
    told,
    whole_characters,
)
from mesh_transformer.data.tfrecords import write_set
from mesh_transformer.data.tokenizer import encode_batch, load_tokenizer
from mesh_transformer.util import InputError, run_script

FILE_TYPES = (".jsonl", ".jsonl.zst")
TOGETHER = 1000  # pairs in one call of the tokenizer, which spreads them over the cores


class Pair(NamedTuple):
    where: str
    prompt: str
    completion: str


@dataclasses.dataclass(frozen=True)
class Text:
    """A pair's tokens, the end-of-text token last, and how many of them are its prompt."""

    tokens: list[int]
    prompt: int

    def __len__(self) -> int:
        """How many places of a record it takes: the end is foretold, but never read."""
        return len(self.tokens) - 1


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make training records from prompts and completions."
    )
    parser.add_argument("input_path", help="a file or a folder of .jsonl and .jsonl.zst files")
    parser.add_argument("name", help="writes NAME_<number of records>.tfrecords and NAME.index")
    parser.add_argument("--output-dir", default=".", help="default: the current folder")
    parser.add_argument("--seq", type=int, default=2048, help="the config's seq (%(default)s)")
    parser.add_argument("--tokenizer", help="a folder or a hub name; default: gpt2")
    parser.add_argument(
        "--pack", action="store_true", help="as many pairs in a record as fit; none sees another"
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out, and count, lines that cannot be used"
    )
    return parser.parse_args(arguments)


def read_pairs(path: str, bad: Bad, progress: Callable[[int], object]) -> Iterator[Pair]:
    """The pairs of a file; `progress` is told of its bytes as they are read."""
    with opened(path, bad) as raw:
        before = 0
        for where, value in json_lines(raw, path, bad):
            progress(raw.tell() - before)
            before = raw.tell()
            try:
                yield pair_of(value, where)
            except BadInputError as error:
                bad(error)


def pair_of(value: Any, where: str) -> Pair:
    """What one line says as a pair; BadInputError naming the line where it is none."""
    found = value if isinstance(value, dict) else {}
    texts = [found[key] for key in Pair._fields[1:] if isinstance(found.get(key), str)]
    if len(texts) < 2 or not texts[1]:
        raise BadInputError(
            "no pair", f"{where}: expected strings prompt and completion, the latter not empty"
        )
    return Pair(where, *map(whole_characters, texts))


def read_records(
    pairs: Iterable[Pair], tokenizer, seq: int, bad: Bad, *, pack: bool
) -> Iterator[dict[str, np.ndarray]]:
    """The pairs as records: each in one of its own, or as many in each as follow and fit."""
    texts: list[Text] = []
    for text in tokenized(pairs, tokenizer, seq, bad):
        if texts and not (pack and sum(map(len, texts)) + len(text) <= seq):
            yield record(texts, tokenizer.eos_token_id, seq, pack=pack)
            texts = []
        texts.append(text)
    if texts:
        yield record(texts, tokenizer.eos_token_id, seq, pack=pack)


def tokenized(pairs: Iterable[Pair], tokenizer, seq: int, bad: Bad) -> Iterator[Text]:
    """The pairs' tokens; those that are too long are `bad`."""
    pairs = iter(pairs)
    while batch := list(islice(pairs, TOGETHER)):
        prompts, completions = (
            encode_batch(tokenizer, [pair[at] for pair in batch]) for at in (1, 2)
        )
        for pair, prompt, completion in zip(batch, prompts, completions, strict=True):
            text = Text([*prompt, *completion, tokenizer.eos_token_id], len(prompt))
            if len(text) <= seq:
                yield text
            else:
                found = f"{len(prompt)} tokens of prompt and {len(completion)} of completion"
                room = f"--seq {seq} has room for {seq} together"
                bad(BadInputError("too long", f"{pair.where}: {found}, {room}"))


def record(texts: list[Text], end: int, seq: int, *, pack: bool) -> dict[str, np.ndarray]:
    """Texts as the model reads them one after the other, and padding."""
    columns = {
        "input_ids": [text.tokens[:-1] for text in texts],
        "labels": [text.tokens[1:] for text in texts],
        "input_mask": [[at >= text.prompt for at in range(1, len(text) + 1)] for text in texts],
    }
    if pack:  # the padding is segment 0
        columns["segment_ids"] = [[n] * len(text) for n, text in enumerate(texts, 1)]
    padding = dict.fromkeys(columns, 0) | {"input_ids": end, "labels": end}
    return {
        name: np.array([*chain(*parts), *[padding[name]] * (seq - sum(map(len, texts)))], int)
        for name, parts in columns.items()
    }


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if options.seq < 1:
        raise InputError(f"--seq is {options.seq}, expected at least 1")
    tokenizer = load_tokenizer(options.tokenizer)
    if tokenizer.eos_token is None:
        raise InputError(f"tokenizer {options.tokenizer}: has no end-of-text token; choose another")
    bad = Bad(options.skip_bad)
    files = find_files(options.input_path, FILE_TYPES)
    with tqdm(unit="B", unit_scale=True, desc="tokenizing") as bar:
        pairs = (pair for file in files for pair in read_pairs(file, bad, bar.update))
        rows = read_records(pairs, tokenizer, options.seq, bad, pack=options.pack)
        first = next(rows, None)
        if first is None:
            left_out = f" (left out: {told(bad.counts)})" if bad.count else ""
            raise InputError(f"{options.input_path}: found no pairs{left_out}")
        written, index, count = write_set(options.output_dir, options.name, chain([first], rows))
    left_out = f"; left out: {told(bad.counts)}" if bad.count else ""
    print(f"{written}: {count} records of {options.seq} tokens; {index} lists it{left_out}")


if __name__ == "__main__":
    run_script(main)
