"""A record set in files of so many records, with its index and its manifest, complete or absent.

Beside create_finetune_tfrecords.py, its user.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mesh_transformer.data.packing import Packing
from mesh_transformer.data.tfrecords import write_records


def write_parts(
    folder: Path, sequences: Iterator[tuple[Packing, int]], most: int | None
) -> list[tuple[Path, int]]:
    """Files of at most so many sequences, and their numbers; those that are there are not made."""
    found = []
    with tqdm(desc="writing", unit=" sequences") as bar:
        for number in count():
            first = next(sequences, None)
            if first is None:
                return found
            part = chain([first], islice(sequences, most - 1 if most else None))
            path = folder / f"{number:05d}.tfrecords"
            if path.exists():
                written = sum(1 for _ in part)
                bar.update(written)
            else:
                written = write_records(str(path), _read(part, bar))
            found.append((path, written))
    return found


def _read(part: Iterator[tuple[Packing, int]], bar: tqdm) -> Iterator[Any]:
    for packing, number in part:
        yield packing[number]
        bar.update()


def publish(base: Path, parts: list[tuple[Path, int]], manifest: dict[str, Any]) -> Path:
    """Moves the files to their places, then lists them in the manifest and the index.

    `base` is the set's path without an ending; returned is the index.
    """
    files = []
    for number, (path, written) in enumerate(parts):
        which = f"_{number:05d}" if len(parts) > 1 else ""
        place = base.with_name(f"{base.name}{which}_{written}.tfrecords")
        with open(path, "rb") as raw:
            sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
        size = path.stat().st_size
        files.append({"name": place.name, "sequences": written, "bytes": size, "sha256": sha256})
    for (path, _), file in zip(parts, files, strict=True):
        os.replace(path, base.with_name(file["name"]))
    total = sum(written for _, written in parts)
    contents = json.dumps({"sequences": total, **manifest, "files": files}, indent=1) + "\n"
    _replace(base.with_name(f"{base.name}.manifest.json"), contents)
    index = base.with_name(f"{base.name}.index")
    _replace(index, "".join(f"{file['name']}\n" for file in files))
    return index


def _replace(path: Path, contents: str) -> None:
    draft = path.with_name(f".{path.name}.partial")
    draft.write_text(contents, encoding="utf-8")
    os.replace(draft, path)
