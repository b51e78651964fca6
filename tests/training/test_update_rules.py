"""The optimizers: against optax on unstacked matrices, on meshes, padded, saved and resumed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from mesh_transformer.checkpoint import conversion, native_state, original
from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import Declaration, map_declared
from mesh_transformer.mesh.devices import named
from mesh_transformer.model import transformer
from mesh_transformer.training import loop, step
from mesh_transformer.training.optimizer import Optimizer
from mesh_transformer.training.update_rules import MUON_RMS
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import SMALL, random_batch
from tests.support.small_run import assert_same_rows, rows_of, run_values
from tests.training.test_step import MESHES, mesh_of, on_mesh

OPTIMIZERS = {
    "adafactor": {"optimizer": "adafactor"},
    "lion": {"optimizer": "lion"},
    "muon": {"optimizer": "muon"},
    "sgd": {"optimizer": "sgd"},
    "plain sgd": {"optimizer": "sgd", "momentum": 0.0},
}
RATE = 3e-3
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def config_with(name: str, **changes: Any) -> Config:
    """Return a config whose matrices are large enough for adafactor to factor their moments."""
    sizes = {"d_model": 128, "n_vocab": 256, "clip_norm": 2.0, "weight_decay": 0.3}
    return Config.from_dict(SMALL | sizes | OPTIMIZERS[name] | changes)


def random_tree(config: Config, seed: int, scale: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    return map_declared(
        lambda d: jnp.asarray(rng.normal(scale=scale, size=d.shape), jnp.float32),
        transformer.trained(config),
    )


def norm_of(optimizer: Optimizer, grads: Any) -> jax.Array:
    return jnp.sqrt(jnp.asarray(sum(jax.tree.leaves(optimizer.squares(grads)))))


def unstacked(declared: Any, tree: Any) -> dict[str, jax.Array]:
    """Return each layer's parameters as separate arrays, and weights as matrices."""
    result: dict[str, jax.Array] = {}

    def add(path: Any, d: Declaration, x: jax.Array) -> None:
        name = jax.tree_util.keystr(path)
        for layer, part in enumerate(x if d.stacked else [x]):
            if d.decay:
                # As in the declarations' table: fused_in is [D, H, I], fused_out [H, O, D].
                part = part.reshape(part.shape[0], -1) if "out" not in name else part
                part = part.reshape(-1, part.shape[-1])
            result[f"{name}/{layer}"] = part

    is_leaf = lambda node: isinstance(node, Declaration)  # noqa: E731
    jax.tree_util.tree_map_with_path(add, declared, tree, is_leaf=is_leaf)
    return result


def optax_rule(config: Config, params: dict[str, Any]) -> Any:
    """Return optax's transformation of clipped gradients to updates, before learning rate."""
    if config.optimizer == "adafactor":
        return optax.chain(optax.adafactor(), optax.scale(-1))
    if config.optimizer == "lion":
        lion = optax.lion(1.0, b1=config.lion_b1, b2=config.lion_b2, weight_decay=0.0)
        return optax.chain(lion, optax.scale(-1))
    if config.optimizer == "sgd":
        return optax.chain(optax.sgd(1.0, momentum=config.momentum or None), optax.scale(-1))
    muon = optax.contrib.muon(1.0, beta=0.95, consistent_rms=0.2)  # of matrices, which all are 2D
    adam = optax.scale_by_adam(config.adam_b1, config.adam_b2, config.adam_eps)
    labels = {
        name: "muon" if "layers" in name and x.ndim == 2 and "_b" not in name else "adam"
        for name, x in params.items()
    }
    return optax.partition({"muon": optax.chain(muon, optax.scale(-1)), "adam": adam}, labels)


@pytest.mark.slow
@every_optimizer
@pytest.mark.parametrize("block", [pytest.param("gptj", marks=pytest.mark.slow), "geglu"])
def test_updates_match_optax_on_separate_matrices(name, block):
    config = config_with(name, block=block, pe="fixed" if block == "gptj" else "t5")
    declared = transformer.trained(config)
    optimizer = Optimizer(config, declared)
    params = random_tree(config, 0, 0.3)
    expected: Any = unstacked(declared, params)
    decayed = unstacked(declared, map_declared(lambda d: jnp.full(d.shape, d.decay), declared))
    chain = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax_rule(config, expected),
        optax.add_decayed_weights(
            config.weight_decay, mask={name: bool(x.all()) for name, x in decayed.items()}
        ),
        optax.scale(-RATE),
    )
    state, chain_state = optimizer.init(params), chain.init(expected)
    update, optax_update = jax.jit(optimizer.update), jax.jit(chain.update)
    for number in range(4):
        # Gradients of one direction and noise: with noise alone, the sums would hardly grow.
        grads = jax.tree.map(jnp.add, random_tree(config, 99), random_tree(config, number))
        params, state = update(grads, state, params, RATE, norm_of(optimizer, grads))
        updates, chain_state = optax_update(unstacked(declared, grads), chain_state, expected)
        expected = optax.apply_updates(expected, updates)
        for leaf, actual in unstacked(declared, params).items():
            # Each of the 4 sums rounds the parameter to 6e-8, and f32 updates are exact to about
            # 1e-6.  Newton-Schulz steps enlarge that error up to 500 times.
            atol = RATE * (2e-4 if name == "muon" else 1e-5)
            np.testing.assert_allclose(actual, expected[leaf], rtol=3e-7, atol=atol, err_msg=leaf)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "block", "zero"),
    [
        pytest.param(name, *case, marks=() if case == ("geglu", 1) else pytest.mark.slow)
        for name in OPTIMIZERS
        for case in (("geglu", 1), ("gptj", 3), ("gptj", 0), ("gptj", 1), ("geglu", 3))
        # The other rules are elementwise.
        if name in ("adafactor", "muon") or case in (("geglu", 1), ("gptj", 3))
    ],
)
def test_sharded_updates_match_one_device(name, block, zero):
    """`update` runs outside the `shard_map`, so only ZeRO changes its layout."""
    config = on_mesh(config_with(name, block=block), "jit", 4, zero)
    mesh = mesh_of(2, 4)
    specs = step.StateLayout(config, mesh).specs
    layout = named(mesh, (specs["params"], specs["opt_state"], specs["params"]))
    optimizer = Optimizer(config, transformer.trained(config))
    params, grads = random_tree(config, 0, 0.3), random_tree(config, 1)
    norm = norm_of(optimizer, grads)

    def update(grads: Any, state: Any, params: Any) -> Any:
        return optimizer.update(grads, state, params, jnp.float32(RATE), norm)

    arguments = (grads, optimizer.init(params), params)
    expected = jax.jit(update)(*arguments)
    outputs = (layout[2], layout[1])
    actual = jax.jit(update, in_shardings=layout, out_shardings=outputs)(*arguments)
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        # f32 sums in another order, which Newton-Schulz steps enlarge, as above.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-4 * RATE)


@pytest.mark.slow
@every_optimizer
def test_padding_stays_zero_and_changes_nothing(name):
    """Arrays may be larger than declared, padded with zeros at the ends of their axes."""
    declared = {
        "matrix": Declaration((130, 3, 50), P(None, "mp", None), True, False).stack(2),
        "head": Declaration((130, 140), P(None, "mp"), True, False),
        "bias": Declaration((5,), P("mp"), False, False).stack(2),
    }
    added = {"matrix": (0, 0, 1, 0), "head": (0, 4), "bias": (0, 3)}
    config, rng = config_with(name), np.random.default_rng(0)
    optimizer = Optimizer(config, declared)

    def random() -> dict[str, jax.Array]:
        return {
            leaf: jnp.asarray(rng.normal(size=d.shape), jnp.float32) for leaf, d in declared.items()
        }

    def padded(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {leaf: jnp.pad(x, [(0, count) for count in added[leaf]]) for leaf, x in tree.items()}

    params = random()
    wide, state = padded(params), optimizer.init(params)
    wide_state = optimizer.init(wide)
    update = jax.jit(optimizer.update)
    for _ in range(3):
        grads = random()
        norm = norm_of(optimizer, grads)
        params, state = update(grads, state, params, RATE, norm)
        wide, wide_state = update(padded(grads), wide_state, wide, RATE, norm)
        for leaf, expected in padded(params).items():
            # XLA may add up a padded array in another order; see above.
            np.testing.assert_allclose(wide[leaf], expected, atol=2e-4 * RATE, err_msg=leaf)
            assert (np.asarray(wide[leaf] != 0) <= np.asarray(expected != 0)).all(), leaf


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", [(128, 128), (64, 256), (256, 64)])
def test_muon_makes_updates_nearly_orthogonal(shape):
    """The singular vectors stay, and each singular value follows the Newton-Schulz polynomial."""
    rng, size = np.random.default_rng(0), min(shape)
    u, _ = np.linalg.qr(rng.normal(size=(shape[0], size)))
    v, _ = np.linalg.qr(rng.normal(size=(shape[1], size)))
    singular = np.exp(rng.uniform(np.log(0.03), 0, size))
    declared = {"w": Declaration(shape, P(None, "mp"), True, False).stack(1)}
    optimizer = Optimizer(config_with("muon", momentum=0.0, weight_decay=0.0), declared)
    grads = {"w": jnp.asarray((u * singular @ v.T)[None], jnp.float32)}
    params = jax.tree.map(jnp.zeros_like, grads)
    norm = norm_of(optimizer, grads)
    updated, _ = optimizer.update(grads, optimizer.init(params), params, jnp.float32(1), norm)
    actual = -np.asarray(updated["w"][0], np.float64) / (MUON_RMS * max(shape) ** 0.5)
    expected = singular / np.linalg.norm(singular)
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    # f32 rounds to 6e-8, which the polynomial enlarges by up to 3.4^5 = 485.
    np.testing.assert_allclose(actual, u * expected @ v.T, atol=1e-4)
    values = np.linalg.svd(actual, compute_uv=False)
    assert 0.65 < values.min() <= values.max() < 1.25
    np.testing.assert_allclose(np.square(actual).mean() ** 0.5, max(shape) ** -0.5, rtol=0.2)


def test_moments_have_the_axes_and_layouts_of_their_parameters():
    config = on_mesh(config_with("adafactor", block="geglu"), "jit", 4, 1)
    state = jax.eval_shape(functools.partial(step.init_state, config), jax.random.key(0))
    layout = step.StateLayout(config, mesh_of(2, 4))
    specs = layout.specs["opt_state"]
    assert jax.tree.structure(state["opt_state"]) == jax.tree.structure(specs)
    layer = {name: specs[name]["layers"]["layer"] for name in ("row", "col", "nu")}
    # The parameters' layouts are P(None, None, "mp", "dp") and P(None, "mp", None, "dp").
    assert layer["row"] == {"fused_in": P(None, None), "fused_out": P(None, "mp", None)}
    assert layer["col"] == {"fused_in": P(None, "mp", "dp"), "fused_out": P(None, "dp")}
    assert state["opt_state"]["col"]["layers"]["layer"]["fused_in"].shape == (2, 8, 176)
    assert set(layer["nu"]) == {"b", "fused_in_b"}
    muon = layout.of(config.replace(optimizer="muon")).specs["opt_state"]
    assert "fused_in" in muon["mu"]["layers"]["layer"]
    assert set(muon["nu"]["layers"]["layer"]) == {"b", "fused_in_b"}


@pytest.mark.quick(1)
@every_optimizer
def test_moments_are_stored_in_bf16_if_configured(name):
    config = config_with(name, bf16_optimizer=True)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), random_tree(config, 0))
    optimizer = Optimizer(config, transformer.trained(config))
    grads = random_tree(config, 1)
    norm = norm_of(optimizer, grads)
    state = optimizer.init(params)
    updated, state = jax.eval_shape(optimizer.update, grads, state, params, RATE, norm)
    assert {leaf.dtype for leaf in jax.tree.leaves(updated)} == {jnp.dtype(jnp.bfloat16)}
    del state["count"]
    expected = jnp.float32 if name == "adafactor" else jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} <= {jnp.dtype(expected)}


def train_steps(config: Config, dp: int, mp: int, state: Any) -> list[float]:
    """Return the losses of 4 steps on a dp x mp mesh, which begin with `state`."""
    layout = step.StateLayout(config, mesh_of(dp, mp))
    state = jax.tree.map(jax.device_put, state, layout.shardings)
    train, losses = step.compile_train(layout), []
    for _ in range(4):
        state, metrics = train(state, random_batch(config, 2, 8))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora_rank"), [*((name, 0) for name in OPTIMIZERS), ("adafactor", 4), ("lion", 4)]
)
def test_every_mesh_trains_like_one_device(name, lora_rank):
    config = config_with(name, block="geglu", warmup_steps=0, lr=RATE, lora_rank=lora_rank)
    state = jax.device_get(step.init_state(config, jax.random.key(0)))
    expected = train_steps(config.replace(partitioning="jit", zero=0), 1, 1, state)
    assert expected[-1] < expected[0]
    # An elementwise rule works on a part of an array as on the whole; see also
    # `test_sharded_updates_match_one_device`.
    every = name in ("adafactor", "muon") and not lora_rank
    for partitioning, dp, mp, zero in MESHES if every else MESHES[::3]:
        actual = train_steps(on_mesh(config, partitioning, mp, zero), dp, mp, state)
        # f32 sums in another order, which Newton-Schulz steps enlarge up to 500 times in the
        # updates, which are a hundredth of the weights.  Where a gradient is only rounding error,
        # the other order may change its sign, and so Lion's whole update.
        np.testing.assert_allclose(actual, expected, rtol=1e-3 if name == "lion" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "lion", "muon"])
def test_resumed_runs_write_the_same_metrics(tmp_path, name):
    values = run_values(tmp_path, total_steps=9, **OPTIMIZERS[name], lr=RATE, d_model=128)
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    loop.train(CausalTransformer(values, init=False), whole)
    for stop in (4, 9):
        loop.train(CausalTransformer(values, init=False), parts, max_steps=stop)
    assert_same_rows(rows_of(parts), rows_of(whole))


def alone(name: str, *, init: bool = True) -> CausalTransformer:
    """Return a network on one device."""
    return CausalTransformer(config_with(name, layers=1), devices=jax.devices()[:1], init=init)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_states_are_saved_and_restored_on_any_mesh(tmp_path, name):
    network = alone(name)
    assert network.state is not None
    state = network.state["opt_state"]
    shapes = jax.tree.leaves(state)
    rng = np.random.default_rng(0)
    random = [jnp.asarray(rng.normal(size=x.shape) * 9, x.dtype) for x in shapes]
    network.state["opt_state"] = jax.tree.unflatten(jax.tree.structure(state), random)
    network.save(str(tmp_path))
    network.close()
    restored = CausalTransformer(on_mesh(network.config, "jit", 4, 1), init=False)
    restored.restore(str(tmp_path))
    assert restored.state is not None
    jax.tree.map(
        np.testing.assert_array_equal, restored.state["opt_state"], network.state["opt_state"]
    )
    _, host = native_state.read(str(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, host["opt_state"], network.state["opt_state"])


@pytest.mark.slow
def test_another_optimizer_needs_a_fresh_start(tmp_path):
    network = alone("sgd")
    network.save(str(tmp_path))
    network.close()
    other = alone("lion", init=False)
    with pytest.raises(InputError, match="a run with optimizer sgd, but the config has lion; "):
        other.restore(str(tmp_path))
    line = (
        "step_0: its optimizer state is that of sgd, but the config has optimizer lion; add --fre"
    )
    with pytest.raises(InputError, match=line):
        other.load(str(tmp_path))
    other.load(str(tmp_path), fresh_opt=True)
    assert other.state is not None
    assert set(other.state["opt_state"]) == {"count", "mu"}
    with pytest.raises(InputError, match="optimizer sgd, but the config has sgd without momentum"):
        alone("plain sgd", init=False).restore(str(tmp_path))


@pytest.mark.slow
def test_the_originals_format_stores_only_adams_state(tmp_path):
    network = alone("lion")
    network.save(str(tmp_path / "native"))
    network.close()
    result = conversion.convert(
        tmp_path / "native", "native", tmp_path / "original", "original", shards=1
    )
    assert not result.optimizer
    copy = conversion.convert(tmp_path / "native", "native", tmp_path / "copy", "native")
    assert copy.optimizer
    _, state = native_state.read(copy.path)
    assert set(state["opt_state"]) == {"count", "mu"}
    with pytest.raises(InputError, match="can store only adam's state; leave out opt_state"):
        original.write(str(tmp_path / "new"), state, network.config)
    adam = network.config.replace(optimizer="adam")
    # The moments are not those of the config's optimizer.
    assert "opt_state" not in native_state.read(copy.path, config=adam)[1]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"optimizer": "adamw"}, "did you mean 'adam'"),
        ({"momentum": 0.5}, "momentum is 0.5, expected null with optimizer adam"),
        ({"optimizer": "muon", "momentum": 1.0}, "momentum is 1.0, expected at least 0 and below"),
        ({"lion_b2": 1.5}, "lion_b2 is 1.5"),
    ],
)
def test_invalid_settings_are_refused(changes, line):
    with pytest.raises(InputError, match=line):
        Config.from_dict(SMALL | changes)
