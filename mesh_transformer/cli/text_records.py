"""Create training records from text.

Tokens and progress are first stored in the folder NAME.partial, where NAME is the name of the
record set.  This folder is in the output folder or, if the output folder is in a bucket, in the
current folder.  If the command is interrupted, the same command resumes, and writes the same bytes
as an uninterrupted run.

The text may be larger than memory, because the tokens stay on disk, and only the indices of
documents and sequences are shuffled in memory.

The records have the format of the original mesh-transformer-jax.  Given the same files in the same
order and the same seed, the sequences and their order are also the same, with one exception.  At
the end of each shuffled epoch, the original drops the incomplete last sequence, or the last
complete one if none is incomplete.  This command drops neither: the tokens of an incomplete
sequence begin the next epoch.
"""

import argparse
import dataclasses

from mesh_transformer.cli.arguments import (
    Parser,
    add_record_arguments,
    add_text_column,
    input_help,
    positive,
    ray_workers,
)
from mesh_transformer.data.file_types import FILE_TYPES
from mesh_transformer.data.inputs import InputSet, find_set, find_sets
from mesh_transformer.data.packing import TextOptions
from mesh_transformer.data.text_set import make_set
from mesh_transformer.data.tfrecords import check_set_name
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.util import InputError


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("input_path", help=input_help(FILE_TYPES))
    parser.add_argument(
        "name",
        nargs="?",
        help="name of the record set, written as NAME_<number of sequences>.tfrecords, NAME.index "
        "and NAME.manifest.json (default: each file or split of a dataset makes a set of its own, "
        "named after it)",
    )
    add_text_column(parser)
    add_record_arguments(parser)
    parser.add_argument(
        "--new",
        action="store_true",
        help="start over instead of resuming an interrupted run of the same name; replace a record "
        "set of that name that was created with other options",
    )
    parser.add_argument(
        "--sequences-per-file",
        type=positive,
        metavar="N",
        help="sequences per file, named NAME_<file>_<N>.tfrecords (default: all in one file)",
    )
    add_cleaning(parser)
    packing = parser.add_argument_group("order and packing")
    packing.add_argument(
        "--n-repack-epochs",
        type=positive,
        default=1,
        help="number of epochs to write, each shuffled and packed anew (default %(default)s)",
    )
    packing.add_argument(
        "--seed", type=int, default=10, help="shuffling seed (default %(default)s)"
    )
    packing.add_argument("--preserve-data-order", action="store_true", help="do not shuffle")
    parser.add_argument("--verbose", action="store_true", help="print skipped sequences")
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
        help="skip sequences with fewer distinct tokens, whose gradients can be large; 200 is a "
        "good value (default 0: keep all)",
    )


def input_sets(options: argparse.Namespace) -> dict[str, InputSet]:
    """Return the input files of each record set to create, by the name of the set.

    Raises:
      InputError: if there is no input, or if two sets would have the same name.
    """
    choice = (options.input_path, FILE_TYPES, options.split, options.subset)
    if options.name:
        return {options.name: find_set(*choice)}
    sets: dict[str, InputSet] = {}
    for inputs in find_sets(*choice):
        if inputs.name in sets:
            raise InputError(
                f"{inputs.files[0]} and {sets[inputs.name].files[0]} would both create the record "
                f"set {inputs.name}; rename one of them, or give a NAME to create one set from all "
                "files"
            )
        sets[inputs.name] = inputs
    return sets


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    tokenizer = load_tokenizer(options.tokenizer)
    if tokenizer.eos_token is None:
        raise InputError(f"tokenizer {options.tokenizer} has no end-of-text token; give another")
    sets = input_sets(options)
    for name in sets:
        check_set_name(name)
    if line := next(iter(sets.values())).left_out:
        print(line)
    names = [field.name for field in dataclasses.fields(TextOptions)]
    chosen = TextOptions(**{name: getattr(options, name) for name in names})
    with ray_workers(options.ray) as workers:
        for name, inputs in sets.items():
            print(make_set(chosen, name, inputs, tokenizer, workers))
