"""LoRA on a base in 8 or 4 bits (`frozen_bits`): training, resuming, exports, memory, refusals."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.checkpoint import conversion, loading, saved_step
from mesh_transformer.checkpoint.native import find
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.model import flops, matrices, transformer
from mesh_transformer.model.casts import packed_bytes
from mesh_transformer.performance import analytic
from mesh_transformer.training.step import StateLayout
from mesh_transformer.transformer_shard import CausalTransformer, load
from mesh_transformer.util import InputError
from tests.conftest import random_batch
from tests.model.test_lora import assert_close, logits, lora_config, run, run_config, state_of
from tests.model.test_lora import trained as trained_once
from tests.training.test_step import mesh_of


def dequantized(state: Any) -> Any:
    """Return a state whose frozen matrices are the floats that they stand for."""
    return state | {"frozen": jax.tree.map(np.asarray, matrices.dequantized(state["frozen"]))}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("bits", "block", "split"),
    [
        (8, "llama", {"cores_per_replica": 4, "partitioning": "shard_map", "zero": 3}),
        (4, "gptj", {"cores_per_replica": 2, "partitioning": "jit", "zero": 3}),
        (4, "llama", {"cores_per_replica": 4, "partitioning": "jit", "zero": 1}),
        (4, "geglu", {"cores_per_replica": 4, "partitioning": "shard_map", "zero": 3}),
        (8, "neox", {"cores_per_replica": 2, "partitioning": "shard_map", "remat": "none"}),
        (4, "gptj", {"cores_per_replica": 3, "ff_size": 768}),
    ],
)
def test_a_step_is_that_of_the_matrices_restored_to_floats(bits, block, split):
    """With few rows, which generation would multiply by another path, and without gradients.

    The heads of the last case are padded.
    """
    copied = {"key_heads": 2} if block == "llama" else {}  # mp is 4
    changes = {"n_heads": 4, "d_model": 256, "clip_norm": 1e9, "block": block} | copied
    config = lora_config(**changes, frozen_bits=bits, ff_size=split.get("ff_size"))
    state, batch = state_of(config), random_batch(config, 2, 4)
    assert batch["obs"][0].size <= matrices.MOST_ROWS_IN_DIGITS
    whole, plain = dequantized(state), config.replace(frozen_bits=None)
    expected, expected_metrics = trained_once(plain, whole, batch)
    alone, metrics = trained_once(config, state, batch)
    assert_close(alone["params"], expected["params"])
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], abs=1e-5)

    dp = 8 // split["cores_per_replica"]
    config = config.replace(**split, tpu_size=dp * split["cores_per_replica"])
    layout = StateLayout(config, mesh_of(dp, config.shards))
    actual, metrics = trained_once(config, layout.padded(jax.device_put(state)), batch)
    actual = jax.tree.map(np.asarray, layout.unpadded(jax.device_put(actual, layout.shardings)))
    assert_close(actual["params"], expected["params"])
    jax.tree.map(np.testing.assert_array_equal, actual["frozen"], state["frozen"])
    for name in ("loss", "grad_norm"):
        assert metrics[name] == pytest.approx(expected_metrics[name], abs=1e-5)
    unchanged = jax.tree.map(np.array_equal, actual["params"], state["params"])
    assert not any(jax.tree.leaves(unchanged))


@pytest.mark.parametrize("bits", [8, 4])
def test_frozen_matrices_take_their_bits(bits):
    """And a scale: of f32 per column with 8 bits, of bf16 per 64 inputs with 4."""
    config = lora_config(d_model=256, n_heads=4, frozen_bits=bits, dtype="bfloat16")
    frozen = StateLayout(config, mesh_of(1, 1)).abstract["frozen"]
    leaves = jax.tree.leaves(frozen["layers"])
    stored = sum(packed_bytes(leaf.shape, leaf.dtype) for leaf in leaves)
    D, L = config.d_model, config.layers
    weights, columns = 12 * D**2 * L, 9 * D * L  # of q, k, v, o, fc and out
    others = 2 * (
        flops.n_params(config) - weights - 2 * config.n_vocab * D - config.n_vocab - 3 * D
    )
    scales = 4 * columns if bits == 8 else 2 * weights // 64
    assert stored == weights * bits // 8 + scales + others
    # The estimate on paper counts biases and norms as matrices, and no scales of columns.
    plain = config.replace(frozen_bits=None)
    estimates = [analytic.memory_bytes(c, 1, "xla") for c in (plain, config)]
    assert estimates[0] - estimates[1] == pytest.approx(2 * weights + others - stored, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_a_virtual_mesh_gives_the_same_bits(bits):
    changes = {"frozen_bits": bits, "virtual_mesh": [2, 4], "d_model": 256, "dtype": "bfloat16"}
    config = lora_config(**changes)
    state, batch = state_of(config), random_batch(config, 2, 4)
    results = [
        trained_once(config.replace(cores_per_replica=mp, tpu_size=dp * mp), state, batch)
        for dp, mp in ((1, 1), (2, 2))
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Config]:
    """Return a folder with a base at step 1, and adapters at step 2 of that base in 4 bits."""
    folder = tmp_path_factory.mktemp("runs")
    config = run_config(folder).replace(frozen_bits=4, lr=0.1)
    run(config.merged(), folder / "base", 1)
    run(config, folder / "adapters", 2, folder / "base")
    return folder, config


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(runs, tmp_path):
    folder, config = runs
    run(config, tmp_path, 1, folder / "base")
    resumed = run(config, tmp_path, 2)
    uninterrupted = CausalTransformer(config, devices=jax.devices()[:1], init=False)
    uninterrupted.restore(str(folder / "adapters"))
    jax.tree.map(np.testing.assert_array_equal, resumed.state, uninterrupted.state)
    assert resumed.checksum() == uninterrupted.checksum()
    sums = find(str(tmp_path)).aux["lora"]["checksums"]  # those of the base before it is rounded
    plain = loading.load_base(
        "", StateLayout(config.replace(frozen_bits=None), resumed.mesh), [folder / "base"], None
    )
    assert sums == plain[1].checksums
    other = CausalTransformer(config.replace(frozen_bits=8), devices=jax.devices()[:1], init=False)
    with pytest.raises(
        InputError, match=r"saved by a run with frozen_bits 4, but .* has 8; change"
    ):
        other.restore(str(tmp_path))


def test_exports_have_the_logits_of_training(runs, tmp_path):
    folder, config = runs
    trained = load(folder / "adapters", config)
    expected = logits(trained)
    plain = load(folder / "adapters", config.replace(frozen_bits=None))
    assert np.abs(expected - logits(plain)).max() > 1e-2  # so that the rounding shows
    # The tolerances: a merged weight is rounded to f32 as one value, a weight and its adapter, and
    # adapters that are joined, are rounded separately.
    for kind in ("native", "hf"):
        conversion.convert(folder / "adapters", "native", tmp_path / kind, kind)
        np.testing.assert_allclose(
            logits(load(tmp_path / kind, config.merged())), expected, atol=1e-5
        )
    merged = load(folder / "adapters", config.merged())
    np.testing.assert_allclose(logits(merged), expected, atol=1e-5)
    tokens = np.arange(12).reshape(2, 6)
    scores = [network.score(tokens, 0).logprob for network in (trained, merged)]
    np.testing.assert_allclose(*scores, atol=1e-5)
    # Adapters that are not merged are those of any base of these weights.
    conversion.convert(folder / "adapters", "native", tmp_path / "peft", "peft")
    base = load(folder / "base", config.merged())
    for path in (folder / "adapters", tmp_path / "peft"):
        base.add_adapters([str(path)])
        scores = base.score(tokens, 0, adapter=base.adapters).logprob
        np.testing.assert_allclose(scores, plain.score(tokens, 0).logprob, atol=1e-5)


@pytest.mark.parametrize("kind", ["native", "hf"])
def test_loading_holds_one_matrix_in_floats_at_a_time(runs, tmp_path, monkeypatch, kind):
    folder, config = runs
    path, most, quantize = folder / "base", 0, matrices.quantize
    if kind == "hf":
        path = tmp_path / "hf"
        conversion.convert(folder / "base", "native", path, "hf")

    def held() -> int:
        return sum(packed_bytes(x.shape, x.dtype) for x in jax.live_arrays())

    def observed(*args: Any, **options: Any) -> Any:
        nonlocal most
        most = max(most, held() - before)
        return quantize(*args, **options)

    before = held()
    monkeypatch.setattr(matrices, "quantize", observed)
    monkeypatch.setattr(saved_step, "_CAST_BYTES", 1)  # read together
    network = load(path, config)
    state = sum(packed_bytes(x.shape, x.dtype) for x in jax.tree.leaves(network.state))
    largest = 4 * 4 * config.d_model**2 * config.layers
    # The matrix, and the checksums of all leaves.
    assert 0 < most < state + largest + 1000 < before + 4 * flops.n_params(config)
    expected = loading.load_base("", network._layout, [Source(folder / "base")], None)[0]
    jax.tree.map(np.testing.assert_array_equal, network.state["frozen"], expected)


def test_the_same_probabilities_with_exact(runs):
    folder, config = runs
    network = load(folder / "adapters", config.replace(exact=True, dtype="bfloat16"))
    tokens = np.random.default_rng(0).integers(0, config.n_vocab, (3, config.seq + 1))
    scored = network.score(tokens, 0).logprob
    losses = network.eval({"obs": tokens[:, :-1], "target": tokens[:, 1:]})["all_loss"]
    np.testing.assert_array_equal(scored, -losses)


def test_what_cannot_be_quantized_is_one_line():
    with pytest.raises(InputError, match="frozen_bits is 4, but lora_rank is 0, so that no matrix"):
        lora_config(lora_rank=0, frozen_bits=4)
    with pytest.raises(InputError, match=r"frozen_bits is 4, but a matrix .* 40 inputs, .* of 16"):
        StateLayout(lora_config(d_model=40, n_heads=8, frozen_bits=4), mesh_of(1, 1))
    wide = lora_config(d_model=128, n_heads=8, frozen_bits=4, cores_per_replica=4)
    with pytest.raises(
        InputError, match=r"128 inputs, 32 per device, .* of 64, .* frozen_bits to 8"
    ):
        StateLayout(wide, mesh_of(1, 4))
    assert Config(**json.loads(json.dumps(wide.as_dict()))) == wide
    assert wide.merged().frozen_bits is None
    sizes = map_declared(lambda d: d.shape, transformer.stored(wide))["layers"]["layer/q"]["w"]
    assert sizes == matrices.Int4((2, 2, 64, 128), (2, 2, 1, 128))
