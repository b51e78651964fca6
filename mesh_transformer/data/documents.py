"""Reads documents from text files, archives and tables, piece by piece, and cleans up text."""

import io
import re
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple, TextIO

from mesh_transformer.data.contents import Content, contents
from mesh_transformer.data.cuts import Cuts
from mesh_transformer.data.file_types import TABLE_TYPES
from mesh_transformer.data.inputs import BadInputError, BadInputHandler, open_input
from mesh_transformer.data.spans import Span
from mesh_transformer.data.tables import (
    Columns,
    invalid_bytes,
    not_utf8_error,
    read_rows,
    replace_surrogates,
)
from mesh_transformer.storage import files


def wikitext_detokenize(text: str) -> str:
    """Remove the extra spaces that the WikiText data set has around punctuation.

    The replacement rules and their order are those of the original mesh-transformer-jax, except
    that one of its rules is omitted.  That rule was meant for years written as `' 90s`, but its
    regular expression never matched them and damaged other text.
    """
    text = text.replace("s '", "s'")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for opening, closing in ("()", "[]", "{}", '""', "''"):
        inside = f"[^{re.escape(closing)}]*?"
        pattern = rf"{re.escape(opening)}\s*({inside})\s*{re.escape(closing)}"
        text = re.sub(pattern, rf"{opening}\1{closing}", text)
    for count in (4, 3, 2):
        text = text.replace(" ".join("=" * count), "=" * count)
    for spaced, joined in ((" \u00b0 ", "\u00b0"), (" \n", "\n"), ("\n ", "\n")):
        text = text.replace(spaced, joined)
    return text.replace(" N ", " 1 ").replace(" 's", "'s")


def cleaner(use_ftfy: bool, use_wikitext: bool) -> Callable[[str], str] | None:
    """Return a function that applies the chosen clean-up steps to a document; None without any.

    Args:
      use_ftfy: whether to repair garbled text with the package ftfy; this is the first step.
      use_wikitext: whether to apply `wikitext_detokenize`.
    """
    steps: list[Callable[[str], str]] = []
    if use_ftfy:
        import ftfy

        steps.append(lambda text: ftfy.fix_text(text, normalization="NFKC"))
    if use_wikitext:
        steps.append(wikitext_detokenize)
    if not steps:
        return None

    def clean(text: str) -> str:
        for step in steps:
            text = step(text)
        return text

    return clean


TEXT_COLUMN = "text"
BYTE_ORDER_MARK = "\ufeff"
# Documents longer than this are read and, if possible, tokenised in pieces, so that they need not
# fit in memory.  The tokenizer is fastest with pieces of about this size.
PIECE_CHARACTERS = 1 << 14


class Piece(NamedTuple):
    """Part of a document.

    Attributes:
      is_end: whether this is the document's last piece.
      is_bad: whether the document is unusable.  If true, the caller must drop the document's
        earlier pieces; no further pieces of the document follow.
      where: the file, and the row or member of it that the document is in, for error messages.
      number: the document's number there, from 1.
    """

    text: str
    is_end: bool = False
    is_bad: bool = False
    where: str = ""
    number: int = 1

    @property
    def location(self) -> str:
        return f"{self.where}: document {self.number}"


def read_pieces(
    path: str,
    separator: str,
    bad: BadInputHandler,
    progress: Callable[[int], object],
    column: str = TEXT_COLUMN,
    span: Span | None = None,
) -> Iterator[Piece]:
    """Yield the documents of a file, in pieces that are cut anywhere (see `recut`).

    Args:
      separator: the text that separates documents, such as "<|endoftext|>"; empty documents are
        dropped.
      bad: called for each unusable document or file.
      progress: called repeatedly with the number of bytes read since the previous call.
      column: the column of the text in a table, and its key in a JSON Lines file.
      span: the part of the file to read; None for all of it.

    Raises:
      InputError: if a document or the file is unusable and `bad` does not skip it.
    """
    reported, is_open = 0, False
    with open_input(path, bad) as file:
        raw = span.reader(file) if span else file
        pieces = _pieces(_texts(raw, path, bad, column), separator)
        if span:
            pieces = _counted(pieces, span)
        for piece in without_bad(pieces, _not_utf8, bad):
            is_open = not piece.is_end and not piece.is_bad
            yield piece
            progress(raw.tell() - reported)
            reported = raw.tell()
    if is_open:  # the file ended inside a document
        yield Piece("", is_bad=True)
    progress((span.size if span else files.size(path)) - reported)


def _counted(pieces: Iterable[Piece], span: Span) -> Iterator[Piece]:
    for piece in pieces:
        span.documents += piece.is_end
        yield piece


def without_bad(
    pieces: Iterable[Piece],
    find_error: Callable[[Piece], BadInputError | None],
    bad: BadInputHandler,
) -> Iterator[Piece]:
    """Yield the pieces of all documents except those in which a piece has an error.

    `bad` is called for each such document.  If some of its pieces have already been yielded, the
    next piece has `is_bad` set, so that the caller drops the document.
    """
    is_first, is_dropped = True, False
    for piece in pieces:
        if not is_dropped and not piece.is_bad and (error := find_error(piece)):
            bad(error)
            is_dropped = True
            if not is_first:
                yield Piece("", is_bad=True)
        if not is_dropped:
            yield piece
        is_first = piece.is_end or piece.is_bad
        is_dropped = is_dropped and not is_first


def without_first(pieces: Iterable[Piece], documents: int) -> Iterator[Piece]:
    """Yield the pieces of all documents except the first ones.

    Args:
      documents: the number of documents to leave out, unusable ones included.
    """
    for piece in pieces:
        if documents <= 0:
            yield piece
        documents -= piece.is_end or piece.is_bad


def _pieces(texts: Iterable[tuple[str, TextIO]], separator: str) -> Iterator[Piece]:
    for where, text in texts:
        number = 1
        for piece, is_end in split_documents(text, separator):
            yield Piece(piece, is_end, False, where, number)
            number += is_end


def _not_utf8(piece: Piece) -> BadInputError | None:
    invalid = invalid_bytes(piece.text)
    return not_utf8_error(piece.location, invalid) if invalid else None


def unknown_error(where: str, text: str, alphabet: frozenset[str]) -> BadInputError | None:
    """Return an error if a text has characters that a tokenizer of characters lacks.

    Args:
      where: the location of the text, for the error message.
      alphabet: the characters that the tokenizer knows.
    """
    if unknown := set(text) - alphabet:
        message = f"{where} has the character {min(unknown)!r}, which the tokenizer lacks"
        return BadInputError("unknown characters", f"{message} (train it on this text, too)")
    return None


def split_documents(text: TextIO, separator: str) -> Iterator[tuple[str, bool]]:
    """Split a text of any length into documents, and long documents into pieces, cut anywhere.

    Yields (piece, is_end), where `is_end` marks the last piece of a document.

    Args:
      separator: the text that separates documents; empty documents are dropped.
    """
    rest, started = "", False
    while block := text.read(PIECE_CHARACTERS):
        *documents, rest = (rest + block).split(separator)
        for document in documents:
            if document or started:
                yield document, True
            started = False
        cut = len(rest) - len(separator) + 1  # the end may be part of a separator
        if len(rest) > PIECE_CHARACTERS and cut > 0:
            yield rest[:cut], False
            rest, started = rest[cut:], True
    if rest or started:
        yield rest, True


def recut(pieces: Iterable[Piece], cuts: Cuts | None) -> Iterator[Piece]:
    """Yield the same documents in pieces that end where `cuts` allows; whole if it is None.

    The pieces are not much longer than those of `read_pieces`, if there are enough places to cut.
    """
    waiting: list[str] = []  # the text of the document that is not yielded yet
    size = 0
    for piece in pieces:
        if piece.is_bad:
            yield piece
            waiting, size = [], 0
            continue
        for start in range(0, max(len(piece.text), 1), PIECE_CHARACTERS):
            text = piece.text[start : start + PIECE_CHARACTERS]
            size += len(text)
            if cuts and size > PIECE_CHARACTERS:
                before = waiting[-1][-1:] if waiting else ""
                if cut := cuts.last(before + text):
                    head = text[: cut - len(before)]
                    yield piece._replace(text="".join([*waiting, head]), is_end=False)
                    text = text[len(head) :]
                    waiting, size = [], len(text)
            if text:
                waiting.append(text)
        if piece.is_end:
            yield piece._replace(text="".join(waiting))
            waiting, size = [], 0


def _texts(raw: IO, path: str, bad: BadInputHandler, column: str) -> Iterator[tuple[str, TextIO]]:
    """Yield (location, stream of the text) for each text in a file.

    A table has one text per row, an archive has those of its members, and any other file is a
    single text.  Line ends are read as newlines, and a byte order mark at the beginning is left
    out, in all of them.  The location names the file and the row or member, for error messages.
    """
    for content in contents(raw, path, bad):
        if content.kind in TABLE_TYPES:
            yield from _row_texts(content, bad, column)
        else:
            text = io.TextIOWrapper(content.stream, "utf-8-sig", "surrogateescape")
            yield content.where, text
            text.detach()  # otherwise `text` would close the stream, whose position is needed


def _row_texts(content: Content, bad: BadInputHandler, column: str) -> Iterator[tuple[str, TextIO]]:
    """Yield (location, text) for each row of a table.

    The text is a string or a list of paragraphs.  A line of a JSON Lines file may also be a string.
    """
    columns = Columns(((column,),), "name the column of the text with --text-column")
    for where, value in read_rows(content, columns, bad):
        text: Any = value.get(column) if isinstance(value, dict) else value
        if isinstance(text, list) and all(isinstance(paragraph, str) for paragraph in text):
            text = "\n\n".join(text)
        if isinstance(text, str):
            yield where, io.StringIO(replace_surrogates(text).removeprefix(BYTE_ORDER_MARK), None)
        else:
            bad(_no_text_error(where, value, column))


def _no_text_error(where: str, value: Any, column: str) -> BadInputError:
    expected = f"expected a JSON string or an object with the key {column}"
    if isinstance(value, dict) and column in value:
        kind = "null" if value[column] is None else type(value[column]).__name__
        expected = f"{column} is {kind}, expected a string"
    elif isinstance(value, dict) and value:
        keys = ", ".join(value)
        expected = f"expected the key {column}, found {keys}: name another with --text-column"
    return BadInputError("no text", f"{where} has no text, {expected}")
