"""Sampling, against the original's results, a NumPy reference and its specification."""

import queue
import re
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.generation import sampling
from mesh_transformer.generation.sampling import (
    RANGES,
    REMOVED,
    SamplerSettings,
    SamplingOptions,
    adjusted,
    choose,
    nucleus_filter,
    softmax_sample,
    top_tokens,
    typical_filter,
)
from mesh_transformer.util import InputError
from tests.support.waiting import SECONDS

GOLDEN = np.load(Path(__file__).parents[1] / "data/original/sampling.npz")
SETTINGS = range(len(GOLDEN["top_p"]))
nucleus_sample = jax.jit(sampling.nucleus_sample)


def random_rows(seed: int, rows: int, vocabulary: int, ties: bool = False) -> jax.Array:
    logits = np.random.default_rng(seed).normal(scale=3, size=(rows, vocabulary))
    return jnp.asarray(np.round(logits) if ties else logits, jnp.float32)


def keys_of(seeds: list[int]) -> jax.Array:
    return jax.vmap(jax.random.key)(jnp.asarray(seeds))


def reference_kept(logits: np.ndarray, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """Return the mask of the tokens that one row keeps, computed token by token in float64."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    exponentials = np.exp(logits.astype(np.float64) - logits.max())
    probabilities = exponentials / exponentials.sum()
    kept, mass = np.zeros(len(logits), bool), 0.0
    for rank, token in enumerate(order):
        past_nucleus = mass > top_p and top_p < 1
        past_k = top_k > 0 and rank >= top_k
        unlikely = probabilities[token] < min_p * probabilities[order[0]]
        if rank and (past_nucleus or past_k or unlikely):
            break
        kept[token] = True
        mass += probabilities[token]
    return kept


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_filter_matches_the_original(setting):
    top_k = int(GOLDEN["top_k"][setting])
    actual = np.array(
        nucleus_filter(jnp.asarray(GOLDEN["logits"]), GOLDEN["top_p"][setting], top_k)
    )
    expected = GOLDEN["filtered"][setting].copy()
    # With top_k, the original subtracts 1e10 times the token ID, so it never removes token 0.
    expected[expected < -1e9] = REMOVED
    columns = slice(1, None) if top_k > 0 else slice(None)
    np.testing.assert_array_equal(actual[:, columns], expected[:, columns])


def test_top_k_1_removes_token_0_which_the_original_kept():
    setting = int(np.flatnonzero(GOLDEN["top_k"] == 1)[0])
    filtered = nucleus_filter(jnp.asarray(GOLDEN["logits"]), GOLDEN["top_p"][setting], 1)
    assert np.all(np.sum(GOLDEN["filtered"][setting] > -1e9, axis=-1) == 2)
    np.testing.assert_array_equal(np.sum(np.asarray(filtered) > REMOVED, axis=-1), 1)


@pytest.mark.parametrize("setting", SETTINGS)
def test_samples_match_the_original(setting):
    """Draw with the original's keys and generator, which was JAX's default before version 0.5."""
    rows = len(GOLDEN["logits"])
    with jax.threefry_partitionable(False):
        for seed in range(4):
            tokens = nucleus_sample(
                keys_of([seed] * rows),
                jnp.asarray(GOLDEN["logits"]),
                top_p=GOLDEN["top_p"][setting],
                top_k=GOLDEN["top_k"][setting],
                temp=GOLDEN["temp"][setting],
            )
            expected = GOLDEN["sampled_key0to3"][setting, :, seed]
            np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("ties", [False, True])
def test_the_filter_matches_a_numpy_reference(ties):
    random = np.random.default_rng(1)
    logits = random_rows(2, 200, 37, ties)
    top_p = random.uniform(0, 1.1, 200)
    top_k = random.integers(-1, 45, 200)
    min_p = random.choice([0.0, 0.05, 0.3, 1.0], 200)
    actual = np.asarray(nucleus_filter(logits, top_p, top_k, min_p))
    rows = zip(np.asarray(logits), top_p, top_k, min_p, strict=True)
    expected = [reference_kept(*row) for row in rows]
    np.testing.assert_array_equal(actual, np.where(expected, logits, np.float32(REMOVED)))


@pytest.mark.parametrize("top_p", [0.0, 1e-9, -1.0])
def test_one_token_is_always_kept(top_p):
    logits = random_rows(3, 20, 11, ties=True)
    kept = np.asarray(nucleus_filter(logits, top_p)) > REMOVED
    np.testing.assert_array_equal(kept.sum(-1), 1)
    np.testing.assert_array_equal(kept.argmax(-1), np.argmax(logits, -1))


def test_top_p_1_keeps_all_of_a_large_vocabulary():
    logits = random_rows(4, 2, 50400)
    np.testing.assert_array_equal(nucleus_filter(logits, 1.0), logits)


def test_temperature_0_and_top_k_1_are_argmax():
    logits = random_rows(5, 30, 13, ties=True)
    keys = keys_of(list(range(30)))
    expected = np.argmax(logits, -1)
    for settings in ({"temp": 0.0}, {"temp": 1e-30}, {"top_k": 1, "temp": 5.0}, {"top_p": 0.0}):
        np.testing.assert_array_equal(nucleus_sample(keys, logits, **settings), expected)


def test_small_temperatures_and_huge_logits_stay_finite():
    logits = random_rows(6, 30, 13) * 1e35
    tokens = softmax_sample(keys_of(list(range(30))), logits, temp=1e-5)
    np.testing.assert_array_equal(tokens, np.argmax(logits, -1))


def test_bfloat16_logits_give_the_same_samples_as_their_float32_values():
    logits = random_rows(7, 8, 64).astype(jnp.bfloat16)
    keys = keys_of(list(range(8)))
    tokens = [nucleus_sample(keys, x) for x in (logits, logits.astype(jnp.float32))]
    np.testing.assert_array_equal(tokens[0], tokens[1])


@pytest.mark.slow
def test_rows_are_sampled_independently():
    """Compare each row alone, all rows together, and the rows in a different order."""
    random = np.random.default_rng(8)
    rows = 24
    logits = random_rows(9, rows, 101)
    keys = keys_of(list(range(100, 100 + rows)))
    settings = {
        "top_p": jnp.asarray(random.uniform(0, 1, rows), jnp.float32),
        "top_k": jnp.asarray(random.integers(0, 20, rows)),
        "temp": jnp.asarray(random.choice([0.0, 0.5, 1.0, 2.0], rows), jnp.float32),
    }

    def tokens(selected: np.ndarray) -> np.ndarray:
        selected_settings = {name: value[selected] for name, value in settings.items()}
        return np.asarray(nucleus_sample(keys[selected], logits[selected], **selected_settings))

    together = tokens(np.arange(rows))
    alone = np.concatenate([tokens(np.array([row])) for row in range(rows)])
    order = random.permutation(rows)
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(together[order], tokens(order))


def test_a_single_key_is_folded_with_the_row_number():
    logits = random_rows(10, 6, 40)
    key = jax.random.key(11)
    keys = jnp.stack([jax.random.fold_in(key, row) for row in range(6)])
    actual, expected = nucleus_sample(key, logits), nucleus_sample(keys, logits)
    np.testing.assert_array_equal(actual, expected)


def settings_of(rows: list[dict[str, Any]]) -> SamplerSettings:
    """Return the settings of rows, by default top-p 1 and seeds 0, 1, 2, ..."""
    texts = [SamplingOptions(**{"top_p": 1.0, "seed": seed} | row) for seed, row in enumerate(rows)]
    return SamplingOptions.stacked(texts)


@jax.jit
def draw_tokens(logits, settings, made, seen, count):
    return choose(logits, settings, made, lambda: (seen, count))


@pytest.mark.slow
def test_choose_treats_rows_independently():
    """Compare with each row alone, where only the branches that this row needs are executed."""
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.9, "top_k": 5, "temp": 0.0},
        {},
        {"top_p": 0.7, "top_k": 9, "temp": 1.5},
        {"temp": 0.0, "repetition_penalty": 1.4},
        {"top_p": 0.6, "repetition_penalty": 1.3},
        {"top_k": 2, "temp": 0.3},
        {"min_p": 0.2, "temp": 2.0},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"top_p": 0.9, "min_p": 0.05, "logit_bias": {3: -100, 66: 2.5}},
        {"temp": 0.0, "logit_bias": {5: 100}},
        {"typical_p": 0.6, "top_p": 0.8},
    ]
    settings = settings_of(kinds * 4)
    rows = len(settings.seed_B)
    made = np.arange(rows, dtype=np.int32) % 5
    logits = random_rows(15, rows, 67, ties=True)
    rng = np.random.default_rng(16)
    seen = jnp.asarray(rng.random((rows, 67)) < 0.3)
    count = jnp.asarray(rng.integers(0, 4, (rows, 67)) * seen)
    step = draw_tokens
    together = np.asarray(step(logits, settings, made, seen, count))
    for row in range(rows):
        here = slice(row, row + 1)
        row_settings = SamplerSettings(*(setting[here] for setting in settings))
        alone = step(logits[here], row_settings, made[here], seen[here], count[here])
        assert alone[0] == together[row]
    changed = adjusted(logits, settings, seen, count)
    typical = typical_filter(changed, np.where(settings.temp_B == 0, 1, settings.typical_p_B))
    kept = nucleus_filter(typical, settings.top_p_B, settings.top_k_B, settings.min_p_B) > REMOVED
    assert np.all(np.asarray(kept)[np.arange(rows), together])
    greedy = settings.temp_B == 0
    np.testing.assert_array_equal(together[greedy], np.argmax(changed, axis=-1)[greedy])
    assert np.all(together[9::11] == 5)  # forced
    assert np.all(together[8::11] != 3)  # banned


def test_penalties_and_biases_match_a_token_by_token_reference():
    rng = np.random.default_rng(17)
    logits = rng.normal(size=(3, 30)).astype(np.float32)
    answers = [[1, 1, 1, 4], [], [29, 0, 29]]
    rows: list[dict[str, Any]] = [
        {"presence_penalty": 0.5, "frequency_penalty": 2.0, "logit_bias": {4: 1.5, 7: -100.0}},
        {"presence_penalty": 2.0, "logit_bias": {0: 3.0}},
        {"frequency_penalty": -1.0, "repetition_penalty": 1.7},
    ]
    seen, count = np.zeros((3, 30), bool), np.zeros((3, 30), np.int32)
    expected = logits.astype(np.float64)
    for row, (answer, options) in enumerate(zip(answers, rows, strict=True)):
        seen[row, 11] = True  # a token of the prompt, which only the repetition penalty counts
        for token in answer:
            seen[row, token] = True
            count[row, token] += 1
        penalty = options.get("repetition_penalty", 1.0)
        for token in {11, *answer}:
            expected[row, token] *= 1 / penalty if expected[row, token] > 0 else penalty
        for token in set(answer):
            expected[row, token] -= options.get("presence_penalty", 0.0)
            expected[row, token] -= options.get("frequency_penalty", 0.0) * answer.count(token)
        for token, bias in options.get("logit_bias", {}).items():
            expected[row, token] += bias
    actual = adjusted(jnp.asarray(logits), settings_of(rows), jnp.asarray(seen), jnp.asarray(count))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)  # f32 rounds each step to 6e-8


def test_min_p_matches_hugging_face():
    torch = pytest.importorskip("torch")
    from transformers import MinPLogitsWarper

    logits = random_rows(18, 50, 67)
    for min_p in (0.02, 0.1, 0.5):
        expected = MinPLogitsWarper(min_p)(None, torch.tensor(np.array(logits)))
        actual = nucleus_filter(logits, 1.0, min_p=min_p) > REMOVED
        np.testing.assert_array_equal(actual, torch.isfinite(expected).numpy())


def test_typical_p_matches_hugging_face():
    torch = pytest.importorskip("torch")
    from transformers import TypicalLogitsWarper

    logits = random_rows(19, 50, 67)
    for typical_p in (0.01, 0.2, 0.9, 0.999):
        expected = TypicalLogitsWarper(typical_p)(None, torch.tensor(np.array(logits)))
        actual = typical_filter(logits, typical_p) > REMOVED
        np.testing.assert_array_equal(actual, torch.isfinite(expected).numpy())
    kept = np.sum(typical_filter(logits, [0.0, 1.0] * 25) > REMOVED, axis=-1)
    np.testing.assert_array_equal(kept, [1, 67] * 25)


@pytest.mark.quick(1)
@pytest.mark.parametrize("vocabulary", [1, 2, 9, 67, 50400])
def test_choose_draws_tokens_within_the_vocabulary(vocabulary):
    """The last token, whose block may be padded, is by far the most likely."""
    settings = settings_of([{}, {"top_p": 0.9, "temp": 2.0}, {"top_k": 3, "temp": 1e-5}])
    logits = np.full((3, vocabulary), -1e30, np.float32)
    logits[:, -1] = [50, 0, 1e35]
    made, count = np.zeros(3, np.int32), np.zeros((3, vocabulary), np.int32)
    seen = count > 0
    actual = draw_tokens(jnp.asarray(logits), settings, made, seen, count)
    assert actual.tolist() == [vocabulary - 1] * 3
    with_nan = draw_tokens(jnp.full_like(logits, jnp.nan), settings, made, seen, count)
    assert np.all(np.asarray(with_nan) < vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 5, 40])
def test_top_tokens_match_jax_top_k(count):
    for shape in [(3, 2, 40), (6, 1000), (2, 50400)]:
        logits = np.random.default_rng(count).normal(size=shape)
        logits[0] = 1.0
        logits = jnp.asarray(np.round(logits, 1), jnp.float32)  # rounding makes many of them equal
        expected_results = jax.lax.top_k(logits, count)
        for actual, expected in zip(top_tokens(logits, count), expected_results, strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_positive_and_negative_zeros_are_equal():
    logits = jnp.asarray([[-0.0, 1.0, 0.0, -1.0, -0.0]])
    kept = np.asarray(nucleus_filter(logits, 1.0, top_k=3))[0] > REMOVED
    assert kept.tolist() == [True, True, True, False, False]


def test_different_settings_share_one_compilation():
    traces = []

    @jax.jit
    def sample(keys, logits, top_p, top_k, temp):
        traces.append(1)
        return nucleus_sample(keys, logits, top_p=top_p, top_k=top_k, temp=temp)

    logits, keys = random_rows(12, 5, 60), keys_of([1, 2, 3, 4, 5])
    for top_p, top_k, temp in [(0.9, 0, 1.0), (1.0, 3, 0.5), (0.0, -1, 0.0)]:
        compiled = sample(keys, logits, jnp.float32(top_p), jnp.int32(top_k), jnp.float32(temp))
        plain = nucleus_sample(keys, logits, top_p=top_p, top_k=top_k, temp=temp)
        np.testing.assert_array_equal(compiled, plain)
    assert len(traces) == 1


@pytest.mark.slow
@pytest.mark.parametrize("by", ["nucleus_sample", "choose"])
def test_token_frequencies_match_the_softmax(by):
    """With 40,000 draws, a frequency's standard error is at most 0.0025; allow five of them."""
    draws, temp = 40_000, 0.7
    logits = random_rows(13, 1, 9)
    many = jnp.tile(logits, (draws, 1))
    keys = jax.random.split(jax.random.key(14), draws)
    step = draw_tokens
    cases = [(0.95, 0, 0, 1), (1.0, 0, 0, 1), (1.0, 4, 0, 1), (1.0, 0, 0.1, 1)]
    if by == "choose":
        cases.append((0.9, 0, 0, 0.4))
    for top_p, top_k, min_p, typical_p in cases:
        options = {"top_p": top_p, "top_k": top_k, "min_p": min_p, "temp": temp}
        if by == "choose":
            # There are 200 seeds, with 200 tokens each.
            seeds = np.arange(draws) // 200
            options |= {"seed": seeds, "typical_p": typical_p}
            settings = sampling.sampler_settings(options, draws)
            made = np.arange(draws, dtype=np.int32) % 200
            count = jnp.zeros(many.shape, jnp.int32)
            tokens = step(many, settings, made, count > 0, count)
        else:
            tokens = nucleus_sample(keys, many, **options)
        frequencies = np.bincount(np.asarray(tokens), minlength=9) / draws
        typical = typical_filter(logits, typical_p)
        filtered = np.asarray(nucleus_filter(typical, top_p, top_k, min_p))[0]
        expected = np.asarray(jax.nn.softmax(filtered / temp))
        np.testing.assert_allclose(frequencies, expected, atol=0.0125)
        assert np.all(frequencies[filtered <= REMOVED] == 0)


@pytest.mark.slow
def test_nucleus_sample_equals_sampling_from_the_filtered_logits():
    rng = np.random.default_rng(12)
    reference_sample = jax.jit(
        lambda k, x, temp, **s: softmax_sample(k, nucleus_filter(x, **s), temp)
    )
    for shape, decimals in [((64, 40), 0), ((64, 1000), 1), ((4, 50400), 3)]:
        # Rounding makes many logits equal.  Some rows are peaked, some flat, and one is constant.
        logits = rng.normal(size=shape) * rng.choice([0.1, 1, 5], (shape[0], 1))
        logits[0] = 1.0
        logits = jnp.asarray(np.round(logits, decimals), jnp.float32)
        settings = {
            "top_p": rng.choice([0, 0.1, 0.5, 0.9, 0.999, 1], shape[0]),
            "top_k": rng.choice([0, 1, 3, 50], shape[0]),
            "min_p": rng.choice([0, 0.01, 0.3, 1], shape[0]).astype(np.float32),
        }
        temp = rng.choice([0, 0.1, 1, 100], shape[0])
        for seed in range(4):
            keys = jax.random.split(jax.random.key(seed), shape[0])
            expected = reference_sample(keys, logits, temp, **settings)
            actual = nucleus_sample(keys, logits, **settings, temp=temp)
            np.testing.assert_array_equal(actual, expected)


# Invalid settings and logits.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-50),  # 0 in float32
        ("repetition_penalty", 1e-37),  # a logit divided by it is infinite
        ("repetition_penalty", float("inf")),
        ("temp", 1e39),  # infinite in float32
        ("temp", -1e-30),
        ("temp", float("nan")),
        ("top_p", -0.1),
        ("top_p", float("nan")),
        ("top_p", "0.9"),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", None),
        ("temp", None),
        ("repetition_penalty", None),
        ("temp", {}),
        ("temp", object()),
        ("temp", 1j),
        ("temp", np.full(1000, "x")),
        ("temp", [1, None, 1]),
        ("temp", [[1, 2], [3]]),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", 10**30),
        ("seed", None),
        ("min_p", 1.1),
        ("min_p", -1e-9),
        ("typical_p", -0.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
    ],
)
def test_settings_are_checked_in_the_precision_of_the_device(name, value):
    with pytest.raises(InputError, match=f"^generate: {name} is .*, expected a ") as error:
        sampling.sampler_settings({name: value}, 3)
    assert len(str(error.value)) < 150
    assert str(error.value).isprintable()
    if (name, value) != ("seed", None):  # a new seed per text
        with pytest.raises(InputError, match=name):
            SamplingOptions(**{name: value})
    if isinstance(value, float):
        with pytest.raises(InputError, match=name):
            sampling.sampler_settings({name: np.array([1, 1, value])}, 3)


@pytest.mark.parametrize(
    "bias",
    [
        {5: 101},
        {5: float("nan")},
        {5: "1"},
        {-1: 1.0},
        {"5": 1.0},
        {True: 1.0},
        dict.fromkeys(range(301), 1.0),
        [{}, {}],
        [{}, 5, {}],
        5,
    ],
)
def test_biases_are_checked(bias):
    with pytest.raises(InputError, match=r"^generate: logit_bias is .*, expected a dict of"):
        sampling.sampler_settings({"logit_bias": bias}, 3)
    with pytest.raises(InputError, match=r"^generate: logit_bias is .*, expected a dict of"):
        SamplingOptions(logit_bias=bias)


def test_rows_may_have_different_biases():
    third = {np.int32(3): 4, 5: np.float32(6)}
    settings = sampling.sampler_settings({"logit_bias": [{1: 2.0}, None, third]}, 3)
    assert settings.biased_BN[:, :3].tolist() == [[1, 0, 0], [0, 0, 0], [3, 5, 0]]
    assert settings.bias_BN[:, :3].tolist() == [[2, 0, 0], [0, 0, 0], [4, 6, 0]]


@pytest.mark.parametrize(
    "unknown", [{"topp": 1}, {"topp": 1, "temp": 2}, {"topp": 1, 3: 2, None: 1}]
)
def test_unknown_settings_are_reported_by_name(unknown):
    with pytest.raises(InputError, match="'topp'; use top_p"):
        sampling.sampler_settings(unknown, 1)


@pytest.mark.parametrize("options", [[0.9], "top_p", 0.9, {"top_p"}])
def test_settings_must_be_a_dict(options):
    with pytest.raises(InputError, match=r"^generate: sampler_options is .*, expected a dict"):
        sampling.sampler_settings(options, 1)


@pytest.mark.parametrize("value", [[1, 2], [], [1, 2, 3, 4], np.ones((3, 1)), np.ones((3, 3))])
@pytest.mark.parametrize("name", ["temp", "seed"])
def test_settings_per_row_must_have_one_value_per_row(name, value):
    value = np.asarray(value, RANGES[name].dtype)
    shape = re.escape(str(value.shape))
    with pytest.raises(InputError, match=rf"{name} has shape {shape}, expected one .* or 3 of"):
        sampling.sampler_settings({name: value}, 3)
    with pytest.raises(InputError, match=rf"{name} has shape {shape}, expected one number$"):
        SamplingOptions(**{name: value})


def test_top_k_of_none_is_no_limit_as_in_the_original():
    expected = sampling.sampler_settings({"top_k": 0, "temp": 0.5, "seed": 1}, 2)
    actual = sampling.sampler_settings({"top_k": None, "temp": 0.5, "seed": 1}, 2)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    texts = [SamplingOptions(top_k=None, seed=1), SamplingOptions(top_k=3, seed=1)]
    assert SamplingOptions.stacked(texts).top_k_B.tolist() == [0, 3]


def test_stacked_options_have_one_value_per_row():
    given = [0.5, 3, 0.7, 1.2, 9, 0.1, -1.5, 2.0, 0.25]
    texts = [SamplingOptions(*given, {7: -3.0}), SamplingOptions(seed=4), SamplingOptions()]
    rows = SamplingOptions.stacked(texts)
    f32 = np.float32
    assert [row[0] for row in rows[:9]] == [
        f32(0.5), 3, f32(0.7), f32(1.2), 9, f32(0.1), -1.5, 2.0, 0.25
    ]  # fmt: skip
    assert [row[1] for row in rows[:9]] == [f32(0.9), 0, 1, 1, 4, 0, 0, 0, 1]
    assert (rows.biased_BN[0, 0], rows.bias_BN[0, 0]) == (7, -3)
    assert np.count_nonzero(rows.bias_BN) == 1
    assert len({int(SamplingOptions.stacked(texts).seed_B[2]) for _ in range(8)}) > 1


def test_each_row_has_its_own_seed():
    """Random seeds by default, and consecutive ones from the one that is given."""
    drawn = [sampling.sampler_settings({"temp": 0.5}, 100).seed_B for _ in range(3)]
    assert len(np.unique(drawn)) == 300
    last = 2**32 - 2
    assert sampling.sampler_settings({"seed": last}, 4).seed_B.tolist() == [last, last + 1, 0, 1]
    for given in ([7, 7, 1], np.array([7, 7, 1])):
        assert sampling.sampler_settings({"seed": given}, 3).seed_B.tolist() == [7, 7, 1]
    assert sampling.sampler_settings({"seed": 7}, ()).seed_B == 7


POISON = {
    "nan": lambda row: np.full_like(row, np.nan),
    "one nan": lambda row: np.where(np.arange(len(row)) == 7, np.nan, row),
    "infinite": lambda row: np.where(np.arange(len(row)) < 3, np.inf, row),
    "both": lambda row: np.where(np.arange(len(row)) % 2, np.inf, -np.inf),
    "huge": lambda row: row * np.float32(1e38),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("penalty", [1.0, 0.0, 1e-38, np.nan])
def test_a_row_with_invalid_logits_terminates_without_affecting_others(poison, penalty):
    """Test invalid logits and unchecked settings; sampling without bounded rounds would hang."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 300)).astype(np.float32)
    logits[2] = POISON[poison](logits[2])
    seen = rng.random((4, 300)) < 0.1
    settings = sampling.sampler_settings(
        {
            "top_p": [0.9, 0.5, 0.5, 1.0],
            "top_k": [0, 5, 0, 0],
            "temp": [1, 0.5, 0.7, 0],
            "min_p": [0, 0, 0.1, 0],
            "frequency_penalty": [0, 0, 2, 0],
            "seed": range(4),
        },
        4,
    )._replace(penalty_B=np.array([1.2, 1, penalty, 1], np.float32))
    others = [0, 1, 3]

    def draw(rows):
        row_settings = jax.tree.map(lambda x: x[rows], settings)
        made = np.zeros(len(rows), np.int32)
        return draw_tokens(logits[rows], row_settings, made, seen[rows], seen[rows] * 3)

    tokens = within_the_limit(lambda: np.asarray(draw([0, 1, 2, 3])))
    np.testing.assert_array_equal(tokens[others], draw(others))
    assert tokens[2] < 300


def within_the_limit(work):
    """Return the result of `work`, which runs in a daemon thread in case it hangs."""
    result: queue.Queue = queue.Queue()
    threading.Thread(target=lambda: result.put(work()), daemon=True).start()
    return result.get(timeout=SECONDS)


@pytest.mark.slow
def test_the_fallback_is_the_most_likely_token(monkeypatch):
    """A draw that is always outside the nucleus ends after the maximum number of rounds."""
    monkeypatch.setattr(sampling, "MOST_ROUNDS", 3)
    rounds = []

    def always_outside(round_, among_BV):
        jax.debug.callback(lambda number: rounds.append(int(number)), round_)
        return jnp.full(2, 9, jnp.uint32)

    logits = jnp.asarray([[0.0] * 9 + [-1.0], [0.0] * 4 + [9.0] + [0.0] * 5])
    limits = sampling._limits(logits, 0.1, 10, 0.0)
    actual = sampling._draw_from_nucleus(always_outside, logits, *limits)
    jax.effects_barrier()
    assert actual.tolist() == [0, 4]
    assert rounds == [0, 1, 2]
