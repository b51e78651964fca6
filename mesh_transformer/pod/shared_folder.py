"""A marker file in a folder, by which several hosts find out whether they share the folder."""

import os

from mesh_transformer.util import InputError


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
