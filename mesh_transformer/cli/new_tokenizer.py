"""Train a tokenizer on text, for a model trained from scratch on the same text."""

import argparse
from collections.abc import Iterator

from tqdm import tqdm

from mesh_transformer.checkpoint.atomic_folder import atomic_folder
from mesh_transformer.cli.arguments import (
    Parser,
    add_input_arguments,
    add_text_column,
    input_help,
    positive,
)
from mesh_transformer.data.cuts import GPT2_CUTS
from mesh_transformer.data.documents import read_pieces, recut
from mesh_transformer.data.file_types import FILE_TYPES
from mesh_transformer.data.inputs import BadInputHandler, find_files
from mesh_transformer.data.tokenizer import (
    END_OF_TEXT,
    character_tokenizer,
    make_portable,
    train_tokenizer,
)
from mesh_transformer.storage.access import check_absent
from mesh_transformer.storage.files import size
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
    add_text_column(parser)
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


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.kind == "characters" and args.size is not None:
        raise InputError("--size is for --kind bpe; remove --size or --kind characters")
    check_absent(args.folder)
    paths = find_files(args.text, FILE_TYPES, args.split, args.subset)
    pieces = texts(paths, args.text_column, args.skip_bad)
    if args.kind == "characters":
        tokenizer = character_tokenizer(pieces)
    else:
        tokenizer = train_tokenizer(pieces, args.size or SIZE)
    with atomic_folder(args.folder) as folder:
        tokenizer.save_pretrained(folder)
        make_portable(folder)
    print(f"{args.folder}: a tokenizer with {len(tokenizer):,} tokens")
