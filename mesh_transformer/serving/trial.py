"""Tries JSON schemas in a process that can be killed: some take minutes or gigabytes to compile.

The server itself then compiles only those that have passed the trial, which takes as long again.
This module is also the program of that process, which loads neither JAX nor a model.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# No white space but a space after each comma and colon; with more, a model may never end.
STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A parser adds lexer states while answers are generated; these take up to 8 MB.
LIMITS = LLParserLimits(max_lexer_states=20_000)
TRIAL_SECONDS = 2  # of processor time; ordinary schemas take hundredths of a second
TRIAL_BYTES = 2**27  # memory
WAIT_SECONDS = 30.0  # maximum time of a trial, on a machine that is busy with other work
PROCESS_SECONDS = 90.0  # maximum time until the process answers, which may have to start first
TOO_LARGE = f"it takes more than {TRIAL_SECONDS} s or {TRIAL_BYTES >> 20} MiB to compile"
LEFT_SECONDS = 0.05  # maximum time until the trial for a client that has left ends


class Vocabulary:
    """The tokens of a model, in the form that llguidance expects.

    Args:
      tokens: the bytes of each token.
      special: the ids of special tokens.
      end: the id of the end-of-text token.
      encode: tokenizes a text; None for the longest tokens, which suffices to try a schema.
    """

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: Sequence[int],
        end: int,
        encode: Callable[[str], list[int]] | None = None,
    ):
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        if self._encode is None or not isinstance(text, str):  # llguidance tries whether bytes do
            raise TypeError
        return self._encode(text)

    def tokenizer(self) -> LLTokenizer:
        """Return llguidance's tokenizer."""
        tokenizer = LLTokenizer(TokenizerWrapper(self))
        self._encode = self._encode or tokenizer.greedy_tokenize
        return tokenizer


def compiled(tokenizer: LLTokenizer, schema: str) -> LLMatcher:
    """Return the parser of answers that fit a schema.

    Raises:
      ValueError: if the schema is invalid, or has a keyword that is not supported.
    """
    grammar = LLMatcher.grammar_from_json_schema(schema, defaults=STYLE)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


class Outcome(NamedTuple):
    """The outcome of a trial.

    Attributes:
      size: the memory that the schema takes, in bytes.
      error: why it is refused; None if it is not.
    """

    size: int
    error: str | None = None


class LeftError(Exception):
    """The client of a schema has left."""


class Trials:
    """Tries one schema at a time, in a process that starts with the first.

    Only one thread may use an instance.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, schema: str, left: threading.Event) -> Outcome:
        """Try a schema.

        Args:
          left: is set when the client leaves, which ends the trial.

        Raises:
          LeftError: if the client has left.
          OSError: if the process has ended, or did not answer, which ends it.
        """
        try:
            connection, process = self._running()
            connection.send(schema)
            deadline, is_cancelled = time.monotonic() + PROCESS_SECONDS, False
            while not connection.poll(LEFT_SECONDS):
                if left.is_set() and not is_cancelled:
                    connection.send(None)
                    is_cancelled = True
                if time.monotonic() > deadline:
                    process.kill()  # there is an end of file then
            outcome = Outcome(*connection.recv())
            if is_cancelled:
                raise LeftError
            return outcome
        except (OSError, EOFError) as error:
            self.close()
            raise OSError("the process that tries schemas has ended") from error

    def close(self) -> None:
        """End the process."""
        if self._connection is not None and self._process is not None:
            self._connection.close()  # which the process notices
            self._process.wait()
            self._connection = self._process = None

    def _running(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        """Return a connection to the process and the process, which is started if necessary."""
        if self._connection is not None and self._process is not None:
            return self._connection, self._process
        ours, theirs = Pipe()
        with theirs:
            # -P: this folder has modules with the names of others.
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the terminal's Ctrl-C is the server's
            )
        known, self._connection = self._vocabulary, ours
        ours.send((known.tokens, known.special_token_ids, known.eos_token_id))
        return ours, self._process


def attempt(tokenizer: LLTokenizer, schema: str, server: Connection) -> Outcome:
    """Compile a schema in a fork of this process, unless the server says that its client left."""
    reader, writer = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            limit_resources()
            writer.send(tuple(measured(tokenizer, schema)))
        finally:
            os._exit(0)
    writer.close()
    with reader:
        try:
            ready = wait([reader, server], WAIT_SECONDS)
            if reader in ready:
                return Outcome(*reader.recv())
            if server in ready:
                server.recv()
                return Outcome(0, "its client has left")
            return Outcome(0, TOO_LARGE)
        except EOFError:  # one of the limits has ended the fork
            return Outcome(0, TOO_LARGE)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def limit_resources() -> None:
    """Let this process end when it has used its time or its memory."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # llguidance reports there why it aborts
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_SECONDS, TRIAL_SECONDS))
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as file:  # Linux
        used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + TRIAL_BYTES, used + TRIAL_BYTES))


def measured(tokenizer: LLTokenizer, schema: str) -> Outcome:
    """Compile a schema, and return how it went."""
    before = peak_memory()
    try:
        compiled(tokenizer, schema).compute_bitmask()  # of the first token, which takes long too
    except ValueError as error:
        return Outcome(0, str(error)[:1000])
    size = peak_memory() - before
    return Outcome(size, None if size <= TRIAL_BYTES else TOO_LARGE)


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    """Try the schemas that the server sends, until it ends."""
    os.nice(5)  # answers come first
    with contextlib.suppress(EOFError, OSError):
        server = Connection(int(sys.argv[1]))
        tokenizer = Vocabulary(*server.recv()).tokenizer()
        while True:
            schema = server.recv()
            if schema is not None:  # else a client left just after the outcome was sent
                server.send(tuple(attempt(tokenizer, schema, server)))


if __name__ == "__main__":
    main()
