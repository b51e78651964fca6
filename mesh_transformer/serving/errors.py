"""Error responses in OpenAI's format, for requests that cannot be answered."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import JSONResponse

from mesh_transformer.util import brief

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An exception that is sent to the client as an error response in OpenAI's format.

    Attributes:
      status: the HTTP status code.
      param: the name of the invalid field, or None.
      code: OpenAI's error code, or None.
      headers: further HTTP headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """Return the complete HTTP response."""
        return JSONResponse(self.body(), self.status, dict(self.headers or {}))


def invalid(key: str, value: Any, expected: str) -> ApiError:
    """Return an ApiError with status 400 for an invalid value in a request body.

    Args:
      key: the key that has the invalid value.
      expected: description of the valid values.
    """
    return ApiError(400, f"{key}: found {shown(value)}, expected {expected}", param=key)


def absent(key: str, expected: str) -> ApiError:
    """Return an ApiError with status 400 for a key that a request must have; see `invalid`."""
    return ApiError(400, f"{key}: found no value, expected {expected}", param=key)


def unknown_key(key: str, known: Iterable[str], where: str = "") -> ApiError:
    """Return an ApiError with status 400 for an unknown key of an object in a request body.

    Args:
      known: the keys that the object may have.
      where: what to put before the key, to name the object.
    """
    place = where + (brief(json.dumps(key, ensure_ascii=False)[1:-1]) or '""')
    message = f"{place}: found an unknown key, expected only {', '.join(known)}"
    return ApiError(400, message, param=place)


SHOWN = 256  # characters of a long value from which error messages are made


def shown(value: Any) -> str:
    """Format a JSON value for an error message; of a long value only the beginning is formatted."""
    text = ""
    for part in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        text += part
        if len(text) > SHOWN:
            break
    return brief(text)
