"""Splits text, or the rows of tables, at random into a training part and a validation part.

The text is read twice, first to measure the documents and then to copy them.  It is read piece by
piece, so that the whole text, and even a single document, may be larger than memory.  Only a few
numbers per document are kept in memory.

Files, and spans of large ones, are read by this process one after another, or by workers in any
order (see `parts`).  The bytes are the same, because each has zstandard frames of its own.  Small
files, which would be compressed badly alone, share frames with their neighbours: workers do not
compress them.
"""

import contextlib
import os
import random
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from mesh_transformer.data.documents import TEXT_COLUMN
from mesh_transformer.data.file_types import FILE_TYPES, TABLE_TYPES
from mesh_transformer.data.inputs import BadInputHandler, find_files, format_counts
from mesh_transformer.data.parts import InFile, Part, Parts, Workers, parts_of, report
from mesh_transformer.data.split_parts import (
    BAD,
    COUNTS,
    CUT,
    LEFT_OUT,
    NAMES,
    TRAIN,
    VALIDATION,
    Measuring,
    Output,
    Writing,
)
from mesh_transformer.data.tokenizer import END_OF_TEXT
from mesh_transformer.storage.access import local_path
from mesh_transformer.storage.files import delete, is_file, output_folder, size
from mesh_transformer.util import InputError

ENDING = ".jsonl.zst"
PARTS = "split.partial"  # folder, in the output folder, of the parts that workers have finished
PART_BYTES = 1 << 27  # some seconds of work for one core
FRAME_BYTES = 1 << 20  # smaller parts are compressed together with their neighbours


class SplitPart(NamedTuple):
    """The training part or the validation part of a text, as written to a file.

    Attributes:
      path: the path of the file.
      documents: the number of documents in the part.
      bytes: the size of the part's text in UTF-8, before it is compressed.
      replaced: whether there was a file at the path before.
    """

    path: str
    documents: int
    bytes: int
    replaced: bool


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
    workers: Workers | None = None,
) -> list[SplitPart]:
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
      workers: other processes that read the text; None for this one.  Parts that they have finished
        are stored in FOLDER/split.partial until all are, and are not read again by a later call.
        The result is the same.

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
    work = Measuring(local_path(os.path.join(folder, PARTS)), os.getcwd(), None if rows else column)
    measured = measure(work, files, skip_bad, workers)
    sizes, skipped = measured.sizes, measured.skipped
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
    paths = [os.path.join(folder, f"{name}{ENDING}") for name in NAMES]
    existing = [is_file(path) for path in paths]
    try:
        with output_folder(folder) as local, _files(local, rows) as outputs:
            write(work, measured, choice, outputs, workers)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror or error}); choose another folder"
        ) from error
    delete(work.folder)
    return [
        SplitPart(path, output.documents, output.bytes, replaced)
        for path, output, replaced in zip(paths, outputs, existing, strict=True)
    ]


def sample(
    files: list[str],
    folder: str,
    *,
    size: int,
    seed: int,
    skip_bad: bool,
    column: str,
    workers: Workers | None = None,
) -> str | None:
    """Write about `size` bytes of text, in documents chosen at random, and return the file's path.

    The documents are chosen as those of a validation part (see `choose`).

    Args:
      folder: where to write, which the caller deletes.
      workers: see `split`.

    Returns:
      The path; None if the text is not larger than `size`, and nothing is written.
    """
    work = Measuring(local_path(os.path.join(folder, PARTS)), os.getcwd(), column)
    measured = measure(work, files, skip_bad, workers)
    total = sum(one for one in measured.sizes if one > 0)
    if total <= size:
        return None
    choice = choose(measured.sizes, size / total, seed)
    with output_folder(folder) as local, _files(local, are_rows=False) as outputs:
        write(work, measured, choice, outputs, workers, others=LEFT_OUT)
    return os.path.join(folder, f"{NAMES[1]}{ENDING}")


@contextlib.contextmanager
def _files(folder: Path, are_rows: bool) -> Iterator[list[Output]]:
    """Yield the outputs in a folder, whose files appear when the block ends without an error."""
    paths = [folder / f"{name}{ENDING}" for name in NAMES]
    drafts = [path.with_name(f".{path.name}.partial") for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(draft, "wb")) for draft in drafts]
            outputs = [Output(file, are_rows) for file in files]
            yield outputs
            for output in outputs:
                output.close()
        for draft, path in zip(drafts, paths, strict=True):
            os.replace(draft, path)
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)


class Measured(NamedTuple):
    """The documents of a text.

    Documents are numbered from 0 in reading order.

    Attributes:
      parts: (part, number of its documents) in reading order.
      sizes: the size of each document in bytes of UTF-8; -1 (`BAD`) for an unusable one.
      skipped: the number of skipped items by reason.
    """

    parts: list[tuple[Part, int]]
    sizes: array
    skipped: dict[str, int]


def measure(work: Measuring, files: list[str], skip_bad: bool, workers: Workers | None) -> Measured:
    """Measure the documents in files, here or by means of workers."""
    bad = BadInputHandler(skip_bad)
    measured = Measured([], array("q"), bad.counts)
    with _bar("measuring", sum(map(size, files))) as bar:
        for part, sizes in _measured(work, files, bad, workers, bar):
            measured.parts.append((part, len(sizes)))
            measured.sizes.extend(sizes)
    return measured


def _measured(
    work: Measuring, files: list[str], bad: BadInputHandler, workers: Workers | None, bar: tqdm
) -> Iterator[tuple[Part, array]]:
    """Yield (part, sizes of its documents) in reading order."""
    parts = (
        part
        for path in files
        for part in parts_of(path, END_OF_TEXT, PART_BYTES)
        if not part.is_hash
    )
    numbered = 0  # lines or documents of the file before the part
    if workers is None:
        for part in parts:
            numbered = numbered if part.start else 0
            span, in_file = part.span, InFile(part, numbered, bad)
            yield part, array("q", work.sizes(part, span, in_file, bar.update))
            numbered += span.numbered(part.path) if span else 0
        return
    finished = Parts(work, workers)
    for part, result in finished.in_order(parts, bar):
        numbered = numbered if part.start else 0
        report(part, result, numbered, bad)
        with finished.content(part, result) as file:
            yield part, array("q", file.read())
        numbered += result.numbered


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


def write(
    work: Measuring,
    measured: Measured,
    choice: Choice,
    outputs: list[Output],
    workers: Workers | None,
    others: str = TRAIN,
) -> None:
    """Write each document to the training or the validation part, here or by means of workers.

    Args:
      outputs: of the training part and of the validation part.
      others: TRAIN, or LEFT_OUT for the documents that are not chosen for validation.

    Raises:
      InputError: if a file has changed since it was measured.
    """
    sizes, cut = measured.sizes, choice.cut
    position = 0 if cut is None else sizes[cut] - choice.cut_bytes
    writing = Writing(work.folder, work.root, work.column, position, FRAME_BYTES)
    expected: deque[int] = deque()  # bytes of text of the parts that are not written yet

    def chosen(bar: tqdm) -> Iterator[Part]:
        first = 0
        for part, count in measured.parts:
            own = range(first, first + count)
            choices = "".join(_choice(number, sizes, choice, others) for number in own)
            pairs = zip(own, choices, strict=True)
            text = sum(sizes[number] for number, one in pairs if one != LEFT_OUT)
            first += count
            if text:
                expected.append(text)
                yield part._replace(choices=choices)
            else:
                bar.update(part.size)

    with _bar("writing", sum(part.size for part, _ in measured.parts)) as bar:
        before = 0
        for part in _written(writing, chosen(bar), outputs, workers, bar):
            copied = sum(output.bytes for output in outputs)
            if copied - before != expected.popleft():
                raise InputError(f"{part.path} changed while it was read; run the command again")
            before = copied


def _choice(number: int, sizes: array, choice: Choice, others: str) -> str:
    if sizes[number] == BAD:
        return LEFT_OUT
    if number == choice.cut:
        return CUT
    return VALIDATION if number in choice.documents else others


def _written(
    work: Writing,
    parts: Iterator[Part],
    outputs: list[Output],
    workers: Workers | None,
    bar: tqdm,
) -> Iterator[Part]:
    """Write one part after another, and yield each one when it is written."""
    if workers is None:
        for part in parts:
            frames = outputs if work.has_frames(part) else []
            for output in frames:
                output.end_frame()
            work.write(part, outputs, bar.update)
            for output in frames:
                output.end_frame()
            yield part
        return
    finished = Parts(work, workers)
    for part, result in finished.in_order(parts, bar):
        report(part, result, 0, BadInputHandler(None))
        with finished.content(part, result) as file:
            for name, output in zip(NAMES, outputs, strict=True):
                stored, documents, text = (result.counts[f"{name} {kind}"] for kind in COUNTS)
                output.append(file, stored, documents, text, work.has_frames(part))
        yield part


def _bar(title: str, total: int) -> tqdm:
    return tqdm(unit="B", unit_scale=True, desc=title, total=total)
