"""The text for the examples: a file, or the works of Shakespeare in the repository's records."""

from pathlib import Path

import numpy as np

from mesh_transformer.data.tfrecords import features, frames
from mesh_transformer.data.tokenizer import load_tokenizer

RECORDS = Path(__file__).resolve().parents[1] / "data/tiny.train_8742.tfrecords"


def read(path: str | None = None) -> str:
    """Return the text of a file (default: 14 works of Shakespeare, about 1.7 MB)."""
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    rows = [features(payload, str(RECORDS))["text"] for payload, _ in frames(str(RECORDS), 0)]
    tokens = np.concatenate([row for row in rows if row is not None])
    return str(load_tokenizer().decode(tokens))


def split(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first 95 % of the tokens to train on, and the rest to validate."""
    count = len(tokens) * 19 // 20
    return tokens[:count], tokens[count:]
