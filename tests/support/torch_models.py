"""Random torch models of each of Hugging Face's model types that the library supports."""

from typing import Any

import torch
from transformers import (
    CodeGenConfig,
    CodeGenForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

SEQ = 24
SEQUENTIAL = "gpt_neox, sequential"  # without use_parallel_residual
FAMILIES = ("gptj", "codegen", "gpt2", "gpt_neox", SEQUENTIAL)


def _config(
    family: str, layers: int, heads: int, head: int, rotary: int, vocab: int, seq: int
) -> Any:
    common = {"vocab_size": vocab, "bos_token_id": None, "eos_token_id": None}
    sizes = {"n_positions": seq, "n_embd": heads * head, "n_layer": layers, "n_head": heads}
    if family in ("gpt_neox", SEQUENTIAL):
        return GPTNeoXConfig(
            hidden_size=heads * head,
            intermediate_size=4 * heads * head,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=seq,
            use_parallel_residual=family != SEQUENTIAL,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000,
                "partial_rotary_factor": rotary / head,
            },
            **common,
        )
    if family == "gpt2":
        no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        return GPT2Config(**sizes, **no_dropout, **common)
    kind = {"gptj": GPTJConfig, "codegen": CodeGenConfig}[family]
    return kind(rotary_dim=rotary, **sizes, **common)


def torch_model(
    family: str = "gptj",
    layers: int = 2,
    heads: int = 4,
    head: int = 16,
    rotary: int = 8,
    vocab: int = 50,
    seq: int = SEQ,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Return a torch model with all parameters random, including norms and biases.

    The scales keep the logits in the tens, so that rounding in f32 stays well below 1e-4.
    """
    kind = {
        "gptj": GPTJForCausalLM,
        "codegen": CodeGenForCausalLM,
        "gpt2": GPT2LMHeadModel,
        "gpt_neox": GPTNeoXForCausalLM,
        SEQUENTIAL: GPTNeoXForCausalLM,
    }[family]
    network = kind(_config(family, layers, heads, head, rotary, vocab, seq)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in network.named_parameters():
            noise = torch.randn(values.shape, generator=generator)
            is_scale = any(norm in name for norm in ("ln_", "layernorm", "layer_norm"))
            start = float(is_scale and "weight" in name)
            scale = 0.2 if values.ndim == 1 else (heads * head) ** -0.5
            if "wte" in name or "embed_in" in name:
                scale = 0.3 if family == "gpt2" else 1.0  # GPT-2's is the output head, too
            values.copy_(start + noise * scale)
    return network.to(dtype)
