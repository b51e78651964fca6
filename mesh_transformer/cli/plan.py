"""Tells whether a config's training fits a TPU slice that you need not have.

Compiles the real train step for it with libtpu (`make libtpu`).  Exit status 0 where it fits, 1
where it does not.
"""

import argparse
import dataclasses
import json
import os
import sys
from typing import Any

from mesh_transformer.cli.arguments import positive
from mesh_transformer.config import Config
from mesh_transformer.util import InputError, run_script


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--config", required=True)
    parser.add_argument("--topology", required=True, help="v3-8, v4-256, v5e-256, v5p:16x16x24 ...")
    parser.add_argument("--dp", type=int, help="replicas (default: the devices over mp)")
    parser.add_argument("--mp", type=int, help="devices of one (default: cores_per_replica)")
    parser.add_argument("--zero", type=int, choices=(0, 1, 3), help="default: the config's")
    parser.add_argument("--batch", type=int, help="sequences a replica (default: the config's)")
    parser.add_argument("--accumulate", type=int, help="microbatches (default: the config's)")
    parser.add_argument("--remat", choices=("full", "dots", "none"), help="default: the config's")
    parser.add_argument(
        "--shard-activations",
        action=argparse.BooleanOptionalAction,
        help="between layers each device keeps a part (default: the config's)",
    )
    parser.add_argument("--loss-chunk", type=int, help="default: the config's")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--decode", action="store_true", help="plan generation, not training")
    what.add_argument("--scaling", action="store_true", help="links and computing, on paper")
    what.add_argument("--search", action="store_true", help="find the settings that fit, ranked")
    parser.add_argument("--limit", type=positive, default=12, help="of --search: settings to find")
    parser.add_argument("--fast", action="store_true", help="compile quickly, for rougher figures")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def replica_size(dp: int | None, mp: int | None, default: int, devices: int) -> int:
    """mp, of which either or both of dp and mp may be given; InputError where they do not fit."""
    if mp is None:
        mp = min(default, devices) if dp is None else devices // max(dp, 1)
    if mp < 1 or devices % mp or dp not in (None, devices // mp):
        asked = f"--dp {dp or 'any'} x --mp {mp}"
        raise InputError(f"{asked} is not a mesh of the slice's {devices} devices; change either")
    return mp


def changes_of(args: argparse.Namespace, devices: int, default_mp: int) -> dict[str, Any]:
    """The config's keys that flags replace; --dp and --mp where either was given."""
    changes: dict[str, Any] = {
        "zero": args.zero,
        "per_replica_batch": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "remat": args.remat,
        "shard_activations": args.shard_activations,
        "loss_chunk": args.loss_chunk,
    }
    if not args.search or (args.dp, args.mp) != (None, None):
        changes["cores_per_replica"] = replica_size(args.dp, args.mp, default_mp, devices)
    return {key: value for key, value in changes.items() if value is not None}


def main() -> None:
    args = parse_args()
    if args.topology != "gpu":
        os.environ["JAX_PLATFORMS"] = "cpu"

    from mesh_transformer.performance import scaling
    from mesh_transformer.performance.plan import decode_plan, plan
    from mesh_transformer.performance.search import search
    from mesh_transformer.performance.topology import slice_named, topology

    slice_ = slice_named(args.topology)
    config = Config.load(args.config)
    changes = changes_of(args, slice_.devices, config.cores_per_replica)
    if args.scaling:
        generation = topology(args.topology).generation
        # A smaller replica is no reason for more sequences a step.
        whole = {key: value for key, value in changes.items() if key != "cores_per_replica"}
        sequences = scaling.sequences_a_step(config.replace(**whole))
        scales = scaling.scaling_of(config.replace(**changes), generation, sequences)
        print(json.dumps(dataclasses.asdict(scales)) if args.json else scales.table())
        return
    print(f"compiling for {args.topology} ...", file=sys.stderr, flush=True)
    if args.search:
        found = search(config, slice_, fixed=changes, limit=args.limit, in_full=not args.fast)
    else:
        make = decode_plan if args.decode else plan
        changed = config.replace(**changes, tpu_size=slice_.devices)
        found = make(changed, slice_, fast=args.fast)
    print(json.dumps(dataclasses.asdict(found)) if args.json else found.table())
    sys.exit(not found.fits)


if __name__ == "__main__":
    run_script(main)
