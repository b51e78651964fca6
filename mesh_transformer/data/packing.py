"""Tokenised documents to equal sequences, shuffled and packed anew for each epoch.

Only numbers are moved: memory holds about 24 bytes per document and 8 per sequence.  A set of
record files, with its index and manifest, is published complete or not at all.
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
    """What the sequences are, and in which order.

    Attributes:
      length: tokens of a sequence.
      epochs: how often the text is packed.
      is_shuffled: or else the documents stay in their order.
      min_unique_tokens: sequences with fewer different ones are left out.
      verbose: and then printed.
    """

    length: int
    epochs: int
    is_shuffled: bool
    min_unique_tokens: int
    verbose: bool


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


def sequences(
    corpus: Corpus, order: Order, tokenizer, generator: random.Random
) -> Iterator[tuple[Packing, int]]:
    """The sequences of all epochs in the order to be written: a packing, and a number in it.

    They are not read yet, so that those which are written already cost nothing.
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
    """The numbers of the sequences that are varied enough."""
    for number in range(len(packing)):
        if order.min_unique_tokens > 0:
            found = len(np.unique(packing[number]))
            if found < order.min_unique_tokens:
                if order.verbose:
                    text = tokenizer.decode(packing[number])
                    tqdm.write(f"left out, {found} different tokens: {text!r}")
                continue
        yield number


def write_parts(
    folder: Path, sequences: Iterator[tuple[Packing, int]], most: int | None
) -> list[tuple[Path, int]]:
    """Files of at most so many sequences, and their numbers; those that are there are not made."""
    found = []
    with tqdm(desc="writing", unit=" sequences") as bar:
        for number in count():
            first = next(sequences, None)
            if first is None:
                return found
            part = chain([first], islice(sequences, most - 1 if most else None))
            path = folder / f"{number:05d}.tfrecords"
            if path.exists():
                written = sum(1 for _ in part)
                bar.update(written)
            else:
                written = write_records(str(path), _read(part, bar))
            found.append((path, written))
    return found


def _read(part: Iterator[tuple[Packing, int]], bar: tqdm) -> Iterator[Any]:
    for packing, number in part:
        yield packing[number]
        bar.update()


def publish(base: Path, parts: list[tuple[Path, int]], manifest: dict[str, Any]) -> Path:
    """Moves the files to their places, then lists them in the manifest and the index.

    `base` is the set's path without an ending; returned is the index.
    """
    files = []
    for number, (path, written) in enumerate(parts):
        which = f"_{number:05d}" if len(parts) > 1 else ""
        place = base.with_name(f"{base.name}{which}_{written}.tfrecords")
        with open(path, "rb") as raw:
            sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
        size = path.stat().st_size
        files.append({"name": place.name, "sequences": written, "bytes": size, "sha256": sha256})
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
