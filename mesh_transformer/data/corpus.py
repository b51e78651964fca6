"""Tokenised documents on disk, made from text files by a run that may be stopped at any moment.

Beside create_finetune_tfrecords.py, its user.  What is in memory does not grow with the text:
some pieces under way, and 8 bytes a document once all are made.
"""

import dataclasses
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from mesh_transformer.data.documents import Bad, Piece, read_pieces
from mesh_transformer.data.tokenizer import encode_batch
from mesh_transformer.util import InputError

BATCH_CHARACTERS = 1 << 21  # 128 pieces of a long document, for as many cores
BATCH_PIECES = 1 << 14
BATCHES_AHEAD = 2  # read while one is tokenised
SAVE_EVERY = 16  # batches
PROGRESS = "progress.json"
ENDS = np.dtype(np.int64)


class Corpus:
    """Tokenised documents one after another: `tokens`, and the token after each document."""

    def __init__(self, tokens: np.ndarray, ends: np.ndarray):
        self.tokens = tokens
        self.starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self.sizes = ends - self.starts


@dataclasses.dataclass
class Source:
    """A file of text, and what has been made of it.

    Attributes:
      changed: when it was last written, in nanoseconds.
      skipped: how many things were left out, by reason.
    """

    name: str
    bytes: int
    changed: int
    sha256: str = ""
    documents: int = 0
    tokens: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, path: str) -> "Source":
        status = os.stat(path)
        return cls(os.path.basename(path), status.st_size, status.st_mtime_ns)

    def is_same_file(self, other: "Source") -> bool:
        return (self.name, self.bytes, self.changed) == (other.name, other.bytes, other.changed)


@dataclasses.dataclass
class Progress:
    """How far the corpus on disk is good.

    Attributes:
      settings: all that its bytes depend on beside the files.
      names: the files', in the order in which they are read.
      sources: those that are through.
      current: the one after them, of which `pieces` pieces are through.
      tokens: in the corpus; there may be some more behind them, which do not count.
      documents: those that are through, in the corpus.
      last_end: the tokens of these documents.
    """

    settings: dict[str, Any]
    names: list[str]
    sources: list[Source] = dataclasses.field(default_factory=list)
    current: Source | None = None
    pieces: int = 0
    tokens: int = 0
    documents: int = 0
    last_end: int = 0

    def save(self, path: Path) -> None:
        draft = path.with_suffix(".partial")
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)

    @classmethod
    def load(cls, path: Path) -> "Progress":
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            sources = [Source(**each) for each in values.pop("sources")]
            current = values.pop("current")
            return cls(**values, sources=sources, current=Source(**current) if current else None)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not written by this script; begin with --new") from error

    def checked(self, new: "Progress", files: list[str], folder: Path) -> "Progress":
        """Itself, where it is of the run that `new` begins; else InputError."""
        new_settings = json.loads(json.dumps(new.settings))
        other = [key for key, value in new_settings.items() if self.settings.get(key) != value]
        if self.names != new.names:
            other.append("files")
        else:
            pairs = zip(self.sources, map(Source.of, files), strict=False)
            other += [before.name for before, now in pairs if not before.is_same_file(now)]
        if other:
            raise InputError(
                f"{folder}: was begun with other {', '.join(other)}; restore them to go on, or "
                "begin anew with --new"
            )
        current = self.current
        if current and not current.is_same_file(Source.of(files[len(self.sources)])):
            # As where what was bad in it has been mended: it alone is read again.
            self.current, self.pieces = None, 0
            self.tokens = self.last_end = sum(source.tokens for source in self.sources)
            self.documents = sum(source.documents for source in self.sources)
        return self


class Batch(NamedTuple):
    """Pieces under way.

    Attributes:
      items: each file's `Source` follows its pieces.
      current: the file that the last of them is of.
    """

    items: list[Piece | Source]
    current: Source | None

    def texts(self) -> list[str]:
        return [item.text for item in self.items if isinstance(item, Piece)]


class Tokenizing:
    """The making of a corpus in a folder, which must exist.

    Args:
      files: in the order in which they are read.
      settings: what a corpus must have been begun with to go on.
      clean: is given each piece of text before it is tokenised.
      skip_bad: leave out, and count, what cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        files: list[str],
        tokenizer,
        settings: dict[str, Any],
        clean: Callable[[str], str],
        skip_bad: bool,
    ):
        self.folder, self.files, self.tokenizer = folder, files, tokenizer
        self.clean, self.skip_bad = clean, skip_bad
        self.dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
        self.progress = Progress(settings, [os.path.basename(file) for file in files])
        if (folder / PROGRESS).exists():
            self.progress = Progress.load(folder / PROGRESS).checked(self.progress, files, folder)

    def run(self) -> Corpus:
        """Goes on from where it was, to the end."""
        progress = self.progress
        with (
            self._kept("tokens", progress.tokens * self.dtype.itemsize) as tokens,
            self._kept("ends", progress.documents * ENDS.itemsize) as ends,
            tqdm(unit="B", unit_scale=True, desc="tokenizing") as bar,
        ):
            bar.total = sum(os.path.getsize(file) for file in self.files)
            for number, (batch, encoded) in enumerate(self._encoded(bar), 1):
                self._write(batch, encoded, tokens, ends)
                bar.set_postfix(documents=progress.documents, refresh=False)
                if number % SAVE_EVERY == 0:
                    self._save(tokens, ends)
            self._save(tokens, ends)
        if not progress.tokens:
            return Corpus(np.zeros(0, self.dtype), np.zeros(0, ENDS))
        return Corpus(
            np.memmap(self.folder / "tokens", self.dtype, mode="r"),
            np.fromfile(self.folder / "ends", ENDS),
        )

    def _kept(self, name: str, size: int) -> IO[bytes]:
        """The file, cut to the size up to which it is good, to write behind that."""
        path = self.folder / name
        path.touch()
        if path.stat().st_size < size:
            raise InputError(f"{path}: shorter than {PROGRESS} says; begin anew with --new")
        os.truncate(path, size)
        return open(path, "ab")

    def _encoded(self, bar: tqdm) -> Iterator[tuple[Batch, list[list[int]]]]:
        """The batches with the tokens of their pieces: while one is tokenised, others are read."""
        waiting: deque[tuple[Batch, Future]] = deque()
        with ThreadPoolExecutor(1) as pool:
            for batch in self._batches(bar):
                encoded = pool.submit(encode_batch, self.tokenizer, batch.texts())
                waiting.append((batch, encoded))
                if len(waiting) > BATCHES_AHEAD:
                    batch, encoded = waiting.popleft()
                    yield batch, encoded.result()
            for batch, encoded in waiting:
                yield batch, encoded.result()

    def _batches(self, bar: tqdm) -> Iterator[Batch]:
        """What is still to be read."""
        through, pieces = len(self.progress.sources), self.progress.pieces
        bar.update(sum(source.bytes for source in self.progress.sources))
        items, characters = [], 0
        for file in self.files[through:]:
            source = Source.of(file)
            for item in self._items(file, source, pieces, bar):
                items.append(item)
                characters += len(item.text) if isinstance(item, Piece) else 0
                if characters >= BATCH_CHARACTERS or len(items) >= BATCH_PIECES:
                    yield Batch(items, source)
                    items, characters = [], 0
            pieces = 0
        if items:
            yield Batch(items, None)

    def _items(self, file: str, source: Source, pieces: int, bar: tqdm) -> Iterator[Piece | Source]:
        """The file's pieces after so many, cleaned, and at its end what it was."""
        bad = Bad(self.skip_bad)
        found = read_pieces(file, self.tokenizer.eos_token, bad, bar.update)
        for piece in islice(found, pieces, None):
            yield piece._replace(text=self.clean(piece.text))
        source.skipped = dict(sorted(bad.counts.items()))
        with open(file, "rb") as raw:
            source.sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
        yield source

    def _write(
        self, batch: Batch, encoded: list[list[int]], tokens: IO[bytes], ends: IO[bytes]
    ) -> None:
        progress, rows = self.progress, iter(encoded)
        for item in batch.items:
            if isinstance(item, Source):
                item.tokens = progress.tokens - sum(each.tokens for each in progress.sources)
                before = sum(each.documents for each in progress.sources)
                item.documents = progress.documents - before
                progress.sources.append(item)
                progress.pieces = 0
                continue
            row = next(rows)
            progress.pieces += 1
            if item.is_bad:
                progress.tokens = progress.last_end
                tokens.truncate(progress.tokens * self.dtype.itemsize)
                continue
            if item.is_end:
                row.append(self.tokenizer.eos_token_id)
            tokens.write(np.array(row, self.dtype).tobytes())
            progress.tokens += len(row)
            if item.is_end:
                ends.write(np.array(progress.tokens, ENDS).tobytes())
                progress.last_end = progress.tokens
                progress.documents += 1
        progress.current = batch.current if progress.pieces else None

    def _save(self, *written: IO[bytes]) -> None:
        """What is on disk is safe before it counts."""
        for file in written:
            file.flush()
            os.fsync(file.fileno())
        self.progress.save(self.folder / PROGRESS)
