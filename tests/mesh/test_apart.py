"""Functions of rows whose bits depend neither on the other rows nor on their number."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.mesh.apart import Exact, by_rows
from mesh_transformer.mesh.parallel import Auto

EXACT = Exact("cpu")
INPUTS, OUTPUTS = 576, 1536  # a matmul whose sums depend on the number of rows


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def network(w: jax.Array, exact: Exact | None, x_BTD: jax.Array, scale_1T: jax.Array) -> Any:
    def layer(x_BTD: jax.Array, scale_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        normed_BTD = x_BTD * jax.lax.rsqrt(jnp.mean(x_BTD**2, -1, keepdims=True) + 1e-5)
        y_BTN = jax.nn.gelu(normed_BTD @ w) * scale_BT[..., None]
        return y_BTN, jax.nn.logsumexp(y_BTN, -1)

    return Auto(exact=exact).by_rows(layer)(x_BTD, scale_1T)


def differing(exact: Exact | None) -> int:
    """Return in how many of some parts of a batch a result has other bits than in the batch."""
    w, x, scale = normal(0, INPUTS, OUTPUTS), normal(1, 3, 21, INPUTS), normal(2, 1, 21)
    run = jax.jit(network, static_argnums=1)
    whole, count = run(w, exact, x, scale), 0
    for rows, positions in (
        (slice(1), slice(21)),
        (slice(1, 3), slice(4, 9)),
        (slice(3), slice(1)),
    ):
        part = run(w, exact, x[rows, positions], scale[:, positions])
        count += any(
            (np.asarray(a) != np.asarray(b[rows, positions])).any()
            for a, b in zip(part, whole, strict=True)
        )
    return count


def test_results_do_not_depend_on_other_rows():
    assert differing(EXACT) == 0


def test_without_blocks_of_rows_they_do():
    assert differing(None) > 0


def test_the_gradient_is_that_of_the_function():
    w, x, scale = normal(0, 64, 96), normal(1, 3, 17, 64), normal(2, 1, 17)

    def loss(w: jax.Array, x: jax.Array, scale: jax.Array, exact: Exact | None) -> jax.Array:
        def body(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            y_BTN, sums_BT = network(w, exact, x[None], scale)
            return total + jnp.sum(y_BTN**2) + jnp.sum(sums_BT), None

        return jax.lax.scan(jax.checkpoint(body), jnp.float32(0), x)[0]

    ours, plain = (jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)(w, x, scale, exact)
                   for exact in (EXACT, None))  # fmt: skip
    for a, b in zip(ours, plain, strict=True):  # sums of a few hundred terms in another order
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_no_row_is_left_out(rows):
    x = normal(rows, 1, rows, 4)
    np.testing.assert_array_equal(by_rows(lambda x: 2 * x, EXACT)(x), 2 * x)
