"""Rollouts: the same bits as training, the same answers when resumed, rewards that fail."""

import contextlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer import CausalTransformer
from mesh_transformer.data.tokenizer import character_tokenizer
from mesh_transformer.training import loop, rollouts
from mesh_transformer.training.fit import fit
from mesh_transformer.training.objectives import Tokens
from mesh_transformer.training.rollouts import Rollouts, group_advantages
from mesh_transformer.util import HostError, InputError
from tests.support.small_run import assert_same_rows, rows_of

LETTERS = "abcdefghijklmn"
PROMPTS = [{"prompt": LETTERS[:n] + x, "want": x} for n in (1, 4, 9) for x in "ab"]
REWARDS = """\
def share(prompt, answer, row):
    return answer.count(row["want"]) / 6

def fails(prompt, answer, row):
    if len(answer) < 6:
        raise ValueError("short")
    return 1.0
"""
CONFIG: dict[str, Any] = {
    "layers": 2,
    "d_model": 32,
    "n_heads": 2,
    "n_vocab": 16,
    "seq": 24,
    "block": "llama",
    "dtype": "float32",
    "objective": "grpo",
    "group_size": 4,
    "answer_tokens": 6,
    "per_replica_batch": 8,
    "gradient_accumulation_steps": 2,
    "lr": 1e-2,
    "schedule": "constant",
    "weight_decay": 0.0,
    "total_steps": 6,
    "end_tokens": [3],  # a letter, so that lengths differ
    "exact": True,
}


def write_values(folder: Path) -> dict[str, Any]:
    """Return the keys of a run whose reward is the share of a letter in the answer."""
    character_tokenizer([LETTERS]).save_pretrained(folder / "tokenizer")
    (folder / "rewards.py").write_text(REWARDS)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    paths = {"tokenizer": str(folder / "tokenizer"), "train_set": str(prompts)}
    return CONFIG | paths | {"reward": f"{folder}/rewards.py:share"}


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    return write_values(tmp_path)


def network_of(values: dict[str, Any]) -> CausalTransformer:
    """Return a network on two replicas, without weights."""
    return CausalTransformer(values, devices=jax.devices()[:2], init=False)


def fitted(values: dict[str, Any], **arguments: Any) -> list[dict[str, Any]]:
    network = network_of(values)
    network.init()
    return fit(network, PROMPTS, **arguments)


def samples_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / rollouts.NAME).read_text().splitlines()]


@pytest.mark.slow
def test_resumed_runs_have_the_same_bits(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"rollout_updates": 2, "rollout_rows": 5, "curriculum": True, "ckpt_every": 2}
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def train(folder: Path, steps: int | None = None) -> str:
        network = network_of(values | own)
        loop.train(network, folder, max_steps=steps)
        return network.checksum()

    expected = train(whole)
    rows = rows_of(whole)
    # The probabilities of the sampler and of training have equal bits; those of training change
    # with the first update on a rollout.
    assert [row["train/sampler_error"] for row in rows] == [0.0] * 6
    assert [row["train/ratio_error"] > 0 for row in rows] == [False, True] * 3
    assert len({row["train/answer_tokens"] for row in rows}) > 1

    train(parts, 1)  # between the updates on a rollout
    with monkeypatch.context() as patch:  # a signal in the second rollout, after a saved update
        sample = Rollouts._answers

        def interrupted(self: Rollouts, *arguments: Any) -> Any:
            self._network.signals.append(15)
            return sample(self, *arguments)

        patch.setattr(Rollouts, "_answers", interrupted)
        train(parts)
    assert [row["step"] for row in rows_of(parts)] == [1, 2]
    with monkeypatch.context() as patch:  # a host dies in the third one: steps 3 and 4 were run
        run = Rollouts._rewarded

        def killed(self: Rollouts, *arguments: Any) -> Any:
            if self._rollout == 2:
                raise HostError("host 1 died")
            return run(self, *arguments)

        patch.setattr(Rollouts, "_rewarded", killed)
        with pytest.raises(HostError):
            train(parts)
    assert train(parts) == expected
    assert_same_rows(rows_of(parts), rows)
    assert samples_of(parts) == samples_of(whole)
    steps = [sample["step"] for sample in samples_of(parts)]
    assert steps == sorted(steps)
    assert set(steps) == {1, 3, 5}
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "want": "b"}\n')
    with pytest.raises(InputError, match="was trained on other prompts"):
        train(parts, 8)


@pytest.mark.slow
def test_rollouts_of_other_sizes_are_not_continued(values: dict[str, Any], tmp_path: Path) -> None:
    network = network_of(values | {"exact": False, "rollout_updates": 2})
    network.init()
    head = loop.head_of(network.config)
    assert head is not None
    with contextlib.closing(Rollouts(network, PROMPTS, str(tmp_path), head)) as rollouts:
        rollouts.get_samples()
        state = rollouts.state()
    network.config = network.config.replace(rollout_updates=3)
    with contextlib.closing(Rollouts(network, PROMPTS, str(tmp_path), head)) as rollouts:
        rollouts.restore(state)
        rollouts.get_samples()
        assert [rollouts.state()[key] for key in ("rollout", "update")] == [2, 1]
        rollouts.restore(None, 7)  # after the first two rollouts, and in the third
        assert rollouts.state()["rollout"] == 3
        assert rollouts.state()["drawn"] == 3 * state["drawn"] * 3 // 2


def own_objective(tokens: Tokens) -> Any:
    loss_BT = -tokens.advantage_BT * np.e ** (tokens.logprob_BT - tokens.old_BT)
    return loss_BT, {"mean_advantage": tokens.advantage_BT}


@pytest.mark.slow
def test_reward_rises_also_with_an_objective_of_the_users(values: dict[str, Any]) -> None:
    changes = {"exact": False, "per_replica_batch": 32, "total_steps": 12, "lr": 3e-2}
    rows: list[dict[str, Any]] = []
    for objective in (None, own_objective):
        rows = fitted(values | changes, objective=objective)
        rewards = [row["train/reward"] for row in rows]
        assert np.mean(rewards[:3]) < 0.2  # 1 letter of 16, before an answer ends
        assert np.mean(rewards[-3:]) > 0.4
    assert "train/mean_advantage" in rows[0]
    assert "seconds/data" not in rows[-1]
    assert min(rows[-1]["seconds/rollouts"], rows[-1]["seconds/steps"]) > 0


def test_answers_without_reward_are_left_out(
    values: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    fails = values["reward"].replace(":share", ":fails")
    changes = {"reward": fails, "exact": False, "total_steps": 1, "scale_advantages": True}
    (row,) = fitted(values | changes)
    assert 0 < row["train/failed_rewards"] < 1
    assert (row["train/reward"], row["train/equal_groups"]) == (1.0, 1.0)
    (line,) = [x for x in capfd.readouterr().err.splitlines() if "left out" in x]
    failed = round(32 * row["train/failed_rewards"])
    assert f"rollout 1: {failed} of 32 answers have no reward" in line
    assert "rewards.py:fails: prompt " in line
    assert "ValueError: short (line 6)" in line
    changes |= {"on_reward_failure": "stop"}
    with pytest.raises(InputError, match=r"ValueError: short \(line 6\); correct it, or set"):
        fitted(values | changes)


@pytest.mark.slow
def test_reference_is_the_base_under_adapters(values: dict[str, Any], tmp_path: Path) -> None:
    base = network_of(values)
    base.init()
    base.save(tmp_path / "base")
    base.close()
    changes = {"lora_rank": 2, "beta": 0.1, "total_steps": 2, "rollout_updates": 2, "lr": 0.1}
    network = network_of(values | changes)
    network.load(tmp_path / "base")
    tokens = np.random.default_rng(0).integers(0, 16, (8, 25))
    batch = {"obs": tokens[:, :-1], "target": tokens[:, 1:]}
    before = np.asarray(base.eval(batch)["all_loss"])
    rows = fit(network, PROMPTS)
    assert rows[0]["train/kl"] == 0.0
    assert rows[1]["train/kl"] > 0.0
    np.testing.assert_array_equal(network.eval(batch, base=True)["all_loss"], before)
    assert (np.asarray(network.eval(batch)["all_loss"]) != before).any()


def test_advantages_are_differences_from_the_mean_of_the_group() -> None:
    rng = np.random.default_rng(0)
    reward_PG = rng.normal(size=(5, 6))
    reward_PG[0] = 0.1  # whose mean is not 0.1 in f64
    reward_PG[1, 2:] = np.nan
    reward_PG[2] = np.nan
    reward_PG[3, 1:] = np.nan
    for scale in (False, True):
        advantage_PG, equal_P = group_advantages(reward_PG, scale=scale)
        assert equal_P.tolist() == [True, False, True, True, False]
        assert not advantage_PG[[0, 2, 3]].any()
        for row in (1, 4):
            own = reward_PG[row][np.isfinite(reward_PG[row])]
            expected = own - own.mean()
            expected = expected / (own.std(ddof=1) + 1e-4) if scale else expected  # as TRL
            np.testing.assert_allclose(advantage_PG[row, : len(own)], expected, rtol=1e-12)


def test_prompts_with_equal_rewards_are_drawn_less_often(values: dict[str, Any]) -> None:
    network = network_of(values | {"curriculum": True})
    made = loop.head_of(network.config)
    assert made is not None
    drawn = Rollouts(network, PROMPTS, "unused", made)
    try:
        state = drawn.state() | {"equal": [1, 3, 9, 0, 0, 0]}
        counts = np.zeros(len(PROMPTS))
        for number in range(2000):
            drawn.restore(state | {"rollout": number})
            counts[drawn._choose(1)] += 1
        expected = np.array([1 / 2, 1 / 8, 1 / 8, 1, 1, 1])
        # 5 standard deviations of a share of 2000 draws.
        np.testing.assert_allclose(counts / 2000, expected / expected.sum(), atol=0.05)
    finally:
        drawn.close()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"reward": None}, "objective is grpo, but reward is null; set it"),
        ({"group_size": 1}, "group_size is 1, expected at least 2"),
        ({"beta": 0.1}, "beta needs LoRA adapters"),
        ({"batch_ramp_steps": 2}, "objective is grpo, but batch_ramp_steps is 2; unset it"),
        ({"group_size": 3}, r"1 x 2 x 16 answers .*a multiple of group_size \(3\)"),
        ({"train_set": {"a": 1.0}}, "the prompts are a mixture"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    values: dict[str, Any], changes: dict[str, Any], part: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=part):
        loop.train(network_of(values | changes), tmp_path / "model")
    assert not (tmp_path / "model").exists()
