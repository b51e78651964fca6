"""Weights of 8 bits: the bound on each, what the model makes of them, and their memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh_transformer.generation import batch as running_batch
from mesh_transformer.generation import int8
from mesh_transformer.generation.batch import MOST_STEPS
from mesh_transformer.generation.sampling import sampler_settings
from mesh_transformer.mesh.declaration import Declaration
from tests.conftest import AS_USERS_COMPILE
from tests.generation.test_decode import PLACES, by_token, network_of, random_prompts
from tests.model.test_gptj import small_config
from tests.training.test_parity import network_at_step_0

MATRICES = [
    (Declaration((12, 8), P(None, "mp"), True, False), 0),
    (Declaration((8, 12), P("mp", None), True, False), 0),
    (Declaration((12, 4, 6), P(None, "mp", None), True, False), 0),
    (Declaration((4, 6, 12), P("mp", None, None), True, False), 1),
]


@pytest.mark.parametrize(("declared", "axis"), MATRICES)
def test_a_weight_moves_by_a_254th_of_its_column_s_largest(declared, axis):
    w = np.random.default_rng(1).standard_cauchy(declared.shape).astype(np.float32)
    w[(slice(None),) * axis + (slice(None),) + (0,) * (w.ndim - axis - 1)] = 0  # a column of zeros
    made = int8.quantize({"w": jnp.asarray(w)}, {"w": declared})
    found = np.asarray(int8.restore(made, jnp.float32, jnp.zeros(()))["w"])
    assert made["w"].value.dtype == jnp.int8
    largest = np.abs(w).max(axis=axis, keepdims=True)
    # Half a step, and the roundings of f32.
    assert np.all(np.abs(found - w) <= largest / 254 * (1 + 1e-4))
    assert np.all(found[w == 0] == 0)
    spec = int8.layout({"w": declared})["w"]
    assert tuple(spec.value) == tuple(declared.spec)
    assert spec.scale[axis] is None


@pytest.mark.parametrize("variant", ["f32/mp4_ga1", "f32/t5_mp4"])
def test_logits_of_the_original_s_models_move_little(variant):
    """At step 0: by less than 2 % of their spread, root mean square."""
    exact = network_at_step_0(variant)
    network = network_at_step_0(variant, int8_weights=True)
    vocabulary, rows = network.config.n_vocab, network.dp
    prompt = np.random.default_rng(2).integers(0, vocabulary, 20)

    def logprobs(there: Any) -> np.ndarray:
        chosen = there.batch(rows).insert(
            range(rows),
            [prompt] * rows,
            1,
            sampler_settings({"temp": 0.0}, rows),
            alternatives=vocabulary,
        )
        return by_token(chosen.top_token, chosen.top_logprob)

    wanted, found = logprobs(exact), logprobs(network)
    error = np.sqrt(np.mean(np.square(found - wanted)))
    assert 0 < error < 0.02 * np.std(wanted)


@pytest.mark.parametrize("block", ["gptj", "geglu"])
@pytest.mark.parametrize("place", PLACES[1:3])
def test_a_mesh_says_what_one_device_says(block, place):
    config = small_config(block=block, int8_weights=True)
    prompts = np.stack(random_prompts(config, [6, 6]))
    found = [
        network_of(config, there).generate(prompts, [6, 4], 8, {"temp": 0.0})
        for there in (PLACES[0], place)
    ]
    np.testing.assert_array_equal(found[0], found[1])


def test_memory_is_a_quarter_and_stays_so_while_it_runs():
    config = small_config(d_model=128, n_heads=8, layers=6)

    def memory(**changes: Any) -> tuple[int, int]:
        network = network_of(config.replace(**changes))
        batch = network.batch(1)
        made = batch._generator
        run: Any = running_batch.compile_decode(made.config, made.mesh, None, MOST_STEPS)
        analysis = (
            run.lower(batch._weights, batch._state, np.ones(1, np.int32), np.int32(1))
            .compile(AS_USERS_COMPILE)
            .memory_analysis()
        )
        layers = sum(leaf.nbytes for leaf in jax.tree.leaves(batch._weights["layers"]))
        return layers, analysis.temp_size_in_bytes

    exact, _ = memory()
    small, temporary = memory(int8_weights=True)
    # Biases and norms stay f32: an eightieth of this width.
    assert small < 0.27 * exact
    # While it runs a layer or two are whole, not all six.
    assert temporary < exact / 2
