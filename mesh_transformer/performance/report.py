"""Text and Markdown tables for the results of `bench`; see docs/benchmarks.md.

A result is a JSON object with the measurements of one run.  The columns of its table are those that
all results have, and those of what was measured, in `own` below.  A result with variants has one
row per variant instead, with the columns in `own` alone.
"""

from collections.abc import Callable, Iterable
from typing import Any

from mesh_transformer.mesh.accelerators import GIB

# A column's title, and the function that formats its cells.
Column = tuple[str, Callable[[dict[str, Any]], str]]


def lines(result: dict[str, Any], own: list[Column]) -> str:
    """Format a result as lines of readable text: one per column, or a table of its variants."""
    if "variants" in result:
        where = [f"{title}: {text(result)}" for title, text in _COMMON_COLUMNS]
        return "\n".join([*where, header(result, own), row(result, own)])
    return "\n".join(f"{title}: {text(result)}" for title, text in _columns(result, own))


def row(result: dict[str, Any], own: list[Column]) -> str:
    """Format a result as a row of its Markdown table, or as one row per variant."""
    columns = _columns(result, own)
    rows = result.get("variants", [result])
    return "\n".join(_row(text(values) for _, text in columns) for values in rows)


def header(result: dict[str, Any], own: list[Column]) -> str:
    """Return the two header lines of a result's Markdown table."""
    titles = [title for title, _ in _columns(result, own)]
    return f"{_row(titles)}\n{_row('---' for _ in titles)}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _columns(result: dict[str, Any], own: list[Column]) -> list[Column]:
    """Return all columns of a result's table."""
    if "variants" in result:
        return own
    return [*_COMMON_COLUMNS, *own, ("command", lambda values: f"`{values['command']}`")]


def _shape(result: dict[str, Any]) -> str:
    """Format the model size, the batch size, and the settings that affect speed."""
    config = result["config"]
    return (
        f"{result['parameters'] / 1e9:.3g}B, {config['per_replica_batch']} x "
        f"{config['gradient_accumulation_steps']} x {config['seq']}, {config['dtype']}, remat "
        f"{config['remat']}, {config['partitioning']}, ZeRO {config['zero']}"
    )


def _mesh(result: dict[str, Any]) -> str:
    """Format the sizes of the mesh."""
    cp = result.get("cp", 1)
    return f"{result['dp']} x {f'cp {cp} x ' if cp > 1 else ''}{result['mp']}"


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


_COMMON_COLUMNS: list[Column] = [
    ("date", lambda result: result["date"]),
    ("hardware", lambda result: result["device"]),
    ("versions", lambda result: ", ".join(map(" ".join, result["versions"].items()))),
    ("model, batch x microbatches x sequence", _shape),
    ("dp x mp", _mesh),
    ("hardware peak", _limits),
]
TRAINING: list[Column] = [
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
]
DECODING: list[Column] = [
    ("rows, prompt", lambda f: f"{f['rows']}, {f['prompt']}"),
    ("prefill (ms)", lambda f: f"{f['prefill_seconds'] * 1e3:.1f}"),
    ("per token (ms)", lambda f: f"{f['token_seconds'] * 1e3:.2f}"),
    ("tokens/s", lambda f: f"{f['tokens_per_second']:,.1f}"),
    (
        "read per token (weights + cache)",
        lambda f: f"{f['weight_bytes'] / 1e6:,.1f} + {f['cache_bytes'] / 1e6:,.1f} MB",
    ),
    ("share of bandwidth limit", lambda f: _share(f["share_of_limit"])),
]
