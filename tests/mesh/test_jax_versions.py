"""What the library takes from JAX's private modules exists, and the lock's JAX is supported."""

import importlib.metadata
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from packaging.requirements import Requirement

from mesh_transformer.mesh.jax_versions import (
    PRIVATE,
    carry_of,
    erfc,
    private,
    prng_name,
    varying_axes,
)
from tests.support.pages import ROOT


def pinned(file: Path, package: str) -> str:
    """Return the version of a package that a lock has for this Python."""
    lines = [line for line in file.read_text().splitlines() if "==" in line]
    pins = [Requirement(line.rstrip(" \\")) for line in lines]
    (pin,) = [p for p in pins if p.name == package and (not p.marker or p.marker.evaluate())]
    (exact,) = pin.specifier
    return exact.version


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in PRIVATE.items() for name in names],
)
def test_this_version_has_every_private_name(module, name):
    assert private(module, name) is not None


@pytest.mark.parametrize("lock", ["requirements.txt", "requirements-dev.txt"])
def test_the_lock_has_one_supported_jax_for_this_python(lock):
    version = pinned(ROOT / lock, "jax")
    assert pinned(ROOT / lock, "jaxlib") == version
    for line in importlib.metadata.requires("mesh-transformer") or ():
        requirement = Requirement(line)
        assert requirement.name != "jax" or version in requirement.specifier


def test_the_lock_has_the_libtpu_of_its_jax():
    if jax.__version__ != pinned(ROOT / "requirements.txt", "jax"):
        pytest.skip("the installed JAX is not the lock's")
    version = pinned(ROOT / "requirements-libtpu.txt", "libtpu")
    requirements = map(Requirement, importlib.metadata.requires("jax") or ())
    (libtpu,) = [requirement for requirement in requirements if requirement.name == "libtpu"]
    assert version in libtpu.specifier


def test_the_gradient_of_gelu_on_a_mesh_matches_float64():
    """JAX 0.12's own rule for the gradient cannot be traced there."""
    x = np.random.default_rng(0).normal(scale=2.0, size=64).astype(np.float32)
    expected = [
        0.5 * math.erfc(-v / 2**0.5) + v * math.exp(-v * v / 2) / (2 * math.pi) ** 0.5 for v in x
    ]

    def gelu(x):
        x = lax.pcast(x, "mp", to="varying")
        return 0.5 * x * erfc(-x * np.float32(0.5**0.5))

    mesh = Mesh(jax.devices()[:2], "mp")
    split = jax.shard_map(gelu, mesh=mesh, in_specs=P(), out_specs=P("mp"))
    actual = jax.grad(lambda x: split(x).sum() / 2)(x)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)  # f32 rounds to 6e-8


def test_the_numbers_of_constants_and_carried_arrays_of_a_scan():
    constants = [jnp.ones(3) for _ in range(3)]

    def body(carry, x):
        return (carry[0] + sum(constants, x), 2 * carry[1]), None

    traced = jax.make_jaxpr(lambda xs: lax.scan(body, (jnp.zeros(3), 1.0), xs))(jnp.ones((5, 3)))
    (scan,) = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert carry_of(scan.params) == (3, 2)


@pytest.mark.parametrize("name", ["threefry2x32", "rbg"])
def test_the_name_of_a_generator(name):
    assert prng_name(jax.random.key(0, impl=name).dtype) == name


def test_the_axes_along_which_a_result_varies():
    seen = []

    def run(x):
        seen.append(varying_axes(jax.eval_shape(lambda x: 2 * x, x)))
        return x

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "mp"))
    jax.shard_map(run, mesh=mesh, in_specs=P("mp"), out_specs=P("mp"))(jnp.ones(4))
    run(jnp.ones(4))
    assert seen == [{"mp"}, set()]
