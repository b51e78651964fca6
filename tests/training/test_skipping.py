"""Updates whose loss or gradient norm is not finite, or a spike, are skipped, on every mesh."""

from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.config import Config
from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.training import loop, spikes
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import StoppedError
from tests.conftest import SMALL
from tests.support.small_run import rows_of, run_values

BAD_TOKEN = 7
# So large that its mean overflows f32 in the first norm.  It is finite, because embedding by a
# product with one-hot rows would turn an infinite row into NaN for all other tokens.
LARGE = 3e38
MESHES = [(1, 1, {}), (2, 4, {"zero": 3}), (2, 4, {"partitioning": "jit", "zero": 1})]


def network(dp: int, mp: int, changes: dict[str, Any]) -> CausalTransformer:
    """Return a network that computes NaN for batches that contain `BAD_TOKEN`."""
    sizes = {"layers": 1, "cores_per_replica": mp, "tpu_size": dp * mp, "skip_nonfinite": True}
    result = CausalTransformer(SMALL | sizes | changes, devices=jax.devices()[: dp * mp])
    assert result.state is not None
    embedding = result.state["params"]["embed"]["embedding"]
    embedding["w"] = embedding["w"].at[BAD_TOKEN].set(LARGE)
    return result


def batch(config: Config, seed: int, bad: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(BAD_TOKEN + 1, config.n_vocab, (1, 2, config.seq + 1)).astype(np.uint32)
    if bad:
        tokens[0, 1, 3] = BAD_TOKEN
    return {"obs": tokens[..., :-1], "target": tokens[..., 1:]}


def values(network: CausalTransformer) -> list[np.ndarray]:
    assert network.state is not None
    kept = {name: network.state[name] for name in ("params", "opt_state")}
    return [np.asarray(leaf) for leaf in jax.tree.leaves(kept)]


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "mp", "changes"), MESHES)
def test_an_update_that_is_not_finite_changes_only_the_step(dp, mp, changes):
    trained = network(dp, mp, changes)
    assert np.isfinite(float(trained.train(batch(trained.config, 0))["loss"]))
    before = values(trained)
    measured = trained.train(batch(trained.config, 1, bad=True))
    assert not np.isfinite(float(measured["loss"]))
    for old, new in zip(before, values(trained), strict=True):
        np.testing.assert_array_equal(old, new)
    assert trained.state is not None
    assert trained.step == int(trained.state["step"]) == 2
    assert np.isfinite(float(trained.train(batch(trained.config, 2))["loss"]))
    assert any(not np.array_equal(*pair) for pair in zip(before, values(trained), strict=True))


@pytest.mark.slow
def test_without_the_key_such_an_update_destroys_the_model():
    trained = network(1, 1, {"skip_nonfinite": False})
    trained.train(batch(trained.config, 1, bad=True))
    assert not all(np.isfinite(leaf).all() for leaf in values(trained))


def expected_skips(norms: list[float], factor: float) -> list[bool]:
    """Return which of these gradient norms are spikes, by numpy."""
    skips = []
    for step, norm in enumerate(norms):
        window = np.sort(np.array(norms[max(0, step - spikes.WINDOW) : step], np.float32))
        median = window[len(window) // 2] if len(window) else 0.0
        skips.append(len(window) >= spikes.LEAST and norm > np.float32(factor) * median)
    return skips


@pytest.mark.slow
def test_spikes_are_those_that_numpy_finds():
    rng = np.random.default_rng(0)
    norms = (rng.lognormal(size=400) * np.linspace(1, 9, 400)).astype(np.float32)
    window, actual = spikes.fresh_norms(), []
    for step, norm in enumerate(norms):
        actual.append(bool(spikes.is_spike(window, norm, 2.5)))
        window = spikes.with_norm(window, norm, np.int32(step))
    assert actual == expected_skips(norms.tolist(), 2.5)
    assert 10 < sum(actual) < 200
    np.testing.assert_array_equal(window, spikes.with_norm(window, np.float32("nan"), 7))


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "mp", "changes"), MESHES)
def test_a_spike_changes_only_the_step_and_the_window(dp, mp, changes):
    factor = 1.02  # so low that ordinary steps exceed it
    trained = network(dp, mp, changes | {"skip_spikes": factor, "skip_nonfinite": False})
    norms, actual = [], []
    for seed in range(spikes.LEAST + 8):
        before = values(trained)
        measured = trained.train(batch(trained.config, seed))
        norms.append(float(measured["grad_norm"]))
        actual.append(bool(measured["skipped"]))
        unchanged = all(map(np.array_equal, before, values(trained)))
        assert unchanged == actual[-1]
    assert actual == expected_skips(norms, factor)
    assert any(actual)
    assert not all(actual[spikes.LEAST :])


class Diverging:
    """Wraps a network: the batches of the given steps get a token for which it computes NaN."""

    def __init__(self, wrapped: CausalTransformer, bad: set[int]):
        self.wrapped, self.bad = wrapped, bad

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def init(self) -> None:
        self.wrapped.init()
        assert self.wrapped.state is not None
        embedding = self.wrapped.state["params"]["embed"]["embedding"]
        embedding["w"] = embedding["w"].at[BAD_TOKEN].set(LARGE)

    def train(self, sample: dict[str, np.ndarray]) -> dict[str, Any]:
        good = {key: np.maximum(tokens, BAD_TOKEN + 1) for key, tokens in sample.items()}
        if self.wrapped.step + 1 in self.bad:
            good["obs"][0, 0, 0] = BAD_TOKEN
        return self.wrapped.train(good)


def train(folder, config: Config, bad: set[int], max_steps: int | None = None) -> list[Any]:
    """Train and return the metrics rows without the values that depend on the clock."""
    wrapped = Diverging(CausalTransformer(config, init=False), bad)
    loop.train(wrapped, folder / "model", max_steps=max_steps)  # type: ignore[arg-type]
    return rows_of(folder / "model")


@pytest.fixture
def config(tmp_path) -> Config:
    return Config(**run_values(tmp_path, total_steps=12, skip_nonfinite=True, max_skipped=3))


@pytest.mark.slow
def test_skipped_updates_are_counted_also_by_a_resumed_run(tmp_path, config, capsys):
    bad = {2, 5, 6, 9}
    expected = train(tmp_path / "whole", config, bad)
    assert [row["train/skipped"] for row in expected] == [0, 1, 1, 1, 2, 3, 3, 3, 4, 4, 4, 4]
    assert [row["step"] for row in expected if "train/loss" not in row] == sorted(bad)
    assert "step 5: loss is nan, gradient norm nan; its batch is " in capsys.readouterr().err
    for steps in (5, 12):
        actual = train(tmp_path / "parts", config, bad, steps)
    assert actual == expected


@pytest.mark.slow
def test_too_many_skipped_updates_in_a_row_stop_the_run_and_name_the_records(tmp_path, config):
    bad = {4, 6, 8, 9, 10}
    loader = TFRecordNewInputs(config.train_set, (2, 4), config.seq)
    places = [loader.state() for _ in range(10) if loader.get_samples()]
    loader.close()
    first, end = (f"epoch {p['epoch']}, file {p['file']}, record {p['record']}" for p in places[8:])
    with pytest.raises(StoppedError) as error:
        train(tmp_path, config.replace(ckpt_every=5), bad)
    line = str(error.value)
    assert line.startswith("step 10: loss is nan, gradient norm nan; ")
    assert f"its batch is {config.train_set} from {first} to before {end}; " in line
    assert line.endswith("3 updates in a row were skipped; lower lr, or check the data")
    assert rows_of(tmp_path / "model")[-1]["step"] == 9
    assert [path.name for path in (tmp_path / "model").glob("step_*")] == ["step_5"]


@pytest.mark.slow
def test_a_resumed_run_skips_the_same_spikes(tmp_path, config):
    config = config.replace(skip_spikes=1.02, total_steps=24, max_skipped=24)
    expected = train(tmp_path / "whole", config, set())
    assert expected[-1]["train/skipped"] > 0
    for steps in (19, 24):
        actual = train(tmp_path / "parts", config, set(), steps)
    assert actual == expected


@pytest.mark.slow
def test_spikes_can_be_skipped_from_any_step_on(tmp_path, config):
    train(tmp_path, config, set(), 6)
    rows = train(tmp_path, config.replace(skip_spikes=1.02, max_skipped=24), set(), 24)
    norms = [row["train/grad_norm"] for row in rows[6:]]
    assert rows[-1]["train/skipped"] == sum(expected_skips(norms, 1.02)) > 0
    again = train(tmp_path, config, set(), 26)  # without the key again
    assert [row["step"] for row in again] == list(range(1, 27))
