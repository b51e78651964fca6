"""What scripts/benchmark.py measured, for people: lines, or a table's row in docs/benchmarks.md."""

from collections.abc import Callable
from typing import Any

from mesh_transformer.mesh.accelerators import GIB

Cell = tuple[str, Callable[[dict[str, Any]], str]]  # a column's title, and what stands in it


def lines(found: dict[str, Any]) -> str:
    """A line for each column of the mode's table, and a profile's operations."""
    if found["mode"] == "ablate":
        where = [f"{title}: {text(found)}" for title, text in _WHERE]
        return "\n".join([*where, header("ablate"), row(found)])
    cells = [(title, text(found)) for title, text in _cells(found["mode"])]
    told = [f"{title}: {text}" for title, text in cells]
    profile = found.get("profile")
    if profile is not None:
        told.append(f"the {len(profile)} operations that took longest, of all devices:")
        told += [
            f"  {each['share']:6.1%} {each['seconds'] * 1e3:10.2f} ms {each['runs']:7} x "
            f"{each['name']}"
            for each in profile
        ]
    return "\n".join(told)


def row(found: dict[str, Any]) -> str:
    """A row of the mode's table in Markdown, or a row for each variant of an ablation."""
    if found["mode"] == "ablate":
        told = (_row(text(each) for _, text in _OF_VARIANT) for each in found["variants"])
        return "\n".join(told)
    return _row(text(found) for _, text in _cells(found["mode"]))


def header(mode: str) -> str:
    """The two lines above those rows."""
    titles = [title for title, _ in _cells(mode)]
    return f"{_row(titles)}\n{_row('---' for _ in titles)}"


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(mode: str) -> list[Cell]:
    if mode == "ablate":
        return _OF_VARIANT
    return [*_WHERE, *_OF_MODE[mode], ("command", lambda found: f"`{found['command']}`")]


def _versions(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found["versions"].items())


def _shape(found: dict[str, Any]) -> str:
    config = found["config"]
    return (
        f"{found['parameters'] / 1e9:.3g}B, {config['per_replica_batch']} x "
        f"{config['gradient_accumulation_steps']} x {config['seq']}, {config['dtype']}, remat "
        f"{config['remat']}, {config['partitioning']}, ZeRO {config['zero']}"
    )


def _share(value: float | None) -> str:
    return "peak unknown" if value is None else f"{value:.1%}"


def _limits(found: dict[str, Any]) -> str:
    limits = found["limits"]
    if limits is None:
        return "unknown; give --hardware"
    peak = found.get("peak_flops") or limits["flops"]
    return (
        f"{peak / 1e12:,.3g} TFLOP/s, {limits['bandwidth'] / 1e9:,.4g} GB/s "
        f"({limits['hardware']}: {limits['source']})"
    )


_WHERE: list[Cell] = [
    ("date", lambda found: found["date"]),
    ("hardware", lambda found: found["device"]),
    ("versions", _versions),
    ("model, batch x microbatches x sequence", _shape),
    ("dp x mp", lambda found: f"{found['dp']} x {found['mp']}"),
    ("peak used", _limits),
]
_OF_MODE: dict[str, list[Cell]] = {
    "train": [
        (
            "compile, first step (s)",
            lambda f: f"{f['compile_seconds']:.1f}, {f['first_step_seconds']:.2f}",
        ),
        ("step (s)", lambda f: f"{f['step_seconds']:.4g}"),
        ("tokens/s", lambda f: f"{f['speed']['tokens_per_second']:,.0f}"),
        ("TFLOP/s", lambda f: f"{f['speed']['tflops']:.3g}"),
        ("MFU", lambda f: _share(f["speed"]["mfu"])),
        ("HFU", lambda f: _share(f["speed"]["hfu"])),
        (
            "peak memory of a device",
            lambda f: f"{f['peak_bytes'] / GIB:.2f} GiB ({f['peak_bytes_source']})",
        ),
    ],
    "decode": [
        ("rows, prompt", lambda f: f"{f['rows']}, {f['prompt']}"),
        ("prefill (ms)", lambda f: f"{f['prefill_seconds'] * 1e3:.1f}"),
        ("a token (ms)", lambda f: f"{f['token_seconds'] * 1e3:.2f}"),
        ("tokens/s", lambda f: f"{f['tokens_per_second']:,.1f}"),
        (
            "read for a token (weights + cache)",
            lambda f: f"{f['weight_bytes'] / 1e6:,.1f} + {f['cache_bytes'] / 1e6:,.1f} MB",
        ),
        ("share of the bandwidth's limit", lambda f: _share(f["share_of_limit"])),
    ],
    "checkpoint": [
        ("state", lambda f: f"{f['state_bytes'] / GIB:.2f} GiB"),
        (
            "save, until training may go on (s)",
            lambda f: f"{f['save_seconds']:.2f}, {f['blocked_seconds']:.2f}",
        ),
        (
            "GB/s; save over write + fsync",
            lambda f: f"{f['save_bytes_per_second'] / 1e9:.2f}; {f['save_ratio']:.2f}",
        ),
        ("restore (s)", lambda f: f"{f['restore_seconds']:.2f}"),
        (
            "GB/s; restore over read",
            lambda f: f"{f['restore_bytes_per_second'] / 1e9:.2f}; {f['restore_ratio']:.2f}",
        ),
    ],
    "loader": [
        ("records/s", lambda f: f"{f['records_per_second']:,.0f}"),
        ("tokens/s", lambda f: f"{f['tokens_per_second']:,.0f}"),
        ("times tf.data", lambda f: f"{f['times_as_fast_as_tf_data']:.2f}"),
        (
            "tokens/s of a step at the peak",
            lambda f: f"{f['most_tokens_per_second_of_a_step'] or float('nan'):,.0f}",
        ),
        (
            "resume behind all records, near the first (ms)",
            lambda f: f"{f['resume_seconds'] * 1e3:.1f}, {f['resume_seconds_at_first'] * 1e3:.1f}",
        ),
    ],
}
_OF_VARIANT: list[Cell] = [
    ("train step", lambda v: v["name"]),
    ("ms", lambda v: f"{v['step_seconds'] * 1e3:.1f}"),
    (
        "times the first (lowest to highest)",
        lambda v: f"{v['ratio']:.2f} ({min(v['ratios']):.2f} to {max(v['ratios']):.2f})",
    ),
    ("temporaries (MiB)", lambda v: f"{v['temporary_bytes'] / 2**20:.1f}"),
    ("whole memory (MiB)", lambda v: f"{v['memory_bytes'] / 2**20:.1f}"),
    (
        "all-reduces, MB",
        lambda v: f"{v['all_reduces']}, {v['all_reduced_bytes'] / 1e6:.1f}",
    ),
    ("compiled in (s)", lambda v: f"{v['compile_seconds']:.1f}"),
]
