"""Training steps on every mesh, partitioning and ZeRO stage, against one device."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mesh_transformer.config import Config
from mesh_transformer.families import BLOCKS, NORMS
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import transformer
from mesh_transformer.model.loss import train_loss
from mesh_transformer.training import step
from mesh_transformer.util import InputError
from tests.conftest import SMALL, random_batch
from tests.model.test_transformer import weights

STEPS, ACCUMULATION, BATCH = 3, 2, 8
WEIGHT_SCALE = 0.5  # the weights of `tests.model.test_transformer` are too large for training
MESHES = [
    ("shard_map", 1, 8, 0),
    ("shard_map", 2, 4, 0),
    ("shard_map", 8, 1, 0),
    ("jit", 2, 4, 0),
    ("shard_map", 2, 4, 1),
    ("shard_map", 2, 4, 3),
    ("jit", 2, 4, 1),
    ("jit", 2, 4, 3),
]
# Every mesh trains gptj, and half of them each other block.  `make test` trains the first four.
CASES = [("gptj", MESHES[1]), ("geglu", MESHES[7]), ("gpt2", MESHES[5]), ("neox", MESHES[6])]
CASES += [("gptj", mesh) for mesh in MESHES if mesh != MESHES[1]]
CASES += [("geglu", MESHES[i]) for i in (0, 1, 4)] + [("gpt2", MESHES[i]) for i in (0, 3, 6)]
CASES += [("neox", MESHES[i]) for i in (1, 2, 5)]
CASES += [("llama", MESHES[i]) for i in (1, 2, 5, 7)]


class Run(NamedTuple):
    """The results of a few training steps, on the host."""

    losses: np.ndarray
    norms: np.ndarray
    grads: Any  # after the first step, clipped
    params: Any


def mesh_of(dp: int, mp: int) -> Mesh:
    # `make_mesh` could not run a model with cores_per_replica 4 on one device.
    return Mesh(np.asarray(jax.devices()[: dp * mp]).reshape(dp, mp), ("dp", "mp"))


@functools.cache
def fresh_state(config: Config) -> step.State:
    """Return a state at step 0 on the host, with random weights, including biases and gains."""
    shapes = jax.eval_shape(functools.partial(step.init_state, config), jax.random.key(0))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    params = jax.tree.map(
        lambda leaf, shape: (WEIGHT_SCALE * leaf).astype(shape.dtype),
        weights(config),
        shapes["params"],
    )
    return zeros | {"params": params}


def run(
    config: Config,
    dp: int = 1,
    mp: int = 1,
    batch: Any = None,
    steps: int = STEPS,
    params: Any = None,
) -> Run:
    """Run `steps` updates on a dp x mp mesh, from `params` or from the config's fresh state."""
    mesh = mesh_of(dp, mp)
    # Settings that must not change the results must not change the initial state either.
    base = config.replace(zero=0, remat="full")
    if config.norm != "layernorm-desync":
        base = base.replace(partitioning="jit", cores_per_replica=1)
    layout = step.StateLayout(config, mesh)
    state = fresh_state(base) if params is None else fresh_state(base) | {"params": params}
    state = jax.tree.map(jax.device_put, state, layout.shardings)
    batch = random_batch(config, ACCUMULATION, BATCH) if batch is None else batch
    train = step.compile_train(layout)
    losses, norms, grads = [], [], None
    for _ in range(steps):
        state, metrics = train(state, batch)
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
        if grads is None:
            # After one step, Adam's first moment is exactly (1 - b1) times the gradient.
            grads = jax.tree.map(
                lambda mu: np.asarray(mu, np.float32) / (1 - config.adam_b1),
                state["opt_state"]["mu"],
            )
    return Run(
        np.asarray(losses, np.float64),
        np.asarray(norms, np.float64),
        grads,
        jax.tree.map(lambda p: np.asarray(p, np.float32), state["params"]),
    )


@functools.cache
def one_device(config: Config) -> Run:
    """Return the reference: the same model as one program on one device.

    With the norm layernorm-desync, whose parameters depend on mp, it is one replica.
    """
    if config.norm == "layernorm-desync":
        mp = config.cores_per_replica
        return run(config.replace(zero=0, tpu_size=mp, shard_activations=False), 1, mp)
    return run(config.replace(partitioning="jit", zero=0, cores_per_replica=1, tpu_size=1))


def small_config(**changes: Any) -> Config:
    # Gradients are clipped, and even the first update changes the weights.
    return Config.from_dict(SMALL | {"warmup_steps": 0, "clip_norm": 0.5} | changes)


def on_mesh(config: Config, partitioning: str, mp: int, zero: int) -> Config:
    return config.replace(partitioning=partitioning, cores_per_replica=mp, tpu_size=8, zero=zero)


def largest_differences(actual: Run, expected: Run) -> dict[str, float]:
    """Return the largest differences between two runs, by kind of result.

    Differences of losses and parameters are absolute, those of gradient norms are relative, and
    those of gradients are relative to each leaf's largest entry.  Where a gradient is 0 but for
    rounding, as that of the key's bias in the block gpt2, they are relative to all leaves'.
    """
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected.grads))

    def scale(leaf: np.ndarray) -> float:
        own = float(np.abs(leaf).max())
        return own if own > 1e-6 * largest else largest

    def worst(compare: Any, a: Any, b: Any) -> float:
        return max(jax.tree.leaves(jax.tree.map(compare, a, b)))

    return {
        "losses": float(np.abs(actual.losses - expected.losses).max()),
        "norms": float(np.abs(actual.norms / expected.norms - 1).max()),
        "gradients": worst(
            lambda a, b: float(np.abs(a - b).max()) / scale(b), actual.grads, expected.grads
        ),
        "parameters": worst(
            lambda a, b: float(np.abs(a - b).max()), actual.params, expected.params
        ),
    }


def check_agreement(config: Config, expected: Run, dp: int, mp: int) -> None:
    differences = largest_differences(run(config, dp, mp), expected)
    # f32 sums in a different order: each number differs by about 1e-7.  Even ten times the observed
    # differences is below this tolerance.
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_one_microbatch_are_not_summed(dtype):
    """They have the compute dtype, and the values of the loop over microbatches."""
    config = small_config(dtype=dtype)
    params, batch = fresh_state(config)["params"], random_batch(config, 1, BATCH)
    function = jax.jit(functools.partial(step.gradients, config=config, par=Auto()))
    alone, measured = function(params, {}, batch)
    summed, expected = function(params, {}, batch, jnp.int32(1))
    assert {leaf.dtype for leaf in jax.tree.leaves(alone)} == {jnp.dtype(dtype)}
    assert {leaf.dtype for leaf in jax.tree.leaves(summed)} == {jnp.dtype("float32")}
    # Two programs round differently, by about an eighth of this.
    tolerance = 8 * float(jnp.finfo(dtype).eps)
    for one, other in zip(*map(jax.tree.leaves, (alone, summed)), strict=True):
        largest = float(jnp.abs(other).max())
        np.testing.assert_allclose(np.asarray(one, np.float32), other, atol=tolerance * largest)
    for key in step.MEASURED:
        np.testing.assert_allclose(measured[key], expected[key], rtol=tolerance)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("block", "partitioning", "dp", "mp", "zero"),
    [(block, *mesh) for block, mesh in CASES],
)
def test_every_mesh_trains_like_one_device(block, partitioning, dp, mp, zero):
    config = small_config(block=block)
    expected = one_device(config)
    assert expected.losses[-1] < expected.losses[0]
    check_agreement(on_mesh(config, partitioning, mp, zero), expected, dp, mp)


# Key heads that mp does not divide, and every attribute of the families of today.
GROUPED: list[dict[str, Any]] = [
    {"key_heads": 2},
    {
        "key_heads": 1,
        "qk_norm": "projection",
        "norm_place": "after",
        "biases": ["q", "k", "v", "o"],
    },
    {"key_heads": 2, "qk_norm": "projection", "sliding_window": 5, "sliding_layers": [1]},
    {"key_heads": 4, "qk_norm": "projection", "norm_place": "both", "score_cap": 2.0},
    {"key_heads": 2, "qk_norm": "head", "norm": "rms-plus-one", "embed_scale": 3.0},
    {"key_heads": 2, "qk_norm": "rotated", "norm": "rms-plain", "logit_cap": 4.0, "zero": 3},
    {"key_heads": 2, "unrotated_layers": [0], "residual_scale": 0.5, "shard_activations": True},
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("partitioning", ["shard_map", "jit"])
@pytest.mark.parametrize("changes", GROUPED, ids=str)
def test_grouped_heads_train_on_2x4_like_on_one_device(changes, partitioning):
    config = small_config(block="llama", ff_size=52, **changes)
    mesh = on_mesh(config, partitioning, 4, config.zero or 0)
    check_agreement(mesh, one_device(config.replace(shard_activations=False, zero=0)), 2, 4)


@pytest.mark.slow
def test_only_shard_map_makes_the_whole_step_manual_over_mp():
    manual = {}
    for partitioning in ("shard_map", "jit"):
        config = on_mesh(small_config(), partitioning, 4, 0)
        state = jax.eval_shape(functools.partial(step.init_state, config), jax.random.key(0))
        batch = random_batch(config, ACCUMULATION, BATCH)
        layout = step.StateLayout(config, mesh_of(2, 4))
        program = step.compile_train(layout).lower(state, batch).as_text()
        matches = re.findall(r"manual_axes=\{([^}]*)\}", program)
        manual[partitioning] = {frozenset(re.findall(r"\w+", axes)) for axes in matches}
    # Under jit, only small parts are manual over mp, such as embedding lookups; they are inside the
    # part that is manual over dp.
    assert manual == {
        "shard_map": {frozenset({"dp", "mp"})},
        "jit": {frozenset({"dp"}), frozenset({"mp"})},
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "partitioning"),
    [
        (name, "jit" if number % 2 and not kind.per_shard else "shard_map")
        for number, (name, kind) in enumerate(NORMS.items())
        if name != "layernorm"
    ],
)
def test_every_norm_trains_on_2x4_like_on_one_device(norm, partitioning):
    shards = 4 if norm == "layernorm-desync" else 1
    config = small_config(norm=norm, cores_per_replica=shards)
    check_agreement(on_mesh(config, partitioning, 4, 0), one_device(config), 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("partitioning", ["shard_map", "jit"])
@pytest.mark.parametrize("pe", ["fixed", "t5"])
def test_every_position_encoding_trains_on_2x4_like_on_one_device(pe, partitioning):
    config = small_config(pe=pe)
    check_agreement(on_mesh(config, partitioning, 4, 0), one_device(config), 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_shards_with_equal_norms_train_like_one_norm(block):
    """Each shard's norm has a part of the gradient; the parts of all shards sum to the whole."""
    config = small_config(block=block, norm="layernorm", clip_norm=1e9)
    params = fresh_state(config.replace(partitioning="jit"))["params"]
    expected = run(config, 1, 1, steps=1)
    desync = on_mesh(config, "shard_map", 4, 1).replace(norm="layernorm-desync")
    shards = map_declared(
        lambda d, x: np.stack([x] * 4, axis=int(d.stacked)) if d.shape[-2:] == (4, 64) else x,
        transformer.declarations(desync),
        params,
    )
    actual = run(desync, 2, 4, steps=1, params=shards)
    grads = map_declared(
        lambda d, x: x.sum(axis=int(d.stacked)) if d.shape[-2:] == (4, 64) else x,
        transformer.declarations(desync),
        actual.grads,
    )
    differences = largest_differences(
        actual._replace(grads=grads, params=expected.params), expected
    )
    del differences["norms"]  # the parts have another norm than their sum
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.slow
def test_each_shard_uses_its_own_norm():
    """A norm that differs between shards is one norm, and matrices that have absorbed the rest."""
    config = small_config(block="geglu", norm="layernorm", clip_norm=1e9)
    desync = on_mesh(config, "shard_map", 4, 0).replace(norm="layernorm-desync")
    params = fresh_state(desync)["params"]
    batch = random_batch(config, ACCUMULATION, BATCH)
    actual = run(desync, 2, 4, batch, 1)

    def absorb(norm: Any, w: Any, b: Any) -> tuple[Any, Any]:
        """Return the matrix [L, D, H, C] and bias that follow a standardized vector."""
        scale, offset = (jnp.repeat(norm[name], w.shape[2] // 4, 1) for name in ("scale", "offset"))
        b += jnp.einsum("LHD,LDHC->LHC", offset, w, precision="highest")
        return w * jnp.moveaxis(scale, 1, 2)[..., None], b

    def loss(params: Any) -> Any:
        layers, proj = params["layers"], params["proj"]
        plain = {"scale": jnp.ones((2, 64)), "offset": jnp.zeros((2, 64))}
        layer = dict(layers["layer"])
        layer["fused_in"], layer["fused_in_b"] = absorb(
            layers["layer/norm"], layer["fused_in"], layer["fused_in_b"]
        )
        last, head = proj["projection/norm"], proj["projection/head"]
        w, b = absorb(
            {name: x[None] for name, x in last.items()},
            head["w"].reshape(1, 64, 4, -1),
            head["b"].reshape(1, 4, -1),
        )
        one = {
            "projection/norm": {name: x[0] for name, x in plain.items()},
            "projection/head": {"w": w.reshape(64, -1), "b": b.ravel()},
        }
        folded = params | {"layers": {"layer": layer, "layer/norm": plain}, "proj": one}
        tokens, targets = (x.reshape(-1, config.seq) for x in (batch["obs"], batch["target"]))
        return train_loss(folded, tokens, targets, config, Auto())[0]

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(actual.losses[0], value, rtol=1e-5)
    for path, expected in jax.tree.leaves_with_path(grads):
        own = functools.reduce(lambda tree, key: tree[key.key], path, actual.grads)
        np.testing.assert_allclose(
            own, expected, atol=1e-5 * np.abs(expected).max(), rtol=1e-4, err_msg=str(path)
        )


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"original_bias_copies": 4, "z_loss": 0.1, "loss_chunk": 5},
        {"remat": "dots"},
        {"remat": "none"},
        {"attention_window": 5, "head_size": 12},
    ],
    ids=str,
)
def test_options_train_on_2x4_like_on_one_device(changes):
    config = small_config(**changes)
    # Remat changes what is saved, not the results, so the reference uses the default policy.
    expected = one_device(config.replace(remat="full"))
    check_agreement(on_mesh(config, "shard_map", 4, 0), expected, 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partitioning", "zero", "changes"),
    [
        ("shard_map", 1, {"norm": "layernorm", "pe": "fixed"}),
        ("jit", 0, {"norm": "layernorm", "pe": "fixed"}),
        ("shard_map", 3, {"norm": "layernorm-desync"}),
        ("jit", 3, {"norm": "scalenorm-bias", "pe": "t5"}),
        ("shard_map", 0, {"block": "geglu", "remat": "none"}),
    ],
    ids=str,
)
def test_a_sharded_residual_stream_trains_like_one_device(partitioning, zero, changes):
    shards = 4 if changes.get("norm") == "layernorm-desync" else 1
    config = small_config(**changes, cores_per_replica=shards)
    split = on_mesh(config, partitioning, 4, zero).replace(shard_activations=True)
    check_agreement(split, one_device(config.replace(remat="full")), 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "partitioning", "dp", "mp", "zero"),
    [
        ("gptj", "shard_map", 2, 4, 3),
        ("gptj", "shard_map", 1, 8, 0),
        ("gptj", "jit", 2, 4, 1),
        ("geglu", "jit", 2, 4, 3),
        ("gpt2", "shard_map", 2, 4, 1),
        ("neox", "shard_map", 2, 4, 3),
    ],
)
def test_bf16_losses_agree_between_meshes(block, partitioning, dp, mp, zero):
    config = small_config(block=block, dtype="bfloat16", lr=1e-3)
    actual = run(on_mesh(config, partitioning, mp, zero), dp, mp)
    # Activations are rounded to 8 bits, at points that differ between programs.
    np.testing.assert_allclose(actual.losses, one_device(config).losses, atol=2e-3, rtol=0)


@pytest.mark.slow
def test_bf16_losses_are_close_to_f32_losses():
    config = small_config(lr=1e-3)
    rounded = one_device(config.replace(dtype="bfloat16"))
    # The tolerance 2e-2 allows for weights and activations rounded to 8 bits.
    np.testing.assert_allclose(rounded.losses, one_device(config).losses, atol=2e-2, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_a_bf16_state_takes_half_the_memory_and_trains_like_f32(zero):
    plain = small_config(lr=1e-3)
    config = plain.replace(early_cast=True, bf16_optimizer=True)
    shapes = jax.eval_shape(functools.partial(step.init_state, config), jax.random.key(0))
    for tree in (shapes["params"], shapes["opt_state"]["mu"], shapes["opt_state"]["nu"]):
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype(jnp.bfloat16)}
    actual = run(on_mesh(config, "shard_map", 4, zero), 2, 4)
    reference = one_device(config)
    np.testing.assert_allclose(actual.losses, reference.losses, atol=2e-3, rtol=0)
    # Rounding weights to 8 bits changes the losses as much as computing in bf16.
    np.testing.assert_allclose(actual.losses, one_device(plain).losses, atol=2e-2, rtol=0)


@pytest.mark.slow
def test_a_fresh_state_is_bit_identical_on_every_mesh():
    config = small_config(layers=1)
    layout = step.StateLayout(on_mesh(config, "shard_map", 4, 1), mesh_of(2, 4))
    sharded = step.compile_init(layout)(jax.random.key(1))
    plain = jax.jit(functools.partial(step.init_state, config))(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, sharded, plain)


def replica_gradients(config: Config, state: step.State, batch: Any) -> list[list[Any]]:
    """Return gradients computed on one device, by microbatch and replica, of one sequence each."""
    grad = jax.jit(jax.grad(lambda p, x, y: train_loss(p, x, y, config, Auto())[0]))

    def gradient(micro: int, row: int) -> Any:
        tokens = (batch[key][micro, row : row + 1] for key in ("obs", "target"))
        return jax.tree.map(lambda g: np.asarray(g, np.float64), grad(state["params"], *tokens))

    micros, rows = batch["obs"].shape[:2]
    return [[gradient(micro, row) for row in range(rows)] for micro in range(micros)]


def mean_of(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partitioning", "zero"),
    [
        ("shard_map", 1),
        ("jit", 0),
        ("jit", 3),
        ("shard_map", 0),
        ("shard_map", 3),
    ],
)
def test_micro_norms_are_the_norms_of_the_replicas_gradients(partitioning, zero):
    config = on_mesh(small_config(layers=1, original_bias_copies=3), partitioning, 4, zero)
    batch = random_batch(config, 2, 2)
    layout = step.StateLayout(config, mesh_of(2, 4))
    state = fresh_state(config.replace(partitioning="jit", zero=0, cores_per_replica=1))
    declared = transformer.declarations(config)

    def square(grads: Any) -> float:
        squares = map_declared(
            lambda d, g: float(np.square(g).sum()) * (3 if d.summed else 1), declared, grads
        )
        return sum(jax.tree.leaves(squares))

    grads = replica_gradients(config, state, batch)
    # ZeRO 3 sums gradients over the replicas before any norm is computed.
    normed = [[mean_of(replicas)] if zero == 3 else replicas for replicas in grads]
    squares = np.array([[square(grad) for grad in replicas] for replicas in normed])
    placed = jax.tree.map(jax.device_put, state, layout.shardings)
    _, metrics = step.compile_train(layout)(placed, batch)
    assert layout.par.replicas == squares.shape[1]
    # The tolerance 1e-5 covers f32 sums of about 100,000 squares.
    expected = {
        "grad_square_micro": squares.mean(),
        "grad_norm_micro": np.sqrt(squares).mean(),
        "grad_norm": np.sqrt(square(mean_of([mean_of(replicas) for replicas in grads]))),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(float(metrics[name]), value, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_gradients_without_a_mesh_match_a_mesh_of_one_device():
    config = small_config(layers=1)
    params, batch = fresh_state(config)["params"], random_batch(config, 2, 2)
    gradients = jax.jit(functools.partial(step.gradients, config=config, par=Auto()))
    alone, _ = gradients(params, {}, batch)
    # `run` derives gradients from Adam's first moment, so clipping is disabled.
    expected = run(config.replace(clip_norm=1e9), batch=batch, steps=1).grads
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), alone, expected
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize("partitioning", ["shard_map", "jit"])
def test_evaluation_on_2x4_matches_one_device(partitioning):
    config = small_config()
    params, batch = fresh_state(config)["params"], random_batch(config, BATCH)
    expected = jax.jit(functools.partial(step.eval_step, config=config, par=Auto()))(params, batch)
    sharded = on_mesh(config, partitioning, 4, 3)
    layout = step.StateLayout(sharded, mesh_of(2, 4))
    placed = jax.tree.map(jax.device_put, params, layout.shardings["params"])
    actual = step.compile_eval(layout)(placed, batch)
    # The tolerance 1e-5 covers f32 sums in a different order; `correct` is exact.
    for name in ("loss", "last_loss", "all_loss"):
        np.testing.assert_allclose(actual[name], expected[name], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(actual["correct"], expected["correct"])


def test_zero_reports_the_matrix_that_it_cannot_shard():
    # 3 replicas do not divide either axis of a 64 x 64 matrix.
    config = small_config(cores_per_replica=2, tpu_size=6, zero=1)
    with pytest.raises(InputError, match=r"zero is 1.*dp 3.*set zero to 0"):
        step.StateLayout(config, mesh_of(3, 2))
    step.StateLayout(config.replace(zero=0), mesh_of(3, 2))


def test_the_state_between_steps_is_sharded_by_zero():
    mesh = mesh_of(2, 4)
    declared = transformer.declarations(small_config())
    for stage, shards in ((0, 4), (1, 8), (3, 8)):
        config = on_mesh(small_config(), "shard_map", 4, stage)
        layout = step.StateLayout(config, mesh).shardings["params"]

        def check(declaration: Any, sharding: Any, shards: int = shards) -> None:
            local = sharding.shard_shape(declaration.shape)
            split = np.prod(declaration.shape) // np.prod(local)
            expected = shards if declaration.decay else min(shards, 4)  # biases: only over mp
            assert split == (expected if "mp" in tuple(declaration.spec) else 1)

        jax.tree.map(check, declared, layout, is_leaf=lambda node: hasattr(node, "decay"))
