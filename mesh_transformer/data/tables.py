"""Reads the rows of tables, which are files of the kinds in `file_types.TABLE_TYPES`.

A table is read row by row, or in batches of rows, so it may be larger than memory.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from mesh_transformer import extras
from mesh_transformer.data.contents import Content, contents
from mesh_transformer.data.file_types import TABLE_TYPES
from mesh_transformer.data.inputs import (
    BadInputError,
    BadInputHandler,
    DamagedError,
    find_files,
    open_input,
)
from mesh_transformer.data.spans import Span
from mesh_transformer.util import InputError, first_line

LONGEST_LINE = 1 << 27  # bytes; limits the memory that a file without line ends can take
JSON_CHARACTERS = 1 << 16  # of a .json file that are read at once, unless an item is longer
ROWS = 32  # of a .parquet or .arrow file that are converted at once
# The last bytes of a stream of Arrow record batches.  A stream that is cut short between two
# batches lacks them.
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
_SPACE = re.compile(r"\s*")
ARROW_FILE = b"ARROW1"  # the first bytes of Arrow's other format, which has a table of contents


class Columns(NamedTuple):
    """The columns to read from a table.

    Attributes:
      choices: tuples of names.  The first tuple is read whose columns are all in the table; all
        columns if there are no tuples.
      remedy: what a user can do if the table lacks the columns, for the error message.
      optional: names of columns that are read as well if the table has them.
    """

    choices: tuple[tuple[str, ...], ...]
    remedy: str
    optional: tuple[str, ...] = ()

    def among(self, names: list[str], path: str) -> tuple[str, ...]:
        """Return the columns to read from the table at `path`, whose columns are `names`.

        Raises:
          InputError: if the table lacks columns.
        """
        if not self.choices:
            return tuple(names)
        for choice in self.choices:
            if set(choice) <= set(names):
                others = (name for name in self.optional if name in names and name not in choice)
                return (*choice, *others)
        missing = ", nor ".join(" and ".join(choice) for choice in self.choices)
        raise InputError(
            f"{path} has no column {missing}; it has {', '.join(names) or 'none'}: {self.remedy}"
        )


EVERY = Columns((), "")


def rows_of(
    path: str,
    columns: Columns,
    bad: BadInputHandler,
    progress: Callable[[int], object],
    span: Span | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield (location, value) for each row of a file; see `read_rows`.

    Args:
      progress: called repeatedly with the number of bytes read since the previous call.
      span: the part of the file to read; None for all of it.
    """
    with open_input(path, bad) as file:
        raw, before = span.reader(file) if span else file, 0
        for content in contents(raw, path, bad):
            for row in read_rows(content, columns, bad):
                progress(raw.tell() - before)
                before = raw.tell()
                yield row


def all_rows(path: str) -> list[tuple[str, Any]]:
    """Return (location, value) for each row of a file, or of the tables in a folder.

    Raises:
      InputError: if there are no tables, or a row cannot be read.
    """
    every = EVERY, BadInputHandler(skip=None), lambda _: None
    return [row for file in find_files(path, TABLE_TYPES) for row in rows_of(file, *every)]


def read_rows(
    content: Content, columns: Columns, bad: BadInputHandler
) -> Iterator[tuple[str, Any]]:
    """Yield (location, value) for each row of a table.

    The value is a dict with the table's `columns`, except in a file of JSON, where it is the value
    of the line or item, which can be of any type.  The location names the file and the line or row,
    for use in error messages.

    Args:
      content: the table, of one of the kinds in `TABLE_TYPES`.
      bad: called for each row that cannot be read.

    Raises:
      InputError: if the table lacks columns.
      DamagedError, or another of `inputs.DAMAGE_ERRORS`: if the file is damaged.
    """
    where, kind, stream = content
    if kind in (".jsonl", ".ndjson"):
        yield from _json_lines(stream, where, bad)
    elif kind == ".json":
        yield from _json_items(stream, where, bad)
    elif kind in (".csv", ".tsv"):
        delimiter = "\t" if kind == ".tsv" else ","
        yield from _csv_rows(stream, where, columns, bad, delimiter)
    else:
        batches = _parquet_batches if kind == ".parquet" else _arrow_batches
        yield from _arrow_rows(batches, stream, where, columns, bad)


def _json_lines(stream: IO[bytes], path: str, bad: BadInputHandler) -> Iterator[tuple[str, Any]]:
    """Yield (location, parsed value) for each non-blank line of a JSON Lines file.

    `bad` is called for each line that is too long or not valid JSON.
    """
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


def _json_items(stream: IO[bytes], path: str, bad: BadInputHandler) -> Iterator[tuple[str, Any]]:
    """Yield (location, value) for each item of a file of JSON.

    The items are those of one array, or values that follow each other, as in JSON Lines.  `bad` is
    called for each item that is not UTF-8.

    Raises:
      DamagedError: if the file is not JSON, such as an array in which a comma is missing or extra.
    """
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
    decoder, rest, number, position = json.JSONDecoder(), "", 0, 0
    is_array: bool | None = None  # None before the first visible character
    is_last, is_next = False, True  # whether an item, and neither a comma nor the end, is due
    try:
        while not is_last:
            block = text.read(
                max(JSON_CHARACTERS, len(rest) - position)
            )  # all of a long item in a few steps
            rest, position, is_last = rest[position:] + block, 0, not block
            if is_array is None and (rest := rest.lstrip()):
                is_array = rest[0] == "["
                position = int(is_array)
            while (position := _end_of_space(rest, position)) < len(rest):
                if is_array and rest[position] == "]" and (not number or not is_next):
                    if (rest[position + 1 :] + text.read()).strip():
                        raise DamagedError(f"there is text after the array of {number} items")
                    return
                if not is_next:
                    if rest[position] != ",":
                        raise DamagedError(f"item {number} is not followed by a comma")
                    position, is_next = position + 1, True
                    continue
                try:
                    value, end = decoder.raw_decode(rest, position)
                except (ValueError, RecursionError) as error:
                    if is_last or len(rest) - position > LONGEST_LINE:
                        raise DamagedError(f"item {number + 1} is not JSON ({error})") from error
                    break  # the rest of the item may be in the next block
                if end == len(rest) and not is_last:
                    break  # a number may have further digits there
                number, is_next = number + 1, not is_array
                where = f"{path}: item {number}"
                if invalid := invalid_bytes(rest[position:end]):
                    bad(not_utf8_error(where, invalid))
                else:
                    yield where, value
                position = end
        if is_array:
            raise DamagedError(f"the array has no end after item {number}")
    finally:
        text.detach()  # otherwise `text` would close the stream, whose position is still needed


def _end_of_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


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


def replace_surrogates(text: str) -> str:
    """Replace unpaired surrogates with `?`, because UTF-8 cannot encode them.

    Strings in JSON can contain unpaired surrogates as escapes, such as "\\ud800".
    """
    return text.encode(errors="replace").decode()


def _csv_rows(
    stream: IO[bytes], path: str, columns: Columns, bad: BadInputHandler, delimiter: str
) -> Iterator[tuple[str, Any]]:
    """Yield (location, dict of columns) for each row of a file of separated values.

    The first row names the columns.  `bad` is called for each row that has another number of
    values, or is not UTF-8.
    """
    csv.field_size_limit(LONGEST_LINE)
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        chosen, before = columns.among(names, path), reader.line_num
        for values in reader:
            where, before = f"{path}: line {before + 1}", reader.line_num
            row = dict(zip(names, values, strict=False))
            if values and len(values) != len(names):
                counts = f"{len(values)} values, but the first row names {len(names)} columns"
                bad(BadInputError("not a row", f"{where}: found {counts}"))
            elif invalid := next(filter(None, map(invalid_bytes, row.values())), None):
                bad(not_utf8_error(where, invalid))
            elif values:  # not a blank line
                yield where, {name: row[name] for name in chosen}
    except csv.Error as error:
        raise DamagedError(f"line {reader.line_num}: {error}") from error
    finally:
        text.detach()  # otherwise `text` would close the stream, whose position is still needed


def _arrow_rows(
    read: Callable[[IO[bytes], str, Columns], Iterator[Any]],
    raw: IO[bytes],
    path: str,
    columns: Columns,
    bad: BadInputHandler,
) -> Iterator[tuple[str, Any]]:
    """Yield (location, dict of columns) for each row of a .parquet or .arrow file.

    `read` yields the file's batches of rows.  `bad` is called for each row whose text is not UTF-8.
    """
    number = 0
    try:
        for batch in read(raw, path, columns):
            for start in range(0, batch.num_rows, ROWS):
                part = batch.slice(start, ROWS)
                cells = [_cells(column) for column in part.columns]
                for values in zip(*cells, strict=True):
                    number += 1
                    where = f"{path}: row {number}"
                    if invalid := next((v for v in values if isinstance(v, _NotText)), None):
                        bad(not_utf8_error(where, invalid.bytes))
                    else:
                        yield where, dict(zip(part.schema.names, values, strict=True))
    except (InputError, DamagedError):
        raise
    except ImportError as error:
        raise InputError(f"{path}: {extras.missing(error) or error}") from error
    except Exception as error:  # damaged bytes make pyarrow raise errors of many classes
        if isinstance(error, OSError) and error.errno is not None:  # the file cannot be read
            raise
        raise DamagedError(first_line(error)) from error


def _parquet_batches(raw: IO[bytes], path: str, columns: Columns) -> Iterator[Any]:
    from pyarrow import parquet

    # Without a buffer and with pre_buffer, all of a row group is in memory at once.
    file = parquet.ParquetFile(
        raw, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
    )
    chosen = columns.among(file.schema_arrow.names, path)
    yield from file.iter_batches(ROWS, columns=list(chosen))


def _arrow_batches(raw: IO[bytes], path: str, columns: Columns) -> Iterator[Any]:
    from pyarrow import ipc

    first = raw.read(len(ARROW_FILE))
    raw.seek(0)
    if first == ARROW_FILE:
        table = ipc.open_file(raw)
        batches = map(table.get_batch, range(table.num_record_batches))
    else:
        table = batches = ipc.open_stream(raw)
    chosen = columns.among(table.schema.names, path)
    for batch in batches:
        yield batch.select(list(chosen))
    if first != ARROW_FILE:
        raw.seek(-len(ARROW_END), io.SEEK_END)
        if raw.read() != ARROW_END:
            raise DamagedError("the stream of record batches has no end")


class _NotText(NamedTuple):
    """Stands for a cell whose text is not valid UTF-8."""

    bytes: bytes


def _cells(column: Any) -> list[Any]:
    """Return the values of an Arrow array as Python objects.

    Raises:
      pyarrow.ArrowInvalid: if the array is damaged.  A read from an .arrow file does not check it.
    """
    import pyarrow

    binary = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    # As bytes, because text that is not UTF-8 is an error of its row only.
    column.view(binary.get(column.type, column.type)).validate(full=True)
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_cell(value) for value in column]


def _cell(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return _NotText(error.object[error.start : error.end])
