"""Parameter counts and FLOPs against published figures for GPT-J-6B and hand calculations."""

import functools
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from mesh_transformer.config import Config
from mesh_transformer.config_checks import MATMULS
from mesh_transformer.families import BLOCKS, NORMS
from mesh_transformer.mesh import accelerators
from mesh_transformer.mesh.declaration import is_declaration
from mesh_transformer.mesh.devices import make_mesh
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import flops, transformer
from mesh_transformer.model.loss import train_loss
from mesh_transformer.performance.plan import abstract_batch
from mesh_transformer.training import step
from mesh_transformer.util import InputError

CONFIGS = Path(__file__).parents[2] / "configs"
GPTJ_6B = Config(layers=28, d_model=4096, n_heads=16, n_vocab=50400, pe_rotary_dims=64)


def small(**changes) -> Config:
    return Config(
        **({"layers": 3, "d_model": 24, "n_heads": 4, "n_vocab": 56, "seq": 16} | changes)
    )


def test_transformer_6b_has_the_published_number_of_parameters():
    """Compare with Hugging Face's count and with the original's.

    Hugging Face's GPT-J has 6,050,882,784 parameters, without an embedding bias; ours has one.  The
    original's figure counts replicated parameters once for each of its 8 shards: the scale and
    offset of every norm (one norm per layer and a final one), and the biases that are added before
    a sum over shards (one per layer, and the embedding's).
    """
    assert flops.n_params(GPTJ_6B) == 6_050_882_784 + 4096
    copies = 7 * 4096 * ((28 + 1) * 2 + 28 + 1)
    assert flops.n_params(GPTJ_6B) + copies == 6_053_381_344


def test_transformer_6b_needs_39_gigaflops_per_token():
    # The matrices have 12 D^2 parameters per layer, and V x D twice.
    matrices = 28 * 12 * 4096**2 + 2 * 50400 * 4096
    assert flops.flops_per_token(GPTJ_6B) == 6 * matrices
    assert round(flops.palm_flops_per_token(GPTJ_6B) / 1e9, 2) == 39.12
    adapters = GPTJ_6B.replace(lora_rank=8)
    assert flops.flops_per_token(adapters) == 4 * matrices
    assert flops.n_params(adapters) == flops.n_params(GPTJ_6B)


@pytest.mark.quick(11)
@pytest.mark.parametrize("pe", ["rotary", "fixed", "t5"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("block", BLOCKS)
def test_parameter_counts_match_the_declarations(block, norm, pe):
    config = small(block=block, norm=norm, pe=pe, cores_per_replica=2, head_size=8)
    declared = transformer.declarations(config)
    leaves = jax.tree.leaves(declared, is_leaf=is_declaration)
    assert flops.n_params(config) == sum(math.prod(leaf.shape) for leaf in leaves)
    # Biases, norms and position tables are not used in matmuls.
    not_matrices = {"b", "fused_in_b", "o_b", "out_b", "scale", "offset"}
    not_matrices |= {"pos_embs", "rel_embedding"}
    matrices = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(declared, is_leaf=is_declaration)
        if path[-1].key not in not_matrices
    ]
    assert flops.matmul_params(config) == sum(math.prod(leaf.shape) for leaf in matrices)


@pytest.mark.slow
def test_counts_need_no_device():
    """The driver of a pod, which counts FLOPs, must not take the TPU from the host's actor."""
    lines = [
        "from mesh_transformer.config import Config",
        "from mesh_transformer.model import flops",
        "print(flops.palm_flops_per_token(Config.load('tiny')))",
    ]
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env=os.environ | {"JAX_PLATFORMS": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.strip() == str(flops.palm_flops_per_token(Config.load("tiny"))), run.stderr


@pytest.mark.parametrize(
    ("name", "billions"),
    [("6B_roto_256", 6.05), ("example_config", 6.05), ("20B", 20), ("40B", 40)],
)
def test_the_configs_have_the_size_in_their_names(name, billions):
    config = Config.load(str(CONFIGS / f"{name}.json"))
    assert flops.n_params(config) == pytest.approx(billions * 1e9, rel=0.02)


def test_every_flop_count_of_gptj_6b():
    """Compare every count with a hand calculation for L = 28, D = HK = 4096, T = 2048.

    Attention takes 12 L D T = 2.819 GFLOPs per token.  A layer's forward pass takes 24 D^2, of
    which the output matrices (HK to D and 4D to D) take 10 D^2.
    """
    width, layers, length = 4096, 28, 2048
    palm = flops.palm_flops_per_token(GPTJ_6B)
    attention = 12 * layers * width * length
    assert round((palm - attention / 2) / 1e9, 2) == 37.71  # the causal half
    layer, products = layers * (24 - 10) * width**2, attention // 3
    unchunked, logits = GPTJ_6B.replace(loss_chunk=length), 2 * 50400 * width
    least = palm - 3 * logits  # the embedding is a lookup
    for remat, recomputed in (("full", layer + products), ("dots", products), ("none", 0)):
        assert flops.hardware_flops_per_token(unchunked.replace(remat=remat)) == least + recomputed
    assert flops.hardware_flops_per_token(GPTJ_6B.replace(remat="none")) == least + logits
    # A kernel does not save the scores, so it computes seven products where plain attention has
    # six, but each only over the pairs that the mask allows.
    seen = (length + 1) / (2 * length)
    kernel = flops.hardware_flops_per_token(unchunked.replace(remat="none"), "splash")
    assert kernel == pytest.approx(least - attention + 7 * attention / 6 * seen, rel=1e-9)


@pytest.mark.parametrize("length", [200, 1536, 1600])
@pytest.mark.parametrize("window", [1, 257, 258, 1600])
def test_kernels_skip_masked_query_key_pairs(window, length):
    """`blocks` skips pairs of blocks that are masked as a whole; the last block is padded."""
    window = min(window, length)
    config = small(seq=length, attention_window=window)
    distance = np.subtract.outer(np.arange(length), np.arange(length))
    seen = (distance >= 0) & (distance < window)
    layers, size = config.layers, min(length, 256)
    assert flops.attended_pairs(config, "splash") == layers * seen.sum()
    padding = -length % size
    in_blocks = np.pad(seen, (0, padding)).reshape(-(-length // size), size, -1, size)
    expected = layers * in_blocks.any(axis=(1, 3)).sum() * size**2
    assert flops.attended_pairs(config, "blocks") == expected
    assert flops.attended_pairs(config, "xla") == layers * length**2


@pytest.mark.parametrize("attention", ["xla", "blocks", "splash"])
def test_sliding_layers_count_their_own_window(attention):
    """Two sliding layers and a full one have 2/3 and 1/3 of what three such layers have."""
    backend = attention if attention == "blocks" else "auto"
    full = small(seq=768, loss_chunk=384, attention=backend)
    sliding = full.replace(sliding_window=50)
    mixed = sliding.replace(sliding_layers=[0, 2])

    def mean(count) -> Any:
        """Return the mean, up to the rounding of pairs per token to a whole number."""
        return pytest.approx((2 * count(sliding) + count(full)) / 3, rel=1e-4)

    for count in (
        lambda config: flops.attended_pairs(config, attention),
        lambda config: flops.hardware_flops_per_token(config, attention),
        flops.palm_flops_per_token,
        flops.decode_flops_per_token,
    ):
        assert count(mixed) == mean(count)
        assert count(sliding) < count(full) or attention == "xla"
    attended = 12 * 24 * (50 + 768 + 50)
    assert flops.palm_flops_per_token(mixed) == flops.flops_per_token(mixed) + attended
    if attention != "splash":
        expected = 2 * 768 * flops.hardware_flops_per_token(sliding, attention)
        assert traced_flops(sliding, attention) == expected


def matmul_flops(jaxpr) -> int:
    """Return the FLOPs of all matmuls in a traced program, counting every loop iteration.

    A product with a vector is no matmul: it sums a bias's gradient.
    """
    total = 0
    for equation in jaxpr.eqns:
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * sum(matmul_flops(inner) for inner in jaxprs_in_params(equation.params))
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            depth = math.prod(shape[axis] for axis in contracted)
            total += 2 * depth * math.prod(equation.outvars[0].aval.shape) * (len(shape) > 1)
    return total


def traced_flops(config: Config, attention: str) -> int:
    """Return the FLOPs of all matmuls in the loss and the gradients of two sequences."""
    tokens = jnp.zeros((2, config.seq), jnp.int32)

    def loss(params):
        return train_loss(params, tokens, tokens, config, Auto(attention=attention))[0]

    params = jax.eval_shape(functools.partial(transformer.init, config), jax.random.key(0))
    return matmul_flops(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("block", "attention"),
    [*((block, "xla") for block in BLOCKS), ("gptj", "blocks")],
)
@pytest.mark.parametrize("remat", ["full", "dots", "none"])
@pytest.mark.parametrize("int8_matmuls", [[], list(MATMULS)])
def test_hardware_flops_match_the_matmuls_of_a_traced_step(remat, block, attention, int8_matmuls):
    """Compare with logits computed whole or in chunks, and with three blocks of attention."""
    chunk = 128 if block == "gptj" else 384
    config = small(remat=remat, block=block, seq=384, loss_chunk=chunk, attention=attention)
    config = config.replace(int8_matmuls=int8_matmuls)
    expected = flops.hardware_flops_per_token(config, attention)
    assert traced_flops(config, attention) == 2 * config.seq * expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mp", "heads", "key_heads", "keys", "qk_norm"),
    [
        (2, (6, 6), 3, 4, "none"),  # 0 1 and 1 2
        (4, (6, 8), 2, 8, "none"),  # the second device has queries of both key heads
        (2, (6, 6), 2, 2, "none"),
        (4, (6, 8), 6, 8, "none"),
        (3, (6, 6), 3, 3, "none"),
        (4, (8, 8), 2, 4, "projection"),
        (4, (3, 4), 1, 4, "none"),
    ],
)
def test_padded_and_copied_heads_count(mp, heads, key_heads, keys, qk_norm):
    """Compare with a traced step for a mesh.

    The heads are those of the model and those that all devices compute, with padding, and `keys`
    are the heads of keys that all devices compute.
    """
    needed_heads, computed = heads
    sizes = {"n_heads": needed_heads, "key_heads": key_heads, "head_size": 4, "block": "llama"}
    split = {"cores_per_replica": mp, "partitioning": "shard_map"}
    config = small(**sizes, **split, qk_norm=qk_norm, n_vocab=60)
    mesh = make_mesh(config, jax.devices()[:mp])
    layout = step.StateLayout(config, mesh)
    train: Any = step.compile_train(layout)
    traced = jax.make_jaxpr(train)(layout.abstract, abstract_batch(layout)).jaxpr
    expected = flops.hardware_flops_per_token(config)
    assert mp * matmul_flops(traced) == config.seq * expected
    matrices, products = 2 * 24 * 2, 4 * config.seq
    needed = matrices * (needed_heads + key_heads) + products * needed_heads
    executed = matrices * (computed + keys) + products * computed
    assert flops.attention_waste(config, "xla") == pytest.approx(1 - needed / executed, rel=1e-12)


def test_mfu_is_1_at_the_peak():
    config = small()
    peak = 3e12
    tokens_per_sec = peak / flops.palm_flops_per_token(config)
    assert flops.mfu(config, tokens_per_sec, peak) == pytest.approx(1)
    assert flops.mfu(config, tokens_per_sec / 4, peak) == pytest.approx(0.25)
    more = flops.hardware_flops_per_token(config) / flops.palm_flops_per_token(config)
    assert flops.hfu(config, tokens_per_sec, peak) == pytest.approx(more)
    less = flops.hardware_flops_per_token(config, "splash") / flops.palm_flops_per_token(config)
    assert flops.hfu(config, tokens_per_sec, peak, "splash") == pytest.approx(less)


@dataclass
class Device:
    device_kind: str
    platform: str


@pytest.mark.parametrize(
    ("kind", "platform", "tera"),
    [
        ("TPU v2", "tpu", 22.5),
        ("TPU v3", "tpu", 61.5),
        ("TPU v4", "tpu", 275),
        ("TPU v5 lite", "tpu", 197),
        ("TPU v5e", "tpu", 197),
        ("TPU v5", "tpu", 459),
        ("TPU v5p", "tpu", 459),
        ("TPU v6 lite", "tpu", 918),
        ("TPU v6e", "tpu", 918),
        ("TPU7x", "tpu", 1153.5),
        ("NVIDIA A100-SXM4-80GB", "gpu", 312),
        ("NVIDIA H100 80GB HBM3", "gpu", 989),
        ("NVIDIA H100 PCIe", "gpu", 756),
        ("NVIDIA H200", "gpu", 989),
        ("NVIDIA GH200 480GB", "gpu", 989),
        ("NVIDIA GH200 144G HBM3e", "gpu", None),
        ("NVIDIA GeForce GTX 1080", "gpu", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "gpu", None),
        ("cpu", "cpu", None),
    ],
)
def test_peak_of_a_device_kind(kind, platform, tera):
    hardware = accelerators.hardware_of(Device(kind, platform))
    assert (hardware and hardware.peak) == (None if tera is None else tera * 1e12)


def test_hardware_is_selected_by_name_or_device_kind():
    """A chip's figures are the sums over its cores; device kind and name select the same row."""
    v3 = accelerators.hardware("v3")
    assert (2 * v3.peak, 2 * v3.hbm) == (123e12, 900e9)
    assert accelerators.hardware_of(Device("TPU v3", "tpu")) is v3
    assert accelerators.hardware_of(Device("NVIDIA H200", "gpu")) is accelerators.hardware("h200")
    for kind, speed in (
        ("NVIDIA GH200 480GB", 4000e9),
        ("NVIDIA A100-SXM4-40GB", 1555e9),
        ("NVIDIA A100-PCIE-40GB", 1555e9),
        ("NVIDIA A100-SXM4-80GB", 2039e9),
    ):
        hardware = accelerators.hardware_of(Device(kind, "gpu"))
        assert hardware is not None
        assert hardware.hbm == speed
    assert accelerators.hardware("v5p").interconnect == 600e9
    for row in accelerators.HARDWARE:
        assert accelerators.hardware(row.name).peak == row.peak
    with pytest.raises(InputError, match=r"hardware is 'v9', expected one of cpu, v2, v3"):
        accelerators.hardware("v9")


def test_a_cpu_is_measured_once():
    first, second = accelerators.hardware("cpu"), accelerators.hardware("cpu")
    assert first == second
    # Wide on purpose: from one slow core under load to a large server.
    assert 1e9 < first.peak < 1e14
