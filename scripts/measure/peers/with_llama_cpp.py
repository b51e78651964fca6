"""Decode greedily with llama.cpp, from the exported GGUF file, in float32 throughout."""

# pyright: reportMissingImports=false

import os

import numpy as np
import xllamacpp
from clock import Clock, read_task


def main() -> None:
    task = read_task()
    clock = Clock(task["began"])
    params = xllamacpp.CommonParams()
    params.model.path = task["folder"] + "/model.gguf"
    params.n_ctx, params.n_parallel = task["config"]["seq"], 1
    params.cpuparams.n_threads = len(os.sched_getaffinity(0))
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    # Flash attention rounds: it chose another token where two differ by 4e-5 in their logits.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    prompt = np.load(task["tokens"])[0, : task["prompt"]].tolist()
    request = {"prompt": prompt, "n_predict": task["new"], "temperature": 0, "ignore_eos": True}
    request["cache_prompt"] = False
    for _ in range(task["steps"] + 1):
        server.handle_completions(request)
        clock.step_ended()
    answer = server.handle_completions(request | {"logprobs": 1})  # it holds the tokens' numbers
    tokens = [token["id"] for token in answer["choices"][0]["logprobs"]["content"]]
    clock.report("xllamacpp", tokens=tokens)


if __name__ == "__main__":
    main()
