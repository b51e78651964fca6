"""Splits text into a training part and a validation part, at random by document.

The text is read twice, first to measure the documents and then to copy them.  It is read piece by
piece, so a corpus or a document may be larger than memory, which holds only numbers per document.
"""

import contextlib
import json
import os
import random
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import zstandard
from tqdm import tqdm

from mesh_transformer.data.documents import (
    FILE_TYPES,
    BadInputHandler,
    Piece,
    find_files,
    format_counts,
    read_pieces,
)
from mesh_transformer.data.files import output_folder, size
from mesh_transformer.data.tokenizer import END_OF_TEXT
from mesh_transformer.util import InputError

NAMES = ("train", "val")
ENDING = ".jsonl.zst"
LINE_CHARACTERS = 1 << 22  # longer documents continue in further lines, so they fit in memory
WINDOW_CHARACTERS = 1 << 16  # how far to search for a place to cut a document
BAD = -1  # the size of an unusable document
# Places to cut a document, best first.  The validation part starts after the match.
BOUNDARIES = (re.compile(r"\n\s*\n"), re.compile(r"\n"), re.compile(r"\s"))


class Part(NamedTuple):
    """A written part: its path, its number of documents and their size in UTF-8, in bytes."""

    path: str
    documents: int
    bytes: int


class Choice(NamedTuple):
    """Which text is for validation.

    Attributes:
      documents: the numbers of the documents that are for validation as a whole.
      cut: the number of the document whose end is for validation; None if there is none.
      cut_bytes: the approximate size of that end.
    """

    documents: frozenset[int]
    cut: int | None = None
    cut_bytes: int = 0


def split(
    text: str, folder: str, *, validation: float = 0.05, seed: int = 0, skip_bad: bool = False
) -> list[Part]:
    """Split text into FOLDER/train.jsonl.zst and FOLDER/val.jsonl.zst.

    Both files appear only when they are complete.  The result depends only on the text, the names
    of its files, `validation` and `seed`.

    Args:
      text: a file, or a folder of files, of the types in `FILE_TYPES`.
      validation: the share of the text's bytes that is for validation; see `choose`.
      skip_bad: whether to skip unusable documents instead of raising InputError.

    Returns:
      The training part and the validation part.

    Raises:
      InputError: if the text cannot be read or is too little, or the files cannot be written.
    """
    if os.path.isdir(text) and os.path.exists(folder) and os.path.samefile(text, folder):
        raise InputError(f"{folder}: is the folder of the text; choose another output folder")
    if not 0 < validation < 1:
        raise InputError(f"validation is {validation}, expected a share above 0 and below 1")
    files = find_files(text, FILE_TYPES)
    sizes, skipped = measure(files, skip_bad)
    choice = choose(sizes, validation, seed)
    used = [size for size in sizes if size > 0]
    if round(sum(used) * validation) < 1 or sum(used) < 2:
        note = f" (skipped: {format_counts(skipped)})" if skipped else ""
        raise InputError(
            f"{text}: found {sum(used)} bytes of text in {len(used)} documents{note}, too little "
            f"for a validation part of {validation:.0%}; add text"
        )
    try:
        with output_folder(folder) as local:
            parts = _write(files, sizes, choice, local)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from error
    names = (os.path.join(folder, os.path.basename(part.path)) for part in parts)
    return [part._replace(path=path) for part, path in zip(parts, names, strict=True)]


def measure(files: list[str], skip_bad: bool) -> tuple[array, dict[str, int]]:
    """Return the size of each document in bytes of UTF-8, and the skipped items by reason.

    Documents are numbered from 0 in reading order.  The size of an unusable document is `BAD`.
    """
    sizes, bad = array("q"), BadInputHandler(skip_bad)
    for document in _documents(files, bad, "measuring"):
        size = 0
        for piece in document:
            size = BAD if piece.is_bad else size + len(piece.text.encode())
        sizes.append(size)
    return sizes, dict(bad.counts)


def choose(sizes: array, validation: float, seed: int) -> Choice:
    """Choose the documents for validation at random.

    In random order, documents are taken until the next one would exceed the target, `validation`
    times the size of the text.  If less than half of the target is reached then, the missing bytes
    are the end of that document.  So of a single document, the last part is for validation, and of
    a few large ones no more than the target.

    Args:
      sizes: the size of each document; those of unusable documents are at most 0.
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


def _documents(files: list[str], bad: BadInputHandler, title: str) -> Iterator[Iterator[Piece]]:
    """Yield an iterator over the pieces of each document; it must be used up before the next."""
    with tqdm(unit="B", unit_scale=True, desc=title) as bar:
        bar.total = sum(map(size, files))
        for file in files:
            pieces = read_pieces(file, END_OF_TEXT, bad, bar.update)
            for first in pieces:
                yield _until_end(first, pieces)


def _until_end(piece: Piece | None, pieces: Iterator[Piece]) -> Iterator[Piece]:
    while piece is not None:
        yield piece
        piece = None if piece.is_end or piece.is_bad else next(pieces, None)


def _write(files: list[str], sizes: array, choice: Choice, folder: Path) -> list[Part]:
    """Copy each document to its part."""
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(_Writer(folder / f"{name}{ENDING}")) for name in NAMES]
        train, validation = writers
        copied = 0
        silent = BadInputHandler(skip=True)
        silent.counts["reported before"] = 1 << 62  # the first reading has printed its errors
        for number, document in enumerate(_documents(files, silent, "writing")):
            size = sizes[number] if number < len(sizes) else 0
            if size == BAD:
                copied += min((BAD for piece in document if piece.is_bad), default=0)
            elif number == choice.cut:
                copied += _write_cut(document, size - choice.cut_bytes, train, validation)
            else:
                writer = validation if number in choice.documents else train
                copied += writer.document(piece.text for piece in document)
        if copied != sum(sizes):
            raise InputError(f"{files[0]}: changed while it was read; run the command again")
        for writer in writers:
            writer.publish()
        return [Part(str(writer.path), writer.documents, writer.bytes) for writer in writers]


def _write_cut(
    document: Iterator[Piece], position: int, train: "_Writer", validation: "_Writer"
) -> int:
    """Write the text before `position`, in bytes, to `train` and the rest to `validation`.

    The cut is moved forward to the end of a paragraph, or else of a line or a word, if one ends in
    the next `WINDOW_CHARACTERS` and in the first half of the rest.  Returns the bytes written.
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
    """Return the position after the first end of a paragraph, line or word; 0 if there is none."""
    for boundary in BOUNDARIES:
        if match := boundary.search(text):
            return match.end()
    return 0


class _Writer:
    """A .jsonl.zst file of documents, which `publish` moves to its path.

    A context manager; a file that is not published is removed at its end.
    """

    def __init__(self, path: Path):
        self.path, self.documents, self.bytes = path, 0, 0
        self._draft = path.with_name(f".{path.name}.partial")
        self._raw: IO[bytes] = open(self._draft, "wb")  # noqa: SIM115
        self._stream = zstandard.ZstdCompressor().stream_writer(self._raw, closefd=False)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()
        self._draft.unlink(missing_ok=True)

    def document(self, texts: Iterator[str]) -> int:
        """Write the concatenation of `texts` as a document; return its bytes in UTF-8."""
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
            line = json.dumps({"text": text}, ensure_ascii=False)
            self._stream.write(f"{line}\n".encode())
        return len(text.encode())

    def publish(self) -> None:
        self._stream.flush(zstandard.FLUSH_FRAME)
        self._raw.close()
        os.replace(self._draft, self.path)
