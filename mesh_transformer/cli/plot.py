"""Plot the training and validation losses of a run from its metrics.jsonl."""

import argparse
import json
import os
from typing import Any

from mesh_transformer.cli.arguments import Parser
from mesh_transformer.performance import pictures
from mesh_transformer.storage import files
from mesh_transformer.training.metrics import NAME
from mesh_transformer.util import InputError


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("metrics", help="model folder, or its metrics.jsonl; may be in a bucket")
    parser.add_argument("picture", help="PNG or SVG file to write")
    return parser.parse_args()


def read_rows(path: str) -> list[dict[str, Any]]:
    """Return the rows of a file metrics.jsonl, each a dict from metric names to values.

    An incomplete last line, which a run is writing or was killed while writing, is left out.

    Args:
      path: the file, or the model folder that contains it.

    Raises:
      InputError: if the file cannot be read, is not in JSON Lines format, or has no rows.
    """
    if files.is_folder(path):
        path = os.path.join(path, NAME)
    rows, line = [], b""
    try:
        with files.open_file(path) as file:
            for line in file:
                row = json.loads(line)
                if not isinstance(row, dict) or "step" not in row:
                    raise ValueError("expected an object with the key step")
                rows.append(row)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); give a model folder, or its metrics.jsonl"
        ) from None
    except ValueError as error:  # not UTF-8, or not JSON
        if not rows or line.endswith(b"\n"):
            raise InputError(
                f"{path}: not a metrics.jsonl (line {len(rows) + 1}: {error}); give a model "
                "folder, or its metrics.jsonl"
            ) from None
    if not rows:
        raise InputError(f"{path} has no rows yet; train the model first")
    return rows


def draw(rows: list[dict[str, Any]], picture: str) -> None:
    figure, axes = pictures.pyplot().subplots(figsize=(7, 4), layout="constrained")
    validation = sorted({key for row in rows for key in row if key.startswith("val/loss_")})
    for key in ("train/loss", *validation):
        points = [(row["step"], row[key]) for row in rows if key in row]  # not of skipped updates
        steps, losses = zip(*points, strict=True) if points else ((), ())
        is_train = key == "train/loss"
        label = "train" if is_train else f"validation: {key[9:]}"
        axes.plot(steps, losses, marker=None if is_train else "o", label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    pictures.save(figure, picture)


def main() -> None:
    args = parse_args()
    draw(read_rows(args.metrics), args.picture)
