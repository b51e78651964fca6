"""Compare the speed of a training step with torch transformers on this machine, in float32.

Both libraries train a GPT-J with random weights on the same random tokens, by Adam with weight
decay and clipped gradients.  They run in alternating processes.  The script prints the median and
the range of the ratio of their speeds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from generation import ENGINES, alternately

# layers, d_model, n_heads, n_vocab; 105M is that of `mesh-transformer bench`
SIZES = {"33M": (8, 256, 4, 50400), "105M": (8, 1024, 4, 2048)}
ROTARY = 64


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="33M", help="model (default 33M)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per step (default 2)")
    parser.add_argument("--seq", type=int, default=512, help="tokens per sequence (default 512)")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of processes (default 3)")
    parser.add_argument("--steps", type=int, default=7, help="timed steps per process (default 7)")
    parser.add_argument(
        "--one", choices=ENGINES, help="engine to measure in this process, printing JSON"
    )
    return parser.parse_args()


def ours(args: argparse.Namespace, tokens: np.ndarray) -> Callable[[], float]:
    """Return a function that makes a step with this library, and returns the loss."""
    from mesh_transformer.transformer_shard import CausalTransformer

    layers, width, heads, vocabulary = SIZES[args.size]
    network = CausalTransformer(
        {
            "layers": layers,
            "d_model": width,
            "n_heads": heads,
            "n_vocab": vocabulary,
            "seq": args.seq,
            "pe_rotary_dims": ROTARY,
            "per_replica_batch": args.batch,
            "dtype": "float32",
            "remat": "none",
        }
    )
    batch = {"obs": tokens[None, :, :-1], "target": tokens[None, :, 1:]}
    return lambda: float(network.train(batch)["loss"])


def theirs(args: argparse.Namespace, tokens: np.ndarray) -> Callable[[], float]:
    """Return a function that makes a step with torch transformers, and returns the loss."""
    import torch
    from transformers import GPTJConfig, GPTJForCausalLM

    layers, width, heads, vocabulary = SIZES[args.size]
    config = GPTJConfig(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=args.seq,
        rotary_dim=ROTARY,
        use_cache=False,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    model: Any = GPTJForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.1)
    obs, target = (torch.from_numpy(x.astype(np.int64)) for x in (tokens[:, :-1], tokens[:, 1:]))

    def step() -> float:
        logits = model(obs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def measure_one(args: argparse.Namespace) -> float:
    """Return the median seconds per step of the engine `args.one`."""
    vocabulary, shape = SIZES[args.size][-1], (args.batch, args.seq + 1)
    tokens = np.random.default_rng(0).integers(0, vocabulary, shape, np.uint32)
    step = (ours if args.one == "ours" else theirs)(args, tokens)
    step()
    times = []
    for _ in range(args.steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    args = parse_args()
    if args.one:
        print(json.dumps(measure_one(args)))
        return
    seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for engine, step_seconds in alternately(args.pairs):
        seconds[engine].append(step_seconds)
        print(f"{engine}: {step_seconds:.3f} s per step")
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["torch"], strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"{args.size}, {args.batch} x {args.seq}: speed over torch's {ratio:.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
