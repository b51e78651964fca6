"""Errors that a host raises: whether a restart of all hosts may cure them."""

import errno
import re

import jax

from mesh_transformer.storage.access import PASSING_STATUSES
from mesh_transformer.util import FULL, HostError, StoppedError

# Causes that new processes would meet again, so that a restart is of no use.
PERMANENT_STATUSES = {  # of JAX's runtime
    "FAILED_PRECONDITION",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "OUT_OF_RANGE",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",  # the devices' memory
    "UNIMPLEMENTED",
}
PERMANENT_NUMBERS = {  # of the operating system
    errno.EACCES,
    errno.EADDRNOTAVAIL,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.EPERM,
    errno.EROFS,
    *FULL,
}
# Causes outside of the process that raises the error: another process, or the network between them.
# They may occur again by chance, so that a second occurrence does not make them permanent.
PASSING = re.compile(
    rf"^({PASSING_STATUSES}):"  # of JAX's runtime and its coordinator
    r"|\bGloo [\w -]+ failed: "  # a collective over CPUs, with any status
)
PASSING_NUMBERS = {
    errno.EADDRINUSE,  # ports are chosen anew
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
}


class PermanentError(StoppedError):
    """A host raised an error that it would raise again after a restart."""


class RaisedError(HostError):
    """A live host raised an error of unknown cause; the same error again counts as permanent."""


class LostError(Exception):
    """A member of a fleet has ended, so that its calls have no results.

    Attributes:
      permanent: whether it would end again after a restart.
    """

    def __init__(self, line: str, *, permanent: bool = False):
        super().__init__(line)
        self.permanent = permanent


def host_error(name: str, error: Exception) -> StoppedError:
    """Return a one-line error that names a host, for an exception that it has raised.

    The result is a `PermanentError` if a restart would not cure the exception's cause, a HostError
    if it would, and a `RaisedError` if that is unknown.
    """
    text = " ".join(str(error).split())
    return _kind(error, text)(f"{name}: {type(error).__name__}: {text[:300]}")


def _kind(error: Exception, text: str) -> type[StoppedError]:
    number = error.errno if isinstance(error, OSError) else None
    is_of_network = isinstance(error, ConnectionError | TimeoutError) or number in PASSING_NUMBERS
    if is_of_network or PASSING.search(text):
        return HostError
    status = text.partition(":")[0] if isinstance(error, jax.errors.JaxRuntimeError) else None
    if number in PERMANENT_NUMBERS or status in PERMANENT_STATUSES:
        return PermanentError
    return RaisedError
