"""Tokenised documents on disk, written by a run that can be interrupted and resumed at any point.

Used by create_finetune_tfrecords.py.  Memory does not grow with the amount of text: it holds a few
batches of pieces and, once everything is tokenised, 8 bytes per document.
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

BATCH_CHARACTERS = 1 << 21  # 128 pieces of a long document, enough to occupy 128 cores
BATCH_PIECES = 1 << 14
BATCHES_AHEAD = 2  # batches read while one is tokenised
SAVE_EVERY = 16  # batches
PROGRESS = "progress.json"
ENDS = np.dtype(np.int64)


class Corpus:
    """Concatenated tokenised documents.

    Args:
      tokens: the tokens of all documents, [number of tokens].
      ends: the position after each document's last token, [number of documents].
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray):
        self.tokens = tokens
        self.starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self.sizes = ends - self.starts


@dataclasses.dataclass
class Source:
    """A text file, and what it contributed to the corpus.

    Attributes:
      name: the file's name without its folder.
      bytes: its size.
      changed: its modification time in nanoseconds.
      sha256: the hash of its content, set once the file has been read to its end.
      documents: the number of its documents in the corpus.
      tokens: the number of its tokens in the corpus.
      skipped: the number of skipped items by reason.
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
    """How much of the corpus on disk is valid, as saved in progress.json.

    Attributes:
      settings: everything besides the files that the corpus depends on.
      names: the names of all files, in reading order.
      sources: the finished files.
      current: the file after them, if it is partly done.
      pieces: the number of finished pieces of the file in progress.
      tokens: the number of valid tokens on disk; any tokens after them are discarded.
      documents: the number of complete documents in the corpus.
      last_end: the number of tokens in these documents.
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
            sources = [Source(**fields) for fields in values.pop("sources")]
            current = values.pop("current")
            return cls(**values, sources=sources, current=Source(**current) if current else None)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}: not written by this script; start over with --new"
            ) from error

    def checked(self, new: "Progress", files: list[str], folder: Path) -> "Progress":
        """Return this progress if the run described by `new` can resume from it.

        If the file in progress was modified, it is read again from its start; the finished files
        must be unchanged.

        Raises:
          InputError: if the settings, the files or a finished file differ; the message lists what.
        """
        new_settings = json.loads(json.dumps(new.settings))
        different = [key for key, value in new_settings.items() if self.settings.get(key) != value]
        if self.names != new.names:
            different.append("files")
        else:
            pairs = zip(self.sources, map(Source.of, files), strict=False)
            different += [before.name for before, now in pairs if not before.is_same_file(now)]
        if different:
            raise InputError(
                f"{folder}: this run differs from the interrupted one in {', '.join(different)}; "
                "restore them to resume, or start over with --new"
            )
        current = self.current
        if current and not current.is_same_file(Source.of(files[len(self.sources)])):
            # For example, bad input in it was fixed: only this file is read again.
            self.current, self.pieces = None, 0
            self.tokens = self.last_end = sum(source.tokens for source in self.sources)
            self.documents = sum(source.documents for source in self.sources)
        return self


class Batch(NamedTuple):
    """A batch of pieces to be tokenised together.

    Attributes:
      items: pieces; each file's `Source` follows its last piece.
      current: the file that the last item belongs to; None in the last batch of a run.
    """

    items: list[Piece | Source]
    current: Source | None

    def texts(self) -> list[str]:
        return [item.text for item in self.items if isinstance(item, Piece)]


class Tokenizing:
    """A run that tokenises text files into a corpus, or resumes an interrupted one.

    Args:
      folder: where the corpus and its progress are kept; it must exist.
      files: the paths of the text files, in reading order.
      settings: everything besides the files that the corpus depends on; a run only resumes one
        with equal settings.
      clean: a function applied to each piece of text before tokenisation.
      skip_bad: whether to skip and count unusable input instead of raising InputError.
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
        """Tokenise everything that is not done yet, and return the corpus."""
        progress = self.progress
        with (
            self._open_valid("tokens", progress.tokens * self.dtype.itemsize) as tokens,
            self._open_valid("ends", progress.documents * ENDS.itemsize) as ends,
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

    def _open_valid(self, name: str, size: int) -> IO[bytes]:
        """Truncate a file of the corpus to its valid `size` in bytes and open it for appending."""
        path = self.folder / name
        path.touch()
        if path.stat().st_size < size:
            raise InputError(f"{path}: shorter than {PROGRESS} says; start over with --new")
        os.truncate(path, size)
        return open(path, "ab")

    def _encoded(self, bar: tqdm) -> Iterator[tuple[Batch, list[list[int]]]]:
        """Yield batches with their pieces' tokens; the next ones are read during tokenisation."""
        pending: deque[tuple[Batch, Future]] = deque()
        with ThreadPoolExecutor(1) as pool:
            for batch in self._batches(bar):
                encoded = pool.submit(encode_batch, self.tokenizer, batch.texts())
                pending.append((batch, encoded))
                if len(pending) > BATCHES_AHEAD:
                    batch, encoded = pending.popleft()
                    yield batch, encoded.result()
            for batch, encoded in pending:
                yield batch, encoded.result()

    def _batches(self, bar: tqdm) -> Iterator[Batch]:
        """Read the remaining pieces of all files, in batches."""
        finished, pieces = len(self.progress.sources), self.progress.pieces
        bar.update(sum(source.bytes for source in self.progress.sources))
        items, characters = [], 0
        for file in self.files[finished:]:
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
        """Yield the file's cleaned pieces after the first `pieces`, then its completed `source`."""
        bad = Bad(self.skip_bad)
        all_pieces = read_pieces(file, self.tokenizer.eos_token, bad, bar.update)
        for piece in islice(all_pieces, pieces, None):
            yield piece._replace(text=self.clean(piece.text))
        source.skipped = dict(sorted(bad.counts.items()))
        with open(file, "rb") as raw:
            source.sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
        yield source

    def _write(
        self, batch: Batch, encoded: list[list[int]], tokens: IO[bytes], ends: IO[bytes]
    ) -> None:
        """Append a batch to the corpus files and record it in the progress."""
        progress, rows = self.progress, iter(encoded)
        for item in batch.items:
            if isinstance(item, Source):
                item.tokens = progress.tokens - sum(source.tokens for source in progress.sources)
                before = sum(source.documents for source in progress.sources)
                item.documents = progress.documents - before
                progress.sources.append(item)
                progress.pieces = 0
                continue
            row = next(rows)
            progress.pieces += 1
            if item.is_bad:  # drop the document's earlier pieces
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
        """Sync the corpus files to disk before saving the progress that refers to them."""
        for file in written:
            file.flush()
            os.fsync(file.fileno())
        self.progress.save(self.folder / PROGRESS)
