"""Parts of files that are processed apart from each other, on any machine and in any order.

The result of each part is a file of its own, which is complete from the moment at which it appears,
and whose name depends on all that its content depends on.  So it does not matter how often, when
and where a part is processed.  The files are then read in the order of the parts, which gives what
a run on one machine gives.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pickle
import re
import secrets
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, Protocol

from tqdm import tqdm

from mesh_transformer.data.inputs import (
    MAX_PRINTED,
    BadInputError,
    BadInputHandler,
    open_input,
)
from mesh_transformer.data.spans import Span, ends_of_spans
from mesh_transformer.storage import files
from mesh_transformer.util import InputError


class Part(NamedTuple):
    """A part of the text.

    Attributes:
      path, bytes, changed: the file with its size and modification time; see `files.status`.
      start, end: the range of bytes; all of the file, including its hash, if `end` is None.
        Without any bytes, only the hash.
      choices: what to do with each document, if that differs (see `split`).
    """

    path: str
    bytes: int
    changed: int
    start: int = 0
    end: int | None = None
    choices: str = ""

    def __str__(self) -> str:
        if self.end is None or self.is_hash:
            return self.path
        return f"{self.path}, bytes {self.start} to {self.end}"

    @property
    def is_hash(self) -> bool:
        return self.start == self.end

    @property
    def span(self) -> Span | None:
        """A new span of the range of bytes; None for all of the file."""
        return None if self.end is None else Span(self.start, self.end)

    @property
    def size(self) -> int:
        return (self.bytes if self.end is None else self.end) - self.start


@dataclasses.dataclass
class Result:
    """What is known of a part that is processed.

    Attributes:
      documents, tokens: counts of what it adds to a corpus or another output.
      numbered: how far it advances the numbers of lines or documents in error messages.
      sha256: the hash of the whole file; empty if the part was only a range of its bytes.
      skipped: the number of unusable items by reason.
      errors: (reason, message) of the first ones.
      failure: the message of an InputError that ended the work; empty if there was none.
      counts: what else is counted, by name.
      stored: the number of bytes of its content in the file of the finished part.
    """

    documents: int = 0
    tokens: int = 0
    numbered: int = 0
    sha256: str = ""
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    errors: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    failure: str = ""
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    stored: int = -1


class Workers(Protocol):
    """Processes that call a function, here or on other machines."""

    def run(
        self, function: Callable[[bytes, Part], Result], shared: bytes, parts: Iterable[Part]
    ) -> Iterator[tuple[Part, Result]]:
        """Yield (part, function(shared, part)) for each part, in the order of completion."""
        ...


class Reader(Protocol):
    """Processes one part after another, on one core, in a worker.

    Attributes:
      contents: the names of the files that `result` may write, in the order in which they are
        joined.
    """

    contents: ClassVar[tuple[str, ...]]

    def result(self, part: Part, folder: Path) -> Result:
        """Write the content of a part into files of an empty folder."""
        ...


@dataclasses.dataclass(frozen=True)
class Work:
    """How parts are processed; a subclass for each kind of content.

    Attributes:
      folder: where finished parts are stored, at a path that is the same for all workers.
      root: the folder in which the command runs, from which paths may be relative.
      versions: of the packages on which the content depends; workers need the same ones.
      has_hashes: whether the hash of a large file is a part, too.
    """

    folder: str
    root: str
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: versions(), kw_only=True)
    has_hashes: ClassVar[bool] = False

    @functools.cached_property
    def settings(self) -> list[Any]:
        """JSON values on which the content of a part depends, besides the part itself."""
        raise NotImplementedError

    def reader(self) -> Reader:
        raise NotImplementedError

    def name(self, part: Part) -> str:
        """Return the name of the file of a finished part."""
        content = json.dumps([*self.settings, *part])
        return hashlib.sha256(content.encode()).hexdigest()[:32]


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the packages on which the content of parts depends."""
    result = {}
    names = ("mesh-transformer", "tokenizers", "transformers", "ftfy", "pyarrow", "zstandard")
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            result[name] = metadata.version(name)
    return result


def finish(pickled: bytes, part: Part) -> Result:
    """Process a part, and store its result in the folder of finished parts; for use in a worker.

    Args:
      pickled: the `Work`.
    """
    work, reader = _reader(pickled)
    try:
        if (here := versions()) != work.versions:
            raise InputError(
                f"a worker has {here}, expected {work.versions}; install the same packages on all "
                "machines"
            )
        size, changed = files.status(part.path)
        if (size, changed) != (part.bytes, part.changed):
            raise InputError(
                f"{part.path} has {size} bytes on a worker, expected the {part.bytes} bytes that "
                "the command began with, of the same time; do not change the file during the run, "
                "and give a path that is the same file on all machines"
            )
        with tempfile.TemporaryDirectory() as temporary:
            result = reader.result(part, Path(temporary))
            if not result.failure:
                paths = [Path(temporary, name) for name in reader.contents]
                _store(work, part, result, [path for path in paths if path.exists()])
            return result
    except InputError as error:
        return Result(failure=str(error))
    except OSError as error:
        if error.filename != part.path:
            raise
        line = f"{part.path} cannot be read on a worker ({error.strerror or error})"
        return Result(failure=f"{line}; give a path that all machines share")


@functools.lru_cache(maxsize=1)
def _reader(pickled: bytes) -> tuple[Work, Reader]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have parts of their own
    work = pickle.loads(pickled)
    with contextlib.suppress(FileNotFoundError):  # then there are no relative paths, or no files
        os.chdir(work.root)
    return work, work.reader()


class Collecting(BadInputHandler):
    """Counts unusable input, and collects the first errors instead of printing them."""

    def __init__(self):
        super().__init__(skip=True)
        self.errors: list[tuple[str, str]] = []

    def __call__(self, error: BadInputError) -> None:
        self.counts[error.reason] += 1
        if len(self.errors) < MAX_PRINTED:
            self.errors.append((error.reason, str(error)))


def _store(work: Work, part: Part, result: Result, paths: list[Path]) -> None:
    """Write a finished part: the result as a line of JSON, and the content of some files."""
    name = work.name(part)
    result.stored = sum(path.stat().st_size for path in paths)
    with files.output_folder(work.folder) as target:
        # Several workers may write the same part.
        draft = target / f".{name}.{secrets.token_hex(4)}"
        try:
            with open(draft, "xb") as out:
                out.write(json.dumps(dataclasses.asdict(result)).encode() + b"\n")
                for path in paths:
                    with open(path, "rb") as file:
                        shutil.copyfileobj(file, out)
                out.flush()
                os.fsync(out.fileno())
            os.replace(draft, target / name)
        finally:
            draft.unlink(missing_ok=True)


def parts_of(path: str, separator: str, size: int) -> Iterator[Part]:
    """Yield the parts of a file in reading order; the last part of a cut file is its hash.

    Args:
      separator: the text that separates documents.
      size: the number of bytes of a part, unless its last document extends beyond them.
    """
    whole, start = Part(path, *files.status(path)), 0
    if whole.bytes > size:
        with open_input(path, BadInputHandler(None)) as file:
            for end in ends_of_spans(file, path, separator, size):
                if (start, end) != (0, whole.bytes):
                    yield whole._replace(start=start, end=end)
                    start = end
    yield whole._replace(end=0) if start else whole


class Parts:
    """The parts of files, which workers finish."""

    def __init__(self, work: Work, workers: Workers):
        self.work, self._workers = work, workers

    def in_order(self, parts: Iterable[Part], bar: tqdm) -> Iterator[tuple[Part, Result]]:
        """Finish all parts that are not finished yet, and yield all of them in their order.

        Args:
          parts: the parts in reading order.
          bar: counts bytes, and shows the speed.
        """
        waiting: deque[Part] = deque()  # in reading order
        results: dict[Part, Result] = {}
        tokens = 0

        def ready() -> Iterator[tuple[Part, Result]]:
            while waiting and waiting[0] in results:
                yield waiting[0], results.pop(waiting.popleft())

        planned = self._planned(parts, waiting, results, bar)
        for part, result in self._workers.run(finish, pickle.dumps(self.work), planned):
            results[part] = result
            tokens += result.tokens
            if tokens:
                rate = tokens / max(bar.format_dict["elapsed"], 1e-3)
                bar.set_postfix({"tokens/s": f"{rate:,.0f}"}, refresh=False)
            bar.update(part.size)
            yield from ready()
        yield from ready()

    def _planned(
        self, parts: Iterable[Part], waiting: deque[Part], results: dict[Part, Result], bar: tqdm
    ) -> Iterator[Part]:
        """Yield the parts that are not finished, in the order in which to begin them.

        All parts are added to `waiting`, and those that are finished to `results`.
        """
        stored = set(files.names(self.work.folder))
        for part in parts:
            waiting.append(part)
            begun = [] if part.is_hash else [part]
            if self.work.has_hashes and part.end and not part.start:
                # The hash of a large file takes long, so it is begun first.
                begun.insert(0, part._replace(end=0))
            for one in begun:
                finished = self._stored(one) if self.work.name(one) in stored else None
                if finished is None:
                    yield one
                else:
                    results[one] = finished
                    bar.update(one.size)

    def _stored(self, part: Part) -> Result | None:
        """Return the result of a part that is stored; None if its file is damaged."""
        with files.open_file(self._path(part)) as file:
            try:
                result = Result(**json.loads(file.readline()))
            except (ValueError, TypeError):
                return None
            size = file.tell() + result.stored
            return result if size == file.seek(0, os.SEEK_END) else None

    @contextlib.contextmanager
    def content(self, part: Part, result: Result) -> Iterator[IO[bytes]]:
        """Open the file of a finished part at the beginning of its content.

        Raises:
          InputError: if it is not here, or, at the end of the `with` block, if its content has
            another length than when it was stored.
        """
        path = self._path(part)
        try:
            with files.open_file(path) as file:
                start = len(file.readline())
                yield file
                size = file.seek(0, os.SEEK_END) - start
        except FileNotFoundError as error:
            raise InputError(
                f"{path}: a worker has written this file, which is not here; give an output "
                "folder that all machines share, or one in a bucket"
            ) from error
        if size != result.stored:
            raise InputError(f"{path} is damaged; delete it, and run the command again")

    def delete(self, part: Part) -> None:
        """Delete the file of a finished part."""
        files.delete(self._path(part))

    def _path(self, part: Part) -> str:
        return os.path.join(self.work.folder, self.work.name(part))


class InFile(BadInputHandler):
    """Calls `bad` for the errors of a part, with the numbers of lines or documents in its file.

    Args:
      numbered: the number of lines or documents of the file before the part.
    """

    def __init__(self, part: Part, numbered: int, bad: BadInputHandler):
        super().__init__(bad.skip)
        self._path, self._numbered, self._bad = part.path, numbered, bad

    def __call__(self, error: BadInputError) -> None:
        place = re.compile(rf"({re.escape(self._path)}: (?:line|document) )(\d+)")
        message = str(error)
        if match := place.match(message):
            message = f"{match[1]}{int(match[2]) + self._numbered}{message[match.end() :]}"
        self._bad(BadInputError(error.reason, message))


def report(part: Part, result: Result, numbered: int, bad: BadInputHandler) -> None:
    """Call `bad` for the errors of a part, or raise the one that ended it, as in a whole file.

    Args:
      numbered: the number of lines or documents of the file before the part.
    """
    in_file = InFile(part, numbered, bad)
    for reason, message in result.errors:
        in_file(BadInputError(reason, message))
    printed = Counter(reason for reason, _ in result.errors)
    bad.counts.update(Counter(result.skipped) - printed)
    if result.failure:
        raise InputError(result.failure)
