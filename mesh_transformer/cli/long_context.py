"""Test a model on long texts: accuracy by length and place of facts, and loss by position."""

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any

from mesh_transformer.cli.arguments import (
    check_output,
    model_arguments,
    model_parser,
    natural,
    positive,
)
from mesh_transformer.cli.machines import add_host_arguments, running_model
from mesh_transformer.evaluation.haystack import TASKS
from mesh_transformer.util import InputError

DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]


def parse_args() -> argparse.Namespace:
    parser = model_parser(__doc__)
    parser.add_argument(
        "--tasks",
        nargs="*",
        choices=TASKS,
        default=list(TASKS),
        help=f"questions to ask, which may be none (default: {' '.join(TASKS)})",
    )
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        metavar="TOKENS",
        help="tokens of a prompt and its answer (default: an eighth, a quarter, half and all of "
        "the model's seq)",
    )
    parser.add_argument(
        "--depths",
        type=depth,
        nargs="+",
        default=DEPTHS,
        metavar="DEPTH",
        help="places of the fact that is asked for, from 0, the beginning, to 1 (default: "
        f"{' '.join(map('{:g}'.format, DEPTHS))})",
    )
    parser.add_argument(
        "--questions",
        type=positive,
        default=10,
        help="questions per task, length and depth (default 10)",
    )
    parser.add_argument("--seed", type=natural, default=0, help="seed of the questions (default 0)")
    parser.add_argument(
        "--perplexity",
        metavar="PATH",
        help="index or folder of records, or a text file ending in .txt, for the loss by position",
    )
    parser.add_argument("--output", metavar="FILE", help="file for the results, as JSON")
    parser.add_argument("--picture", metavar="FILE", help="PNG or SVG file to draw")
    add_host_arguments(parser, required=False)
    return parser.parse_args()


def depth(text: str) -> float:
    """Parse a flag's value as a number from 0 to 1; for use as argparse's `type`."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")
    return number


def table(rows: list[dict[str, Any]]) -> str:
    """Format accuracies as a table per task, with a row per depth and a column per length."""
    lines = []
    for task, lengths, depths, means in by_task(rows):
        lines.append(f"{task:14}" + "".join(f"{length:>9,}" for length in lengths))
        for place, values in zip(depths, means, strict=True):
            name = "" if place is None else f"  depth {place:g}"
            lines.append(f"{name:14}" + "".join(f"{value:>9.1%}" for value in values))
    return "\n".join(lines)


def by_task(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[int], list[Any], list[Any]]]:
    """Yield (task, lengths, depths, mean accuracies as a list per depth)."""
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        means = {(row["depth"], row["length"]): row["mean"] for row in own}
        depths, lengths = (list(dict.fromkeys(places)) for places in zip(*means, strict=True))
        yield task, lengths, depths, [[means[y, x] for x in lengths] for y in depths]


def draw(rows: list[dict[str, Any]], losses: dict[str, float], picture: str) -> None:
    """Draw the accuracies as a heat map per task, and the perplexity by position."""
    from mesh_transformer.performance import pictures

    tasks = list(by_task(rows))
    count = len(tasks) + bool(losses)
    figure, (grid,) = pictures.pyplot().subplots(
        1, count, figsize=(3.6 * count, 3.2), layout="constrained", squeeze=False
    )
    for axes, (task, lengths, depths, means) in zip(grid, tasks, strict=False):
        axes.imshow(means, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        for y, values in enumerate(means):
            for x, value in enumerate(values):
                axes.text(x, y, f"{value:.0%}", ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(lengths)), [f"{x:,}" for x in lengths], rotation=45)
        axes.set_yticks(range(len(depths)), ["" if y is None else f"{y:g}" for y in depths])
        axes.set(title=task, xlabel="tokens", ylabel="" if depths == [None] else "depth")
    if losses:
        ends = [int(places.partition("-")[2]) + 1 for places in losses]
        grid[-1].plot(ends, list(map(math.exp, losses.values())), "o-")
        grid[-1].set_xscale("log", base=2)
        grid[-1].set(title="perplexity", xlabel="positions of a text, up to")
        grid[-1].grid(alpha=0.3)
    pictures.save(figure, picture)


def main() -> None:
    args = parse_args()
    if not args.tasks and args.perplexity is None:
        raise InputError("--tasks names none; add --perplexity, or name tasks")
    if args.picture and not args.picture.lower().endswith((".png", ".svg")):
        raise InputError(f"--picture {args.picture}: expected a name that ends in .png or .svg")
    check_output(args, "output", "picture")
    path, config = model_arguments(args)

    from mesh_transformer.checkpoint.source import Source
    from mesh_transformer.data.tokenizer import Tokenizer
    from mesh_transformer.evaluation import long_context, validation
    from mesh_transformer.storage import files

    model = path if config else Source(path)
    own_config = config or Source.of(model).config
    tokenizer = Tokenizer.of(None, own_config, must_fit=True).loaded
    lengths = args.lengths or [own_config.seq // part for part in (8, 4, 2, 1)]
    cells = long_context.cells(args.tasks, lengths, args.depths)
    # This comes before the model is loaded, which takes long, so that errors appear at once.
    long_context.check(own_config, tokenizer, cells)
    source = args.perplexity and long_context.text_or_records(tokenizer, args.perplexity)
    losses: dict[str, float] = {}
    with running_model(args, model, config) as network:
        if source is not None:  # first, as questions take longer than errors should
            scores = validation.score(network, source, by_position=True, show=True)
            metrics = scores.position_metrics("text").items()
            losses = {name.rpartition("/")[2]: loss for name, loss in metrics}
            print(f"{validation.HEADING}\n{scores.row('perplexity')}")
        rows = long_context.accuracies(network, tokenizer, cells, args.questions, args.seed)
        if rows:
            print(table(rows))
    if args.output:
        results = {"seed": args.seed, "accuracy": rows, "loss": losses}
        files.write_text(args.output, json.dumps(results, indent=2) + "\n")
    if args.picture:
        draw(rows, losses, args.picture)
