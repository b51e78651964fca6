"""Plot communication time relative to compute time, from `scripts/plan.py --scaling --json`."""

import argparse
import dataclasses
from typing import Any

from mesh_transformer.cli.arguments import Parser
from mesh_transformer.performance import pictures
from mesh_transformer.performance.scaling import Scaling
from mesh_transformer.util import run_script


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("scaling", help="JSON output of the plan")
    parser.add_argument("picture", help="SVG or PNG file to write")
    return parser.parse_args()


def draw(scaling: dict[str, Any], picture: str) -> None:
    """Draw two charts of link time divided by compute time, and save the picture.

    Link time is the time that communication between devices takes.  The left chart is over mp, with
    one line for each TPU generation.  The right chart is over the number of devices.
    """
    figure, (by_mp, by_devices) = pictures.pyplot().subplots(
        1, 2, figsize=(9, 3.6), sharey=True, layout="constrained"
    )
    sizes = scaling["mp_sizes"][1:]  # the first size is 1, which needs no communication
    for generation, shares in scaling["mp_shares"].items():
        by_mp.plot(sizes, shares[1:], marker="o", label=generation)
    by_mp.set(title="mp only", xlabel="mp", ylabel="link time / compute time")
    use_log2_ticks(by_mp, sizes)
    steps = [estimates for estimates in scaling["steps"] if estimates[0]["dp"] > 1]
    devices = [estimates[0]["dp"] * estimates[0]["mp"] for estimates in steps]
    for index, zero in enumerate(scaling["zeros"]):
        shares = [
            estimates[index]["dp_seconds"] / estimates[index]["compute_seconds"]
            for estimates in steps
        ]
        by_devices.plot(devices, shares, marker="o", label=f"dp, ZeRO {zero}")
    if scaling["mp"] > 1:
        shares = [
            estimates[0]["mp_seconds"] / estimates[0]["compute_seconds"] for estimates in steps
        ]
        by_devices.plot(devices, shares, linestyle="--", color="gray", label=f"mp {scaling['mp']}")
    by_devices.set(
        title=f"{scaling['generation']}, {scaling['sequences']} sequences per step",
        xlabel="devices",
    )
    use_log2_ticks(by_devices, devices)
    for axes in (by_mp, by_devices):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    pictures.save(figure, picture)


def use_log2_ticks(axes: Any, ticks: list[int]) -> None:
    """Make the horizontal axis logarithmic with base 2, and set its ticks."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def main() -> None:
    args = parse_args()
    keys: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Scaling))
    printed_by = "plan.py --scaling --json"
    draw(pictures.read_object(args.scaling, keys=keys, printed_by=printed_by), args.picture)


if __name__ == "__main__":
    run_script(main)
