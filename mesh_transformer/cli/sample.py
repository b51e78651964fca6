"""Generate text with a trained model, for one --prompt or for prompts typed interactively."""

import argparse
import sys

from mesh_transformer.cli.arguments import model_arguments, model_parser
from mesh_transformer.cli.machines import add_host_arguments, running_model


def parse_args() -> argparse.Namespace:
    parser = model_parser(__doc__)
    parser.add_argument("--prompt", help="a single prompt to answer (default: interactive)")
    parser.add_argument("--length", type=int, default=128, help="tokens to generate (default 128)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.9,
        help="probability mass of the nucleus to sample from (default 0.9)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        help="number of most likely tokens to sample from (default 0: all)",
    )
    parser.add_argument(
        "--temperature",
        "--temp",
        type=float,
        default=0.8,
        help="sampling temperature; 0 is greedy (default 0.8)",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="least probability of a token, relative to the most likely one (default 0)",
    )
    parser.add_argument(
        "--typical-p",
        type=float,
        default=1.0,
        help="probability of the typical tokens to sample from (default 1: all)",
    )
    penalty = "penalty for tokens that have occurred; 1 is none (default 1)"
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help=penalty)
    penalty = "subtracted from the logits of tokens in the answer (default 0)"
    parser.add_argument("--presence-penalty", type=float, default=0.0, help=penalty)
    penalty = "the same for each time a token is in the answer (default 0)"
    parser.add_argument("--frequency-penalty", type=float, default=0.0, help=penalty)
    parser.add_argument("--stop", help="text that ends an answer")
    parser.add_argument("--seed", type=int, help="seed of a reproducible answer (default: random)")
    add_host_arguments(parser, required=False)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    path, config = model_arguments(args)

    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.data.tokenizer import Tokenizer
    from mesh_transformer.serving.repl import COMPILING, Repl, Settings

    # This comes before the model is loaded, which takes long, so that errors appear at once.
    model = path if config else Source(path)
    tokenizer = Tokenizer.of(None, config or Source.of(model).config, must_fit=True).loaded
    settings = Settings(
        temp=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        typical_p=args.typical_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        length=args.length,
        stop=args.stop,
    )
    with running_model(args, model, config, only_generate=True) as network:
        repl = Repl(network, tokenizer, settings)
        if args.prompt is None:
            repl.run()
            return
        print(COMPILING, file=sys.stderr)
        print(args.prompt, end="", flush=True)
        for piece, _ in repl.answer(args.prompt):
            print(piece, end="", flush=True)
        print()
