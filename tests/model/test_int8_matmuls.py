"""Training matmuls whose operands are rounded to 8-bit integers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.config_checks import MATMULS
from mesh_transformer.mesh import accelerators
from mesh_transformer.model import flops
from mesh_transformer.model.matrices import rounded_matmul
from mesh_transformer.performance.roofline import estimate
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import SMALL, random_batch
from tests.mesh.test_parallel import activations, compiled_step, lowered_step

ALL = list(MATMULS)


def passes(x, w, g, rounded: Any):
    """Return the product, and the gradients of both operands."""
    y, back = jax.vjp(lambda x, w: rounded_matmul(x, w, frozenset(rounded)), x, w)
    return y, *back(g)


def random_operands(seed, draw):
    rng = np.random.default_rng(seed)
    shapes = (2, 24, 40), (40, 56), (2, 24, 56)
    return [jnp.asarray(draw(rng, shape), jnp.float32) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize("rounded", [[name] for name in MATMULS] + [ALL])
def test_whole_numbers_of_8_bits_are_multiplied_exactly(rounded):
    """The largest magnitude of each row and column is 127, so that all scales are 1."""

    def draw(rng, shape):
        x = rng.integers(-127, 128, shape)
        x[..., 0] = -127
        x.reshape(-1, shape[-1])[0] = 127
        return x

    x, w, g = random_operands(0, draw)
    expected = x @ w, g @ w.T, jnp.einsum("BTD,BTN->DN", x, g)
    for actual, exact in zip(passes(x, w, g, rounded), expected, strict=True):
        np.testing.assert_array_equal(actual, exact)  # whole numbers below 2^24


def test_only_the_named_passes_are_rounded():
    x, w, g = random_operands(1, lambda rng, shape: rng.normal(size=shape))
    exact = passes(x, w, g, [])
    for number, name in enumerate(MATMULS):
        for at, (actual, value) in enumerate(zip(passes(x, w, g, [name]), exact, strict=True)):
            error = float(jnp.linalg.norm(actual - value) / jnp.linalg.norm(value))
            # Of normal values, the largest of 50 is about 2.5, so that a value changes by at most
            # 0.01, and by 0.006 on average; a product of two by 0.008.
            assert 0.004 < error < 0.016 if at == number else error == 0


def trained(config: Config, steps: int = 1) -> tuple[CausalTransformer, dict[str, Any]]:
    network = CausalTransformer(config, devices=jax.devices()[: config.tpu_size])
    rows = network.dp * config.per_replica_batch
    batches = [random_batch(config, config.gradient_accumulation_steps, rows, seed=0)] * steps
    metrics = [network.train(batch) for batch in batches]
    return network, metrics[-1]


@pytest.mark.slow
@pytest.mark.parametrize("block", ["gptj", "geglu"])
def test_the_compiler_partitions_as_on_one_device(block):
    """Scales of whole rows, also where mp splits them."""
    changes = {"block": block, "int8_matmuls": ALL, "gradient_accumulation_steps": 2}
    alone = {"cores_per_replica": 1, "tpu_size": 1, "per_replica_batch": 2}
    one = Config(**(SMALL | changes | alone))
    many = one.replace(partitioning="jit", cores_per_replica=4, tpu_size=4)
    actual, expected = (trained(config)[1] for config in (many, one))
    exact = trained(one.replace(int8_matmuls=[]))[1]
    # Sums in another order; few values are so near the middle of two integers that it matters.
    for name, rel in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert float(actual[name]) == pytest.approx(float(expected[name]), rel=rel)
        assert float(exact[name]) != pytest.approx(float(expected[name]), rel=rel)
        assert float(exact[name]) == pytest.approx(float(expected[name]), rel=1e-2)


@pytest.mark.slow
def test_norms_of_each_shard_are_rounded_like_one_norm():
    """Their parameters are equal at first."""
    config = Config(**(SMALL | {"int8_matmuls": ALL, "cores_per_replica": 2, "tpu_size": 2}))
    one, many = (
        float(trained(config.replace(norm=norm))[1]["loss"])
        for norm in ("layernorm", "layernorm-desync")
    )
    assert many == pytest.approx(one, rel=1e-6)


@pytest.mark.slow
def test_written_out_collectives_stay_as_they_are():
    text = lowered_step(int8_matmuls=ALL).compile().as_text()
    assert text.count("s8[") > 0
    _, _, layer = compiled_step(int8_matmuls=ALL).loops()
    # Other loops are of the matmuls.
    assert [count for loop in layer if (count := len(activations(loop)))] == [1, 1]


@pytest.mark.slow
def test_evaluation_and_generation_are_not_rounded():
    config = Config(**(SMALL | {"int8_matmuls": ALL}))
    rounded, _ = trained(config)
    plain, _ = trained(config.replace(int8_matmuls=[]))
    plain.state = rounded.state
    batch = random_batch(config, 2, seed=3)
    for read in (
        lambda network: network.eval(batch)["all_loss"],
        lambda network: network.score(batch["obs"], 2).logprob,
    ):
        np.testing.assert_array_equal(*map(read, (rounded, plain)))


def test_estimates_count_8_bit_matmuls_at_their_speed():
    config = Config(**(SMALL | {"remat": "none", "seq": 64, "loss_chunk": 64}))
    options: Any = {"devices": 1, "tokens": 1000, "peak_bytes": 0}
    options |= {"hbm_traffic_bytes": 0, "link_bytes": 0}
    seconds = functools.partial(estimate, hardware=accelerators.hardware("v5e"), **options)
    layers = 3 * 2 * config.layers * 12 * config.d_model**2
    for names, share in (([], 0), (["forward"], 1 / 3), (ALL, 1)):
        changed = config.replace(int8_matmuls=names)
        assert flops.int8_flops_per_token(changed) == share * layers
        saved = seconds(config).compute_seconds - seconds(changed).compute_seconds
        assert saved == pytest.approx(share * layers / 2 * 1000 / 197e12)


def test_wrong_settings_are_refused():
    for changes, message in (
        ({"int8_matmuls": ["forward"] * 2}, "expected no duplicates"),
        ({"int8_matmuls": ALL, "seq": 2**17, "per_replica_batch": 2}, "expected at most 133144"),
        ({"int8_matmuls": ["backward"]}, "int8_matmuls has 'backward', expected only names from"),
        ({"int8_matmuls": ALL, "virtual_mesh": [1, 8]}, r"but virtual_mesh is \[1, 8\]; remove"),
    ):
        with pytest.raises(InputError, match=message):
            Config(**(SMALL | changes))
