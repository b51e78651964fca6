"""Answer, embed or score a file of prompts with a model, here or on several replicas over Ray.

Rows are those of the command `answers`, or lines of OpenAI's batch format, which give lines of
results in that format.  The output is in the order of the rows.  The same command continues a run
that was stopped or killed.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from mesh_transformer.cli.answers import (
    add_answer_arguments,
    add_request_arguments,
    choices_of,
    options_of,
)
from mesh_transformer.cli.arguments import input_help, model_parser
from mesh_transformer.cli.replicas import (
    add_cluster_arguments,
    check_cluster_arguments,
    replica_requests,
)
from mesh_transformer.cli.service import (
    Described,
    add_service_arguments,
    described,
    end,
    identity_of,
    running_service,
)
from mesh_transformer.data.file_types import TABLE_TYPES
from mesh_transformer.util import InputError, exit_now

if TYPE_CHECKING:
    from mesh_transformer.evaluation.answers import Table
    from mesh_transformer.evaluation.openai_client import LocalClient
    from mesh_transformer.serving.local import LocalRequests
    from mesh_transformer.serving.service import Service

# Flags that lines of OpenAI's batch format replace, and their defaults.
OF_ROWS = {"task": "answers", "samples": 1, "chat": False, "logprobs": False, "top_logprobs": 0}
OF_ROWS |= {"max_tokens": None, "temperature": None, "options": []}
CHOICES = 128  # the maximum number of answers to a request


def parse_args() -> argparse.Namespace:
    parser = model_parser(str(__doc__).partition("\n")[0])
    parser.add_argument("input", help=input_help(TABLE_TYPES))
    parser.add_argument("output", help="file for the results, as JSON lines")
    parser.add_argument(
        "--task",
        choices=("answers", "embeddings", "scores"),
        default="answers",
        help="answer each prompt, embed it, or give the log-probabilities of its `completion` "
        "(default answers); lines of OpenAI's format name their own",
    )
    add_request_arguments(parser)
    add_answer_arguments(parser)
    add_service_arguments(parser)
    add_cluster_arguments(parser, "several copies of the model at work on the rows, with Ray")
    return parser.parse_args()


class Requests(NamedTuple):
    """Where the requests go.

    Attributes:
      model: the model.
      tokenizer: its tokenizer.
      in_flight: the number of requests at a time.
      note: returns what the progress bar shows.
    """

    requests: "LocalRequests"
    model: "Service | Described"
    tokenizer: Any
    in_flight: int
    note: Callable[[int], str]


@contextlib.contextmanager
def running_requests(args: argparse.Namespace) -> Iterator[Requests]:
    """Return a context manager that yields requests to a model here, or to replicas."""
    in_flight = 2 * args.rows * (args.replicas[1] if args.replicas else 1)
    options = {"queue": in_flight * CHOICES, "warm_up": False}
    if args.replicas:
        known = described(args)
        with replica_requests(args, options) as (requests, replicas):

            def count(_: int) -> str:
                return f"{len(replicas.names())} replicas"

            yield Requests(requests, known, known.tokenizer, in_flight, count)
        exit_now("", 0)

    from mesh_transformer.serving.local import running

    with running_service(args, **options) as service, running(service) as requests:

        def speed(_: int) -> str:
            return f"{service.metrics.tokens_per_second():.0f} tokens/s"

        yield Requests(requests, service, service.words.tokenizer, in_flight, speed)
    end(service)


def main() -> None:
    args = parse_args()
    if args.task == "embeddings":
        args.embeddings = args.embeddings or "mean"

    from mesh_transformer.data.tables import all_rows
    from mesh_transformer.evaluation.openai_client import LocalClient
    from mesh_transformer.serving.local import check_lines, is_batch_line, write_lines
    from mesh_transformer.storage.journal import check_vacant

    # This comes before the model is loaded, which takes long, so that errors appear at once.
    check_cluster_arguments(args)
    check_vacant(args.output)
    rows = all_rows(args.input)
    in_lines = bool(rows) and is_batch_line(rows[0][1])
    if in_lines:
        check_lines(rows)
        flags = [name for name, value in OF_ROWS.items() if getattr(args, name) != value]
        if flags:
            flag = flags[0].replace("_", "-")
            raise InputError(f"--{flag}: lines of OpenAI's batch format have their own; remove it")
    with running_requests(args) as (requests, model, tokenizer, in_flight, note):
        options = {"in_flight": in_flight, "unit": "row", "note": note}
        identity = [*identity_of(args, model), args.task]
        if in_lines:
            write_lines(rows, args.output, requests, args.seed, settings=identity, **options)
        else:
            name = next(iter(model.names))
            client = LocalClient(requests.post, name, identity, requests.stop)
            write_rows(args, rows, client, tokenizer, options | {"keep_errors": True})
        count, errors = counts(args.output, in_lines)
        print(f"{args.output}: {count} rows, {errors} of them with errors")


def write_rows(
    args: argparse.Namespace,
    rows: "Table",
    client: "LocalClient",
    tokenizer: Any,
    options: dict[str, Any],
) -> None:
    """Write the results of rows with prompts."""
    from mesh_transformer.evaluation import answers

    if args.task == "embeddings":
        answers.write_vectors(rows, args.output, client, **options)
    elif args.task == "scores":
        from mesh_transformer.data.special_tokens import prompt_tokens

        def encode(text: str, first: bool) -> list[int]:
            if first:
                return prompt_tokens(tokenizer, text)
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        answers.write_scores(rows, args.output, client, encode, **options)
    else:
        options = options | choices_of(args)
        answers.write(rows, args.output, client, options_of(args), **options)


def counts(path: str, in_lines: bool) -> tuple[int, int]:
    """Return the numbers of results in a file, and of those that are errors."""
    results = errors = 0
    with open(path, "rb") as file:
        for row in map(json.loads, file):
            results += 1
            status = (row.get("response") or {}).get("status_code", 200) if in_lines else 200
            errors += bool(row.get("error")) or status != 200
    return results, errors
