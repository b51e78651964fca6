"""What a request must pass before it is looked at: its key, its size, the pace of its body."""

import asyncio
import hashlib
import hmac
from pathlib import Path

from starlette.requests import Request

from mesh_transformer.serving.errors import ApiError
from mesh_transformer.util import InputError

BODY_BYTES = 2**21
BODY_SECONDS = 20.0
DRAINED_BYTES = 2**26  # of a body that is too long, so that its sender lives to read the answer


class Keys:
    """The API keys of a file, one a line; without a file everyone may come in."""

    def __init__(self, path: str | None):
        self._digests: list[bytes] | None = None
        if path is None:
            return
        try:
            lines = Path(path).read_text("utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--api-key-file {path}: cannot be read ({error})") from None
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise InputError(f"--api-key-file {path}: holds no key, expected one a line")
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def needed(self) -> bool:
        """Whether clients have to send a key."""
        return self._digests is not None

    def check(self, request: Request) -> None:
        """Raises ApiError 401 without one of the keys; takes as long whichever it is."""
        if self._digests is None:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        # Header values are Latin-1 to starlette, whatever bytes they were.
        found = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(found, digest) for digest in self._digests]
        if kind.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "a valid API key is missing: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def read_json(request: Request) -> bytes:
    """The body of a request that says it is JSON.

    Raises:
      ApiError: 415 for another type, 413 or 408 for too long a body, in bytes or in seconds.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        # A web page of another origin may send other types without asking, but not this one.
        raise ApiError(415, "expected the header Content-Type: application/json")
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= BODY_BYTES:
                    body += part
                elif size > DRAINED_BYTES:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS:.0f} seconds") from None
    if size > BODY_BYTES:
        raise ApiError(413, f"the body is longer than {BODY_BYTES} bytes")
    return bytes(body)
