"""Splits text, or the rows of tables, at random into a training part and a validation part.

The text is read twice, first to measure the documents and then to copy them.  It is read piece by
piece, so that the whole text, and even a single document, may be larger than memory.  Only a few
numbers per document are kept in memory.
"""

import contextlib
import json
import os
import random
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from tqdm import tqdm

from mesh_transformer.data.documents import TEXT_COLUMN, Piece, read_pieces
from mesh_transformer.data.file_types import FILE_TYPES, TABLE_TYPES
from mesh_transformer.data.inputs import BadInputHandler, find_files, format_counts
from mesh_transformer.data.tables import EVERY, rows_of
from mesh_transformer.data.tokenizer import END_OF_TEXT
from mesh_transformer.storage.files import output_folder, size
from mesh_transformer.util import InputError

NAMES = ("train", "val")
ENDING = ".jsonl.zst"
LINE_CHARACTERS = 1 << 22  # longer documents are written as several lines, to limit memory use
WINDOW_CHARACTERS = 1 << 16  # characters to read after a cut; a better place is sought among them
BAD = -1  # the size of an unusable document
# Places to cut a document, best first.  The validation part starts after the match.
BOUNDARIES = (re.compile(r"\n\s*\n"), re.compile(r"\n"), re.compile(r"\s"))


class Part(NamedTuple):
    """The training part or the validation part of a text, as written to a file.

    Attributes:
      path: the path of the file.
      documents: the number of documents in the part.
      bytes: the size of the part's text in UTF-8, before it is compressed.
    """

    path: str
    documents: int
    bytes: int


class Choice(NamedTuple):
    """The text that is chosen for the validation part.

    Attributes:
      documents: the indices of the documents that go to the validation part as a whole.
      cut: the index of a document that is cut in two: its end goes to the validation part, and the
        rest to the training part.  None if no document is cut.
      cut_bytes: the approximate size in bytes of the end that goes to the validation part.
    """

    documents: frozenset[int]
    cut: int | None = None
    cut_bytes: int = 0


def split(
    text: str,
    folder: str,
    *,
    validation: float = 0.05,
    seed: int = 0,
    skip_bad: bool = False,
    column: str = TEXT_COLUMN,
    files: list[str] | None = None,
    rows: bool = False,
) -> list[Part]:
    """Split text into FOLDER/train.jsonl.zst and FOLDER/val.jsonl.zst.

    Both files appear only when they are complete.  The result depends only on the text, the names
    of its files, `validation` and `seed`.

    Args:
      text: a file, or a folder of files, of the types in `FILE_TYPES` (see `find_set`).
      validation: the fraction of the text's bytes to use for validation (see `choose`).
      seed: the random seed for choosing the validation documents.
      skip_bad: whether to skip unusable documents instead of raising InputError.
      column: the column of the text in tables (see `read_pieces`).
      files: the paths of the text's files, in reading order (default: those at `text`).
      rows: whether to split the rows of tables instead.  Each is copied with all of its columns as
        a line of JSON, which then is what is called a document.

    Returns:
      The training part and the validation part.

    Raises:
      InputError: if the text cannot be read, if there is too little text, or if the files cannot be
        written.
    """
    if os.path.isdir(text) and os.path.exists(folder) and os.path.samefile(text, folder):
        raise InputError(f"{folder} is also the folder of the text; choose another output folder")
    if not 0 < validation < 1:
        raise InputError(f"validation is {validation}, expected a fraction above 0 and below 1")
    files = find_files(text, TABLE_TYPES if rows else FILE_TYPES) if files is None else files
    targets = {os.path.realpath(os.path.join(folder, f"{name}{ENDING}")) for name in NAMES}
    if replaced := next((file for file in files if os.path.realpath(file) in targets), None):
        raise InputError(f"{replaced} would be replaced by its own part; choose another folder")
    column_or_rows = None if rows else column
    sizes, skipped = measure(files, skip_bad, column_or_rows)
    choice = choose(sizes, validation, seed)
    used = [size for size in sizes if size > 0]
    if rows and choice.cut is not None:
        choice = Choice(choice.documents | {choice.cut})
    if rows and len(choice.documents) == len(used):
        note = f" (skipped: {format_counts(skipped)})" if skipped else ""
        raise InputError(f"{text}: found {len(used)} rows{note}, expected at least 2; add rows")
    if round(sum(used) * validation) < 1 or sum(used) < 2:
        note = f" (skipped: {format_counts(skipped)})" if skipped else ""
        raise InputError(
            f"{text}: found {sum(used)} bytes of text in {len(used)} documents{note}, too little "
            f"for a validation part of {validation:.0%}; add text"
        )
    try:
        with output_folder(folder) as local:
            parts = _write(files, sizes, choice, local, column_or_rows)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror or error}); choose another folder"
        ) from error
    names = (os.path.join(folder, os.path.basename(part.path)) for part in parts)
    return [part._replace(path=path) for part, path in zip(parts, names, strict=True)]


def measure(
    files: list[str], skip_bad: bool, column: str | None = TEXT_COLUMN
) -> tuple[array, dict[str, int]]:
    """Return the size of each document in bytes of UTF-8, and counts of skipped items by reason.

    If `column` is None, the documents are the rows of tables.

    Documents are numbered from 0 in reading order.  The size of an unusable document is -1 (`BAD`).
    """
    sizes, bad = array("q"), BadInputHandler(skip_bad)
    for document in _documents(files, bad, "measuring", column):
        size = 0
        for piece in document:
            size = BAD if piece.is_bad else size + len(piece.text.encode())
        sizes.append(size)
    return sizes, dict(bad.counts)


def choose(sizes: array, validation: float, seed: int) -> Choice:
    """Choose the documents for validation at random.

    The target size of the validation part is `validation` times the size of the text.  Whole
    documents are added in random order until the next document would exceed the target.  If the
    validation part is then smaller than half of the target, the end of that next document is added
    to reach the target.  For example, if there is only one document, its end becomes the validation
    part.

    Args:
      sizes: the size of each document in bytes; 0 or less for documents to leave out.
      validation: the fraction of the text's bytes to use for validation, between 0 and 1.
    """
    order = [number for number, size in enumerate(sizes) if size > 0]
    random.Random(seed).shuffle(order)
    missing = target = round(sum(size for size in sizes if size > 0) * validation)
    for position, number in enumerate(order):
        if sizes[number] > missing:
            taken = frozenset(order[:position])
            is_cut = missing > target / 2
            return Choice(taken, number if is_cut else None, missing if is_cut else 0)
        missing -= sizes[number]
    return Choice(frozenset(order))


def _documents(
    files: list[str], bad: BadInputHandler, title: str, column: str | None
) -> Iterator[Iterator[Piece]]:
    """Yield, for each document, an iterator over its pieces.

    The caller must exhaust each document's iterator before requesting the next document.
    """
    with tqdm(unit="B", unit_scale=True, desc=title) as bar:
        bar.total = sum(map(size, files))
        for file in files:
            if column is None:
                pieces = _rows(file, bad, bar.update)
            else:
                pieces = read_pieces(file, END_OF_TEXT, bad, bar.update, column)
            for first in pieces:
                yield _until_end(first, pieces)


def _rows(file: str, bad: BadInputHandler, progress: Callable[[int], object]) -> Iterator[Piece]:
    """Yield each row of a table as a piece that holds a line of JSON.

    Raises:
      InputError: if a column holds bytes, for which JSON has no form that other readers know.
    """
    for where, value in rows_of(file, EVERY, bad, progress):
        try:
            line = json.dumps(value, default=_as_text)
        except TypeError:
            column = next(name for name, cell in value.items() if _holds_bytes(cell))
            raise InputError(
                f"{where}: column {column} holds bytes, expected text or numbers; remove the "
                "column, or convert it to text"
            ) from None
        yield Piece(line, True, where=where)


def _as_text(value: Any) -> str:
    """Return a value that JSON lacks, such as a date, as text; refuse bytes."""
    if isinstance(value, bytes):
        raise TypeError
    return str(value)


def _holds_bytes(value: Any) -> bool:
    try:
        json.dumps(value, default=_as_text)
    except TypeError:
        return True
    return False


def _until_end(piece: Piece | None, pieces: Iterator[Piece]) -> Iterator[Piece]:
    while piece is not None:
        yield piece
        piece = None if piece.is_end or piece.is_bad else next(pieces, None)


def _write(
    files: list[str], sizes: array, choice: Choice, folder: Path, column: str | None
) -> list[Part]:
    """Write each document to the training or the validation part, and return both parts.

    Raises:
      InputError: if a file has changed since `sizes` was measured.
    """
    with contextlib.ExitStack() as stack:
        paths = [folder / f"{name}{ENDING}" for name in NAMES]
        writers = [stack.enter_context(_Writer(path, column is None)) for path in paths]
        train, validation = writers
        copied = 0
        silent = BadInputHandler(skip=True)
        silent.counts["reported before"] = 1 << 62  # the first reading has printed its errors
        for number, document in enumerate(_documents(files, silent, "writing", column)):
            size = sizes[number] if number < len(sizes) else 0
            if size == BAD:
                copied += min((BAD for piece in document if piece.is_bad), default=0)
            elif number == choice.cut:
                copied += _write_cut(document, size - choice.cut_bytes, train, validation)
            else:
                writer = validation if number in choice.documents else train
                copied += writer.document(piece.text for piece in document)
        if copied != sum(sizes):
            others = " or another of the files" if len(files) > 1 else ""
            raise InputError(f"{files[0]}{others} changed while it was read; run the command again")
        for writer in writers:
            writer.publish()
        return [Part(str(writer.path), writer.documents, writer.bytes) for writer in writers]


def _write_cut(
    document: Iterator[Piece], position: int, train: "_Writer", validation: "_Writer"
) -> int:
    """Write the beginning of a document to `train` and its end to `validation`.

    The document is cut after the first paragraph break that follows the byte `position`.  If no
    paragraph break is found, the cut is after the first line break, or else after the first space,
    or else at `position`.  The search covers about 32,000 characters (half of `WINDOW_CHARACTERS`)
    or, if less text follows, half of the text after `position`.

    Returns:
      The number of bytes written to both parts together.
    """
    texts = (piece.text for piece in document)
    ahead: list[str] = []  # the text after `position` that is already read

    def before() -> Iterator[str]:
        left = position
        for text in texts:
            encoded = text.encode()
            if len(encoded) > left:
                head = encoded[:left].decode(errors="ignore")  # a character stays whole
                yield head
                ahead.append(text[len(head) :])
                break
            left -= len(encoded)
            yield text
        while sum(map(len, ahead)) < WINDOW_CHARACTERS and (text := next(texts, None)):
            ahead.append(text)
        window = "".join(ahead)
        cut = _boundary(window[: (len(window) + 1) // 2])
        ahead[:] = [window[cut:]]
        yield window[:cut]

    written = train.document(before())
    return written + validation.document(text for part in (ahead, texts) for text in part)


def _boundary(text: str) -> int:
    """Return the position after the first paragraph break in a text.

    If there is no paragraph break, return the position after the first line break, or else after
    the first space.  Return 0 if there is no space either.
    """
    for boundary in BOUNDARIES:
        if match := boundary.search(text):
            return match.end()
    return 0


class _Writer:
    """Writes documents to a temporary .jsonl.zst file, which `publish` moves to `path`.

    The documents are texts or, with `are_rows`, lines of JSON.

    Use the writer as a context manager.  If the `with` block ends without a call of `publish`, the
    temporary file is deleted.
    """

    def __init__(self, path: Path, are_rows: bool):
        self.path, self.documents, self.bytes = path, 0, 0
        self._are_rows = are_rows
        self._draft = path.with_name(f".{path.name}.partial")
        self._raw: IO[bytes] = open(self._draft, "wb")  # noqa: SIM115
        import zstandard  # imported late, as an installation may lack it

        self._stream = zstandard.ZstdCompressor().stream_writer(self._raw, closefd=False)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()
        self._draft.unlink(missing_ok=True)

    def document(self, texts: Iterator[str]) -> int:
        """Write the concatenation of `texts` as one document, and return the document's size.

        The size is in bytes of UTF-8.  A document of more than 4 million characters
        (`LINE_CHARACTERS`) is written as several lines.
        """
        pending: list[str] = []
        characters, written = 0, 0
        for text in texts:
            pending.append(text)
            characters += len(text)
            if characters >= LINE_CHARACTERS:
                written += self._line("".join(pending))
                pending, characters = [], 0
        written += self._line("".join(pending))
        self.documents += written > 0
        self.bytes += written
        return written

    def _line(self, text: str) -> int:
        if text:
            line = text if self._are_rows else json.dumps({"text": text}, ensure_ascii=False)
            self._stream.write(f"{line}\n".encode())
        return len(text.encode())

    def publish(self) -> None:
        self._stream.close()
        self._raw.close()
        os.replace(self._draft, self.path)
