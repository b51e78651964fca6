"""`Lockstep`: makes processes that run the same training loop take the same decisions.

All processes make the same calls on the network in the same order.  A call that runs on the devices
of all processes would never end if one of them did not make it.  So whatever a single process
notices, such as a signal, must take effect before the same call in all of them.

A process announces what it has noticed.  On the news, each process reports how many calls it has
begun, and begins no further call until all reports are known.  The news take effect in every
process once it has begun as many calls as the furthest one.  A thread answers the news, because the
main thread may be waiting for the devices.  Calls without news cost no communication.

An error in one process ends the others too.  If none of them has begun more calls than the process
with the error has completed, all of them can still save.  Otherwise the others end at once.
"""

import contextlib
import dataclasses
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from mesh_transformer.pod.meeting import Meeting, Message
from mesh_transformer.training.agreement import Agreement
from mesh_transformer.util import DamagedError, InputError, StoppedError, exit_now

Result = TypeVar("Result")

SECONDS_TO_AGREE = 5.0  # for the other processes to finish a call that has failed in this one
SECONDS_TO_ANSWER = 1.0  # for the other processes to answer a ping
SECONDS_TO_END = 20 * 60.0  # for the other processes to end, while they may be saving
WAIT_SECONDS = 0.5  # longest time until a signal is handled while the main thread waits
ADVICE = "start all processes again to resume from the newest checkpoint"


class PeerError(Exception):
    """Another process of the run has failed, and this one ends for this reason.

    Attributes:
      status: the exit status.
    """

    def __init__(self, line: str, status: int):
        super().__init__(line)
        self.status = status


@dataclasses.dataclass
class _News:
    """News that have not taken effect yet.

    Attributes:
      number: their number in the meeting.
      sender: index of the process that has announced them.
      content: what was announced.  Its entry "kind" is "signal", "save failed" or "error".  Of an
        error, "completed" is the number of calls that the sender has completed, or "batch" the
        number of the training batch that it cannot read.
      begun: largest number of calls that a process has begun; None until it is known.
      batches: largest number of training batches that a process has taken.
    """

    number: int
    sender: int
    content: Message
    begun: int | None = None
    batches: int = 0

    @property
    def is_possible(self) -> bool:
        """Whether no process has begun a call that the sender cannot take part in."""
        if "batch" in self.content:
            return self.batches <= self.content["batch"]
        return self.begun is not None and self.begun <= self.content.get("completed", self.begun)

    def is_due(self, begun: int, batch: int | None) -> bool:
        """Return whether they take effect before the next call.

        Args:
          begun: number of calls that this process has begun.
          batch: number of the training batch that the next call takes, if it takes one.
        """
        return batch == self.content["batch"] if "batch" in self.content else begun == self.begun


class Lockstep(Agreement):
    """The agreement of this process with the other processes of a meeting.

    Attributes:
      save_failed: whether all processes have learned that the last save has failed.
      broken: whether this process ends without the others.
    """

    def __init__(self, meeting: Meeting):
        self.meeting = meeting
        self.index = meeting.place.index
        self.writes = self.index == 0
        self.save_failed = False
        self.broken = False
        self._begun = self._batches = 0  # numbers of calls and batches that this process has begun
        self._news: list[_News] = []
        self._gathered: dict[str, list[Any]] = {}
        self._changed = threading.Condition()  # guards the attributes above
        self._completed = 0  # the last call that this process has completed
        self._saves = 0  # number of saves that this process has started or waited for
        self._received: list[int] = []  # signals that this process has received
        self._stops: list[int] = []  # signals that have taken effect
        self._announced: set[Any] = set()
        self._due_error: Exception | None = None  # an announced error of this process
        self._shared_error: Exception | None = None  # raised in all processes by the same call
        self._last_error: Exception | None = None  # after which all processes end
        self._all_end = self._leaving = False
        self._stderr = sys.stderr
        meeting.listen(self._receive)

    @contextlib.contextmanager
    def stop_signals(self) -> Iterator[list[int]]:
        """Yield a list that collects the signals that any of the processes has received.

        A signal is added to it before the same call in all processes.
        """
        with super().stop_signals() as self._received:
            yield self._stops

    def once(self, function: Callable[[], Result]) -> Result:
        """Call a function in process 0, and return its result, a JSON value, in all processes."""
        result = self.together(lambda: function() if self.writes else None)
        return self.values(result)[0]

    def can_save(self, error: Exception) -> bool:
        """Return whether all processes can save a checkpoint after an error in this process.

        If so, the others raise PeerError instead of beginning their next call.  If not, they end at
        once.
        """
        is_shared = error in (self._last_error, self._shared_error)
        if is_shared or (
            not self.broken and self._announce_error(error, completed=self._completed)
        ):
            self._last_error = error
        return error is self._last_error

    def announce_bad_batch(self, error: Exception, batch: int) -> None:
        """Announce that this process cannot read a training batch, which is needed later.

        The call that would take it raises the error, and PeerError in the other processes.

        Args:
          batch: number of batches before it.

        Raises:
          Exception: the error, if another process has taken that batch already.
        """
        if not self._announce_error(error, batch=batch):
            raise error
        self._due_error = error

    def _announce_error(self, error: Exception, **until: int) -> bool:
        """Announce an error; return whether the other processes can end when this one does."""
        content = self._content("error", error) | until
        self.meeting.announce(content)
        with self._changed:
            self._wait(lambda: any(self._is_answered(news, content) for news in self._news))
            (news,) = (news for news in self._news if self._is_answered(news, content))
        self.broken = not news.is_possible
        return news.is_possible

    def _content(self, kind: str, error: BaseException | None) -> Message:
        """Return the content of news about an error in this process."""
        line, status = describe(error)
        if not isinstance(error, PeerError):
            line = f"{self.meeting.name(self.index)}: {line}"
        return {"kind": kind, "line": line, "status": status}

    def _is_answered(self, news: _News, content: Message) -> bool:
        return news.sender == self.index and news.content == content and news.begun is not None

    @contextlib.contextmanager
    def call(self, *, save_failed: bool = False) -> Iterator[None]:
        """Return a context manager for a call that all processes make; see `begin_call`."""
        self.begin_call(save_failed=save_failed)
        yield
        self.complete_call()

    def begin_call(self, *, save_failed: bool = False, batch: int | None = None) -> None:
        """Begin a call that all processes make, after the news that are due have taken effect.

        Args:
          save_failed: whether the last save is known to have failed in this process.
          batch: number of the training batch that the call takes, if it takes one.

        Raises:
          PeerError: if another process has announced an error.
        """
        if self._received:
            self._announce_once({"kind": "signal", "signal": self._received[0]})
        if save_failed:
            self._announce_once({"kind": "save failed", "save": self._saves})
        with self._changed:
            self._wait(lambda: all(news.begun is not None for news in self._news))
            due = [news for news in self._news if news.is_due(self._begun, batch)]
            self._news = [news for news in self._news if news not in due]
            for news in due:
                self._take_effect(news)
            self._begun += 1
            if batch is not None:
                self._batches = batch + 1

    def complete_call(self) -> None:
        """Complete the call that `begin_call` has begun; the devices may still be running it."""
        self._completed = self._begun

    def _announce_once(self, content: Message) -> None:
        if (key := tuple(content.items())) not in self._announced:
            self._announced.add(key)
            self.meeting.announce(content)

    def _take_effect(self, news: _News) -> None:
        content = news.content
        if content["kind"] == "signal":
            self._stops.append(content["signal"])
        elif content["kind"] == "save failed":
            self.save_failed |= content["save"] == self._saves
        elif self._last_error is None:  # else all processes are about to end
            self._last_error = self._due_error or PeerError(content["line"], content["status"])
            raise self._last_error

    def values(self, value: Any) -> list[Any]:
        """Return the JSON values that the processes pass in."""
        with self.call():
            values = self._gather(f"call/{self._begun}", value, None)
        assert values is not None
        return values

    def together(self, call: Callable[[], Result], *, patience: float = SECONDS_TO_AGREE) -> Result:
        """Make a call that succeeds in all processes, or fails in all of them; return its result.

        Args:
          patience: seconds for the other processes to finish the call if it fails in this one.

        Raises:
          InputError: if `call` raises it in any process; also for DamagedError and StoppedError.
          PeerError: if `call` raises another exception in another process, or if it fails in this
            process and the others do not finish it.
        """
        self.begin_call()
        result, caught = None, None
        try:
            result = call()
        except Exception as error:
            caught = error
        outcome = None if caught is None else _outcome(caught)
        key = f"call/{self._begun}"
        outcomes = self._gather(key, outcome, None if caught is None else patience)
        if outcomes is None:
            self.broken = True
            content = self._content("failed", caught)
            raise PeerError(content["line"], content["status"]) from caught
        self.complete_call()
        if error := self._joint_error(outcomes, caught):
            self._shared_error = error
            raise error from caught if error is not caught else None
        return result  # type: ignore[return-value]

    def count_save(self) -> None:
        """Forget the failure of the last save, because it was reported or a new save has begun."""
        self._saves += 1
        self.save_failed = False

    def _joint_error(
        self, outcomes: list[Message | None], caught: Exception | None
    ) -> Exception | None:
        """Return the error that this process raises for a call with these outcomes, or None.

        Args:
          outcomes: for each process, the result of `_outcome`, or None if the call has succeeded.
          caught: the exception that the call has raised in this process, or None.
        """
        failed = {index: outcome for index, outcome in enumerate(outcomes) if outcome is not None}
        if not failed:
            return None
        # An unexpected error ends the run, so it comes first.
        index = min(failed, key=lambda index: (bool(failed[index]["kind"]), index))
        kind, line = failed[index]["kind"], failed[index]["line"]
        if not kind and isinstance(caught, Exception) and not isinstance(caught, _JOINT_ERRORS):
            return caught
        if len(failed) < len(outcomes):
            line = f"{self.meeting.name(index)}: {line}"
        if not kind:
            return PeerError(line, failed[index]["status"])
        kinds: dict[str, Any] = {kind.__name__: kind for kind in _JOINT_ERRORS}
        return kinds[kind](line, *failed[index]["rest"])

    def _gather(self, key: str, value: Any, seconds: float | None) -> list[Any] | None:
        """Return the values of all processes; None if they are not complete within `seconds`."""
        self.meeting.gather(key, value)
        with self._changed:
            self._wait(lambda: key in self._gathered, seconds)
            return self._gathered.pop(key, None)

    def _wait(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until a condition holds, at most for `seconds`; `_changed` must be held."""
        deadline = None if seconds is None else time.monotonic() + seconds
        # Python handles a signal that arrives just before a wait only when that wait ends.
        while not self._changed.wait_for(condition, WAIT_SECONDS):
            if deadline is not None and time.monotonic() > deadline:
                return

    def _receive(self, message: Message) -> None:
        """Handle a message of the meeting; called in its thread."""
        if "lost" in message:
            self._end(f"{self.meeting.name(message['lost'])} has ended without notice", 1)
        elif "refused" in message:
            self._end(message["refused"], 1)
        elif "news" in message:
            news = _News(message["number"], message["sender"], message["news"])
            if news.content["kind"] == "failed":
                self._end_after(news)
                return
            if news.content["kind"] == "ping":
                self.meeting.gather("ping", None)
                return
            with self._changed:
                self._news.append(news)
                begun = self._begun, self._batches
            self.meeting.gather(f"news/{news.number}", begun)
        else:
            kind, _, number = message["key"].partition("/")
            with self._changed:
                if kind != "news":
                    self._gathered[message["key"]] = message["gathered"]
                else:
                    (news,) = (news for news in self._news if news.number == int(number))
                    news.begun, news.batches = map(max, zip(*message["gathered"], strict=True))
                    if not news.is_possible:
                        self._end_after(news)
                self._changed.notify_all()

    def _end_after(self, news: _News) -> None:
        """End this process because another one ends without it."""
        if news.sender != self.index:
            self._end(news.content["line"], news.content["status"])

    def _end(self, line: str, status: int) -> None:
        if not self._leaving:
            self._leave()
            bar = "\n" if self.writes else ""  # ends the line of a progress bar
            print(f"{bar}error: {line}; {ADVICE}", file=self._stderr, flush=True)
            exit_now("", status)

    def finish(self) -> None:
        """Wait until all processes have finished, and leave the meeting.

        Raises:
          PeerError: if another process has failed.
        """
        self._wait_for_end(None)
        for news in self._news:
            if "completed" in news.content:  # not a batch that was never needed
                self._take_effect(news)
        self._leave()

    def _wait_for_end(self, seconds: float | None) -> bool:
        """Wait until all processes end; return whether they do so within `seconds`."""
        self._all_end = self._all_end or self._gather("end", None, seconds) is not None
        return self._all_end

    def exit(self, error: BaseException) -> NoReturn:
        """Report an error, and end this process, together with the others if possible."""
        line, status = describe(error)
        all_end = (
            isinstance(error, Exception)
            and self.can_save(error)
            and self._wait_for_end(SECONDS_TO_END)
        )
        if not all_end:
            self.meeting.announce(self._content("failed", error))
        if not isinstance(error, _EXPECTED):
            traceback.print_exception(error, file=self._stderr)
        elif line and (self.writes or not all_end):
            print(f"error: {line}", file=self._stderr, flush=True)
        self._leave()
        exit_now("", status)

    def name_silent(self) -> None:
        """If a process does not answer, end this one and the others with a line that names it."""
        if self.writes:
            self.meeting.announce({"kind": "ping"})
            time.sleep(SECONDS_TO_ANSWER)
            if silent := self.meeting.silent("ping"):
                names = " and ".join(map(self.meeting.name, silent[:3]))
                line = f"{names} {'does' if len(silent) == 1 else 'do'} not answer"
                self.meeting.announce({"kind": "failed", "line": line, "status": 1})
                self._end(line, 1)

    def _leave(self) -> None:
        self._leaving = True
        self.meeting.leave()


# Errors that all processes raise if one of them does.
_JOINT_ERRORS = (DamagedError, InputError, StoppedError)
_EXPECTED = (*_JOINT_ERRORS, PeerError, KeyboardInterrupt, SystemExit)


def _outcome(error: Exception) -> Message:
    """Return a JSON object that describes an error, from which `_joint_error` builds another."""
    line, status = describe(error)
    kind = next((kind.__name__ for kind in _JOINT_ERRORS if isinstance(error, kind)), "")
    rest = error.args[1:] if isinstance(error, DamagedError) else ()
    return {"kind": kind, "line": line, "rest": rest, "status": status}


def describe(error: BaseException | None) -> tuple[str, int]:
    """Return one line that describes an error, and the exit status after it."""
    if isinstance(error, PeerError):
        return str(error), error.status
    if isinstance(error, _JOINT_ERRORS):
        return str(error), 2 if isinstance(error, InputError) else 1
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by Ctrl-C", 130
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}", 1
