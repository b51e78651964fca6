"""Write Shakespeare in pieces of words, with a tokenizer trained on the text; about four minutes.

Run `python examples/words.py [FILE]`, with a text file of your own or without; it writes words.png.
"""

import math
import sys

import corpus
import numpy as np

import mesh_transformer
from mesh_transformer.data.tokenizer import encode_batch, train_tokenizer

CONFIG = {
    "block": "neox",
    "layers": 3,
    "d_model": 128,
    "n_heads": 4,
    "pe_rotary_dims": 8,
    "n_vocab": 1024,
    "seq": 64,
    "dtype": "float32",
    "per_replica_batch": 24,
    "lr": 2e-3,
    "end_lr": 1e-4,
    "warmup_steps": 50,
    "total_steps": 800,
    "val_every": 100,
    "val_batches": 20,
    "dropout_residual": 0.1,
}


def main(path: str | None = None) -> float:
    text = corpus.read(path)
    tokenizer = train_tokenizer([text], CONFIG["n_vocab"])
    [ids] = encode_batch(tokenizer, [text])
    print("a beginning, in tokens:", "|".join(str(tokenizer.decode(token)) for token in ids[:30]))
    training, held_out = corpus.split(np.array(ids))
    network = mesh_transformer.CausalTransformer(CONFIG)
    rows = mesh_transformer.fit(network, training, val=held_out)

    [answer] = network.generate([ids[:10]], [10], 120, {"temp": 0.8, "top_p": 0.95, "seed": 0})
    print(tokenizer.decode([*ids[:10], *answer]))
    losses = corpus.plot_losses(rows, "words.png", "token")
    result = losses[-1] / math.log(2) * len(held_out) / len(str(tokenizer.decode(held_out)))
    print(f"{result:.2f} bits per character of text that was not in the training set")
    return result


if __name__ == "__main__":
    main(*sys.argv[1:2])
