"""Train or score a model on this machine's devices, or with --every-host on those of many hosts.

Resumes stopped runs.
"""

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mesh_transformer import log_lines
from mesh_transformer.cli.arguments import positive, run_arguments, run_parser
from mesh_transformer.config import Config
from mesh_transformer.training.goodput import Ledger, process_seconds
from mesh_transformer.util import InputError

if TYPE_CHECKING:
    from mesh_transformer.pod.fleet import Fleet
    from mesh_transformer.transformer_shard import CausalTransformer

# Flags that must be equal in all processes of --every-host.
EQUAL_FLAGS = ("mode", "tune_model_path", "fresh_opt", "fall_back", "max_steps", "model_dir")


def parse_args() -> argparse.Namespace:
    parser = run_parser(__doc__)
    group = parser.add_argument_group(
        "many hosts", "the same command is started on every host, for example by srun"
    )
    group.add_argument(
        "--every-host",
        action="store_true",
        help="use the devices of all processes that run this command as one mesh",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address at which process 0 listens for the others (default: detected)",
    )
    group.add_argument(
        "--process-count",
        type=positive,
        metavar="N",
        help="number of processes (default: detected)",
    )
    group.add_argument(
        "--process-index", type=int, metavar="I", help="index of this process (default: detected)"
    )
    group.add_argument(
        "--start-seconds",
        type=positive,
        metavar="S",
        help="maximum seconds until all processes are connected (default 300)",
    )
    group.add_argument(
        "--heartbeat",
        type=positive,
        metavar="S",
        help="declare a process dead after this many silent seconds (default 10)",
    )
    group.add_argument(
        "--stop-status",
        type=int,
        metavar="STATUS",
        help="exit status if a signal stops the run before its last step (default 0)",
    )
    args = parser.parse_args()
    for action in group._group_actions:
        if not args.every_host and getattr(args, action.dest) not in (None, False):
            (flag,) = action.option_strings
            raise InputError(f"{flag} requires --every-host; give both, or remove {flag}")
    if args.every_host and args.mode == "eval_all":
        raise InputError("--mode eval_all runs on one host; remove --every-host")
    return args


def main() -> int | None:
    ledger = Ledger(process_seconds())
    args = parse_args()
    config, folder, options = run_arguments(args)

    from mesh_transformer.evaluation import all_steps
    from mesh_transformer.training import loop, references

    with _network(args, config) as network:
        if args.mode == "eval":
            references.validate(network, args.tune_model_path or folder)
            return None
        if args.mode == "eval_all":
            from mesh_transformer.checkpoint.source import saved_steps

            all_steps.evaluate_all(network, folder, functools.partial(saved_steps, folder))
            return None
        loop.train(network, folder, ledger=ledger, **options)
        complete = network.step >= (args.max_steps or config.total_steps or 0)
        if network.signals and not complete and args.stop_status:
            sys.exit(args.stop_status)  # with --every-host, of all processes
    return None


@contextlib.contextmanager
def _network(args: argparse.Namespace, config: Config) -> "Iterator[CausalTransformer | Fleet]":
    """Yield a network without weights.

    With --every-host, only in process 0: other processes run its calls, and exit when it does.
    """
    from mesh_transformer.mesh.program import use_compilation_cache

    use_compilation_cache()
    if not args.every_host:
        from mesh_transformer.transformer_shard import CausalTransformer

        log_lines.about(process=0)
        yield CausalTransformer(config, init=False)
        return
    from mesh_transformer.pod.every_host import find_place, leading

    seconds = args.start_seconds or 300
    place, ids = find_place(args.coordinator, args.process_count, args.process_index, seconds)
    log_lines.about(process=place.index)
    flags = {f"--{name.replace('_', '-')}": getattr(args, name) for name in EQUAL_FLAGS}
    heartbeat = args.heartbeat or 10
    with leading(config, place, ids, flags, seconds=seconds, heartbeat=heartbeat) as network:
        yield network
