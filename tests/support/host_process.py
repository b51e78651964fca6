"""One host of several, as a plain process: does what `multihost` wrote down, writes the results.

Its argument is a file of JSON: `rank`, the arguments of `NetworkRunner.start`, the `batches`
(an .npz of all rows), `calls` (names, with arguments) and where the results go.
"""

import json
import sys
import time
from typing import Any

import numpy as np

from mesh_transformer.mesh.placement import share
from mesh_transformer.pod.runner import FORWARDED, NetworkRunner
from mesh_transformer.training.loop import IN_FLIGHT
from tests.support.multihost import STEPS

SECONDS_ARE = "seconds: "  # before a number on standard output, where libraries write too


def timed_block(steps: int, samples: list[Any], runner: NetworkRunner) -> float:
    """Seconds that so many steps take, read as `training` does."""
    began, read = time.perf_counter(), 0
    for step in range(steps):
        runner.train(samples[step % len(samples)])
        if step >= IN_FLIGHT:
            runner.metrics()
            read += 1
    for _ in range(read, steps):
        runner.metrics()
    return time.perf_counter() - began


def call(runner: NetworkRunner, facts: dict, batches: Any, name: str, given: Any) -> dict[str, Any]:
    """One call's results, by name; rows are those of this process."""

    def mine(key: str, axis: int = 0) -> np.ndarray:
        return share(batches[key], facts["replicas"], facts["dp"], axis)

    if name == "train":
        runner.train({key: mine(f"train_{key}_{given}", axis=1) for key in ("obs", "target")})
        told = runner.metrics()
        found = {"step": told.step} | told.numbers
        return {name: np.asarray(each) for name, each in found.items()}
    if name == "eval":
        return runner.eval({key: mine(f"eval_{key}") for key in ("obs", "target")})
    if name == "score":
        return runner.forward("score", mine("eval_obs"), given)._asdict()
    if name == "generate":
        options = {"seed": mine("seed"), "top_p": mine("top_p")}
        arguments = (mine("ctx"), mine("length"), given, options)
        return {"tokens": runner.forward("generate", *arguments)}
    if name == "blocks":
        samples = [
            {key: mine(f"train_{key}_{step}", axis=1) for key in ("obs", "target")}
            for step in range(STEPS)
        ]
        for _ in sys.stdin:  # a line for each block
            seconds = timed_block(given, samples, runner)
            print(f"{SECONDS_ARE}{seconds}", flush=True)
        return {}
    if name == "train_and_save":
        folder, last = given
        while (step := runner.network.step) < last:  # type: ignore[union-attr]
            call(runner, facts, batches, "train", step % STEPS)
            runner.forward("save", folder, {"saved after": step + 1})
        runner.forward("wait")
        return {}
    found = runner.forward(name, *given) if name in FORWARDED else getattr(runner, name)(*given)
    return {"aux": np.asarray(json.dumps(found))} if name == "restore" else {}


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        spec = json.load(file)
    runner = NetworkRunner(spec["rank"])
    facts = runner.start(spec["config"], **spec["start"])
    batches = np.load(spec["batches"])
    results = {"replicas": np.asarray(facts["replicas"])}
    for number, (name, given) in enumerate(spec["calls"]):
        for key, value in call(runner, facts, batches, name, given).items():
            results[f"{number}_{key}"] = value
    runner.close()
    np.savez(spec["results"], **results)


if __name__ == "__main__":
    main()
