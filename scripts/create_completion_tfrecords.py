"""Prompts and their completions to token records in which the completions alone bear loss.

Each line of the input is a JSON object with the strings `prompt` and `completion`; whatever is to
stand between the two belongs to one of them.  A record is one such pair, the end-of-text token and
padding: the features `input_ids`, `labels` (the tokens after them) and `input_mask` (1 where a
label is of the completion or ends it), as in Cerebras' records.  Records keep the lines' order.
"""

import argparse
import io
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import zstandard
from text_documents import find_files, json_value, opened, whole_characters
from tqdm import tqdm

from mesh_transformer.record_files import write_set
from mesh_transformer.tokenizer import load_tokenizer
from mesh_transformer.util import InputError, run_script

FILE_TYPES = (".jsonl", ".jsonl.zst")
TOGETHER = 1000  # pairs in one call of the tokenizer, which spreads them over the cores


class Pair(NamedTuple):
    where: str
    prompt: str
    completion: str


class Bad:
    """What becomes of a line that cannot be used: an error, or `--skip-bad`'s count."""

    def __init__(self, skip: bool):
        self.skip, self.count = skip, 0

    def __call__(self, error: InputError) -> None:
        if not self.skip:
            raise InputError(f"{error}; mend it, or leave such lines out with --skip-bad")
        tqdm.write(f"left out: {error}")
        self.count += 1


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
        "--skip-bad", action="store_true", help="leave out, and count, lines that cannot be used"
    )
    return parser.parse_args(arguments)


def read_pairs(path: str, bad: Bad, progress: Callable[[int], object]) -> Iterator[Pair]:
    """The pairs of a file; `progress` is told of its bytes as they are read."""
    with opened(path) as raw:
        stream = raw
        if path.endswith(".zst"):
            decompressor = zstandard.ZstdDecompressor()
            stream = io.BufferedReader(decompressor.stream_reader(raw, read_across_frames=True))
        before = 0
        for number, line in enumerate(stream, 1):
            progress(raw.tell() - before)
            before = raw.tell()
            if line.strip():
                try:
                    yield parsed(line, f"{path}: line {number}")
                except InputError as error:
                    bad(error)


def parsed(line: bytes, where: str) -> Pair:
    """One line's pair; InputError naming the line where it is none."""
    try:
        value = json_value(line.decode(), where)
    except UnicodeDecodeError as error:
        found = error.object[error.start : error.end]
        raise InputError(f"{where} holds the bytes {found!r}, expected UTF-8 text") from error
    found = value if isinstance(value, dict) else {}
    texts = [found[key] for key in Pair._fields[1:] if isinstance(found.get(key), str)]
    if len(texts) < 2 or not texts[1]:
        raise InputError(f"{where}: expected strings prompt and completion, the latter not empty")
    return Pair(where, *map(whole_characters, texts))


def records(
    pairs: Iterable[Pair], tokenizer, seq: int, bad: Bad
) -> Iterator[dict[str, np.ndarray]]:
    """The pairs as records."""

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    pairs = iter(pairs)
    while batch := list(islice(pairs, TOGETHER)):
        prompts, completions = (encode([pair[at] for pair in batch]) for at in (1, 2))
        for pair, prompt, completion in zip(batch, prompts, completions, strict=True):
            try:
                yield record(prompt, completion, tokenizer.eos_token_id, seq, pair.where)
            except InputError as error:
                bad(error)


def record(
    prompt: list[int], completion: list[int], end: int, seq: int, where: str
) -> dict[str, np.ndarray]:
    """One pair as the model reads it; InputError naming its line where it is too long."""
    tokens = [*prompt, *completion, end]
    if len(tokens) > seq + 1:
        raise InputError(
            f"{where}: {len(prompt)} tokens of prompt and {len(completion)} of completion, "
            f"--seq {seq} has room for {seq} together"
        )
    padded = np.array(tokens + [end] * (seq + 1 - len(tokens)))
    labels = np.arange(1, seq + 1)  # whose places in `padded` these are
    mask = (labels >= len(prompt)) & (labels < len(tokens))
    return {"input_ids": padded[:-1], "labels": padded[1:], "input_mask": mask.astype(int)}


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
        rows = records(pairs, tokenizer, options.seq, bad)
        first = next(rows, None)
        if first is None:
            raise InputError(f"{options.input_path}: found no pairs, and {bad.count} bad lines")
        written, index, count = write_set(options.output_dir, options.name, chain([first], rows))
    left_out = f"; {bad.count} lines left out" if bad.count else ""
    print(f"{written}: {count} records of {options.seq} tokens; {index} lists it{left_out}")


if __name__ == "__main__":
    run_script(main)
