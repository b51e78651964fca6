"""Compare training with `int8_matmuls` with training without, on the Shakespeare text of data/.

For each seed, configs/tiny.json is trained on one device without int8_matmuls, and with all of its
names.  The script prints the last validation losses, and how far the gradients of each layer's
matrices are from the exact ones, by the model after training.
"""

import argparse
import statistics
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.config_checks import MATMULS
from mesh_transformer.data.loader import open_train_set
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model.loss import train_loss
from mesh_transformer.training import loop
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import run_script

CONFIG = "configs/tiny.json"
KINDS = {"exact": [], "8 bits": list(MATMULS)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--steps", type=int, default=300, help="updates per run (default 300)")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 (default) or float32")
    return parser.parse_args()


def trained(config: Config) -> tuple[CausalTransformer, float]:
    """Train a new network; return it and its last validation loss."""
    rows: list[dict[str, Any]] = []
    network = CausalTransformer(config, devices=jax.devices()[:1])
    with tempfile.TemporaryDirectory() as folder:
        loop.train(network, folder, on_row=rows.append, temporary=True)
    name = next(name for name in rows[-1] if name.startswith("val/loss"))
    return network, float(rows[-1][name])


def gradient_errors(network: CausalTransformer, batch: dict[str, Any]) -> dict[str, list[float]]:
    """Return the relative errors of the gradients of each matrix, by layer, with all in 8 bits."""
    assert network.state is not None
    params, gradients = network.state["params"], []
    for names in KINDS.values():
        config = network.config.replace(int8_matmuls=names, dtype="float32")

        def loss(params: Any, config: Config = config) -> jax.Array:
            return train_loss(params, batch["obs"][0], batch["target"][0], config, Auto())[0]

        gradients.append(jax.jit(jax.grad(loss))(params)["layers"])

    def error(exact: jax.Array, rounded: jax.Array) -> list[float]:
        axes = tuple(range(1, exact.ndim))
        distance = jnp.sqrt(jnp.sum((rounded - exact) ** 2, axis=axes))
        return (distance / jnp.sqrt(jnp.sum(exact**2, axis=axes))).tolist()

    return {
        f"{module}/{name}": error(x, gradients[1][module][name])
        for module, own in gradients[0].items()
        for name, x in own.items()
        if x.ndim > 2
    }


def main() -> int:
    args = parse_args()
    config = Config.load(CONFIG).replace(
        dtype=args.dtype,
        tpu_size=1,
        cores_per_replica=1,
        total_steps=args.steps,
        anneal_steps=args.steps,
        val_every=args.steps,
        ckpt_every=args.steps,
        val_batches=20,
    )
    losses: dict[str, list[float]] = {name: [] for name in KINDS}
    runs = [(seed, name) for seed in range(args.seeds) for name in KINDS]
    network = None
    for seed, name in tqdm(runs, unit="run"):
        network, loss = trained(config.replace(seed=seed, int8_matmuls=KINDS[name]))
        losses[name].append(loss)
        tqdm.write(f"seed {seed}, {name}: validation loss {loss:.4f}")
    ratios = [b / a for a, b in zip(*losses.values(), strict=True)]
    print(f"loss in 8 bits over the exact one: {', '.join(f'{ratio:.4f}' for ratio in ratios)}")
    print(f"median {statistics.median(ratios):.4f}")
    assert network is not None
    records = open_train_set(config, network.batch_size)
    errors = gradient_errors(network, records.get_samples())
    records.close()
    print("relative error of the gradients, by layer:")
    for name, own in errors.items():
        print(f"  {name}: {' '.join(f'{value:.3f}' for value in own)}")
    return 0


if __name__ == "__main__":
    run_script(main)
