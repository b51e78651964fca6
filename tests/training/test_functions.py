"""Functions of parameters: bits of the network's methods and of training, on every mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mesh_transformer
from mesh_transformer.training import step as steps
from mesh_transformer.util import InputError

SEQ, VOCABULARY = 16, 131  # mp does not divide the vocabulary
MESHES = [
    {},
    {"cores_per_replica": 4, "tpu_size": 8, "block": "llama", "key_heads": 2},
    {"cores_per_replica": 4, "tpu_size": 8, "partitioning": "jit"},
    {"cores_per_replica": 2, "tpu_size": 8, "partitioning": "jit", "zero": 3},
    {"cores_per_replica": 2, "tpu_size": 8, "zero": 1, "dtype": "bfloat16"},
    {"cores_per_replica": 2, "tpu_size": 8, "context_parallel": 2},
    {"cores_per_replica": 4, "tpu_size": 8, "shard_activations": True, "packed": True},
]


@pytest.fixture
def network_of(small):
    def create(packed=False, **changes):
        config = small(n_vocab=VOCABULARY, layers=3, z_loss=1e-3, **changes)
        devices = jax.devices()[: config.tpu_size]
        return mesh_transformer.CausalTransformer(config, devices=devices)

    return create


def texts(network, *, rows=2, packed=False):
    """Return random tokens and targets, and segment numbers or None, [B, T] each."""
    generator = np.random.default_rng(1)
    shape = (rows * network.dp, SEQ + 1)
    tokens = generator.integers(0, VOCABULARY, shape).astype(np.uint32)
    numbers = np.sort(generator.integers(1, 4, (len(tokens), SEQ)), axis=1).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:], numbers if packed else None


def gradients_of_training(network, tokens, targets, segments):
    layout, state = network._layout, network.state
    specs = layout.specs
    program = layout.partitioned(
        steps.gradients,
        (specs["params"], specs["frozen"], P(None, "dp")),
        (specs["params"], dict.fromkeys(steps.MEASURED, P())),
        **layout.train_choices,
    )
    batch = {"obs": tokens[None], "target": targets[None]}
    if segments is not None:
        batch |= {"segment_ids": segments[None]}
    return jax.jit(program)(state["params"], state["frozen"], batch)


def differences(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return [np.abs(np.asarray(x, np.float32) - np.asarray(y, np.float32)).max() for x, y in pairs]


@pytest.mark.quick(3)
@pytest.mark.parametrize("changes", MESHES)
def test_values_and_gradients_have_the_bits_of_the_network(network_of, changes):
    network, packed = network_of(**changes), changes.get("packed", False)
    tokens, targets, segments = texts(network, packed=packed)
    params = network.params
    logits = mesh_transformer.apply(params, tokens, segments=segments)
    if not packed:
        np.testing.assert_array_equal(logits, network.logits(tokens))
    sample = {"obs": tokens, "target": targets} | ({"segment_ids": segments} if packed else {})
    expected = network.eval(sample)["all_loss"]
    own = mesh_transformer.log_probs(params, tokens, targets, segments=segments)
    np.testing.assert_array_equal(-own, expected)

    both = jax.jit(jax.value_and_grad(mesh_transformer.loss))
    loss, gradients = both(params, tokens, targets, segments=segments)
    theirs, metrics = gradients_of_training(network, tokens, targets, segments)
    # With `shard_activations`, training splits the stream and sums in another order: rounding.
    limit = 2e-6 if "shard_activations" in changes else 0
    assert abs(loss - metrics["loss"]) <= limit
    assert max(differences(gradients.tree, theirs)) <= limit
    for x, like in zip(jax.tree.leaves(gradients), jax.tree.leaves(params), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    network.close()


@pytest.mark.quick(1)
@pytest.mark.parametrize("changes", MESHES[:4])
def test_each_example_has_a_gradient(network_of, changes):
    network = network_of(**changes)
    tokens, targets, _ = texts(network)
    each = jax.jit(jax.vmap(jax.grad(mesh_transformer.loss), in_axes=(None, 0, 0)))
    own = each(network.params, tokens[:, None], targets[:, None])
    mean = jax.grad(mesh_transformer.loss)(network.params, tokens, targets)
    # The sum over rows has another order.
    assert max(differences(jax.tree.map(lambda x: x.mean(axis=0), own), mean)) < 1e-6


def test_rows_need_not_fill_the_replicas(network_of):
    network = network_of(**MESHES[3])
    tokens, targets, _ = texts(network)
    whole = mesh_transformer.log_probs(network.params, tokens, targets)
    some = mesh_transformer.log_probs(network.params, tokens[:3], targets[:3])
    np.testing.assert_allclose(some, whole[:3], rtol=0, atol=1e-6)  # other shapes: rounding
    loss = mesh_transformer.loss(network.params, tokens[:3], targets[:3])
    mask = np.ones_like(tokens)
    mask[3:] = 0
    masked = mesh_transformer.loss(network.params, tokens, targets, mask)
    assert float(loss) == pytest.approx(float(masked), abs=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("changes", [MESHES[1], {}, MESHES[2], MESHES[5]])
def test_a_stream_continues_where_it_was_taken(network_of, changes):
    network = network_of(**changes)
    tokens, _, _ = texts(network)
    params, whole = network.params, mesh_transformer.apply(network.params, tokens)
    for layers in (0, 2, 3):
        stream = mesh_transformer.hidden(params, tokens, layers)
        assert stream.shape == (*tokens.shape, network.config.d_model)
        rest = mesh_transformer.logits_from(params, stream, layers)
        np.testing.assert_array_equal(rest, whole)
    # The gradient of a change of the stream is that of the function's first-order change.
    stream = mesh_transformer.hidden(params, tokens, 2)

    @jax.jit  # one program at a time: virtual devices abort if many wait for each other
    def score(stream):
        return jnp.sin(mesh_transformer.logits_from(params, stream, 2)).mean()

    direction = np.random.default_rng(2).normal(size=stream.shape).astype(np.float32)
    change = float(score(stream + 1e-3 * direction)) - float(score(stream - 1e-3 * direction))
    gradient = np.asarray(jax.jit(jax.grad(score))(stream))
    expected = 2e-3 * np.vdot(gradient, direction)
    assert change == pytest.approx(expected, rel=0.02)  # of third order in the step


@pytest.mark.quick(1)
@pytest.mark.parametrize("changes", [MESHES[1] | {"int8_cache": True}, *MESHES[:6]])
def test_steps_of_decoding_choose_the_tokens_of_generate(network_of, changes):
    network = network_of(**changes)
    tokens, _, _ = texts(network)
    lengths = np.random.default_rng(3).integers(2, 9, len(tokens))
    weights = mesh_transformer.generation_weights(network.params)
    logits, cache = mesh_transformer.prefill(network.params, tokens[:, :8], lengths, 14)
    chosen = [logits.argmax(axis=-1)]
    for step in range(5):
        own = weights if step else network.params
        logits, cache = mesh_transformer.decode_step(own, cache, chosen[-1])
        chosen.append(logits.argmax(axis=-1))
    prompts = np.zeros((len(tokens), 8), np.uint32)
    for row, length in enumerate(lengths):
        prompts[row, 8 - length :] = tokens[row, :length]
    expected = network.generate(prompts, lengths, 6, {"temp": 0})
    np.testing.assert_array_equal(np.stack(chosen, axis=1), expected)
    network.close()


@pytest.mark.parametrize("bits", [None, 8])
def test_adapters_are_functions_of_the_frozen_parameters(network_of, tmp_path, bits):
    base = network_of()
    base.save(tmp_path)
    base.close()
    changes = {"lora_rank": 2, "frozen_bits": bits, "dtype": "float32"}
    network = mesh_transformer.load(tmp_path, base.config.replace(**changes))
    tokens, targets, _ = texts(network)
    frozen = network.frozen
    logits = mesh_transformer.apply(network.params, tokens, frozen=frozen)
    np.testing.assert_array_equal(logits, network.logits(tokens))
    own = jax.grad(mesh_transformer.loss)(network.params, tokens, targets, frozen=frozen)
    theirs, _ = gradients_of_training(network, tokens, targets, None)
    assert max(differences(own.tree, theirs)) == 0
    assert max(differences(own.tree, jax.tree.map(jnp.zeros_like, theirs))) > 0
    with pytest.raises(InputError, match="also pass frozen="):
        mesh_transformer.apply(network.params, tokens)


def test_replaced_parameters_are_used_and_saved(network_of, tmp_path):
    network = network_of(**MESHES[3])
    tokens, _, _ = texts(network)
    before = network.generate(tokens[:, :4], np.full(len(tokens), 4), 4, {"temp": 0})
    new = jax.tree.map(
        lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size).reshape(x.shape)), network.params
    )
    network.replace(params=new)
    after = network.generate(tokens[:, :4], np.full(len(tokens), 4), 4, {"temp": 0})
    assert (before != after).any()
    network.save(tmp_path)
    network.close()
    loaded = mesh_transformer.load(tmp_path)
    np.testing.assert_array_equal(
        loaded.params["embed"]["embedding"]["w"][:VOCABULARY],
        np.asarray(new["embed"]["embedding"]["w"])[:VOCABULARY],
    )
    wrong = jax.tree.map(lambda x: x, new)
    wrong["embed"]["embedding"]["b"] = jnp.zeros(1)
    with pytest.raises(InputError, match=r"params: leaf embed/embedding/b has shape \(1,\)"):
        network.replace(params=wrong)


def test_the_loss_needs_no_memory_for_all_logits(network_of):
    """The logits of 4 chunks are never in memory together: the compiler's figure."""
    sizes = {"n_vocab": 8192, "seq": 512, "loss_chunk": 128, "d_model": 32, "remat": "full"}
    config = mesh_transformer.Config(
        **sizes, layers=1, n_heads=2, pe_rotary_dims=4, dtype="float32"
    )
    network = mesh_transformer.CausalTransformer(config)
    tokens = np.zeros((2, 512), np.int32)

    def with_logits(params, tokens):
        logp = jax.nn.log_softmax(mesh_transformer.apply(params, tokens))
        return -jnp.take_along_axis(logp, tokens[..., None], axis=-1).mean()

    def temporary(function, *args):
        lowered = jax.jit(jax.grad(function)).lower(network.params, *args)
        analysis: Any = lowered.compile().memory_analysis()
        return analysis.temp_size_in_bytes

    logits = 4 * 2 * 512 * 8192
    assert temporary(with_logits, tokens) > logits
    assert temporary(mesh_transformer.loss, tokens, tokens) < logits * 3 / 4


def test_wrong_arguments_are_refused_in_one_line(network_of):
    network = network_of(**MESHES[3])
    tokens, targets, _ = texts(network)
    params = network.params
    for call, line in (
        (lambda: mesh_transformer.log_probs(params, tokens, targets[:5]), "targets have the shape"),
        (
            lambda: mesh_transformer.loss(params, tokens, targets, targets[:3]),
            "mask have the shape",
        ),
        (lambda: mesh_transformer.hidden(params, tokens, 9), "layers is 9, expected 0 to 3"),
        (lambda: mesh_transformer.apply(params, tokens[0]), "expected 2 axes"),
        (
            lambda: mesh_transformer.prefill(params, tokens[:3], np.full(3, 4), 20),
            "3 rows are not a multiple of the 4 replicas",
        ),
        (lambda: network.replace(params=params.tree), "params: dict, expected"),
    ):
        with pytest.raises(InputError, match=line) as caught:
            call()
        assert "\n" not in str(caught.value).partition("\n----")[0]


def test_parameters_of_runs_with_other_learning_rates_are_alike(network_of):
    one, other = network_of(lr=1e-3), network_of(lr=2e-3, seed=1, name="other")
    mean = jax.tree.map(lambda a, b: (a + b) / 2, one.params, other.params)
    tokens, targets, _ = texts(one)
    assert np.isfinite(mesh_transformer.loss(mean, tokens, targets))
    one.replace(params=mean)
    one.train({"obs": tokens[None, :1], "target": targets[None, :1]})
    assert np.isfinite(mesh_transformer.loss(mean, tokens, targets))  # `train` has its own copy
