"""Trains a model over many hosts, and goes on when one fails; starts again where it was stopped."""

import argparse

from mesh_transformer import runs
from mesh_transformer.build_model import build_model, local_machines, tpu_machines
from mesh_transformer.config import Config
from mesh_transformer.tpu_spec import TpuSpec, accelerator_type
from mesh_transformer.util import InputError, run_script


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="JSON or YAML file")
    hosts = parser.add_mutually_exclusive_group(required=True)
    hosts.add_argument("--tpu", metavar="NAME", help="the TPU to make, and to delete at the end")
    hosts.add_argument(
        "--local-hosts", type=int, metavar="N", help="N processes here stand in for hosts"
    )
    parser.add_argument(
        "--tpu-region", "--tpu_region", metavar="ZONE", help="such as europe-west4-a"
    )
    parser.add_argument(
        "--tpu-generation", default="v3", help="v2, v3 (default), v4, v5e, v5p, v6e"
    )
    parser.add_argument("--preemptible", action="store_true", help="a TPU that may be taken away")
    parser.add_argument("--new", action="store_true", help="delete the run in the model folder")
    parser.add_argument("--yes", action="store_true", help="do not ask before --new deletes")
    parser.add_argument(
        "--tune-model-path",
        help="what a new run starts from: model folder, step_N, or Hugging Face folder",
    )
    parser.add_argument(
        "--fresh-opt", action="store_true", help="do not take the optimizer of --tune-model-path"
    )
    parser.add_argument(
        "--version", type=int, choices=(1, 2), help="1: gptj under shard_map; 2: geglu under jit"
    )
    parser.add_argument("--max-steps", type=int, help="train until the global step is this")
    parser.add_argument("--model-dir", help="folder or URI in place of bucket and model_dir")
    parser.add_argument("--heartbeat", type=int, default=10, help="seconds until silence is death")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.fresh_opt and args.tune_model_path is None:
        raise InputError("--fresh-opt goes with --tune-model-path; give both or neither")
    config = Config.load(args.config, args.version)
    config.replace(total_steps=args.max_steps or config.total_steps).require_to_train()
    folder = args.model_dir or config.model_folder()
    if args.tpu is None:
        machines = local_machines(config, args.local_hosts)
    elif args.tpu_region is None:
        raise InputError("--tpu needs --tpu-region, the zone to make it in (europe-west4-a)")
    else:
        assert config.tpu_size is not None
        kind = accelerator_type(args.tpu_generation, config.tpu_size)
        tier = "preemptible" if args.preemptible else "on_demand"
        machines = tpu_machines(config, TpuSpec(args.tpu, args.tpu_region, kind, tier=tier))
    if args.new:
        runs.begin_anew(folder, yes=args.yes)
    with machines as hosts:
        runs.train(
            lambda: build_model(config, hosts(), heartbeat=args.heartbeat),
            folder,
            max_steps=args.max_steps,
            tune_model_path=args.tune_model_path,
            fresh_opt=args.fresh_opt,
        )


if __name__ == "__main__":
    run_script(main)
