"""Trains a model over many hosts, and goes on when one fails; starts again where it was stopped."""

import argparse

from mesh_transformer import runs
from mesh_transformer.arguments import (
    add_tpu_arguments,
    positive,
    refuse_tpu_arguments,
    run_arguments,
    run_parser,
    tpu_arguments,
)
from mesh_transformer.build_model import build_model, local_machines, tpu_machines
from mesh_transformer.util import run_script


def parse_args() -> argparse.Namespace:
    parser = run_parser(__doc__)
    hosts = parser.add_mutually_exclusive_group(required=True)
    hosts.add_argument("--tpu", metavar="NAME", help="the TPU to make, and to delete at the end")
    hosts.add_argument(
        "--local-hosts", type=int, metavar="N", help="N processes here stand in for hosts"
    )
    parser.add_argument("--new", action="store_true", help="delete the run in the model folder")
    parser.add_argument("--yes", action="store_true", help="do not ask before --new deletes")
    parser.add_argument(
        "--heartbeat", type=positive, default=10, help="seconds until silence is death (10)"
    )
    parser.add_argument(
        "--patience",
        type=positive,
        default=3600,
        help="seconds that one call to the hosts may take, compilation included (3600)",
    )
    add_tpu_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    config, folder, options = run_arguments(args)
    config.replace(total_steps=args.max_steps or config.total_steps).require_to_train()
    if args.tpu is None:
        refuse_tpu_arguments(args)
        machines = local_machines(config, args.local_hosts)
    else:
        machines = tpu_machines(config, *tpu_arguments(args, config))
    if args.new:
        runs.begin_anew(folder, yes=args.yes)
    with machines as hosts:
        runs.train(
            lambda: build_model(config, hosts(), heartbeat=args.heartbeat, patience=args.patience),
            folder,
            **options,
        )


if __name__ == "__main__":
    run_script(main)
