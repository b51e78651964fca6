"""Reading of JSON and YAML files that hold one mapping, such as configs."""

import json
from typing import Any

from mesh_transformer.util import InputError, describe


def read_mapping(path: str, what: str) -> dict[str, Any]:
    """Return the mapping in a file, which is YAML if its name ends so, otherwise JSON.

    Args:
      path: a local path or a gs:// URI.
      what: the start of the error messages, such as "config my.json".

    Raises:
      OSError: if the file cannot be read.
      InputError: if it does not hold one mapping, or is in a bucket that cannot be reached.
    """
    try:
        values = _parse(path, what, _read(path, what))
    except UnicodeDecodeError:
        raise InputError(f"{what}: not UTF-8 text; give a JSON or YAML file") from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"{what}: {problem}; correct the file") from None
    if not isinstance(values, dict):
        raise InputError(
            f"{what}: found {describe(values)}, expected one mapping of keys to values"
        )
    return values


def _read(path: str, what: str) -> str:
    if "://" not in path:
        with open(path, encoding="utf-8") as file:
            return file.read()
    if not path.startswith("gs://"):
        raise InputError(f"{what}: expected a local file or gs://; download it first")
    from mesh_transformer.storage import files  # imports tensorstore

    with files.open_file(path) as file:
        return file.read().decode()


def _parse(path: str, what: str, text: str) -> Any:
    if path.endswith((".yaml", ".yml")):
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            line = " ".join(str(error).split())
            raise InputError(f"{what}: not YAML: {line}; correct the file") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{what}: not JSON at line {error.lineno}, column {error.colno}: {error.msg}; "
            "correct the file"
        ) from None
