"""Trains on several meshes and processes with one virtual mesh, and compares all bits.

`python -m tests.long.same_bits meshes` trains 20 steps on a virtual 8x8 mesh, in f32 and bf16, on
meshes from one device to eight and with 1, 2 and 4 processes (about 10 minutes).  With `random`,
it trains random configs on two random meshes each; `--seed` chooses others.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mesh_transformer.config import Config
from mesh_transformer.families import BLOCKS
from mesh_transformer.network import Train
from mesh_transformer.pod.runner import MeshPlace, NetworkRunner
from mesh_transformer.training.step import StateLayout
from mesh_transformer.util import InputError
from tests.support.multihost import free_port, replica_rows

ROOT = Path(__file__).parents[2]
SMALL = {
    "layers": 2,
    "d_model": 64,
    "n_heads": 8,
    "n_vocab": 128,
    "seq": 16,
    "pe_rotary_dims": 4,
    "dtype": "float32",
    "lr": 1e-2,
    "warmup_steps": 2,
    "anneal_steps": 20,
    "gradient_accumulation_steps": 2,
    "clip_norm": 0.5,
    "weight_decay": 0.1,
    "per_replica_batch": 1,
}
MESHES = [(1, 1), (1, 8), (2, 4), (4, 2), (8, 1)]
CHOICES = {
    "block": list(BLOCKS),
    "norm": ["layernorm", "rmsnorm", "scalenorm", "layernorm-nobias", "rmsnorm-bias"],
    "pe": ["rotary", "fixed", "t5"],
    "dtype": ["float32", "bfloat16"],
    "zero": [0, 1, 3],
    "remat": ["full", "none"],
    "optimizer": ["adam", "lion", "sgd"],
    "dropout_residual": [0.0, 0.1],
    "shard_activations": [False, True],
}


def work(task: dict[str, Any]) -> None:
    """Train as one process of a mesh; process 0 prints the hashes of the metrics and the state."""
    config, count = Config(**task["config"]), task["devices"]
    runner = NetworkRunner(task["rank"])
    runner.start(
        config.as_dict(),
        MeshPlace(
            address="127.0.0.1",
            coordinator=task["coordinator"],
            processes=task["processes"],
            heartbeat=60,
            devices=count // task["processes"],
        ),
    )
    assert jax.device_count() == count
    network = runner.network
    assert network is not None
    network.init()
    hashes = {}
    for number in range(task["steps"]):
        rng = np.random.default_rng(number)
        shape = (config.gradient_accumulation_steps, network.batch_size, config.seq + 1)
        tokens = rng.integers(0, config.n_vocab, shape).astype(np.uint32)
        rows = replica_rows(tokens, network.replicas, network.dp, axis=1)
        runner.run(Train({"obs": rows[..., :-1], "target": rows[..., 1:]}))
        hashes[f"step {number}"] = repr(runner.metrics().numbers)
    state = StateLayout(network.config, network.mesh).unpadded(network.state)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        whole = np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
        assert np.isfinite(whole.astype(np.float32)).all(), path
        hashes[jax.tree_util.keystr(path)] = hashlib.sha256(whole.tobytes()).hexdigest()
    if task["rank"] == 0:
        Path(task["results"]).write_text(json.dumps(hashes))


def trained(
    config: dict[str, Any], mesh: tuple[int, int], count: int, processes: int = 1
) -> dict[str, str]:
    """Train `count` steps on a mesh, in new processes; return the hashes."""
    devices = mesh[0] * mesh[1]
    with tempfile.TemporaryDirectory() as folder:
        task = {
            "config": config | {"cores_per_replica": mesh[1], "tpu_size": devices},
            "devices": devices,
            "coordinator": f"127.0.0.1:{free_port()}",
            "processes": processes,
            "steps": count,
            "results": f"{folder}/results.json",
        }
        started = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.long.same_bits",
                    "work",
                    json.dumps(task | {"rank": rank}),
                ],
                cwd=ROOT,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                stderr=subprocess.PIPE,
            )
            for rank in range(processes)
        ]
        for process in started:
            _, errors = process.communicate()
            assert process.returncode == 0, errors.decode()
        return json.loads(Path(task["results"]).read_text())


def compare(expected: dict[str, str], actual: dict[str, str], what: str) -> int:
    """Print how many entries differ, and return that number."""
    assert expected.keys() == actual.keys()
    different = [name for name in expected if expected[name] != actual[name]]
    print(f"{what}: {len(different)} of {len(expected)} differ {different[:3] or ''}", flush=True)
    return len(different)


def meshes() -> int:
    differences = 0
    for dtype in ("float32", "bfloat16"):
        config = SMALL | {"virtual_mesh": [8, 8], "dtype": dtype}
        expected = trained(config, MESHES[0], 20)
        print(f"{dtype}, 1x1, last step: {expected['step 19']}", flush=True)
        runs = [(mesh, 1) for mesh in MESHES[1:]] + [((2, 4), 2), ((2, 4), 4), ((1, 8), 4)]
        for mesh, processes in runs:
            what = f"{dtype}, {mesh[0]}x{mesh[1]}, {processes} processes"
            differences += compare(expected, trained(config, mesh, 20, processes), what)
    return differences


def random_config(rng: np.random.Generator) -> dict[str, Any]:
    """Return a random config that is valid on a virtual mesh."""
    while True:
        heads = int(rng.integers(2, 10))
        config = SMALL | {key: rng.choice(values).item() for key, values in CHOICES.items()}
        config |= {
            "n_heads": heads,
            "d_model": heads * 8 * int(rng.integers(1, 3)),
            "n_vocab": int(rng.integers(100, 200)),
            "per_replica_batch": int(rng.integers(1, 3)),
            "virtual_mesh": [2 ** int(rng.integers(0, 3)), 2 ** int(rng.integers(0, 4))],
        }
        try:
            for mesh in dividing(config["virtual_mesh"]):
                changes = {"cores_per_replica": mesh[1], "tpu_size": mesh[0] * mesh[1]}
                checked = Config(**config | changes)
                StateLayout(checked, jax.sharding.AbstractMesh(mesh, ("dp", "mp")))
        except InputError:
            continue
        if len(dividing(config["virtual_mesh"])) > 1:
            return config


def dividing(virtual: list[int]) -> list[tuple[int, int]]:
    """Return the meshes of at most 8 devices that divide a virtual mesh."""
    sizes = (1, 2, 4, 8)
    return [
        (dp, mp)
        for dp in sizes
        for mp in sizes
        if dp * mp <= 8 and virtual[0] % dp == 0 == virtual[1] % mp
    ]


def random(seed: int, count: int) -> int:
    rng, differences = np.random.default_rng(seed), 0
    for number in range(count):
        config = random_config(rng)
        changed = {key: value for key, value in config.items() if SMALL.get(key) != value}
        print(f"{number}: {changed}", flush=True)
        options = dividing(config["virtual_mesh"])
        first, second = (options[i] for i in rng.choice(len(options), 2, replace=False))
        expected, actual = (trained(config, mesh, 5) for mesh in (first, second))
        differences += compare(expected, actual, f"{number}: {first} and {second}")
    return differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["meshes", "random", "work"])
    parser.add_argument("task", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10, help="number of random configs")
    args = parser.parse_args()
    if args.what == "work":
        work(json.loads(args.task))
        return 0
    differences = meshes() if args.what == "meshes" else random(args.seed, args.count)
    print(f"{differences} differences")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
