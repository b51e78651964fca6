"""The text for the examples, Shakespeare's or a file's, and the plot of a training run."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
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


def plot_losses(rows: list[dict[str, Any]], path: str, unit: str) -> list[float]:
    """Plot the losses in the rows that `fit` returned, and return those of the held-out tokens."""
    validated = [row for row in rows if "val/loss_val" in row]
    losses = [row["val/loss_val"] for row in validated]
    plt.plot([row["step"] for row in rows], [row["train/loss"] for row in rows], label="training")
    plt.plot([row["step"] for row in validated], losses, "o-", label="held out")
    plt.xlabel("step")
    plt.ylabel(f"loss per {unit}")
    plt.legend()
    plt.savefig(path)
    return losses
