"""Documents from text files and archives, in pieces that fit in memory, cleaned on request.

Beside create_finetune_tfrecords.py and create_completion_tfrecords.py, its users.
"""

import contextlib
import gzip
import io
import json
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO

import zstandard

from mesh_transformer.util import InputError

FILE_TYPES = (".jsonl.zst", ".txt", ".xz", ".tar.gz")
# Longer documents are cleaned and tokenised in pieces, so that no document need fit in memory.
PIECE_CHARACTERS = 1 << 17
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zstandard.ZstdError)


def find_files(path: str, types: tuple[str, ...] = FILE_TYPES) -> list[str]:
    """The file itself, or a folder's files of the known types in order of name (not deeper)."""
    if os.path.isfile(path):
        names = [path]
    elif os.path.isdir(path):
        names = sorted(str(entry) for entry in Path(path).iterdir() if entry.is_file())
    else:
        raise InputError(f"{path}: no such file or folder")
    found = [name for name in names if name.endswith(types)]
    if not found:
        raise InputError(f"{path}: no text found, expected files ending in {', '.join(types)}")
    return found


def read_pieces(
    path: str, separator: str, progress: Callable[[int], object]
) -> Iterator[tuple[str, bool]]:
    """The file's documents as pieces of text, each with whether it ends its document.

    `separator` inside a text splits it into documents; empty ones are left out.  `progress` is
    told the bytes read since it was last told.  Raises InputError naming a damaged file.
    """
    reported = 0
    with opened(path) as raw:
        for text in _texts(raw, path):
            for piece in split_documents(text, separator):
                yield piece
                progress(raw.tell() - reported)
                reported = raw.tell()


@contextlib.contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """The file's bytes; what is wrong with them, whoever reads them, is an InputError naming it."""
    try:
        with open(path, "rb") as raw:
            yield raw
    except UnicodeDecodeError as error:
        found = error.object[error.start : error.end]
        raise InputError(f"{path}: found the bytes {found!r}, expected UTF-8 text") from error
    except DAMAGE as error:
        raise InputError(f"{path}: damaged or cut short: {error}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from error


def split_documents(text: TextIO, separator: str) -> Iterator[tuple[str, bool]]:
    """Pieces of a text of any length, each with whether it ends its document.

    A long document is cut only before a newline (or, in a long line, a space) that follows a
    visible character.  GPT-2's word pattern never crosses such a place, so the pieces' tokens are
    exactly the document's.
    """
    rest, started = "", False
    while block := text.read(PIECE_CHARACTERS):
        *documents, rest = (rest + block).split(separator)
        for document in documents:
            if document or started:
                yield document, True
            started = False
        if len(rest) > PIECE_CHARACTERS and (cut := _last_safe_cut(rest)):
            yield rest[:cut], False
            rest, started = rest[cut:], True
    if rest or started:
        yield rest, True


def _last_safe_cut(text: str) -> int:
    """The last newline, or else space, that follows a visible character, or 0."""
    for mark in "\n ":
        cut = text.rfind(mark)
        while cut > 0 and text[cut - 1].isspace():
            cut = text.rfind(mark, 0, cut)
        if cut > 0:
            return cut
    return 0


def _texts(raw: BinaryIO, path: str) -> Iterator[TextIO]:
    """The texts of a file: itself, an archive's members, or a JSON line each."""
    if path.endswith(".txt"):
        yield from _decoded(raw, newline=None)
    elif path.endswith(".jsonl.zst"):
        decompressor = zstandard.ZstdDecompressor()
        yield from _json_texts(decompressor.stream_reader(raw, read_across_frames=True), path)
    elif path.endswith(".tar.gz"):
        yield from _member_texts(gzip.GzipFile(fileobj=raw), path)
    else:
        yield from _xz_texts(raw, path)


def _decoded(stream: IO[bytes], newline: str | None) -> Iterator[TextIO]:
    text = io.TextIOWrapper(stream, "utf-8", newline=newline)
    yield text
    text.detach()  # or it would close the stream, whose position is still asked for


def _xz_texts(raw: IO[bytes], path: str) -> Iterator[TextIO]:
    """Of a compressed tar (the form of OpenWebText) or else of one compressed text."""
    with lzma.open(raw) as decompressed:
        stream = io.BufferedReader(decompressed, tarfile.BLOCKSIZE)  # type: ignore[arg-type]
        if stream.peek(tarfile.BLOCKSIZE)[257:262] == b"ustar":
            yield from _member_texts(stream, path)
        else:
            yield from _decoded(stream, newline="")


def _member_texts(stream: io.BufferedIOBase, path: str) -> Iterator[TextIO]:
    """Of each file in a tar; members that are .xz themselves are opened too."""
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in archive:
            contents = archive.extractfile(member)
            if contents is None:
                continue
            if member.name.endswith(".xz"):
                yield from _xz_texts(contents, f"{path}: {member.name}")
            else:
                yield from _decoded(contents, newline="")
    while stream.read(tarfile.RECORDSIZE):  # to its end, where the decompressor checks its sums
        pass


def _json_texts(stream: IO[bytes], path: str) -> Iterator[TextIO]:
    """Of JSON lines: each a string, or an object whose `text` is one (or a list of paragraphs)."""
    for number, line in enumerate(io.TextIOWrapper(stream, "utf-8", newline="\n"), 1):
        if not line.strip():
            continue
        value = json_value(line, f"{path}: line {number}")
        text = value.get("text") if isinstance(value, dict) else value
        if isinstance(text, list) and all(isinstance(paragraph, str) for paragraph in text):
            text = "\n\n".join(text)
        if not isinstance(text, str):
            raise InputError(f"{path}: line {number} has no text, expected a string or key text")
        yield io.StringIO(whole_characters(text))


def json_value(line: str, where: str) -> Any:
    """What a line of JSON says; InputError naming it where it is none."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error.msg}); is the file cut short?") from error


def whole_characters(text: str) -> str:
    """The text with `?` for halves of surrogate pairs: JSON has them, no encoding does."""
    return text.encode(errors="replace").decode()


def wikitext_detokenize(text: str) -> str:
    """Undo WikiText's spacing of punctuation, by the original's rules in the original's order.

    Original: one more rule, for years written `' 90s`, was in another language's notation: it
    never matched such a year and damaged what it did match.  It is left out.
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


def cleaner(use_ftfy: bool, use_wikitext: bool) -> Callable[[str], str]:
    """The chosen clean-ups as one function: ftfy's repair of garbled text, then WikiText's."""
    steps: list[Callable[[str], str]] = []
    if use_ftfy:
        import ftfy

        steps.append(lambda text: ftfy.fix_text(text, normalization="NFKC"))
    if use_wikitext:
        steps.append(wikitext_detokenize)

    def clean(text: str) -> str:
        for step in steps:
            text = step(text)
        return text

    return clean
