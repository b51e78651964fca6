"""Split text or tables into a training and a validation part, at random by document or row."""

import argparse

from mesh_transformer.cli.arguments import (
    Parser,
    add_input_arguments,
    add_ray_argument,
    add_text_column,
    input_help,
    ray_workers,
)
from mesh_transformer.data.documents import TEXT_COLUMN
from mesh_transformer.data.file_types import FILE_TYPES, TABLE_TYPES
from mesh_transformer.data.inputs import find_set
from mesh_transformer.data.split import NAMES, split
from mesh_transformer.util import InputError


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
    parser.add_argument(
        "--rows",
        action="store_true",
        help="assign whole rows of tables, with all columns, such as prompts and completions or "
        "conversations",
    )
    add_text_column(parser)
    add_ray_argument(parser)
    add_input_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.rows and args.text_column != TEXT_COLUMN:
        raise InputError("--text-column is not used with --rows; remove one of them")
    types = TABLE_TYPES if args.rows else FILE_TYPES
    inputs = find_set(args.text, types, args.split, args.subset)
    if inputs.left_out:
        print(inputs.left_out)
    with ray_workers(args.ray) as workers:
        parts = split(
            args.text,
            args.folder,
            validation=args.validation,
            seed=args.seed,
            skip_bad=args.skip_bad,
            column=args.text_column,
            files=inputs.files,
            rows=args.rows,
            workers=workers,
        )
    total = sum(part.bytes for part in parts)
    for name, part in zip(NAMES, parts, strict=True):
        share = f"{part.bytes:,} bytes ({part.bytes / total:.1%})"
        noun = ("row" if args.rows else "document") + "s" * (part.documents != 1)
        remark = " (replaced)" if part.replaced else ""
        print(f"{name:6} {share} in {part.documents:,} {noun}: {part.path}{remark}")
