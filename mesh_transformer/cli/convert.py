"""Converts checkpoints between the original's format, the native one and Hugging Face's.

convert_checkpoint.py --from original step_383500 --to hf gpt-j --config configs/6B_roto_256.json
"""

import argparse
import os
import signal
import sys

from mesh_transformer.checkpoint import conversion
from mesh_transformer.checkpoint.host_arrays import FLOATS
from mesh_transformer.checkpoint.source import FORMATS
from mesh_transformer.config import Config
from mesh_transformer.util import InputError, StoppedError, run_script


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    formats = "|".join(FORMATS)
    parser.add_argument(
        "--from",
        dest="source",
        nargs=2,
        required=True,
        metavar=(formats, "SRC"),
        help="a model folder (its newest step, or --step) or one step_N",
    )
    parser.add_argument(
        "--to",
        dest="target",
        nargs=2,
        required=True,
        metavar=(formats, "DST"),
        help="a model folder or one step_N of it, not there yet",
    )
    parser.add_argument(
        "--config", help="JSON or YAML file (default: what SRC tells; the original's tells nothing)"
    )
    parser.add_argument(
        "--shards", type=int, help="of --to original (default: the config's cores_per_replica)"
    )
    parser.add_argument("--dtype", choices=FLOATS, help="of the weights (default: as they are)")
    parser.add_argument("--slim", action="store_true", help="leave the optimizer out")
    parser.add_argument("--step", type=int, help="which step of SRC (default: the newest)")
    parser.add_argument(
        "--trim-vocab", action="store_true", help="--to hf: cut the vocabulary to the tokenizer's"
    )
    parser.add_argument(
        "--tokenizer",
        help="a folder, hub name or gpt2, of --to hf or native (default: the config's)",
    )
    parser.add_argument(
        "--base",
        metavar="PATH",
        help="where the model is now that the adapters of --from native were trained on, which "
        "they are merged into (default: where it was)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read both again and compare their logits"
    )
    args = parser.parse_args()
    for flag, (kind, _) in (("--from", args.source), ("--to", args.target)):
        if kind not in FORMATS:
            raise InputError(f"{flag} {kind}: expected one of {', '.join(FORMATS)}")
    for flag, given, kind in (
        ("--shards", args.shards is not None, "original"),
        ("--trim-vocab", args.trim_vocab, "hf"),
        ("--tokenizer", args.tokenizer is not None, "hf or native"),
    ):
        if given and args.target[0] not in kind.split():
            raise InputError(f"{flag} goes with --to {kind}; leave it out")
    return args


def main() -> None:
    # As Ctrl-C: what has been written is cleared away on the way out.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run(parse_args())
    finally:
        signal.signal(signal.SIGTERM, before)


def run(args: argparse.Namespace) -> None:
    """Converts, and compares where asked."""
    (source_kind, source), (target_kind, target) = args.source, args.target
    written = conversion.convert(
        source,
        source_kind,
        target,
        target_kind,
        config=Config.load(args.config) if args.config else None,
        shards=args.shards,
        dtype=FLOATS.get(args.dtype),
        slim=args.slim,
        step=args.step,
        trim_vocab=args.trim_vocab,
        tokenizer=args.tokenizer,
        base=args.base,
    )
    optimizer = ", with the optimizer" if written.optimizer else ""
    print(f"wrote {written.path}: {target_kind} format, weights in {written.dtype}{optimizer}")
    tokenizer = written.config.tokenizer
    if target_kind == "native" and os.path.isabs(tokenizer):
        print(f"its tokenizer is {tokenizer}, which must stay there; --tokenizer names another")
    if args.verify:
        source = conversion.step_of(source, source_kind, args.step)
        found, bound = conversion.compare(
            source, source_kind, target, target_kind, written.config, args.base
        )
        print(f"logits differ by {found:.1e} of their spread; {bound:.0e} is expected at most")
        if not found <= bound:
            raise StoppedError(f"{target}: its logits are not those of {source}; do not use it")


if __name__ == "__main__":
    run_script(main)
