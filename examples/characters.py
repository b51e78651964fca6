"""Write Shakespeare, character by character; about four minutes on two cores.

Run `python examples/characters.py [FILE]`, with a text file of your own or without; it writes
characters.png.
"""

import math
import sys

import corpus
import numpy as np

import mesh_transformer
from mesh_transformer.data.tokenizer import character_tokenizer, encode_batch

CONFIG = {
    "block": "gptj",
    "layers": 3,
    "d_model": 128,
    "n_heads": 4,
    "pe_rotary_dims": 16,
    "seq": 96,
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
    tokenizer = character_tokenizer([text])
    [ids] = encode_batch(tokenizer, [text])
    training, held_out = corpus.split(np.array(ids))
    network = mesh_transformer.CausalTransformer(CONFIG | {"n_vocab": len(tokenizer)})
    rows = mesh_transformer.fit(network, training, val=held_out)

    prompt = text[:20]
    tokens = tokenizer.encode(prompt)
    [answer] = network.generate(
        [tokens], [len(tokens)], 400, {"temp": 0.8, "top_p": 0.95, "seed": 0}
    )
    print(tokenizer.decode([*tokens, *answer]))
    result = corpus.plot_losses(rows, "characters.png", "character")[-1] / math.log(2)
    print(f"{result:.2f} bits per character of text that was not in the training set")
    return result


if __name__ == "__main__":
    main(*sys.argv[1:2])
