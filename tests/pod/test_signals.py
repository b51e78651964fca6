"""Signals end what they should, also where Python drops the exception that was to do it."""

import signal
import sys
import weakref
from collections.abc import Iterator

import pytest

from mesh_transformer.pod.tpu.signals import Signals


class Thing:
    """What weak references can be to."""


def drop(number: int) -> None:
    """A signal that comes in a weak reference's callback, as the machinery of imports has them."""
    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(number))
    del thing
    assert reference() is None


@pytest.fixture
def taken() -> Iterator[Signals]:
    signals = Signals()
    signals.take()
    yield signals
    signals.give_back()


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_what_python_drops_raises_at_the_next_request(taken, number, raised):
    drop(number)
    with pytest.raises(raised), taken.undisturbed():
        pytest.fail("the request was made")
    with taken.undisturbed():  # once
        pass


def test_what_is_over_raises_nothing_any_more(taken):
    drop(signal.SIGTERM)
    taken.forget()
    with taken.undisturbed():
        pass


def test_other_dropped_exceptions_are_told_as_before(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    before, signals = sys.unraisablehook, Signals()
    signals.take()
    thing = Thing()
    reference = weakref.ref(thing, lambda _: 1 // 0)
    del thing
    signals.give_back()
    signals.give_back()
    assert reference() is None
    assert [each.exc_type for each in told] == [ZeroDivisionError]
    assert sys.unraisablehook is before


def test_what_comes_in_a_request_raises_at_its_end(taken):
    done = []

    def request() -> None:
        with taken.undisturbed():
            signal.raise_signal(signal.SIGTERM)
            done.append("the request")

    with pytest.raises(SystemExit) as ended:
        request()
    assert done == ["the request"]
    assert ended.value.code == 128 + signal.SIGTERM
