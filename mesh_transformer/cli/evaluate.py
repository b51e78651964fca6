"""Score a trained model with lm-eval's tasks; print a table, and write JSON with --output."""

import argparse

from mesh_transformer.cli.arguments import add_host_arguments, model_arguments, model_parser
from mesh_transformer.cli.machines import running_model
from mesh_transformer.evaluation.harness import DEFAULT_TASKS, Harness, write


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
    parser.add_argument("--output", metavar="FILE", help="file for the results, as JSON")
    add_host_arguments(parser, required=False)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    path, config = model_arguments(args)

    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.storage.access import check_bucket

    if args.output:
        check_bucket(args.output)

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
    )
    with running_model(args, model, config) as network:
        results = harness.results(network)
    assert results is not None  # None only if stopped, which does not happen here
    if args.output:
        write(args.output, results)
    print(harness.table(results))
