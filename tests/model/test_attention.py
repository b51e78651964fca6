"""Attention backends: their results against plain attention, and their selection per device."""

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.generation import programs
from mesh_transformer.generation.weights import weight_layout
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import attention as attention_module
from mesh_transformer.model import cache as cache_module
from mesh_transformer.model.attention import _cudnn_disagrees, attend_function, attention_backend
from mesh_transformer.model.cache import LayerCache
from mesh_transformer.training import step
from mesh_transformer.util import InputError
from tests.conftest import random_batch
from tests.training.test_step import BATCH, largest_differences, mesh_of, on_mesh, run, small_config

CONFIG = small_config(layers=1, seq=384, d_model=32, n_heads=2, n_vocab=16, attention_window=130)
GROUPED = {"block": "llama", "layers": 2, "n_heads": 4, "key_heads": 2}
GPTJ = Config(layers=1, d_model=4096, n_heads=16, n_vocab=16)


def device(platform: str, kind: str, capability: str | None = None) -> Any:
    result = SimpleNamespace(platform=platform, device_kind=kind)
    if capability is not None:
        result.compute_capability = capability
    return result


CPU = device("cpu", "cpu")
V3, V5E = device("tpu", "TPU v3"), device("tpu", "TPU v5 lite")
A100 = device("gpu", "NVIDIA A100-SXM4-80GB", "8.0")
H200 = device("gpu", "NVIDIA H200", "9.0")


def packed(config: Config) -> dict[str, np.ndarray]:
    """Return a batch in which every sequence contains several texts."""
    batch = random_batch(config, 1, BATCH)
    numbers = np.random.default_rng(3).integers(1, 5, batch["obs"].shape)
    return batch | {"segment_ids": np.sort(numbers, axis=-1).astype(np.int32)}


@pytest.fixture(scope="module")
def plain() -> Any:
    return run(CONFIG.replace(attention="xla"), batch=packed(CONFIG), steps=1)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("attention", "partitioning"),
    [
        pytest.param("splash_interpreted", "shard_map", marks=pytest.mark.slow),
        ("splash_interpreted", "jit"),
        ("blocks", "shard_map"),
    ],
)
def test_every_backend_trains_like_plain_attention(plain, attention, partitioning):
    """Compare 2 x 2 devices with one device, with an attention window and packed texts."""
    config = on_mesh(CONFIG.replace(attention=attention), partitioning, 2, 0)
    actual = run(config, 2, 2, packed(CONFIG), steps=1)
    differences = largest_differences(actual, plain)
    assert max(differences.values()) < 1e-5, differences  # as tests/training/test_step.py


def lowered_step(config: Config, platform: str) -> str:
    """Return the train step on 2 x 2 devices, lowered for "tpu" or "cuda", as text."""
    layout = step.StateLayout(config, mesh_of(2, 2))
    train: Any = step.compile_train(layout)
    traced = train.trace(layout.abstract, random_batch(config, 1, 2))
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partitioning", "remat", "kernels"), [("shard_map", "full", 4), ("jit", "none", 3)]
)
def test_a_train_step_for_tpus_contains_the_splash_kernels(
    monkeypatch, partitioning, remat, kernels
):
    """Count the kernels: one forward, one recomputed under full remat, two for the gradients."""
    monkeypatch.setattr(step, "attention_backend", lambda *_: "splash")
    config = on_mesh(CONFIG.replace(dtype="bfloat16", remat=remat), partitioning, 2, 0)
    text = lowered_step(config, "tpu")
    assert len(re.findall("stablehlo.custom_call @tpu_custom_call", text)) == kernels


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("partitioning", "remat", "changes", "kinds"),
    [
        ("shard_map", "full", {}, [130]),
        ("jit", "none", {}, [130]),
        # Heads that share keys, and layers of two kinds, between which the loop's body chooses.
        ("shard_map", "none", {**GROUPED, "sliding_window": 60, "sliding_layers": [0]}, [60, 130]),
        ("jit", "full", {**GROUPED, "attention_window": None}, [0]),
    ],
)
def test_a_train_step_for_gpus_contains_cudnns_kernels(
    monkeypatch, partitioning, remat, changes, kinds
):
    """JAX asks for cuDNN's version when it traces the step; compiling it would need a GPU.

    The layers are a loop, whose body has one kernel per kind of layer.

    Args:
      kinds: the window of each kind of layer, 0 for the whole sequence.
    """
    version = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(version, lambda: 9_10_00)
    monkeypatch.setattr(step, "attention_backend", lambda *_: "cudnn")
    config = CONFIG.replace(dtype="bfloat16", remat=remat, **changes)
    text = lowered_step(on_mesh(config, partitioning, 2, 0), "cuda")
    kernels = Counter(re.findall(r"custom_call @__cudnn\$(\w+)", text))
    forward = 2 if remat == "full" else 1  # the backward pass computes it again
    assert kernels == {
        "fmhaSoftmax": forward * len(kinds),
        "fmhaSoftmaxBackward": len(kinds),
    }
    windows = Counter(map(int, re.findall(r"sliding_window_length\\22: (\d+)", text)))
    assert windows == dict.fromkeys(kinds, forward + 1)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"int8_matmuls": ["forward", "input_gradients", "weight_gradients"]},
        {"offload": "moments"},
        {"offload": "params", "partitioning": "jit"},
        {"zero": 3, "shard_activations": True},
        {"dropout_attention": 0.1, "optimizer": "muon"},
    ],
    ids=str,
)
def test_every_kind_of_train_step_is_lowered_for_gpus(changes):
    config = on_mesh(CONFIG.replace(dtype="bfloat16"), "shard_map", 2, 0).replace(**changes)
    text = lowered_step(config, "cuda")
    # Other custom calls would be functions of the CPU's compiler.
    calls = set(re.findall(r"custom_call @(\w+)", text))
    assert calls <= {"annotate_device_placement"}
    assert bool(calls) == ("offload" in changes)


@pytest.mark.slow
def test_blocks_never_materialise_the_full_score_matrix():
    mesh, batch = mesh_of(1, 1), random_batch(CONFIG, 1, 2)

    def has_full_score_matrix(attention: str) -> bool:
        config = CONFIG.replace(attention=attention)
        layout = step.StateLayout(config, mesh)
        train: Any = step.compile_train(layout)
        lowered = train.lower(layout.abstract, batch)
        return f"x{config.seq}x{config.seq}x" in lowered.as_text()

    assert has_full_score_matrix("xla")
    assert not has_full_score_matrix("blocks")


@pytest.mark.parametrize(
    ("where", "changes", "expected"),
    [
        (CPU, {}, "xla"),
        (CPU, {"seq": 2049}, "blocks"),
        (CPU, {"seq": 2049, "pe": "t5"}, "xla"),
        (V3, {}, "xla"),
        (V5E, {}, "splash"),
        (V5E, {"dtype": "float32"}, "xla"),
        (V5E, {"pe": "t5"}, "xla"),
        (V5E, {"seq": 200}, "xla"),
        (V5E, {"attention": "xla"}, "xla"),
        (A100, {}, "xla"),  # a head size of 256 is too large
        (A100, {"n_heads": 32}, "cudnn"),
        (H200, {}, "cudnn"),
        (H200, {"seq": 200}, "cudnn"),
        (device("gpu", "AMD Instinct MI300X", "gfx942"), {}, "xla"),
    ],
)
def test_auto_selects_the_best_backend_for_the_device(monkeypatch, where, changes, expected):
    monkeypatch.setattr(attention_module, "_cudnn_disagrees", lambda head_size: None)
    assert attention_backend(GPTJ.replace(**changes), where) == expected


def test_a_gpu_whose_cudnn_fails_or_differs_uses_xla(monkeypatch):
    # Without cuDNN on this machine, the small comparison batch cannot run.
    assert attention_backend(GPTJ, H200) == "xla"
    with pytest.raises(InputError, match="'cudnn', which fails on this machine \\("):
        attention_backend(GPTJ.replace(attention="cudnn"), H200)
    real = jax.nn.dot_product_attention
    for error, expected in ((0.0, "cudnn"), (0.5, "xla")):

        def fake_attention(*inputs, implementation, error=error, **options):
            wrong = error if implementation == "cudnn" else 0.0
            return real(*inputs, implementation="xla", **options) * (1 + wrong)

        monkeypatch.setattr(jax.nn, "dot_product_attention", fake_attention)
        _cudnn_disagrees.cache_clear()
        assert attention_backend(GPTJ, H200) == expected
    _cudnn_disagrees.cache_clear()


def test_only_programs_over_whole_sequences_select_a_backend():
    config = small_config(attention="splash")  # not available on CPUs
    layout = step.StateLayout(config, mesh_of(1, 1))
    assert layout.shardings
    programs.compile_decode(weight_layout(layout), None, 1)
    with pytest.raises(InputError, match="requires seq to be a multiple of 128"):
        step.compile_eval(layout)


@pytest.mark.parametrize(
    ("where", "changes", "words"),
    [
        (CPU, {"attention": "splash"}, "'splash', which requires a TPU, but the devices are 'cpu'"),
        (V3, {"attention": "splash"}, "requires a TPU v4 or later, but the devices are 'TPU v3'"),
        (
            V5E,
            {"attention": "splash", "dtype": "float32"},
            "only bfloat16, but dtype is 'float32'",
        ),
        (V5E, {"attention": "splash", "seq": 200}, "a multiple of 128, but seq is 200"),
        (V5E, {"attention": "splash", "pe": "t5"}, "does not support the relative position bias"),
        (V5E, {"attention": "cudnn"}, "requires an NVIDIA GPU, but the devices are 'TPU v5 lite'"),
        (A100, {"attention": "cudnn"}, "up to 128 on 'NVIDIA A100-SXM4-80GB', but the head size"),
        (
            device("gpu", "Tesla V100", "7.0"),
            {"attention": "cudnn"},
            "requires compute capability 8",
        ),
    ],
)
def test_an_unsupported_backend_is_refused(where, changes, words):
    with pytest.raises(InputError, match=words) as error:
        attention_backend(GPTJ.replace(**changes), where)
    assert str(error.value).startswith("config: attention is '")
    assert str(error.value).endswith("set it to 'auto'")


def test_unsupported_lengths_and_packed_texts_fall_back_unless_requested():
    text = np.zeros((1, 100), np.int32)
    splash, cudnn = Auto(attention="splash"), Auto(attention="cudnn")
    assert attend_function(GPTJ, splash, 256, text) is not None
    assert attend_function(GPTJ, splash, 100, None) is None
    assert attend_function(GPTJ, cudnn, 100, None) is not None
    assert attend_function(GPTJ, cudnn, 100, text) is None
    # Even in these cases, long sequences do not materialise all attention scores.
    long = np.zeros((1, 2056), np.int32)
    assert attend_function(GPTJ, splash, 2056, None) is not None
    assert attend_function(GPTJ, cudnn, 2056, long) is not None
    assert attend_function(GPTJ, Auto(), 2056, long) is None
    with pytest.raises(InputError, match="'cudnn', which does not support packed records"):
        attend_function(GPTJ.replace(attention="cudnn"), cudnn, 100, text)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_positions_written_in_turn_or_at_once_are_the_same(rows):
    """TPUs do the one, all else the other; rows that do not exist are left out."""
    rng = np.random.default_rng(rows)

    def random(*shape: int) -> LayerCache:
        k, v = rng.normal(size=(2, *shape))
        return LayerCache(jax.numpy.array(k), jax.numpy.array(v))

    cache, new = random(5, 3, 6, 4), random(rows, 3, 1, 4)
    row_B, slot_B = rng.permutation(8)[:rows], rng.integers(0, 6, rows)
    at_once = cache_module._scatter_one(cache, new, row_B, slot_B)
    in_turn = jax.jit(cache_module.write_in_turn)(cache, new, row_B, slot_B)
    jax.tree.map(np.testing.assert_array_equal, at_once, in_turn)
    expected = np.array(cache.k_BHSK)
    for row, slot, k_HTK in zip(row_B, slot_B, new.k_BHSK, strict=True):
        if row < 5:
            expected[row, :, slot] = k_HTK[:, 0]
    np.testing.assert_array_equal(in_turn.k_BHSK, expected)
