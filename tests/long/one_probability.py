"""Ask for the probabilities of the same tokens in many ways, and compare their bits.

`python -m tests.long.one_probability 1000` sends random requests to an engine, in random company:
prompts that begin alike, chunks, guesses, all sampling settings.  The logprobs of prompts and
answers must equal those of `network.score` on each of four meshes, and of `network.eval`.
`--default` does the same without `exact`, and prints the differences.
"""

import argparse
import queue
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.generation.sampling import SamplingOptions
from mesh_transformer.serving.engine import Engine, Progress, Request
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.transformer_shard import CausalTransformer

MESHES = [(1, 1), (1, 4), (2, 2), (2, 4)]  # dp and mp
MODEL: dict[str, Any] = {
    "block": "llama",
    "layers": 2,
    "d_model": 96,
    "n_heads": 8,
    "key_heads": 4,
    "sliding_window": 48,
    "n_vocab": 256,
    "seq": 768,
    "dtype": "float32",
    "virtual_mesh": [2, 4],
    "exact": True,
}
LENGTHS = 64, 160, 320, 576  # of most texts that are scored
UNPADDED = 0.02  # part of the texts that are scored at their own lengths
SECONDS = 600  # after which a request counts as hanging
Logprobs = dict[int, np.ndarray]  # those of each request's tokens, after its first one


def network_on(dp: int, mp: int, **changes: Any) -> CausalTransformer:
    """Return a network with random weights on a mesh of the first devices."""
    config = Config(**(MODEL | changes | {"cores_per_replica": mp, "tpu_size": dp * mp}))
    network = CausalTransformer(config, devices=jax.devices()[: dp * mp])
    network.init()
    return network


def texts(count: int, longest: int, seed: int) -> list[np.ndarray]:
    """Return random prompts; half of them begin as an earlier one."""
    rng = np.random.default_rng(seed)
    prompts: list[np.ndarray] = []
    for _ in range(count):
        prompt = rng.integers(0, MODEL["n_vocab"], rng.integers(1, longest + 1))
        if prompts and rng.random() < 0.5:
            other = prompts[rng.integers(len(prompts))]
            same = int(rng.integers(1, len(other) + 1))
            prompt = np.concatenate((other[:same], prompt))[:longest]
        prompts.append(prompt.astype(np.uint32))
    return prompts


def answered(
    network: CausalTransformer, prompts: list[np.ndarray], longest: int, seed: int, **options: Any
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield each prompt with its answer, and the logprobs of the tokens after the first one."""
    rng = np.random.default_rng(seed)
    engine = Engine(network, Metrics(4), rows=4, **options)
    engine.start()
    waiting = []
    try:
        for prompt in prompts:
            settings = SamplingOptions(
                temp=float(rng.choice([0.0, 0.7, 1.0])),
                top_p=float(rng.choice([0.5, 1.0])),
                top_k=int(rng.choice([0, 5])),
                repetition_penalty=float(rng.choice([1.0, 1.2])),
                seed=int(rng.integers(2**32)),
            )
            news: queue.Queue[Progress] = queue.Queue()
            length, is_read = int(rng.integers(1, longest + 1)), bool(rng.random() < 0.5)
            request = Request(
                prompt, length, settings, news.put, logprobs=True, score=is_read and len(prompt) > 1
            )
            engine.submit([request])
            waiting.append((prompt, news))
        for prompt, news in waiting:
            tokens, read, ended = [], None, False
            while not ended:
                progress = news.get(timeout=SECONDS)
                if progress.error is not None:
                    raise progress.error
                tokens, ended = [*tokens, *progress.tokens], progress.ended
                read = progress.prompt or read
            before = [np.nan] * (len(prompt) - 1)
            if read is not None:
                before = [token.logprob for token in read[1:]]
            own = [token.logprob for token in tokens]
            numbers = [token.number for token in tokens]
            text = np.concatenate((prompt, numbers)).astype(np.uint32)
            yield text, np.array([*before, *own], np.float32)
    finally:
        engine.close()


def scored(network: CausalTransformer, text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return `network.score` of a text beside random others, with or without its beginning.

    Random tokens follow most texts, up to one of few lengths, so that few programs compile.
    """
    longest = network.config.seq + 1
    length = len(text)
    if rng.random() > UNPADDED:
        length = min(next(size for size in (*LENGTHS, longest) if size >= length), longest)
    rows = rng.integers(0, MODEL["n_vocab"], (rng.integers(1, 4), length)).astype(np.uint32)
    at = rng.integers(len(rows))
    rows[at, : len(text)] = text
    first = int(rng.integers(0, len(text) - 1)) if rng.random() < 0.5 else 0
    if not first:
        return network.score(rows, 0).logprob[at, : len(text) - 1]
    end = network.score(rows[:, first:], 0, beginning=text[:first]).logprob[at]
    whole = np.concatenate((network.score(rows, 0).logprob[at, :first], end))
    return whole[: len(text) - 1]


def evaluated(network: CausalTransformer, text: np.ndarray) -> np.ndarray:
    """Return the logprobs by `network.eval`, which pads the text to the length of a sequence."""
    rows = np.zeros((network.batch_size, network.config.seq + 1), np.uint32)
    rows[-1, : len(text)] = text
    losses = network.eval({"obs": rows[:, :-1], "target": rows[:, 1:]})["all_loss"]
    return -losses[-1, : len(text) - 1]


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference where the first one is known; 0 only for equal bits."""
    known = ~np.isnan(one)
    if one[known].tobytes() == other[known].tobytes():
        return 0.0
    return max(float(np.abs(one - other)[known].max()), float(np.finfo(np.float32).tiny))


def differences(count: int, longest: int, answer: int, seed: int, **changes: Any) -> list[float]:
    """Ask for the probabilities of `count` random texts in all ways, on all meshes.

    Returns:
      The largest difference in each comparison.
    """
    rng = np.random.default_rng(seed)
    networks = [network_on(*mesh, **changes) for mesh in MESHES]
    results = []
    prompts = texts(count, longest, seed)
    parts = np.array_split(np.arange(count), len(networks))
    with tqdm(total=count, unit="text") as bar:
        for network, part in zip(networks, parts, strict=True):
            own = [prompts[number] for number in part]
            options = {"speculate": int(rng.integers(0, 4)), "chunk": int(rng.choice([16, 64]))}
            for text, logprobs in answered(network, own, answer, seed, **options):
                for other in networks:
                    results.append(difference(logprobs, scored(other, text, rng)))
                results.append(difference(logprobs, evaluated(network, text)))
                bar.update()
            # The programs of a thousand texts would have more memory maps than Linux allows.
            jax.clear_caches()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--default", action="store_true", help="do not set the config key exact")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    changes = {"exact": False} if args.default else {}
    results = np.array(differences(args.count, 512, 32, seed=0, **changes))
    print(f"{len(results)} comparisons, {np.count_nonzero(results)} with other bits")
    print(
        "largest differences (0, 50, 90, 99, 100 %):", np.percentile(results, [0, 50, 90, 99, 100])
    )


if __name__ == "__main__":
    main()
