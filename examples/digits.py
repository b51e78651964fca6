"""Generate images of digits, pixel by pixel, and complete images from their top half.

The images are the 8 x 8 digits of scikit-learn: `pip install -e '.[examples]'`.  Run
`python examples/digits.py`; it takes some minutes on two cores and writes digits.png.
"""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import mesh_transformer

LEVELS = 17  # of a pixel; token LEVELS + d begins an image of the digit d
CONFIG = {
    "block": "gpt2",
    "layers": 3,
    "d_model": 128,
    "n_heads": 4,
    "n_vocab": LEVELS + 10,
    "seq": 64,
    "dtype": "float32",
    "per_replica_batch": 32,
    "lr": 2e-3,
    "end_lr": 1e-4,
    "warmup_steps": 50,
    "total_steps": 800,
    "dropout_residual": 0.1,
    "dropout_attention": 0.1,
}


def images() -> np.ndarray:
    """Return the images as sequences of tokens: the digit, then the pixels, [1797, 65]."""
    digits: Any = load_digits()
    pixels = digits.images.reshape(-1, 64).astype(np.int64)
    return np.concatenate((LEVELS + digits.target[:, None], pixels), axis=1)


def continued(network: mesh_transformer.CausalTransformer, beginnings: np.ndarray) -> np.ndarray:
    """Return images [B, 8, 8] that begin with the given tokens [B, T]."""
    count, length = beginnings.shape
    pixels = network.generate(beginnings, [length] * count, 65 - length, {"top_p": 0.95, "seed": 0})
    tokens = np.concatenate((beginnings, pixels), axis=1)[:, 1:]
    return np.minimum(tokens, LEVELS - 1).reshape(count, 8, 8)


def main() -> float:
    training, held_out = images()[:-200], images()[-200:]
    network = mesh_transformer.CausalTransformer(CONFIG)
    mesh_transformer.fit(network, training)
    losses = network.eval({"obs": held_out[:, :-1], "target": held_out[:, 1:]})["loss"]
    loss = float(np.mean(losses))
    print(f"{loss:.3f} nats per pixel of images that were not in the training set")
    some = held_out[:10]
    rows = {
        "sampled, one per digit": continued(network, LEVELS + np.arange(10)[:, None]),
        "top half given": continued(network, some[:, :33]),
        "original": some[:, 1:].reshape(-1, 8, 8),
    }
    figure, axes = plt.subplots(3, 10, figsize=(10, 3.6))
    for line, (title, pictures) in zip(axes, rows.items(), strict=True):
        line[0].set_title(title, loc="left")
        for axis, picture in zip(line, pictures, strict=True):
            axis.imshow(picture, cmap="gray_r", vmin=0, vmax=LEVELS - 1)
            axis.axis("off")
    figure.savefig("digits.png")
    return loss


if __name__ == "__main__":
    main()
