"""Positions split over devices: training, evaluation, logits and answers, against cp 1."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.generation import forward, texts
from mesh_transformer.mesh.devices import make_mesh
from mesh_transformer.model import block_attention, dropout
from mesh_transformer.performance.hlo import Collective, parse
from mesh_transformer.training import step
from mesh_transformer.transformer_shard import CausalTransformer, load
from mesh_transformer.util import InputError
from tests.conftest import SMALL, random_batch

ROWS = 4
GROUPED = {"block": "llama", "key_heads": 2, "sliding_window": 9, "sliding_layers": [0]}
RAMP = {"batch_ramp_steps": 2, "gradient_accumulation_steps": 2}
COPIED = {"block": "llama", "n_heads": 8, "key_heads": 1}  # on each mp shard
DROPOUT = {"dropout_embedding": 0.1, "dropout_attention": 0.2, "dropout_residual": 0.1}
GROUPED |= {"qk_norm": "head", "score_cap": 5.0}


def config_of(**changes: Any) -> Config:
    return Config(**(SMALL | {"seq": 64, "clip_norm": 0.5} | changes))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a model for adapters, and return its folder."""
    folder = str(tmp_path_factory.mktemp("base"))
    network = CausalTransformer(config_of(tpu_size=1), devices=jax.devices()[:1])
    network.save(folder)
    network.close()
    return folder


def results(config: Config, packed: bool, base: str) -> dict[str, Any]:
    """Train three steps, and return losses, parameters, losses per token, logits and answers."""
    assert config.tpu_size is not None
    devices = jax.devices()[: config.tpu_size]
    network = CausalTransformer(config, devices=devices, init=not config.lora_rank)
    if config.lora_rank:
        network.load(base)
    losses = []
    for seed in range(3):
        batch = random_batch(config, 2, ROWS, seed=seed)
        if packed:
            rng = np.random.default_rng(seed)
            texts = rng.integers(1, 5, batch["obs"].shape)
            batch["segment_ids"] = np.sort(texts, axis=-1).astype(np.int32)
            batch["loss_mask"] = rng.integers(0, 2, texts.shape).astype(np.uint8)
        metrics = network.train(batch)
        losses += [metrics[name] for name in ("loss", "last_loss", "grad_norm", "grad_norm_micro")]
    sample = {key: x[0] for key, x in batch.items() if key != "loss_mask"}
    evaluated = network.eval(sample)
    return {
        "losses": np.array(losses, np.float64),
        "params": jax.tree.map(np.asarray, network.saved_state()["params"]),
        "evaluated": np.asarray(evaluated["all_loss"]),
        "correct": np.asarray(evaluated["correct"]),
        "logits": np.asarray(network.logits(sample["obs"])),
        "answers": network.generate(sample["obs"][:, :9], [9] * ROWS, 5, {"temp": 0.0}),
    }


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("mesh", "changes", "packed"),
    [
        ((2, 2, 2), {"partitioning": "jit", "zero": 3}, True),
        ((1, 2, 4), GROUPED, True),
        ((2, 4, 1), {"block": "neox", "attention_window": 21}, False),
        ((2, 2, 2), {"zero": 1}, True),
        ((1, 8, 1), GROUPED | {"partitioning": "jit"}, False),
        ((2, 2, 2), {"block": "gpt2", "zero": 3}, False),
        ((1, 4, 2), {"block": "geglu", "partitioning": "jit", "remat": "none"}, True),
        ((1, 4, 1), {"lora_rank": 2, "loss_chunk": 5}, True),
        ((2, 2, 2), {"teacher": "BASE", "distill_weight": 0.5, "z_loss": 0.1, "zero": 3}, True),
        ((1, 2, 2), {"lora_rank": 2, "frozen_bits": 8, "offload": "moments"}, False),
        ((2, 2, 1), {"norm": "layernorm-desync", "optimizer": "muon"}, False),
        ((1, 2, 1), {"remat": "dots", **RAMP}, False),
        ((1, 2, 2), {"context_attention": "all_to_all", **DROPOUT}, True),
        ((1, 4, 1), GROUPED | {"context_attention": "all_to_all", "zero": 1}, True),
        ((2, 2, 2), GROUPED | {"context_attention": "all_to_all", "partitioning": "jit"}, True),
        ((1, 2, 2), COPIED | {"context_attention": "all_to_all", "dtype": "float32"}, False),
        ((2, 2, 2), COPIED | {"shard_activations": True, "zero": 3}, True),
        ((1, 4, 2), {"block": "neox", "shard_activations": True, "partitioning": "jit"}, True),
        ((1, 4, 1), DROPOUT, False),
        (
            (1, 2, 2),
            {"attention": "splash_interpreted", "context_attention": "all_to_all", "seq": 128},
            True,
        ),
    ],
    ids=str,
)
def test_results_are_those_of_whole_sequences(
    monkeypatch: pytest.MonkeyPatch,
    mesh: tuple[int, int, int],
    changes: dict[str, Any],
    packed: bool,
    base: str,
) -> None:
    dp, cp, mp = mesh
    monkeypatch.setattr(block_attention, "BLOCK", 4)  # several blocks per chunk
    monkeypatch.setattr(block_attention, "KEYS", 4)
    monkeypatch.setattr(dropout, "KEYS", 4)
    if "teacher" in changes:
        changes = changes | {"teacher": base}
    alone = {key: x for key, x in changes.items() if key not in ("partitioning", "remat")}
    alone |= {"per_replica_batch": ROWS // dp}
    expected = results(config_of(tpu_size=dp, **alone), packed, base)
    sizes = {"context_parallel": cp, "cores_per_replica": mp, "tpu_size": dp * cp * mp}
    actual = results(config_of(**alone | changes | sizes), packed, base)
    # f32 sums in another order, over three Adam steps.
    np.testing.assert_allclose(actual["losses"], expected["losses"], rtol=2e-5)
    for key, bound in (("params", 1e-4), ("evaluated", 1e-3), ("logits", 1e-3)):
        jax.tree.map(
            lambda x, y, bound=bound: np.testing.assert_allclose(x, y, rtol=0, atol=bound),
            actual[key],
            expected[key],
        )
    np.testing.assert_array_equal(actual["correct"], expected["correct"])
    np.testing.assert_array_equal(actual["answers"], expected["answers"])


def layer_collectives(config: Config) -> list[list[Collective]]:
    """Return the collectives of the forward and of the backward pass of a layer."""
    layout = step.StateLayout(config, make_mesh(config, jax.devices()[: config.tpu_size]))
    train: Any = step.compile_train(layout)
    lowered = train.lower(layout.abstract, random_batch(config, 2, ROWS))
    loops = parse(lowered.compile().as_text()).loops
    layers = [loop for microbatch in loops for loop in microbatch.loops if loop.collectives]
    for loop in layers:  # over blocks
        assert not any(inner.collectives for inner in loop.all()[1:])
    return [loop.collectives for loop in layers]


@pytest.mark.parametrize("exchange", ["ring", pytest.param("all_to_all", marks=pytest.mark.slow)])
def test_a_layer_sends_what_a_calculation_says(exchange: Any) -> None:
    """Over cp, keys go round or heads are exchanged; over mp, a pass has two all-reduces."""
    cp, mp = 4, 2
    config = config_of(
        context_parallel=cp,
        cores_per_replica=mp,
        tpu_size=cp * mp,
        context_attention=exchange,
        per_replica_batch=ROWS,
        gradient_accumulation_steps=2,
        **COPIED | {"key_heads": 2},
    )
    stream = 4 * ROWS * config.seq // cp * config.d_model
    queries = 4 * ROWS * config.seq // cp * config.n_heads // mp * config.d_head
    keys = queries // config.group
    sums, kinds = [], "all-to-all" if exchange == "all_to_all" else "collective-permute"
    sent = []
    for collectives in layer_collectives(config):
        assert {c.kind for c in collectives} == {"all-reduce", kinds}
        over_mp = [c for c in collectives if c.kind == "all-reduce"]
        assert all(len(group) == mp for c in over_mp for group in c.groups)
        sums.append([c.bytes for c in over_mp if c.bytes == stream])
        assert sum(c.bytes for c in over_mp) == stream * len(sums[-1])
        sent.append(sum(c.bytes for c in collectives if c.kind == kinds))
    assert [len(own) for own in sums] == [2, 2]
    if exchange == "ring":
        once = 2 * (cp - 1) * keys  # Keys and values go round,
        # in the backward pass (the recomputed forward pass shares it) with their gradients, which
        # then go home.
        assert sent == [once, 2 * once + 2 * keys]
    else:
        # One key head for 4 query heads is sent four times, as cp does not divide it.
        once = 2 * queries + 2 * cp * keys
        assert sent == [once, 2 * once]


def test_causal_work_is_balanced() -> None:
    """All devices have equal numbers of pairs of blocks, less than 2 % of which are padding."""
    for length, cp in ((32768, 4), (32768, 8), (131072, 8), (1048576, 32)):
        size = block_attention.block_length(length, cp)
        pairs = block_attention.block_pairs(length, size, length, cp)
        real = np.zeros(cp)
        for own in pairs.values():
            real += (own.query_number >= own.key_number).sum(axis=1)
        loops = sum(own.query.shape[1] for own in pairs.values())
        assert real.min() == real.max()
        assert loops < 1.02 * real.mean()


@pytest.mark.slow
def test_checkpoints_are_loaded_onto_other_meshes(tmp_path: Path) -> None:
    network = CausalTransformer(config_of(context_parallel=2), devices=jax.devices()[:2])
    network.train(random_batch(network.config, 1, 1))
    network.save(str(tmp_path))
    tokens = np.arange(64)[None] % 128
    expected = np.asarray(network.logits(tokens))
    network.train(random_batch(network.config, 1, 1, seed=1))
    uninterrupted = jax.tree.map(np.asarray, network.saved_state())
    network.close()
    resumed = CausalTransformer(network.config, devices=jax.devices()[:2], init=False)
    resumed.restore(str(tmp_path))
    resumed.train(random_batch(network.config, 1, 1, seed=1))
    state = jax.tree.map(np.asarray, resumed.saved_state())
    jax.tree.map(np.testing.assert_array_equal, state, uninterrupted)
    for changes in ({}, {"tpu_size": 1}, {"context_parallel": 4, "tpu_size": 4}):
        other = load(str(tmp_path), changes=changes)
        assert other.config.context_parallel == changes.get("context_parallel", 1)
        # f32 sums in another order; those of a wrong mask differed by up to 1.
        np.testing.assert_allclose(other.logits(tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_generation_holds_no_scores_of_whole_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices along cp repeat the work; beyond `LONG` tokens, attention is that of blocks."""
    tokens = np.random.default_rng(0).integers(0, 128, (2, 41))
    results = []
    for cp, partitioning, long in ((1, "shard_map", 99), (2, "shard_map", 16), (2, "jit", 16)):
        for module in (forward, texts):
            monkeypatch.setattr(module, "LONG", long)
        sizes = {"context_parallel": cp, "cores_per_replica": 2, "tpu_size": 2 * cp}
        config = config_of(**sizes, partitioning=partitioning)
        network = CausalTransformer(config, devices=jax.devices()[: config.tpu_size])
        results.append(np.asarray(network.score(tokens, 3).logprob))
    for actual in results[1:]:  # f32 sums in another order
        np.testing.assert_allclose(actual, results[0], rtol=0, atol=1e-5)


def test_other_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="sequences of 2036 tokens have chunks of 509"):
        CausalTransformer(
            config_of(seq=4096, context_parallel=2, length_buckets=[2036]),
            devices=jax.devices()[:2],
        )
    network = CausalTransformer(config_of(context_parallel=2), devices=jax.devices()[:2])
    with pytest.raises(InputError, match="sequences have 30 tokens, not a multiple of twice"):
        network.logits(np.zeros((1, 30), np.uint32))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq": 18, "context_parallel": 4}, "seq 18 is not a multiple of 8, the number of"),
        ({"context_parallel": 2, "tpu_size": 3}, "tpu_size 3 is not divisible by its product"),
        (
            {"context_parallel": 4, "attention": "splash", "context_attention": "ring"},
            "which excludes attention splash; set attention to auto, or context_attention",
        ),
        ({"context_parallel": 2, "pe": "t5"}, "but pe is t5, whose bias is not split"),
        (
            {"context_parallel": 4, "context_attention": "all_to_all", "cores_per_replica": 4},
            "a shard has 2 heads, not divisible by 4; set context_attention to ring",
        ),
        ({"context_parallel": 3, "seq": 18}, "context_parallel is 3, expected a power of two"),
        (
            {"context_parallel": 2, "virtual_mesh": [2, 1]},
            "whose cp .1. context_parallel does not divide",
        ),
        ({"context_parallel": 2, "exact": True}, "but exact is true"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        config_of(**changes)
