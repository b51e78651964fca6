"""Packing: each text in a shared sequence trains exactly as in a sequence of its own."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.data.completions import Encoder, Pair, pack_texts
from mesh_transformer.data.inputs import BadInputHandler
from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.tfrecords import write_set
from mesh_transformer.evaluation import validation
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model.loss import loss_weights
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.training.test_step import BATCH, largest_differences, on_mesh, run, small_config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

CONFIG = small_config(layers=1, z_loss=0.1)
SEQ = CONFIG.seq
PAIRS = 2 * BATCH


class Letters(SimpleNamespace):
    """A tokenizer with one token per character."""

    eos_token_id = 0
    unk_token = None

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(map(ord, text)) for text in texts]}


def random_pairs() -> list[Any]:
    """Return texts of 1 to `SEQ` tokens and an end of text, some without a prompt."""
    rng = np.random.default_rng(7)
    lengths = [SEQ, 1, *rng.integers(1, SEQ // 2, PAIRS - 2)]
    texts = ["".join(map(chr, rng.integers(1, CONFIG.n_vocab, length))) for length in lengths]
    cuts = [int(rng.integers(0, length)) for length in lengths]
    return [Pair("", text[:cut], text[cut:]) for text, cut in zip(texts, cuts, strict=True)]


def records(*, pack: bool) -> list[dict[str, np.ndarray]]:
    texts = Encoder(Letters(), SEQ, BadInputHandler(False)).texts(random_pairs())
    return list(pack_texts(texts, Letters.eos_token_id, SEQ, pack=pack))


@pytest.fixture(scope="module")
def indexes(tmp_path_factory) -> dict[bool, str]:
    """The index files of the unpacked and the packed set."""
    folder = tmp_path_factory.mktemp("sets")
    return {
        pack: str(write_set(str(folder), f"{pack}", records(pack=pack))[1])
        for pack in (False, True)
    }


def whole_set(index: str, count: int) -> dict[str, np.ndarray]:
    """Return all records as one batch [1, count, T], padded with records without loss."""
    rows = list(TFRecordNewInputs(index, 1, SEQ, repeat=False))
    blank = {key: np.zeros_like(x) for key, x in rows[0].items()}
    rows += [blank] * (count - len(rows))
    return {key: np.concatenate([row[key] for row in rows])[None] for key in rows[0]}


def test_packing_keeps_every_token_and_its_order():
    unpacked, packed = records(pack=False), records(pack=True)
    assert len(unpacked) == PAIRS
    assert len(packed) < PAIRS // 2
    for name in ("input_ids", "labels", "input_mask"):
        actual = [row[name][row["segment_ids"] > 0] for row in packed]
        expected = [
            row[name][: len(pair.prompt + pair.completion)]
            for row, pair in zip(unpacked, random_pairs(), strict=True)
        ]
        np.testing.assert_array_equal(np.concatenate(actual), np.concatenate(expected))
    for row in packed:  # texts are numbered from 1, and padding has number 0
        segments = row["segment_ids"][row["segment_ids"] > 0]
        assert segments.tolist() == sorted(segments)
        assert sorted(set(segments)) == list(range(1, segments.max() + 1))
        assert not row["input_mask"][row["segment_ids"] == 0].any()


@pytest.mark.slow
@pytest.mark.parametrize("pe", ["rotary", "fixed", "t5"])
def test_packed_set_scores_the_same_as_unpacked(indexes, pe):
    network = CausalTransformer(CONFIG.replace(pe=pe, pe_rotary_dims=None, attention_window=5))
    unpacked, packed = (validation.score(network, indexes[pack]) for pack in (False, True))
    assert packed.tokens == unpacked.tokens > 0
    assert packed.correct == unpacked.correct
    # A sum of a hundred losses near 5 in f32.
    assert packed.nats == pytest.approx(unpacked.nats, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partitioning", "dp", "mp"), [("shard_map", 1, 1), ("shard_map", 2, 4), ("jit", 2, 4)]
)
def test_packed_set_trains_the_same_as_unpacked(indexes, partitioning, dp, mp):
    unpacked = run(CONFIG, batch=whole_set(indexes[False], PAIRS))
    batch = whole_set(indexes[True], PAIRS // 2)
    packed = run(on_mesh(CONFIG, partitioning, mp, 0), dp, mp, batch)
    differences = largest_differences(packed, unpacked)
    assert max(differences.values()) < 1e-5, differences  # as in tests/training/test_step.py


def test_each_run_of_a_segment_id_is_a_text_with_a_last_position():
    segments = np.array([[1, 1, 2, 2, 1, 1, -1, -1], [5] * 8])
    mask = np.array([[1, 1, 0, 0, 1, 0, 1, 1], [0, 1, 1, 0, 0, 0, 0, 0]])
    weights = loss_weights(jnp.asarray(mask), Auto(), jnp.asarray(segments))
    last = np.array([[0, 1, 0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0, 0, 0]])
    np.testing.assert_allclose(weights.last_BT, last / last.mean(), rtol=1e-6)  # f32
    np.testing.assert_allclose(weights.every_BT, mask / mask.mean(), rtol=1e-6)


def test_plain_records_mixed_with_packed_ones_are_a_single_segment(tmp_path, indexes):
    rows = np.random.default_rng(1).integers(0, CONFIG.n_vocab, (9, SEQ + 1))
    _, plain, _ = write_set(str(tmp_path), "plain", rows)
    loader = TFRecordNewInputs({indexes[True]: 1.0, str(plain): 1.0}, 1, SEQ)
    kinds = set()
    for _ in range(30):
        row = loader.get_samples()
        segments, loss_mask = row["segment_ids"][0], row["loss_mask"][0]
        kinds.add((set(segments) == {1}, bool(loss_mask.all())))
    assert (True, True) in kinds
    assert (False, False) in kinds
    loader.close()


def test_set_of_packed_and_unpacked_records_is_refused(tmp_path):
    mixed = [records(pack=False)[0], records(pack=True)[0]]
    _, index, _ = write_set(str(tmp_path), "mixed", mixed)
    loader = TFRecordNewInputs(str(index), 1, SEQ, repeat=False)
    with pytest.raises(InputError, match=r"record 1 .* has the feature segment_ids, but the first"):
        list(loader)
