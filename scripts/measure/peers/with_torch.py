"""Train the exported weights with torch and transformers' Llama."""

import numpy as np
import torch
from clock import Clock, read_task
from transformers import LlamaForCausalLM


def main() -> None:
    task = read_task()
    clock = Clock(task["began"])
    model = LlamaForCausalLM.from_pretrained(task["folder"] + "/hf", dtype=torch.float32)
    model.config.use_cache = False
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.1)
    tokens = torch.from_numpy(np.load(task["tokens"]))
    losses = []
    for _ in range(task["steps"] + 1):
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        clock.step_ended()
    clock.report("torch", "transformers", loss=losses[0])


if __name__ == "__main__":
    main()
