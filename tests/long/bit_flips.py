"""Flips bits in a checkpoint's files; checks that no damage goes unnoticed.

`python -m tests.long.bit_flips flips` and `... cost` take some minutes each.  The test suite does
not run them.
"""

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from tqdm import tqdm

from mesh_transformer.checkpoint import integrity
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError

SMALL = {
    "layers": 3,
    "d_model": 64,
    "n_heads": 4,
    "n_vocab": 512,
    "seq": 32,
    "pe_rotary_dims": 8,
    "dtype": "float32",
}
LARGE = SMALL | {"layers": 8, "d_model": 768, "n_heads": 12, "n_vocab": 8192}
LEAST = 64  # minimum bytes of an array that is searched for in the files


def leaves_of(network: CausalTransformer) -> dict[str, np.ndarray]:
    paths, _ = jax.tree_util.tree_flatten_with_path(network.state)
    return {
        "/".join(str(getattr(key, "key", key)) for key in path): np.asarray(leaf)
        for path, leaf in paths
    }


def array_spans(folder: Path, arrays: dict[str, np.ndarray]) -> list[tuple[Path, int, int, str]]:
    """Return where arrays lie in the files: file, first byte, end, and the array's name."""
    spans = []
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name, values in arrays.items():
        # Each layer is stored separately; small arrays are in the compressed directory.
        for part in (values, *(values if values.ndim > 1 else ())):
            content = part.tobytes()
            if len(content) < LEAST or len(set(content)) < 8:
                continue  # not distinctive enough, such as zeros
            # If the same bytes are in several places, a restore may not read all of them.
            if sum(whole.count(content) for whole in files.values()) > 1:
                continue
            for path, whole in files.items():
                if (begin := whole.find(content)) >= 0:
                    spans.append((path, begin, begin + len(content), name))
    return spans


def flips(arrays: int, others: int, seed: int) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        network = CausalTransformer(SMALL | {"seed": seed})
        # One step, so that the moments are not zero.
        tokens = np.random.default_rng(seed).integers(0, 512, (1, 1, 33))
        network.train({"obs": tokens[..., :-1], "target": tokens[..., 1:]})
        network.save(str(folder))
        network.close()
        expected = leaves_of(network)
        spans = array_spans(folder, expected)
        known = {leaf for *_, leaf in spans}
        print(f"{len(known)} of {len(expected)} leaves found in the files as they are in memory")
        plan: list[tuple[Path, int, str]] = []
        for path, begin, end, leaf in rng.choices(spans, k=arrays):
            plan.append((path, rng.randrange(begin, end), leaf))
        inside = {path: [(b, e) for p, b, e, _ in spans if p == path] for path, *_ in spans}
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        while len(plan) < arrays + others:
            path = rng.choice(files)
            at = rng.randrange(path.stat().st_size)
            if not any(begin <= at < end for begin, end in inside.get(path, [])):
                plan.append((path, at, ""))
        outcomes: Counter[tuple[str, str]] = Counter()
        for path, at, leaf in tqdm(plan):
            outcome = _restored(network, folder, path, at, 1 << rng.randrange(8), leaf, expected)
            outcomes["array" if leaf else "metadata", outcome.split(":")[0]] += 1
            if ":" in outcome:
                print(path.relative_to(folder), at, leaf, outcome)
        for (what, outcome), count in sorted(outcomes.items()):
            print(f"{what}: {outcome}: {count}")
        good = {("array", "named"), ("metadata", "named"), ("metadata", "equal")}
        assert set(outcomes) <= good


def _restored(
    network: CausalTransformer,
    folder: Path,
    path: Path,
    at: int,
    bit: int,
    leaf: str,
    expected: dict[str, np.ndarray],
) -> str:
    """Restore a checkpoint with a flipped bit; returns "named", "equal" or a description."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bit]))
    try:
        network.restore(str(folder))
    except InputError as error:
        name = leaf or path.name
        return "named" if name in str(error) else f"other words: {error}"
    except Exception as error:
        return f"traceback: {type(error).__name__} {error}"
    finally:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))
    actual = leaves_of(network)
    same = all(np.array_equal(actual[name], values) for name, values in expected.items())
    return "equal" if same else "WRONG: restored"


def cost(pairs: int) -> None:
    """Print the seconds of restores with and without verification, which alternate."""
    with tempfile.TemporaryDirectory() as name:
        network = CausalTransformer(LARGE)
        network.save(name)
        network.close()
        size = sum(values.nbytes for values in leaves_of(network).values())

        def seconds(unverified: Any) -> float:
            with unverified:
                began = time.perf_counter()
                assert network.restore(name) is not None
                jax.block_until_ready(network.state)
                return time.perf_counter() - began

        def without() -> Any:
            return mock.patch.object(integrity, "check_leaves", return_value=None)

        seconds(contextlib.nullcontext())  # compiles
        ratios = []
        for number in range(pairs):
            order = [contextlib.nullcontext, without][:: 1 if number % 2 else -1]
            times = {make: seconds(make()) for make in order}
            ratios.append(times[contextlib.nullcontext] / times[without])
            print(f"with {times[contextlib.nullcontext]:.3f} s, without {times[without]:.3f} s")
        print(f"{size / 1e6:.0f} MB: verified / not: median {statistics.median(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("flips", "cost"))
    parser.add_argument("--arrays", type=int, default=300, help="flips in arrays' bytes (300)")
    parser.add_argument("--others", type=int, default=100, help="flips elsewhere (100)")
    parser.add_argument("--pairs", type=int, default=9, help="of restores (9)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    args = parser.parse_args()
    if args.what == "flips":
        flips(args.arrays, args.others, args.seed)
    else:
        cost(args.pairs)


if __name__ == "__main__":
    main()
