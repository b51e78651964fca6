"""Draws what `scripts/benchmark.py --ablate --json` measured, one file a mesh, as an SVG."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from mesh_transformer.util import InputError, run_script

DRAWN = {"ratio": "step time", "memory_bytes": "memory of a device"}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", nargs="+", help="JSON files")
    parser.add_argument("picture", help="the SVG to write")
    return parser.parse_args()


def read(path: str) -> dict[str, Any]:
    """One measurement; InputError for any other file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        assert found["mode"] == "ablate"
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AssertionError):
        raise InputError(f"{path}: is not what benchmark.py --ablate --json prints") from None
    return found


def draw(measured: list[dict[str, Any]], picture: str) -> None:
    """Bars of each figure over the library's own, which is 1."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "ablation"  # the same figures, the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
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
    temporary = picture + ".tmp"
    figure.savefig(temporary, format="svg", metadata={"Date": None})
    os.replace(temporary, picture)


def main() -> None:
    args = parse_args()
    draw([read(path) for path in args.measured], args.picture)


if __name__ == "__main__":
    run_script(main)
