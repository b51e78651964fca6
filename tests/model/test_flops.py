"""Parameter counts and FLOPs against figures published for GPT-J-6B and counts by hand."""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from mesh_transformer.config import Config, Norm
from mesh_transformer.mesh import accelerators
from mesh_transformer.mesh.declaration import is_declaration
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import flops, gptj
from mesh_transformer.model.loss import train_loss
from mesh_transformer.util import InputError

CONFIGS = Path(__file__).parents[2] / "configs"
GPTJ_6B = Config(layers=28, d_model=4096, n_heads=16, n_vocab=50400, pe_rotary_dims=64)


def small(**changes) -> Config:
    return Config(
        **({"layers": 3, "d_model": 24, "n_heads": 4, "n_vocab": 56, "seq": 16} | changes)
    )


def test_gptj_6b_has_the_published_number_of_parameters():
    """Hugging Face's GPT-J has 6,050,882,784 parameters and no embedding bias, ours has one.

    The original's own figure counts what each of its 8 shards holds of the norms (scale and
    offset, a layer and once more) and of the biases added before a sum (a layer, the embedding).
    """
    assert flops.n_params(GPTJ_6B) == 6_050_882_784 + 4096
    copies = 7 * 4096 * ((28 + 1) * 2 + 28 + 1)
    assert flops.n_params(GPTJ_6B) + copies == 6_053_381_344


def test_gptj_6b_needs_39_gigaflops_a_token():
    # The matrices: 12 D^2 a layer, and V x D twice.
    matrices = 28 * 12 * 4096**2 + 2 * 50400 * 4096
    assert flops.flops_per_token(GPTJ_6B) == 6 * matrices
    assert round(flops.palm_flops_per_token(GPTJ_6B) / 1e9, 2) == 39.12
    adapters = GPTJ_6B.replace(lora_rank=8)
    assert flops.flops_per_token(adapters) == 4 * matrices
    assert flops.n_params(adapters) == flops.n_params(GPTJ_6B)


@pytest.mark.parametrize("pe", ["rotary", "fixed", "t5"])
@pytest.mark.parametrize("norm", get_args(Norm))
@pytest.mark.parametrize("block", ["gptj", "geglu"])
def test_parameters_equal_what_the_model_declares(block, norm, pe):
    config = small(block=block, norm=norm, pe=pe, cores_per_replica=2, head_size=8)
    declared = gptj.declarations(config)
    leaves = jax.tree.leaves(declared, is_leaf=is_declaration)
    assert flops.n_params(config) == sum(math.prod(leaf.shape) for leaf in leaves)
    # Biases, norms and tables of positions take part in no matmul.
    apart = {"b", "fused_in_b", "scale", "offset", "pos_embs", "rel_embedding"}
    matrices = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(declared, is_leaf=is_declaration)
        if path[-1].key not in apart
    ]
    assert flops.matmul_params(config) == sum(math.prod(leaf.shape) for leaf in matrices)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("6B_roto_256", 6.05), ("example_config", 6.05), ("20B", 20), ("40B", 40)],
)
def test_the_configs_have_the_size_they_are_named_after(name, billions):
    config = Config.load(str(CONFIGS / f"{name}.json"))
    assert flops.n_params(config) == pytest.approx(billions * 1e9, rel=0.02)


def test_gptj_6b_by_every_way_of_counting():
    """By hand, L 28, D = HK = 4096, T 2048: attention 12 L D T is 2.819 GF a token; a layer's
    forward pass has 24 D^2, of which what comes out last is 10 D^2 (HK to D and 4D to D)."""
    width, layers, length = 4096, 28, 2048
    palm = flops.palm_flops_per_token(GPTJ_6B)
    attention = 12 * layers * width * length
    assert round((palm - attention / 2) / 1e9, 2) == 37.71  # the causal half
    layer, products = layers * (24 - 10) * width**2, attention // 3
    whole, logits = GPTJ_6B.replace(loss_chunk=length), 2 * 50400 * width
    least = palm - 3 * logits  # the embedding is a lookup
    for remat, again in (("full", layer + products), ("dots", products), ("none", 0)):
        assert flops.hardware_flops_per_token(whole.replace(remat=remat)) == least + again
    assert flops.hardware_flops_per_token(GPTJ_6B.replace(remat="none")) == least + logits
    # Of six products a kernel has seven, as it keeps no scores, each of what a query sees.
    seen = (length + 1) / (2 * length)
    kernel = flops.hardware_flops_per_token(whole.replace(remat="none"), "splash")
    assert kernel == pytest.approx(least - attention + 7 * attention / 6 * seen, rel=1e-9)


@pytest.mark.parametrize("window", [1, 130, 384])
def test_kernels_leave_out_what_no_query_sees(window):
    """`blocks` have 128 queries each, and for all of them the keys that any of them sees."""
    config = small(seq=384, attention_window=window)
    distance = np.subtract.outer(np.arange(384), np.arange(384))
    seen = int(np.sum((distance >= 0) & (distance < window)))
    assert flops.attended_pairs(config, "splash") == seen
    keys = {1: (128, 128, 128), 130: (128, 256, 257), 384: (128, 256, 384)}[window]
    assert flops.attended_pairs(config, "blocks") == 128 * sum(keys)
    assert flops.attended_pairs(config, "xla") == 384**2


def multiplied(jaxpr) -> int:
    """FLOPs of every matmul of a traced program, those of loops as often as they run."""
    total = 0
    for one in jaxpr.eqns:
        times = one.params["length"] if one.primitive.name == "scan" else 1
        total += times * sum(multiplied(inner) for inner in jaxprs_in_params(one.params))
        if one.primitive.name == "dot_general":
            (contracted, _), _ = one.params["dimension_numbers"]
            shape = one.invars[0].aval.shape
            depth = math.prod(shape[axis] for axis in contracted)
            total += 2 * depth * math.prod(one.outvars[0].aval.shape)
    return total


@pytest.mark.parametrize(
    ("block", "attention"), [("gptj", "xla"), ("geglu", "xla"), ("gptj", "blocks")]
)
@pytest.mark.parametrize("remat", ["full", "dots", "none"])
def test_hardware_flops_are_the_matmuls_that_a_step_has(remat, block, attention):
    """With logits whole or in chunks, and three blocks of attention."""
    chunk = 128 if block == "gptj" else 384
    config = small(remat=remat, block=block, seq=384, loss_chunk=chunk, attention=attention)
    tokens = jnp.zeros((2, config.seq), jnp.int32)

    def loss(params):
        return train_loss(params, tokens, tokens, config, Auto(attention=attention))[0]

    params = jax.eval_shape(functools.partial(gptj.init, config), jax.random.key(0))
    traced = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
    expected = flops.hardware_flops_per_token(config, attention)
    assert multiplied(traced) == tokens.size * expected


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
        ("NVIDIA A100-SXM4-80GB", "gpu", 312),
        ("NVIDIA H100 80GB HBM3", "gpu", 989),
        ("NVIDIA H100 PCIe", "gpu", 756),
        ("NVIDIA H200", "gpu", 989),
        ("NVIDIA GH200 480GB", "gpu", 989),
        ("NVIDIA GH200 144G HBM3e", "gpu", None),
        ("NVIDIA GeForce GTX 1080", "gpu", None),
    ],
)
def test_peak_of_a_device_kind(kind, platform, tera):
    peak = accelerators.peak_flops(Device(kind, platform))  # type: ignore[arg-type]
    assert peak == (None if tera is None else tera * 1e12)


def test_hardware_by_name():
    """A chip's figures are its cores' together; a device's kind and its name find the same row."""
    one = accelerators.hardware("v3")
    assert (2 * one.peak, 2 * one.hbm) == (123e12, 900e9)
    assert accelerators.hardware_of(Device("TPU v3", "tpu")) is one
    assert accelerators.hardware_of(Device("NVIDIA H200", "gpu")) is accelerators.hardware("h200")
    for kind, speed in (
        ("NVIDIA GH200 480GB", 4000e9),
        ("NVIDIA A100-SXM4-40GB", 1555e9),
        ("NVIDIA A100-PCIE-40GB", 1555e9),
        ("NVIDIA A100-SXM4-80GB", 2039e9),
    ):
        found = accelerators.hardware_of(Device(kind, "gpu"))
        assert found is not None
        assert found.hbm == speed
    assert accelerators.hardware("v5p").interconnect == 600e9
    for each in accelerators.HARDWARE:
        assert accelerators.hardware(each.name).peak == each.peak
    with pytest.raises(InputError, match=r"hardware is 'v9', expected one of cpu, v2, v3"):
        accelerators.hardware("v9")


def test_a_cpu_is_measured_once_and_shared_by_its_virtual_devices():
    device = jax.devices("cpu")[0]
    first, second = accelerators.peak_flops(device), accelerators.peak_flops(device)
    assert first is not None
    assert first == second
    whole = first * jax.local_device_count("cpu")
    # Wide on purpose: from one slow core under load to a large server.
    assert 1e9 < whole < 1e14
