"""4-bit weights: rounding, logits, meshes, adapters of rows, memory and errors."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import Config
from mesh_transformer.generation import programs
from mesh_transformer.generation.batch import MOST_STEPS
from mesh_transformer.generation.sampling import sampler_settings
from mesh_transformer.generation.weights import WeightLayout
from mesh_transformer.mesh.declaration import Declaration, map_declared
from mesh_transformer.model import matrices, transformer
from mesh_transformer.model.casts import packed_bytes
from mesh_transformer.util import InputError
from tests.conftest import AS_USERS_COMPILE
from tests.generation.test_decode import PLACES, by_token, network_of, on_devices, random_prompts
from tests.model.test_transformer import small_config
from tests.training.test_step import mesh_of

G = matrices.GROUP
# Matrices, the axis that is divided into groups, and the inputs per group.
MATRICES = [
    (Declaration((2 * G, 8), P(None, "mp"), True, False), 0, G),
    (Declaration((3 * G // 2, 12), P("mp", None), True, False), 0, G // 2),
    (Declaration((2 * G, 4, 6), P(None, "mp", None), True, False), 0, G),
    (Declaration((4, 2 * G, 12), P("mp", None, None), True, False), 1, G),
    (Declaration((4, 5 * G // 2, 6), P("mp", None, None), True, False), 1, G // 2),
]


def rounded(w: np.ndarray, axis: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers and scales of a matrix, both of its shape, column by column."""
    columns = np.moveaxis(w, axis, -1)
    integers, scales = np.empty_like(columns), np.empty_like(columns)
    for index in np.ndindex(*columns.shape[:-1]):
        for begin in range(0, columns.shape[-1], group):
            x = columns[index][begin : begin + group]
            extreme = x[np.argmax(np.abs(x))]
            scale = np.float32((extreme / np.float32(-8)).astype(ml_dtypes.bfloat16)) or 1
            integers[index][begin : begin + group] = np.clip(np.rint(x / scale), -8, 7)
            scales[index][begin : begin + group] = scale
    return np.moveaxis(integers, -1, axis), np.moveaxis(scales, -1, axis)


def restored(params: Any, config: Config) -> Any:
    """Return stacked parameters whose matrices are rounded, those of the head to 8 bits."""

    def one(d: Declaration, w: Any) -> np.ndarray:
        w = np.asarray(w)
        if not d.decay:
            return w
        axis = d.matrix_axes[0][-1]
        integers, scales = rounded(w, axis, math.gcd(w.shape[axis], G))
        return integers * scales

    declared = transformer.declarations(config)
    head = params["proj"]["projection/head"]
    w = np.asarray(head["w"])
    scale = np.abs(w).max(0) / np.float32(127)
    proj = params["proj"] | {"projection/head": head | {"w": np.rint(w / scale) * scale}}
    layers = map_declared(one, declared["layers"], params["layers"])
    return params | {"layers": layers, "proj": proj}


def random_matrix(rng: np.random.Generator, declared: Declaration) -> np.ndarray:
    return rng.standard_cauchy(declared.shape).astype(np.float32)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("declared", "axis", "group"), MATRICES)
def test_a_matrix_is_rounded_as_by_the_definition(declared, axis, group):
    w = random_matrix(np.random.default_rng(1), declared)
    np.moveaxis(w, axis, -1)[(0,) * (w.ndim - 1)] = 0  # a column of zeros
    quantized = matrices.quantize({"w": jnp.asarray(w)}, {"w": declared}, 4)["w"]
    assert quantized.shape == w.shape
    assert (quantized.value.dtype, quantized.scale.dtype) == (jnp.int4, jnp.bfloat16)
    assert quantized.scale.size * group == w.size
    integers, scales = rounded(w, axis, group)
    actual = np.asarray(quantized.value.astype(jnp.float32)).reshape(w.shape)
    np.testing.assert_array_equal(actual, integers)
    scale = np.repeat(np.asarray(quantized.scale, np.float32), group, axis + 1)
    np.testing.assert_array_equal(scale.reshape(w.shape), scales)
    # An entry of the other sign is at most 8 steps away, which become 7; bf16 rounds the step.
    assert np.all(np.abs(integers * scales - w) <= np.abs(scales) * (1 + 8 / 256))
    arrays = matrices.stored({"w": declared}, 4)["w"]
    spec = arrays.value.spec
    assert spec == arrays.scale.spec
    assert [name for name in spec if name is not None] == ["mp"]
    assert spec[axis + 1] is None


@pytest.mark.quick(4)
@pytest.mark.parametrize(("declared", "axis", "group"), MATRICES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_matmul_is_that_of_the_restored_matrix(declared, axis, group, dtype):
    """Also with several norm groups, and with several input or output axes."""
    rng = np.random.default_rng(3)
    w = rng.normal(size=declared.shape).astype(np.float32)
    quantized = matrices.quantize({"w": jnp.asarray(w)}, {"w": declared}, 4)["w"]
    integers, scales = rounded(w, axis, group)
    # In bf16, a restored entry is rounded once more, by at most 1/512 of itself.
    exact = np.asarray((integers * scales).astype(dtype), np.float64)
    tolerance = {"rtol": 1e-5, "atol": 2e-5}  # sums of up to 4 x 80 products of order 1, in f32
    if declared.spec[0] is None:
        x = jnp.asarray(rng.normal(size=(2, 3, len(w))), dtype)
        expected = np.tensordot(np.asarray(x, np.float64), exact, 1)
        actual = matrices.project_in(x, quantized, jnp.float32)
        np.testing.assert_allclose(actual, expected, **tolerance)
        assert matrices.project_in(x, quantized).dtype == dtype
    else:
        x = jnp.asarray(rng.normal(size=(2, 3, *w.shape[:-1])), dtype)
        expected = np.tensordot(np.asarray(x, np.float64), exact, w.ndim - 1)
        actual = matrices.project_out(x, quantized)
        assert actual.dtype == dtype
        if dtype == jnp.bfloat16:  # the result is rounded to bf16
            tolerance = {"rtol": 2**-8, "atol": 2e-5}
        np.testing.assert_allclose(np.asarray(actual, np.float64), expected, **tolerance)


def config_of(block: str, **changes: Any) -> Config:
    return small_config(block=block, d_model=4 * G, weight_bits=4, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "place"),
    [
        ("gptj", PLACES[0]),
        ("gptj", PLACES[1]),
        ("geglu", PLACES[2]),
        ("gpt2", PLACES[1]),
        ("neox", PLACES[2]),
        ("llama", PLACES[1]),
    ],
)
def test_generation_is_that_of_the_restored_weights_on_every_mesh(block, place):
    """The logprobs of all tokens, of a text and of what follows it."""
    copied = {"key_heads": 2} if block == "llama" else {}  # mp is 4
    config = config_of(block, tie_head=False, **copied)
    network, exact = network_of(config, place), network_of(config.replace(weight_bits=None))
    params = restored(exact.state["params"], exact.config)
    exact.state["params"] = jax.tree.map(jnp.asarray, params)
    tokens = np.stack(random_prompts(config, [9, 9, 9, 9]))
    actual, expected = (
        by_token(scored.top_token, scored.top_logprob)
        for scored in (model.score(tokens, config.n_vocab) for model in (network, exact))
    )
    # Sums in another order, in f32; logprobs reach tens.
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-4)
    tokens = [model.generate(tokens, [9, 4, 7, 1], 8, {"temp": 0.0}) for model in (network, exact)]
    np.testing.assert_array_equal(tokens[0], tokens[1])


@pytest.mark.slow
def test_an_answer_does_not_depend_on_its_neighbours():
    network = network_of(config_of("gptj"))
    one, *others = random_prompts(network.config, [6, 5, 9])
    results = []
    for other in others:
        batch = network.batch(2)
        settings = sampler_settings({"seed": np.array([1, 2])}, 2)
        first = batch.insert(range(2), [one, other], 8, settings, alternatives=3)
        results.append((first.token[0], *(x[0] for x in batch.decode(7, 3))))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.slow
def test_4_bit_weights_take_less_memory_even_during_decoding():
    """Per weight 4 bits, and the 16 of a scale per group; XLA on CPUs packs them in pairs, too."""
    config = config_of("gptj", n_heads=8, layers=6)
    batch = network_of(config).batch(1)
    generator, weights = on_devices(batch)._generator, on_devices(batch)._weights
    run: Any = programs.compile_decode(generator.layout, None, MOST_STEPS)
    analysis = (
        run.lower(weights, on_devices(batch)._state, np.ones(1, np.int32), np.int32(1), None)
        .compile(AS_USERS_COMPILE)
        .memory_analysis()
    )
    leaves = jax.tree.leaves(weights)
    packed = sum(packed_bytes(leaf.shape, leaf.dtype) for leaf in leaves)
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(on_devices(batch)._state))
    # The arguments are padded to the compiler's alignment, of less than 100 bytes each.
    assert 0 <= analysis.argument_size_in_bytes - packed - state < 100 * (len(leaves) + 40)
    layers = jax.tree.leaves(weights["layers"])
    matrix = 12 * config.d_model**2 * config.layers
    others = sum(leaf.nbytes for leaf in layers if leaf.dtype == jnp.float32)
    total = sum(packed_bytes(leaf.shape, leaf.dtype) for leaf in layers)
    assert total == matrix // 2 + 2 * matrix // G + others
    # During execution, only one or two of the six layers are restored at a time.
    assert analysis.temp_size_in_bytes < 4 * matrix / 2


def test_what_cannot_be_quantized_is_one_line():
    refused = [
        ({"d_model": 40, "n_heads": 8}, 1, "a matrix of the model has 40 inputs, .* of 16; set"),
        ({"d_model": 2 * G, "n_heads": 8}, 4, f"{2 * G} inputs, {G // 2} per device, .* of {G}"),
    ]
    for changes, mp, message in refused:
        config = small_config(weight_bits=4, **changes)
        with pytest.raises(InputError, match=f"weight_bits is 4, but .*{message}"):
            WeightLayout(config, mesh_of(1, mp))
    config = small_config(weight_bits=4, d_model=2 * G, n_heads=8)
    WeightLayout(config, mesh_of(1, 2))
    with pytest.raises(InputError, match="int8_weights is true, but weight_bits is 4; remove"):
        small_config(weight_bits=4, int8_weights=True)
    with pytest.raises(InputError, match="weight_bits is int 5, expected one of 4, 8 or null"):
        small_config(weight_bits=5)


def test_int8_weights_is_another_name_for_8_bits():
    config = small_config(int8_weights=True)
    assert config.weight_bits == 8
    assert Config.from_dict(config.as_dict()) == config
    assert config.replace(int8_weights=False).weight_bits is None
