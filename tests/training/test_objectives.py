"""Objectives: against TRL, on every mesh, packed or not, and users' own."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.data.batches import GROUP, whole_batch
from mesh_transformer.data.tfrecords import write_set
from mesh_transformer.families import OBJECTIVES
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.performance import plan
from mesh_transformer.performance.topology import slice_named
from mesh_transformer.training import objectives, step
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import SMALL
from tests.support import trl_preferences as trl
from tests.training.test_step import fresh_state, mesh_of

GOLDEN = json.loads(trl.PATH.read_text())
SEQ, ROWS = 32, 8
TINY = SMALL | {"seq": SEQ, "loss_chunk": 8, "z_loss": 1e-4}


def config_of(objective: str, **changes: Any) -> Config:
    chosen: dict[str, Any] = {"objective": objective, "beta": trl.BETA, "margin": trl.MARGIN}
    if objective == "grpo":
        chosen = {"objective": objective, "reward": "file.py:function"}
    if objective == "simpo":
        chosen["beta"] = trl.SIMPO_BETA
    weights = dict(zip(("desirable_weight", "undesirable_weight"), trl.LABEL_WEIGHTS, strict=True))
    return Config.from_dict(TINY | chosen | weights | changes)


def head_of(config: Config) -> objectives.Head:
    head = objectives.head_of(config)
    assert head is not None
    return head


@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_losses_and_gradients_are_trls(name: str) -> None:
    sums, counts, references = (np.float32(GOLDEN[k]) for k in ("sums", "counts", "references"))
    head = head_of(config_of(name))

    def grouped(values: np.ndarray, others: Any) -> jax.Array:
        """Return groups [1, N, 3] of a pair or, for KTO, of one labelled text and another one."""
        chosen, rejected = np.split(values, 2)
        if name != "kto":
            return jnp.stack((chosen, rejected, jnp.zeros(len(chosen))), axis=-1)[None]
        none = np.zeros_like(chosen)
        labelled = (np.r_[chosen, none], np.r_[none, rejected], np.float32(others))
        return jnp.stack(labelled, axis=-1)[None]

    golden = GOLDEN[name]
    ones = np.ones(len(sums))
    all_counts = grouped(counts, ones)
    weights = objectives.counted(all_counts, by_text=head.by_text)

    def loss_of(sums_BN3: jax.Array) -> jax.Array:
        others = grouped(references, golden.get("other_references"))
        loss, _ = head.function(objectives.texts_of(sums_BN3, all_counts, others))
        return jnp.sum(loss * weights) / weights.sum()

    loss, gradient = jax.value_and_grad(loss_of)(grouped(sums, golden.get("other_sums")))
    gradient = np.asarray(gradient[0])
    assert not gradient[:, 2].any()  # the estimate of the KL divergence is detached
    flat = gradient[:, :2].T.ravel()
    # Sums of up to 9 terms and their functions in f32: a few units in the last place.
    np.testing.assert_allclose(loss, golden["loss"], rtol=3e-6)
    np.testing.assert_allclose(flat[flat != 0], golden["gradient"], rtol=2e-5, atol=1e-7)


def grpo_keys(kind: str) -> dict[str, Any]:
    """Return the config keys of TRL's GRPO loss `kind`."""
    clip = {"clip_low": trl.CLIP_LOW, "clip_high": trl.CLIP_HIGH, "importance_cap": trl.CAP}
    divide = {"divide_by": "answer_tokens" if kind == "dr_grpo" else "tokens"}
    # A reference requires adapters, which change nothing here.
    reference = {"beta": trl.BETA, "lora_rank": 1, "answer_tokens": trl.DIVISOR}
    return clip | divide | reference | {"objective": "grpo", "reward": "file.py:function"}


def rollout_of(logps_BT: np.ndarray) -> dict[str, np.ndarray]:
    """Return TRL's rollout with advantages of each token."""
    values = trl.rollout(logps_BT)
    return values | {"advantage": values["advantage"][:, None] * np.ones_like(logps_BT)}


@pytest.mark.parametrize("kind", ["dapo", "dr_grpo"])
def test_grpo_losses_and_gradients_are_trls(kind: str) -> None:
    logps_BT, mask_BT = np.float32(GOLDEN["logps"]), np.uint8(GOLDEN["mask"])
    head = head_of(Config.from_dict(TINY | grpo_keys(kind)))
    weights = objectives.objective_weights(jnp.asarray(mask_BT)[None], None, Auto(), head)[0]

    def loss_of(logprob_BT: jax.Array) -> jax.Array:
        tokens = objectives.tokens_of(logprob_BT, jnp.asarray(mask_BT), rollout_of(logps_BT))
        loss_BT, metrics = head.function(tokens)
        assert 0 < metrics["clipped"].mean() < 1
        return jnp.mean(weights * loss_BT)

    with jax.disable_jit():
        loss, gradient = jax.value_and_grad(loss_of)(logps_BT)
    golden = GOLDEN[kind]
    # Sums of 60 terms in f32, and functions of them: some units in the last place.
    np.testing.assert_allclose(loss, golden["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, golden["gradient"], rtol=2e-5, atol=1e-7)


def llama(**changes: Any) -> tuple[Config, Any]:
    """Return TRL's tiny Llama as a config and parameters."""
    sizes = trl.LLAMA
    config = Config.from_dict(
        {
            "layers": sizes["num_hidden_layers"],
            "d_model": sizes["hidden_size"],
            "n_heads": sizes["num_attention_heads"],
            "key_heads": sizes["num_key_value_heads"],
            "ff_size": sizes["intermediate_size"],
            "n_vocab": sizes["vocab_size"],
            "seq": 2 * trl.POSITIONS,
            "block": "llama",
            "dtype": "float32",
            "objective": "dpo",
            "beta": trl.BETA,
        }
        | changes
    )
    return config, from_hugging_face(trl.llama_weights(GOLDEN["llama"]["shapes"]))


def from_hugging_face(weights: dict[str, np.ndarray]) -> Any:
    """Return arrays by their names in Hugging Face's format as a tree of our parameters."""

    def layers(name: str) -> np.ndarray:
        each = [weights[f"model.layers.{n}.{name}.weight"] for n in range(2)]
        return np.stack([x.T for x in each])

    attention = {f"layer/{x}": {"w": layers(f"self_attn.{x}_proj")} for x in "qkv"}
    gates = {"layer/gate": "mlp.gate_proj", "layer/fc": "mlp.up_proj"}
    norms = {"layer/norm": "input_layernorm", "layer/ff_norm": "post_attention_layernorm"}
    ends = {"o": layers("self_attn.o_proj"), "out": layers("mlp.down_proj")}
    return {
        "embed": {"embedding": {"w": weights["model.embed_tokens.weight"]}},
        "layers": attention
        | {ours: {"w": layers(theirs)} for ours, theirs in gates.items()}
        | {ours: {"scale": layers(theirs)} for ours, theirs in norms.items()}
        | {"layer": ends},
        "proj": {
            "projection/norm": {"scale": weights["model.norm.weight"]},
            "projection/head": {"w": weights["lm_head.weight"].T},
        },
    }


def llama_pairs() -> dict[str, np.ndarray]:
    """Return TRL's batch as records [B, T] of one pair each."""
    tokens, mask, reference = trl.llama_batch()
    shape = (trl.PAIRS, 2 * trl.POSITIONS)

    def joined(x: np.ndarray) -> np.ndarray:
        return np.concatenate(np.split(x, 2), axis=1).reshape(shape)

    sums = np.zeros(shape, np.float32)
    sums[:, :2] = np.split(reference, 2)[0][:, None]
    sums[:, 1] = np.split(reference, 2)[1]
    return {
        "obs": joined(tokens[:, :-1]).astype(np.uint32),
        "target": joined(tokens[:, 1:]).astype(np.uint32),
        "loss_mask": joined(mask).astype(np.uint8),
        "segment_ids": np.tile(np.repeat(np.int32([1, 2]), trl.POSITIONS), (trl.PAIRS, 1)),
        "reference": sums,
    }


def test_gradients_of_a_models_parameters_are_trls() -> None:
    config, params = llama()
    head, batch, par = head_of(config), llama_pairs(), Auto()
    mask, segments = batch["loss_mask"], jnp.asarray(batch["segment_ids"])
    weights = objectives.objective_weights(jnp.asarray(mask)[None], segments[None], par, head)[0]

    @jax.jit
    def loss_of(params: Any) -> jax.Array:
        sample = (batch["obs"], batch["target"], weights, segments, None, mask)
        values = {"reference": batch["reference"]}
        return objectives.objective_loss(
            params, *sample, values, config=config, par=par, head=head
        )[0]

    assert_trls(jax.value_and_grad(loss_of)(params), GOLDEN["llama"])


def test_gradients_of_a_models_parameters_are_trls_with_grpo() -> None:
    config, params = llama(**grpo_keys("dapo"))
    head, par = head_of(config), Auto()
    config = config.replace(beta=0.0, lora_rank=0)  # the head has what is needed of them
    tokens, mask, _ = trl.llama_batch()
    mask = jnp.asarray(mask)
    weights = objectives.objective_weights(mask[None], None, par, head)[0]
    values = rollout_of(np.float32(GOLDEN["llama_grpo"]["logps"]))

    @jax.jit
    def loss_of(params: Any) -> jax.Array:
        sample = (tokens[:, :-1], tokens[:, 1:], weights, None, None, mask, values)
        return objectives.objective_loss(params, *sample, config=config, par=par, head=head)[0]

    assert_trls(jax.value_and_grad(loss_of)(params), GOLDEN["llama_grpo"])


def assert_trls(actual: tuple[jax.Array, Any], golden: dict[str, Any]) -> None:
    loss, gradients = actual
    shapes = GOLDEN["llama"]["shapes"]
    expected = from_hugging_face(
        {name: np.float32(x).reshape(shapes[name]) for name, x in golden["gradients"].items()}
    )
    np.testing.assert_allclose(loss, golden["loss"], rtol=1e-5)
    # Two programs of f32 matmuls over two layers; gradients are up to 0.5.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6), gradients, expected
    )


def random_groups(
    config: Config, accumulation: int = 2, rows: int = ROWS, most: int = 3
) -> dict[str, np.ndarray]:
    """Return a batch [A, B, T] of groups with random texts, with up to `most` groups in a row."""
    rng = np.random.default_rng(7)
    shape = (accumulation, rows, config.seq)
    batch = {
        "obs": rng.integers(0, config.n_vocab, shape).astype(np.uint32),
        "target": rng.integers(0, config.n_vocab, shape).astype(np.uint32),
        "loss_mask": (rng.random(shape) < 0.6).astype(np.uint8),
        "segment_ids": np.zeros(shape, np.int32),
        "reference": np.zeros(shape, np.float32),
    }
    places = [(0, 1)]
    if config.objective == "kto":
        places = [(0, 2), (1, 2)]
    for at in np.ndindex(shape[:2]):
        position = 0
        for group in range(rng.integers(1, most + 1)):
            for place in places[rng.integers(len(places))]:
                length = int(rng.integers(3, 6))
                text = slice(position, position + length)
                number = GROUP * group + place
                batch["segment_ids"][at][text] = number + 1
                batch["loss_mask"][at][position + length - 1] = 1
                batch["reference"][at][number] = rng.normal(-5 * length / 2, 1)
                position += length
    if config.has_rollouts:
        del batch["segment_ids"], batch["reference"]
        batch["advantage"] = rng.normal(0, 1, shape).astype(np.float32)
        for name in ("old", "sampled"):  # log p of the targets is about this
            batch[name] = rng.normal(-np.log(config.n_vocab), 0.3, shape).astype(np.float32)
    return batch


def write_preferences(folder: Path, objective: str, count: int) -> str:
    """Write `count` records of random texts, and return their index."""
    batch = random_groups(config_of(objective), 1, count)
    names = {"obs": "input_ids", "target": "labels", "loss_mask": "input_mask"}
    names["segment_ids"] = "segment_ids"
    rows = zip(*(batch[key][0] for key in names), strict=True)
    return write_set(folder, "texts", (dict(zip(names.values(), x, strict=True)) for x in rows))[1]


def run(config: Config, dp: int, mp: int, batch: Any) -> tuple[dict[str, float], Any]:
    """Return the metrics and the gradient of a step; the gradient is not clipped."""
    base = config.replace(zero=0, partitioning="jit", cores_per_replica=1, virtual_mesh=None)
    layout = step.StateLayout(config, mesh_of(dp, mp))
    state = jax.tree.map(jax.device_put, fresh_state(base), layout.shardings)
    train = step.compile_train(layout, head_of(config))
    state, metrics = train(state, *whole_batch(config, batch))
    moments = jax.tree.map(
        lambda mu: np.asarray(mu) / (1 - config.adam_b1), state["opt_state"]["mu"]
    )
    return {name: float(value) for name, value in metrics.items()}, moments


CHANGES: dict[str, Any] = {"dtype": "float32", "clip_norm": 1e9, "weight_decay": 0.0}


@functools.cache
def one_device(objective: str) -> tuple[dict[str, float], Any]:
    config = config_of(objective, **CHANGES, partitioning="jit")
    return run(config, 1, 1, random_groups(config))


def assert_same(actual: Any, expected: Any, *, gradients: float = 2e-5) -> None:
    (metrics, moments), (other, others) = actual, expected
    assert metrics.keys() == other.keys()
    for name in metrics.keys() - {"grad_norm_micro", "grad_square_micro"}:  # of parts of a batch
        np.testing.assert_allclose(metrics[name], other[name], rtol=2e-5, atol=1e-6, err_msg=name)
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(others))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=gradients * largest),
        moments,
        others,
    )


MESHES = [
    ("dpo", "shard_map", 1, 8, 0),
    ("kto", "shard_map", 2, 4, 3),
    ("orpo", "jit", 2, 4, 0),
    ("grpo", "shard_map", 2, 4, 3),
    pytest.param("kto", "shard_map", 8, 1, 1, marks=pytest.mark.slow),
    pytest.param("dpo", "jit", 2, 4, 3, marks=pytest.mark.slow),
    pytest.param("simpo", "shard_map", 2, 4, 1, marks=pytest.mark.slow),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("objective", "partitioning", "dp", "mp", "zero"), MESHES)
def test_every_mesh_has_the_results_of_one_device(
    objective: str, partitioning: Any, dp: int, mp: int, zero: Any
) -> None:
    changes = CHANGES | {"partitioning": partitioning, "cores_per_replica": mp, "zero": zero}
    config = config_of(objective, **changes, tpu_size=dp * mp)
    # f32 sums in another order.
    assert_same(run(config, dp, mp, random_groups(config)), one_device(objective))


@pytest.mark.slow
def test_virtual_mesh_has_equal_bits() -> None:
    config = config_of("dpo", **CHANGES, virtual_mesh=[2, 2])
    batch = random_groups(config)
    whole = config.replace(cores_per_replica=2, tpu_size=4)
    one, four = run(config, 1, 1, batch), run(whole, 2, 2, batch)
    jax.tree.map(np.testing.assert_array_equal, one, four)
    assert_same(one, one_device("dpo"))


def unpacked(batch: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """Return a batch [1, `rows`, T] with one group per row, and empty rows at the end."""
    length = batch["obs"].shape[-1]
    result = {key: np.zeros((rows, length), x.dtype) for key, x in batch.items()}
    row = 0
    for at in np.ndindex(batch["obs"].shape[:2]):
        group_of = (batch["segment_ids"][at] - 1) // GROUP
        for group in range(group_of.max() + 1):
            where = np.flatnonzero(group_of == group)
            for key, x in batch.items():
                result[key][row, : len(where)] = x[at][where]
            result["segment_ids"][row, : len(where)] -= GROUP * group
            result["reference"][row] = 0
            result["reference"][row, :GROUP] = batch["reference"][at][GROUP * group :][:GROUP]
            row += 1
    return {key: x[None] for key, x in result.items()}


@pytest.mark.quick(1)
@pytest.mark.parametrize("objective", ["dpo", "orpo", "simpo"])
def test_packing_and_accumulation_change_nothing(objective: str) -> None:
    config = config_of(objective, **CHANGES, partitioning="jit")
    apart = unpacked(random_groups(config), 2 * ROWS * 3)
    single = config.replace(gradient_accumulation_steps=1)
    # The same texts at other places of a row: f32 sums in another order.
    assert_same(run(single, 1, 1, apart), one_device(objective))


def test_ramp_counts_only_the_microbatches_it_uses() -> None:
    config = config_of("dpo", **CHANGES, partitioning="jit")
    ramp = config.replace(gradient_accumulation_steps=4, batch_ramp_steps=5)
    assert_same(run(ramp, 1, 1, random_groups(config)), one_device("dpo"))


def test_groups_without_a_pair_do_not_count() -> None:
    config = config_of("dpo", **CHANGES, partitioning="jit")
    batch = random_groups(config)
    segments = batch["segment_ids"]
    lone = np.where(segments == 0, 3 * (SEQ // 3) - 2, segments)  # a chosen text in the padding
    metrics, moments = run(config, 1, 1, batch | {"segment_ids": lone})
    del metrics["objective/rewards/chosen"]  # the only mean over texts that has them
    other, others = one_device("dpo")
    assert_same((metrics, moments), ({name: other[name] for name in metrics}, others))
    metrics, moments = run(config, 1, 1, batch | {"segment_ids": np.minimum(segments, 1)})
    assert (metrics["counted"], metrics["loss"], metrics["skipped"]) == (0, 0, 1)
    assert not any(x.any() for x in jax.tree.leaves(moments))


def test_metrics_are_means_over_the_update() -> None:
    config = config_of("dpo", **CHANGES, partitioning="jit")
    metrics, _ = one_device("dpo")
    network = CausalTransformer(config, init=False)
    network.state = jax.tree.map(jnp.asarray, fresh_state(config))
    rewards = []
    for row in zip(*(x.reshape(-1, SEQ) for x in random_groups(config).values()), strict=True):
        obs, target, mask, segments, reference = row
        losses = network.eval(
            {"obs": obs[None], "target": target[None], "segment_ids": segments[None]}
        )
        values = -np.asarray(losses["all_loss"], np.float64)[0] * mask
        for group in range(segments.max() // GROUP + 1):
            pair = [GROUP * group, GROUP * group + 1]
            sums = [values[segments == place + 1].sum() for place in pair]
            rewards.append(trl.BETA * (np.array(sums) - reference[pair]))
    chosen, rejected = np.array(rewards).T
    expected = {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margin": (chosen - rejected).mean(),
        "rewards/accuracy": (chosen > rejected).mean(),
        "kl": np.mean(rewards) / trl.BETA,
    }
    actual = {name: metrics[f"objective/{name}"] for name in expected}
    np.testing.assert_allclose([*actual.values()], [*expected.values()], rtol=1e-4)


def test_table_says_what_the_objectives_use() -> None:
    assert OBJECTIVES.keys() == (objectives.OBJECTIVES | objectives.TOKEN_OBJECTIVES).keys()
    for name, kind in OBJECTIVES.items():
        head = head_of(config_of(name))
        assert head.by_token == (kind.records == "prompts"), name
        assert head.needs_reference == kind.needs_reference, name
        assert head.by_text == (kind.records == "labels"), name
    assert objectives.head_of(Config.from_dict(TINY)) is None


@pytest.mark.parametrize(
    ("objective", "part"),
    [
        (lambda texts: texts.sum_BNK.mean(), r"loss has shape \(\)"),
        (lambda texts: (texts.sum_BNK, {"m": texts.sum_BNK[0]}), r"m has shape \(3, 2\)"),
        (lambda texts: None, "loss has shape None"),
    ],
)
def test_functions_that_return_something_else_are_refused(objective: Any, part: str) -> None:
    with pytest.raises(InputError, match=part):
        CausalTransformer(TINY, init=False).set_objective(objective)


def test_batches_that_do_not_fit_are_refused() -> None:
    network = CausalTransformer(config_of("dpo"))
    batch = random_groups(network.config)
    for key in ("loss_mask", "segment_ids", "reference"):
        with pytest.raises(InputError, match=f"the batch has no '{key}'"):
            network.train({name: x for name, x in batch.items() if name != key})
    with pytest.raises(InputError, match="segment_ids has 31, expected 0 to 30"):
        network.train(batch | {"segment_ids": np.full_like(batch["segment_ids"], 31)})


@pytest.mark.quick(1)
@pytest.mark.parametrize("objective", ["dpo", "simpo", "grpo"])
def test_plans_compile_the_objective(objective: str) -> None:
    config = config_of(objective, cores_per_replica=2, rollout_updates=2)
    devices = slice_named("cpu-2")
    own = plan.plan(config, devices, fast=True)
    plain = plan.plan(config.replace(objective=None, beta=None), devices, fast=True)
    arrays = {"dpo": 1 + 4 + 4, "simpo": 1 + 4, "grpo": 1 + 4 + 4 + 4}  # bytes per token
    tokens = config.per_replica_batch * SEQ
    assert own.peak_bytes - plain.peak_bytes >= arrays[objective] * tokens
    assert own.state_bytes == plain.state_bytes
