"""Virtual meshes: the bits of a training run do not depend on the mesh that runs it.

Most programs are compiled as users compile them.  Without the compiler's optimisations, hardly any
operations would be merged, and the tests could hardly fail.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import Config
from mesh_transformer.data.batches import whole_batch
from mesh_transformer.mesh import apart, blocks, virtual
from mesh_transformer.mesh.placement import Rows
from mesh_transformer.model import block_attention
from mesh_transformer.training import step as steps
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import AS_USERS_COMPILE, SMALL, random_batch

STEPS = 3
TRAINING = {
    "virtual_mesh": [2, 4],
    "gradient_accumulation_steps": 2,
    "clip_norm": 0.5,
    "weight_decay": 0.1,
    "adam_eps": 1e-8,  # small, so that no difference of a gradient is lost
    "warmup_steps": 0,
}

BF16 = {"dtype": "bfloat16"}
GPT2 = {"block": "gpt2", "n_heads": 5, "d_model": 80, "n_vocab": 131}  # mp 4 divides none of them
LORA = {"lora_rank": 4, "lora_targets": ["q", "fc", "out"]}


def mesh_of(dp: int, mp: int, cp: int = 1) -> Mesh:
    devices = np.asarray(jax.devices()[: dp * cp * mp])
    if cp == 1:
        return Mesh(devices.reshape(dp, mp), ("dp", "mp"))
    return Mesh(devices.reshape(dp, cp, mp), ("dp", "cp", "mp"))


def trained(
    dp: int, mp: int, changes: dict[str, Any], masked: bool = False, quick: bool = False
) -> dict[str, bytes]:
    """Train a few steps on a mesh; return the bits of the state and of each step's metrics.

    With `quick`, the step is compiled as in other tests.
    """
    config = Config(**(SMALL | TRAINING | changes))
    mesh = mesh_of(dp, mp, config.context_parallel)
    layout = steps.StateLayout(config, mesh)
    state = steps.compile_init(layout)(jax.random.key(0))
    train, result = None, {}
    for number in range(STEPS):
        accumulation = config.microbatches(number)
        rows = config.replicas(dp) * config.per_replica_batch
        batch = random_batch(config, accumulation, rows, seed=number)
        if masked:
            rng = np.random.default_rng(number)
            batch["loss_mask"] = rng.integers(0, 2, batch["obs"].shape).astype(np.uint8)
            batch["segment_ids"] = np.sort(rng.integers(0, 3, batch["obs"].shape)).astype(np.uint8)
        batch, *count = whole_batch(config, batch)
        arguments = (Rows(mesh).place(batch, P(None, "dp")), *count)
        if train is None:
            lowered = steps.compile_train(layout).lower(state, *arguments)
            train = lowered.compile(compiler_options={} if quick else AS_USERS_COMPILE)
        state, metrics = train(state, *arguments)
        result |= {f"{name} {number}": np.asarray(x).tobytes() for name, x in metrics.items()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(layout.unpadded(state)):
        assert np.isfinite(np.asarray(leaf, np.float32)).all(), path
        result[jax.tree_util.keystr(path)] = np.asarray(leaf).tobytes()
    return result


def differing(a: dict[str, bytes], b: dict[str, bytes]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if a[name] != b[name]]


@functools.cache
def on_one_device() -> dict[str, bytes]:
    return trained(1, 1, {})


@pytest.mark.slow
def test_bits_of_a_quickly_compiled_step_do_not_depend_on_the_mesh():
    changes = {"virtual_mesh": [2, 2], "layers": 1}
    here, there = (trained(*mesh, changes, quick=True) for mesh in ((1, 2), (1, 1)))
    assert differing(here, there) == []


@pytest.mark.slow
def test_bits_do_not_depend_on_the_mesh():
    assert differing(trained(2, 4, {}), on_one_device()) == []


@pytest.mark.slow
def test_bits_do_not_depend_on_the_mesh_where_calls_are_inlined(monkeypatch):
    """On TPUs, functions are branches, and gradient sums are not in them."""
    monkeypatch.setattr(apart, "calls_stay", lambda platform: False)
    here, there = (trained(*mesh, {}) for mesh in ((2, 2), (1, 1)))
    assert differing(here, there) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        (
            (2, 4),
            BF16
            | {"zero": 3, "early_cast": True, "remat": "none", "norm": "scalenorm"}
            | {"virtual_mesh": [8, 8], "attention": "blocks", "seq": 264, "skip_nonfinite": True},
        ),
        ((2, 4), GPT2 | {"zero": 1, "dropout_residual": 0.1, "dropout_attention": 0.1}),
        (
            (2, 1),
            {"block": "neox", "norm": "rmsnorm-bias", "optimizer": "lion", "loss_chunk": 5}
            | {"virtual_mesh": [4, 2], "per_replica_batch": 3, "pe": "t5"},
        ),
        ((2, 2), {"block": "geglu", "norm": "layernorm-desync", "batch_ramp_steps": 2}),
        (
            (2, 2),
            {"block": "llama", "key_heads": 2, "qk_norm": "projection", "norm_place": "both"}
            | {"sliding_window": 5, "sliding_layers": [0]},
        ),
        ((2, 2), LORA | {"optimizer": "sgd", "pe": "fixed", "shard_activations": True}),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_the_mesh_with_any_option(mesh, changes):
    masked = changes.get("pe") != "t5"
    here, there = trained(*mesh, changes, masked), trained(1, 1, changes, masked)
    assert differing(here, there) == []


SPLIT = {"virtual_mesh": [2, 2, 2], "seq": 64, "layers": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"context_attention": "ring", "zero": 1, "block": "llama", "key_heads": 2},
        {"context_attention": "all_to_all", "block": "neox", "attention_window": 21} | BF16,
        {"context_attention": "ring", "zero": 3, "shard_activations": True, "pe": "fixed"},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_the_number_of_parts_of_sequences(monkeypatch, changes):
    monkeypatch.setattr(block_attention, "BLOCK", 4)  # several blocks per chunk
    monkeypatch.setattr(block_attention, "KEYS", 4)
    here = trained(1, 1, SPLIT | changes, masked=True)
    for dp, cp, mp in ((2, 2, 2), (1, 2, 1)):
        there = trained(dp, mp, SPLIT | changes | {"context_parallel": cp}, masked=True)
        assert differing(here, there) == []


def networks(meshes: list[tuple[int, int]], **changes: Any) -> list[CausalTransformer]:
    return [
        CausalTransformer(
            Config(**(SMALL | TRAINING | {"cores_per_replica": mp} | changes)),
            devices=jax.devices()[: dp * mp],
        )
        for dp, mp in meshes
    ]


@pytest.mark.slow
def test_evaluation_logits_and_answers_on_a_mesh_are_those_of_one_device():
    """Also for 5 heads and 131 tokens, which the virtual mesh pads and one device need not."""
    one, mesh = networks([(1, 1), (2, 2)], block="gpt2", n_heads=5, d_model=80, n_vocab=131)
    batch = random_batch(one.config, 3)  # rows that replicas do not divide
    for name, x in one.eval(batch).items():
        assert np.asarray(x).tobytes() == np.asarray(mesh.eval(batch)[name]).tobytes(), name
    logits = [np.asarray(network.logits(batch["obs"])) for network in (one, mesh)]
    assert logits[0].tobytes() == logits[1].tobytes()
    prompts = batch["obs"][:, :8]
    answers = [network.generate(prompts, [8] * 3, 8, {"temp": 0}) for network in (one, mesh)]
    np.testing.assert_array_equal(*answers)  # computed without the virtual mesh
    np.testing.assert_array_equal(answers[0][:, 0], logits[0][:, 7].argmax(-1))


@pytest.mark.slow
def test_a_run_that_changes_its_mesh_five_times_keeps_its_bits(tmp_path):
    rng, total = np.random.default_rng(0), 12
    meshes = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (1, 2)]
    changes = sorted(rng.choice(range(1, total), 5, replace=False).tolist())
    one, *others = networks([(1, 1), *(meshes[i] for i in rng.permutation(6))], zero=1)
    network = others.pop()
    for number in range(total):
        if number in changes:
            network.save(tmp_path)
            network.close()
            network = others.pop()
            assert network.restore(tmp_path) is not None
        batch = random_batch(one.config, 2, 2, seed=number)
        assert float(network.train(batch)["loss"]) == float(one.train(batch)["loss"]), number
    ends = (steps.StateLayout(x.config, x.mesh).unpadded(x.state) for x in (one, network))
    equal = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), *ends)
    assert all(jax.tree.leaves(equal))


# Each of these must be noticed.


@pytest.mark.slow
def test_a_sum_in_another_order_is_noticed(monkeypatch):
    expected = on_one_device()

    def in_order(x, at):
        parts = jnp.moveaxis(x, at, 0)
        return functools.reduce(jnp.add, parts[1:], parts[0])

    monkeypatch.setattr(blocks, "_tree", in_order)
    assert differing(trained(1, 1, {}), expected)  # one device adds four virtual ones


@pytest.mark.slow
def test_a_batch_in_one_matmul_is_noticed():
    rows = {"virtual_mesh": [1, 4], "per_replica_batch": 2}  # instead of two replicas with one each
    assert differing(trained(1, 1, rows), on_one_device())


@pytest.mark.slow
def test_a_step_without_functions_of_their_own_is_noticed(monkeypatch):
    """The compiler then merges the iterations' code with what is around it."""
    expected = on_one_device()
    monkeypatch.setattr(apart, "kept_apart", lambda function, platform: function)
    assert differing(trained(2, 4, {}), expected)


def test_results_of_a_call_may_vary_along_different_axes():
    @jax.jit
    def both(x, y):
        return x + 1, y * 2

    def program(x, y):
        same, split = both(x, y)
        return same, both(split[:1] * 0, split)[1]

    specs = (P(), P("mp"))
    x, y = jnp.arange(3.0), jnp.arange(4.0)
    for mp in (1, 2):
        run = jax.jit(virtual.virtual(program, (1, 2), mesh_of(1, mp), specs, specs))
        np.testing.assert_array_equal(run(x, y)[0], x + 1)
        np.testing.assert_array_equal(run(x, y)[1], y * 4)


# Validation.


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"virtual_mesh": [3, 4]}, "expected [dp, mp] or [dp, cp, mp], powers of two"),
        ({"virtual_mesh": [4]}, "expected [dp, mp] or [dp, cp, mp], powers of two"),
        ({"cores_per_replica": 8}, "mp is not divisible by cores_per_replica 8"),
        ({"shard_activations": True, "seq": 6}, "mp does not divide seq 6"),
        ({"partitioning": "jit"}, "set it to shard_map"),
        ({"optimizer": "muon"}, "is not elementwise; set it to one of adam, lion, sgd"),
    ],
)
def test_settings_without_a_virtual_mesh_are_refused(changes, error):
    with pytest.raises(InputError) as caught:
        Config(**(SMALL | TRAINING | changes))
    assert error in str(caught.value)
