"""Documents from text files and archives, in pieces that fit in memory.

Beside create_finetune_tfrecords.py, its user.
"""

import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Callable, Iterator
from typing import IO, Any, BinaryIO, NamedTuple, TextIO

from mesh_transformer.data.input_files import (
    Bad,
    BadInputError,
    json_lines,
    not_utf8,
    opened,
    whole_characters,
)

FILE_TYPES = (".jsonl.zst", ".txt", ".xz", ".tar.gz", ".jsonl")
# Longer documents are cleaned and tokenised in pieces, so that no document need fit in memory;
# the tokenizer is fastest at about this size.
PIECE_CHARACTERS = 1 << 14
LONGEST_RUN = 1 << 20  # characters without a place to cut


class Piece(NamedTuple):
    """Part of a document.

    Attributes:
      is_end: whether the document ends with it.
      is_bad: the document's earlier pieces are to be dropped, there will be no more of it.
    """

    text: str
    is_end: bool = False
    is_bad: bool = False


def read_pieces(
    path: str, separator: str, bad: Bad, progress: Callable[[int], object]
) -> Iterator[Piece]:
    """The file's documents, piece by piece.

    `separator` inside a text splits it into documents; empty ones are left out.  `progress` is
    told the bytes read since it was last told.  Raises InputError naming a bad document or file,
    unless `bad` skips it.
    """
    reported, is_open = 0, False
    with opened(path, bad) as raw:
        for where, text in _texts(raw, path, bad):
            for piece in _checked(split_documents(text, separator), where, bad):
                is_open = not piece.is_end and not piece.is_bad
                yield piece
                progress(raw.tell() - reported)
                reported = raw.tell()
    if is_open:  # the file ended in the midst of it
        yield Piece("", is_bad=True)
    progress(os.path.getsize(path) - reported)


def _checked(pieces: Iterator[tuple[str, bool]], where: str, bad: Bad) -> Iterator[Piece]:
    """The pieces of a text's documents, less those of documents that are not UTF-8."""
    number, is_first, is_dropped = 1, True, False
    for text, is_end in pieces:
        if not is_dropped and (found := undecoded(text)):
            bad(not_utf8(f"{where}: document {number}", found))
            is_dropped = True
            if not is_first:
                yield Piece("", is_bad=True)
        if not is_dropped:
            yield Piece(text, is_end)
        is_first = is_end
        if is_end:
            number, is_dropped = number + 1, False


def undecoded(text: str) -> bytes:
    """The first bytes that the text's decoder could not read (`surrogateescape`d), or none."""
    if text.isascii():
        return b""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start : error.end].encode(errors="surrogateescape")
    return b""


def split_documents(text: TextIO, separator: str) -> Iterator[tuple[str, bool]]:
    """Pieces of a text of any length, each with whether it ends its document.

    A long document is cut only before a newline (or, in a long line, a space) that follows a
    visible character.  GPT-2's word pattern never crosses such a place, so the pieces' tokens are
    exactly the document's; a run without such a place is cut at LONGEST_RUN all the same.
    """
    rest, started, searched = "", False, 0
    while block := text.read(PIECE_CHARACTERS):
        *documents, rest = (rest + block).split(separator)
        for document in documents:
            if document or started:
                yield document, True
            started, searched = False, 0
        if len(rest) > PIECE_CHARACTERS:
            cut = _last_safe_cut(rest, searched)
            if not cut and len(rest) > LONGEST_RUN:
                cut = len(rest) - len(separator)  # of which the end may be the first part
            if cut:
                yield rest[:cut], False
                rest, started = rest[cut:], True
            searched = 0 if cut else len(rest)
    if rest or started:
        yield rest, True


def _last_safe_cut(text: str, start: int) -> int:
    """The last newline, or else space, from `start` on that follows a visible character, or 0."""
    for mark in "\n ":
        cut = text.rfind(mark, start)
        while cut > 0 and text[cut - 1].isspace():
            cut = text.rfind(mark, start, cut)
        if cut > 0:
            return cut
    return 0


def _texts(raw: BinaryIO, path: str, bad: Bad) -> Iterator[tuple[str, TextIO]]:
    """The texts of a file, itself, an archive's members, or a JSON line each, and their names."""
    if path.endswith((".jsonl", ".jsonl.zst")):
        yield from _json_texts(raw, path, bad)
    elif path.endswith(".tar.gz"):
        yield from _member_texts(gzip.GzipFile(fileobj=raw), path)
    elif path.endswith(".xz"):
        yield from _xz_texts(raw, path)
    else:
        yield from _decoded(raw, path, newline=None)


def _decoded(stream: IO[bytes], where: str, newline: str | None) -> Iterator[tuple[str, TextIO]]:
    text = io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline=newline)
    yield where, text
    text.detach()  # or it would close the stream, whose position is still asked for


def _xz_texts(raw: IO[bytes], where: str) -> Iterator[tuple[str, TextIO]]:
    """Of a compressed tar (the form of OpenWebText) or else of one compressed text."""
    with lzma.open(raw) as decompressed:
        stream = io.BufferedReader(decompressed, tarfile.BLOCKSIZE)  # type: ignore[arg-type]
        if stream.peek(tarfile.BLOCKSIZE)[257:262] == b"ustar":
            yield from _member_texts(stream, where)
        else:
            yield from _decoded(stream, where, newline="")


def _member_texts(stream: io.BufferedIOBase, path: str) -> Iterator[tuple[str, TextIO]]:
    """Of each file in a tar; members that are .xz themselves are opened too."""
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in archive:
            contents = archive.extractfile(member) if member.isreg() else None
            if contents is None:
                continue
            where = f"{path}: {member.name}"
            if member.name.endswith(".xz"):
                yield from _xz_texts(contents, where)
            else:
                yield from _decoded(contents, where, newline="")
    while stream.read(tarfile.RECORDSIZE):  # to its end, where the decompressor checks its sums
        pass


def _json_texts(raw: BinaryIO, path: str, bad: Bad) -> Iterator[tuple[str, TextIO]]:
    """Of JSON lines: each a string, or an object whose `text` is one (or a list of paragraphs)."""
    for where, value in json_lines(raw, path, bad):
        text: Any = value.get("text") if isinstance(value, dict) else value
        if isinstance(text, list) and all(isinstance(paragraph, str) for paragraph in text):
            text = "\n\n".join(text)
        if isinstance(text, str):
            yield where, io.StringIO(whole_characters(text))
        else:
            bad(BadInputError("no text", f"{where} has no text, expected a string or key text"))
