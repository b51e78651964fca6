"""Extend a small Llama from 512 to 8,192 tokens with YaRN, and ask it for hidden facts.

`python -m tests.long.longer_window [--picture FILE]` trains a model to recall numbers in texts of
512 tokens, and then extends its window with `rotary_scaling` and 200 steps at 8,192 tokens.  It
prints the accuracy by length and depth before, with YaRN but without training, and after.  The
texts have 32 keys and 32 numbers only, so chance is 3 percent.
"""

import argparse
import tempfile
import time
from typing import Any

import numpy as np

from mesh_transformer import CausalTransformer
from mesh_transformer.cli.long_context import draw, table
from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import encode_batch, train_tokenizer
from mesh_transformer.evaluation import haystack, long_context
from mesh_transformer.transformer_shard import load

NUMBERS = range(100, 132)
KEYS = haystack.KEYS[:32]
SHORT, LONG = 512, 8192
YARN = {"rope_type": "yarn", "factor": LONG / SHORT, "original_max_position_embeddings": SHORT}
MODEL: dict[str, Any] = {"block": "llama", "layers": 2, "d_model": 64, "n_heads": 1, "seq": SHORT}
MODEL |= {"head_size": 32, "sliding_window": 4, "sliding_layers": [0]}  # only layer 1 sees far
MODEL |= {"dtype": "float32", "remat": "none", "optimizer": "muon", "lr": 4e-3}
MODEL |= {"schedule": "constant", "warmup_steps": 20, "weight_decay": 0.0, "per_replica_batch": 4}
# Steps, and of each step: rows, their tokens, keys per row and questions per key.  Short texts come
# first, because in them a model learns sooner to copy a number.
PHASES = [(150, 16, 64, 1, 5), (150, 8, SHORT, 1, 3)]
EXTENSION = [(200, 1, LONG, 1, 3)]


def words_tokenizer() -> Any:
    """Return a tokenizer whose tokens are all words and numbers of the texts."""
    texts = [" ".join(haystack.filler(np.random.default_rng(0), 3000))]
    for key in KEYS:
        texts += [f" {haystack.fact(key, n)}{haystack.number_of(key)}" for n in NUMBERS]
    return train_tokenizer(texts, 2000)


def row(
    tokenizer: Any, rng: np.random.Generator, length: int, keys: int, questions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return a text with facts, which occur again as questions, and where its answers are.

    Returns:
      Token ids and a mask, [length + 1].
    """
    units = []
    for key in haystack.drawn(rng, KEYS, keys):
        said = f" {haystack.fact(key, rng.choice(NUMBERS))}"
        asked = haystack.number_of(key) + said[said.rindex(" ") :]
        places = np.sort(rng.random(1 + questions))
        units += [(place, said if rng.random() < 0.8 else asked, True) for place in places[1:]]
        units.append((places[0], said, False))
    tokens = encode_batch(tokenizer, [text for _, text, _ in units])
    filler = haystack.filler(rng, max(0, length - sum(map(len, tokens))) // 8 + 2)
    units += [(rng.random(), f" {sentence}", False) for sentence in filler]
    tokens += encode_batch(tokenizer, [text for _, text, _ in units[len(tokens) :]])
    order = sorted(range(len(units)), key=lambda at: units[at])
    # The answer is the last token but one, before the full stop.
    masks = [
        [False] * (len(x) - 2) + [unit[2], False] for x, unit in zip(tokens, units, strict=True)
    ]
    joined, mask = (np.concatenate([parts[at] for at in order]) for parts in (tokens, masks))
    return joined[: length + 1], mask[: length + 1]


def train(network: CausalTransformer, tokenizer: Any, phases: list[tuple[int, ...]]) -> None:
    """Train a network on texts, with losses on answers only."""
    rng = np.random.default_rng(len(phases))
    for steps, rows, length, *facts in phases:
        began, losses = time.perf_counter(), []
        for _ in range(steps):
            made = [row(tokenizer, rng, length, *facts) for _ in range(rows)]
            tokens, mask = (np.stack(arrays)[None] for arrays in zip(*made, strict=True))
            batch = {"obs": tokens[..., :-1], "target": tokens[..., 1:], "loss_mask": mask[..., 1:]}
            losses.append(float(network.train(batch)["loss"]))
        print(
            f"{steps} steps of {rows} x {length} tokens, {time.perf_counter() - began:.0f} s: loss "
            f"{np.mean(losses[:20]):.3f} in the first 20, {np.mean(losses[-20:]):.3f} in the last",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=10, help="per length and depth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", help="PNG or SVG file to draw")
    args = parser.parse_args()
    began = time.perf_counter()
    haystack.NUMBERS, haystack.KEYS = NUMBERS, KEYS
    tokenizer, rows = words_tokenizer(), []
    lengths, depths = [SHORT << n for n in (0, 2, 4)], [0.0, 0.25, 0.5, 0.75, 1.0]
    cells = long_context.cells(["single"], lengths, depths)

    def ask(network: CausalTransformer, name: str) -> None:
        own = long_context.accuracies(network, tokenizer, cells, args.questions)
        rows.extend(row | {"task": name} for row in own)
        print(table(rows[-len(own) :]), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        steps = sum(phase[0] for phase in PHASES + EXTENSION)
        own = {"n_vocab": -(-len(tokenizer) // 8) * 8, "total_steps": steps, "seed": args.seed}
        config = Config.from_dict(MODEL | own)
        network = CausalTransformer(config)
        train(network, tokenizer, PHASES)
        network.save(folder)
        network.close()
        ask(load(folder, config.replace(seq=LONG)), "before")
        network = load(folder, config.replace(seq=LONG, rotary_scaling=YARN, lr=1e-3))
        ask(network, "YaRN, untrained")
        train(network, tokenizer, EXTENSION)
        ask(network, "YaRN, 200 steps")
    if args.picture:
        draw(rows, {}, args.picture)
    print(f"{args.questions} questions per length and depth; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
