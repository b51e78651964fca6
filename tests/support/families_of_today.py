"""Random torch models of Hugging Face's families with gated layers, in awkward sizes."""

from typing import Any

import torch
import transformers

SEQ = 96
_COMMON = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": SEQ,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _rope(kind: str, base: float, **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": base, **values}


_LLAMA3 = _rope(
    "llama3",
    500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=24,
)
_YARN = _rope("yarn", 500.0, factor=4.0, original_max_position_embeddings=16)
_LINEAR = _rope("linear", 1000.0, factor=8.0)
# {name: (the model's class, the keys of its config)}; windows and bases are small, so that they
# matter within `SEQ` positions.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama, biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "rope_parameters": _LINEAR},
    ),
    "llama, yarn": ("Llama", {"rope_parameters": _YARN}),
    "llama, one key head": (
        "Llama",
        {"num_key_value_heads": 1, "hidden_size": 100, "num_attention_heads": 5},
    ),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 12}),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
        | {"tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 12.0, "logits_scaling": 0.5, "residual_multiplier": 0.22}
        | {"attention_multiplier": 0.15},
    ),
    "phi3": (
        "Phi3",
        {
            "sliding_window": 9,
            "rope_parameters": _rope("default", 1e4, partial_rotary_factor=0.5),
        },
    ),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}),
    "gemma3_text": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": _LINEAR,
                "sliding_attention": _rope("default", 100.0),
            },
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": _rope("default", 500.0),
            },
        },
    ),
    "nanochat": ("NanoChat", {}),
}


# Seeds with which no two tokens are almost equally likely in greedy answers; 0 for other cases.
SEEDS = {
    "llama, biases": 1,
    "mistral": 1,
    "qwen2": 1,
    "qwen3": 1,
    "smollm3": 1,
    "phi3": 2,
    "gemma": 1,
    "gemma2": 1,
    "gemma3_text": 1,
}


def torch_model(case: str, **changes: Any) -> Any:
    """Return a model of one of `CASES` in f32, with all parameters random.

    Args:
      changes: keys of its config that differ.
    """
    name, keys = CASES[case]
    config = getattr(transformers, f"{name}Config")(**(_COMMON | keys | changes))
    kind = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    network = kind(config).eval()
    network.set_attn_implementation("eager")  # the only one with caps on scores
    generator = torch.Generator().manual_seed(SEEDS.get(case, 0))
    with torch.no_grad():
        for path, values in network.named_parameters():
            noise = torch.randn(values.shape, generator=generator)
            start = float("norm" in path and "gemma" not in case)
            spread = 0.3 if values.ndim == 2 else 0.2
            # With others, a Gemma model would repeat one token: its embedding is scaled and tied.
            if "gemma" in case and values.shape[0] == _COMMON["vocab_size"]:
                spread = 0.1
            elif "gemma" in case and path == "model.norm.weight":
                spread = 5.0
            values.copy_(start + noise * spread)
    return network
