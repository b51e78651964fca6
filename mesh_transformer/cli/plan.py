"""Predict whether a config's training or generation fits a TPU slice or GPUs, without them.

The real training or decoding step is compiled with libtpu, which `make libtpu` installs.  The exit
status is 0 if the step fits into memory of all the devices, and 1 if it does not.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from mesh_transformer.cli.arguments import (
    TOPOLOGY_HELP,
    Parser,
    above_0,
    add_batch_tokens,
    add_config_arguments,
    add_key_arguments,
    key_arguments,
    load_config,
    positive,
)
from mesh_transformer.util import InputError, exit_now

if TYPE_CHECKING:
    from mesh_transformer.config import Config
    from mesh_transformer.performance.topology import Slice


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    model = parser.add_argument_group("model")
    add_config_arguments(model)
    parser.add_argument(
        "--topology",
        required=True,
        help=f"devices; several are separated by commas: {TOPOLOGY_HELP}",
    )
    add_batch_tokens(
        parser,
        "the settings that no flag fixes are then chosen: the fastest on paper that the compiler "
        "confirms to fit",
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
    parser.add_argument(
        "--minutes",
        type=above_0,
        help="time limit for compiling, after which the best so far is printed",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object, or a list of them for several topologies",
    )
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


def check_flags(args: argparse.Namespace) -> None:
    """Raise InputError if flags contradict each other."""
    if args.cache_tokens and not args.decode:
        raise InputError("--cache-tokens plans a cache for generation; add --decode")
    if args.speculate and not args.decode:
        raise InputError("--speculate guesses tokens in generation; add --decode")
    if args.draft and not args.speculate:
        raise InputError("--draft guesses tokens; add --speculate N")
    if args.batch_tokens and args.decode:
        raise InputError("--batch-tokens is a batch for training; remove it or --decode")


def plan_for(
    slice_: "Slice", args: argparse.Namespace, config: "Config", deadline: float | None
) -> Any:
    """Return the plan, the result of a search or the scaling that the flags ask for.

    Args:
      config: with the batch of --batch-tokens, if that is given and --scaling is not.
      deadline: time of `time.monotonic` at which to stop compiling; None for no limit.
    """
    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.config import Config
    from mesh_transformer.performance.analytic import sequences_per_step
    from mesh_transformer.performance.compilation import OutOfTimeError
    from mesh_transformer.performance.plan import decode_plan, priced_plan
    from mesh_transformer.performance.scaling import scaling_of
    from mesh_transformer.performance.search import choose, search, with_batch

    chooses = args.search or (args.batch_tokens and not args.scaling)
    changes = key_arguments(args, "shard_activations", "loss_chunk")
    cp = args.cp or config.context_parallel
    if not chooses or args.cp or args.dp:  # else, cp is chosen
        changes["context_parallel"] = cp
    if not chooses or (args.dp, args.mp) != (None, None):  # else, mp is chosen
        mp = model_shards(args.dp, cp, args.mp, config.cores_per_replica, slice_.devices)
        changes["cores_per_replica"] = mp
    if args.scaling:
        if cp > 1:
            raise InputError(
                f"config: context_parallel is {cp}, which --scaling does not estimate; set it to 1"
            )
        # --mp must not change the number of sequences per step.
        others = {key: value for key, value in changes.items() if key != "cores_per_replica"}
        batch = config.replace(**others)
        if args.batch_tokens:
            batch = with_batch(config, args.batch_tokens, [slice_.devices])
        hardware = slice_.hardware(config.dtype)
        return scaling_of(config.replace(**changes), hardware, sequences_per_step(batch))
    if args.search:
        options = {"limit": args.limit, "in_full": not args.fast, "deadline": deadline}
        return search(config, slice_, fixed=changes, **options)
    if chooses:
        return choose(config, slice_, fixed=changes, fast=args.fast, deadline=deadline)
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
    try:
        return make_plan(changed, slice_, fast=args.fast, deadline=deadline)
    except OutOfTimeError:
        if args.decode:
            raise InputError(
                f"topology {slice_.name}: the step was not compiled within --minutes "
                f"{args.minutes:g}; raise it or add --fast"
            ) from None
        return priced_plan(changed, slice_, teacher=teacher, on_paper=True)


def main() -> None:
    args = parse_args()
    check_flags(args)
    names = [name.strip() for name in args.topology.split(",")]
    if "gpu" not in names:
        os.environ["JAX_PLATFORMS"] = "cpu"

    from mesh_transformer.performance.plan import Plan
    from mesh_transformer.performance.search import OUT_OF_TIME, comparison, with_batch
    from mesh_transformer.performance.topology import slice_named

    deadline = args.minutes and time.monotonic() + 60 * args.minutes
    slices = [slice_named(name) for name in names]
    # Plans are for the full batch size.
    config = load_config(args).replace(batch_ramp_steps=0)
    if config.teacher is not None and (args.search or args.scaling or args.batch_tokens):
        raise InputError(
            f"config: teacher is {config.teacher!r}, which --search, --scaling and --batch-tokens "
            "do not estimate; plan one mesh, or set teacher to null"
        )
    if args.batch_tokens and not args.scaling:
        config = with_batch(config, args.batch_tokens, [slice_.devices for slice_ in slices])
    results = [plan_for(slice_, args, config, deadline) for slice_ in slices]
    is_late = deadline is not None and time.monotonic() >= deadline
    if args.json:
        values = [dataclasses.asdict(result) for result in results]
        print(json.dumps(values[0] if len(values) == 1 else values))
    else:
        print("\n\n".join(result.table() for result in results))
        if len(results) > 1 and all(isinstance(result, Plan) for result in results):
            print(f"\n{comparison(results)}")
        if is_late and not args.search:
            print(OUT_OF_TIME)
    status = 0 if args.scaling else int(not all(result.fits for result in results))
    if is_late:  # a compilation may still run in a thread, which nothing can stop
        exit_now("", status)
    sys.exit(status)
