"""How much a model computes per token, and how much a device can: FLOPs, MFU, HFU, peaks.

Formulas: 6N is Kaplan et al. 2020 (2N forward, 4N backward, half of it for the weights' own
gradients); the attention term, MFU and HFU are Chowdhery et al. 2022 (PaLM), appendix B.
"""

from mesh_transformer.config import Config
from mesh_transformer.model.attention import block_length

T5_BUCKETS = 32  # relative distances that pe=t5 tells apart


def matmul_params(config: Config) -> int:
    """Entries of the weight matrices: every layer's, the embedding's and the head's.

    The embedding counts so that figures compare with the original's, which computes it as a
    one-hot matmul; here it is a lookup, and 3 percent of GPT-J-6B's 6N is work nobody does.
    """
    embedding_and_head = 2 * config.n_vocab * config.d_model
    return config.layers * _layer_matrices(config) + embedding_and_head


def n_params(config: Config) -> int:
    """The model's parameters, each once: a bias the original copies to every shard counts once.

    Adapters do not count.
    """
    width, vocabulary = config.d_model, config.n_vocab
    if config.block == "gptj":
        layer_biases = config.d_ff + width
    else:
        layer_biases = 3 * config.n_heads * config.d_head + 2 * config.d_ff + width
    norm = _norm_params(config)
    positions = {
        "rotary": 0,
        "fixed": config.seq * width,
        "t5": config.n_heads * T5_BUCKETS,
    }[config.pe]
    biases = config.layers * layer_biases + width + vocabulary
    return matmul_params(config) + biases + (config.layers + 1) * norm + positions


def flops_per_token(config: Config) -> int:
    """6N: forward and backward of one token, N being `matmul_params`; attention left out.

    With `lora_rank` 4N: frozen weights have no gradient.  Adapters' own work is left out too.
    """
    return (4 if config.lora_rank else 6) * matmul_params(config)


def palm_flops_per_token(config: Config) -> int:
    """6N + 12 L H K T: with the attention over the whole sequence, as PaLM counts (no halving
    for the causal mask, no recomputation)."""
    attention = config.layers * config.n_heads * config.d_head * config.seq
    return flops_per_token(config) + 12 * attention


def causal_flops_per_token(config: Config) -> int:
    """6N + 6 L H K T: half the attention, as a causal mask leaves it."""
    return (flops_per_token(config) + palm_flops_per_token(config)) // 2


def hardware_flops_per_token(config: Config, attention: str = "xla") -> int:
    """What a training step multiplies: the embedding is a lookup, and `remat` computes again.

    full: a layer's forward pass, less its last matmuls, whose outputs no gradient needs; dots:
    the two products of attention, all others being kept; none: nothing.  Logits that are made in
    chunks are made twice, whatever `remat` is.

    Args:
      attention: what computes it, as `flash_attention.chosen` names it.
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
    """Two products forward, four backward, two again with `remat`; kernels keep no scores, and
    make them once more in any case, as `blocks` do where `remat` keeps none either."""
    kept = attention == "xla" or (attention == "blocks" and config.remat == "none")
    products = 6 + 2 * (config.remat != "none") + (not kept)
    width = config.layers * config.n_heads * config.d_head
    return products * 2 * width * attended_pairs(config, attention) // config.seq


def attended_pairs(config: Config, attention: str) -> int:
    """Pairs of a query and a key that one product of a head's attention over a sequence takes.

    A kernel leaves out what the masks hide; the rest of the tiles at their borders does not count.
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
    """The forward pass of one token with `seq` positions behind it, the embedding a lookup."""
    matrices = matmul_params(config) - config.n_vocab * config.d_model
    return 2 * matrices + 4 * config.layers * config.n_heads * config.d_head * config.seq


def mfu(config: Config, tokens_per_sec: float, peak: float) -> float:
    """Model FLOPs utilisation, 0 to 1; `peak` is the FLOP/s of all devices together."""
    return tokens_per_sec * palm_flops_per_token(config) / peak


def hfu(config: Config, tokens_per_sec: float, peak: float, attention: str = "xla") -> float:
    """Hardware FLOPs utilisation: of what is really multiplied (`hardware_flops_per_token`)."""
    return tokens_per_sec * hardware_flops_per_token(config, attention) / peak


def _layer_matrices(config: Config) -> int:
    attention = config.n_heads * config.d_head
    # geglu: q, k, v and both halves of the gated unit in one matmul, both outputs in another.
    halves = 1 if config.block == "gptj" else 2
    inputs = config.d_model * (3 * attention + halves * config.d_ff)
    outputs = (attention + config.d_ff) * config.d_model
    return inputs + outputs


def _norm_params(config: Config) -> int:
    width = config.d_model
    return {
        "layernorm": 2 * width,
        "layernorm-desync": 2 * width * config.cores_per_replica,
        "layernorm-nobias": width,
        "rmsnorm": width,
        "rmsnorm-bias": 2 * width,
        "scalenorm": 1,
        "scalenorm-bias": 2,
    }[config.norm]
