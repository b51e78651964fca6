"""A corpus whose parts are tokenised apart from each other, on any machine and in any order.

Each part of the text is tokenised into a file of its own, which is complete from the moment at
which it appears, and whose name depends on all that its content depends on.  So it does not matter
how often, when and where a part is tokenised.  The files are then joined in reading order, which
gives the corpus of a run on one machine.
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
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from mesh_transformer.data.corpus import ENDS, PIECES, Progress, Source, Tokenizing, sha256_of
from mesh_transformer.data.documents import cleaner
from mesh_transformer.data.inputs import (
    MAX_PRINTED,
    BadInputError,
    BadInputHandler,
    open_input,
)
from mesh_transformer.data.spans import LINE_TYPES, Span, ends_of_spans
from mesh_transformer.data.tokenizer import fingerprint
from mesh_transformer.storage import files
from mesh_transformer.util import InputError

PART_BYTES = 1 << 25  # about 20 s of work for one core with GPT-2's tokenizer
SAVE_EVERY = 64  # parts between saves of the progress, at least


class Part(NamedTuple):
    """A part of the text.

    Attributes:
      path, bytes, changed: the file with its size and modification time; see `Source`.
      start, end: the range of bytes; all of the file, including its hash, if `end` is None.
        Without any bytes, only the hash.
    """

    path: str
    bytes: int
    changed: int
    start: int = 0
    end: int | None = None

    def __str__(self) -> str:
        if self.end is None or self.is_hash:
            return self.path
        return f"{self.path}, bytes {self.start} to {self.end}"

    @property
    def is_hash(self) -> bool:
        return self.start == self.end

    @property
    def size(self) -> int:
        return (self.bytes if self.end is None else self.end) - self.start


@dataclasses.dataclass
class Result:
    """What is known of a part that is tokenised.

    Attributes:
      documents, tokens: counts of what it adds to the corpus.
      numbered: how far it advances the numbers of lines or documents in error messages.
      sha256: the hash of the whole file; empty if the part was only a range of its bytes.
      skipped: the number of unusable items by reason.
      errors: (reason, message) of the first ones.
      failure: the message of an InputError that ended the work; empty if there was none.
    """

    documents: int = 0
    tokens: int = 0
    numbered: int = 0
    sha256: str = ""
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    errors: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    failure: str = ""


class Workers(Protocol):
    """Processes that call a function, here or on other machines."""

    def run(
        self, function: Callable[[bytes, Part], Result], shared: bytes, parts: Iterable[Part]
    ) -> Iterator[tuple[Part, Result]]:
        """Yield (part, function(shared, part)) for each part, in the order of completion."""
        ...


@dataclasses.dataclass(frozen=True)
class Work:
    """How parts are tokenised.

    Attributes:
      folder: where finished parts are stored, at a path that is the same for all workers.
      root: the folder in which the command runs, from which paths may be relative.
      use_ftfy, use_wikitext: see `cleaner`.
      column: see `read_pieces`.
      versions: of the packages on which the tokens depend; workers need the same ones.
    """

    folder: str
    root: str
    tokenizer: Any
    use_ftfy: bool
    use_wikitext: bool
    column: str
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: versions())

    @functools.cached_property
    def settings(self) -> list[Any]:
        steps = (self.use_ftfy, self.use_wikitext)
        return [PIECES, fingerprint(self.tokenizer), *steps, self.column]

    def name(self, part: Part) -> str:
        """Return the name of the file of a finished part."""
        content = json.dumps([*self.settings, *part])
        return hashlib.sha256(content.encode()).hexdigest()[:32]


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the packages on which the tokens of a text depend."""
    result = {}
    for name in ("mesh-transformer", "tokenizers", "transformers", "ftfy", "pyarrow"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            result[name] = metadata.version(name)
    return result


def finish(pickled: bytes, part: Part) -> Result:
    """Tokenise a part, and store it in the folder of finished parts; for use in a worker.

    Args:
      pickled: the `Work`.
    """
    tokenizing = _tokenizing(pickled)
    try:
        if (here := versions()) != tokenizing.work.versions:
            raise InputError(
                f"a worker has {here}, expected {tokenizing.work.versions}; install the same "
                "packages on all machines"
            )
        size, changed = files.status(part.path)
        if (size, changed) != (part.bytes, part.changed):
            raise InputError(
                f"{part.path} has {size} bytes on a worker, expected the {part.bytes} bytes that "
                "the command began with, of the same time; do not change the file during the run, "
                "and give a path that is the same file on all machines"
            )
        with tempfile.TemporaryDirectory() as temporary:
            result = tokenizing.result(part, Path(temporary))
            if not result.failure:
                _store(tokenizing.work, part, result, Path(temporary))
            return result
    except InputError as error:
        return Result(failure=str(error))
    except OSError as error:
        if error.filename != part.path:
            raise
        line = f"{part.path} cannot be read on a worker ({error.strerror or error})"
        return Result(failure=f"{line}; give a path that all machines share")


@functools.lru_cache(maxsize=1)
def _tokenizing(pickled: bytes) -> "_PartTokenizing":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have parts of their own
    work = pickle.loads(pickled)
    with contextlib.suppress(FileNotFoundError):  # then there are no relative paths, or no files
        os.chdir(work.root)
    with tempfile.TemporaryDirectory() as empty:
        return _PartTokenizing(work, Path(empty))


class _Collecting(BadInputHandler):
    """Counts unusable input, and collects the first errors instead of printing them."""

    def __init__(self):
        super().__init__(skip=True)
        self.errors: list[tuple[str, str]] = []

    def __call__(self, error: BadInputError) -> None:
        self.counts[error.reason] += 1
        if len(self.errors) < MAX_PRINTED:
            self.errors.append((error.reason, str(error)))


class _PartTokenizing(Tokenizing):
    """Tokenises one part after another, on one core."""

    batches_ahead = 0
    shows_progress = False

    def __init__(self, work: Work, empty: Path):
        clean = cleaner(work.use_ftfy, work.use_wikitext)
        super().__init__(empty, [], work.tokenizer, {}, clean, True, work.column)
        self.work = work

    def result(self, part: Part, folder: Path) -> Result:
        """Write the documents' ends and the tokens of a part into files of an empty folder."""
        if part.is_hash:
            return Result(sha256=sha256_of(part.path))
        self.folder, self.files = folder, [part.path]
        self.progress = Progress({}, [])
        self.span = None if part.end is None else Span(part.start, part.end)
        self.bad = _Collecting()
        failure = ""
        try:
            self.run()
        except InputError as error:
            failure = str(error)
        (source,) = self.progress.sources or [Source("", 0, 0)]
        is_lines = part.path.lower().endswith(LINE_TYPES)
        return Result(
            source.documents,
            source.tokens,
            getattr(self.span, "lines" if is_lines else "documents", 0),
            source.sha256,
            dict(self.bad.counts),
            self.bad.errors,
            failure,
        )

    def _bad_input_handler(self) -> BadInputHandler:
        return self.bad

    def _save(self, *written: IO[bytes]) -> None:
        """Do nothing: a part that is interrupted is begun again."""


def _store(work: Work, part: Part, result: Result, folder: Path) -> None:
    """Write a finished part: a line of JSON, the ends of its documents, and its tokens."""
    name = work.name(part)
    with files.output_folder(work.folder) as target:
        # Several workers may write the same part.
        draft = target / f".{name}.{secrets.token_hex(4)}"
        try:
            with open(draft, "xb") as out:
                out.write(json.dumps(dataclasses.asdict(result)).encode() + b"\n")
                for path in (folder / "ends", folder / "tokens"):
                    if path.exists():
                        with open(path, "rb") as file:
                            shutil.copyfileobj(file, out)
                out.flush()
                os.fsync(out.fileno())
            os.replace(draft, target / name)
        finally:
            draft.unlink(missing_ok=True)


def parts_of(path: str, separator: str, size: int) -> Iterator[Part]:
    """Yield the parts of a file in reading order; its hash, if it is a part, is the last.

    Args:
      separator: the text that separates documents.
      size: the number of bytes of a part, unless its last document extends beyond them.
    """
    source = Source.of(path)
    whole, start = Part(path, source.bytes, source.changed), 0
    if source.bytes > size:
        with open_input(path, BadInputHandler(None)) as file:
            for end in ends_of_spans(file, path, separator, size):
                if (start, end) != (0, source.bytes):
                    yield whole._replace(start=start, end=end)
                    start = end
    yield whole._replace(end=0) if start else whole


class TokenizingParts(Tokenizing):
    """A run that tokenises text files into a corpus by means of other processes.

    Args:
      arguments: those of `Tokenizing`.
      work: how parts are tokenised, which agrees with the arguments.
      workers: the processes.
      size: see `parts_of`.
    """

    def __init__(self, *arguments: Any, work: Work, workers: Workers, size: int | None = None):
        super().__init__(*arguments)
        self.work, self.workers, self.size = work, workers, size or PART_BYTES
        self.progress.drop_current()

    def _tokenize(self, tokens: IO[bytes], ends: IO[bytes], bar: tqdm) -> None:
        self._save(tokens, ends)  # from now on, finished parts remain if the run is interrupted
        source, bad, numbered, joined = None, BadInputHandler(self.skip_bad), 0, []
        for part, result in self._in_order(bar):
            if source is None:
                source = Source(os.path.basename(part.path), part.bytes, part.changed)
                bad, numbered = BadInputHandler(self.skip_bad), 0
            _report(part, result, numbered, bad)
            self._append(part, result, tokens, ends)
            joined.append(part)
            source.documents += result.documents
            source.tokens += result.tokens
            numbered += result.numbered
            if result.sha256:  # this part is the last of its file
                source.sha256, source.skipped = result.sha256, dict(sorted(bad.counts.items()))
                self.progress.sources.append(source)
                source = None
                if len(joined) >= SAVE_EVERY:
                    self._save(tokens, ends)
                    for part in joined:
                        files.delete(self._path(part))
                    joined = []

    def _in_order(self, bar: tqdm) -> Iterator[tuple[Part, Result]]:
        """Finish all parts that are not finished yet, and yield all of them in reading order."""
        waiting: deque[Part] = deque()  # in reading order
        results: dict[Part, Result] = {}
        bar.update(sum(source.bytes for source in self.progress.sources))
        tokens = 0

        def ready() -> Iterator[tuple[Part, Result]]:
            while waiting and waiting[0] in results:
                yield waiting[0], results.pop(waiting.popleft())

        planned = self._planned(waiting, results, bar)
        for part, result in self.workers.run(finish, pickle.dumps(self.work), planned):
            results[part] = result
            tokens += result.tokens
            rate = tokens / max(bar.format_dict["elapsed"], 1e-3)
            bar.set_postfix({"tokens/s": f"{rate:,.0f}"}, refresh=False)
            bar.update(part.size)
            yield from ready()
        yield from ready()

    def _planned(
        self, waiting: deque[Part], results: dict[Part, Result], bar: tqdm
    ) -> Iterator[Part]:
        """Yield the parts that are not finished, in the order in which to begin them.

        All parts are added to `waiting`, and those that are finished to `results`.
        """
        stored = set(files.names(self.work.folder))
        for file in self.files[len(self.progress.sources) :]:
            first = True
            for part in parts_of(file, self.tokenizer.eos_token, self.size):
                # The hash of a large file takes long, so it is begun first.
                begun = [part._replace(start=0, end=0)] if first and part.end is not None else []
                first = False
                waiting.append(part)
                for one in begun if part.is_hash else [*begun, part]:
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
            size = file.tell() + self._size(result)
            return result if size == file.seek(0, os.SEEK_END) else None

    def _size(self, result: Result) -> int:
        return result.documents * ENDS.itemsize + result.tokens * self.dtype.itemsize

    def _append(self, part: Part, result: Result, tokens: IO[bytes], ends: IO[bytes]) -> None:
        """Append a finished part to the corpus files, and update the progress in memory."""
        if not result.tokens:
            return
        progress = self.progress
        try:
            with files.open_file(self._path(part)) as file:
                file.readline()
                own = np.frombuffer(file.read(result.documents * ENDS.itemsize), ENDS)
                before = tokens.tell()
                shutil.copyfileobj(file, tokens)
        except FileNotFoundError as error:
            raise InputError(
                f"{self._path(part)}: a worker has written this file, which is not here; give an "
                "--output-dir that all machines share, or one in a bucket"
            ) from error
        if own.nbytes + tokens.tell() - before != self._size(result):
            raise InputError(f"{self._path(part)} is damaged; delete it, and run the command again")
        ends.write((own + progress.tokens).tobytes())
        progress.tokens += result.tokens
        progress.last_end = progress.tokens
        progress.documents += result.documents

    def _path(self, part: Part) -> str:
        return os.path.join(self.work.folder, self.work.name(part))


def _report(part: Part, result: Result, numbered: int, bad: BadInputHandler) -> None:
    """Call `bad` for the errors of a part, or raise the one that ended it, as in a whole file.

    Args:
      numbered: the number of lines or documents of the file before the part.
    """
    place = re.compile(rf"({re.escape(part.path)}: (?:line|document) )(\d+)")
    for reason, message in result.errors:
        if part.start and (match := place.match(message)):
            message = f"{match[1]}{int(match[2]) + numbered}{message[match.end() :]}"
        bad(BadInputError(reason, message))
    printed = Counter(reason for reason, _ in result.errors)
    bad.counts.update(Counter(result.skipped) - printed)
    if result.failure:
        raise InputError(result.failure)
