"""One of several hosts, as a plain process that makes the calls which `multihost` requests.

Its argument is a JSON file with `rank`, the arguments of `NetworkRunner.start`, the `batches` (an
.npz file with all rows), the `calls` (names with arguments) and the path for the results.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mesh_transformer.mesh.jax_versions import wrap_compilation
from mesh_transformer.network import Train
from mesh_transformer.pod.runner import MeshPlace, NetworkRunner
from mesh_transformer.training.loop import IN_FLIGHT
from tests.support.multihost import STEPS, replica_rows

SECONDS_ARE = "seconds: "  # marks the number on standard output, where libraries write too


def timed_block(steps: int, samples: list[Any], runner: NetworkRunner) -> float:
    """Return the seconds that `steps` steps take, with metrics read as in `training.loop`."""
    began, read = time.perf_counter(), 0
    for step in range(steps):
        runner.run(Train(samples[step % len(samples)]))
        if step >= IN_FLIGHT:
            runner.metrics()
            read += 1
    for _ in range(read, steps):
        runner.metrics()
    return time.perf_counter() - began


def delay_next_compilation(seconds: float) -> None:
    """Let this process start `seconds` later to compile the next program over all processes."""

    def wrap(compile_program: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(backend: Any, module: Any, devices: Any, *args: Any, **kwargs: Any) -> Any:
            if len({device.process_index for device in devices.flat}) > 1:
                time.sleep(seconds)
                wrap_compilation(lambda _: compile_program)
            return compile_program(backend, module, devices, *args, **kwargs)

        return delayed

    wrap_compilation(wrap)


def call(
    runner: NetworkRunner, facts: dict, batches: Any, name: str, argument: Any
) -> dict[str, Any]:
    """Make one call and return its results by name, for the rows of this process."""

    network = runner.network
    assert network is not None

    def mine(key: str, axis: int = 0) -> np.ndarray:
        return replica_rows(batches[key], facts["replicas"], facts["dp"], axis)

    if name == "train":
        sample = {key: mine(f"train_{key}_{argument}", axis=1) for key in ("obs", "target")}
        runner.run(Train(sample))
        measured = runner.metrics()
        result = {"step": measured.step} | measured.numbers
        return {name: np.asarray(value) for name, value in result.items()}
    if name == "eval":
        return network.eval({key: mine(f"eval_{key}") for key in ("obs", "target")})
    if name == "score":
        return network.score(mine("eval_obs"), argument)._asdict()
    if name == "generate":
        options = {"seed": mine("seed"), "top_p": mine("top_p")}
        arguments = (mine("ctx"), mine("length"), argument, options)
        return {"tokens": network.generate(*arguments)}
    if name == "blocks":
        samples = [
            {key: mine(f"train_{key}_{step}", axis=1) for key in ("obs", "target")}
            for step in range(STEPS)
        ]
        for _ in sys.stdin:  # one line per block
            seconds = timed_block(argument, samples, runner)
            print(f"{SECONDS_ARE}{seconds}", flush=True)
        return {}
    if name == "delay_compilation":
        if runner.rank > 0:
            delay_next_compilation(argument)
        return {}
    if name == "train_and_save":
        folder, last = argument
        while (step := network.step) < last:
            call(runner, facts, batches, "train", step % STEPS)
            network.save(folder, {"saved after": step + 1})
        network.wait()
        return {}
    result = getattr(network, name)(*argument)
    return {"aux": np.asarray(json.dumps((network.step, result)))} if name == "restore" else {}


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        spec = json.load(file)
    runner = NetworkRunner(spec["rank"])
    facts = runner.start(spec["config"], MeshPlace(**spec["start"]))
    batches = np.load(spec["batches"])
    results = {"replicas": np.asarray(facts["replicas"])}
    for number, (name, argument) in enumerate(spec["calls"]):
        for key, value in call(runner, facts, batches, name, argument).items():
            results[f"{number}_{key}"] = value
    runner.close()
    np.savez(spec["results"], **results)


if __name__ == "__main__":
    main()
