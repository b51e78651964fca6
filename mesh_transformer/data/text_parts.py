"""A corpus that is tokenised part by part, on any machine and in any order."""

import dataclasses
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from tqdm import tqdm

from mesh_transformer.data.corpus import ENDS, PIECES, Progress, Source, Tokenizing, sha256_of
from mesh_transformer.data.documents import cleaner
from mesh_transformer.data.inputs import BadInputHandler
from mesh_transformer.data.parts import (
    Collecting,
    Part,
    Parts,
    Result,
    Work,
    Workers,
    parts_of,
    report,
)
from mesh_transformer.data.tokenizer import fingerprint
from mesh_transformer.util import InputError

PART_BYTES = 1 << 25  # about 20 s of work for one core with GPT-2's tokenizer
SAVE_EVERY = 64  # parts between saves of the progress, at least


@dataclasses.dataclass(frozen=True)
class TextWork(Work):
    """How parts of text are tokenised.

    Attributes:
      tokenizer: a tokenizer of transformers.
      use_ftfy, use_wikitext: see `cleaner`.
      column: see `read_pieces`.
    """

    tokenizer: Any
    use_ftfy: bool
    use_wikitext: bool
    column: str
    has_hashes: ClassVar[bool] = True

    @functools.cached_property
    def settings(self) -> list[Any]:
        steps = (self.use_ftfy, self.use_wikitext)
        return [PIECES, fingerprint(self.tokenizer), *steps, self.column]

    def reader(self) -> "_PartTokenizing":
        with tempfile.TemporaryDirectory() as empty:
            return _PartTokenizing(self, Path(empty))


class _PartTokenizing(Tokenizing):
    """Tokenises one part after another; see `Reader`."""

    contents: ClassVar[tuple[str, ...]] = ("ends", "tokens")
    batches_ahead = 0
    shows_progress = False

    def __init__(self, work: TextWork, empty: Path):
        clean = cleaner(work.use_ftfy, work.use_wikitext)
        super().__init__(empty, [], work.tokenizer, {}, clean, True, work.column)

    def result(self, part: Part, folder: Path) -> Result:
        """Write the documents' ends and the tokens of a part into files of an empty folder."""
        if part.is_hash:
            return Result(sha256=sha256_of(part.path))
        self.folder, self.files = folder, [part.path]
        self.progress = Progress({}, [])
        self.span = part.span
        self.bad = Collecting()
        failure = ""
        try:
            self.run()
        except InputError as error:
            failure = str(error)
        (source,) = self.progress.sources or [Source("", 0, 0)]
        return Result(
            source.documents,
            source.tokens,
            self.span.numbered(part.path) if self.span else 0,
            source.sha256,
            dict(self.bad.counts),
            self.bad.errors,
            failure,
        )

    def _bad_input_handler(self) -> BadInputHandler:
        return self.bad

    def _save(self, *written: IO[bytes]) -> None:
        """Do nothing: a part that is interrupted is begun again."""


class TokenizingParts(Tokenizing):
    """A run that tokenises text files into a corpus by means of other processes.

    Args:
      arguments: those of `Tokenizing`.
      work: how parts are tokenised, which agrees with the arguments.
      workers: the processes.
      size: see `parts_of`.
    """

    def __init__(self, *arguments: Any, work: TextWork, workers: Workers, size: int | None = None):
        super().__init__(*arguments)
        self.parts = Parts(work, workers)
        self.size = size or PART_BYTES
        self.progress.drop_current()

    def _tokenize(self, tokens: IO[bytes], ends: IO[bytes], bar: tqdm) -> None:
        self._save(tokens, ends)  # from now on, finished parts remain if the run is interrupted
        source, bad, numbered, joined = None, BadInputHandler(self.skip_bad), 0, []
        bar.update(sum(source.bytes for source in self.progress.sources))
        left = self.files[len(self.progress.sources) :]
        parts = (
            part for path in left for part in parts_of(path, self.tokenizer.eos_token, self.size)
        )
        for part, result in self.parts.in_order(parts, bar):
            if source is None:
                source = Source(os.path.basename(part.path), part.bytes, part.changed)
                bad, numbered = BadInputHandler(self.skip_bad), 0
            report(part, result, numbered, bad)
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
                        self.parts.delete(part)
                    joined = []

    def _append(self, part: Part, result: Result, tokens: IO[bytes], ends: IO[bytes]) -> None:
        """Append a finished part to the corpus files, and update the progress in memory."""
        if not result.tokens:
            return
        progress = self.progress
        with self.parts.content(part, result) as file:
            own = np.frombuffer(file.read(result.documents * ENDS.itemsize), ENDS)
            shutil.copyfileobj(file, tokens)
        ends.write((own + progress.tokens).tobytes())
        progress.tokens += result.tokens
        progress.last_end = progress.tokens
        progress.documents += result.documents
