"""Text and Markdown tables for the results of scripts/benchmark.py; see docs/benchmarks.md.

A result is a JSON object with the measurements of one run of the script.  Its key `mode` names the
kind of benchmark, which determines the columns of the table.
"""

from collections.abc import Callable
from typing import Any

from mesh_transformer.mesh.accelerators import GIB

# A column's title, and the function that formats its cells.
Cell = tuple[str, Callable[[dict[str, Any]], str]]


def lines(result: dict[str, Any]) -> str:
    """Format a benchmark result as lines of readable text.

    The text has one line per column of the Markdown table for the result's mode, followed by the
    profiled operations, if any.  The text of an ablation consists of lines that describe the run,
    and a table with one row per variant.
    """
    if result["mode"] == "ablate":
        where = [f"{title}: {text(result)}" for title, text in _COMMON_COLUMNS]
        return "\n".join([*where, header("ablate"), row(result)])
    cells = [(title, text(result)) for title, text in _cells(result["mode"])]
    output = [f"{title}: {text}" for title, text in cells]
    profile = result.get("profile")
    if profile is not None:
        output.append(f"the {len(profile)} longest operations, all devices together:")
        output += [
            f"  {operation['share']:6.1%} {operation['seconds'] * 1e3:10.2f} ms "
            f"{operation['runs']:7} x {operation['name']}"
            for operation in profile
        ]
    return "\n".join(output)


def row(result: dict[str, Any]) -> str:
    """Format a benchmark result as a row of the Markdown table for the result's mode.

    An ablation gives several rows, one per variant.
    """
    if result["mode"] == "ablate":
        rows = (
            _row(text(variant) for _, text in _VARIANT_COLUMNS) for variant in result["variants"]
        )
        return "\n".join(rows)
    return _row(text(result) for _, text in _cells(result["mode"]))


def header(mode: str) -> str:
    """Return the two header lines of the Markdown table for a benchmark mode."""
    titles = [title for title, _ in _cells(mode)]
    return f"{_row(titles)}\n{_row('---' for _ in titles)}"


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(mode: str) -> list[Cell]:
    """Return the columns of the table for a benchmark mode."""
    if mode == "ablate":
        return _VARIANT_COLUMNS
    return [
        *_COMMON_COLUMNS,
        *_MODE_COLUMNS[mode],
        ("command", lambda result: f"`{result['command']}`"),
    ]


def _shape(result: dict[str, Any]) -> str:
    """Format the model size, the batch size, and the settings that affect speed."""
    config = result["config"]
    return (
        f"{result['parameters'] / 1e9:.3g}B, {config['per_replica_batch']} x "
        f"{config['gradient_accumulation_steps']} x {config['seq']}, {config['dtype']}, remat "
        f"{config['remat']}, {config['partitioning']}, ZeRO {config['zero']}"
    )


def _share(value: float | None) -> str:
    """Format a fraction of a hardware limit as a percentage, or `None` as "peak unknown"."""
    return "peak unknown" if value is None else f"{value:.1%}"


def _limits(result: dict[str, Any]) -> str:
    """Format the peak FLOP/s and the memory bandwidth of the hardware, and their source."""
    limits = result["limits"]
    if limits is None:
        return "unknown; give --hardware"
    peak = result.get("peak_flops") or limits["flops"]
    return (
        f"{peak / 1e12:,.3g} TFLOP/s, {limits['bandwidth'] / 1e9:,.4g} GB/s "
        f"({limits['hardware']}: {limits['source']})"
    )


_COMMON_COLUMNS: list[Cell] = [
    ("date", lambda result: result["date"]),
    ("hardware", lambda result: result["device"]),
    ("versions", lambda result: ", ".join(map(" ".join, result["versions"].items()))),
    ("model, batch x microbatches x sequence", _shape),
    ("dp x mp", lambda result: f"{result['dp']} x {result['mp']}"),
    ("hardware peak", _limits),
]
_MODE_COLUMNS: dict[str, list[Cell]] = {
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
            "peak memory per device",
            lambda f: f"{f['peak_bytes'] / GIB:.2f} GiB ({f['peak_bytes_source']})",
        ),
    ],
    "decode": [
        ("rows, prompt", lambda f: f"{f['rows']}, {f['prompt']}"),
        ("prefill (ms)", lambda f: f"{f['prefill_seconds'] * 1e3:.1f}"),
        ("per token (ms)", lambda f: f"{f['token_seconds'] * 1e3:.2f}"),
        ("tokens/s", lambda f: f"{f['tokens_per_second']:,.1f}"),
        (
            "read per token (weights + cache)",
            lambda f: f"{f['weight_bytes'] / 1e6:,.1f} + {f['cache_bytes'] / 1e6:,.1f} MB",
        ),
        ("share of bandwidth limit", lambda f: _share(f["share_of_limit"])),
    ],
    "checkpoint": [
        ("state", lambda f: f"{f['state_bytes'] / GIB:.2f} GiB"),
        (
            "save, training blocked (s)",
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
        ("times as fast as tf.data", lambda f: f"{f['times_as_fast_as_tf_data']:.2f}"),
        (
            "training tokens/s at peak FLOP/s",
            lambda f: f"{f['most_tokens_per_second_of_a_step'] or float('nan'):,.0f}",
        ),
        (
            "resume after all records, near the first (ms)",
            lambda f: f"{f['resume_seconds'] * 1e3:.1f}, {f['resume_seconds_at_first'] * 1e3:.1f}",
        ),
    ],
}
_VARIANT_COLUMNS: list[Cell] = [
    ("train step", lambda v: v["name"]),
    ("ms", lambda v: f"{v['step_seconds'] * 1e3:.1f}"),
    (
        "relative time (lowest to highest)",
        lambda v: f"{v['ratio']:.2f} ({min(v['ratios']):.2f} to {max(v['ratios']):.2f})",
    ),
    ("temporaries (MiB)", lambda v: f"{v['temporary_bytes'] / 2**20:.1f}"),
    ("total memory (MiB)", lambda v: f"{v['memory_bytes'] / 2**20:.1f}"),
    (
        "all-reduces, MB",
        lambda v: f"{v['all_reduces']}, {v['all_reduced_bytes'] / 1e6:.1f}",
    ),
    ("compile (s)", lambda v: f"{v['compile_seconds']:.1f}"),
]
