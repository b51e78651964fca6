"""Layers with a sliding window: their rings, and prompts' pages that are copied to them."""

import jax
import numpy as np
import pytest

from mesh_transformer.generation import generator as generators
from mesh_transformer.generation.pool import Chunks, Pool, server_pool, storage
from mesh_transformer.generation.sampling_settings import SamplingOptions, sampler_settings
from mesh_transformer.model.ring import RingCache
from mesh_transformer.serving import prefill
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.pages import KeptPages, Pages
from mesh_transformer.serving.prefill import Prefiller
from mesh_transformer.serving.progress import Request
from mesh_transformer.util import InputError
from tests.generation.test_decode import (
    PLACES,
    SAMPLED,
    by_token,
    full_logprobs,
    network_of,
    on_devices,
    random_prompts,
)
from tests.model.test_transformer import small_config
from tests.serving.test_pages import insert_in_parts

WINDOW, SLIDING = 64, 31
GREEDY = SamplingOptions(temp=0.0)


def sliding_config(**changes):
    keys = {"seq": WINDOW, "layers": 3, "sliding_window": SLIDING, "sliding_layers": [0, 2]}
    return small_config(block="llama", key_heads=2, **keys | changes)


def check_logprobs(config, prompt, chosen, more, row):
    """Check the logprobs of an answer's tokens, in `Chosen`s with all tokens, by a full pass."""
    tokens, top, logprob = (
        np.concatenate((first, later[row]))
        for first, later in zip(
            (chosen.token, chosen.top_token, chosen.top_logprob),
            (more.token, more.top_token, more.top_logprob),
            strict=True,
        )
    )
    text = np.concatenate((prompt, tokens))
    padded = np.pad(text, (0, 2 * WINDOW - len(text)))[None]  # one length: one program
    expected = full_logprobs(config, padded)[0, len(prompt) - 1 : len(text) - 1]
    # As in `test_decode`.
    np.testing.assert_allclose(by_token(top, logprob), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("guesses", "first", "last"), [(0, 16, 32), (3, 32, 48)])
def test_rings_grow_up_to_the_window_and_the_guesses(monkeypatch, guesses, first, last):
    """Rings are a window and the guesses, in whole pages of 16 slots."""
    monkeypatch.setattr(generators, "SMALLEST_CACHE", 16)
    config = sliding_config(int8_cache=True)
    network = network_of(config)
    batch = network.batch(2, guesses=guesses)
    prompts, settings = random_prompts(config, [5, 9]), sampler_settings(SAMPLED, 2)
    batch.insert([0, 1], prompts, 40, settings)
    sizes = []
    while batch.left.any():
        state = on_devices(batch)._state
        kinds = [isinstance(cache, RingCache) for cache in state.caches]
        assert kinds == [True, False, True]
        sizes.append([jax.tree.leaves(cache)[0].shape[2] for cache in state.caches])
        batch.decode(7, speculate=guesses > 0)
    assert sizes[0] == [first] * 3
    assert sizes[-1] == [last, 64, last]
    wide = network_of(sliding_config(sliding_window=60))  # in whole pages as wide as the others
    assert not any(
        isinstance(cache, RingCache) for cache in on_devices(wide.batch(2))._state.caches
    )


@pytest.mark.parametrize(
    ("window", "sliding", "rows", "tokens", "kept_tokens", "rings"),
    [
        (32768, 512, 16, None, None, True),
        (65536, 4096, 15, None, None, False),  # 61,440 in rings and 12,288 kept, of 65,536
        (65536, 4096, 16, 98304, None, True),
        (65536, 4096, 16, None, 65536, False),
        (8192, 1024, 16, 20000, None, False),
        (32768, 512, 16, 40000, 100000, False),  # the kept ones alone would take all
        (8192, 4096, 3, None, None, False),
        (2048, 4096, 2, None, None, False),
    ],
)
def test_a_server_has_rings_where_they_take_less_memory(
    window, sliding, rows, tokens, kept_tokens, rings
):
    config = sliding_config(seq=window, sliding_window=sliding)
    pool = server_pool(config, rows, tokens=tokens, kept_tokens=kept_tokens)
    stored = storage(config, 0, pool)
    assert (stored.ring_slots > 0, pool.kept > 0) == (rings, rings)
    if rings:
        assert rows * stored.ring_slots + pool.kept * pool.page < pool.pages * pool.page


def test_pages_that_rings_need_must_be_given():
    pool, config = Pool(60, 4, kept=8), sliding_config()
    batch, none = network_of(config).batch(4, pool), np.full((1, 16), -1, np.int32)
    settings, prompts = sampler_settings(SAMPLED, 1), random_prompts(config, [5])
    place = Chunks(np.zeros(1, np.int32), none, none)
    with pytest.raises(InputError, match="`chunks` must have restored_PG and kept_PG"):
        batch.insert([0], prompts, 1, settings, chunks=place)


@pytest.mark.slow
def test_rings_in_8_bits_generate_like_pages():
    """Logprobs as without rings: prompts whole and in parts, which share beginnings."""
    config = sliding_config(int8_cache=True)
    beginning, more = random_prompts(config, [40, 8])

    def logprobs(rings: bool) -> np.ndarray:
        prefiller = prefiller_of(config, has_rings=rings)
        own = on_devices(prefiller.batch)._state.caches
        assert isinstance(own[0], RingCache) == rings
        results = []
        prompts = [beginning[:16], np.concatenate((beginning, more)), beginning[:45]]
        for prompt, is_whole in zip(prompts, (True, False, False), strict=True):
            request = Request(prompt, 9, GREEDY, deliver=lambda _: None)
            [row] = prefiller.place([request], [0, 1], chunks=not is_whole)
            chosen = prefiller.insert([request]) if is_whole else in_chunks(prefiller, request)
            assert is_whole or request.cached >= 16
            later = prefiller.batch.decode(8, 20, allowed={})
            results.append(np.concatenate((chosen.top_logprob, later.top_logprob[row])))
            prefiller.release([row])
        return np.stack(results)

    # The sums have another order, so that a key may round to the next of 127 integers.
    np.testing.assert_allclose(logprobs(True), logprobs(False), atol=1e-2, rtol=0)


@pytest.mark.parametrize("guesses", [0, 3])
def test_answers_in_rings_match_a_full_pass(guesses):
    """Prompts shorter and longer than a ring, and answers that are written over each slot."""
    config = sliding_config()
    every, lengths = config.n_vocab, [3, SLIDING, 55, WINDOW]
    prompts = random_prompts(config, lengths)
    batch = network_of(config).batch(4, guesses=guesses)
    settings = sampler_settings(SAMPLED | {"seed": np.arange(4)}, 4)
    first = batch.insert(range(4), prompts, 40, settings, alternatives=every)
    more, before = [], batch.left.copy()
    while batch.left.any():
        left = batch.left.copy()
        chosen = batch.decode(5, every, speculate=guesses > 0)
        made = left - batch.left
        more.append(
            [jax.tree.map(lambda x, r=r, n=n: x[r, :n], chosen) for r, n in enumerate(made)]
        )
    assert all(before == 39)
    for row, prompt in enumerate(prompts):
        own = jax.tree.map(lambda x, row=row: x[row : row + 1], first)
        parts = [part[row] for part in more]
        later = jax.tree.map(lambda *x: np.concatenate(x)[None], *parts)
        check_logprobs(config, prompt, own, later, 0)


@pytest.mark.parametrize(
    "place", [PLACES[0], *(pytest.param(place, marks=pytest.mark.slow) for place in PLACES[1:])]
)
def test_prompts_in_parts_share_what_rings_held(place):
    """Prompts in parts, also past the end of the slots, while other rows generate."""
    config = sliding_config(sliding_window=13)
    pool = Pool(pages=60, page=4, kept=24)
    network, rng = network_of(config, place), np.random.default_rng(5)
    batch, every = network.batch(4, pool), config.n_vocab
    indices = [Pages(pool, WINDOW, behind=3) for _ in range(place[1])]
    first, second, full = random_prompts(config, [33, 21, WINDOW])
    prompts = [
        (0, first, 0),
        (1, np.concatenate((first[:30], rng.integers(0, every, 3))), 28),
        (2, second, 0),
        (3, np.concatenate((second[:16], rng.integers(0, every, 6))), 16),
        (0, full, 0),  # 16 pages, which replace all but 8 of the kept ones
        (1, np.concatenate((full[:45], rng.integers(0, every, 19))), 44),
        (0, np.concatenate((first[:30], rng.integers(0, every, 3))), 0),
    ]
    rows = {}
    for seed, (number, prompt, kept) in enumerate(prompts):
        settings = sampler_settings(SAMPLED | {"seed": seed}, 1)
        options = {"length": 8, "settings": settings, "alternatives": every}
        pages = indices[number * place[1] // 4]
        if number in rows:
            batch.release([number])
            pages.remove_row(rows[number])
        rows[number], chosen, calls = insert_in_parts(batch, number, prompt, 15, pages, **options)
        if place[1] == 1:
            assert calls[0][0] == kept
        check_logprobs(config, prompt, chosen, batch.decode(5, every), number)


def prefiller_of(config, has_rings=True, **options):
    """Return a server's rows, in rings or in pages, of a network on one device."""
    network = network_of(config)
    with pytest.MonkeyPatch.context() as patch:
        if not has_rings:
            patch.setattr(
                prefill,
                "server_pool",
                lambda *args, **keys: server_pool(*args, **keys)._replace(kept=0, has_rings=False),
            )
        options = {"chunk": 16, "kept_tokens": 96, "cache_tokens": 512} | options
        return Prefiller(network, Metrics(2), 2, **options)


def in_chunks(prefiller, request):
    """Insert a prompt in chunks, and return the first token of its answer."""
    chosen = None
    while chosen is None:
        _, chosen = prefiller.insert_chunk(request, 16)
    return chosen


@pytest.mark.quick(1)
@pytest.mark.parametrize("fixed", [False, True])
def test_the_server_shares_beginnings_of_prompts_in_rings(fixed):
    config = sliding_config(seq=WINDOW)
    rng, prefiller = np.random.default_rng(6), prefiller_of(config, fixed_shapes=fixed)
    beginning = rng.integers(0, config.n_vocab, 50)
    assert isinstance(on_devices(prefiller.batch)._state.caches[0], RingCache)
    cached = []
    for _ in range(3):
        prompt = np.concatenate((beginning, rng.integers(0, config.n_vocab, 10)))
        request = Request(prompt, 20, GREEDY, deliver=lambda _: None)
        [row] = prefiller.place([request], [0, 1], chunks=True)
        chosen = in_chunks(prefiller, request)
        cached.append(request.cached)
        later = prefiller.batch.decode(19, 20, allowed={})
        tokens = np.concatenate((chosen.token, later.token[row]))
        text = np.concatenate((prompt, tokens))
        expected = full_logprobs(config, np.pad(text, (0, 2 * WINDOW - len(text)))[None])[0]
        at = np.arange(len(prompt) - 1, len(text) - 1)
        actual = np.concatenate((chosen.logprob, later.logprob[row]))
        np.testing.assert_allclose(actual, expected[at, tokens], atol=1e-5, rtol=1e-5)
        prefiller.release([row])
    assert cached == [0, 48, 48]


def test_pages_that_a_row_reads_are_not_given_away():
    kept = KeptPages(3, 2)
    for number in range(3):
        kept.keep(kept.take(), bytes([number]))
    pages = kept.read([bytes([0]), bytes([2])])
    assert kept.take() not in pages
    assert kept.take() is None
    kept.end_read(pages)
    assert {kept.take(), kept.take()} == set(pages)
    assert not any(kept.has(bytes([number])) for number in range(3))
