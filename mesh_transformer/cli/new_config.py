"""Write a config for training on given records, with values that suit the text and the devices."""

import argparse
import json
from pathlib import Path
from typing import Any

from mesh_transformer.cli.arguments import (
    TOPOLOGY_HELP,
    Parser,
    above_0,
    add_batch_tokens,
    add_setting_argument,
    settings,
)
from mesh_transformer.config import Config
from mesh_transformer.families import SIZES
from mesh_transformer.storage import files
from mesh_transformer.storage.access import check_absent
from mesh_transformer.util import InputError

CPU_MINUTES = 10


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--train", required=True, help="index or folder of the training records")
    parser.add_argument(
        "--val", help="index or folder of the validation records (default: no validation)"
    )
    parser.add_argument("--output", required=True, help="config file to write, such as my.json")
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--base", help="model to fine-tune: model folder, step_N, Hugging Face folder or GGUF file"
    )
    model.add_argument(
        "--size",
        choices=[size.name for size in SIZES],
        help="size of a model to train from scratch (default: by the amount of text)",
    )
    parser.add_argument(
        "--base-config",
        default="6B_roto_256",
        help="config of the --base, if it is a checkpoint of mesh-transformer-jax (default "
        "%(default)s, GPT-J-6B's)",
    )
    parser.add_argument(
        "--epochs",
        type=above_0,
        help="how often to train on each sequence (default 4, with --base 1)",
    )
    parser.add_argument(
        "--minutes",
        type=above_0,
        help=f"longest time of training on a CPU (default {CPU_MINUTES})",
    )
    parser.add_argument(
        "--tokenizer", help="tokenizer of the records (default: the one they were created with)"
    )
    parser.add_argument(
        "--topology",
        help=f"devices to train on (default: this machine's): {TOPOLOGY_HELP}",
    )
    add_batch_tokens(
        parser,
        "mp, ZeRO, remat and microbatches are then the fastest on paper that fit (default: by the "
        "amount of text)",
    )
    add_setting_argument(parser)
    return parser.parse_args(arguments)


def check_same_tokenizer(train: str, val: str) -> None:
    """Raise InputError if training and validation records were created with different tokenizers.

    The check is skipped if either tokenizer is unknown.  Two names may be of the same tokenizer.
    """
    from mesh_transformer.data.record_set import manifest_tokenizer

    made = [manifest_tokenizer(index) for index in (train, val)]
    names, digests = ([entry.get(key) for entry in made] for key in ("name", "encoding"))
    same = digests[0] == digests[1] if None not in digests else names[0] == names[1]
    if None not in names and not same:
        raise InputError(
            f"{val} was created with the tokenizer {names[1]}, but {train} with {names[0]}; create "
            "both with the same --tokenizer"
        )


def tokenizer_keys(name: str | None) -> dict[str, Any]:
    """Return the values of the config keys `tokenizer` and `n_vocab` for a tokenizer.

    `n_vocab` is the tokenizer's number of tokens, rounded up to a multiple of 256.  If `name` is
    None or "gpt2", the dict is empty, so that the config keeps its own values.
    """
    if name in (None, "gpt2"):
        return {}
    from mesh_transformer.data.tokenizer import load_tokenizer

    return {"tokenizer": name, "n_vocab": -(-len(load_tokenizer(name)) // 256) * 256}


def text_of(values: dict[str, Any], path: str) -> str:
    """Return the text of a config file, which is YAML if its name ends so, otherwise JSON."""
    if path.endswith((".yaml", ".yml")):
        import yaml

        return yaml.safe_dump(values, sort_keys=False)  # JSON's 6e-05 is not a number in YAML
    return json.dumps(values, indent=2) + "\n"


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)

    from mesh_transformer.checkpoint.formats import HUGGING_FACE
    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.data.record_set import check_tokenizer, set_size, tokenizer_of
    from mesh_transformer.data.same_tokenizer import check_encoding
    from mesh_transformer.performance import recipe
    from mesh_transformer.performance.topology import slice_named, this_machine

    check_absent(args.output)
    base, source = None, Source(args.base) if args.base else None
    if args.val:
        check_same_tokenizer(args.train, args.val)
    if source is None:
        changes = tokenizer_keys(args.tokenizer or tokenizer_of(args.train))
    else:
        is_original = source.kind == "original"  # which stores no config
        base = Config.load(args.base_config) if is_original else source.config
        own = base.tokenizer if is_original else source.tokenizer
        changes = {"tokenizer": args.tokenizer or own or tokenizer_of(args.train) or "gpt2"}
        check_encoding(own, None, changes["tokenizer"], f"--base {args.base}")
        check_tokenizer(args.train, changes["tokenizer"])
    changes |= settings(args)
    corpus, held_out = set_size(args.train), set_size(args.val) if args.val else None
    native = source is not None and source.kind not in HUGGING_FACE
    if base is not None and native and base.pe == "fixed" and corpus.seq < base.seq:
        raise InputError(
            f"--base {args.base}: the model has learned {base.seq} positions, but the records have "
            f"{corpus.seq} tokens; recreate them with --seq {base.seq}"
        )
    device = recipe.device_of(slice_named(args.topology) if args.topology else this_machine())
    result = recipe.recipe(
        corpus,
        held_out,
        device,
        base=base,
        size=args.size,
        epochs=args.epochs,
        minutes=args.minutes or CPU_MINUTES,
        changes=changes,
        batch_tokens=args.batch_tokens,
    )
    name = Path(args.output).stem
    paths = {"bucket": "./runs", "model_dir": name, "train_set": args.train, "name": name}
    paths |= {"val_set": {"val": args.val}} if args.val else {}
    paths |= {"tune_model_path": args.base} if args.base else {}
    if not args.topology:  # another machine may lack the tokenizer
        paths["sample_prompts"] = [""]
    try:
        files.write_text(args.output, text_of(paths | result.values, args.output))
    except OSError as error:
        raise InputError(
            f"{args.output} cannot be written ({error.strerror}); choose another --output"
        ) from error
    print("\n".join(result.reasons))
    print(f"next: mesh-transformer train --config {args.output}")
