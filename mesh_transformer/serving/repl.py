"""Prompts typed one after another, answered as the tokens come."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mesh_transformer.generation.batch import MOST_STEPS
from mesh_transformer.generation.prompts import check_length
from mesh_transformer.generation.sampling import TERMINAL, SamplingOptions
from mesh_transformer.generation.text_stream import TextStream
from mesh_transformer.network import Batch, Network
from mesh_transformer.util import InputError, cache_folder

GREETING = "Type a prompt; an empty line, Ctrl-D or Ctrl-C ends. /help tells of the settings."
PIECE_SECONDS = 0.1  # how long the screen may wait for the next tokens
COMMANDS = {
    "temp": "temperature; 0 is greedy",
    "top_p": "the nucleus; 1 is off",
    "top_k": "the likeliest tokens alone; 0 is off",
    "repetition_penalty": "above 1 repeats less; 1 is off",
    "seed": "for the same answer again; none is another each time",
    "length": "tokens of an answer, at most",
    "stop": "text that ends an answer, \\n for a new line; none is none",
}


@dataclass(frozen=True)
class Settings(SamplingOptions):
    """How an answer is drawn and where it ends.

    Raises:
      InputError: at construction, for a value out of range.
    """

    temp: float = TERMINAL.temp
    length: int = 128
    stop: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.length)

    def changed(self, command: str) -> "Settings":
        """A copy after a command as it is typed: "/temp 0.7"."""
        name, _, value = command.removeprefix("/").partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        if name not in COMMANDS:
            raise InputError(f"/{name}: no such setting; /help tells of those there are")
        kind = {"stop": str, "top_k": int, "seed": int, "length": int}.get(name, float)
        if value == "none" and name in ("seed", "stop"):
            return replace(self, **{name: None})
        try:
            return replace(self, **{name: kind(value.replace("\\n", "\n"))})
        except InputError:
            raise
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            raise InputError(f"/{name} {value}: expected {expected}") from None

    def __str__(self) -> str:
        """The commands that lead here, and what each does."""
        shown = {name: "none" if value is None else value for name, value in asdict(self).items()}
        rows = [
            (f"/{name} {shown[name]}".replace("\n", "\\n"), COMMANDS[name]) for name in COMMANDS
        ]
        return "\n".join(f"{command:26} {meaning}" for command, meaning in rows)


class Repl:
    """A model that answers prompts; what is no answer goes to stderr.

    Attributes:
      settings: of the next answer.
    """

    def __init__(self, network: Network, tokenizer: Any, settings: Settings):
        self.settings = settings
        self._network = network
        self._tokenizer = tokenizer
        self._kept: Batch | None = None

    def run(self) -> None:
        """Asks and answers until an empty line, Ctrl-D, or Ctrl-C at the prompt."""
        _tell(GREETING)
        try:
            with _line_editing():
                while line := input(">>> "):
                    self._take(line)
        except (EOFError, KeyboardInterrupt):
            _tell("")  # so that what the shell says begins a line

    def _take(self, line: str) -> None:
        try:
            self._obey(line) if line.startswith("/") else self._say(line)
        except InputError as error:
            _tell(f"error: {error}")

    def _obey(self, command: str) -> None:
        if command.rstrip() == "/help":
            _tell(str(self.settings))
        else:
            self.settings = self.settings.changed(command)

    def _say(self, prompt: str) -> None:
        start, made = time.perf_counter(), 0
        try:
            for piece, tokens in self.answer(prompt):
                print(piece, end="", flush=True)
                made += tokens
            print()
        except KeyboardInterrupt:  # ends this answer; at the prompt it ends the conversation
            print()
        _tell(f"[{made} tokens, {made / (time.perf_counter() - start):.1f} tokens/s]")

    def answer(self, prompt: str) -> Iterator[tuple[str, int]]:
        """The pieces of an answer as they come, each with how many tokens it took.

        It ends at the settings' length or stop, or where the model ends its text.
        """
        settings, end = self.settings, self._tokenizer.eos_token_id
        # A model of text starts at an end of text: an empty prompt is one.
        tokens = self._tokenizer(prompt)["input_ids"] or [end]
        window = self._network.config.window
        if len(tokens) > window:
            _tell(f"the prompt has {len(tokens)} tokens: the last {window}, one window, are used")
        stream = TextStream(self._tokenizer.decode, [settings.stop] if settings.stop else [])
        for new in self._chosen(tokens, settings):
            said = new[: new.index(end)] if end in new else new
            yield stream.push(said), len(said)
            if stream.stopped or len(said) < len(new):
                break
        yield stream.finish(), 0

    def _chosen(self, prompt: list[int], settings: Settings) -> Iterator[list[int]]:
        """The tokens of an answer, as many at once as take `PIECE_SECONDS`."""
        # An interrupted call leaves nothing to go on with: it is put back where all went well.
        batch, self._kept = self._kept or self._network.batch(self._network.dp), None
        options = SamplingOptions.stacked([settings])
        yield batch.insert([0], [np.asarray(prompt)], settings.length, options).token.tolist()
        steps = 1
        while left := int(batch.left[0]):
            steps = min(steps, left, MOST_STEPS)
            start = time.perf_counter()
            found = batch.decode(steps).token[0].tolist()
            self._kept = batch
            yield found
            self._kept = None
            seconds = time.perf_counter() - start
            steps = max(int(steps * PIECE_SECONDS / seconds), 1)
        self._kept = batch


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Editing and a history that outlives the program, where a person types."""
    if not sys.stdin.isatty():
        yield
        return
    import readline

    history = cache_folder() / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)


def _tell(line: str) -> None:
    print(line, file=sys.stderr)
