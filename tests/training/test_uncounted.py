"""Batches in which no target counts in the loss change only the step, in every way of training."""

import warnings
from typing import Any

import jax
import numpy as np
import pytest

import mesh_transformer
from mesh_transformer.data.in_memory import InOrder
from mesh_transformer.network import Train
from mesh_transformer.pod.runner import NetworkRunner
from mesh_transformer.training import spikes
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError, StoppedError, UncountedWarning
from tests.conftest import SMALL, random_batch

# (dp, mp, changes of the config); each update would decay the weights if it were not skipped.
WAYS = {
    "one device": (1, 1, {}),
    "accumulation": (1, 1, {"gradient_accumulation_steps": 3, "optimizer": "lion"}),
    "shard_map": (2, 4, {}),
    "zero 3": (4, 2, {"zero": 3, "gradient_accumulation_steps": 2}),
    "jit": (2, 2, {"partitioning": "jit", "zero": 1, "optimizer": "muon"}),
    "ramp": (2, 1, {"gradient_accumulation_steps": 3, "batch_ramp_steps": 9, "batch_ramp_from": 1}),
    "virtual mesh": (2, 2, {"virtual_mesh": [4, 4], "skip_spikes": 9.0}),
    "offload": (1, 2, {"offload": "params", "optimizer": "adafactor"}),
}
SIZES = {"layers": 1, "weight_decay": 0.5, "lr": 0.1, "warmup_steps": 0, "z_loss": 0.1}


def network_of(way: str) -> CausalTransformer:
    dp, mp, changes = WAYS[way]
    sizes = {"cores_per_replica": mp, "tpu_size": dp * mp, "per_replica_batch": 2}
    return CausalTransformer(SMALL | SIZES | sizes | changes, devices=jax.devices()[: dp * mp])


def values(network: CausalTransformer) -> list[np.ndarray]:
    assert network.state is not None
    kept = {name: x for name, x in network.state.items() if name not in ("step", "sequences")}
    return [np.asarray(leaf) for leaf in jax.tree.leaves(kept)]


def batch_of(network: CausalTransformer, seed: int, counted: list[int]) -> dict[str, np.ndarray]:
    """Return a batch in which these targets count, as indices into the flattened mask."""
    config = network.config
    size = config.microbatches(seed)
    batch = random_batch(config, size, network.batch_size, seed=seed)
    mask = np.zeros(batch["obs"].shape, np.uint8)
    mask.flat[counted] = 1
    return batch | {"loss_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_an_update_without_a_counted_target_changes_only_the_step(way):
    network = network_of(way)
    size = network.config.microbatches(1) * network.batch_size * network.config.seq
    one = int(np.random.default_rng(len(way)).integers(size))
    before = values(network)
    with pytest.warns(UncountedWarning, match="no target of the batch counts in the loss"):
        metrics = network.train(batch_of(network, 1, []))
    assert (float(metrics["skipped"]), float(metrics["counted"])) == (1, 0)
    for old, new in zip(before, values(network), strict=True):
        np.testing.assert_array_equal(old, new)
    assert network.state is not None
    assert network.step == int(network.state["step"]) == 1
    metrics = network.train(batch_of(network, 1, [one]))  # one target suffices
    assert (float(metrics["skipped"]), float(metrics["counted"])) == (0, 1)
    assert float(metrics["loss"]) > 0
    assert any(not np.array_equal(*pair) for pair in zip(before, values(network), strict=True))


@pytest.mark.slow
def test_an_update_without_a_counted_target_adds_no_norm_to_the_window():
    network = network_of("virtual mesh")
    assert network.state is not None
    for seed in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncountedWarning)
            metrics = network.train(batch_of(network, seed, [5] if seed != 1 else []))
    norms = np.asarray(network.state["norms"])
    assert len(norms) == spikes.WINDOW
    assert np.count_nonzero(norms) == 2
    assert norms[2] == np.float32(metrics["grad_norm"])


@pytest.mark.slow
def test_a_host_of_a_pod_reports_such_a_step():
    runner = NetworkRunner(0)
    runner.network = network_of("shard_map")
    with pytest.warns(UncountedWarning):
        runner.run(Train(batch_of(runner.network, 0, [])))
    numbers = runner.metrics().numbers
    assert (numbers["skipped"], numbers["counted"]) == (1, 0)


def items(network: CausalTransformer, bad: set[int], steps: int) -> list[dict[str, Any]]:
    """Return one batch of items per step, in order; those of the `bad` steps have no labels."""
    rng = np.random.default_rng(0)
    seq, result = network.config.seq, []
    for step in range(1, steps + 1):
        for _ in range(network.batch_size):
            ids = rng.integers(0, network.config.n_vocab, seq + 1)
            labels = np.full(seq + 1, -100) if step in bad else ids
            result.append({"input_ids": ids, "labels": labels})
    return result


@pytest.mark.slow
def test_fit_counts_and_reports_such_steps(capsys):
    network = network_of("one device")
    network = CausalTransformer(network.config.replace(total_steps=6))
    rows = mesh_transformer.fit(network, iter(items(network, {2, 5}, 6)))
    assert [row.get("train/skipped", 0) for row in rows] == [0, 1, 1, 1, 2, 2]
    assert [row["step"] for row in rows if "train/loss" not in row] == [2, 5]
    printed = capsys.readouterr().err
    for step in (2, 5):
        assert f"step {step}: no target of the batch counts in the loss; its batch is " in printed
    assert printed.count("its update is skipped") == 2


@pytest.mark.slow
def test_many_such_steps_in_a_row_stop_the_run():
    network = network_of("one device")
    network = CausalTransformer(network.config.replace(total_steps=9, max_skipped=3))
    with pytest.raises(StoppedError, match="3 updates in a row were skipped; check the loss masks"):
        mesh_transformer.fit(network, iter(items(network, {2, 3, 4, 5}, 9)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            {"labels": [-100] * 5 + [5, 6, 7], "attention_mask": [1] * 5 + [0] * 3},
            "labels that count only from position 5 on, where its attention_mask is 0",
        ),
        (
            {"attention_mask": [1, 1, 0, 1, 1, 1, 0, 0]},
            "attention_mask that is 0 at position 2 and 1 after it",
        ),
        ({"attention_mask": [0] * 3 + [1] * 5}, "padded at its start; pad at the end"),
        ({"attention_mask": [0.5] * 8}, "attention_mask with values other than 0 and 1"),
        ({"attention_mask": [0] * 8}, "padded at its start"),
        ({"position_ids": [0, 1, 2, 0, 1, 2, 3, 4]}, "position_ids that do not count from 0"),
        ({"completion_mask": [0] * 4 + [1] * 4}, "give labels that are -100 before the completion"),
        ({"loss_mask": [1] * 8}, "input_ids and loss_mask; give labels"),
    ],
)
def test_fit_refuses_what_would_get_another_meaning(item, message):
    network = CausalTransformer(SMALL | {"layers": 1, "total_steps": 1, "seq": 7}, init=True)
    data = [{"input_ids": list(range(8))} | item] * 8
    with pytest.raises(InputError, match=message):
        mesh_transformer.fit(network, data)


def test_labels_that_count_on_padding_too_are_those_of_the_text():
    tokens = np.arange(8)
    given = {"input_ids": tokens, "attention_mask": [1] * 5 + [0] * 3, "labels": tokens}
    [row] = InOrder([given | {"position_ids": tokens}], 7, 1)
    np.testing.assert_array_equal(row["loss_mask"][0], [1, 1, 1, 1, 0, 0, 0])
