"""Answers prompts with a trained model: one with --prompt, else one after another."""

import argparse

from mesh_transformer.config import Config
from mesh_transformer.util import InputError, run_script


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", help="JSON or YAML file (default: what --model-path tells)")
    parser.add_argument(
        "--model-path",
        help="model folder, step_N or Hugging Face folder (default: the config's bucket/model_dir)",
    )
    parser.add_argument(
        "--version", type=int, choices=(1, 2), help="of the model, as in device_train.py"
    )
    parser.add_argument("--prompt", help="answer this and exit")
    parser.add_argument("--length", type=int, default=128, help="tokens to generate (128)")
    parser.add_argument("--top-p", "--top_p", type=float, default=0.9, help="nucleus (0.9)")
    parser.add_argument("--top-k", "--top_k", type=int, default=0, help="0: off")
    parser.add_argument("--temperature", "--temp", type=float, default=0.8, help="0: greedy (0.8)")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="1: off")
    parser.add_argument("--stop", help="text that ends an answer")
    parser.add_argument("--seed", type=int, help="for the same answer again (default: random)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.config is None and (args.model_path is None or args.version is not None):
        raise InputError("--config is missing: it goes with --version, or in place of --model-path")
    config = Config.load(args.config, args.version) if args.config else None
    path = args.model_path or (config.model_folder() if config else "")

    from mesh_transformer.compilation_cache import use_compilation_cache
    from mesh_transformer.conversion import config_of
    from mesh_transformer.hf_config import Tokenizer
    from mesh_transformer.repl import Repl, Settings
    from mesh_transformer.transformer_shard import load

    # First, as loading takes long.
    tokenizer = Tokenizer.of(None, config or config_of(path), must_fit=True).loaded
    settings = Settings(
        args.temperature,
        args.top_p,
        args.top_k,
        args.repetition_penalty,
        args.seed,
        args.length,
        args.stop,
    )
    use_compilation_cache()
    network = load(path, config)
    network.only_generate()
    repl = Repl(network, tokenizer, settings)
    if args.prompt is None:
        repl.run()
        return
    print(args.prompt, end="", flush=True)
    for piece, _ in repl.answer(args.prompt):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    run_script(main)
