"""How much a model computes per token, and how much a device can: FLOPs, MFU, HFU, peaks.

Formulas: 6N is Kaplan et al. 2020 (2N forward, 4N backward, half of it for the weights' own
gradients); the attention term, MFU and HFU are Chowdhery et al. 2022 (PaLM), appendix B.
"""

import dataclasses
import functools
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer.config import Config
from mesh_transformer.model.attention import block_length
from mesh_transformer.util import InputError

T5_BUCKETS = 32  # relative distances that pe=t5 tells apart


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What one JAX device can: a core of a TPU v2, v3 or 7x (half a chip), else a chip.

    Attributes:
      kind: what its `device_kind` contains, from the beginning of a word on.
      peak: dense bf16 FLOP/s.
      hbm: bytes/s of its memory.
      interconnect: bytes/s that it can send over all its links together.
      links: how many those are; a ring of devices along one axis of a torus uses two of them.
      source: where the figures are from.
    """

    name: str
    kind: str
    peak: float
    hbm: float
    interconnect: float
    links: int
    source: str

    def part(self, count: int) -> "Hardware":
        """One of `count` devices that share it."""
        return dataclasses.replace(
            self,
            peak=self.peak / count,
            hbm=self.hbm / count,
            interconnect=self.interconnect / count,
        )


_DOCS = "cloud.google.com/tpu/docs"
_TRAINING = "Jouppi et al. 2020 (A domain-specific supercomputer for training neural networks)"
_NVIDIA = "NVIDIA's data sheet"
# A vendor's figure for links "in both directions" counts half.  The first kind that a device's
# name contains counts.
HARDWARE = (
    # 4 links of 496 and 656 Gbit/s a chip.
    Hardware("v2", "TPU v2", 22.5e12, 350e9, 124e9, 4, f"{_DOCS}/v2; links: {_TRAINING}"),
    Hardware("v3", "TPU v3", 61.5e12, 450e9, 164e9, 4, f"{_DOCS}/v3; links: {_TRAINING}"),
    Hardware("v4i", "TPU v4 lite", 138e12, 614e9, 100e9, 2, "Jouppi et al. 2021 (Ten lessons)"),
    # 6 links of 50 GB/s (Jouppi et al. 2023, TPU v4).
    Hardware("v4", "TPU v4", 275e12, 1228e9, 300e9, 6, f"{_DOCS}/v4"),
    Hardware("v5e", "TPU v5 lite", 197e12, 819e9, 200e9, 4, f"{_DOCS}/v5e"),
    Hardware("v5e", "TPU v5e", 197e12, 819e9, 200e9, 4, f"{_DOCS}/v5e"),
    Hardware("v5p", "TPU v5", 459e12, 2765e9, 600e9, 6, f"{_DOCS}/v5p"),
    Hardware("v6e", "TPU v6", 918e12, 1638e9, 400e9, 4, f"{_DOCS}/v6e"),
    Hardware("7x", "TPU7x", 1153.5e12, 3690e9, 300e9, 6, f"{_DOCS}/tpu7x"),
    Hardware("h100-pcie", "H100 PCIe", 756e12, 2000e9, 300e9, 2, _NVIDIA),
    Hardware("h100-nvl", "H100 NVL", 835e12, 3900e9, 300e9, 2, _NVIDIA),
    Hardware("h100", "H100", 989e12, 3350e9, 450e9, 2, _NVIDIA),
    # That with 96 GB; the one with 144 GB has other memory, and no row.
    Hardware("gh200", "GH200 480GB", 989e12, 4000e9, 450e9, 2, _NVIDIA),
    Hardware("h200", "H200", 989e12, 4800e9, 450e9, 2, _NVIDIA),
    Hardware("a100-40gb", "A100-SXM4-40GB", 312e12, 1555e9, 300e9, 2, _NVIDIA),
    Hardware("a100-40gb", "A100-PCIE-40GB", 312e12, 1555e9, 300e9, 2, _NVIDIA),
    Hardware("a100-pcie", "A100 80GB PCIe", 312e12, 1935e9, 300e9, 2, _NVIDIA),
    Hardware("a100", "A100", 312e12, 2039e9, 300e9, 2, _NVIDIA),
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


def hardware(name: str, dtype: str = "bfloat16") -> Hardware:
    """The hardware of that name; `cpu` is this machine's, measured: its peak in `dtype`.

    Raises:
      InputError: for a name that is not in the table.
    """
    if name == "cpu":
        speed = _measured_copy()
        return Hardware("cpu", "cpu", _measured_flops(dtype), speed, speed, 2, "measured here")
    for each in HARDWARE:
        if each.name == name:
            return each
    known = ", ".join(dict.fromkeys(["cpu", *(each.name for each in HARDWARE)]))
    raise InputError(f"hardware is {name!r}, which is unknown; take one of {known}")


def hardware_of(device: Device) -> Hardware | None:
    """The row of the table for an accelerator; None for a kind it does not have, and for CPUs."""
    matching = (each for each in HARDWARE if re.search(rf"\b{each.kind}", device.device_kind))
    return None if device.platform == "cpu" else next(matching, None)


def peak_flops(device: Device, dtype: str = "bfloat16") -> float | None:
    """FLOP/s of one device; None for a kind that the table does not know.

    An accelerator's is its dense bf16 peak, whatever `dtype` is.  A CPU has no data sheet: the
    median of a few matmuls in `dtype` counts, run once per process, and the virtual devices of
    one host each get an equal part.
    """
    if device.platform == "cpu":
        return _measured_flops(dtype) / jax.local_device_count("cpu")
    found = hardware_of(device)
    return found.peak if found else None


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


def _run_seconds(function: Callable[[], Any], runs: int = 5, at_least: float = 0.0) -> list[float]:
    """Seconds of each of so many runs, or of more that together take `at_least`.

    One before them is left out.
    """
    function()
    seconds: list[float] = []
    while len(seconds) < runs or sum(seconds) < at_least:
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return seconds


@functools.cache
def _measured_flops(dtype: str) -> float:
    return matmul_flops(dtype)


def matmul_flops(dtype: str, sizes: Sequence[int] = (1024,), seconds: float = 0.05) -> float:
    """FLOP/s of all of this machine's cores together, measured now by matmuls in `dtype`.

    Square ones, of each size three at least and for so many seconds: the median one of the size
    that does best.
    """
    device = jax.local_devices(backend="cpu")[0]
    multiply = jax.jit(jnp.matmul)

    def measured(size: int) -> float:
        matrix = jax.device_put(jnp.ones((size, size), dtype), device)
        found = _run_seconds(lambda: multiply(matrix, matrix).block_until_ready(), 3, seconds)
        return 2 * size**3 / statistics.median(found)

    return max(map(measured, sizes))


@functools.cache
def _measured_copy(size: int = 2**28) -> float:
    """Bytes/s read and written as all cores together copy an array."""
    threads = os.cpu_count() or 1
    sources = [np.ones(size // threads, np.uint8) for _ in range(threads)]
    targets = [np.empty_like(part) for part in sources]
    with ThreadPoolExecutor(threads) as pool:
        return 2 * size / min(_run_seconds(lambda: list(pool.map(np.copyto, targets, sources))))
