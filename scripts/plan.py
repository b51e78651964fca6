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
    parser.add_argument("--fast", action="store_true", help="compile quickly; the peak is rougher")
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


def main() -> None:
    args = parse_args()
    if args.topology != "gpu":
        os.environ["JAX_PLATFORMS"] = "cpu"

    from mesh_transformer.plan import plan
    from mesh_transformer.topology import slice_named

    slice_ = slice_named(args.topology)
    config = Config.load(args.config)
    mp = replica_size(args.dp, args.mp, config.cores_per_replica, slice_.devices)
    changes: dict[str, Any] = {
        "cores_per_replica": mp,
        "tpu_size": slice_.devices,
        "zero": args.zero,
        "per_replica_batch": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "remat": args.remat,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    print(f"compiling for {args.topology} ...", file=sys.stderr, flush=True)
    found = plan(config.replace(**changes), slice_, fast=args.fast)
    if args.json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        print(found.table())
    sys.exit(not found.fits)


if __name__ == "__main__":
    run_script(main)
