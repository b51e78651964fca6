"""Cross entropy, over sharded vocabularies and in chunks, against a simple implementation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer.mesh.parallel import Auto, Manual
from mesh_transformer.model.loss import chunked_cross_entropy, cross_entropy
from tests.model.test_layers import normal, softmax


def on_shards(function: Any, shards: int) -> Any:
    """Return `function(logits_BTV, targets_BT, par)` with the vocabulary sharded over mp."""
    mesh = Mesh(np.asarray(jax.devices()[:shards]).reshape(1, -1), ("dp", "mp"))
    program = functools.partial(function, par=Manual(mesh))
    specs = (P(None, None, "mp"), P())
    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=P()))


@pytest.mark.quick(1)
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("ties", [False, True])
def test_cross_entropy_matches_log_softmax_and_argmax(shards, ties):
    logits = normal(0, 4, 50, 32, scale=4.0)
    if ties:
        # With so few distinct values, nearly every row has several largest logits, both within a
        # shard and across shards.
        logits = np.round(np.clip(logits / 4, -1, 1))
    rng = np.random.default_rng(1)
    targets = rng.integers(0, 32, (4, 50)).astype(np.uint32)
    targets = np.where(rng.random((4, 50)) < 0.5, logits.argmax(axis=-1), targets)
    run = (
        functools.partial(cross_entropy, par=Auto()) if shards == 1 else on_shards(cross_entropy, 4)
    )
    loss, log_sum, correct = run(jnp.asarray(logits), jnp.asarray(targets, jnp.uint32))
    log_softmax = np.log(softmax(logits.astype(np.float64)))
    expected = -np.take_along_axis(log_softmax, targets[..., None].astype(int), axis=-1)[..., 0]
    # f32 against float64: logits reach 15, and their differences are rounded at that magnitude.
    np.testing.assert_allclose(loss, expected, atol=2e-5)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    np.testing.assert_allclose(log_sum, np.log(np.exp(shifted).sum(axis=-1)), atol=2e-6)
    # NumPy's argmax returns the first of equal values.
    np.testing.assert_array_equal(correct, logits.argmax(axis=-1) == targets)
    assert 0 < np.mean(correct) < 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("shards", [1, 4])
def test_the_gradient_of_cross_entropy_is_softmax_minus_one_hot(shards):
    logits, targets = normal(2, 2, 3, 32), np.asarray([[0, 31, 8], [7, 7, 16]], np.uint32)
    run = (
        functools.partial(cross_entropy, par=Auto()) if shards == 1 else on_shards(cross_entropy, 4)
    )
    actual = jax.grad(lambda x: jnp.sum(run(x, jnp.asarray(targets))[0]))(jnp.asarray(logits))
    expected = softmax(logits.astype(np.float64)) - np.eye(32)[targets]
    # f32 against float64, for probabilities of at most 1.
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_huge_logits_do_not_overflow():
    logits = jnp.asarray([[[3e4, -3e4, 0.0]]])
    loss, _, correct = cross_entropy(logits, jnp.asarray([[1]]), Auto())
    assert float(loss[0, 0]) == 6e4
    assert not correct[0, 0]


@pytest.mark.quick(2)
@pytest.mark.parametrize("length", [12, 13, 5])
@pytest.mark.parametrize("shards", [1, 4])
def test_chunked_cross_entropy_matches_cross_entropy(length, shards):
    # 13 positions leave a last chunk of one position; 5 positions fit in one chunk.
    x, w = jnp.asarray(normal(0, 2, length, 8)), jnp.asarray(normal(1, 8, 32))
    targets = jnp.asarray(np.random.default_rng(2).integers(0, 32, (2, length)), jnp.uint32)
    weights = jnp.asarray(normal(3, 2, length))

    def run(x, w, par, chunk):
        def head(x_BTD):
            return x_BTD @ w

        if chunk is None:
            actual = cross_entropy(head(x), targets, par)
        else:
            actual = chunked_cross_entropy(head, x, targets, par, chunk)
        return jnp.sum(weights * (actual.loss_BT + 0.1 * actual.log_sum_BT**2)), actual

    def loss_and_gradients(chunk):
        if shards == 1:
            function = functools.partial(run, par=Auto(), chunk=chunk)
        else:
            mesh = Mesh(np.asarray(jax.devices()[:shards]).reshape(1, -1), ("dp", "mp"))
            function = jax.shard_map(
                lambda x, w: run(Manual(mesh).fan_out(x), w, Manual(mesh), chunk),
                mesh=mesh,
                in_specs=(P(), P(None, "mp")),
                out_specs=P(),
            )
        return jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))(x, w)

    ((loss, actual), grads), ((expected_loss, expected), expected_grads) = (
        loss_and_gradients(6),
        loss_and_gradients(None),
    )
    # The f32 sums are the same, except that the sums over positions, of at most 26 terms, are in a
    # different order.
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, expected
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), grads, expected_grads)
