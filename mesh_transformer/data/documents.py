"""Reads documents from text files and archives, piece by piece, and cleans up text."""

import collections
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
from typing import IO, Any, NamedTuple, TextIO

import zstandard
from tqdm import tqdm

from mesh_transformer.storage import files
from mesh_transformer.util import InputError


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


def cleaner(use_ftfy: bool, use_wikitext: bool) -> Callable[[str], str]:
    """Return a function that applies the chosen clean-up steps to a text.

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

    def clean(text: str) -> str:
        for step in steps:
            text = step(text)
        return text

    return clean


DAMAGE_ERRORS = (
    EOFError,
    gzip.BadGzipFile,
    lzma.LZMAError,
    tarfile.TarError,
    zlib.error,
    zstandard.ZstdError,
)
# Compressed bytes per read.  The value is small because even so few bytes can decompress to 500 MB.
COMPRESSED_BYTES = 1 << 14
LONGEST_LINE = 1 << 27  # bytes; limits the memory that a file without line ends can take
MAX_PRINTED = 20  # skipped items that a `BadInputHandler` prints; further ones are only counted


class BadInputError(InputError):
    """Error for an unusable line or document, or a damaged file; other input can still be read.

    Attributes:
      reason: a short category, such as "not JSON"; skipped items are counted by category.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class BadInputHandler:
    """Stops at unusable input, or skips and counts it.

    Call the handler with a BadInputError for each unusable item.

    Args:
      skip: if false, each call raises InputError.  If true, each call counts the item by the
        error's reason, and the first 20 (`MAX_PRINTED`) calls also print the error.

    Attributes:
      counts: the number of skipped items by reason.
    """

    def __init__(self, skip: bool):
        self.skip = skip
        self.counts: collections.Counter[str] = collections.Counter()

    def __call__(self, error: BadInputError) -> None:
        if not self.skip:
            raise InputError(f"{error}; fix the input, or skip such input with --skip-bad")
        if self.count < MAX_PRINTED:
            tqdm.write(f"skipped: {error}")
        self.counts[error.reason] += 1

    @property
    def count(self) -> int:
        return self.counts.total()


def format_counts(counts: dict[str, int]) -> str:
    """Format counts by reason as text, largest count first, such as "3 not JSON, 1 no text"."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {reason}" for reason, count in ordered)


def find_files(path: str, types: tuple[str, ...]) -> list[str]:
    """Return the paths of the input files at `path`.

    If `path` is a file, the result contains only `path`.  If `path` is a folder, the result
    contains the folder's files, sorted by name, without those in subfolders.

    Args:
      types: the accepted endings of file names; a folder's other files are left out.

    Raises:
      InputError: if the path does not exist, or no file has an accepted ending.
    """
    if files.is_file(path):
        paths = [path]
    elif files.is_folder(path):
        inside = (os.path.join(path, name) for name in sorted(files.names(path)))
        paths = [entry for entry in inside if entry.endswith(types) and files.is_file(entry)]
    else:
        raise InputError(f"{path}: no such file or folder; check the path")
    if not paths or not paths[0].endswith(types):
        raise InputError(
            f"{path}: no text found, expected files ending in {', '.join(types)}; rename or "
            "convert the files"
        )
    return paths


def left_out(path: str, types: tuple[str, ...]) -> list[str]:
    """Return the names of the entries in the folder `path` that `find_files` leaves out.

    Hidden entries are not returned.  The result is empty if `path` is not a folder.
    """
    if not files.is_folder(path):
        return []
    used = {os.path.basename(file) for file in find_files(path, types)}
    return [name for name in sorted(files.names(path)) if name not in used and name[0] != "."]


@contextlib.contextmanager
def open_input(path: str, bad: BadInputHandler) -> Iterator[IO[bytes]]:
    """Return a context manager that opens a file for reading bytes.

    If the code in the `with` block raises one of the errors in DAMAGE_ERRORS, the error is
    suppressed, and `bad` is called with a BadInputError saying that the file is damaged.

    Raises:
      InputError: if the file cannot be read.
    """
    try:
        with files.open_file(path) as raw:
            yield raw
    except DAMAGE_ERRORS as error:
        bad(BadInputError("damaged", f"{path}: damaged or cut short: {error}"))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}); check its permissions"
        ) from error


class ZstandardReader(io.RawIOBase):
    """A stream of the decompressed contents of zstandard frames.

    Unlike the zstandard package's own reader, this stream raises ZstdError if the last frame is
    incomplete, or if the input has no frames.
    """

    def __init__(self, raw: IO[bytes]):
        self._raw = raw
        self._frame: Any = None  # the decompressor of a frame that is only partly read
        self._compressed, self._contents = b"", memoryview(b"")
        self._is_empty = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._contents:
            self._compressed = self._compressed or self._raw.read(COMPRESSED_BYTES)
            if not self._compressed:
                if self._frame is not None or self._is_empty:
                    raise zstandard.ZstdError("the last frame is incomplete or missing")
                return 0
            self._is_empty = False
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._contents = memoryview(self._frame.decompress(self._compressed))
            self._compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._contents))
        buffer[:count] = self._contents[:count]
        self._contents = self._contents[count:]
        return count


def json_lines(raw: IO, path: str, bad: BadInputHandler) -> Iterator[tuple[str, Any]]:
    """Yield (location, parsed value) for each non-blank line of a .jsonl or .jsonl.zst file.

    The location names the file and the line, for use in error messages.  `bad` is called for each
    line that is too long or not valid JSON.
    """
    stream: IO[bytes] = raw
    if path.endswith(".zst"):
        stream = io.BufferedReader(ZstandardReader(raw), 1 << 17)
    number = 0
    while line := stream.readline(LONGEST_LINE):
        number += 1
        where = f"{path}: line {number}"
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(LONGEST_LINE)
            bad(BadInputError("over-long", f"{where} is too long ({LONGEST_LINE} bytes or more)"))
        elif line.strip():
            try:
                yield where, json_value(line, where)
            except BadInputError as error:
                bad(error)


def json_value(line: bytes, where: str) -> Any:
    """Parse a line of JSON.

    Raises:
      BadInputError: if the line is not valid JSON; the message starts with the location `where`.
    """
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise not_utf8_error(where, error.object[error.start : error.end]) from error
    except RecursionError as error:
        raise BadInputError("not JSON", f"{where} is not JSON (nested too deep)") from error
    except ValueError as error:  # raised for numbers with too many digits, too
        message = f"{where} is not JSON ({str(error).partition(':')[0]}); is the file cut short?"
        raise BadInputError("not JSON", message) from error


def not_utf8_error(where: str, invalid: bytes) -> BadInputError:
    return BadInputError("not UTF-8", f"{where} holds the bytes {invalid!r}, expected UTF-8 text")


def replace_surrogates(text: str) -> str:
    """Replace unpaired surrogates with `?`, because UTF-8 cannot encode them.

    Strings in JSON can contain unpaired surrogates as escapes, such as "\\ud800".
    """
    return text.encode(errors="replace").decode()


FILE_TYPES = (".jsonl.zst", ".txt", ".xz", ".tar.gz", ".jsonl")
# Documents longer than this are cleaned and tokenised in pieces, so that they need not fit in
# memory.  The tokenizer is fastest with pieces of about this size.
PIECE_CHARACTERS = 1 << 14
MAX_UNCUT_CHARACTERS = 1 << 20  # characters; longer text without a safe place to cut is cut anyway


class Piece(NamedTuple):
    """Part of a document.

    Attributes:
      is_end: whether this is the document's last piece.
      is_bad: whether the document is unusable.  If true, the caller must drop the document's
        earlier pieces; no further pieces of the document follow.
    """

    text: str
    is_end: bool = False
    is_bad: bool = False


def read_pieces(
    path: str, separator: str, bad: BadInputHandler, progress: Callable[[int], object]
) -> Iterator[Piece]:
    """Yield the documents of a file, piece by piece.

    Args:
      separator: the text that separates documents, such as "<|endoftext|>"; empty documents are
        dropped.
      bad: called for each unusable document or file.
      progress: called repeatedly with the number of bytes read since the previous call.

    Raises:
      InputError: if a document or the file is unusable and `bad` does not skip it.
    """
    reported, is_open = 0, False
    with open_input(path, bad) as raw:
        for where, text in _texts(raw, path, bad):
            for piece in _checked(split_documents(text, separator), where, bad):
                is_open = not piece.is_end and not piece.is_bad
                yield piece
                progress(raw.tell() - reported)
                reported = raw.tell()
    if is_open:  # the file ended inside a document
        yield Piece("", is_bad=True)
    progress(files.size(path) - reported)


def _checked(
    pieces: Iterator[tuple[str, bool]], where: str, bad: BadInputHandler
) -> Iterator[Piece]:
    """Yield the pieces of a text's documents, without documents that are not valid UTF-8.

    `bad` is called for each invalid document.  If some pieces of an invalid document have already
    been yielded, the next piece has `is_bad` set, so that the caller drops the document.

    Args:
      pieces: the pieces of all documents, as yielded by `split_documents`.
      where: the location of the text, for error messages.
    """
    number, is_first, is_dropped = 1, True, False
    for text, is_end in pieces:
        if not is_dropped and (invalid := invalid_bytes(text)):
            bad(not_utf8_error(f"{where}: document {number}", invalid))
            is_dropped = True
            if not is_first:
                yield Piece("", is_bad=True)
        if not is_dropped:
            yield Piece(text, is_end)
        is_first = is_end
        if is_end:
            number, is_dropped = number + 1, False


def invalid_bytes(text: str) -> bytes:
    """Return the first invalid UTF-8 bytes of the file that `text` was read from, or b"" if none.

    The text must have been decoded with the error handler `surrogateescape`.
    """
    if text.isascii():
        return b""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start : error.end].encode(errors="surrogateescape")
    return b""


def split_documents(text: TextIO, separator: str) -> Iterator[tuple[str, bool]]:
    """Split a text of any length into documents, and long documents into pieces.

    Yields (piece, is_end), where `is_end` marks the last piece of a document.

    A long document is cut only directly before a newline or space that follows a visible character.
    GPT-2's tokenizer never forms a token across such a place, so tokenising the pieces separately
    gives the same tokens as tokenising the whole document.  If about a million characters
    (`MAX_UNCUT_CHARACTERS`) have no such place, the document is cut anyway, and the tokens at the
    cut may differ.

    Args:
      separator: the text that separates documents; empty documents are dropped.
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
            if not cut and len(rest) > MAX_UNCUT_CHARACTERS:
                cut = len(rest) - len(separator)  # the end may be part of a separator
            if cut:
                yield rest[:cut], False
                rest, started = rest[cut:], True
            searched = 0 if cut else len(rest)
    if rest or started:
        yield rest, True


def _last_safe_cut(text: str, start: int) -> int:
    """Return the position of the last newline that directly follows a visible character.

    If there is no such newline, return the position of the last space that directly follows a
    visible character, or else 0.  Only positions from `start` on are searched.
    """
    for mark in "\n ":
        cut = text.rfind(mark, start)
        while cut > 0 and text[cut - 1].isspace():
            cut = text.rfind(mark, start, cut)
        if cut > 0:
            return cut
    return 0


def _texts(raw: IO, path: str, bad: BadInputHandler) -> Iterator[tuple[str, TextIO]]:
    """Yield (location, stream of the text) for each text in a file.

    A JSON Lines file has one text per line, an archive has one per member, and any other file is a
    single text.  The location names the file and the line or member, for use in error messages.
    """
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
    text.detach()  # otherwise `text` would close the stream, whose position is still needed


def _xz_texts(raw: IO[bytes], where: str) -> Iterator[tuple[str, TextIO]]:
    """Yield (location, stream of the text) for each text in an .xz file.

    The file holds a tar archive, with one text per member, or a single text.  OpenWebText is
    distributed as tar archives in .xz files.
    """
    with lzma.open(raw) as decompressed:
        stream = io.BufferedReader(decompressed, tarfile.BLOCKSIZE)  # type: ignore[arg-type]
        if stream.peek(tarfile.BLOCKSIZE)[257:262] == b"ustar":
            yield from _member_texts(stream, where)
        else:
            yield from _decoded(stream, where, newline="")


def _member_texts(stream: io.BufferedIOBase, path: str) -> Iterator[tuple[str, TextIO]]:
    """Yield (location, stream of the text) for each file in a tar archive; decompress .xz files."""
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
    # Read to the end of the stream, because only there does the decompressor verify its checksums.
    while stream.read(tarfile.RECORDSIZE):
        pass


def _json_texts(raw: IO, path: str, bad: BadInputHandler) -> Iterator[tuple[str, TextIO]]:
    """Yield (location, text) for each line of a JSON Lines file.

    A line must be a string, or an object whose `text` is a string or a list of paragraphs.
    """
    for where, value in json_lines(raw, path, bad):
        text: Any = value.get("text") if isinstance(value, dict) else value
        if isinstance(text, list) and all(isinstance(paragraph, str) for paragraph in text):
            text = "\n\n".join(text)
        if isinstance(text, str):
            yield where, io.StringIO(replace_surrogates(text))
        else:
            bad(
                BadInputError(
                    "no text",
                    f"{where} has no text, expected a JSON string or an object with the key text",
                )
            )
