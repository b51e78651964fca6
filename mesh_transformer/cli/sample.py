"""Generate text, or chat, with a trained model: for one --prompt, or for lines typed interactively.

Sampling settings that no flag gives are the model's own, if it has any.
"""

import argparse
import sys
from typing import Any

from mesh_transformer.cli.arguments import model_arguments, model_parser
from mesh_transformer.cli.machines import add_host_arguments, running_model


def parse_args() -> argparse.Namespace:
    parser = model_parser(__doc__)
    parser.add_argument("--prompt", help="a single prompt to answer (default: interactive)")
    parser.add_argument("--length", type=int, default=128, help="tokens to generate (default 128)")
    for flag, kind, description in (
        ("--top-p", float, "probability mass of the nucleus to sample from (default 0.9)"),
        ("--top-k", int, "number of most likely tokens to sample from (default 0: all)"),
        ("--temperature", float, "sampling temperature; 0 is greedy (default 0.8)"),
        ("--min-p", float, "least probability, relative to the most likely token (default 0)"),
        ("--typical-p", float, "probability of the typical tokens to sample from (default 1: all)"),
        ("--repetition-penalty", float, "penalty for tokens that have occurred (default 1: none)"),
        ("--presence-penalty", float, "subtracted from the logits of tokens in the answer"),
        ("--frequency-penalty", float, "the same for each time a token is in the answer"),
    ):
        names = [flag, "--temp"] if flag == "--temperature" else [flag]
        parser.add_argument(*names, type=kind, help=description)
    parser.add_argument("--stop", help="text that ends an answer")
    parser.add_argument("--seed", type=int, help="seed of a reproducible answer (default: random)")
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja template of a model that can chat, plain, or none to continue texts (default: "
        "the tokenizer's, if any)",
    )
    add_host_arguments(parser, required=False)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    path, config = model_arguments(args)

    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.data.chat import template_to_chat
    from mesh_transformer.data.tokenizer import Tokenizer
    from mesh_transformer.generation.sampling_settings import check_defaults
    from mesh_transformer.serving.repl import COMMANDS, COMPILING, Repl, Settings

    # This comes before the model is loaded, which takes long, so that errors appear at once.
    model = path if config else Source(path)
    own_config = config or Source.of(model).config
    tokenizer = Tokenizer.of(None, own_config, must_fit=True).loaded
    template = template_to_chat(tokenizer, args.chat_template)
    names = {"temperature": "temp"} | {name: name for name in COMMANDS}
    given = {
        ours: x for name, ours in names.items() if (x := getattr(args, name, None)) is not None
    }
    check_defaults(own_config.sampling)
    own: dict[str, Any] = own_config.sampling | given
    settings = Settings(**own)
    with running_model(args, model, config, only_generate=True) as network:
        repl = Repl(network, tokenizer, settings, template)
        if args.prompt is None:
            repl.run()
            return
        print(COMPILING, file=sys.stderr)
        if template is None:
            print(args.prompt, end="", flush=True)
        for piece, _ in repl.answer(args.prompt):
            print(piece, end="", flush=True)
        print()
