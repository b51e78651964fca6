"""Text files and archives to one file of token records, in the original's format.

Documents are tokenised once, in order of file, into a temporary file; shuffling and packing then
move only their numbers (about 24 bytes a document and 8 a sequence), so a corpus may be larger
than memory.  For one epoch the sequences, and with the same seed and file order their order, are
the original's.  Original: the tokens left over after a shuffled epoch, and a last sequence that
was exactly full, were lost; here they begin the next epoch.
"""

import argparse
import os
import random
import tempfile
from array import array
from collections.abc import Iterator
from typing import IO

import numpy as np
from text_documents import cleaner, find_files, read_pieces
from tqdm import tqdm

from mesh_transformer.record_files import write_set
from mesh_transformer.tokenizer import load_tokenizer
from mesh_transformer.util import InputError, run_script

BATCH_CHARACTERS = 1 << 21  # sixteen pieces of a long document, for as many cores


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the model's training records from text.")
    parser.add_argument(
        "input_path", help="a file or a folder of .txt, .jsonl.zst, .xz and .tar.gz files"
    )
    parser.add_argument("name", help="writes NAME_<number of sequences>.tfrecords and NAME.index")
    parser.add_argument("--output-dir", default=".", help="default: the current folder")
    parser.add_argument("--seq", type=positive, default=2048, help="the config's seq (%(default)s)")
    parser.add_argument("--tokenizer", help="a folder or a hub name; default: gpt2")
    cleaning = parser.add_argument_group("cleaning")
    cleaning.add_argument("--normalize-with-ftfy", action="store_true", help="repair garbled text")
    cleaning.add_argument(
        "--normalize-with-wikitext-detokenize",
        action="store_true",
        help="undo WikiText's spaces around punctuation",
    )
    cleaning.add_argument(
        "--min-unique-tokens",
        type=int,
        default=0,
        help="leave out sequences with fewer different tokens, whose gradients can be large; "
        "200 is a good value, 0 (the default) keeps all",
    )
    packing = parser.add_argument_group("order and packing")
    packing.add_argument(
        "--n-repack-epochs",
        type=positive,
        default=1,
        help="write the text this many times, shuffled and packed anew each time",
    )
    packing.add_argument("--seed", type=int, default=10, help="of the shuffles (%(default)s)")
    packing.add_argument("--preserve-data-order", action="store_true", help="do not shuffle")
    parser.add_argument("--verbose", action="store_true", help="print the sequences left out")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


class Corpus:
    """Tokenised documents one after another: `tokens`, and the token after each document."""

    def __init__(self, tokens: np.ndarray, ends: np.ndarray):
        self.tokens = tokens
        self.starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self.sizes = ends - self.starts


class Packing:
    """`carry` and the documents in `order` as one run of tokens, cut into sequences."""

    def __init__(self, corpus: Corpus, order: np.ndarray, carry: np.ndarray, length: int):
        self.corpus, self.order, self.carry, self.length = corpus, order, carry, length
        # Part 0 is the carry, part i is document order[i - 1].
        self.ends = len(carry) + np.cumsum(np.concatenate([[0], corpus.sizes[order]]))

    def __len__(self) -> int:
        return int(self.ends[-1]) // self.length

    def __getitem__(self, number: int) -> np.ndarray:
        return self._read(number * self.length, (number + 1) * self.length)

    def remainder(self) -> np.ndarray:
        """The tokens after the last whole sequence."""
        return self._read(len(self) * self.length, int(self.ends[-1]))

    def _read(self, start: int, stop: int) -> np.ndarray:
        parts = [self.carry[start:stop]]
        start = max(start, len(self.carry))
        while start < stop:
            part = int(np.searchsorted(self.ends, start, side="right"))
            document = self.order[part - 1]
            first = self.corpus.starts[document] + start - self.ends[part - 1]
            count = min(stop, self.ends[part]) - start
            parts.append(self.corpus.tokens[first : first + count])
            start += count
        return np.concatenate(parts)


def tokenize(files: list[str], tokenizer, options: argparse.Namespace, spill: IO[bytes]) -> Corpus:
    """All documents of the files, each followed by the end-of-text token, kept in `spill`."""
    clean = cleaner(options.normalize_with_ftfy, options.normalize_with_wikitext_detokenize)
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    ends = array("q")

    def write(batch: list[tuple[str, bool]]) -> None:
        texts = [clean(text) for text, _ in batch]
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)[
            "input_ids"
        ]
        for tokens, (_, is_end) in zip(encoded, batch, strict=True):
            suffix = [tokenizer.eos_token_id] if is_end else []
            spill.write(np.array(tokens + suffix, dtype).tobytes())
            if is_end:
                ends.append(spill.tell() // dtype.itemsize)

    size = sum(os.path.getsize(file) for file in files)
    with tqdm(total=size, unit="B", unit_scale=True, desc="tokenizing") as bar:
        for batch in batches(files, tokenizer.eos_token, bar):
            write(batch)
    if not ends:
        raise InputError(f"{options.input_path}: all its files are empty; expected text")
    spill.flush()
    return Corpus(np.memmap(spill, dtype, mode="r"), np.array(ends))


def batches(files: list[str], separator: str, bar: tqdm) -> Iterator[list[tuple[str, bool]]]:
    """The files' pieces in batches: the tokenizer spreads each over the cores."""
    batch, characters = [], 0
    for file in files:
        for piece in read_pieces(file, separator, bar.update):
            batch.append(piece)
            characters += len(piece[0])
            if characters >= BATCH_CHARACTERS or len(batch) >= 1000:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def pack(
    corpus: Corpus, tokenizer, options: argparse.Namespace, generator: random.Random
) -> Iterator[np.ndarray]:
    """The sequences of all epochs, `seq + 1` tokens each, in the order to be written."""
    length = options.seq + 1
    order = array("q", range(len(corpus.sizes)))
    carry = corpus.tokens[:0]
    written = 0
    for _ in range(options.n_repack_epochs):
        if not options.preserve_data_order:
            generator.shuffle(order)  # type: ignore[arg-type]
        packing = Packing(corpus, np.array(order), carry, length)
        kept = array("q", select(packing, tokenizer, options))
        if not options.preserve_data_order:
            generator.shuffle(kept)  # type: ignore[arg-type]
        for number in kept:
            yield packing[number]
        written += len(kept)
        carry = packing.remainder()
    if not written:
        raise InputError(
            f"{options.input_path}: found {len(corpus.tokens)} tokens, but no sequence of {length} "
            f"with {max(options.min_unique_tokens, 1)} different ones; add text, or lower --seq "
            "or --min-unique-tokens"
        )


def select(packing: Packing, tokenizer, options: argparse.Namespace) -> Iterator[int]:
    """The numbers of the sequences that are varied enough."""
    for number in range(len(packing)):
        if options.min_unique_tokens > 0:
            found = len(np.unique(packing[number]))
            if found < options.min_unique_tokens:
                if options.verbose:
                    text = tokenizer.decode(packing[number])
                    tqdm.write(f"left out, {found} different tokens: {text!r}")
                continue
        yield number


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    tokenizer = load_tokenizer(options.tokenizer)
    if tokenizer.eos_token is None:
        raise InputError(f"tokenizer {options.tokenizer}: has no end-of-text token; choose another")
    generator = random.Random(options.seed)
    files = find_files(options.input_path)
    if not options.preserve_data_order:
        generator.shuffle(files)
    try:
        os.makedirs(options.output_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.output_dir) as spill:
            corpus = tokenize(files, tokenizer, options, spill)
            sequences = tqdm(pack(corpus, tokenizer, options, generator), desc="writing")
            records, index, count = write_set(options.output_dir, options.name, sequences)
    except OSError as error:
        raise InputError(f"{options.output_dir}: cannot be written: {error}") from error
    print(f"{records}: {count} sequences of {options.seq + 1} tokens; {index} lists it")


if __name__ == "__main__":
    run_script(main)
