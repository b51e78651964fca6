"""Convert checkpoints: mesh-transformer-jax's, Hugging Face's, GGUF files and this library's.

Example:
mesh-transformer convert --from original step_383500 --to hf gpt-j --config 6B_roto_256
"""

import argparse
import os
import re
import signal
import sys
from typing import Any

from mesh_transformer.checkpoint.formats import ALL_FORMATS, HUGGING_FACE
from mesh_transformer.checkpoint.host_arrays import FLOATS
from mesh_transformer.cli.arguments import (
    Parser,
    add_config_arguments,
    add_template_argument,
    load_config,
    settings,
)
from mesh_transformer.config import Config
from mesh_transformer.util import InputError, StoppedError


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    old = "a model folder (newest step, or --step), a step_N or a .gguf file"
    new = "a model folder, a step_N in one or a .gguf file, not existing yet"
    for flag, dest, path, places in (
        ("--from", "source", "SRC", old),
        ("--to", "target", "DST", new),
    ):
        parser.add_argument(
            flag,
            dest=dest,
            nargs=2,
            required=True,
            metavar=("|".join(ALL_FORMATS), path),
            help=f"format and path of the {dest}: {places}",
        )
    add_config_arguments(
        parser,
        " (default: the one stored in SRC; required for --from original, which stores none)",
    )
    parser.add_argument(
        "--shards",
        type=int,
        help="number of shards for --to original (default: the config's cores_per_replica)",
    )
    parser.add_argument(
        "--dtype",
        choices=(*FLOATS, "q8_0"),
        help="dtype of the weights, q8_0 only for --to gguf (default: SRC's)",
    )
    parser.add_argument("--slim", action="store_true", help="leave out the optimizer state")
    parser.add_argument("--step", type=int, help="step of SRC to convert (default: the newest)")
    parser.add_argument(
        "--trim-vocab",
        action="store_true",
        help="with --to hf: cut the vocabulary down to the tokenizer's",
    )
    parser.add_argument(
        "--tokenizer",
        help="with --to hf, gguf or native: folder, hub name or gpt2 (default: the config's)",
    )
    add_template_argument(parser)
    parser.add_argument(
        "--base",
        metavar="PATH",
        help="base model of the adapters in SRC, which they are merged into, or with --to peft the "
        "path or hub name to store (default: the path stored with the adapters)",
    )
    parser.add_argument(
        "--drop-extra",
        action="store_true",
        help="with --from hf or gguf: leave out tensors that are not part of the model, such as "
        "v_head.*, and print their names (default: an error)",
    )
    parser.add_argument(
        "--text-only",
        action="store_true",
        help="with --from hf: convert the text part of a multi-modal model, such as gemma3",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read both checkpoints again and compare their logits; those of a Hugging Face folder "
        "or GGUF file also with transformers', if torch is installed",
    )
    args = parser.parse_args()
    for flag, (kind, _) in (("--from", args.source), ("--to", args.target)):
        if kind not in ALL_FORMATS:
            raise InputError(f"{flag} {kind}: expected one of {', '.join(ALL_FORMATS)}")
    for flag, is_given, kind in (
        ("--shards", args.shards is not None, "original"),
        ("--trim-vocab", args.trim_vocab, "hf"),
        ("--tokenizer", args.tokenizer is not None, "hf, gguf or native"),
        ("--chat-template", args.chat_template is not None, "hf, gguf or native"),
        ("--dtype q8_0", args.dtype == "q8_0", "gguf"),
    ):
        if is_given and args.target[0] not in re.findall(r"\w+", kind):
            raise InputError(f"{flag} requires --to {kind}; remove {flag}")
    if args.drop_extra and args.source[0] not in HUGGING_FACE:
        raise InputError("--drop-extra requires --from hf or gguf; remove --drop-extra")
    if args.text_only and args.source[0] != "hf":
        raise InputError("--text-only requires --from hf; remove --text-only")
    return args


def main() -> None:
    # Make SIGTERM raise an exception, as Ctrl-C does, so that an unfinished target is removed.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run(parse_args())
    finally:
        signal.signal(signal.SIGTERM, previous)


def _config(args: argparse.Namespace, source: str, kind: Any) -> Config | None:
    """Return the config that --config, --model and --set select; None if no flag is given.

    If the result is None, the conversion uses the config stored in the source checkpoint.
    """
    from mesh_transformer.checkpoint import conversion
    from mesh_transformer.checkpoint.source import Source

    changes = settings(args)
    if args.config or args.model:
        return load_config(args)
    if not changes:
        return None
    path = conversion.step_of(source, kind, args.step)
    return Source(path, text_only=args.text_only).config.replace(**changes)


def run(args: argparse.Namespace) -> None:
    """Convert a checkpoint; with --verify, also compare the logits of both checkpoints.

    Raises:
      StoppedError: if the logits differ by more than rounding errors can explain.
    """
    from mesh_transformer.checkpoint import conversion
    from mesh_transformer.data.chat import template_text

    (source_kind, source), (target_kind, target) = args.source, args.target
    written = conversion.convert(
        source,
        source_kind,
        target,
        target_kind,
        config=_config(args, source, source_kind),
        shards=args.shards,
        dtype=FLOATS.get(args.dtype),
        slim=args.slim,
        step=args.step,
        trim_vocab=args.trim_vocab,
        tokenizer=args.tokenizer,
        chat_template=None if args.chat_template is None else template_text(args.chat_template),
        base=args.base,
        drop_extra=args.drop_extra,
        text_only=args.text_only,
        quantized=args.dtype == "q8_0",
    )
    optimizer = ", with the optimizer" if written.optimizer else ""
    if target_kind == "original" and written.config.optimizer != "adam":
        optimizer = f"; this format cannot store the state of optimizer {written.config.optimizer}"
    print(f"wrote {written.path}: {target_kind} format, weights in {written.dtype}{optimizer}")
    tokenizer = written.config.tokenizer
    if target_kind == "native" and os.path.isabs(tokenizer):
        print(f"the new checkpoint uses the tokenizer in {tokenizer}: keep it, or pass --tokenizer")
    if args.verify:
        source = conversion.step_of(source, source_kind, args.step)
        difference, bound = conversion.compare(
            source, source_kind, target, target_kind, written.config, args.base, args.text_only
        )
        print(f"logits differ by {difference:.1e} of their spread; {bound:.0e} is the limit")
        if not difference <= bound:
            raise StoppedError(
                f"{target}: its logits differ from those of {source}; do not use the new checkpoint"
            )
        for kind, path in ((source_kind, source), (target_kind, target)):
            if kind in HUGGING_FACE and not (args.text_only and path == source):
                _verify_with_torch(path)


def _verify_with_torch(folder: str) -> None:
    from mesh_transformer.checkpoint import conversion, torch_model

    result = conversion.compare_with_torch(folder)
    if result is None and not torch_model.is_installed():
        print(f"{folder}: not compared with transformers' logits, which need torch")
        return
    if result is None:
        print(f"{folder}: not compared with transformers' logits, as transformers cannot read it")
        return
    difference, bound = result
    print(
        f"{folder}: logits differ from transformers' by {difference:.1e}; {bound:.0e} is the limit"
    )
    if not difference <= bound:
        raise StoppedError(f"{folder}: transformers computes other logits; do not use this folder")
