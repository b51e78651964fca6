"""Trains a model on this machine's devices; starts again where it was interrupted."""

import argparse

from mesh_transformer import training
from mesh_transformer.config import Config
from mesh_transformer.util import InputError, run_script


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="JSON or YAML file")
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
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.fresh_opt and args.tune_model_path is None:
        raise InputError("--fresh-opt goes with --tune-model-path; give both or neither")
    config = Config.load(args.config, args.version)
    folder = args.model_dir or config.model_folder()

    from mesh_transformer.transformer_shard import CausalTransformer

    training.train(
        CausalTransformer(config, init=False),
        folder,
        max_steps=args.max_steps,
        tune_model_path=args.tune_model_path,
        fresh_opt=args.fresh_opt,
    )


if __name__ == "__main__":
    run_script(main)
