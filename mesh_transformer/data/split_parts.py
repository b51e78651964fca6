"""The documents of parts of a text: measured, and written to a training or a validation part.

A document is a text or, if the rows of tables are split, a row.
"""

import contextlib
import dataclasses
import functools
import json
import re
import shutil
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import IO, Any, ClassVar

from mesh_transformer.data.corpus import PIECES
from mesh_transformer.data.documents import Piece, read_pieces
from mesh_transformer.data.inputs import BadInputHandler
from mesh_transformer.data.parts import Collecting, Part, Result, Work
from mesh_transformer.data.spans import Span
from mesh_transformer.data.tables import EVERY, rows_of
from mesh_transformer.data.tokenizer import END_OF_TEXT
from mesh_transformer.util import InputError

NAMES = ("train", "val")
COUNTS = ("stored", "documents", "bytes")  # of each of the two, in the results of parts
LINE_CHARACTERS = 1 << 22  # longer documents are written as several lines, to limit memory use
WINDOW_CHARACTERS = 1 << 16  # characters to read after a cut; a better place is sought among them
BAD = -1  # the size of an unusable document
# What to do with a document; one letter per document of a part.
TRAIN, VALIDATION, CUT, LEFT_OUT = "tvc-"
# Places to cut a document, best first.  The validation part starts after the match.
BOUNDARIES = (re.compile(r"\n\s*\n"), re.compile(r"\n"), re.compile(r"\s"))


@dataclasses.dataclass(frozen=True)
class Measuring(Work):
    """How the documents of parts are measured; also the `Reader` that measures them.

    Attributes:
      column: the column of the text in tables (see `read_pieces`); None to take their rows as
        documents.
    """

    column: str | None
    contents: ClassVar[tuple[str, ...]] = ("sizes",)

    @functools.cached_property
    def settings(self) -> list[Any]:
        return [PIECES, self.versions, self.column]

    def reader(self) -> "Measuring":
        return self

    def result(self, part: Part, folder: Path) -> Result:
        sizes, span, bad, failure = array("q"), part.span, Collecting(), ""
        try:
            for one in self.sizes(part, span, bad, _ignore):
                sizes.append(one)
        except InputError as error:
            failure = str(error)
        (folder / "sizes").write_bytes(sizes.tobytes())
        return Result(
            documents=len(sizes),
            numbered=span.numbered(part.path) if span else 0,
            skipped=dict(bad.counts),
            errors=bad.errors,
            failure=failure,
        )

    def sizes(
        self,
        part: Part,
        span: Span | None,
        bad: BadInputHandler,
        progress: Callable[[int], object],
    ) -> Iterator[int]:
        """Yield the size of each document in bytes of UTF-8, or -1 (`BAD`).

        Args:
          span: that of the part, which counts what is read.
          progress: called repeatedly with the number of bytes read since the previous call.
        """
        for document in self.documents(part, span, bad, progress):
            size = 0
            for piece in document:
                size = BAD if piece.is_bad else size + len(piece.text.encode())
            yield size

    def documents(
        self,
        part: Part,
        span: Span | None,
        bad: BadInputHandler,
        progress: Callable[[int], object],
    ) -> Iterator[Iterator[Piece]]:
        """Yield, for each document, an iterator over its pieces; see `sizes` for the arguments.

        The caller must exhaust each document's iterator before requesting the next document.
        """
        if self.column is None:
            pieces = _rows(part.path, bad, progress, span)
        else:
            pieces = read_pieces(part.path, END_OF_TEXT, bad, progress, self.column, span)
        for first in pieces:
            yield _until_end(first, pieces)


@dataclasses.dataclass(frozen=True)
class Writing(Measuring):
    """How the documents of parts are written, as the parts' `choices` say; also the `Reader`.

    Attributes:
      cut: of the document that is cut, the size in bytes of the text before the cut, about.
      frame_bytes: parts of at least this size have zstandard frames of their own.
    """

    cut: int
    frame_bytes: int
    contents: ClassVar[tuple[str, ...]] = NAMES

    @functools.cached_property
    def settings(self) -> list[Any]:
        return [PIECES, self.versions, self.column, self.cut, self.frame_bytes]

    def has_frames(self, part: Part) -> bool:
        """Return whether a part has frames of its own."""
        return part.size >= self.frame_bytes

    def result(self, part: Part, folder: Path) -> Result:
        counts: dict[str, int] = {}
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(folder / name, "wb")) for name in NAMES]
            outputs = [Output(file, self.column is None, self.has_frames(part)) for file in files]
            self.write(part, outputs, _ignore)
            for name, output, file in zip(NAMES, outputs, files, strict=True):
                output.end_frame()
                values = (file.tell(), output.documents, output.bytes)
                counts |= {f"{name} {kind}": one for kind, one in zip(COUNTS, values, strict=True)}
        return Result(counts=counts)

    def write(self, part: Part, outputs: "list[Output]", progress: Callable[[int], object]) -> None:
        """Write the documents of a part to the training and the validation part."""
        train, validation = outputs
        # Errors are reported when the part is measured.
        documents = self.documents(part, part.span, Collecting(), progress)
        for document, choice in zip(documents, chain(part.choices, repeat(TRAIN)), strict=False):
            if choice == LEFT_OUT:
                deque(document, 0)
            elif choice == CUT:
                _write_cut(document, self.cut, train, validation)
            else:
                output = validation if choice == VALIDATION else train
                output.document(piece.text for piece in document)


class Output:
    """A file of documents as lines of JSON, in zstandard frames.

    Args:
      raw: the file.
      are_rows: whether documents are lines of JSON, instead of texts.
      is_compressed: if false, the lines are written without frames.

    Attributes:
      documents, bytes: what is written so far, as in `SplitPart`.
    """

    def __init__(self, raw: IO[bytes], are_rows: bool, is_compressed: bool = True):
        self.documents = self.bytes = 0
        self._raw, self._are_rows, self._frame = raw, are_rows, None if is_compressed else raw
        self._is_compressed = is_compressed
        import zstandard  # imported late, as an installation may lack it

        self._compressor = zstandard.ZstdCompressor()

    def document(self, texts: Iterator[str]) -> None:
        """Write the concatenation of `texts` as one document.

        A document of more than 4 million characters (`LINE_CHARACTERS`) is written as several
        lines.
        """
        pending: list[str] = []
        characters, before = 0, self.bytes
        for text in texts:
            pending.append(text)
            characters += len(text)
            if characters >= LINE_CHARACTERS:
                self._line("".join(pending))
                pending, characters = [], 0
        self._line("".join(pending))
        self.documents += self.bytes > before

    def append(
        self, file: IO[bytes], stored: int, documents: int, size: int, is_frame: bool
    ) -> None:
        """Append what another output has written.

        Args:
          file: open at the beginning of it.
          stored: the number of bytes to read of the file.
          documents, size: the other output's `documents` and `bytes`.
          is_frame: whether it is compressed.
        """
        self.documents += documents
        self.bytes += size
        if is_frame:
            self.end_frame()
        if stored:
            start = file.tell()
            content = Span(start, start + stored).reader(file)
            shutil.copyfileobj(content, self._raw if is_frame else self._stream())

    def end_frame(self) -> None:
        """Let later documents begin a new frame."""
        if self._is_compressed and self._frame is not None:
            self._frame.close()
            self._frame = None

    def close(self) -> None:
        """Complete the file, which has a frame even if there are no documents."""
        if not self._raw.tell():
            self._stream()
        self.end_frame()

    def _stream(self) -> IO[bytes]:
        if self._frame is None:
            self._frame = self._compressor.stream_writer(self._raw, closefd=False)
        return self._frame

    def _line(self, text: str) -> None:
        if text:
            line = text if self._are_rows else json.dumps({"text": text}, ensure_ascii=False)
            self._stream().write(f"{line}\n".encode())
        self.bytes += len(text.encode())


def _ignore(_: int) -> None:
    pass


def _rows(
    file: str, bad: BadInputHandler, progress: Callable[[int], object], span: Span | None
) -> Iterator[Piece]:
    """Yield each row of a table as a piece that holds a line of JSON; see `rows_of`.

    Raises:
      InputError: if a column holds bytes, for which JSON has no form that other readers know.
    """
    for where, value in rows_of(file, EVERY, bad, progress, span):
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


def _write_cut(document: Iterator[Piece], position: int, train: Output, validation: Output) -> None:
    """Write the beginning of a document to `train` and its end to `validation`.

    The document is cut after the first paragraph break that follows the byte `position`.  If no
    paragraph break is found, the cut is after the first line break, or else after the first space,
    or else at `position`.  The search covers about 32,000 characters (half of `WINDOW_CHARACTERS`)
    or, if less text follows, half of the text after `position`.
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

    train.document(before())
    validation.document(text for part in (ahead, texts) for text in part)


def _boundary(text: str) -> int:
    """Return the position after the first paragraph break in a text.

    If there is no paragraph break, return the position after the first line break, or else after
    the first space.  Return 0 if there is no space either.
    """
    for boundary in BOUNDARIES:
        if match := boundary.search(text):
            return match.end()
    return 0
