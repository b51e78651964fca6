"""Compare the throughput of tokenizing with a plain batch call of the tokenizers library.

The script measures two ways to tokenise a folder of .txt files, such as those that `fetch_text.py`
fetches.  The first is that of create_finetune_tfrecords.py: the text is read, cut into pieces,
tokenised and written to a corpus on disk.  The second is one call of the tokenizers library, with
all text already in memory as whole files or, with --cut, as the same pieces.  The two are measured
alternately.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mesh_transformer.data.corpus import Tokenizing
from mesh_transformer.data.documents import read_pieces
from mesh_transformer.data.inputs import BadInputHandler, find_files
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.util import run_script

MIN_RATIO = 0.8  # required fraction of the plain call's throughput


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("folder", help="folder of .txt files")
    parser.add_argument(
        "--pairs", type=int, default=7, help="number of measurement pairs (default %(default)s)"
    )
    parser.add_argument(
        "--cut", action="store_true", help="pass pieces to the plain call, not files"
    )
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    files = find_files(args.folder, (".txt",))
    tokenizer: Any = load_tokenizer()
    if args.cut:
        pieces_by_file = (
            read_pieces(file, tokenizer.eos_token, BadInputHandler(False), int) for file in files
        )
        texts = [piece.text for pieces in pieces_by_file for piece in pieces]
    else:
        texts = [Path(file).read_text(encoding="utf-8") for file in files]
    size = sum(len(text.encode()) for text in texts) / 1e6

    def plain() -> float:
        began = time.perf_counter()
        tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        return time.perf_counter() - began

    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder:
            tokenizing = Tokenizing(Path(folder), files, tokenizer, {}, None, False)
            began = time.perf_counter()
            tokenizing.run()
            return time.perf_counter() - began

    for run in (plain, ours):  # warm-up, which starts the threads and caches the files
        run()
    pairs = [
        (plain(), ours()) if turn % 2 else (ours(), plain())[::-1] for turn in range(args.pairs)
    ]
    ratios = [plain_seconds / our_seconds for plain_seconds, our_seconds in pairs]
    plain_rate, our_rate = (size / np.median(seconds) for seconds in zip(*pairs, strict=True))
    ratio = statistics.median(ratios)
    print(
        f"{size:.1f} MB, {len(pairs)} pairs: plain call {plain_rate:.2f} MB/s, corpus "
        f"{our_rate:.2f} MB/s; ratio {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
        f"required {MIN_RATIO}"
    )
    return int(ratio < MIN_RATIO)


if __name__ == "__main__":
    run_script(main)
