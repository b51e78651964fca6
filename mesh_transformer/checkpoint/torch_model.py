"""Logits that transformers and torch compute, to verify conversions; nothing else uses torch."""

import importlib.util

import numpy as np


def is_installed() -> bool:
    """Return whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def logits(folder: str, tokens_BT: np.ndarray) -> np.ndarray:
    """Return the logits [B, T, V] of the model in a local Hugging Face folder, computed in f32."""
    import torch
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    with torch.no_grad():
        return network(torch.tensor(tokens_BT)).logits.numpy()
