"""Logits that transformers and torch compute, to verify conversions; nothing else uses torch."""

import importlib.util
import os

import numpy as np

from mesh_transformer.data.gguf_header import is_gguf


def is_installed() -> bool:
    """Return whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def logits(folder: str, tokens_BT: np.ndarray) -> np.ndarray:
    """Return the logits [B, T, V], computed in f32, of a local Hugging Face folder or GGUF file."""
    import torch
    import transformers

    options = {}
    if is_gguf(folder):
        folder, options["gguf_file"] = os.path.split(folder)
    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, **options
    ).eval()
    with torch.no_grad():
        return network(torch.tensor(tokens_BT)).logits.numpy()
