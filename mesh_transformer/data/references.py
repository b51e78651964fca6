"""Log-probabilities of a record set's texts under a reference, in a file beside the records."""

import base64
import hashlib
import json
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.data.tfrecords import RecordFiles, find_index, frames
from mesh_transformer.storage import files
from mesh_transformer.util import InputError


class References(NamedTuple):
    """What a reference says of the texts of a record set.

    Attributes:
      records: a digest of the contents of all records, in the index's order.
      weights: a digest of the reference's weights (see `Network.checksum`).
      counts: the number of records of each file.
      sums: the sum of log p over the positions of each text that count in the loss, f32 [records,
        texts]; texts are in the order of their segment numbers, from 1.
    """

    records: str
    weights: str
    counts: list[int]
    sums: np.ndarray

    def row(self, file: int, number: int, length: int) -> np.ndarray:
        """Return the sums of one record, followed by zeros, f32 [length]."""
        sums = self.sums[sum(self.counts[:file]) + number]
        return np.pad(sums, (0, length - len(sums)))


def record_digest(index_path: str) -> tuple[str, list[int]]:
    """Return a digest of the contents of all records of an index, and their number in each file."""
    digest, counts = hashlib.sha256(), []
    for path in RecordFiles.of(index_path)[2]:
        counts.append(0)
        for payload, _ in frames(path, 0):
            digest.update(len(payload).to_bytes(8) + payload)
            counts[-1] += 1
    return digest.hexdigest(), counts


def file_of(index_path: str) -> str:
    """Return the path of the file with the references of an index's records."""
    return f"{find_index(index_path).removesuffix('.index')}.reference.json"


def read(index_path: str) -> References | None:
    """Return what the file beside a record set holds; None if there is none.

    Raises:
      InputError: if the file is damaged.
    """
    path = file_of(index_path)
    if not files.is_file(path):
        return None
    try:
        with files.open_file(path) as file:
            values: dict[str, Any] = json.loads(file.read())
        sums = np.frombuffer(base64.b64decode(values.pop("sums")), "<f4")
        return References(**values, sums=sums.reshape(sum(values["counts"]), -1))
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a file of references; delete it") from error


def write(index_path: str, references: References) -> None:
    """Write the file beside a record set; it appears only when it is complete."""
    sums = base64.b64encode(references.sums.astype("<f4").tobytes()).decode()
    files.write_text(file_of(index_path), json.dumps(references._asdict() | {"sums": sums}) + "\n")
