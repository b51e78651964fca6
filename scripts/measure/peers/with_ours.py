"""Train or decode with this library; with the job "export", save the initial weights."""

from typing import Any

import jax
import numpy as np
from clock import Clock, read_task

from mesh_transformer.transformer_shard import CausalTransformer


def export(task: dict[str, Any]) -> None:
    """Save the weights that training begins with, and a tokenizer that llama.cpp can load."""
    from mesh_transformer.data.tokenizer import train_tokenizer

    train_tokenizer(["a small tokenizer, whose other tokens are unused"], 270).save_pretrained(
        task["folder"] + "/tokenizer"
    )
    changes = {"tokenizer": task["folder"] + "/tokenizer"}
    network = CausalTransformer(task["config"] | changes)
    network.save(task["folder"] + "/native")
    network.wait()


def train(task: dict[str, Any], clock: Clock) -> dict[str, Any]:
    network = CausalTransformer(task["config"])
    tokens = np.load(task["tokens"]).astype(np.uint32)
    batch = {"obs": tokens[None, :, :-1], "target": tokens[None, :, 1:]}
    losses = []
    for _ in range(task["steps"] + 1):
        losses.append(network.train(batch)["loss"])
        jax.block_until_ready(network.state)
        clock.step_ended()
    return {"loss": float(losses[0])}


def decode(task: dict[str, Any], clock: Clock) -> dict[str, Any]:
    network = CausalTransformer(task["config"], init=False)
    network.load(task["folder"] + "/native")
    prompt = np.load(task["tokens"]).astype(np.uint32)[:1, : task["prompt"]]
    tokens = np.zeros(0)
    for _ in range(task["steps"] + 1):
        greedy = {"temp": 0.0, "top_p": 1.0}
        tokens = network.generate(prompt, np.array([task["prompt"]]), task["new"], greedy)
        clock.step_ended()
    return {"tokens": np.asarray(tokens).ravel().tolist()}


def main() -> None:
    task = read_task()
    if task["job"] == "export":
        export(task)
    else:
        clock = Clock(task["began"])
        clock.report("jax", **(decode if task["job"] == "decode" else train)(task, clock))


if __name__ == "__main__":
    main()
