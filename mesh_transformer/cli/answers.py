"""Ask a server with OpenAI's API for answers to a file of prompts.

A row of prompts has `prompt`, a text, or `messages`, a conversation, in which every user message
that no answer follows is answered, one after the other.  The answers are JSON lines in the order of
the prompts, which `completion-records` and `score` read.  The same command continues a file that
was interrupted.  The environment variable OPENAI_API_KEY may have the server's API key.
"""

import argparse
import functools
import operator
from typing import Any

from mesh_transformer.cli.arguments import Parser, input_help, natural, positive
from mesh_transformer.cli.evaluate import gen_kwargs
from mesh_transformer.data.file_types import TABLE_TYPES


def add_server_arguments(parser: argparse.ArgumentParser, url: str) -> None:
    """Add the flags of a server, and of the requests to it."""
    parser.add_argument(
        "--url",
        required=url == "--url",
        help="address of the server, such as http://localhost:8000",
    )
    parser.add_argument("--name", help="name of the server's model (default: its first)")
    parser.add_argument(
        "--in-flight", type=positive, default=8, help="requests at a time (default 8)"
    )
    add_request_arguments(parser)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of requests, which `options_of` reads."""
    parser.add_argument(
        "--max-tokens", type=positive, help="tokens per answer (default: the server's)"
    )
    parser.add_argument("--temperature", type=float, help="temperature (default: the server's)")
    own = {"type": gen_kwargs, "nargs": "+", "default": [], "metavar": "KEY=VALUE"}
    parser.add_argument("--options", **own, help="further keys of requests, such as top_p=0.9")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keys of each request that the flags of `add_request_arguments` give."""
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    given = {key: value for key, value in options.items() if value is not None}
    return functools.reduce(operator.or_, args.options, given)


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of answers, which `choices_of` reads."""
    parser.add_argument(
        "--samples", type=positive, default=1, help="answers per prompt (default 1)"
    )
    parser.add_argument(
        "--seed", type=natural, default=0, help="seed of each first answer (default 0)"
    )
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user's message")
    parser.add_argument("--logprobs", action="store_true", help="store log-probabilities of tokens")
    parser.add_argument(
        "--top-logprobs",
        type=natural,
        default=0,
        metavar="K",
        help="store those of the K most likely tokens at each position, too (default 0)",
    )


def choices_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of `answers.write` that the flags of `add_answer_arguments` give."""
    names = ("samples", "seed", "chat", "logprobs", "top_logprobs")
    return {name: getattr(args, name) for name in names}


def main() -> None:
    parser = Parser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("prompts", help=input_help(TABLE_TYPES))
    parser.add_argument("answers", help="file for the answers, as JSON lines")
    add_server_arguments(parser, "--url")
    add_answer_arguments(parser)
    args = parser.parse_args()

    from mesh_transformer.evaluation import answers
    from mesh_transformer.evaluation.openai_client import Client

    choices = choices_of(args) | {"in_flight": args.in_flight}
    client = Client(args.url, args.name)
    answers.write(args.prompts, args.answers, client, options_of(args), **choices)
