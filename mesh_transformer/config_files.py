"""Config files: where they are, and reading them."""

import difflib
import os
from pathlib import Path
from typing import Any

from mesh_transformer.families import PRESETS
from mesh_transformer.storage.mappings import read_mapping
from mesh_transformer.util import InputError

# The shipped configs are in the package if it is installed, and beside it in a checkout.
CONFIGS = Path(__file__).parent / "configs"
if not CONFIGS.is_dir():
    CONFIGS = Path(__file__).parent.parent / "configs"


def _named(path: str) -> Path | None:
    """Return the config file that a name such as "tiny" refers to; None if there is none.

    The file is searched for in ./configs/ and then among the configs shipped with the library.  If
    `path` is itself an existing path, it is not treated as a name, and the result is None.
    """
    folder, name = os.path.split(path)
    if os.path.exists(path) or folder not in ("", "configs"):
        return None
    files = [place / f"{name.removesuffix('.json')}.json" for place in (Path("configs"), CONFIGS)]
    return next((file for file in files if file.exists()), None)


def read_config(path: str) -> dict[str, Any]:
    """Return the mapping in a config file, or a preset.

    Args:
      path: see `Config.load`.

    Raises:
      InputError: if the file cannot be read; the message suggests a similar name.
    """
    named = _named(path)
    if path in PRESETS and named is None and not os.path.exists(path):
        return dict(PRESETS[path])
    try:
        return read_mapping(os.fspath(named or path), f"config {path}")
    except OSError as error:
        names = sorted(file.stem for file in CONFIGS.glob("*.json"))
        lower = {name.lower(): name for name in (*names, *PRESETS)}
        close = difflib.get_close_matches(os.path.basename(path).lower(), lower, n=1)
        hint = f"did you mean {lower[close[0]]}? else " if close else ""
        raise InputError(
            f"config {path} cannot be read ({error.strerror}); {hint}give the path of a JSON or "
            f"YAML file, one of {', '.join(names)}, or a preset: {', '.join(PRESETS)}"
        ) from None
