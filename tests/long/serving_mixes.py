"""Answers random mixes of requests with and without the engine's features, in fixed shapes.

Guesses are looked up, or those of a draft.

`python -m tests.long.serving_mixes --count 200` takes some minutes on 2 cores.  Every answer must
have the same tokens and logprobs, bit for bit.
"""

import argparse
import collections
import sys

from tqdm import tqdm

from mesh_transformer.config import Config
from tests.conftest import SMALL
from tests.support.mixes import Networks, compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="number of mixes (default 200)")
    parser.add_argument("--first", type=int, default=1000, help="seed of the first one")
    args = parser.parse_args()
    config = Config(**(SMALL | {"seq": 128, "n_vocab": 64}))
    networks = Networks(config, devices=1, adapters=2)
    seen: collections.Counter[str] = collections.Counter()
    different = total = 0
    for seed in tqdm(range(args.first, args.first + args.count), unit="mix"):
        features, wrong, count = compare(networks, seed)
        seen[str(features)] += 1
        different, total = different + wrong, total + count
        if wrong:
            tqdm.write(f"seed {seed}: {wrong} of {count} answers differ with {features}")
    for features, mixes in sorted(seen.items()):
        print(f"{mixes:4} mixes with {features}")
    print(f"{different} of {total} answers differ")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
