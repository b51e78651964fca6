"""Draws what `scripts/plan.py --scaling --json` printed: where links cost as much as computing."""

import argparse
import dataclasses
from typing import Any

from mesh_transformer.performance import pictures
from mesh_transformer.performance.scaling import Scaling
from mesh_transformer.util import run_script


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scaling", help="the JSON file")
    parser.add_argument("picture", help="the SVG or PNG to write")
    return parser.parse_args()


def draw(found: dict[str, Any], picture: str) -> None:
    """Links' seconds over computing's: of mp on each generation, of dp as devices are added."""
    figure, (by_mp, by_devices) = pictures.pyplot().subplots(
        1, 2, figsize=(9, 3.6), sharey=True, layout="constrained"
    )
    sizes = found["mp_sizes"][1:]  # the first is 1, and has no links
    for generation, shares in found["mp_shares"].items():
        by_mp.plot(sizes, shares[1:], marker="o", label=generation)
    by_mp.set(title="mp alone", xlabel="mp", ylabel="seconds of links over those of computing")
    in_twos(by_mp, sizes)
    steps = [papers for papers in found["steps"] if papers[0]["dp"] > 1]
    devices = [papers[0]["dp"] * papers[0]["mp"] for papers in steps]
    for place, zero in enumerate(found["zeros"]):
        shares = [
            papers[place]["dp_seconds"] / papers[place]["compute_seconds"] for papers in steps
        ]
        by_devices.plot(devices, shares, marker="o", label=f"dp, ZeRO {zero}")
    if found["mp"] > 1:
        shares = [papers[0]["mp_seconds"] / papers[0]["compute_seconds"] for papers in steps]
        by_devices.plot(devices, shares, linestyle="--", color="gray", label=f"mp {found['mp']}")
    by_devices.set(
        title=f"{found['generation']}, {found['sequences']} sequences a step", xlabel="devices"
    )
    in_twos(by_devices, devices)
    for axes in (by_mp, by_devices):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    pictures.save(figure, picture)


def in_twos(axes: Any, ticks: list[int]) -> None:
    """The horizontal axis, with these numbers on it."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(each) for each in ticks])


def main() -> None:
    args = parse_args()
    keys: dict[str, Any] = dict.fromkeys(each.name for each in dataclasses.fields(Scaling))
    printed_by = "plan.py --scaling --json"
    draw(pictures.read_object(args.scaling, keys=keys, printed_by=printed_by), args.picture)


if __name__ == "__main__":
    run_script(main)
