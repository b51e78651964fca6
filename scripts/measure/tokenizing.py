"""Compare the throughput of tokenizing with other ways to tokenise the same texts.

The first way is that of `mesh-transformer records`: texts are read from .txt files, such as those
that `fetch_text.py` fetches, cut into pieces, tokenised and written to a corpus on disk.  The
others are one call of the tokenizers library with the same pieces in memory, `datasets.map` with
one process, which writes Arrow files, and with --datatrove the tokenizer of datatrove, which reads
JSON Lines.  They run in turn, and their times leave out the start of a process.  The exit status is
1 if `records` is much slower than the plain call.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from tqdm import tqdm

from mesh_transformer.data.corpus import Tokenizing
from mesh_transformer.data.documents import read_pieces
from mesh_transformer.data.inputs import BadInputHandler, find_files
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.util import run_script

DATATROVE = """
import sys, time
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer

texts, tokenizer, folder = sys.argv[1:]
tokens = DocumentTokenizer(folder, tokenizer_name_or_path=tokenizer, shuffle_documents=False)
logs = folder + "/logs"
pipeline = LocalPipelineExecutor([JsonlReader(texts), tokens], tasks=1, logging_dir=logs)
began = time.perf_counter()
pipeline.run()
print("seconds", time.perf_counter() - began)
"""


MIN_RATIO = 0.8  # required throughput relative to that of the plain call


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("folder", help="folder of .txt files")
    parser.add_argument(
        "--rounds", type=int, default=7, help="number of rounds (default %(default)s)"
    )
    parser.add_argument(
        "--datatrove",
        metavar="PYTHON",
        help="interpreter of an environment with requirements-clean.txt",
    )
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    files = find_files(args.folder, (".txt",))
    tokenizer: Any = load_tokenizer()
    bad = BadInputHandler(False)
    texts = [piece.text for f in files for piece in read_pieces(f, tokenizer.eos_token, bad, int)]
    size = sum(len(text.encode()) for text in texts) / 1e6
    datasets.disable_progress_bars()

    def ours(folder: Path) -> float:
        tokenizing = Tokenizing(folder, files, tokenizer, {}, None, False)
        began = time.perf_counter()
        tokenizing.run()
        return time.perf_counter() - began

    def plain(folder: Path) -> float:
        began = time.perf_counter()
        tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        return time.perf_counter() - began

    def with_datasets(folder: Path) -> float:
        rows = datasets.Dataset.from_dict({"text": texts})
        began = time.perf_counter()
        rows.map(
            lambda batch: {"input_ids": tokenizer(batch["text"])["input_ids"]},
            batched=True,
            remove_columns=["text"],
            cache_file_name=str(folder / "tokens.arrow"),
        )
        return time.perf_counter() - began

    def with_datatrove(folder: Path) -> float:
        (folder / "in").mkdir()
        lines = (json.dumps({"text": text, "id": n}) for n, text in enumerate(texts))
        (folder / "in/texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
        paths = [str(folder / name) for name in ("in", "tokenizer.json", "out")]
        command = [args.datatrove, "-c", DATATROVE, *paths]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        return float(result.stdout.splitlines()[-1].removeprefix("seconds "))

    ways: dict[str, Callable[[Path], float]] = {
        "records": ours,
        "tokenizers": plain,
        "datasets.map": with_datasets,
    }
    if args.datatrove:
        ways["datatrove"] = with_datatrove
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in tqdm(range(-1, args.rounds), desc="rounds"):  # the first one is not counted
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                one = ways[name](Path(folder))
            if turn >= 0:
                seconds[name].append(one)
    medians = {}
    for name, own in seconds.items():
        ratios = [other / mine for other, mine in zip(own, seconds["records"], strict=True)]
        medians[name] = statistics.median(ratios)
        print(
            f"{name}: {size / np.median(own):.2f} MB/s; its time relative to records: median "
            f"{medians[name]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(f"relative to the plain call, required: {MIN_RATIO}")
    return int(medians["tokenizers"] < MIN_RATIO)


if __name__ == "__main__":
    run_script(main)
