"""A REPL that reads prompts from the terminal and streams the answers to the terminal."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mesh_transformer import status_lines
from mesh_transformer.data.chat import ChatTemplate
from mesh_transformer.data.reasoning import Reasoning, without_marks
from mesh_transformer.data.special_tokens import (
    before_end,
    end_tokens,
    prompt_tokens,
    special_tokens,
)
from mesh_transformer.generation.batch import Batch
from mesh_transformer.generation.prompts import check_length
from mesh_transformer.generation.sampling_settings import REPL_DEFAULTS, SamplingOptions
from mesh_transformer.generation.stream import stream_tokens
from mesh_transformer.generation.text_stream import CONTEXT, TextStream
from mesh_transformer.network import Network
from mesh_transformer.util import InputError, cache_folder

CHAT_GREETING = "Type a message; an empty line, Ctrl-D or Ctrl-C exits. /new forgets the \
conversation, /help lists the settings."
GREETING = "Type a prompt; an empty line, Ctrl-D or Ctrl-C exits. /help lists the settings."
COMPILING = "compiling; the first answer takes longer"
PIECE_SECONDS = 0.1  # target time between pieces of an answer
COMMANDS = {
    "temp": "sampling temperature; 0 is greedy",
    "top_p": "probability mass of the nucleus to sample from; 1 is off",
    "top_k": "number of most likely tokens to sample from; 0 is off",
    "min_p": "least probability of a token to sample, relative to the most likely; 0 is off",
    "typical_p": "probability of the typical tokens to sample from; 1 is off",
    "repetition_penalty": "penalty for tokens that have occurred; 1 is off",
    "presence_penalty": "subtracted from the logits of tokens in the answer; 0 is off",
    "frequency_penalty": "the same for each time a token is in the answer; 0 is off",
    "seed": "seed for reproducible answers; none picks a random seed",
    "length": "maximum tokens per answer",
    "stop": "text that ends an answer, with \\n for a new line; none is off",
}


@dataclass(frozen=True)
class Settings(SamplingOptions):
    """The settings of the REPL: sampling, maximum length of an answer, and stop text.

    Attributes:
      length: maximum number of tokens per answer.
      stop: a text that ends the answer, or None.

    Raises:
      InputError: at construction, for a value out of range.
    """

    temp: float = REPL_DEFAULTS.temp
    length: int = 128
    stop: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.length)

    def changed(self, command: str) -> "Settings":
        """Return a copy of the settings, changed by a user's command such as "/temp 0.7".

        Raises:
          InputError: if the setting does not exist, or the value is invalid.
        """
        name, _, value = command.removeprefix("/").partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        if name not in COMMANDS:
            raise InputError(f"/{name}: no such setting; /help lists the settings")
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
        """Return one line per setting: command and value ("/temp 0.7"), then a description."""
        shown = {name: "none" if value is None else value for name, value in asdict(self).items()}
        rows = [
            (f"/{name} {shown[name]}".replace("\n", "\\n"), COMMANDS[name]) for name in COMMANDS
        ]
        return "\n".join(f"{command:26} {meaning}" for command, meaning in rows)


class Repl:
    """A REPL that prints a network's answers to stdout, and everything else to stderr.

    Attributes:
      settings: the settings of the next answer.
    """

    def __init__(
        self,
        network: Network,
        tokenizer: Any,
        settings: Settings,
        template: ChatTemplate | None = None,
    ):
        """Prepare a REPL.

        Args:
          template: renders conversations.  A line is then a message, which the model answers with
            all earlier ones in mind; without a template, it is the beginning of a text.
        """
        self.settings = settings
        self._template = template
        self._messages: list[dict[str, str]] = []
        self._network = network
        self._tokenizer = tokenizer
        self._batch: Batch | None = None  # reused by the next answer

    def run(self) -> None:
        """Read and answer prompts until an empty line, Ctrl-D, or Ctrl-C at the prompt."""
        _message(GREETING if self._template is None else CHAT_GREETING)
        try:
            with _line_editing():
                while line := _read_line():
                    self._handle(line)
        except (EOFError, KeyboardInterrupt):
            _message("")  # so that the shell's prompt starts on a new line

    def _handle(self, line: str) -> None:
        try:
            self._run_command(line) if line.startswith("/") else self._print_answer(line)
        except InputError as error:
            _message(f"error: {error}")

    def _run_command(self, command: str) -> None:
        if command.rstrip() == "/help":
            _message(str(self.settings))
        elif command.rstrip() == "/new" and self._template is not None:
            self._messages = []
        else:
            self.settings = self.settings.changed(command)

    def _print_answer(self, prompt: str) -> None:
        if self._batch is None:
            _message(COMPILING)
        start, generated, answer = time.perf_counter(), 0, ""
        try:
            for piece, tokens in self.answer(prompt):
                print(piece, end="", flush=True)
                generated += tokens
                answer += piece
            print()
        except KeyboardInterrupt:  # ends only this answer, unlike Ctrl-C at the prompt
            print()
        self._messages += [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": answer},
        ]
        _message(f"[{generated} tokens, {generated / (time.perf_counter() - start):.1f} tokens/s]")

    def answer(self, prompt: str) -> Iterator[tuple[str, int]]:
        """Yield (text, number of tokens) for each piece of the answer as it is generated.

        The answer ends after `settings.length` tokens, at the stop text, or at a token that ends
        answers.  Special tokens have no text.  Reasoning is printed to stderr.
        """
        settings, special = self.settings, special_tokens(self._tokenizer)
        tokens, reasoning = self._prompt(prompt)
        special = special if reasoning is None else without_marks(special)
        ends = end_tokens(self._tokenizer, self._network.config)
        ends |= {number for number, name in special.items() if name == settings.stop}
        window = self._network.config.window
        if len(tokens) > window:
            _message(
                f"the prompt has {len(tokens)} tokens; only the last {window} (the model's window) "
                "are used"
            )
        before = [token for token in tokens[-CONTEXT:] if token not in special]
        stop = [settings.stop] if settings.stop else []
        stream = TextStream(self._tokenizer.decode, stop, before)
        for new in self._generate(tokens, settings):
            kept = before_end(new, ends)
            text = stream.push([token for token in kept if token not in special])
            yield _content(text, reasoning), len(kept)
            if stream.stopped or len(kept) < len(new):
                break
        yield _content(stream.finish(), reasoning, last=True), 0

    def _prompt(self, prompt: str) -> tuple[list[int], Reasoning | None]:
        """Return the token ids of a prompt or, in a chat, of the conversation so far.

        The second result separates the reasoning in the answer, if there may be any.
        """
        if self._template is None:
            return prompt_tokens(self._tokenizer, prompt), None
        text = self._template.prompt([*self._messages, {"role": "user", "content": prompt}])
        tokens = prompt_tokens(self._tokenizer, text, whole=True)
        return tokens, self._template.reasoning(text)

    def _generate(self, prompt: list[int], settings: Settings) -> Iterator[list[int]]:
        """Yield an answer's tokens in lists that each take about `PIECE_SECONDS` to generate."""
        # If Ctrl-C interrupts a call of the batch, the batch is unusable.  `_batch` is therefore
        # set only between calls.
        batch, self._batch = self._batch or self._network.batch(self._network.dp), None
        options = SamplingOptions.stacked([settings])
        tokens = [np.asarray(prompt)]
        for new in stream_tokens(batch, tokens, settings.length, options, seconds=PIECE_SECONDS):
            self._batch = batch
            yield new[0].tolist()
            self._batch = None
        self._batch = batch


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Enable line editing and a persistent history during the context, if stdin is a terminal."""
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


def _read_line() -> str:
    with status_lines.paused():
        return input(">>> ")


def _content(text: str, separator: Reasoning | None, *, last: bool = False) -> str:
    """Return the content in a piece of an answer, and print the reasoning in it to stderr."""
    if separator is None:
        return text
    thinks = separator.thinks
    reasoning, content = separator.push(text, last=last)
    if thinks or separator.thinks or reasoning:
        faint = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
        end = "" if separator.thinks and not last else "\n"
        print(reasoning.join(faint), end=end, file=sys.stderr, flush=True)
    return content


def _message(line: str) -> None:
    """Print to stderr a line that is not part of an answer."""
    print(line, file=sys.stderr)
