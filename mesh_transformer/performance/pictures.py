"""What the scripts that draw share: figures without a screen, written whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from mesh_transformer.util import InputError


def read_object(path: str, *, keys: dict[str, Any], printed_by: str) -> dict[str, Any]:
    """The JSON object that a script printed.

    Args:
      keys: what it must have; None for any value.

    Raises:
      InputError: for any other file.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or any(
        key not in found or value not in (None, found[key]) for key, value in keys.items()
    ):
        raise InputError(f"{path}: is not what {printed_by} prints")
    return found


def pyplot() -> Any:
    """matplotlib's, for files alone; the same figure gives the same SVG, its text as text."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "mesh-transformer"
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, picture: str) -> None:
    """As the name ends, a PNG or an SVG; InputError for any other."""
    kind = Path(picture).suffix.lower()
    if kind not in (".png", ".svg"):
        raise InputError(f"{picture}: is no name for a picture; end it in .png or .svg")
    temporary = picture + ".tmp"
    if kind == ".png":
        figure.savefig(temporary, format="png", dpi=150)
    else:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    os.replace(temporary, picture)
