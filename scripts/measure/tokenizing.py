"""Measures tokenizing against the tokenizers library's plain batch call on the same text, in turns.

A folder of .txt files (`fetch_text.py` gets some) is made into a corpus on disk, in the way of
create_finetune_tfrecords.py: read, cut, tokenised and written.  The plain call is given the files'
whole texts, or, with --cut, the same pieces, all at once and in memory.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mesh_transformer.data.corpus import Tokenizing
from mesh_transformer.data.documents import Bad, find_files, read_pieces
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.util import run_script

LEAST = 0.8  # of the plain call's throughput


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("folder", help="of .txt files")
    parser.add_argument("--pairs", type=int, default=7, help="of measurements (%(default)s)")
    parser.add_argument("--cut", action="store_true", help="give the plain call pieces, not files")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    files = find_files(args.folder, (".txt",))
    tokenizer: Any = load_tokenizer()
    if args.cut:
        found = (read_pieces(file, tokenizer.eos_token, Bad(False), int) for file in files)
        texts = [piece.text for pieces in found for piece in pieces]
    else:
        texts = [Path(file).read_text(encoding="utf-8") for file in files]
    size = sum(len(text.encode()) for text in texts) / 1e6

    def plain() -> float:
        began = time.perf_counter()
        tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        return time.perf_counter() - began

    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder:
            tokenizing = Tokenizing(Path(folder), files, tokenizer, {}, str, False)
            began = time.perf_counter()
            tokenizing.run()
            return time.perf_counter() - began

    for each in (plain, ours):  # the threads start, the files come into the cache
        each()
    pairs = [
        (plain(), ours()) if turn % 2 else (ours(), plain())[::-1] for turn in range(args.pairs)
    ]
    ratios = [alone / made for alone, made in pairs]
    alone, made = (size / np.median(seconds) for seconds in zip(*pairs, strict=True))
    ratio = statistics.median(ratios)
    print(
        f"{size:.1f} MB, {len(pairs)} pairs: the plain call {alone:.2f} MB/s, a corpus {made:.2f} "
        f"MB/s; ratio {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), at least {LEAST}"
    )
    return int(ratio < LEAST)


if __name__ == "__main__":
    run_script(main)
