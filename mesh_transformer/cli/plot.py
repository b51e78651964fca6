"""Plot the training and validation losses of a run from its metrics.jsonl.

Losses by position, if the run has measured them, are plotted beside them.
"""

import argparse
from typing import Any

from mesh_transformer.cli.arguments import Parser
from mesh_transformer.performance import pictures
from mesh_transformer.training.runs import read_rows

POSITIONS = "val_position/"  # that of `evaluation.validation`, whose import takes seconds


def parse_args() -> argparse.Namespace:
    parser = Parser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("metrics", help="model folder, or its metrics.jsonl; may be in a bucket")
    parser.add_argument("picture", help="PNG or SVG file to write")
    return parser.parse_args()


def draw(rows: list[dict[str, Any]], picture: str) -> None:
    placed = [row for row in rows if any(key.startswith(POSITIONS) for key in row)]
    count = 2 if placed else 1
    plots = pictures.pyplot().subplots(
        1, count, figsize=(7 * count, 4), layout="constrained", squeeze=False
    )
    figure, ((axes, *beside),) = plots
    validation = sorted({key for row in rows for key in row if key.startswith("val/loss_")})
    for key in ("train/loss", *validation):
        points = [(row["step"], row[key]) for row in rows if key in row]  # not of skipped updates
        steps, losses = zip(*points, strict=True) if points else ((), ())
        is_train = key == "train/loss"
        label = "train" if is_train else f"validation: {key[9:]}"
        axes.plot(steps, losses, marker=None if is_train else "o", label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    for right in beside:
        draw_positions(placed[:1] + placed[1:][-1:], right)
    for each in (axes, *beside):
        each.grid(alpha=0.3)
        each.legend()
    pictures.save(figure, picture)


def draw_positions(rows: list[dict[str, Any]], axes: Any) -> None:
    """Draw the losses of each validation set by the last position of each range of positions."""
    for row in rows:
        curves: dict[str, list[tuple[int, float]]] = {}
        for key, loss in row.items():
            if key.startswith(POSITIONS):
                name, _, places = key.removeprefix(POSITIONS).rpartition("/")
                curves.setdefault(name, []).append((int(places.partition("-")[2]) + 1, loss))
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{name}, step {row['step']}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="positions of a text, up to", ylabel="loss (nats per token)")


def main() -> None:
    args = parse_args()
    draw(read_rows(args.metrics), args.picture)
    print(f"wrote {args.picture}")
