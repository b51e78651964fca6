"""Estimate what corpora of 1 B, 300 B and 15 T tokens cost, from rates that are measured here.

The script makes records of a text and reads them, and divides the tokens by the processor time of
each part, so that other programs on the machine matter little.  It prints the rates and a table of
the costs, as Markdown (docs/scale.md).  Training is not measured: its speed is that of the plans in
docs/plan.md.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mesh_transformer.cli import text_records
from mesh_transformer.data import text_set
from mesh_transformer.data.corpus import Tokenizing
from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.record_set import set_size
from mesh_transformer.util import run_script

SIZES = {"1 B": 1e9, "300 B": 300e9, "15 T": 15e12}
# List prices in dollars, of 2025: an hour of a processor core (n2), of a TPU chip on demand, a GB
# of storage for a month.
PRICES = {"core": 0.048, "v5e": 1.2, "v5p": 4.2, "v6e": 2.7, "GB": 0.02}
# The model, the chips, and the lower bound of tokens per second in docs/plan.md.
TRAINED = [("8B on v5e-256", "v5e", 256, 518_941), ("8B on v5p-64", "v5p", 32, 211_920)]
CORES = 64
# Six numbers: the document's first token, end and size, and its place in the shuffled order, twice.
BYTES_PER_DOCUMENT = 48


@dataclasses.dataclass
class Rates:
    """What was measured; tokens per second are those of one core."""

    tokenizing: float
    writing: float
    reading: float
    text_bytes: float  # per token
    record_bytes: float  # per token
    document_tokens: float


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def timed(owner: Any, name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Add the processor time of a function to `seconds` while it is called in this context."""
    function: Callable[..., Any] = getattr(owner, name)

    def wrapper(*args: Any, **options: Any) -> Any:
        began = processor_seconds()
        try:
            return function(*args, **options)
        finally:
            seconds[name] = seconds.get(name, 0.0) + processor_seconds() - began

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, function)


def measure(text: Path, seq: int) -> Rates:
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        command = [str(text), "made", "--output-dir", name, "--seq", str(seq)]
        with timed(Tokenizing, "run", seconds), timed(text_set, "write_parts", seconds):
            text_records.main(command)
        index = os.path.join(name, "made.index")
        sequences, _ = set_size(index)
        tokens = sequences * (seq + 1)
        [records] = Path(name).glob("*.tfrecords")
        size = records.stat().st_size
        loader = TFRecordNewInputs(index, 8, seq)
        loader.get_samples()
        began, batches = processor_seconds(), sequences // 8 - 1
        for _ in range(batches):
            loader.get_samples()
        seconds["read"] = processor_seconds() - began
        loader.close()
        manifest = json.loads(Path(name, "made.manifest.json").read_text())
    return Rates(
        tokens / seconds["run"],
        tokens / seconds["write_parts"],
        batches * 8 * seq / seconds["read"],
        text.stat().st_size / tokens,
        size / tokens,
        manifest["tokens"] / manifest["documents"],
    )


def amount(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:,.2g} {unit}"


def table(rates: Rates) -> str:
    columns: dict[str, list[str]] = {"": list(SIZES)}

    def add(name: str, cost: Callable[[float], str]) -> None:
        columns[name] = [cost(tokens) for tokens in SIZES.values()]

    def cores(rate: float) -> Callable[[float], str]:
        def cost(tokens: float) -> str:
            hours = tokens / rate / 3600
            dollars = amount(hours * PRICES["core"], "$")
            return f"{amount(hours / CORES, 'h')}, {dollars}"

        return cost

    def stored(size: float) -> Callable[[float], str]:
        return lambda tokens: (
            f"{amount(tokens * size / 1e9, 'GB')}, "
            f"{amount(tokens * size / 1e9 * PRICES['GB'], '$')} per month"
        )

    add("text", stored(rates.text_bytes))
    add(f"tokenizing, {CORES} cores", cores(rates.tokenizing))
    add("tokens on disk, of 2 or 4 bytes", stored(2))
    add("packing and writing, one core", lambda n: amount(n / rates.writing / 3600, "h"))
    memory = BYTES_PER_DOCUMENT / rates.document_tokens
    add("memory of packing", lambda n: amount(n * memory / 1e9, "GB"))
    add("records", stored(rates.record_bytes))
    for name, chip, chips, speed in TRAINED:
        add(
            f"training {name}",
            lambda n, chip=chip, chips=chips, speed=speed: (
                f"{amount(n / speed / 86400, 'days')}, "
                f"{amount(n / speed / 3600 * chips * PRICES[chip], '$')}"
            ),
        )
    header, *rest = columns.items()
    lines = [f"| | {' | '.join(header[1])} |", "|---" * (len(SIZES) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rest)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("text", type=Path, help="file of text, of some MB")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--documents", type=float, help="tokens per document (default: the text's)")
    args = parser.parse_args()
    rates = measure(args.text, args.seq)
    if args.documents:
        rates.document_tokens = args.documents
    for field in dataclasses.fields(rates):
        print(f"{field.name}: {getattr(rates, field.name):,.2f}")
    print(table(rates))


if __name__ == "__main__":
    run_script(main)
