"""Load GPT-2's weights, fine-tune them on text, and sample before and after.

Run `python examples/gpt2_finetune.py FOLDER [FILE]`, where FOLDER is a Hugging Face folder of any
supported family (such as that of `hf download openai-community/gpt2 --local-dir gpt2`), and FILE a
text file.  It writes the tuned model to FOLDER-tuned, for transformers too, and finetune.png.
"""

import sys

import corpus
import numpy as np

import mesh_transformer
from mesh_transformer.checkpoint import conversion
from mesh_transformer.data.tokenizer import encode_batch, load_tokenizer
from mesh_transformer.storage.access import check_absent

KEYS = {
    "per_replica_batch": 4,
    "lr": 5e-5,
    "end_lr": 5e-6,
    "warmup_steps": 5,
    "total_steps": 50,
    "val_every": 10,
    "val_batches": 4,
    "dtype": "float32",
}


def main(folder: str, path: str | None = None, **changes: object) -> list[float]:
    check_absent(f"{folder}-tuned")
    network = mesh_transformer.load(folder, changes=KEYS | changes)
    tokenizer = load_tokenizer(folder)
    [ids] = encode_batch(tokenizer, [corpus.read(path)])
    training, held_out = corpus.split(np.array(ids))

    def sample() -> str:
        tokens = network.generate([ids[:8]], [8], 40, {"top_p": 0.9, "temp": 0.8, "seed": 1})[0]
        return str(tokenizer.decode([*ids[:8], *tokens]))

    before = sample()
    rows = mesh_transformer.fit(network, training, f"{folder}-tuned/native", val=held_out)
    print(f"before: {before}\n\nafter: {sample()}")
    conversion.convert(f"{folder}-tuned/native", "native", f"{folder}-tuned/hf", "hf")
    print(f"transformers can load {folder}-tuned/hf")

    return corpus.plot_losses(rows, "finetune.png", "token")


if __name__ == "__main__":
    main(*sys.argv[1:3])
