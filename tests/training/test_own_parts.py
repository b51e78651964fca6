"""Functions of the user's in a run: values against second implementations, meshes, resumption.

The functions are those of docs/own-parts.md.
"""

import importlib
import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mesh_transformer
from mesh_transformer.checkpoint.conversion import convert
from mesh_transformer.config import Config
from mesh_transformer.data.loader import open_train_set
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.training import loop, update_rules
from mesh_transformer.training.hooks import call_hook
from mesh_transformer.training.schedule import learning_rate
from mesh_transformer.util import InputError
from tests.support.pages import write_files

PAGE = "docs/own-parts.md"
ON_A_MESH = {"tpu_size": 8, "cores_per_replica": 4, "zero": 3, "partitioning": "jit"}
PARTS = {
    "optimizer": "belief:adabelief",
    "schedule": "half_cosine:schedule",
    "token_loss": "focal:focal",
    "norm": "dyt:dyt",
    "activation": "jax.nn:hard_swish",
    "metrics": ["layer_norms:gradient_norms"],
    "train_set": "counting:Counting",
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The page's files, in a folder from which modules are imported."""
    folder = tmp_path / "own"
    folder.mkdir()
    for path in write_files(PAGE, folder):
        assert len(path.read_text().splitlines()) < 40
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def network_of(small):
    def create(**changes):
        config = small(**changes)
        devices = jax.devices()[: config.tpu_size]
        return mesh_transformer.CausalTransformer(config, devices=devices)

    return create


def sample_of(network, seed=0):
    rng = np.random.default_rng(seed)
    shape = (1, network.batch_size, network.config.seq + 1)
    tokens = rng.integers(0, network.config.n_vocab, shape).astype(np.uint32)
    return {"obs": tokens[..., :-1], "target": tokens[..., 1:]}


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("mesh", [ON_A_MESH, {"tpu_size": 8, "cores_per_replica": 2}])
def test_a_stopped_run_with_all_parts_resumes_with_the_same_bits(small, tmp_path, mesh):
    keys = PARTS | mesh | {"total_steps": 6, "per_replica_batch": 2, "ckpt_every": 3}

    def run(folder, *ends):
        for end in ends:
            network = mesh_transformer.CausalTransformer(small(**keys))
            rows = mesh_transformer.fit(network, PARTS["train_set"], tmp_path / folder, steps=end)
            network.close()
        return leaves(network.state["params"]), leaves(network.state["opt_state"]), rows

    *whole, rows = run("whole", 6)
    *resumed, _ = run("resumed", 3, 6)
    for one, other in zip(whole, resumed, strict=True):
        assert all(map(np.array_equal, one, other))
    written = (tmp_path / "resumed/metrics.jsonl").read_text().splitlines()
    for row, line in zip(rows, written, strict=True):
        again = json.loads(line)
        for name in ("train/loss", "train/grad_norm/layer_0", "train/grad_norm/layer_1"):
            assert row[name] == again[name], name
    saved = json.loads((tmp_path / "whole/step_6/aux/metadata").read_text())["config"]
    assert saved["optimizer"] == "belief:adabelief"
    for change, line in (
        ({"optimizer": "adam"}, r"a run with optimizer belief:adabelief, but the config has adam"),
        ({"norm": "layernorm"}, r"norm"),
    ):
        network = mesh_transformer.CausalTransformer(small(**keys | change))
        with pytest.raises(InputError, match=line):
            mesh_transformer.fit(network, PARTS["train_set"], tmp_path / "whole")


@pytest.mark.parametrize("mesh", [{}, ON_A_MESH])
def test_an_optimizer_updates_as_optax_does(network_of, mesh):
    network = network_of(optimizer="belief:adabelief", schedule="constant", warmup_steps=0, **mesh)
    config, sample = network.config, sample_of(network)
    whole = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_belief(b1=config.adam_b1, b2=config.adam_b2, eps=1e-16),
    )
    declared = network._layout.optimizer.declared

    @jax.jit  # one program at a time: virtual devices abort if many wait for each other
    def step(params, moments):
        gradients = jax.grad(mesh_transformer.loss)(params, sample["obs"][0], sample["target"][0])
        updates, moments = whole.update(gradients, moments, params)
        owner: Any = updates

        def moved(d, p, u):
            decay = config.weight_decay if d.decay else 0.0
            return p - config.lr * (u + decay * p)

        tree = map_declared(moved, declared, params.tree, owner.tree)
        return type(params)(tree, params.layout), moments

    params = network.params
    moments = jax.block_until_ready(jax.jit(whole.init)(params))
    for _ in range(3):
        before = params
        params, moments = jax.block_until_ready(step(params, moments))
        float(network.train(sample)["loss"])
    assert any((a != b).any() for a, b in zip(leaves(before), leaves(params), strict=True))
    for actual, expected in zip(leaves(network.params), leaves(params), strict=True):
        # Sums in another order, and a division by a root of what can be as small as eps.
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-4 * config.lr)


def test_moments_are_split_as_their_parameters(network_of):
    network = network_of(optimizer="belief:adabelief", **ON_A_MESH)
    state = network.state["opt_state"]
    assert state.keys() == {"count", "mu", "nu"}
    for name in ("mu", "nu"):
        for moment, like in zip(
            jax.tree.leaves(state[name]), jax.tree.leaves(network.state["params"]), strict=True
        ):
            assert moment.sharding == like.sharding


OPTIMIZERS = """
import jax
import jax.numpy as jnp
import optax

def by_name(config):
    def init(params):
        return {"m": jax.tree.map(jnp.zeros_like, params), "v": jax.tree.map(jnp.ones_like, params)}

    def update(updates, state, params=None):
        m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], updates)
        v = jax.tree.map(lambda v, g: 0.9 * v + g * g, state["v"], updates)
        return jax.tree.map(lambda m, v: m / jnp.sqrt(v), m, v), {"m": m, "v": v}

    return optax.GradientTransformation(init, update)

def centred(config):
    return optax.chain(optax.centralize(), by_name(config))

def every_fourth(config):
    return optax.MultiSteps(optax.scale_by_adam(), 4).gradient_transformation()

def uphill(config):
    return optax.adam(1e-3)

def odd(config):
    return optax.scale_by_factored_rms(True, 0.8, 8)
"""


@pytest.mark.parametrize("mesh", [{}, {"tpu_size": 8, "cores_per_replica": 4, "n_vocab": 21}])
@pytest.mark.parametrize("name", ["by_name", "centred"])
def test_moments_of_any_name_and_value_are_stored(network_of, files, mesh, name):
    (files / "optimizers.py").write_text(OPTIMIZERS)
    network = network_of(optimizer=f"optimizers:{name}", clip_norm=1e9, weight_decay=0.0, **mesh)
    rule = network._layout.optimizer._rule
    transformation = rule._transformation
    declared, params = rule.declared, network.params.tree

    def whole(tree):
        return map_declared(lambda d, x: np.asarray(x)[tuple(map(slice, d.shape))], declared, tree)

    own = whole(params)
    state = jax.jit(transformation.init)(own)
    for step in range(3):
        sample = sample_of(network)
        gradients = jax.grad(mesh_transformer.loss)(
            network.params, sample["obs"][0], sample["target"][0]
        )
        updates, state = transformation.update(whole(gradients.tree), state, own)
        rate = float(learning_rate(network.config, jnp.int32(step)))
        own = jax.tree.map(lambda p, u, rate=rate: p - rate * u, own, updates)
        network.train(sample)
        for actual, expected in zip(leaves(whole(network.params.tree)), leaves(own), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)  # other orders of sums
    for padded, real in zip(leaves(network.params.tree), leaves(own), strict=True):
        assert np.abs(padded).sum() == pytest.approx(np.abs(real).sum(), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("every_fourth", "a whole number of its state does not count the updates"),
        ("uphill", "returns updates against the gradients"),
        ("odd", "its state has an array of shape"),
    ],
)
def test_transformations_that_cannot_be_used_are_refused(network_of, files, name, line):
    (files / "optimizers.py").write_text(OPTIMIZERS)
    with pytest.raises(InputError, match=f"optimizer optimizers:{name}.* ?{line}"):
        network_of(optimizer=f"optimizers:{name}")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("return {'loss': 1.0}", "returned 'loss', the name of another metric"),
        ("return {'a': params['embed']['embedding']['w']}", r"returned 'a' of shape \(128, 64\)"),
        ("return 1.0", "returned float, expected a dict"),
    ],
)
def test_wrong_metrics_are_refused(network_of, files, code, line):
    name = f"metrics_{len(code)}"
    (files / f"{name}.py").write_text(f"def f(gradients, params):\n    {code}\n")
    network = network_of(metrics=[f"{name}:f"])
    with pytest.raises(InputError, match=line):
        network.train(sample_of(network))


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (
            "return losses[:, ::2]",
            r"returned an array of shape \(\d+, 8\), expected \(\d+, 16\): the",
        ),
        ("return losses.mean()", r"returned an array of shape \(\), expected"),
        ("return losses[0, 0, 0]", r"IndexError: Too many indices"),
    ],
)
def test_wrong_losses_are_refused(network_of, files, code, line):
    name = f"losses_{len(code)}"
    (files / f"{name}.py").write_text(f"def f(losses):\n    {code}\n")
    network = network_of(token_loss=f"{name}:f", z_loss=0.0)
    with pytest.raises(InputError, match=f"token_loss {name}:f:? {line}"):
        network.train(sample_of(network))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"token_loss": "focal:fcal"}, r"token_loss is 'focal:fcal', which cannot be loaded"),
        ({"token_loss": "math:pi"}, r"token_loss: math:pi is 3\.14.*, expected a function"),
        ({"metrics": ["layer_norms:no"]}, r"metrics is 'layer_norms:no', which cannot be loaded"),
        ({"schedule": "no_such:thing"}, r"schedule is 'no_such:thing', which cannot be loaded"),
    ],
)
def test_functions_of_steps_are_loaded_before_weights_are_made(small, tmp_path, changes, line):
    network = mesh_transformer.CausalTransformer(
        small(train_set="counting:Counting", total_steps=1, **changes), init=False
    )
    with pytest.raises(InputError, match=line):
        loop.train(network, tmp_path / "run")
    assert network.state is None
    network.close()


def test_a_failing_hook_is_named_and_its_step_is_saved(network_of, tmp_path):
    network = network_of(total_steps=3)
    data = np.arange(500) % network.config.n_vocab

    def fails(row):
        if row["step"] == 2:
            raise KeyError("its own error")

    with pytest.raises(KeyError, match="its own error") as caught:
        mesh_transformer.fit(network, data, tmp_path / "run", hooks=[fails])
    note = r"error: the hook .*:.*fails failed at step 2; see the traceback above"
    assert re.fullmatch(note, *caught.value.__notes__)
    assert json.loads((tmp_path / "run/status.json").read_text())["step"] == 3
    assert (tmp_path / "run/step_3").is_dir()
    network.close()


def test_a_hook_that_fails_in_jax_is_named_once():
    def fails(row):
        jax.jit(lambda a: a @ jnp.ones(3))(jnp.ones(4))

    def calls(row):
        call_hook(fails, row)

    with pytest.raises(TypeError) as caught:
        call_hook(calls, {"step": 2})
    jax_note, own = caught.value.__notes__  # JAX says that it has removed its frames
    assert "JAX" in jax_note
    assert re.fullmatch("error: the hook .*fails failed at step 2; see the traceback above", own)


def test_a_model_is_used_without_the_module_of_its_optimizer(network_of, tmp_path, monkeypatch):
    network = network_of(optimizer="belief:adabelief", schedule="half_cosine:schedule")
    network.save(tmp_path / "model")
    prompts, lengths = np.zeros((network.batch_size, 4), np.uint32), [4] * network.batch_size
    expected = network.generate(prompts, lengths, 4, {"temp": 0})
    network.close()

    def refuse(name, key):
        raise AssertionError(f"{key} {name} is loaded")

    monkeypatch.setattr(update_rules, "load_named", refuse)
    loaded = mesh_transformer.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.generate(prompts, lengths, 4, {"temp": 0}), expected)
    with pytest.raises(AssertionError, match="optimizer belief:adabelief is loaded"):
        loaded.train(sample_of(loaded))


def test_hooks_add_numbers(network_of, tmp_path):
    network = network_of(total_steps=2)
    data = np.arange(500) % network.config.n_vocab
    hooks = [lambda row: row.update(twice=np.float32(2 * row["step"]))]
    rows = mesh_transformer.fit(network, data, tmp_path / "run", hooks=hooks)
    network.close()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["twice"] for line in lines] == [2.0, 4.0]
    assert [row["twice"] for row in rows] == [2.0, 4.0]
    wrong = [lambda row: row.update(text="two")]
    with pytest.raises(InputError, match="a hook added 'text' to a row: 'two', expected a finite"):
        mesh_transformer.fit(network, data, steps=3, hooks=wrong)


def test_a_norm_is_the_function_of_its_parameters(network_of):
    network = network_of(norm="dyt:dyt", **ON_A_MESH)
    rng = np.random.default_rng(5)
    network.replace(
        params=jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), network.params)
    )
    params, config = network.params, network.config
    stream = rng.normal(size=(2, 4, config.d_model)).astype(np.float32)
    own = {name: np.asarray(x) for name, x in params["proj"]["projection/norm"].items()}
    assert {name: x.shape for name, x in own.items()} == {
        "alpha": (), "scale": (config.d_model,), "offset": (config.d_model,)
    }  # fmt: skip
    normed = own["scale"] * np.tanh(own["alpha"] * stream) + own["offset"]
    head = {name: np.asarray(x) for name, x in params["proj"]["projection/head"].items()}
    expected = (normed @ head["w"] + head["b"])[..., : config.n_vocab]
    logits = mesh_transformer.logits_from(params, stream, config.layers)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)  # sums in another order


@pytest.mark.parametrize("mesh", [{}, ON_A_MESH, {"tpu_size": 4, "context_parallel": 2}])
def test_a_position_embedding_does_what_rotary_does(network_of, mesh):
    """Also in generation, position by position."""
    keys = {"rotary_pairs": "halves", "pe_rotary_dims": 8}
    own, usual = network_of(pe="turned:rotate", **mesh), network_of(**keys, **mesh)
    usual.replace(params=own.params)
    sample = {name: rows[0] for name, rows in sample_of(own).items()}
    losses = [x.eval(sample)["loss"] for x in (own, usual)]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-5)  # angles round differently
    prompts, lengths = sample["obs"][:, :8], [5] * len(sample["obs"])
    one, other = (x.generate(prompts, lengths, 6, {"temp": 0.0}) for x in (own, usual))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("return x[:1]", r"pe: placed:place returned shape \(1, 16, 8, 8\), expected an array"),
        ("return x[..., :4]", r"returned shape \(1, 1, 8, 4\)"),
        ("pass", "returned NoneType"),
    ],
)
def test_position_embeddings_that_cannot_be_used_are_refused(network_of, files, code, line):
    (files / "placed.py").write_text(f"def place(x, positions):\n    {code}\n")
    importlib.invalidate_caches()
    sys.modules.pop("placed", None)

    def train() -> None:  # some are refused when weights are created
        network = network_of(pe="placed:place", per_replica_batch=4)
        network.train(sample_of(network))

    with pytest.raises(InputError, match=line):
        train()


@pytest.mark.parametrize("mesh", [{}, ON_A_MESH])
def test_a_loss_and_metrics_are_those_of_plain_code(network_of, mesh):
    network = network_of(
        token_loss="focal:focal", metrics=["layer_norms:gradient_norms"], z_loss=0.0, **mesh
    )
    sample = sample_of(network)
    obs, target = sample["obs"][0], sample["target"][0]

    def loss(params):
        cross_entropy = -mesh_transformer.log_probs(params, obs, target)
        return ((1 - jnp.exp(-cross_entropy)) ** 2 * cross_entropy).mean()

    expected, gradients = jax.value_and_grad(loss)(network.params)
    assert float(mesh_transformer.loss(network.params, obs, target)) == pytest.approx(
        float(expected), rel=1e-6
    )
    layers = leaves(gradients["layers"])
    norms = [np.sqrt(sum(np.square(x[n], dtype=np.float64).sum() for x in layers)) for n in (0, 1)]
    evaluated = network.eval({"obs": obs, "target": target})["loss"].mean()
    metrics = network.train(sample)
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-6)
    for number, norm in enumerate(norms):
        actual = float(metrics[f"objective/grad_norm/layer_{number}"])
        assert actual == pytest.approx(norm, rel=1e-5)
    assert evaluated > float(expected) * 1.01  # it stays the cross entropy


def test_known_functions_give_the_bits_of_their_names(network_of):
    named = network_of(activation="jax.nn:silu")
    usual = network_of(activation="silu")
    for _ in range(2):
        assert float(named.train(sample_of(named))["loss"]) == float(
            usual.train(sample_of(usual))["loss"]
        )
    assert all(map(np.array_equal, leaves(named.params), leaves(usual.params)))


def test_a_schedule_and_data_are_those_of_the_functions(small):
    config = small(schedule="half_cosine:schedule", train_set="counting:Counting", total_steps=8)
    for step in (0, 3, 8):
        expected = config.lr * np.cos(0.5 * np.pi * step / 8)
        assert float(learning_rate(config, jnp.int32(step))) == pytest.approx(expected, abs=1e-8)
    whole, half = open_train_set(config, 4), open_train_set(config, 4, [1, 2])
    for _ in range(2):
        batch, part = whole.get_samples(), half.get_samples()
        steps = np.diff(batch["obs"].astype(int), axis=-1) % config.n_vocab
        assert (steps == 1).all()
        np.testing.assert_array_equal(batch["obs"][:, [1, 2]], part["obs"])
    state, following = whole.state(), whole.get_samples()
    again = open_train_set(config, 4)
    again.restore(state, 2)
    np.testing.assert_array_equal(again.get_samples()["obs"], following["obs"])
    for one in (whole, half, again):
        one.close()


def test_functions_are_named_after_their_modules(small):
    belief = importlib.import_module("belief")
    config = small(optimizer=belief.adabelief, train_set=belief.adabelief)
    assert config.optimizer == "belief:adabelief"
    assert Config(**json.loads(json.dumps(config.as_dict()))) == config
    with pytest.raises(InputError, match=r"_src.*; give its public name"):
        small(activation=jax.nn.silu)
    for wrong in (lambda config: None, small):
        with pytest.raises(InputError, match=r"optimizer is <function .*define a function at"):
            small(optimizer=wrong)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"optimizer": "adan"}, "did you mean 'adam'"),
        ({"optimizer": "no_such:thing"}, "optimizer is 'no_such:thing', which cannot be loaded"),
        ({"optimizer": "belief:adan"}, r"belief:adan.*\(AttributeError"),
        ({"optimizer": "math:sqrt"}, "optimizer math:sqrt: TypeError"),
        ({"norm": "dyt:dyt", "qk_norm": "head"}, "qk_norm is 'head', which norm dyt:dyt"),
        ({"token_loss": "focal:focal", "objective": "dpo"}, "token_loss is focal:focal, but obj"),
        ({"train_set": "counting:Counting", "hosts_read": True}, "train_set is the function"),
        (
            {"optimizer": "belief:adabelief", "virtual_mesh": [1, 1]},
            "belief:adabelief is not elementwise",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(network_of, changes, line):
    with pytest.raises(InputError, match=line) as caught:
        network_of(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"activation": "jax.nn:hard_swish"}, {"norm": "dyt:dyt"}, {"pe": "turned:rotate"}],
)
@pytest.mark.parametrize("kind", ["hf", "original"])
def test_other_formats_refuse_functions_in_one_line(network_of, tmp_path, changes, kind):
    network = network_of(**changes)
    network.save(tmp_path / "model")
    network.close()
    ((key, value),) = changes.items()
    with pytest.raises(InputError, match=rf"config: {key} is '?{value}'?, but .* support"):
        convert(tmp_path / "model", "native", tmp_path / "out", kind)
