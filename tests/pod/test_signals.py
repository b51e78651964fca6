"""Signals end the program even if Python drops the exception that they raise."""

import signal
import sys
import weakref
from collections.abc import Iterator

import pytest

from mesh_transformer.pod.tpu.signals import Signals


class Thing:
    """An object that can have weak references."""


def drop(number: int) -> None:
    """Raise a signal in a weak reference's callback; Python's import system has such callbacks."""
    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(number))
    del thing
    assert reference() is None


@pytest.fixture
def handlers() -> Iterator[Signals]:
    """`Signals`, installed over Python's own handlers: Ray, once started, leaves another one."""
    own = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    signals = Signals()
    signals.install()
    yield signals
    signals.uninstall()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_exception_dropped_by_python_is_raised_at_the_next_request(handlers, number, raised):
    drop(number)
    with pytest.raises(raised), handlers.defer():
        pytest.fail("the request was made")
    with handlers.defer():  # raised only once
        pass


def test_discarded_signal_raises_nothing(handlers):
    drop(signal.SIGTERM)
    handlers.discard_dropped()
    with handlers.defer():
        pass


def test_other_dropped_exceptions_are_reported_as_before(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    before, signals = sys.unraisablehook, Signals()
    signals.install()
    thing = Thing()
    reference = weakref.ref(thing, lambda _: 1 // 0)
    del thing
    signals.uninstall()
    signals.uninstall()
    assert reference() is None
    assert [unraisable.exc_type for unraisable in reported] == [ZeroDivisionError]
    assert sys.unraisablehook is before


def test_signal_during_a_request_is_raised_at_its_end(handlers):
    done = []

    def request() -> None:
        with handlers.defer():
            signal.raise_signal(signal.SIGTERM)
            done.append("the request")

    with pytest.raises(SystemExit) as ended:
        request()
    assert done == ["the request"]
    assert ended.value.code == 128 + signal.SIGTERM
