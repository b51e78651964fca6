"""What the endings of a file's name mean: the one place that decides how its content is read."""

import os
import re
from typing import NamedTuple

COMPRESSIONS = (".zst", ".gz", ".xz")
WHOLE_TABLES = (".parquet", ".arrow")  # compressed inside, and read from more than one place
TABLE_TYPES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", *WHOLE_TABLES)
TEXT_TYPES = (".txt", ".md")
# A bare .xz is a text or a tar archive, as its content shows: those of OpenWebText are both.
FILE_TYPES = (*TEXT_TYPES, ".tar", ".xz", *TABLE_TYPES)
_SHORT = {".tgz": ".tar.gz", ".txz": ".tar.xz"}
_ENDING = re.compile(r"\.[A-Za-z][A-Za-z0-9]*$")  # unlike that of a name such as `v1.0`


class FileType(NamedTuple):
    """The type of a file.  One without an ending is a text.

    Attributes:
      stem: the file's name without its endings.
      kind: one of `FILE_TYPES`.
      compression: one of `COMPRESSIONS`, or "".
    """

    stem: str
    kind: str
    compression: str

    @classmethod
    def of(cls, path: str) -> "FileType | None":
        """Return the type of the file at `path`, or None if the name does not tell."""
        name = os.path.basename(path)
        lower = name.lower()
        for short, long in _SHORT.items():
            if lower.endswith(short):
                return cls(name[: -len(short)], ".tar", long.removeprefix(".tar"))
        compression = next(filter(lower.endswith, COMPRESSIONS), "")
        lower = lower.removesuffix(compression)
        kind = next((kind for kind in FILE_TYPES if kind != ".xz" and lower.endswith(kind)), "")
        if kind and not (compression and kind in WHOLE_TABLES):
            return cls(name[: len(lower) - len(kind)], kind, compression)
        if _ENDING.search(lower) or compression not in ("", ".xz"):
            return None
        return cls(name[: len(lower)], compression or ".txt", compression)


def has_ending(path: str) -> bool:
    """Return whether the name of the file at `path` has an ending."""
    return bool(_ENDING.search(os.path.basename(path)))


def is_hidden(path: str) -> bool:
    """Return whether a relative path has a hidden part, such as `._a.txt` of macOS's archives."""
    return any(part.startswith(".") and part not in (".", "..") for part in path.split("/"))


def format_types(types: tuple[str, ...]) -> str:
    """Format kinds of files as text, with the endings of their compressions in brackets."""
    also = f"[{', '.join(COMPRESSIONS)}]"
    endings = [kind if kind in (".xz", *WHOLE_TABLES) else kind + also for kind in types]
    return ", ".join(endings) + (" or without an ending" if ".txt" in types else "")
