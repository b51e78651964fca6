"""Helpers for plotting scripts: read results, plot without a display, save pictures atomically."""

import json
import os
from pathlib import Path
from typing import Any

from mesh_transformer.util import InputError


def read_object(path: str, *, keys: dict[str, Any], printed_by: str) -> dict[str, Any]:
    """Read a file that contains the JSON object printed by a script.

    Args:
      keys: keys that the object must have, with their required values; None allows any value.
      printed_by: the script and its flags, for error messages.

    Raises:
      InputError: if the file cannot be read, or contains no JSON object with these keys and values.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); write it with {printed_by}"
        ) from None
    except ValueError:
        result = None
    if not isinstance(result, dict) or any(
        key not in result or value not in (None, result[key]) for key, value in keys.items()
    ):
        raise InputError(f"{path} is not the output of {printed_by}; write it with that command")
    return result


def pyplot() -> Any:
    """Return matplotlib's pyplot, set up to write files without a display.

    SVG files contain text as text, not as outlines, and the same ids in every run.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "mesh-transformer"
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, picture: str) -> None:
    """Write a figure as PNG or SVG, depending on the suffix of the file name.

    Args:
      picture: path of the file.  An existing file is replaced only when the new one is complete.

    Raises:
      InputError: for any other suffix.
    """
    options: dict[str, Any] = {".png": {"dpi": 150}, ".svg": {"metadata": {"Date": None}}}
    suffix, temporary = Path(picture).suffix.lower(), picture + ".tmp"
    if suffix not in options:
        raise InputError(f"{picture}: expected a file name that ends in .png or .svg")
    figure.savefig(temporary, format=suffix[1:], **options[suffix])
    os.replace(temporary, picture)
    pyplot().close(figure)
