"""Packing of tokenised documents into sequences of equal length, reshuffled for each epoch.

Shuffling reorders the indices of documents and sequences, not their tokens.  It takes 40 bytes of
memory per document (65 at the start of the second and later epochs) and 8 bytes per sequence.  The
index file of a record set is written last, when all other files of the set are complete.
"""

import dataclasses
import hashlib
import json
import os
import random
from array import array
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mesh_transformer.data.corpus import Corpus
from mesh_transformer.data.record_offsets import write_offsets
from mesh_transformer.data.tfrecords import write_records
from mesh_transformer.storage import files


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """What determines a record set, besides the tokenizer and the text files."""

    text_column: str
    seq: int
    normalize_with_ftfy: bool
    normalize_with_wikitext_detokenize: bool
    min_unique_tokens: int
    n_repack_epochs: int
    seed: int
    preserve_data_order: bool
    sequences_per_file: int | None


@dataclasses.dataclass(frozen=True)
class TextOptions(TextSettings):
    """How record sets are made from text: the flags of `mesh-transformer records`.

    Attributes:
      input_path: what the user gave as input, for messages.
      output_dir: the folder of the record sets, which may be in a bucket.
      tokenizer: the tokenizer's name; None for gpt2.
      new: whether to start over, and to replace a record set that was made with other options.
      verbose: whether skipped sequences are printed.
    """

    input_path: str
    output_dir: str
    tokenizer: str | None
    skip_bad: bool
    new: bool
    verbose: bool


class Packing:
    """The sequences of one epoch.

    `carry` and all documents are concatenated and cut into sequences of `length` tokens.
    `len(packing)` is the number of complete sequences, and `packing[i]` reads the tokens of
    sequence `i` from the corpus.

    Args:
      order: the indices of the documents, in the order in which they are concatenated.
      carry: the tokens left over from the previous epoch.
      length: tokens per sequence.
    """

    def __init__(self, corpus: Corpus, order: np.ndarray, carry: np.ndarray, length: int):
        self.corpus, self.order, self.carry, self.length = corpus, order, carry, length
        # The end of each part of the concatenation: part 0 is `carry`, and part i is document
        # order[i - 1].
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
    corpus: Corpus, options: TextOptions, tokenizer, generator: random.Random
) -> Iterator[tuple[Packing, int]]:
    """Yield (packing, i) for each sequence of all epochs, in the order in which to write them.

    The tokens of the sequence are `packing[i]`.  Because only the index `i` is yielded, a resumed
    run need not read the tokens of sequences that are already written.
    """
    documents = array("q", range(len(corpus.sizes)))
    carry = corpus.tokens[:0]
    for _ in range(options.n_repack_epochs):
        if not options.preserve_data_order:
            generator.shuffle(documents)  # type: ignore[arg-type]
        packing = Packing(corpus, np.array(documents), carry, options.seq + 1)
        kept = array("q", select(packing, options, tokenizer))
        if not options.preserve_data_order:
            generator.shuffle(kept)  # type: ignore[arg-type]
        for number in kept:
            yield packing, number
        carry = packing.remainder()


def select(packing: Packing, options: TextOptions, tokenizer) -> Iterator[int]:
    """Yield the indices of sequences with at least `options.min_unique_tokens` distinct tokens."""
    for number in range(len(packing)):
        if options.min_unique_tokens > 0:
            distinct = len(np.unique(packing[number]))
            if distinct < options.min_unique_tokens:
                if options.verbose:
                    text = tokenizer.decode(packing[number])
                    tqdm.write(f"skipped, {distinct} distinct tokens: {text!r}")
                continue
        yield number


def write_parts(
    folder: Path, sequences: Iterator[tuple[Packing, int]], most: int | None
) -> list[tuple[Path, int]]:
    """Write sequences to numbered record files in a folder.

    A file that already exists was completed by an interrupted run, and is not written again.

    Args:
      sequences: (packing, i) for each sequence, as yielded by the function `sequences`.
      most: the maximum number of sequences per file; None for a single file.

    Returns:
      (path, number of sequences) for each file.
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
    """Move the record files to their final names, then write manifest, offsets and index.

    Args:
      base: the path of the record set, to which each file's ending is appended.
      parts: (path, number of sequences) for each record file.
      manifest: entries for the manifest.  The total number of sequences and a list of the record
        files are added to these entries.

    Returns:
      The path of the index.
    """
    entries = []
    for number, (path, written) in enumerate(parts):
        part = f"_{number:05d}" if len(parts) > 1 else ""
        target = base.with_name(f"{base.name}{part}_{written}.tfrecords")
        with open(path, "rb") as raw:
            sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
        size = path.stat().st_size
        entries.append({"name": target.name, "sequences": written, "bytes": size, "sha256": sha256})
    for (path, _), entry in zip(parts, entries, strict=True):
        os.replace(path, base.with_name(entry["name"]))
    total = sum(written for _, written in parts)
    contents = json.dumps({"sequences": total, **manifest, "files": entries}, indent=1) + "\n"
    files.write_text(str(base.with_name(f"{base.name}.manifest.json")), contents)
    index = base.with_name(f"{base.name}.index")
    write_offsets(str(index), [entry["name"] for entry in entries])
    files.write_text(str(index), "".join(f"{entry['name']}\n" for entry in entries))
    return index
