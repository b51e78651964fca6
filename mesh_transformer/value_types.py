"""Whether JSON's values are of a field's annotated type, and what to say where they are not."""

import difflib
import types
import typing
from typing import Any, Literal


def describe(value: Any) -> str:
    """A value with its type, for an error line."""
    return f"{type(value).__name__} {value!r}"


def mismatch(value: Any, wanted: Any) -> str | None:
    """What is expected in place of a value, with a hint where one is known; None where it fits."""
    if _matches(value, wanted):
        return None
    hint = ""
    if isinstance(value, str) and "Literal" in str(wanted):
        options = [a for a in _literals(wanted) if isinstance(a, str)]
        close = difflib.get_close_matches(value, options, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
    elif isinstance(value, str) and _matches(0.5, wanted) and _is_number(value):
        hint = "; to YAML a number with an exponent has a point: 1.0e-4"
    return f"expected {_expected(wanted)}{hint}"


def _matches(value: Any, wanted: Any) -> bool:
    """Whether a JSON value is of a field's annotated type (bool is no int; int is a float)."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, option) for option in arguments)
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in arguments)
    if origin is list:
        return isinstance(value, list) and all(_matches(v, arguments[0]) for v in value)
    if origin is dict:
        pairs = value.items() if isinstance(value, dict) else [(None, None)]
        return all(_matches(k, arguments[0]) and _matches(v, arguments[1]) for k, v in pairs)
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, wanted)


def _expected(wanted: Any) -> str:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_expected(a) for a in arguments)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in arguments)
    if origin in (list, dict):
        return f"{origin.__name__} of {', '.join(_expected(a) for a in arguments)}"
    return "null" if wanted is type(None) else wanted.__name__


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _literals(wanted: Any) -> list[Any]:
    if typing.get_origin(wanted) is Literal:
        return list(typing.get_args(wanted))
    return [a for option in typing.get_args(wanted) for a in _literals(option)]
