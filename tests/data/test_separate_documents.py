"""Documents apart in one sequence, and the positions of packed texts, against each text alone."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mesh_transformer
from mesh_transformer.config import Config
from mesh_transformer.data import loader as loader_module
from mesh_transformer.data.in_memory import InMemoryTrainSet, InOrder
from mesh_transformer.data.loader import document_end, open_train_set
from mesh_transformer.data.tfrecords import write_set
from mesh_transformer.evaluation import validation
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import transformer
from mesh_transformer.performance.plan import abstract_batch
from mesh_transformer.training import step
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import SMALL
from tests.training.test_step import mesh_of

END = 256  # of the tokenizer `bytes`
SEQ = 64
TOKENS = {"tokenizer": "bytes", "n_vocab": 257, "separate_documents": True, "seq": SEQ}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
# Position embeddings that depend on differences of positions only.
RELATIVE: dict[str, dict[str, Any]] = {
    "rotary": {},
    "window": {"attention_window": 5, "block": "neox"},
    "yarn": {"rotary_scaling": YARN, "block": "llama", "key_heads": 2},
    "dynamic": {"rotary_scaling": DYNAMIC},
    "t5": {"pe": "t5", "pe_rotary_dims": None},
}


def config_of(**changes: Any) -> Config:
    return Config(**(SMALL | TOKENS | changes))


def documents(count: int, seed: int = 0) -> np.ndarray:
    """Return rows [count, T + 1] of consecutive tokens; some documents are longer than a row."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([1, 5, 20, 2 * SEQ], count * SEQ)
    texts = [np.append(rng.integers(0, END, length), END) for length in lengths]
    return np.concatenate(texts)[: count * (SEQ + 1)].reshape(count, SEQ + 1)


def pieces(row: np.ndarray) -> list[slice]:
    """Return the places of the parts of documents in the inputs of a row."""
    cuts = [0, *(at + 1 for at in np.flatnonzero(row[:-1] == END)), SEQ]
    return [slice(*pair) for pair in itertools.pairwise(cuts) if pair[0] < pair[1]]


def logits(
    params: Any, tokens: np.ndarray, config: Config, segments: np.ndarray | None
) -> np.ndarray:
    numbers = None if segments is None else jnp.asarray(segments)[None]
    return np.asarray(
        transformer.logits(params, jnp.asarray(tokens)[None], config, Auto(), numbers)
    )[0]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"pe": "fixed", "pe_rotary_dims": None},
        {"cores_per_replica": 2, "tpu_size": 4},
        {"context_parallel": 2, "tpu_size": 2, "partitioning": "jit"},
        {"block": "llama", "key_heads": 2, "attention": "blocks"},
    ],
    ids=str,
)
def test_each_document_is_scored_as_if_alone(tmp_path, changes):
    rows = documents(4)
    index = str(write_set(str(tmp_path), "made", rows)[1])
    config = config_of(train_set=index, total_steps=1, **changes)
    network = CausalTransformer(config, devices=jax.devices()[: config.tpu_size])
    places = [(row, place) for row in range(4) for place in pieces(rows[row])]
    assert len(places) > 8
    alone = np.full((len(places) + len(places) % 2, SEQ + 1), 7)
    for i, (row, place) in enumerate(places):
        alone[i, : place.stop - place.start + 1] = rows[row, place.start : place.stop + 1]
    expected = np.asarray(
        CausalTransformer(config.replace(tpu_size=1, context_parallel=1, cores_per_replica=1))
        .eval({"obs": alone[:, :-1], "target": alone[:, 1:]})["all_loss"]
    )  # fmt: skip
    loader = open_train_set(config, 4)
    batch = {key: x[0] for key, x in loader.get_samples().items()}
    loader.close()
    actual = np.asarray(network.eval(batch)["all_loss"])
    for i, (row, place) in enumerate(places):
        # f32, in which the sums of attention are over more positions, most of them 0.
        length = place.stop - place.start
        np.testing.assert_allclose(actual[row, place], expected[i, :length], rtol=0, atol=2e-5)
    plain = np.asarray(network.eval({key: batch[key] for key in ("obs", "target")})["all_loss"])
    assert np.abs(plain - actual).max() > 1e-2  # documents that see each other


def test_documents_are_numbered_in_records_mixtures_and_memory(tmp_path):
    rows = documents(6, seed=1)
    obs, ends = rows[:, :-1], rows[:, :-1] == END
    numbers = np.array([[row[:at].sum() for at in range(SEQ)] for row in ends])
    config = config_of()
    train_set = InMemoryTrainSet(rows, SEQ, lambda _: (1, 6), 0, document_end(config))
    sample = train_set.get_samples()
    order = [next(i for i in range(6) if (obs[i] == row).all()) for row in sample["obs"][0]]
    np.testing.assert_array_equal(sample["segment_ids"][0], numbers[order])
    train_set.close()
    [ordered] = InOrder(rows, SEQ, 6, document_end(config))
    np.testing.assert_array_equal(ordered["segment_ids"], numbers)
    # Chats whose turns end with the same token stay whole.
    chat = dict.fromkeys(("input_ids", "labels"), obs[0]) | {"input_mask": np.ones(SEQ, int)}
    assert numbers[0].any()
    text = str(write_set(str(tmp_path), "text", rows)[1])
    chats = str(write_set(str(tmp_path), "chats", [chat] * 6)[1])
    config = config_of(train_set={text: 1.0, chats: 1.0})
    loader, seen = open_train_set(config, 6), set()
    for row, segments in zip(*_flat(loader.get_samples(), "obs", "segment_ids"), strict=True):
        of_text = np.flatnonzero((obs == row).all(axis=1))
        runs = {tuple(numbers[i]) for i in of_text} | {(1,) * SEQ}
        assert tuple(segments) in runs
        seen.add(tuple(segments) == (1,) * SEQ)
    loader.close()
    assert seen == {True, False}
    network = CausalTransformer(config)
    for source in (text, rows):
        batches = validation.open_set(network, source)
        batch = next(iter(batches))
        np.testing.assert_array_equal(batch["segment_ids"], numbers[: len(batch["obs"])])
        batches.close()


def _flat(batch: dict[str, np.ndarray], *keys: str) -> list[np.ndarray]:
    return [batch[key].reshape(-1, SEQ) for key in keys]


def test_a_tokenizer_without_an_end_of_text_is_refused(monkeypatch):
    class Endless:
        eos_token_id = None

    monkeypatch.setattr(loader_module, "load_tokenizer", lambda _: Endless())
    config = config_of(comment="not in the cache")
    with pytest.raises(InputError, match="separate_documents is true, but tokenizer bytes has no"):
        document_end(config)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", RELATIVE)
def test_where_relative_positions_begin_changes_only_the_rounding(kind):
    """So a later part of a long document needs no start position in its record."""
    config = config_of(**RELATIVE[kind])
    params = transformer.init(config, jax.random.key(1))
    rng = np.random.default_rng(1)
    tokens, first = rng.integers(0, 257, SEQ), int(rng.integers(20, 40))
    segments = np.arange(SEQ) >= first
    alone = logits(params, tokens[first:], config, None)
    for positions in ("restart", "continue"):
        both = logits(params, tokens, config.replace(packed_positions=positions), segments)
        # f32: angles up to 64 are rounded to 4e-6, and logits are of order 1.
        np.testing.assert_allclose(both[first:], alone, rtol=0, atol=1e-4)
    assert np.abs(logits(params, tokens, config, None)[first:] - alone).max() > 1e-2


@pytest.mark.parametrize("positions", ["restart", "continue"])
def test_learned_positions_restart_or_continue(positions):
    config = config_of(pe="fixed", pe_rotary_dims=None, packed_positions=positions)
    params = transformer.init(config, jax.random.key(2))
    rng = np.random.default_rng(2)
    tokens, cuts = rng.integers(0, 257, SEQ), [0, *sorted(rng.integers(1, SEQ, 3)), SEQ]
    segments = np.repeat(np.arange(4), np.diff(cuts))
    actual = logits(params, tokens, config, segments)
    table = params["embed"]["embedding"]["pos_embs"]
    for start, end in itertools.pairwise(cuts):
        embedding = params["embed"]["embedding"]
        if positions == "continue":  # the text alone, with the table of its places
            embedding = embedding | {"pos_embs": jnp.roll(table, -start, axis=0)}
        own = params | {"embed": params["embed"] | {"embedding": embedding}}
        expected = logits(own, tokens[start:end], config, None)
        # f32, in which the sums of attention are over more positions, most of them 0.
        np.testing.assert_allclose(actual[start:end], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_training_and_evaluation_use_the_positions_of_the_config():
    """Steps with positions that continue have the gradient of the loss of their logits."""
    changes = {"pe": "fixed", "pe_rotary_dims": None, "separate_documents": False, "z_loss": 0.0}
    rows = documents(4)
    batch = {"obs": rows[None, :, :-1], "target": rows[None, :, 1:]}
    batch["segment_ids"] = np.array([np.cumsum(row == END) for row in rows[:, :-1]])[None]
    losses = {}
    for positions in ("restart", "continue"):
        config = config_of(packed_positions=positions, per_replica_batch=4, **changes)
        network = CausalTransformer(config, devices=jax.devices()[:1])
        params = network.saved_state()["params"]
        targets = batch["target"][0]
        probabilities = [
            jax.nn.log_softmax(logits(params, row, config, segments))
            for row, segments in zip(batch["obs"][0], batch["segment_ids"][0], strict=True)
        ]
        expected = -np.take_along_axis(np.stack(probabilities), targets[..., None], -1)[..., 0]
        evaluated = network.eval({key: x[0] for key, x in batch.items()})["all_loss"]
        # f32, in which the sums of attention are over more positions, most of them 0.
        np.testing.assert_allclose(evaluated, expected, rtol=0, atol=1e-5)
        losses[positions] = float(network.train(batch)["loss"])
        assert losses[positions] == pytest.approx(expected.mean(), rel=1e-6)
    assert abs(losses["restart"] - losses["continue"]) > 1e-5


@pytest.mark.slow
def test_fit_separates_documents(tmp_path):
    rows = documents(8)
    config = config_of(total_steps=2, val_every=1, per_replica_batch=2)
    results = []
    for data, separate in ((rows, True), (_apart(rows), False)):
        network = CausalTransformer(config.replace(separate_documents=separate))
        metrics = mesh_transformer.fit(network, data, val=data)
        results.append([(row["train/loss"], row["val/loss_val"]) for row in metrics])
    assert results[0] == results[1]


def _apart(rows: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Return the same sequences with their numbers of documents."""
    ends = rows[:, :-1] == END
    numbers = np.cumsum(ends, axis=1) - ends
    return [
        {"obs": row[:-1], "target": row[1:], "segment_ids": segments}
        for row, segments in zip(rows, numbers, strict=True)
    ]


@pytest.mark.parametrize("separate", [False, True])
def test_a_plan_has_the_numbers_of_documents(separate):
    layout = step.StateLayout(config_of(separate_documents=separate), mesh_of(1, 1))
    assert ("segment_ids" in abstract_batch(layout)) == separate


def test_exact_needs_positions_that_restart():
    with pytest.raises(InputError, match="excludes packed_positions, but it is continue"):
        config_of(exact=True, packed_positions="continue")
