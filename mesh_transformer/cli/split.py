"""Split text files into a training and a validation part; each document is assigned at random."""

import argparse

from mesh_transformer.cli.arguments import (
    Parser,
    add_input_arguments,
    add_text_column,
    input_help,
)
from mesh_transformer.data.file_types import FILE_TYPES
from mesh_transformer.data.inputs import find_files, left_out
from mesh_transformer.data.split import NAMES, split


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("text", help=input_help(FILE_TYPES))
    parser.add_argument("folder", help="output folder of train.jsonl.zst and val.jsonl.zst")
    parser.add_argument(
        "--validation",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="share of the text for validation, between 0 and 1 (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default %(default)s)")
    add_text_column(parser)
    add_input_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    parts = split(
        args.text,
        args.folder,
        validation=args.validation,
        seed=args.seed,
        skip_bad=args.skip_bad,
        column=args.text_column,
        files=find_files(args.text, FILE_TYPES, args.split, args.subset),
    )
    total = sum(part.bytes for part in parts)
    for name, part in zip(NAMES, parts, strict=True):
        share = f"{part.bytes:,} bytes ({part.bytes / total:.1%})"
        noun = "document" if part.documents == 1 else "documents"
        print(f"{name:6} {share} in {part.documents:,} {noun}: {part.path}")
    if line := left_out(args.text, FILE_TYPES):
        print(line)
