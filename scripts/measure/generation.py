"""Compare the speed of generation with torch transformers' `generate` on this machine.

Both libraries decode greedily with a GPT-J of 12 layers and width 768 that has random weights.
They run in alternating processes.  The script prints the median and the range of the ratio of their
speeds.  It also prints this library's throughput as a fraction of the limit that the memory
bandwidth sets, given the bytes that each decoding step must read.

With --dtype bfloat16, this library still uses float32, its default on CPUs.  With --dtype int8 or
int4, this library's weights have 8 or 4 bits, and torch is measured in bfloat16, because it has no
equivalent.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

LAYERS, WIDTH, HEADS, VOCABULARY, WINDOW = 12, 768, 12, 50400, 2048
ROTARY = 32
ENGINES = ("ours", "torch")
BITS = {"int8": 8, "int4": 4}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8], help="batch sizes (default 1 8)"
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens per prompt (default 128)")
    parser.add_argument("--new", type=int, default=64, help="generated tokens (default 64)")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of processes (default 3)")
    parser.add_argument(
        "--runs", type=int, default=5, help="runs per process, of which the best counts (default 5)"
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", *BITS),
        help="type of the weights (default float32)",
    )
    parser.add_argument(
        "--one", choices=ENGINES, help="engine to measure in this process, printing JSON"
    )
    return parser.parse_args()


def ours(args: argparse.Namespace, batch: int) -> Callable[[], np.ndarray]:
    """Return a function that generates one batch of texts with this library."""
    from mesh_transformer.transformer_shard import CausalTransformer

    network = CausalTransformer(
        {
            "layers": LAYERS,
            "d_model": WIDTH,
            "n_heads": HEADS,
            "n_vocab": VOCABULARY,
            "seq": WINDOW,
            "pe_rotary_dims": ROTARY,
            "dtype": "float32" if args.dtype == "float32" else "bfloat16",
            "weight_bits": BITS.get(args.dtype),
        }
    )
    prompts = np.ones((batch, args.prompt), np.uint32)
    lengths = np.full(batch, args.prompt)
    return lambda: network.generate(prompts, lengths, args.new, {"temp": 0.0, "top_p": 1.0})


def theirs(args: argparse.Namespace, batch: int) -> Callable[[], np.ndarray]:
    """Return a function that generates one batch of texts with torch transformers."""
    import torch
    from transformers import GPTJConfig, GPTJForCausalLM

    config = GPTJConfig(
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=HEADS,
        vocab_size=VOCABULARY,
        n_positions=WINDOW,
        rotary_dim=ROTARY,
        use_cache=True,
    )
    dtype = torch.float32 if args.dtype == "float32" else torch.bfloat16
    model: Any = GPTJForCausalLM(config)
    model = model.to(dtype).eval()
    prompts = torch.ones((batch, args.prompt), dtype=torch.long)

    def generate() -> np.ndarray:
        with torch.inference_mode():
            return model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=args.new,
                min_new_tokens=args.new,
                do_sample=False,
                pad_token_id=0,
            ).numpy()

    return generate


def measure_one(args: argparse.Namespace) -> dict[str, float]:
    """Measure the engine `args.one`.

    Returns:
      For each batch size N, the tokens per second under the key "N", and the seconds that the first
      call took under the key "first_N".
    """
    results = {}
    for batch in args.batch:
        generate = (ours if args.one == "ours" else theirs)(args, batch)
        start = time.perf_counter()
        generate()
        results[f"first_{batch}"] = time.perf_counter() - start
        times = []
        for _ in range(args.runs):
            start = time.perf_counter()
            generate()
            times.append(time.perf_counter() - start)
        results[str(batch)] = batch * args.new / min(times)
    return results


def bytes_read(args: argparse.Namespace, batch: int) -> int:
    """Return the bytes that this library reads per decoding step on average.

    It reads all weights and the attention cache of each batch row.
    """
    layers, head = LAYERS * 12 * WIDTH**2, WIDTH * VOCABULARY
    # In 4 bits, 64 weights share a scale of 16 bits, and the head has 8 bits.
    weights = {"int8": layers + head, "int4": layers * (4 + 16 / 64) / 8 + head}
    cache = 2 * LAYERS * WIDTH * batch * (args.prompt + args.new / 2)
    return int(weights.get(args.dtype, 4 * (layers + head)) + 4 * cache)


def alternately(pairs: int) -> Iterator[tuple[str, Any]]:
    """Run this script with `--one` for each engine in turn; yield (engine, the value printed)."""
    for engine in ENGINES * pairs:
        command = [sys.executable, *sys.argv, "--one", engine]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        yield engine, json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    args = parse_args()
    if args.one:
        print(json.dumps(measure_one(args)))
        return
    results: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    for engine, result in alternately(args.pairs):
        results[engine].append(result)
        print(engine, {key: round(value, 1) for key, value in result.items()})

    from mesh_transformer.mesh.accelerators import hardware

    bandwidth = hardware("cpu").hbm / 1e9
    print(f"memory bandwidth: {bandwidth:.1f} GB/s (copying)")
    for batch in args.batch:
        our_rates, torch_rates = (
            [run[str(batch)] for run in results[engine]] for engine in ENGINES
        )
        ratios = [a / b for a, b in zip(our_rates, torch_rates, strict=True)]
        limit = batch * bandwidth * 1e9 / bytes_read(args, batch)
        print(
            f"batch {batch}, {args.dtype}: ours {statistics.median(our_rates):.1f} tokens/s, torch "
            f"{statistics.median(torch_rates):.1f}, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}), {max(our_rates) / limit:.2f} of the "
            "bandwidth limit"
        )


if __name__ == "__main__":
    main()
