"""Teach a small Llama to reverse two digits from rewards alone, from random weights.

    python -m tests.long.checkable_rewards [SEED ...]

Chance is 1 in 169.  The share of right answers to all 100 prompts, each asked 10 times, must reach
95 percent, and the sampler's probabilities must have the bits of training's.  It took
11 minutes on 2 busy cores.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mesh_transformer import CausalTransformer
from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import character_tokenizer
from mesh_transformer.training.fit import fit

PROMPTS = [{"prompt": f"{a}{b}="} for a in range(10) for b in range(10)]
REWARD = """\
def share(prompt, answer, row):
    return sum(x == y for x, y in zip(answer, prompt[1::-1])) / 2
"""


def share_right(network: CausalTransformer, tokenizer: Any, seed: int) -> float:
    texts = [row["prompt"] for row in PROMPTS] * 10
    ids = np.array(tokenizer(texts)["input_ids"])
    answers = network.generate(ids, [3] * len(ids), 2, {"top_p": 1.0, "seed": seed})
    right = [text[1::-1] for text in texts]
    return float(
        np.mean([x == y for x, y in zip(tokenizer.batch_decode(answers), right, strict=True)])
    )


def main(seed: int) -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer: Any = character_tokenizer(["0123456789="])
        tokenizer.save_pretrained(folder)
        (Path(folder) / "rewards.py").write_text(REWARD)
        own: dict[str, Any] = {
            "seed": seed,
            "tokenizer": folder,
            "reward": f"{folder}/rewards.py:share",
        }
        network = CausalTransformer(Config.load("tiny_rewards").replace(**own))
        before = share_right(network, tokenizer, seed)
        rows = fit(network, PROMPTS, Path(folder) / "model")
        after = share_right(network, tokenizer, seed)
    seconds = time.perf_counter() - began
    errors = max(row["train/sampler_error"] for row in rows)
    print(
        f"seed {seed}: {before:.1%} before, {after:.1%} after {len(rows)} steps, {seconds:.0f} s; "
        f"largest sampler error {errors}"
    )
    assert before < 0.02, before
    assert after >= 0.95, after
    assert errors == 0, errors


if __name__ == "__main__":
    for argument in sys.argv[1:] or ["0"]:
        main(int(argument))
