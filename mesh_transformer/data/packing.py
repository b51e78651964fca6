"""Packing of tokenised documents into sequences of equal length, reshuffled for each epoch.

Only the numbers of documents and sequences are shuffled: memory holds about 24 bytes per document
and 8 per sequence.  A set of record files, with its index and manifest, is published completely or
not at all.
"""

import hashlib
import json
import os
import random
from array import array
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from mesh_transformer.data.corpus import Corpus
from mesh_transformer.data.tfrecords import write_records


class Order(NamedTuple):
    """Options that determine the sequences and their order.

    Attributes:
      length: tokens per sequence.
      epochs: how many times the text is packed.
      is_shuffled: whether documents and sequences are shuffled in each epoch.
      min_unique_tokens: sequences with fewer distinct tokens are skipped.
      verbose: whether skipped sequences are printed.
    """

    length: int
    epochs: int
    is_shuffled: bool
    min_unique_tokens: int
    verbose: bool


class Packing:
    """The sequences of an epoch, cut from the concatenation of `carry` and the documents.

    Sequences are read from the corpus on access; `len` is the number of complete ones.

    Args:
      order: the numbers of the documents, in the order in which they are concatenated.
      carry: the tokens left over from the previous epoch.
      length: tokens per sequence.
    """

    def __init__(self, corpus: Corpus, order: np.ndarray, carry: np.ndarray, length: int):
        self.corpus, self.order, self.carry, self.length = corpus, order, carry, length
        # The end of each part: part 0 is the carry, part i is document order[i - 1].
        self.ends = len(carry) + np.cumsum(np.concatenate([[0], corpus.sizes[order]]))

    def __len__(self) -> int:
        return int(self.ends[-1]) // self.length

    def __getitem__(self, number: int) -> np.ndarray:
        return self._read(number * self.length, (number + 1) * self.length)

    def remainder(self) -> np.ndarray:
        """Return the tokens after the last complete sequence."""
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


def sequences(
    corpus: Corpus, order: Order, tokenizer, generator: random.Random
) -> Iterator[tuple[Packing, int]]:
    """Yield the sequences of all epochs in writing order, as (packing, number in the packing).

    Their tokens are not read here, so skipping sequences that are already written costs nothing.
    """
    documents = array("q", range(len(corpus.sizes)))
    carry = corpus.tokens[:0]
    for _ in range(order.epochs):
        if order.is_shuffled:
            generator.shuffle(documents)  # type: ignore[arg-type]
        packing = Packing(corpus, np.array(documents), carry, order.length)
        kept = array("q", select(packing, order, tokenizer))
        if order.is_shuffled:
            generator.shuffle(kept)  # type: ignore[arg-type]
        for number in kept:
            yield packing, number
        carry = packing.remainder()


def select(packing: Packing, order: Order, tokenizer) -> Iterator[int]:
    """Yield the numbers of the sequences with enough distinct tokens."""
    for number in range(len(packing)):
        if order.min_unique_tokens > 0:
            distinct = len(np.unique(packing[number]))
            if distinct < order.min_unique_tokens:
                if order.verbose:
                    text = tokenizer.decode(packing[number])
                    tqdm.write(f"skipped, {distinct} distinct tokens: {text!r}")
                continue
        yield number


def write_parts(
    folder: Path, sequences: Iterator[tuple[Packing, int]], most: int | None
) -> list[tuple[Path, int]]:
    """Write sequences to numbered record files in a folder; existing files are kept as they are.

    Args:
      most: the maximum number of sequences per file; None for a single file.

    Returns:
      The path and the number of sequences of each file.
    """
    parts = []
    with tqdm(desc="writing", unit=" sequences") as bar:
        for number in count():
            first = next(sequences, None)
            if first is None:
                return parts
            part = chain([first], islice(sequences, most - 1 if most else None))
            path = folder / f"{number:05d}.tfrecords"
            if path.exists():
                written = sum(1 for _ in part)
                bar.update(written)
            else:
                written = write_records(str(path), _read(part, bar))
            parts.append((path, written))
    return parts


def _read(part: Iterator[tuple[Packing, int]], bar: tqdm) -> Iterator[Any]:
    for packing, number in part:
        yield packing[number]
        bar.update()


def publish(base: Path, parts: list[tuple[Path, int]], manifest: dict[str, Any]) -> Path:
    """Move the record files to their final names, then write the manifest and the index.

    Args:
      base: the set's path without an ending.
      parts: the path and the number of sequences of each record file.
      manifest: entries of the manifest; the files and the number of sequences are added.

    Returns:
      The path of the index.
    """
    files = []
    for number, (path, written) in enumerate(parts):
        part = f"_{number:05d}" if len(parts) > 1 else ""
        target = base.with_name(f"{base.name}{part}_{written}.tfrecords")
        with open(path, "rb") as raw:
            sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
        size = path.stat().st_size
        files.append({"name": target.name, "sequences": written, "bytes": size, "sha256": sha256})
    for (path, _), file in zip(parts, files, strict=True):
        os.replace(path, base.with_name(file["name"]))
    total = sum(written for _, written in parts)
    contents = json.dumps({"sequences": total, **manifest, "files": files}, indent=1) + "\n"
    _replace(base.with_name(f"{base.name}.manifest.json"), contents)
    index = base.with_name(f"{base.name}.index")
    _replace(index, "".join(f"{file['name']}\n" for file in files))
    return index


def _replace(path: Path, contents: str) -> None:
    draft = path.with_name(f".{path.name}.partial")
    draft.write_text(contents, encoding="utf-8")
    os.replace(draft, path)
