"""Helpers of the plotting scripts: reading results, plotting without a display, atomic saves."""

import json
import os
from pathlib import Path
from typing import Any

from mesh_transformer.util import InputError


def read_object(path: str, *, keys: dict[str, Any], printed_by: str) -> dict[str, Any]:
    """Read the JSON object that a script printed.

    Args:
      keys: required keys and their values; None accepts any value.
      printed_by: the script and its flags, for the error.

    Raises:
      InputError: if the file cannot be read or does not hold such an object.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        result = None
    if not isinstance(result, dict) or any(
        key not in result or value not in (None, result[key]) for key, value in keys.items()
    ):
        raise InputError(f"{path}: expected the output of {printed_by}")
    return result


def pyplot() -> Any:
    """Return matplotlib's pyplot, set up for files only and for reproducible SVGs.

    Text in an SVG remains text.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "mesh-transformer"
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, picture: str) -> None:
    """Write a figure as PNG or SVG, depending on the file name's suffix.

    Raises:
      InputError: for any other suffix.
    """
    suffix = Path(picture).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise InputError(f"{picture}: expected a file name that ends in .png or .svg")
    temporary = picture + ".tmp"
    if suffix == ".png":
        figure.savefig(temporary, format="png", dpi=150)
    else:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    os.replace(temporary, picture)
