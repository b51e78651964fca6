"""Tokenised documents on disk, written by a run that can be interrupted and resumed at any point.

Used by the command `mesh-transformer records`.  Only a few batches of text are in memory while the
text is tokenised.  The finished corpus takes 16 bytes of memory per document, because its tokens
stay on disk.
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

from mesh_transformer.data.cuts import cuts_of
from mesh_transformer.data.documents import (
    TEXT_COLUMN,
    Piece,
    read_pieces,
    recut,
    unknown_error,
    without_bad,
    without_first,
)
from mesh_transformer.data.inputs import BadInputHandler
from mesh_transformer.data.spans import Span
from mesh_transformer.data.special_tokens import beginning, with_beginning
from mesh_transformer.data.tokenizer import alphabet, encode_batch
from mesh_transformer.storage import files
from mesh_transformer.util import InputError

BATCH_CHARACTERS = 1 << 21  # 128 pieces of a long document, enough to occupy 128 cores
BATCH_PIECES = 1 << 14
BATCHES_AHEAD = 2  # batches that are read while another is tokenised
SAVE_EVERY = 16  # batches between saves of the progress
PROGRESS = "progress.json"
ENDS = np.dtype(np.int64)
PIECES = 2  # how documents are cut and counted; progress of a version with another number is void
_VERSION = "pieces"  # the name of that number in the progress


class Corpus:
    """The tokens of all documents, concatenated.

    Args:
      tokens: the token ids, [number of tokens].
      ends: for each document, the position in `tokens` after its last token, [number of documents].
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray):
        self.tokens = tokens
        self.starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self.sizes = ends - self.starts


@dataclasses.dataclass
class Source:
    """A text file, with counts of the documents and tokens that it adds to the corpus.

    Attributes:
      name: the file's name without its folder.
      bytes: the file's size in bytes.
      changed: the file's modification time in nanoseconds.
      sha256: the hash of the file's content; empty until the whole file has been read.
      documents: the number of the file's documents in the corpus.
      tokens: the number of the file's tokens in the corpus.
      skipped: the number of unusable items that were skipped in the file, by reason.
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
        return cls(os.path.basename(path), *files.status(path))

    def is_same_file(self, other: "Source") -> bool:
        return (self.name, self.bytes, self.changed) == (other.name, other.bytes, other.changed)


@dataclasses.dataclass
class Progress:
    """The progress of a tokenisation run, as saved in progress.json.

    Attributes:
      settings: the settings that the corpus depends on, besides the text files.
      names: the names of all text files, in reading order.
      sources: the text files that are completely tokenised.
      current: the text file that is partly tokenised, or None.
      ended: the number of documents of the file `current` that are tokenised or dropped.
      pieces: the number of pieces that are tokenised of the document after these, if it is long.
      tokens: the number of valid tokens on disk; a resumed run discards any tokens after them.
      documents: the number of complete documents in the corpus.
      last_end: the number of tokens in all complete documents together.
    """

    settings: dict[str, Any]
    names: list[str]
    sources: list[Source] = dataclasses.field(default_factory=list)
    current: Source | None = None
    ended: int = 0
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
                f"{path}: not a progress file of `mesh-transformer records`; start over with --new"
            ) from error

    def checked(self, new: "Progress", files: list[str], folder: Path) -> "Progress":
        """Return this progress if the run described by `new` can resume from it.

        Text files that are completely tokenised must be unchanged.  If the text file that is partly
        tokenised was modified, the returned progress starts that file over.

        Args:
          new: the empty progress of the new run, with its settings and names.
          files: the paths of the new run's text files, in reading order.
          folder: the folder of the corpus, named in the error message.

        Raises:
          InputError: if the settings, the list of files or a completed file differ; the message
            lists the differences.  Also if another version saved this progress.
        """
        if self.settings.get(_VERSION) != PIECES:
            raise InputError(
                f"{folder}: another version of mesh-transformer began this run, which this one "
                "cannot resume; start over with --new, or resume with that version"
            )
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
                "change these back to resume, or start over with --new"
            )
        current = self.current
        if current and not current.is_same_file(Source.of(files[len(self.sources)])):
            # The user may have fixed bad input in this file, so this file alone is read again.
            self.drop_current()
        return self

    def drop_current(self) -> None:
        """Start the file that is partly tokenised over."""
        self.current, self.ended, self.pieces = None, 0, 0
        self.tokens = self.last_end = sum(source.tokens for source in self.sources)
        self.documents = sum(source.documents for source in self.sources)


def sha256_of(path: str) -> str:
    """Return the hash of a file's content."""
    with files.open_file(path) as raw:
        return hashlib.file_digest(raw, "sha256").hexdigest()


class Batch(NamedTuple):
    """A batch of pieces of text to be tokenised together.

    Attributes:
      items: pieces in reading order.  The last piece of a file is followed by the file's `Source`.
      current: the file that the last item belongs to; None in the last batch of a run.
    """

    items: list[Piece | Source]
    current: Source | None

    def texts(self) -> list[str]:
        return [item.text for item in self.items if isinstance(item, Piece)]


class Tokenizing:
    """A run that tokenises text files into a corpus.

    If `folder` holds the progress of an interrupted run, this run resumes from it.

    Args:
      folder: an existing folder, in which the corpus and the run's progress are stored.
      files: the paths of the text files, in reading order.
      settings: the settings that the corpus depends on, besides the text files.  An interrupted
        run can only be resumed with equal settings.
      clean: a function applied to each document before tokenisation; None for none.
      skip_bad: whether to skip and count unusable input instead of raising InputError.
      column: the column of the text in tables (see `read_pieces`).

    Attributes:
      span: the part of the text file to read, if there is only one file; None for all of it.

    Raises:
      InputError: at construction, if `folder` holds the progress of a different run (see
        `Progress.checked`).
    """

    span: Span | None = None
    batches_ahead = BATCHES_AHEAD
    shows_progress = True

    def __init__(
        self,
        folder: Path,
        files: list[str],
        tokenizer,
        settings: dict[str, Any],
        clean: Callable[[str], str] | None,
        skip_bad: bool,
        column: str = TEXT_COLUMN,
    ):
        self.folder, self.files, self.tokenizer = folder, files, tokenizer
        self.first = beginning(tokenizer)
        self.clean, self.skip_bad, self.column = clean, skip_bad, column
        self.dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
        self.cuts = cuts_of(tokenizer)
        names = [os.path.basename(file) for file in files]
        self.progress = Progress(settings | {_VERSION: PIECES}, names)
        if (folder / PROGRESS).exists():
            self.progress = Progress.load(folder / PROGRESS).checked(self.progress, files, folder)

    def run(self) -> Corpus:
        """Tokenise all text that is not tokenised yet, and return the complete corpus.

        Raises:
          InputError: if a text file cannot be read, or is unusable and `skip_bad` is false.
        """
        progress = self.progress
        with (
            self._open_valid("tokens", progress.tokens * self.dtype.itemsize) as tokens,
            self._open_valid("ends", progress.documents * ENDS.itemsize) as ends,
            tqdm(
                unit="B", unit_scale=True, desc="tokenizing", disable=not self.shows_progress
            ) as bar,
        ):
            bar.total = sum(map(files.size, self.files))
            self._tokenize(tokens, ends, bar)
            self._save(tokens, ends)
            tokens.truncate(progress.tokens * self.dtype.itemsize)
        if not progress.tokens:
            return Corpus(np.zeros(0, self.dtype), np.zeros(0, ENDS))
        return Corpus(
            np.memmap(self.folder / "tokens", self.dtype, mode="r"),
            np.fromfile(self.folder / "ends", ENDS),
        )

    def _tokenize(self, tokens: IO[bytes], ends: IO[bytes], bar: tqdm) -> None:
        """Append all text that is not tokenised yet to the corpus files."""
        for number, (batch, encoded) in enumerate(self._encoded(bar), 1):
            self._write(batch, encoded, tokens, ends)
            bar.set_postfix(documents=self.progress.documents, refresh=False)
            if number % SAVE_EVERY == 0:
                self._save(tokens, ends)

    def _open_valid(self, name: str, size: int) -> IO[bytes]:
        """Truncate a file of the corpus to its first `size` bytes, and open it to write more."""
        path = self.folder / name
        path.touch()
        if path.stat().st_size < size:
            raise InputError(
                f"{path}: found {path.stat().st_size} bytes, fewer than the {size} that {PROGRESS} "
                "records; start over with --new"
            )
        os.truncate(path, size)
        file = open(path, "r+b")  # noqa: SIM115
        file.seek(size)
        return file

    def _encoded(self, bar: tqdm) -> Iterator[tuple[Batch, list[list[int]]]]:
        """Tokenise all batches, and yield (batch, token ids of each of its pieces).

        While a batch is tokenised, up to `batches_ahead` further batches are read.
        """
        pending: deque[tuple[Batch, Future]] = deque()
        with ThreadPoolExecutor(1) as pool:
            for batch in self._batches(bar):
                encoded = pool.submit(encode_batch, self.tokenizer, batch.texts())
                pending.append((batch, encoded))
                if len(pending) > self.batches_ahead:
                    batch, encoded = pending.popleft()
                    yield batch, encoded.result()
            for batch, encoded in pending:
                yield batch, encoded.result()

    def _batches(self, bar: tqdm) -> Iterator[Batch]:
        """Yield the text that is not tokenised yet, as batches of pieces."""
        finished, first = len(self.progress.sources), True
        bar.update(sum(source.bytes for source in self.progress.sources))
        items, characters = [], 0
        for file in self.files[finished:]:
            source = Source.of(file)
            done = (self.progress.ended, self.progress.pieces) if first else (0, 0)
            for item in self._items(file, source, *done, bar):
                items.append(item)
                characters += len(item.text) if isinstance(item, Piece) else 0
                if characters >= BATCH_CHARACTERS or len(items) >= BATCH_PIECES:
                    yield Batch(items, source)
                    items, characters = [], 0
            first = False
        if items:
            yield Batch(items, None)

    def _items(
        self, file: str, source: Source, ended: int, pieces: int, bar: tqdm
    ) -> Iterator[Piece | Source]:
        """Yield the cleaned pieces of a file, and then `source` with `sha256` and `skipped` set.

        Args:
          ended, pieces: the numbers of documents, and of pieces of the next one, to skip at the
            start, because they are tokenised already.
        """
        bad = self._bad_input_handler()
        separator = self.tokenizer.eos_token
        texts = read_pieces(file, separator, bad, bar.update, self.column, self.span)
        known = alphabet(self.tokenizer)
        if not known:
            texts = without_first(texts, ended)
        if clean := self.clean:
            whole = recut(texts, None)
            texts = (piece._replace(text=clean(piece.text)) for piece in whole)
        if known:
            # Documents with unknown characters, which cleaning may add, are not counted.  So all
            # text is cleaned and checked again if a run is resumed.
            texts = without_bad(
                texts, lambda piece: unknown_error(piece.location, piece.text, known), bad
            )
            texts = without_first(texts, ended)
        yield from islice(recut(texts, self.cuts), pieces, None)
        source.skipped = dict(sorted(bad.counts.items()))
        if self.span is None:
            source.sha256 = sha256_of(file)
        yield source

    def _bad_input_handler(self) -> BadInputHandler:
        return BadInputHandler(self.skip_bad)

    def _write(
        self, batch: Batch, encoded: list[list[int]], tokens: IO[bytes], ends: IO[bytes]
    ) -> None:
        """Append a batch to the corpus files, and update the progress in memory."""
        progress, rows = self.progress, iter(encoded)
        for item in batch.items:
            if isinstance(item, Source):
                item.tokens = progress.tokens - sum(source.tokens for source in progress.sources)
                before = sum(source.documents for source in progress.sources)
                item.documents = progress.documents - before
                progress.sources.append(item)
                progress.ended = progress.pieces = 0
                continue
            row = next(rows)
            progress.pieces += 1
            if item.is_end or item.is_bad:
                progress.ended, progress.pieces = progress.ended + 1, 0
            if item.is_bad:  # drop the document's earlier pieces
                progress.tokens = progress.last_end
                # Without truncating the file, which must keep the tokens of the saved progress.
                tokens.seek(progress.tokens * self.dtype.itemsize)
                continue
            if progress.tokens == progress.last_end:  # the document begins here
                row = with_beginning(self.first, row)
            if item.is_end:
                row.append(self.tokenizer.eos_token_id)
            tokens.write(np.array(row, self.dtype).tobytes())
            progress.tokens += len(row)
            if item.is_end:
                ends.write(np.array(progress.tokens, ENDS).tobytes())
                progress.last_end = progress.tokens
                progress.documents += 1
        progress.current = batch.current if progress.ended or progress.pieces else None

    def _save(self, *written: IO[bytes]) -> None:
        """Flush the corpus files to disk, and then save the progress.

        The progress is saved last, so that it never counts tokens that are not on disk yet.
        """
        for file in written:
            file.flush()
            os.fsync(file.fileno())
        self.progress.save(self.folder / PROGRESS)
