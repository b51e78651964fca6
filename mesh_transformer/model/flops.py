"""Parameter counts, FLOPs per token, and utilisation (MFU and HFU).

The 6N rule is from Kaplan et al. 2020: 2N FLOPs forward and 4N backward, 2N of them for the
gradients of the weights.  The attention term, MFU and HFU follow Chowdhery et al. 2022 (PaLM),
appendix B.  In formulas L is the number of layers, H heads, K head size and T sequence length.
"""

import math

import jax

from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import is_declaration
from mesh_transformer.model import gptj
from mesh_transformer.model.attention import block_length


def matmul_params(config: Config) -> int:
    """Return the number of entries of all weight matrices: layers, embedding and output head.

    The embedding counts for comparability with the original, which computes it as a one-hot
    matmul.  Here it is a lookup, so 3 percent of GPT-J-6B's 6N is work that is not done.
    """
    embedding_and_head = 2 * config.n_vocab * config.d_model
    return config.layers * _layer_matrices(config) + embedding_and_head


def n_params(config: Config) -> int:
    """Return the number of parameters, without adapters.

    Biases that the original copies to every shard count once.
    """
    declared = gptj.declarations(config.merged())
    return sum(math.prod(d.shape) for d in jax.tree.leaves(declared, is_leaf=is_declaration))


def flops_per_token(config: Config) -> int:
    """Return 6N: forward and backward FLOPs of one token without attention, N = `matmul_params`.

    With `lora_rank` it is 4N, because frozen weights have no gradient; the FLOPs of the adapters
    themselves are left out.
    """
    return (4 if config.lora_rank else 6) * matmul_params(config)


def palm_flops_per_token(config: Config) -> int:
    """Return 6N + 12 L H K T, which includes attention as PaLM counts it.

    The causal mask does not halve the attention term, and recomputation is not counted.
    """
    attention = config.layers * config.n_heads * config.d_head * config.seq
    return flops_per_token(config) + 12 * attention


def hardware_flops_per_token(config: Config, attention: str = "xla") -> int:
    """Return the FLOPs per token that a training step executes, recomputation included.

    The embedding is a lookup and does not count.  What is recomputed depends on `remat`:

    * full: the forward pass of a layer, except its last matmuls, whose outputs no gradient needs.
    * dots: the two matmuls of attention; the outputs of all others are saved.
    * none: nothing.

    Logits that are computed in chunks are computed twice whatever `remat` is.

    Args:
      attention: the attention backend, as returned by `attention_backend`.
    """
    embedding = config.n_vocab * config.d_model
    matmuls = flops_per_token(config) // matmul_params(config) * (matmul_params(config) - embedding)
    if config.remat == "full":
        outputs = (config.n_heads * config.d_head + config.d_ff) * config.d_model
        matmuls += 2 * config.layers * (_layer_matrices(config) - outputs)
    if config.seq > config.loss_chunk:
        matmuls += 2 * config.n_vocab * config.d_model
    return matmuls + _attention_flops_per_token(config, attention)


def _attention_flops_per_token(config: Config, attention: str) -> int:
    """Return the FLOPs of attention: 2 matmuls forward, 4 backward and 2 recomputed with `remat`.

    Kernels do not save the scores, and always recompute them once more; so does `blocks`, except
    with `remat` none.
    """
    scores_saved = attention == "xla" or (attention == "blocks" and config.remat == "none")
    products = 6 + 2 * (config.remat != "none") + (not scores_saved)
    width = config.layers * config.n_heads * config.d_head
    return products * 2 * width * attended_pairs(config, attention) // config.seq


def attended_pairs(config: Config, attention: str) -> int:
    """Return the query-key pairs per sequence that one attention matmul of one head computes.

    `xla` computes all pairs, `blocks` each block's queries with all the keys it reads.  For kernels
    only the pairs that the mask leaves visible count; the masked pairs that they also compute, in
    partly visible tiles, do not.
    """
    length, window = config.seq, min(config.window, config.seq)
    if attention == "xla":
        return length**2
    if attention != "blocks":
        return window * length - window * (window - 1) // 2
    block = block_length(length)
    ends = [min(begin + block, length) for begin in range(0, length, block)]
    begins = [0, *ends[:-1]]
    return sum(
        (end - begin) * (end - max(0, begin - window + 1))
        for begin, end in zip(begins, ends, strict=True)
    )


def decode_flops_per_token(config: Config) -> int:
    """Return the forward FLOPs of one token that attends to `seq` positions.

    The embedding is a lookup and does not count.
    """
    matrices = matmul_params(config) - config.n_vocab * config.d_model
    return 2 * matrices + 4 * config.layers * config.n_heads * config.d_head * config.seq


def mfu(config: Config, tokens_per_sec: float, peak: float) -> float:
    """Return model FLOPs utilisation, 0 to 1; `peak` is the FLOP/s of all devices together."""
    return tokens_per_sec * palm_flops_per_token(config) / peak


def hfu(config: Config, tokens_per_sec: float, peak: float, attention: str = "xla") -> float:
    """Return hardware FLOPs utilisation, 0 to 1, based on `hardware_flops_per_token`."""
    return tokens_per_sec * hardware_flops_per_token(config, attention) / peak


def _layer_matrices(config: Config) -> int:
    attention = config.n_heads * config.d_head
    # geglu projects to twice d_ff: the gate and the value.
    halves = 1 if config.block == "gptj" else 2
    inputs = config.d_model * (3 * attention + halves * config.d_ff)
    outputs = (attention + config.d_ff) * config.d_model
    return inputs + outputs
