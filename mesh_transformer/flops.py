"""How much a model computes per token, and how much a device can: FLOPs, MFU, peaks.

Formulas: 6N is Kaplan et al. 2020 (2N forward, 4N backward, half of it for the weights' own
gradients); the attention term and MFU are Chowdhery et al. 2022 (PaLM), appendix B.
"""

import functools
import time
from typing import Protocol

import jax
import jax.numpy as jnp

from mesh_transformer.config import Config

T5_BUCKETS = 32  # relative distances that pe=t5 tells apart

# Dense bf16 FLOP/s of one JAX device, from the vendors' data sheets; the first name that
# `device_kind` contains counts.  A JAX device is one core of a TPU v2, v3 or 7x, else one chip.
PEAKS = (
    ("TPU v2", 22.5e12),
    ("TPU v3", 61.5e12),
    ("TPU v4 lite", 138e12),
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v6", 918e12),
    ("TPU7x", 1153.5e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("A100", 312e12),
)


class Device(Protocol):
    """What `peak_flops` reads of a `jax.Device`."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...


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


def mfu(config: Config, tokens_per_sec: float, peak: float) -> float:
    """Model FLOPs utilisation, 0 to 1; `peak` is the FLOP/s of all devices together."""
    return tokens_per_sec * palm_flops_per_token(config) / peak


def peak_flops(device: Device) -> float | None:
    """Dense bf16 FLOP/s of one device; None for a kind this table does not know.

    A CPU has no data sheet: the fastest of a few f32 matmuls counts, run once per process,
    and the virtual devices of one host each get an equal part.
    """
    if device.platform == "cpu":
        return _measured_flops() / jax.local_device_count("cpu")
    for name, peak in PEAKS:
        if name in device.device_kind:
            return peak
    return None


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


@functools.cache
def _measured_flops(size: int = 1024, tries: int = 5) -> float:
    device = jax.local_devices(backend="cpu")[0]
    matrix = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    multiply = jax.jit(jnp.matmul)
    multiply(matrix, matrix).block_until_ready()
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        multiply(matrix, matrix).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
