"""Compare the perplexity of a model's quantized weights with that of its own, on validation sets.

The sets are those of the model's config (`val_set`).  All weights score the same tokens, with the
weights that generation uses.
"""

import argparse
import contextlib
import math
from itertools import islice
from typing import Any

import numpy as np
from tqdm import tqdm

from mesh_transformer.evaluation.validation import Scores, open_set
from mesh_transformer.transformer_shard import CausalTransformer, load
from mesh_transformer.util import InputError, run_script

BITS = (None, 8, 4)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True, help="model folder or checkpoint")
    parser.add_argument("--config", help="config file (default: the checkpoint's config)")
    parser.add_argument("--batches", type=int, help="batches per set (default: all)")
    return parser.parse_args()


def scores(network: CausalTransformer, source: str, batches: int | None) -> Scores:
    """Return the scores of the weights that generation uses."""
    result = Scores()
    with contextlib.closing(open_set(network, source)) as samples:
        for sample in tqdm(islice(samples, batches), source, unit="batch", leave=False):
            tokens = np.concatenate((sample["obs"], sample["target"][:, -1:]), axis=1)
            chosen = network.score(tokens, 1)
            correct = chosen.top_token[..., 0] == chosen.token
            losses: dict[str, Any] = {"all_loss": -chosen.logprob, "correct": correct}
            result.add(sample, losses, None)
    return result


def main() -> int:
    args = parse_args()
    exact: dict[str, float] = {}
    for bits in BITS:
        network = load(args.model_path, args.config, changes={"weight_bits": bits})
        if not network.config.val_set:
            raise InputError(f"{args.model_path}: its config has no val_set; give --config")
        for name, source in network.config.val_set.items():
            result = scores(network, source, args.batches)
            exact.setdefault(name, result.loss)
            print(
                f"{name}, {f'{bits} bits' if bits else 'not quantized'}: {result.tokens:,} tokens, "
                f"loss {result.loss:.5f}, perplexity {math.exp(result.loss):.3f}, "
                f"{math.exp(result.loss - exact[name]):.4f} times the exact one, "
                f"accuracy {result.correct / result.tokens:.2%}"
            )
        network.close()
    return 0


if __name__ == "__main__":
    run_script(main)
