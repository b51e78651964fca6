"""Learning rate schedules against plain formulas in float64, in updates and in tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.checkpoint.state_tree import check_same_run
from mesh_transformer.config import Config
from mesh_transformer.training import loop
from mesh_transformer.training.schedule import gpt3_schedule, learning_rate, schedule_changes
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import DATA, SMALL
from tests.support.small_run import rows_of, run_values

LR, END_LR = 3e-3, 2e-4
SCHEDULES = ("cosine", "linear", "constant", "wsd", "inverse_sqrt")
SEQ, ROWS, ACCUMULATION = 16, 6, 4


def config_with(**changes) -> Config:
    return Config.from_dict(
        SMALL | {"lr": LR, "end_lr": END_LR, "anneal_steps": None, "warmup_steps": 0} | changes
    )


def expected_rate(schedule: str, n: float, warmup: float, anneal: float, whole: float) -> float:
    """Return the learning rate after `n` of `whole` updates or tokens."""
    if warmup and n < warmup and (schedule != "wsd" or n < whole - anneal):
        return LR * n / warmup
    if schedule == "constant":
        return LR
    if schedule == "inverse_sqrt":
        return LR * (warmup / n) ** 0.5
    begin = whole - anneal if schedule == "wsd" else warmup
    share = min(max((n - begin) / anneal, 0), 1)
    if schedule == "cosine":
        return END_LR + (LR - END_LR) * (1 + np.cos(np.pi * share)) / 2
    return LR + (END_LR - LR) * share


def test_the_schedule_matches_the_original():
    golden = np.load(DATA / "original" / "sampling.npz")
    warmup, anneal, lr, end_lr = golden["sched_args"]
    schedule = gpt3_schedule(int(warmup), int(anneal), lr, end_lr)
    actual = np.array([float(schedule(jnp.asarray(s))) for s in golden["sched_steps"]])
    # Both schedules are computed in f32: a few units in the last place of lr.
    np.testing.assert_allclose(actual, golden["sched_values"], rtol=1e-6, atol=1e-6 * lr)


def test_without_warmup_the_first_update_has_the_full_learning_rate():
    schedule = gpt3_schedule(0, 10, 1e-3, 1e-4)
    actual = [float(schedule(jnp.asarray(s))) for s in (0, 5, 10, 99)]
    np.testing.assert_allclose(actual, [1e-3, 5.5e-4, 1e-4, 1e-4], rtol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("warmup", "anneal"), [(7, 20), (1, 42), (0, 13)])
def test_every_update_has_the_rate_of_the_formula(schedule, warmup, anneal):
    if schedule == "inverse_sqrt":
        warmup = warmup or 3  # it needs a warm-up
    config = config_with(
        schedule=schedule, warmup_steps=warmup, anneal_steps=anneal, total_steps=43
    )
    steps = np.arange(60)
    actual = jax.vmap(lambda step: learning_rate(config, step))(jnp.asarray(steps))
    expected = [expected_rate(schedule, n, warmup, anneal, 43) for n in steps]
    # f32 rounds to 6e-8, a few times per rate; differences from lr are rounded relative to lr.
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=3e-7 * LR)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tokens_count_across_changes_of_the_batch_size(schedule):
    """After 9 updates, the run resumes with twice the rows and another accumulation."""
    batches = [(ROWS, ACCUMULATION)] * 9 + [(2 * ROWS, 3)] * 21
    sizes = np.array([rows * accumulation * SEQ for rows, accumulation in batches])
    consumed = np.concatenate(([0], np.cumsum(sizes)))
    warmup, anneal = 1000, int(consumed[-1]) - 9000
    for update, (rows, accumulation) in enumerate(batches):
        config = config_with(
            schedule=schedule,
            warmup_tokens=warmup,
            anneal_tokens=anneal,
            total_steps=30,
            gradient_accumulation_steps=accumulation,
        )
        sequences = jnp.asarray(consumed[update] // SEQ)
        actual = learning_rate(config, jnp.asarray(update), sequences, rows)
        # The end is where the run would end at the current batch size.
        whole = consumed[update] + (30 - update) * sizes[update]
        expected = expected_rate(schedule, consumed[update], warmup, anneal, whole)
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=3e-7 * LR)  # as above


def test_token_counts_may_exceed_int32():
    config = config_with(
        schedule="wsd",
        warmup_tokens=10**11,
        anneal_tokens=10**12,
        total_steps=10**6,
        seq=2048,
        gradient_accumulation_steps=512,
    )
    sequences = jnp.asarray(24 * 10**6)
    actual = learning_rate(config, jnp.asarray(1000), sequences, 64)
    expected = expected_rate("wsd", 24e6 * 2048, 1e11, 1e12, 24e6 * 2048 + 999e3 * 512 * 64 * 2048)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)  # as above


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"warmup_tokens": -1}, "warmup_tokens is -1, expected at least 0"),
        ({"anneal_tokens": 0}, "anneal_tokens is 0, expected at least 1"),
        (
            {"anneal_tokens": 9, "warmup_steps": 3},
            "warmup_steps 3 and anneal_steps 1 are in updates, but warmup_tokens or anneal_tokens",
        ),
        (
            {"warmup_tokens": 9, "anneal_steps": 3, "total_steps": 8},
            "anneal_steps 3 are in updates, but",
        ),
        ({"warmup_tokens": 9}, "cosine with warmup_tokens needs anneal_tokens, too"),
        ({"schedule": "inverse_sqrt"}, "inverse_sqrt needs a warm-up; set warmup_steps"),
        ({"schedule": "wsd"}, "schedule wsd needs total_steps"),
        (
            {"schedule": "wsd", "warmup_steps": 5, "anneal_steps": 6, "total_steps": 10},
            "warmup_steps 5 and anneal_steps 6 exceed total_steps 10",
        ),
    ],
    ids=str,
)
def test_contradictory_schedules_are_refused(changes, line):
    with pytest.raises(InputError, match=line) as error:
        config_with(**changes)
    assert "\n" not in str(error.value)


def test_wsd_decays_over_the_last_tenth_by_default():
    config = config_with(schedule="wsd", total_steps=250)
    assert (config.anneal_steps, config.replace(total_steps=5).anneal_steps) == (25, 1)
    assert config_with(warmup_tokens=9, schedule="constant").schedule_in_tokens


def test_changes_of_the_schedule_are_described():
    config = config_with(total_steps=50)
    saved = config.as_dict()
    assert schedule_changes(config, {}) == ""
    assert schedule_changes(config, saved) == ""
    other = config_with(schedule="wsd", warmup_steps=2, total_steps=60)
    assert schedule_changes(other, saved) == (
        "schedule is wsd, was cosine, warmup_steps is 2, was 0, anneal_steps is 6, was 50, "
        "total_steps is 60, was 50"
    )
    tokens = config_with(total_steps=50, anneal_tokens=7)
    assert schedule_changes(tokens, saved) == "anneal_tokens is 7, was None"
    # A config that an earlier version saved lacks newer keys.
    del saved["schedule"], saved["anneal_tokens"]
    assert schedule_changes(config, saved) == ""


@pytest.mark.slow
def test_a_run_counts_its_tokens_across_a_change_of_mesh_and_batch_size(tmp_path):
    """The first 3 updates have 2 x 4 sequences on 2 replicas, the others 1 x 12 on 4."""
    tokens = {"warmup_steps": 0, "anneal_steps": None, "warmup_tokens": 900, "anneal_tokens": 500}
    values = run_values(tmp_path, schedule="linear", total_steps=9, val_set=None, **tokens)
    first = {"cores_per_replica": 4, "per_replica_batch": 2, "gradient_accumulation_steps": 2}
    second = {"cores_per_replica": 2, "per_replica_batch": 3, "gradient_accumulation_steps": 1}
    model = str(tmp_path / "model")
    for changes, stop in ((first, 3), (second, 9)):
        loop.train(CausalTransformer(values | changes, init=False), model, max_steps=stop)
    consumed = np.cumsum([0, *[8 * 16] * 3, *[12 * 16] * 6])[:-1]
    actual = [row["train/learning_rate"] for row in rows_of(model)]
    lr, end_lr = values["lr"], values["end_lr"]
    share = np.clip((consumed - 900) / 500, 0, 1)
    expected = np.minimum(consumed / 900, 1) * lr - (lr - end_lr) * share
    np.testing.assert_allclose(actual, expected, rtol=1e-6)  # f32


def test_a_run_in_updates_cannot_go_on_in_tokens():
    in_tokens = config_with(schedule="constant", warmup_tokens=9)
    check_same_run(in_tokens, in_tokens.as_dict(), "step_3")
    check_same_run(config_with(), in_tokens.as_dict(), "step_3")
    with pytest.raises(InputError, match="step_3: its run did not count tokens, but the config"):
        check_same_run(in_tokens, config_with().as_dict(), "step_3")
