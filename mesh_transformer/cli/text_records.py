"""Text files and archives to token records, in the original's format.

Documents are tokenised once, in order of file, into a folder beside the result; shuffling and
packing then move only their numbers, so a corpus may be larger than memory.  Stopped at any
moment, the same command goes on, and the result is the same to the byte.  For one epoch the
sequences, and with the same seed and file order their order, are the original's.  Original: the
tokens left over after a shuffled epoch, and a last sequence that was exactly full, were lost; here
they begin the next epoch.
"""

import argparse
import collections
import contextlib
import dataclasses
import fcntl
import random
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from mesh_transformer.data.corpus import PROGRESS, Corpus, Source, Tokenizing
from mesh_transformer.data.documents import FILE_TYPES, cleaner, find_files, told
from mesh_transformer.data.packing import Order, publish, sequences, write_parts
from mesh_transformer.data.tokenizer import fingerprint, load_tokenizer
from mesh_transformer.util import InputError, run_script

# Options on which the result depends; the rest of it is in the files of text.
SETTINGS = (
    "seq",
    "normalize_with_ftfy",
    "normalize_with_wikitext_detokenize",
    "min_unique_tokens",
    "n_repack_epochs",
    "seed",
    "preserve_data_order",
    "sequences_per_file",
)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the model's training records from text.")
    parser.add_argument(
        "input_path",
        help="a file or a folder of .txt, .jsonl, .jsonl.zst, .xz and .tar.gz files",
    )
    parser.add_argument(
        "name", help="writes NAME_<number of sequences>.tfrecords, NAME.index, NAME.manifest.json"
    )
    parser.add_argument("--output-dir", default=".", help="default: the current folder")
    parser.add_argument("--seq", type=positive, default=2048, help="the config's seq (%(default)s)")
    parser.add_argument("--tokenizer", help="a folder or a hub name; default: gpt2")
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out, and count, documents and parts of files that cannot be used",
    )
    parser.add_argument(
        "--new", action="store_true", help="drop what a stopped run of the same name has done"
    )
    parser.add_argument(
        "--sequences-per-file",
        type=positive,
        metavar="N",
        help="write files of N, NAME_<file>_<N>.tfrecords (default: all in one)",
    )
    add_cleaning(parser)
    packing = parser.add_argument_group("order and packing")
    packing.add_argument(
        "--n-repack-epochs",
        type=positive,
        default=1,
        help="write the text this many times, shuffled and packed anew each time",
    )
    packing.add_argument("--seed", type=int, default=10, help="of the shuffles (%(default)s)")
    packing.add_argument("--preserve-data-order", action="store_true", help="do not shuffle")
    parser.add_argument("--verbose", action="store_true", help="print the sequences left out")
    return parser.parse_args(arguments)


def add_cleaning(parser: argparse.ArgumentParser) -> None:
    cleaning = parser.add_argument_group("cleaning")
    cleaning.add_argument("--normalize-with-ftfy", action="store_true", help="repair garbled text")
    cleaning.add_argument(
        "--normalize-with-wikitext-detokenize",
        action="store_true",
        help="undo WikiText's spaces around punctuation",
    )
    cleaning.add_argument(
        "--min-unique-tokens",
        type=int,
        default=0,
        help="leave out sequences with fewer different tokens, whose gradients can be large; "
        "200 is a good value, 0 (the default) keeps all",
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


@contextlib.contextmanager
def work_folder(folder: Path, new: bool) -> Iterator[None]:
    """Makes the folder in which a set is made, and holds it against other runs.

    It is removed at the end, and after an error before any progress was saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{folder}: another run is at work there; wait for it") from error
        if new or not (folder / PROGRESS).exists():
            for path in folder.iterdir():
                if path.name != "lock":
                    path.unlink()
        try:
            yield
        except InputError:
            if not (folder / PROGRESS).exists():
                shutil.rmtree(folder)
            raise
        # First, as without it whoever finds the rest begins anew.
        (folder / PROGRESS).unlink(missing_ok=True)
        shutil.rmtree(folder)


def make(options: argparse.Namespace, tokenizer, base: Path, work: Path) -> str:
    """Makes the set in the folder `work` and publishes it as `base`; says what it is."""
    settings: dict[str, Any] = {key: getattr(options, key) for key in SETTINGS}
    of_tokenizer = {"name": options.tokenizer or "gpt2", "sha256": fingerprint(tokenizer)}
    generator = random.Random(options.seed)
    files = find_files(options.input_path, FILE_TYPES)
    if not options.preserve_data_order:
        generator.shuffle(files)
    tokenizing = Tokenizing(
        work,
        files,
        tokenizer,
        settings | {"tokenizer": of_tokenizer["sha256"]},
        cleaner(options.normalize_with_ftfy, options.normalize_with_wikitext_detokenize),
        options.skip_bad,
    )
    corpus = tokenizing.run()
    skipped = skipped_in(tokenizing.progress.sources)
    found = sequences(corpus, order_of(options), tokenizer, generator)
    first = next(found, None)
    if first is None:
        (work / PROGRESS).unlink()  # to go on would end here again
        raise nothing_found(options, corpus, skipped)
    parts = write_parts(work, chain([first], found), options.sequences_per_file)
    manifest = {
        "tokens_per_sequence": options.seq + 1,
        "documents": len(corpus.sizes),
        "tokens": len(corpus.tokens),
        "skipped": skipped,
        "tokenizer": of_tokenizer,
        "options": settings,
        "sources": [manifested(source) for source in tokenizing.progress.sources],
    }
    index = publish(base, parts, manifest)
    names = index.read_text(encoding="utf-8").split()
    others = f" and {len(names) - 1} others" if len(names) > 1 else ""
    count = sum(written for _, written in parts)
    left_out = f"; left out: {told(skipped)}" if skipped else ""
    made = f"{count} sequences of {options.seq + 1} tokens"
    return f"{base.with_name(names[0])}{others}: {made}; {index} lists it{left_out}"


def order_of(options: argparse.Namespace) -> Order:
    return Order(
        options.seq + 1,
        options.n_repack_epochs,
        not options.preserve_data_order,
        options.min_unique_tokens,
        options.verbose,
    )


def nothing_found(
    options: argparse.Namespace, corpus: Corpus, skipped: dict[str, int]
) -> InputError:
    left_out = f" (left out: {told(skipped)})" if skipped else ""
    if not len(corpus.sizes):
        return InputError(f"{options.input_path}: all its files are empty{left_out}; expected text")
    return InputError(
        f"{options.input_path}: found {len(corpus.tokens)} tokens{left_out}, but no sequence of "
        f"{options.seq + 1} with {max(options.min_unique_tokens, 1)} different ones; add text, or "
        "lower --seq or --min-unique-tokens"
    )


def skipped_in(sources: list[Source]) -> dict[str, int]:
    counts: collections.Counter[str] = collections.Counter()
    for source in sources:
        counts.update(source.skipped)
    return dict(sorted(counts.items()))


def manifested(source: Source) -> dict[str, Any]:
    """What a copy of the file elsewhere has in common with it."""
    values = dataclasses.asdict(source)
    del values["changed"]
    return values


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    tokenizer = load_tokenizer(options.tokenizer)
    if tokenizer.eos_token is None:
        raise InputError(f"tokenizer {options.tokenizer}: has no end-of-text token; choose another")
    base = Path(options.output_dir) / options.name
    work = base.with_name(f"{base.name}.partial")
    try:
        with work_folder(work, options.new):
            said = make(options, tokenizer, base, work)
    except OSError as error:
        where = Path(error.filename or options.output_dir)
        done = "written" if where.is_relative_to(options.output_dir) else "read"
        raise InputError(f"{where}: cannot be {done}: {error.strerror or error}") from error
    print(said)


if __name__ == "__main__":
    run_script(main)
