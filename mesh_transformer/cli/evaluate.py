"""Score a trained model with lm-eval's tasks; print a table, and write JSON with --output."""

import argparse
import functools
import json
import operator
import re
from typing import Any

from mesh_transformer.cli.arguments import check_output, model_arguments, model_parser
from mesh_transformer.cli.machines import add_host_arguments, running_model
from mesh_transformer.evaluation.harness import DEFAULT_TASKS, Harness, write
from mesh_transformer.util import InputError


def parse_args() -> argparse.Namespace:
    parser = model_parser(__doc__)
    parser.add_argument(
        "--tasks",
        help="comma-separated task names (default: the config's eval_harness_tasks, or "
        f"{','.join(DEFAULT_TASKS)})",
    )
    parser.add_argument(
        "--num-fewshot",
        type=int,
        metavar="N",
        help="examples before each question (default: the task's)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        help="number of questions per task, or below 1 the fraction of them (default: all)",
    )
    parser.add_argument("--include-path", metavar="DIR", help="folder with additional tasks")
    parser.add_argument(
        "--apply-chat-template",
        nargs="?",
        const="",
        metavar="FILE",
        help="ask questions as a conversation, in the tokenizer's chat template, or one in a Jinja "
        "file, or plain",
    )
    parser.add_argument(
        "--gen-kwargs",
        type=gen_kwargs,
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="change how answers are generated, such as temperature=0.8 or max_gen_toks=64",
    )
    parser.add_argument("--output", metavar="FILE", help="file for the results, as JSON")
    parser.add_argument(
        "--log-samples",
        action="store_true",
        help="write each task's questions and answers beside --output",
    )
    parser.add_argument(
        "--confirm-unsafe-code",
        action="store_true",
        help="allow tasks to run code that the model has written",
    )
    add_host_arguments(parser, required=False)
    return parser.parse_args()


def gen_kwargs(text: str) -> dict[str, Any]:
    """Parse KEY=VALUE or, as in lm-eval, several of them with commas between.

    A value is JSON, or else a text.
    """
    result = {}
    for item in re.split(r",(?=\w+=)", text):
        key, separator, value = item.partition("=")
        if not key or not separator:
            raise argparse.ArgumentTypeError(f"{text!r}: expected KEY=VALUE")
        try:
            result[key] = json.loads(value.lower() if value in ("True", "False") else value)
        except ValueError:
            result[key] = value
    return result


def main() -> None:
    args = parse_args()
    if args.log_samples and not args.output:
        raise InputError("--log-samples requires --output; give the file for the results")
    path, config = model_arguments(args)

    from mesh_transformer.checkpoint.source import Source

    check_output(args, "output")
    model = path if config else Source(path)
    model_config = config or Source.of(model).config
    names = args.tasks.split(",") if args.tasks else model_config.eval_harness_tasks
    # This comes before the model is loaded, which takes long, so that errors appear at once.
    harness = Harness(
        model_config,
        names or DEFAULT_TASKS,
        include_path=args.include_path,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        template=args.apply_chat_template,
        gen_kwargs=functools.reduce(operator.or_, args.gen_kwargs, {}),
        log_samples=args.log_samples,
        unsafe_code=args.confirm_unsafe_code,
    )
    with running_model(args, model, config) as network:
        results = harness.results(network)
    assert results is not None  # None only if stopped, which does not happen here
    print(harness.table(results))
    if args.output:
        write(args.output, results)
