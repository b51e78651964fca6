"""Reads the rows of tables: .jsonl, .csv, .tsv, .parquet and .arrow files.

A table is read row by row, or in batches of rows, so it may be larger than memory.
"""

import csv
import io
import json
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from mesh_transformer.data.inputs import (
    COMPRESSIONS,
    BadInputError,
    BadInputHandler,
    DamagedError,
    decompressed,
)
from mesh_transformer.util import InputError

TABLE_TYPES = (
    *(table + compression for table in (".jsonl", ".csv", ".tsv") for compression in COMPRESSIONS),
    ".parquet",
    ".arrow",
)
LONGEST_LINE = 1 << 27  # bytes; limits the memory that a file without line ends can take
ROWS = 32  # of a .parquet or .arrow file that are converted at once
# The last bytes of a stream of Arrow record batches.  A stream that is cut short between two
# batches lacks them.
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
ARROW_FILE = b"ARROW1"  # the first bytes of Arrow's other format, which has a table of contents


class Columns(NamedTuple):
    """The columns to read from a table.

    Attributes:
      choices: tuples of names.  The first tuple is read whose columns are all in the table.
      remedy: what a user can do if the table lacks the columns, for the error message.
    """

    choices: tuple[tuple[str, ...], ...]
    remedy: str

    def among(self, names: list[str], path: str) -> tuple[str, ...]:
        """Return the columns to read from the table at `path`, whose columns are `names`.

        Raises:
          InputError: if the table lacks columns.
        """
        for choice in self.choices:
            if set(choice) <= set(names):
                return choice
        missing = ", nor ".join(" and ".join(choice) for choice in self.choices)
        raise InputError(
            f"{path} has no column {missing}; it has {', '.join(names) or 'none'}: {self.remedy}"
        )


def read_rows(
    raw: IO[bytes], path: str, columns: Columns, bad: BadInputHandler
) -> Iterator[tuple[str, Any]]:
    """Yield (location, value) for each row of a table.

    The value is a dict with the table's `columns`, except in a JSON Lines file, where it is the
    value of the line, which can be of any type.  The location names the file and the line or row,
    for use in error messages.

    Args:
      raw: the open file.
      path: the path of the file, whose ending is one of `TABLE_TYPES`.
      bad: called for each row that cannot be read.

    Raises:
      InputError: if the table lacks columns.
      DamagedError, or another of `inputs.DAMAGE_ERRORS`: if the file is damaged.
    """
    kind = path.removesuffix(next(end for end in COMPRESSIONS if path.endswith(end)))
    if kind.endswith(".jsonl"):
        yield from _json_lines(decompressed(raw, path), path, bad)
    elif kind.endswith((".csv", ".tsv")):
        delimiter = "\t" if kind.endswith(".tsv") else ","
        yield from _csv_rows(decompressed(raw, path), path, columns, bad, delimiter)
    else:
        yield from _arrow_rows(raw, path, columns, bad)


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
    raw: IO[bytes], path: str, columns: Columns, bad: BadInputHandler
) -> Iterator[tuple[str, Any]]:
    """Yield (location, dict of columns) for each row of a .parquet or .arrow file.

    `bad` is called for each row whose text is not UTF-8.
    """
    number = 0
    try:
        read = _parquet_batches if path.endswith(".parquet") else _arrow_batches
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
        raise InputError(f"{path} requires a package; pip install 'pyarrow>=16'") from error
    except Exception as error:  # damaged bytes make pyarrow raise errors of many classes
        if isinstance(error, OSError) and error.errno is not None:  # the file cannot be read
            raise
        raise DamagedError(_first_line(error)) from error


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


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
