"""A marker file in a folder, by which several hosts find out whether they share the folder."""

import os
import secrets

from mesh_transformer.util import InputError

ENDING = ".shared"


def marker_in(folder: str) -> str:
    """Return the path of a new marker in a folder."""
    return os.path.join(folder, f".{secrets.token_hex(8)}{ENDING}")


def is_marker(path: str) -> bool:
    """Return whether a path can be that of a marker."""
    name = os.path.basename(path)
    return name.startswith(".") and name.endswith(ENDING)


def create_marker(path: str, creator: str) -> None:
    """Create an empty file at `path`, and its folder if necessary.

    Args:
      creator: the process that creates it, such as "host 0", for the error message.

    Raises:
      InputError: if the file cannot be created.
    """
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb"):
            pass
    except OSError as error:
        raise InputError(
            f"{creator} cannot write to {os.path.dirname(path)}: {error.strerror}; choose another "
            "folder or fix the permissions"
        ) from None
