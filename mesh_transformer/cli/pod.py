"""Train or score a model over many hosts.

Recovers from failed hosts, and resumes stopped runs.
"""

import argparse

from mesh_transformer.cli.arguments import TRAIN_MODES, positive, run_arguments, run_parser
from mesh_transformer.cli.machines import add_host_arguments, machines_of
from mesh_transformer.pod.launch import build_model
from mesh_transformer.training.goodput import Ledger, process_seconds
from mesh_transformer.util import InputError


def parse_args() -> argparse.Namespace:
    parser = run_parser(__doc__)
    add_host_arguments(parser, required=True)
    parser.add_argument(
        "--new", action="store_true", help="delete the existing run in the model folder first"
    )
    parser.add_argument("--yes", action="store_true", help="delete with --new without asking")
    parser.add_argument(
        "--wait",
        type=positive,
        metavar="S",
        help="continue on fewer devices if lost hosts do not return, or the whole TPU cannot be "
        "created, within S seconds",
    )
    args = parser.parse_args()
    if args.wait and args.mode not in TRAIN_MODES:
        raise InputError(f"--wait requires training, but --mode is {args.mode}; remove --wait")
    if args.wait and args.ray:
        raise InputError("--wait cannot be combined with --ray; remove one of them")
    return args


def main() -> None:
    ledger = Ledger(process_seconds())
    args = parse_args()
    config, folder, options = run_arguments(args)

    from mesh_transformer.evaluation import harness
    from mesh_transformer.pod import preparation, restarts

    if args.mode in TRAIN_MODES:
        config.require_to_train(args.max_steps)
        preparation.check_records(config, validate=options["validate"])
    if args.mode != "train":
        harness.load_harness(config)  # fails before a TPU is created if tasks are not available
    machines = machines_of(args, config, args.wait)
    if args.new:
        preparation.delete_run(folder, yes=args.yes)
    with machines as hosts:
        from mesh_transformer.pod.elastic import ElasticCluster

        def make():
            options = {"heartbeat": args.heartbeat, "patience": args.patience}
            if args.wait:
                return ElasticCluster(config, hosts, **options)
            return build_model(config, hosts(), **options)

        if args.mode == "eval":
            restarts.validate(make, args.tune_model_path or folder)
        elif args.mode == "eval_all":
            restarts.evaluate_all(make, folder)
        else:
            restarts.train(make, folder, ledger=ledger, **options)
