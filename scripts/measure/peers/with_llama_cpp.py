"""Decode greedily with llama.cpp, from the exported GGUF file."""

# pyright: reportMissingImports=false

import os

import numpy as np
from clock import Clock, read_task
from llama_cpp import Llama


def main() -> None:
    task = read_task()
    clock = Clock(task["began"])
    cores = len(os.sched_getaffinity(0))
    model = Llama(
        task["folder"] + "/model.gguf",
        n_ctx=task["config"]["seq"],
        n_threads=cores,
        n_threads_batch=cores,
        verbose=False,
    )
    prompt = np.load(task["tokens"])[0, : task["prompt"]].tolist()
    tokens: list[int] = []
    for _ in range(task["steps"] + 1):
        tokens = []
        for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True):
            tokens.append(token)
            if len(tokens) == task["new"]:
                break
        model.reset()
        clock.step_ended()
    clock.report("llama-cpp-python", tokens=tokens)


if __name__ == "__main__":
    main()
