"""Validation of the messages of a conversation, as in OpenAI's API."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from mesh_transformer.serving.errors import absent, invalid, unknown_key

MOST_PARTS = 1024  # of the content of a message
LONGEST_ROLE = 64  # characters


class _Key(NamedTuple):
    """A key of an object in a request: which values it may have, and their description."""

    allows: Callable[[Any], bool]
    expected: str


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


TEXT = _Key(_is_text, "a text")
NONE_CALLED = _Key(lambda value: value == [], "an empty list, as calls are part of the text")
# The two first keys are the main ones.  Of an answer that a client sends back, there may be more.
MESSAGE = {
    "role": _Key(
        lambda value: _is_text(value) and 0 < len(value) <= LONGEST_ROLE,
        f"a text of 1 to {LONGEST_ROLE} characters",
    ),
    "content": _Key(
        lambda value: _is_text(value) or (isinstance(value, list) and len(value) <= MOST_PARTS),
        f"a text, or a list of at most {MOST_PARTS} text parts",
    ),
    "name": TEXT,
    "type": _Key(lambda value: value in ("message", "text"), "message or text"),
    "refusal": TEXT,
    "reasoning_content": TEXT,
    "tool_calls": NONE_CALLED,
    "annotations": _Key(lambda value: value == [], "an empty list"),
}
PART = {
    "type": _Key(lambda value: value == "text", "text, as other contents are not supported"),
    "text": TEXT,
}


def conversation(values: list[Any]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates expect.

    Args:
      values: the messages of a request: parsed JSON.

    Raises:
      ApiError: with status 400, if a message is invalid; it names the item.
    """
    return [_message(value, f"messages[{at}]") for at, value in enumerate(values)]


def _message(value: Any, where: str) -> dict[str, Any]:
    message = _checked(value, MESSAGE, where, ("role",))
    # An answer that is a refusal has no other content.
    content = message.get("content", message.get("refusal"))
    if content is None:
        raise absent(f"{where}.content", MESSAGE["content"].expected)
    if isinstance(content, list):
        places = (f"{where}.content[{at}]" for at in range(len(content)))
        parts = [
            _checked(part, PART, place, PART) for part, place in zip(content, places, strict=True)
        ]
        content = "".join(part["text"] for part in parts)
    others = {key: message[key] for key in ("name", "reasoning_content") if message.get(key)}
    return {"role": message["role"], "content": content, **others}


def _checked(
    value: Any, keys: Mapping[str, _Key], where: str, required: Collection[str]
) -> dict[str, Any]:
    """Return an object without its null values, if its keys and values are valid.

    Raises:
      ApiError: with status 400, for the first one that is not.
    """
    if not isinstance(value, dict):
        raise invalid(where, value, f"an object with the keys {' and '.join([*keys][:2])}")
    present = {key: item for key, item in value.items() if item is not None}
    for key, item in present.items():
        if key not in keys:
            raise unknown_key(key, keys, f"{where}.")
        if not keys[key].allows(item):
            raise invalid(f"{where}.{key}", item, keys[key].expected)
    for key in required:
        if key not in present:
            raise absent(f"{where}.{key}", keys[key].expected)
    return present
