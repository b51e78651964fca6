"""Errors that a host raises: whether a restart of all hosts may cure them."""

import errno

import jax

from mesh_transformer.util import HostError, StoppedError

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
    errno.EDQUOT,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOSPC,
    errno.EPERM,
    errno.EROFS,
}


class PermanentError(StoppedError):
    """A host raised an error that it would raise again after a restart."""


class RaisedError(HostError):
    """A host that is still alive raised an error; the same error again counts as permanent."""


def host_error(rank: int, error: Exception) -> StoppedError:
    """Return a one-line error that names a host, for an exception that it has raised.

    The result is a `PermanentError` if a restart would not cure the exception's cause, else a
    `RaisedError`.
    """
    text = " ".join(str(error).split())[:300]
    permanent = isinstance(error, OSError) and error.errno in PERMANENT_NUMBERS
    if isinstance(error, jax.errors.JaxRuntimeError):
        permanent = text.partition(":")[0] in PERMANENT_STATUSES
    kind = PermanentError if permanent else RaisedError
    return kind(f"host {rank}: {type(error).__name__}: {text}")
