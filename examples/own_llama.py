"""Train a Llama of 15M parameters on text, write it as a GGUF file for llama.cpp, and serve it.

Run `python examples/own_llama.py [FILE]`, with a text file of your own or without.  It writes the
tokenizer, the checkpoints and model.gguf to own_llama/, and own_llama.png.  Then it serves the file
until Ctrl-C.
"""

import subprocess
import sys

import corpus
import numpy as np

import mesh_transformer
from mesh_transformer.checkpoint import conversion
from mesh_transformer.data.tokenizer import encode_batch, train_tokenizer
from mesh_transformer.storage.access import check_absent

FOLDER = "own_llama"
CONFIG = {
    "block": "llama",
    "layers": 8,
    "d_model": 384,
    "n_heads": 6,
    "key_heads": 2,
    "ff_size": 1152,
    "n_vocab": 4096,
    "tie_head": True,
    "seq": 128,
    "tokenizer": f"{FOLDER}/tokenizer",
    "dtype": "float32",
    "remat": "none",
    "per_replica_batch": 16,
    "lr": 1e-3,
    "end_lr": 1e-4,
    "warmup_steps": 30,
    "total_steps": 300,
    "val_every": 50,
    "val_batches": 10,
    "dropout_residual": 0.1,
}


def main(path: str | None = None) -> float:
    check_absent(FOLDER)
    text = corpus.read(path)
    tokenizer = train_tokenizer([text], CONFIG["n_vocab"])
    tokenizer.save_pretrained(CONFIG["tokenizer"])
    [ids] = encode_batch(tokenizer, [text])
    training, held_out = corpus.split(np.array(ids))
    network = mesh_transformer.CausalTransformer(CONFIG)
    rows = mesh_transformer.fit(network, training, f"{FOLDER}/native", val=held_out)

    [answer] = network.generate([ids[:10]], [10], 100, {"temp": 0.8, "top_p": 0.95, "seed": 0})
    print(tokenizer.decode([*ids[:10], *answer]))
    conversion.convert(f"{FOLDER}/native", "native", f"{FOLDER}/model.gguf", "gguf")
    return corpus.plot_losses(rows, "own_llama.png", "token")[-1]


if __name__ == "__main__":
    main(*sys.argv[1:2])
    serve = ["-m", "mesh_transformer", "serve", "--model-path", f"{FOLDER}/model.gguf"]
    subprocess.run([sys.executable, *serve], check=True)
