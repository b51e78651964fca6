"""Predict whether a config's training or generation fits a TPU slice, without a TPU.

The real training or decoding step is compiled with libtpu, which `make libtpu` installs.  The exit
status is 0 if the step fits into memory, and 1 if it does not.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys

from mesh_transformer.cli.arguments import (
    Parser,
    add_config_arguments,
    add_key_arguments,
    key_arguments,
    load_config,
    positive,
)
from mesh_transformer.util import InputError


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    model = parser.add_argument_group("model")
    add_config_arguments(model)
    parser.add_argument(
        "--topology",
        required=True,
        help="TPU slice, such as v3-8, v4-256, v5e-256 or v5p:16x16x24, or this machine's cpu, "
        "cpu-8 or gpu",
    )
    parser.add_argument("--dp", type=int, help="replicas (default: devices divided by mp and cp)")
    parser.add_argument(
        "--mp",
        type=int,
        help="devices per replica (default: the config's cores_per_replica, at most all devices)",
    )
    parser.add_argument(
        "--cp",
        type=positive,
        help="devices that split each sequence (default: the config's context_parallel)",
    )
    keys = add_key_arguments(parser)
    keys.add_argument(
        "--shard-activations",
        action=argparse.BooleanOptionalAction,
        help="shard the activations between layers over mp",
    )
    keys.add_argument("--loss-chunk", type=int, help="positions per chunk of the loss")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--decode", action="store_true", help="plan generation, not training")
    modes.add_argument(
        "--scaling",
        action="store_true",
        help="estimate communication against compute as dp and mp grow, without compiling",
    )
    modes.add_argument("--search", action="store_true", help="find and rank settings that fit")
    parser.add_argument(
        "--limit", type=positive, default=12, help="settings to find with --search (default 12)"
    )
    parser.add_argument(
        "--cache-tokens",
        type=positive,
        help="with --decode: a cache in pages for so many tokens per replica, as of the server",
    )
    parser.add_argument(
        "--speculate",
        type=positive,
        default=0,
        metavar="N",
        help="with --decode: guess N tokens per step",
    )
    parser.add_argument(
        "--draft",
        metavar="CONFIG",
        help="with --speculate: config of the smaller model that guesses (default: guesses are "
        "looked up)",
    )
    parser.add_argument(
        "--fast", action="store_true", help="compile quickly, for less exact figures"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def model_shards(dp: int | None, cp: int, mp: int | None, default: int, devices: int) -> int:
    """Return mp of a mesh that uses all devices of the slice.

    Args:
      dp, mp: the flags, None if they are not given.
      default: the result if neither is given, at most `devices` divided by cp.

    Raises:
      InputError: if dp times cp times mp cannot be `devices`.
    """
    if mp is None:
        mp = min(default, devices // cp) if dp is None else devices // cp // max(dp, 1)
    if mp < 1 or devices % (cp * mp) or dp not in (None, devices // (cp * mp)):
        along_cp = f"--cp {cp} x " if cp > 1 else ""
        raise InputError(
            f"--dp {dp or 'any'} x {along_cp}--mp {mp} must equal the slice's {devices} devices; "
            f"change --dp{', --cp' if cp > 1 else ''} or --mp"
        )
    return mp


def main() -> None:
    args = parse_args()
    if args.cache_tokens and not args.decode:
        raise InputError("--cache-tokens plans a cache for generation; add --decode")
    if args.speculate and not args.decode:
        raise InputError("--speculate guesses tokens in generation; add --decode")
    if args.draft and not args.speculate:
        raise InputError("--draft guesses tokens; add --speculate N")
    if args.topology != "gpu":
        os.environ["JAX_PLATFORMS"] = "cpu"

    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.config import Config
    from mesh_transformer.performance.analytic import sequences_per_step
    from mesh_transformer.performance.plan import decode_plan, priced_plan
    from mesh_transformer.performance.scaling import scaling_of
    from mesh_transformer.performance.search import search
    from mesh_transformer.performance.topology import slice_named, topology

    slice_ = slice_named(args.topology)
    # Plans are for the full batch size.
    config = load_config(args).replace(batch_ramp_steps=0)
    if config.teacher is not None and (args.search or args.scaling):
        raise InputError(
            f"config: teacher is {config.teacher!r}, which --search and --scaling do not estimate; "
            "plan one mesh, or set teacher to null"
        )
    changes = key_arguments(args, "shard_activations", "loss_chunk")
    cp = args.cp or config.context_parallel
    if not args.search or args.cp or args.dp:  # else, the search chooses cp
        changes["context_parallel"] = cp
    if not args.search or (args.dp, args.mp) != (None, None):  # else, the search chooses mp
        mp = model_shards(args.dp, cp, args.mp, config.cores_per_replica, slice_.devices)
        changes["cores_per_replica"] = mp
    if args.scaling:
        if cp > 1:
            raise InputError(
                f"config: context_parallel is {cp}, which --scaling does not estimate; set it to 1"
            )
        generation = topology(args.topology).generation
        # --mp must not change the number of sequences per step.
        others = {key: value for key, value in changes.items() if key != "cores_per_replica"}
        sequences = sequences_per_step(config.replace(**others))
        estimates = scaling_of(config.replace(**changes), generation, sequences)
        print(json.dumps(dataclasses.asdict(estimates)) if args.json else estimates.table())
        return
    print(f"compiling for {args.topology} ...", file=sys.stderr, flush=True)
    if args.search:
        result = search(config, slice_, fixed=changes, limit=args.limit, in_full=not args.fast)
    else:
        teacher = None if config.teacher_path is None else Source(config.teacher_path).config
        make_plan = functools.partial(priced_plan, teacher=teacher)
        if args.decode:
            make_plan = functools.partial(
                decode_plan,
                cache_tokens=args.cache_tokens,
                guesses=args.speculate,
                draft=Config.of(args.draft) if args.draft else None,
            )
        changed = config.replace(**changes, tpu_size=slice_.devices)
        result = make_plan(changed, slice_, fast=args.fast)
    print(json.dumps(dataclasses.asdict(result)) if args.json else result.table())
    sys.exit(not result.fits)
