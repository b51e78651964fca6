"""Parameter counts, FLOPs per token, and utilisation (MFU and HFU).

The 6N rule is from Kaplan et al. 2020: with N parameters, a token takes 2N FLOPs in the forward
pass and 4N in the backward pass (2N for the gradients of the weights, and 2N for the gradients of
the activations).  The attention term, MFU and HFU follow Chowdhery et al. 2022 (PaLM), appendix B.
"""

import math

import jax

from mesh_transformer.config_model import Model
from mesh_transformer.mesh.declaration import Declaration, is_declaration, padded_size
from mesh_transformer.model import transformer
from mesh_transformer.model.block_attention import block_length, block_pairs
from mesh_transformer.model.heads import key_heads, query_heads


def matmul_params(config: Model) -> int:
    """Return the number of parameters in weight matrices: layers, embedding and output head.

    A tied output head is the embedding, and counts once.

    The embedding is counted for comparison with the original mesh-transformer-jax, where it is a
    one-hot matmul.  In this library it is a lookup without FLOPs, so `flops_per_token` overstates
    the FLOPs executed by 3 percent for GPT-J-6B.
    """
    layer = sum(math.prod(d.shape) for d in _matrices(config))
    return config.layers * layer + _lookup_params(config) + config.n_vocab * config.d_model


def _lookup_params(config: Model) -> int:
    """Return the number of parameters of the embedding, if it is only looked up."""
    return 0 if config.tie_head else config.n_vocab * config.d_model


def n_params(config: Model) -> int:
    """Return the number of parameters of the model, without LoRA adapters.

    Each bias is counted once, although the original mesh-transformer-jax stores some biases on
    every shard.
    """
    declared = jax.tree.leaves(transformer.declarations(config), is_leaf=is_declaration)
    return sum(math.prod(d.shape) for d in declared if not d.adapter)


def flops_per_token(config: Model) -> int:
    """Return 6N, the FLOPs per token of the forward and backward matmuls with weights.

    N is `matmul_params`.  The matmuls between queries, keys and values are not counted.  If the
    config sets `lora_rank`, the result is 4N, because no gradients of frozen weights are computed.
    In that case, the FLOPs of the adapters themselves are not counted.
    """
    return (4 if config.lora_rank else 6) * matmul_params(config)


def palm_flops_per_token(config: Model) -> int:
    """Return 6N + 12 L H K T, the FLOPs per token including attention, as in the PaLM paper.

    6N is the result of `flops_per_token`, L the number of layers, H the number of heads, K the head
    size and T the sequence length, or a layer's window.  The attention term is not halved for the
    causal mask, and recomputation is not counted.
    """
    attention = config.n_heads * config.d_head * sum(windows(config))
    return flops_per_token(config) + 12 * attention


def windows(config: Model) -> list[int]:
    """Return the number of positions, at most `seq`, that a query attends to in each layer."""
    usual = min(config.window, config.seq)
    sliding = usual if config.sliding_window is None else min(config.sliding_window, usual)
    layers = config.sliding_layers or ()
    return [sliding if layer in layers else usual for layer in range(config.layers)]


def hardware_flops_per_token(config: Model, attention: str = "xla") -> int:
    """Return the FLOPs per token that a training step executes, including recomputation.

    Padding and what several shards compute are counted, too (see `attention_waste`).  The embedding
    is a lookup and is not counted.  The config's `remat` determines which matmuls the
    backward pass recomputes:

    * full: those of the forward pass of each layer, except the layer's output matmuls, because no
      gradient needs their results.
    * dots: the two matmuls of attention; the outputs of all other matmuls are saved.
    * none: no matmul.

    For any `remat`, logits that are computed in chunks are recomputed, and attention scores are
    recomputed if the attention backend does not save them.

    Args:
      attention: the attention backend, as returned by `attention_backend`.
    """
    layers, outputs = (config.layers * count for count in _computed(config))
    head = padded_size(config.n_vocab, config.shards) * config.d_model
    matmuls = (4 if config.lora_rank else 6) * (layers + head)
    if config.remat == "full":
        matmuls += 2 * (layers - outputs)
    if config.seq > config.loss_chunk:
        matmuls += 2 * head
    return matmuls + _attention_flops_per_token(config, attention)


def attention_waste(config: Model, attention: str) -> float:
    """Return the share, 0 to 1, of the FLOPs of attention that a division of heads over mp wastes.

    mp pads query heads that it does not divide.  If it does not divide grouped key heads, several
    shards compute the same keys and values.  Attention is the matrices of queries, keys, values and
    outputs, and the matmuls between queries, keys and values.
    """
    shards, pairs = config.shards, attended_pairs(config, attention) / (config.layers * config.seq)

    def flops(queries: int, keys: int) -> float:
        matrices = 2 * config.d_model * (2 * queries + 2 * keys)
        return config.d_head * (matrices + 4 * queries * pairs)

    assert config.key_heads is not None
    executed = flops(shards * query_heads(config, shards), shards * key_heads(config, shards))
    return 1 - flops(config.n_heads, config.key_heads) / executed


def int8_flops_per_token(config: Model) -> int:
    """Return how many of the `hardware_flops_per_token` are of matmuls of 8-bit integers.

    These are those of the layers' matrices in the passes that `int8_matmuls` names.
    """
    layer, outputs = _computed(config)
    passes = {
        "forward": layer,
        "input_gradients": layer,
        "weight_gradients": 0 if config.lora_rank else layer,
    }
    if config.remat == "full":
        passes["forward"] += layer - outputs
    return 2 * config.layers * sum(passes[name] for name in set(config.int8_matmuls))


def _attention_flops_per_token(config: Model, attention: str) -> int:
    """Return the FLOPs per token of the attention matmuls.

    There are 2 matmuls in the forward pass and 4 in the backward pass.  Unless `remat` is none, the
    2 forward matmuls are recomputed.  Only `xla` saves the attention scores; otherwise, one more
    matmul recomputes them in the backward pass.
    """
    products = 6 + 2 * (config.remat != "none") + (attention != "xla")
    width = config.shards * query_heads(config, config.shards) * config.d_head
    return products * 2 * width * attended_pairs(config, attention) // config.seq


def attended_pairs(config: Model, attention: str) -> int:
    """Return the number of query-key pairs per sequence in one attention matmul of one head.

    This is the sum over all layers.  The number depends on the attention backend.  `xla` computes
    all pairs, and `blocks` also the masked pairs of blocks that are only partly masked.  For the
    kernels (splash and cudnn), only unmasked pairs are counted, although the kernels also compute
    the masked pairs of tiles that are only partly masked.
    """
    length = config.seq
    if attention == "xla":
        return config.layers * length**2
    if attention != "blocks":
        return sum(window * length - window * (window - 1) // 2 for window in windows(config))
    size = block_length(length)
    return size**2 * sum(block_pairs(length, size, w)[0].query.size for w in windows(config))


def decode_flops_per_token(config: Model) -> int:
    """Return the forward FLOPs of one token that attends to `seq` positions or its layer's window.

    The embedding is a lookup and is not counted.
    """
    matrices = matmul_params(config) - _lookup_params(config)
    return 2 * matrices + 4 * config.n_heads * config.d_head * sum(windows(config))


def mfu(config: Model, tokens_per_sec: float, peak: float) -> float:
    """Return model FLOPs utilisation, 0 to 1, based on `palm_flops_per_token`.

    Args:
      tokens_per_sec: tokens per second, on all devices together.
      peak: the total peak FLOP/s of all devices.
    """
    return tokens_per_sec * palm_flops_per_token(config) / peak


def hfu(config: Model, tokens_per_sec: float, peak: float, attention: str = "xla") -> float:
    """Return hardware FLOPs utilisation, 0 to 1, based on `hardware_flops_per_token`.

    Args:
      tokens_per_sec: tokens per second, on all devices together.
      peak: the total peak FLOP/s of all devices.
      attention: the attention backend, as returned by `attention_backend`.
    """
    return tokens_per_sec * hardware_flops_per_token(config, attention) / peak


def input_columns(config: Model) -> int:
    """Return the number of columns of a layer's matrices that read the residual stream.

    This is the sum over all shards, with padding and copies.
    """
    layer, outputs = _computed(config)
    return (layer - outputs) // config.d_model


def _computed(config: Model) -> tuple[int, int]:
    """Return the entries by which all shards together multiply, per token and layer.

    The first number is that of all matrices, the second that of output matrices alone.
    """
    sizes = {True: 0, False: 0}
    for d in _matrices(config):
        size = math.prod(d.padded(config.shards))
        if "mp" not in tuple(d.spec):  # all shards store it, and each computes some of its heads
            assert config.key_heads is not None
            size = size // config.key_heads * config.shards * key_heads(config, config.shards)
        sizes[d.spec[0] == "mp"] += size
    return sizes[True] + sizes[False], sizes[True]


def _matrices(config: Model) -> list[Declaration]:
    """Return the declarations of one layer's matrices; mp splits the inputs of output matrices."""
    layers = transformer.declarations(config)["layers"]
    declared = jax.tree.leaves(layers, is_leaf=is_declaration)
    return [d.unstack() for d in declared if d.decay and not d.adapter]
