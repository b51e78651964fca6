"""Draws what `scripts/benchmark.py --ablate --json` measured, one file a mesh."""

import argparse
from typing import Any

from mesh_transformer.performance import pictures
from mesh_transformer.util import run_script

DRAWN = {"ratio": "step time", "memory_bytes": "memory of a device"}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", nargs="+", help="JSON files")
    parser.add_argument("picture", help="the SVG or PNG to write")
    return parser.parse_args()


def read(path: str) -> dict[str, Any]:
    """One measurement; InputError for any other file."""
    printed_by = "benchmark.py --ablate --json"
    return pictures.read_object(path, keys={"mode": "ablate"}, printed_by=printed_by)


def draw(measured: list[dict[str, Any]], picture: str) -> None:
    """Bars of each figure over the library's own, which is 1."""
    figure, axes = pictures.pyplot().subplots(
        len(measured),
        len(DRAWN),
        figsize=(9, 2.6 * len(measured)),
        layout="constrained",
        squeeze=False,
    )
    for row, found in zip(axes, measured, strict=True):
        variants = found["variants"]
        names = [each["name"] for each in variants]
        for place, (key, title) in zip(row, DRAWN.items(), strict=True):
            values = [each[key] / variants[0][key] for each in variants]
            place.bar_label(place.barh(names, values), fmt="%.2f", padding=2)
            place.axvline(1, color="black", linewidth=0.8)
            place.set(title=f"{title}, dp {found['dp']} x mp {found['mp']}")
            place.margins(x=0.15)
            place.invert_yaxis()
        row[1].set_yticklabels([])
    pictures.save(figure, picture)


def main() -> None:
    args = parse_args()
    draw([read(path) for path in args.measured], args.picture)


if __name__ == "__main__":
    run_script(main)
