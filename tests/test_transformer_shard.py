"""The checks of the batches and tokens that are passed to a `CausalTransformer`, and its pace."""

import subprocess
import sys

import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.data.batches import check_batch
from mesh_transformer.mesh import placement
from mesh_transformer.transformer_shard import CausalTransformer, load
from mesh_transformer.util import InputError
from tests.conftest import SMALL, random_batch

CONFIG = Config(**SMALL | {"layers": 1, "cores_per_replica": 2, "tpu_size": 2})
KEYS = (
    "expected a dict of obs, target, and optionally loss_mask, segment_ids, reference, advantage, "
    "sampled, old, teacher_ids and teacher_logprobs"
)


@pytest.fixture(scope="module")
def network() -> CausalTransformer:
    return CausalTransformer(CONFIG)


def batch(**changes) -> dict[str, np.ndarray]:
    return random_batch(CONFIG, 1, 4) | changes


SHAPE = batch()["obs"].shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "line"),
    [
        (batch()["obs"], f"train: the batch is of type ndarray, {KEYS}"),
        ({"obs": batch()["obs"]}, f"train: the batch has no 'target'; {KEYS}"),
        (batch(mask=np.ones(SHAPE)), f"train: the batch has an unknown key 'mask'; {KEYS}"),
        (
            batch(loss_mask=np.full(SHAPE, 0.5)),
            "train: loss_mask has values other than 0 and 1; give 1 where a target counts, else 0",
        ),
        (
            batch(segment_ids=np.ones(SHAPE)),
            "train: segment_ids has dtype float64, expected integers",
        ),
        (
            batch(obs=batch()["obs"][0]),
            f"obs has shape {SHAPE[1:]}, expected [A, B, T] with T from 1 to 16 (seq is 16)",
        ),
    ],
)
def test_unsuitable_batch_is_refused(network, sample, line):
    with pytest.raises(InputError) as error:
        network.train(sample)
    assert str(error.value) == line


def test_a_batch_holds_copies_of_the_arrays():
    """The caller may change them while the devices still use the batch."""
    masks = {"loss_mask": np.ones(SHAPE, np.uint8), "segment_ids": np.zeros(SHAPE, np.int32)}
    sample = batch(**masks)
    for key, array in check_batch(CONFIG, "train", sample, 3).items():
        assert not np.shares_memory(array, sample[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("partitioning", ["shard_map", "jit"])
def test_positions_that_mp_does_not_divide_are_refused_if_they_are_split(partitioning):
    config = CONFIG.replace(shard_activations=True, partitioning=partitioning)
    sample = {key: x[..., :15] for key, x in batch().items()}
    line = "train: the sequences have 15 positions, expected a multiple of 2, because the mesh"
    with pytest.raises(InputError, match=line):
        CausalTransformer(config).train(sample)


@pytest.mark.slow
def test_another_state_of_the_same_step_is_not_taken_for_saved(tmp_path):
    network = CausalTransformer(CONFIG)
    other = CausalTransformer(CONFIG.replace(seed=1))
    other.save(tmp_path / "other")
    other.close()
    network.save(tmp_path / "own")
    network.save(tmp_path / "own")  # it is saved already
    for replace in (network.init, lambda: network.load(tmp_path / "other")):
        replace()
        with pytest.raises(InputError, match=r"step.0 already exists"):
            network.save(tmp_path / "own")
    network.restore(tmp_path / "own")
    network.save(tmp_path / "own")
    network.close()


@pytest.mark.slow
def test_training_alone_builds_no_generator():
    network = CausalTransformer(CONFIG)
    network.train(batch())
    assert "_generator" not in vars(network)
    answer = network.generate(np.ones((1, 3), int), [3], 2, {"temp": 0.0})
    network.train(batch())
    assert network._generator._made is None  # the copy of the old weights
    assert answer.shape == (1, 2)


def test_weights_that_cannot_be_quantized_are_refused_at_once():
    with pytest.raises(InputError, match="weight_bits is 4, but a matrix of the model has 64 inp"):
        CausalTransformer(CONFIG.replace(weight_bits=4), init=False)


def test_evaluation_checks_the_same_keys(network):
    sample = {key: tokens[0] for key, tokens in batch(other=batch()["obs"]).items()}
    with pytest.raises(InputError, match="eval: the batch has an unknown key 'other'"):
        network.eval(sample)
    del sample["other"]
    masked = sample | {"loss_mask": np.zeros(SHAPE[1:], bool)}
    np.testing.assert_array_equal(network.eval(masked)["loss"], network.eval(sample)["loss"])


@pytest.mark.parametrize("alternatives", [-1, CONFIG.n_vocab + 1, None])
def test_impossible_number_of_alternatives_is_refused(network, alternatives):
    line = f"score: alternatives is {alternatives}, expected .*0 to {CONFIG.n_vocab}"
    with pytest.raises(InputError, match=line):
        network.score(batch()["obs"][0], alternatives)


@pytest.mark.slow
def test_score_returns_any_number_of_alternatives_up_to_the_vocabulary(network):
    tokens = batch()["obs"][0]
    none, every = network.score(tokens, 0), network.score(tokens, CONFIG.n_vocab)
    assert none.top_token.shape == (*every.logprob.shape, 0)
    np.testing.assert_array_equal(none.logprob, every.logprob)
    # Every token is an alternative once, and their probabilities sum to 1 up to f32 rounding.
    np.testing.assert_array_equal(
        np.sort(every.top_token), np.broadcast_to(np.arange(CONFIG.n_vocab), every.top_token.shape)
    )
    np.testing.assert_allclose(np.exp(every.top_logprob).sum(-1), 1, rtol=1e-5)


@pytest.mark.slow
def test_programs_in_flight_are_limited(network):
    """More than 32 of them would end in a deadlock of XLA's CPU client."""
    network.init()
    losses = [network.train(batch())["loss"] for _ in range(40)]
    sample = {key: rows[0] for key, rows in batch().items()}
    losses += [network.eval(sample)["loss"] for _ in range(40)]
    in_flight = list(placement._in_flight)
    assert len(in_flight) == placement.MOST_IN_FLIGHT
    assert all(a is b for a, b in zip(in_flight, losses[-len(in_flight) :], strict=True))
    assert all(loss.is_ready() for loss in losses[: -len(in_flight)])


@pytest.mark.slow
def test_a_program_that_failed_does_not_fail_later_ones(network):
    network.init()
    loss = network.train(batch())["loss"]
    loss.delete()
    for _ in range(placement.MOST_IN_FLIGHT + 1):
        network.train(batch())
    assert network.step == int(network.state["step"]) == placement.MOST_IN_FLIGHT + 2


@pytest.mark.slow
def test_load_provides_the_devices_of_its_changes(tmp_path):
    network = CausalTransformer(SMALL)
    network.save(str(tmp_path / "model"))
    network.close()
    code = (
        "import mesh_transformer\n"
        f"network = mesh_transformer.load({str(tmp_path / 'model')!r}, changes=%s)\n"
        "print(dict(network.mesh.shape))"
    )
    wide = {"tpu_size": 16, "cores_per_replica": 4}
    run = subprocess.run(
        [sys.executable, "-c", code % wide], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == "{'dp': 4, 'mp': 4}"
    with pytest.raises(InputError, match="tpu_size is 16, but there are 8 devices; lower it"):
        load(str(tmp_path / "model"), changes=wide)
    with pytest.raises(InputError, match="tpu_size is str '8', expected"):
        load(str(tmp_path / "model"), changes={"tpu_size": "8"})
