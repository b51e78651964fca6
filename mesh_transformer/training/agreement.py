"""`Agreement`: the decisions that all processes of a training run must make alike."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

Result = TypeVar("Result")


class Agreement:
    """The decisions of a training run that is driven by a single process.

    If several processes run the training loop together, each has an object of a subclass, by which
    all processes decide alike (see `pod.lockstep.Lockstep`).

    Attributes:
      writes: whether this process writes the run's metrics.
    """

    writes = True

    @contextlib.contextmanager
    def stop_signals(self) -> Iterator[list[int]]:
        """Yield a list that collects the numbers of received SIGTERM, SIGINT and SIGHUP signals.

        After the first signal, the previous handlers of SIGTERM and SIGINT (Ctrl-C) are restored.
        A second Ctrl-C therefore raises KeyboardInterrupt, so that callers can still clean up, for
        example delete a TPU.  Interrupting a save is safe: the previous checkpoint stays intact.
        """
        received: list[int] = []
        if threading.current_thread() is not threading.main_thread():
            yield received  # Python handles signals only on its main thread.
            return
        stops: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
        handlers: dict[int, Any] = {n: signal.getsignal(n) for n in (*stops, signal.SIGHUP)}
        if handlers[signal.SIGHUP] is signal.SIG_IGN:  # as under nohup
            del handlers[signal.SIGHUP]

        def restore(numbers: Iterable[int]) -> None:
            for number in numbers:
                signal.signal(number, handlers[number])

        def receive(number: int, frame: object) -> None:
            received.append(number)
            restore(stops)  # not SIGHUP: a closing terminal may send it twice

        for number in handlers:
            signal.signal(number, receive)
        try:
            yield received
        finally:
            restore(handlers)

    def once(self, function: Callable[[], Result]) -> Result:
        """Call a function in the process that writes; return its result in all processes.

        The result must be a JSON value.
        """
        return function()

    def can_save(self, error: Exception) -> bool:
        """Return whether a checkpoint can still be saved after an error that ends the run.

        All processes must save together, so this is False if some of them have gone on.
        """
        return True
