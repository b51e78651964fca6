"""Batches cut to the length of their longest text: results, resuming and compiled programs."""

import json
from typing import Any

import jax
import numpy as np
import pytest

import mesh_transformer
from mesh_transformer.config import Config
from mesh_transformer.data.batches import cut_to_bucket
from mesh_transformer.data.tfrecords import write_set
from mesh_transformer.training import loop
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import SMALL
from tests.support.small_run import assert_same_rows, rows_of

SEQ = 32
BUCKETS = [8, 16]
STEPS = 6
LONGEST = (5, 30, 12, 32, 7, 16)  # text of each step
PACKED = {"pe": "fixed", "pe_rotary_dims": None, "packed_positions": "continue"}
TOKENS = {"warmup_steps": 0, "anneal_steps": None, "warmup_tokens": 200, "anneal_tokens": 600}
DROPOUT = {"dropout_attention": 0.2, "dropout_residual": 0.1, "dropout_embedding": 0.1}


def config_of(**changes: Any) -> Config:
    sizes = {"layers": 1, "seq": SEQ, "total_steps": STEPS, "per_replica_batch": 2, "z_loss": 0.1}
    return Config(**(SMALL | sizes | changes))


def sequences(rows: int, *, packed: bool = False) -> list[dict[str, np.ndarray]]:
    """Return one batch of padded sequences per step; the longest of a step has its `LONGEST`."""
    rng, result = np.random.default_rng(3), []
    for longest in LONGEST:
        lengths = rng.integers(2, longest + 1, rows)
        lengths[rng.integers(rows)] = longest
        for length in lengths:
            tokens = rng.integers(0, 128, SEQ + 1)
            mask = (np.arange(SEQ) < length) & (rng.random(SEQ) < 0.6)
            mask[length - 1] = True
            item = {"obs": tokens[:-1], "target": tokens[1:], "loss_mask": mask.astype(np.uint8)}
            if packed:
                texts = np.sort(rng.integers(1, 4, length))
                item["segment_ids"] = np.append(texts, np.zeros(SEQ - length, int))
            result.append(item)
    return result


def test_a_batch_keeps_its_targets_in_the_smallest_length_that_holds_them():
    rng = np.random.default_rng(0)
    for used in (0, 1, 8, 9, 16, 17, 32):
        mask = np.zeros((2, 3, SEQ), np.uint8)
        if used:
            mask[rng.integers(2), rng.integers(3), used - 1] = 1
        batch = {"obs": rng.integers(0, 9, mask.shape), "loss_mask": mask}
        taught = rng.integers(0, 9, (*mask.shape, 5))
        actual = cut_to_bucket(batch | {"teacher_ids": taught.reshape(2, 3, -1)}, BUCKETS)
        length = 8 if used <= 8 else 16 if used <= 16 else SEQ
        for key, array in batch.items():
            np.testing.assert_array_equal(actual[key], array[..., :length])
        kept = actual["teacher_ids"].reshape(2, 3, length, 5)
        np.testing.assert_array_equal(kept, taught[..., :length, :])
        without = {"obs": batch["obs"]}
        assert cut_to_bucket(without, BUCKETS) is without  # all targets count
        assert cut_to_bucket(batch, []) is batch
    # The sums of an objective's reference have a place for each text.
    segments = np.full((1, 1, SEQ), 10)
    batch = {"obs": segments, "loss_mask": np.eye(1, SEQ)[None], "segment_ids": segments}
    assert cut_to_bucket(batch, BUCKETS)["obs"].shape == (1, 1, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "packed"),
    [
        (DROPOUT | TOKENS | {"tpu_size": 4, "cores_per_replica": 2, "zero": 1}, False),
        (PACKED | {"gradient_accumulation_steps": 2}, True),
        ({"partitioning": "jit", "context_parallel": 2, "attention": "blocks"}, True),
        ({"shard_activations": True, "cores_per_replica": 8, "block": "llama"}, False),
        ({"virtual_mesh": [2, 2], "cores_per_replica": 2, "tpu_size": 2}, False),
    ],
    ids=str,
)
def test_cut_batches_train_like_whole_ones(changes, packed):
    results = []
    for buckets in ([], BUCKETS):
        config = config_of(length_buckets=buckets, val_every=3, **changes)
        devices = jax.devices()[: config.tpu_size]
        network = CausalTransformer(config, devices=devices)
        size = network.batch_size * config.gradient_accumulation_steps
        data = sequences(size, packed=packed)
        rows = mesh_transformer.fit(network, iter(data), val=data)
        results.append((rows, network.saved_state()["params"], network._train._cache_size()))
    (whole, expected, _), (cut, actual, programs) = results
    for row, other in zip(whole, cut, strict=True):
        for key in ("train/loss", "train/last_loss", "train/grad_norm", "train/learning_rate"):
            # f32: sums over fewer zeros, in another order, after Adam steps.
            assert other[key] == pytest.approx(row[key], rel=2e-5), key
        if "val/loss_val" in row:
            assert other["val/loss_val"] == pytest.approx(row["val/loss_val"], rel=2e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-4), actual, expected)
    assert programs == len(BUCKETS) + 1
    lengths = [8, 32, 16, 32, 8, 16]
    assert [row["train/tokens"] for row in cut] == (size * np.cumsum(lengths)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"objective": "dpo"}, {"teacher": "records"}], ids=str)
def test_a_batch_of_preferences_or_a_teacher_has_the_same_losses_if_it_is_cut(changes):
    rng, batch = np.random.default_rng(4), {}
    for key in ("obs", "target"):
        batch[key] = rng.integers(0, 128, (1, 2, SEQ))
    batch["segment_ids"] = np.tile(np.repeat([1, 2, 4, 5, 0], [3, 2, 4, 3, 20]), (1, 2, 1))
    batch["loss_mask"] = (batch["segment_ids"] > 0).astype(np.uint8)
    if "objective" in changes:
        batch["reference"] = np.zeros((1, 2, SEQ), np.float32)
        batch["reference"][..., [0, 1, 3, 4]] = rng.normal(-9, 1, (1, 2, 4))
    else:
        batch["teacher_ids"] = rng.permuted(np.tile(np.arange(128), (1, 2, 1)), axis=-1)[..., :96]
        batch["teacher_logprobs"] = rng.uniform(-9, -4, (1, 2, 96))
    losses = []
    for buckets in ([], BUCKETS):
        network = CausalTransformer(config_of(**changes), devices=jax.devices()[:1])
        metrics = network.train(cut_to_bucket(batch, buckets))
        losses.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)  # f32 sums in another order


@pytest.mark.slow
def test_resuming_is_bit_identical(tmp_path):
    names = {"obs": "input_ids", "target": "labels", "loss_mask": "input_mask"}
    data = [{names[key]: x for key, x in item.items()} for item in sequences(2)]
    index = str(write_set(str(tmp_path), "made", data)[1])
    config = config_of(
        train_set=index, val_set={"made": index}, length_buckets=BUCKETS, val_every=4, ckpt_every=2
    )

    def train(folder: str, stop: int) -> None:
        network = CausalTransformer(config, devices=jax.devices()[:1], init=False)
        loop.train(network, folder, max_steps=stop)

    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    train(whole, STEPS)
    for stop in (1, 3, STEPS):
        train(parts, stop)
    rows = rows_of(whole)
    assert_same_rows(rows_of(parts), rows)
    assert rows[-1]["train/tokens"] == 2 * (8 + 32 + 16 + 32 + 8 + 16)
    assert json.dumps(rows)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"length_buckets": [16, 8]}, "expected ascending numbers from 1 to seq \\(32\\)"),
        ({"length_buckets": [0, 8]}, "expected ascending numbers from 1"),
        ({"length_buckets": [64]}, "expected ascending numbers from 1"),
        (
            {"length_buckets": [6, 8], "context_parallel": 2},
            "length_buckets is \\[6, 8\\], expected ascending multiples of 4",
        ),
        ({"length_buckets": [8], "hosts_read": True}, "hosts_read is true, so that no host sees"),
    ],
)
def test_unsuitable_lengths_are_refused(changes, line):
    with pytest.raises(InputError, match=line):
        config_of(**changes)
