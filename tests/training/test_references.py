"""The reference of objectives: equal bits from each source, found again, and checked."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.data import references
from mesh_transformer.data.tfrecords import write_set
from mesh_transformer.pod import restarts
from mesh_transformer.training import fit, loop
from mesh_transformer.training.references import validate, with_reference
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.training.test_objectives import TINY, config_of, random_groups, write_preferences

BATCH = {"per_replica_batch": 1, "total_steps": 3, "ckpt_every": 2, "val_batches": 2}
BATCH |= {"val_every": 3, "keep_n": 9, "lr": 1e-2, "warmup_steps": 0}


@pytest.fixture
def records(tmp_path: Path) -> str:
    """Write random pairs as a record set, and return its index."""
    return write_preferences(tmp_path, "dpo", 10)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """Save a model with random weights, and return its folder."""
    folder = str(tmp_path / "base")
    network = CausalTransformer(Config.from_dict(TINY | {"seed": 3}))
    network.save(folder)
    network.close()
    return folder


def config_for(records: str, **changes: Any) -> Config:
    sets = {"train_set": records, "val_set": {"held_out": records}}
    return config_of("dpo", **BATCH | sets | {"dtype": "float32"} | changes)


def plain_config(records: str, **changes: Any) -> Config:
    return config_for(records).replace(objective=None, beta=None, **changes)


def train(config: Config, folder: Path, base: str | None, **options: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    network = CausalTransformer(config, init=False)
    loop.train(network, folder, tune_model_path=base, on_row=rows.append, **options)
    return [
        {key: x for key, x in row.items() if "second" not in key and "_per_" not in key}
        for row in rows
    ]


def test_each_source_of_the_reference_gives_equal_bits(
    records: str, base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = config_for(records, lora_rank=2)
    path = references.file_of(records)
    adapters = train(lora, tmp_path / "adapters", base)
    written = Path(path).read_bytes()
    assert "reference of" in capsys.readouterr().err
    stored = train(lora, tmp_path / "stored", base)
    train(lora.replace(seed=1), tmp_path / "seed", base, max_steps=1)  # other adapters, also new
    assert "reference of" not in capsys.readouterr().err
    os.remove(path)
    checkpoint = train(lora.replace(reference=base), tmp_path / "checkpoint", base)
    assert Path(path).read_bytes() == written
    assert adapters == stored == checkpoint
    # Training begins at the reference.  Its log-probabilities are of another program.
    first = adapters[0]
    np.testing.assert_allclose(first["train/loss"], np.log(2), rtol=1e-5)
    assert abs(first["train/kl"]) < 1e-5 < abs(adapters[-1]["train/kl"])
    assert "val/rewards/accuracy_held_out" in adapters[-1]
    assert adapters[-1]["val/loss_held_out"] < np.log(2)


def test_evaluation_prints_what_training_measures(
    records: str, base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(records)
    with pytest.raises(InputError, match=r"texts\.reference\.json is missing; training with"):
        validate(CausalTransformer(config, init=False), base)
    last = train(config, tmp_path / "run", base)[-1]
    network = CausalTransformer(config, init=False)
    (metrics,) = validate(network, str(tmp_path / "run")).values()
    assert {
        f"val/{name}_held_out": value for name, value in metrics.items()
    }.items() <= last.items()
    expected = f"held_out: loss {metrics['loss']:.4f}, kl "
    assert expected in capsys.readouterr().out
    # The same on a pod.
    restarts.validate(lambda: CausalTransformer(config, init=False), str(tmp_path / "run"))
    assert expected in capsys.readouterr().out
    with pytest.raises(InputError, match="objective is dpo, but it scores every token"):
        restarts.evaluate_all(lambda: network, str(tmp_path / "run"))
    with pytest.raises(InputError, match="needs the key val_set or eval_harness_tasks"):
        validate(CausalTransformer(config.replace(val_set={}), init=False), base)


def test_sums_are_those_of_scores(records: str, base: str, tmp_path: Path) -> None:
    train(config_for(records), tmp_path / "run", base, max_steps=1)
    network = CausalTransformer(Config.from_dict(TINY), init=False)
    network.load(base, only_params=True)
    batch = random_groups(config_of("dpo"), 1, 10)
    stored = references.read(records)
    assert stored is not None
    assert stored.counts == [10]
    rows = {key: x.reshape(10, -1) for key, x in batch.items()}
    for number, (obs, target, mask, segments) in enumerate(
        zip(*(rows[key] for key in ("obs", "target", "loss_mask", "segment_ids")), strict=True)
    ):
        for text in range(1, stored.sums.shape[1] + 1):
            at = np.flatnonzero(segments == text)
            expected = 0.0
            if len(at):  # alone, so that nothing before it can matter
                tokens = np.append(obs[at], target[at][-1:])
                sample = {"obs": tokens[None, :-1], "target": target[at][None]}
                expected = -(np.asarray(network.eval(sample)["all_loss"])[0] * mask[at]).sum()
            # f32 sums of a text in a record, and of the text alone.
            np.testing.assert_allclose(
                stored.sums[number, text - 1], expected, rtol=1e-5, atol=1e-5
            )


@pytest.mark.slow
def test_resumed_runs_keep_their_reference(records: str, base: str, tmp_path: Path) -> None:
    config = config_for(records)
    whole = train(config, tmp_path / "whole", base)
    train(config, tmp_path / "parts", base, max_steps=2)
    assert train(config, tmp_path / "parts", base) == whole[2:]
    train(config_for(records, seed=1), tmp_path / "other", None, max_steps=1)  # another reference
    with pytest.raises(InputError, match=r"texts\.reference\.json is missing, or is not of these"):
        train(config.replace(total_steps=4), tmp_path / "parts", base)


def test_changed_records_and_damage_are_noticed(records: str, base: str, tmp_path: Path) -> None:
    config, path = config_for(records), Path(references.file_of(records))
    train(config, tmp_path / "one", base, max_steps=1)
    before = references.read(records)
    batch = {"input_ids": np.ones(32, int), "labels": np.ones(32, int)}
    batch |= {"input_mask": np.ones(32, int), "segment_ids": np.repeat([1, 2], 16)}
    write_set(tmp_path, "texts", [batch] * 10)  # under the same names
    train(config, tmp_path / "two", base, max_steps=1)
    after = references.read(records)
    assert before is not None
    assert after is not None
    assert (before.weights, before.counts) == (after.weights, after.counts)
    assert before.records != after.records
    path.write_text(path.read_text()[:50])
    with pytest.raises(InputError, match="not a file of references; delete it"):
        train(config, tmp_path / "three", base, max_steps=1)


def test_records_must_be_those_of_the_objective(records: str, base: str, tmp_path: Path) -> None:
    manifest = Path(records.replace(".index", ".manifest.json"))
    manifest.write_text(json.dumps({"tokenizer": {}, "preferences": "labels"}))
    with pytest.raises(InputError, match=r"has preferences \(labels\), but objective is dpo"):
        train(config_for(records), tmp_path / "run", base)
    manifest.write_text(json.dumps({"tokenizer": {}}))
    with pytest.raises(InputError, match="has no preferences, but objective is dpo"):
        train(config_for(records), tmp_path / "run", base)
    manifest.write_text(json.dumps({"tokenizer": {}, "preferences": "pairs"}))
    plain = plain_config(records)
    with pytest.raises(InputError, match=r"has preferences \(pairs\), but objective is None"):
        train(plain, tmp_path / "run", base)


def hinge(texts: Any) -> Any:
    ratio_BNK = texts.sum_BNK - texts.reference_BNK
    margin_BN = ratio_BNK[..., 0] - ratio_BNK[..., 1]
    return jax.nn.relu(1 - margin_BN), {"margin": margin_BN, "ratio": ratio_BNK}


@pytest.mark.slow
def test_fit_minimises_a_function(records: str) -> None:
    config = plain_config(records, val_set={})
    network = CausalTransformer(config)
    on_records = fit.fit(network, records, objective=hinge, val=records)
    np.testing.assert_allclose(on_records[0]["train/loss"], 1, atol=1e-5)
    assert on_records[-1]["train/loss"] < 0.9
    assert on_records[-1]["val/margin_val"] > 0
    assert on_records[-1]["train/margin"] == pytest.approx(
        on_records[-1]["train/ratio/chosen"] - on_records[-1]["train/ratio/rejected"], rel=1e-4
    )
    # In memory, in another order.
    network = CausalTransformer(config)
    batch = random_groups(config_of("dpo"), 1, 10)
    del batch["reference"]
    rows = [
        dict(zip(batch, x, strict=True))
        for x in zip(*(y.reshape(10, -1) for y in batch.values()), strict=True)
    ]
    with pytest.raises(InputError, match="the batch has no 'reference'"):
        fit.fit(network, rows, objective=hinge)
    in_memory = fit.fit(network, with_reference(network, rows), objective=hinge)
    np.testing.assert_allclose(in_memory[0]["train/loss"], 1, atol=1e-5)
    # Afterwards, the network has the config's objective again: cross entropy.
    assert network.objective is None
    assert fit.fit(CausalTransformer(config), rows, steps=1)[0]["train/loss"] > 4


def test_fit_refuses_another_checkpoint_as_reference(records: str, base: str) -> None:
    network = CausalTransformer(config_for(records, reference=base, val_set={}))
    with pytest.raises(InputError, match="fit compares with the network's own weights"):
        fit.fit(network, records)
