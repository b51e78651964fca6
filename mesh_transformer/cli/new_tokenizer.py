"""Train a tokenizer on text, or on a sample of it, for a model trained from scratch on it."""

import argparse
import contextlib
from collections.abc import Iterator

from tqdm import tqdm

from mesh_transformer.checkpoint.atomic_folder import atomic_folder
from mesh_transformer.cli.arguments import (
    Parser,
    add_input_arguments,
    add_ray_argument,
    add_text_column,
    byte_count,
    input_help,
    positive,
    ray_workers,
)
from mesh_transformer.data.cuts import GPT2_CUTS
from mesh_transformer.data.documents import TEXT_COLUMN, read_pieces, recut
from mesh_transformer.data.file_types import FILE_TYPES
from mesh_transformer.data.inputs import BadInputHandler, find_files
from mesh_transformer.data.split import sample
from mesh_transformer.data.tokenizer import (
    END_OF_TEXT,
    character_tokenizer,
    make_portable,
    train_tokenizer,
)
from mesh_transformer.storage.access import check_absent
from mesh_transformer.storage.files import delete, size
from mesh_transformer.util import InputError

SIZE = 4096  # default number of tokens of kind bpe


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("text", help=input_help(FILE_TYPES))
    parser.add_argument("folder", help="output folder, which must not exist")
    parser.add_argument(
        "--kind",
        choices=("bpe", "characters"),
        default="bpe",
        help="byte-level BPE, like GPT-2's tokenizer, or one token per character (default "
        "%(default)s); the tokenizer of bytes needs no training: --tokenizer bytes",
    )
    parser.add_argument(
        "--size",
        type=positive,
        metavar="N",
        help=f"maximum number of tokens of kind bpe (default {SIZE}); GPT-2's tokenizer has 50257",
    )
    parser.add_argument(
        "--sample",
        type=byte_count,
        metavar="BYTES",
        help="amount of text to train on, such as 500MB or 10GB, in documents chosen at random "
        "(default: all of it)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of --sample (default %(default)s)"
    )
    add_text_column(parser)
    add_ray_argument(parser)
    add_input_arguments(parser)
    return parser.parse_args(arguments)


def texts(paths: list[str], column: str, skip_bad: bool) -> Iterator[str]:
    """Yield the text of files, piece by piece, and show a progress bar; see `read_pieces`."""
    bad = BadInputHandler(skip_bad)
    with tqdm(unit="B", unit_scale=True, desc="reading") as bar:
        bar.total = sum(map(size, paths))
        for file in paths:
            pieces = read_pieces(file, END_OF_TEXT, bad, bar.update, column)
            yield from (piece.text for piece in recut(pieces, GPT2_CUTS))


@contextlib.contextmanager
def _chosen(args: argparse.Namespace, paths: list[str]) -> Iterator[tuple[list[str], str]]:
    """Yield the files to train on, and the column of their text."""
    if args.sample is None:
        yield paths, args.text_column
        return
    work = f"{args.folder.rstrip('/')}.sample.partial"
    choice = {"size": args.sample, "seed": args.seed, "skip_bad": args.skip_bad}
    try:
        with ray_workers(args.ray) as workers:
            path = sample(paths, work, **choice, column=args.text_column, workers=workers)
        yield (paths, args.text_column) if path is None else ([path], TEXT_COLUMN)
    except BaseException:
        if args.ray is None:  # otherwise the same command continues with the parts in the folder
            delete(work)
        raise
    delete(work)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.kind == "characters" and args.size is not None:
        raise InputError("--size is for --kind bpe; remove --size or --kind characters")
    if args.ray is not None and args.sample is None:
        raise InputError("--ray is for choosing a sample; add --sample BYTES, or remove --ray")
    check_absent(args.folder)
    paths = find_files(args.text, FILE_TYPES, args.split, args.subset)
    with _chosen(args, paths) as (chosen, column):
        pieces = texts(chosen, column, args.skip_bad)
        if args.kind == "characters":
            tokenizer = character_tokenizer(pieces)
        else:
            tokenizer = train_tokenizer(pieces, args.size or SIZE)
    with atomic_folder(args.folder) as folder:
        tokenizer.save_pretrained(folder)
        make_portable(folder)
    print(f"{args.folder}: a tokenizer with {len(tokenizer):,} tokens")
