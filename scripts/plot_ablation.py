"""Plot the results of `scripts/benchmark.py --ablate --json`, from one JSON file for each mesh."""

import argparse
from typing import Any

from mesh_transformer.cli.arguments import Parser
from mesh_transformer.performance import pictures
from mesh_transformer.util import run_script

COLUMNS = {"ratio": "step time", "memory_bytes": "memory per device"}


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("measured", nargs="+", help="JSON output of the benchmark, one per mesh")
    parser.add_argument("picture", help="SVG or PNG file to write")
    return parser.parse_args()


def read(path: str) -> dict[str, Any]:
    """Read a JSON file written by `benchmark.py --ablate --json`."""
    printed_by = "benchmark.py --ablate --json"
    return pictures.read_object(path, keys={"mode": "ablate"}, printed_by=printed_by)


def draw(measured: list[dict[str, Any]], picture: str) -> None:
    """Draw one row of bar charts for each measurement, and save the picture.

    A bar shows a variant's step time or memory divided by that of the first variant, which is the
    library with all optimisations on.
    """
    figure, axes = pictures.pyplot().subplots(
        len(measured),
        len(COLUMNS),
        figsize=(9, 2.6 * len(measured)),
        layout="constrained",
        squeeze=False,
    )
    for row, measurement in zip(axes, measured, strict=True):
        variants = measurement["variants"]
        names = [variant["name"] for variant in variants]
        for bars, (key, title) in zip(row, COLUMNS.items(), strict=True):
            values = [variant[key] / variants[0][key] for variant in variants]
            bars.bar_label(bars.barh(names, values), fmt="%.2f", padding=2)
            bars.axvline(1, color="black", linewidth=0.8)
            bars.set(title=f"{title}, dp {measurement['dp']} x mp {measurement['mp']}")
            bars.margins(x=0.15)
            bars.invert_yaxis()
        row[1].set_yticklabels([])
    pictures.save(figure, picture)


def main() -> None:
    args = parse_args()
    draw([read(path) for path in args.measured], args.picture)


if __name__ == "__main__":
    run_script(main)
