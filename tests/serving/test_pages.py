"""Prompts inserted in parts, and the pool of pages that rows take and share."""

from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.generation.batch import MOST_STEPS
from mesh_transformer.generation.generator import SMALLEST_CACHE
from mesh_transformer.generation.pool import Chunks, Pool, Storage
from mesh_transformer.generation.sampling import sampler_settings
from mesh_transformer.serving.pages import NoPageError, Pages, Prompt
from mesh_transformer.transformer_shard import CausalTransformer
from tests.generation.test_decode import (
    EVERYWHERE,
    SAMPLED,
    by_token,
    full_logprobs,
    network_of,
    random_prompts,
)
from tests.model.test_transformer import small_config

WINDOW = 40
POOL = Pool(pages=35, page=4)  # the window is 10 pages: room for three rows and a half
STEPS = 3


def insert_in_parts(batch, number, prompt, parts, pages, **options):
    """Insert one prompt, `parts` tokens per call.

    Args:
      pages: the `Pages` of the row's replica.

    Returns:
      The pages of the row, the first token and all calls' parts.
    """
    named = Prompt(prompt)
    row = pages.add_row(named, len(prompt) + options["length"])
    begin, calls = 0, []
    while begin < len(prompt):
        begin = pages.share(row, named, begin)
        end = min(begin + parts, len(prompt))
        chosen = batch.insert(
            [number],
            [prompt[:end]],
            options["length"] if end == len(prompt) else 1,
            options["settings"],
            alternatives=options["alternatives"],
            chunks=pages.insertion(row, named, begin, end),
        )
        calls.append((begin, end))
        pages.keep(row, named, begin, end)
        begin = end
    pages.end_prompt(row)
    return row, chosen, calls


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "place"), EVERYWHERE)
def test_logits_after_parts_and_pages_match_a_full_pass(kind, place):
    """Prompts in parts, with beginnings that others have computed, while other rows generate.

    Two prompts fill the window, so that their answers are written over their first positions.
    """
    block, pe = kind
    config = small_config(block=block, pe=pe, seq=64, attention_window=WINDOW, layers=3)
    rng = np.random.default_rng(5)
    first, second, full = random_prompts(config, [33, 21, WINDOW])
    # Pairs of prompts, of which the second one begins like the first one.
    prompts = [
        (0, first, 0),
        (1, np.concatenate((first[:30], rng.integers(0, config.n_vocab, 3))), 28),
        (2, second, 0),
        (3, np.concatenate((second[:16], rng.integers(0, config.n_vocab, 6))), 16),
        (0, full, 0),
        (1, np.concatenate((full[:20], rng.integers(0, config.n_vocab, WINDOW - 20))), 20),
        (0, full, 36),
        (1, np.concatenate((second[:16], rng.integers(0, config.n_vocab, 6))), 16),
    ]
    network = network_of(config, place)
    batch, replicas = network.batch(4, POOL), place[1]
    indices = [Pages(POOL, POOL.slots(WINDOW)) for _ in range(replicas)]
    rows, every = {}, config.n_vocab
    for seed, (number, prompt, kept) in enumerate(prompts):
        settings = sampler_settings(SAMPLED | {"seed": seed}, 1)
        options = {"length": STEPS + 4, "settings": settings, "alternatives": every}
        pages = indices[number * replicas // 4]
        if number in rows:
            batch.release([number])
            pages.remove_row(rows[number])
        rows[number], chosen, calls = insert_in_parts(batch, number, prompt, 16, pages, **options)
        # What others have computed in the same replica is not computed again.
        assert calls[0][0] == (kept if replicas == 1 or seed < 7 else 0)
        more = batch.decode(STEPS, every)
        tokens = np.concatenate((chosen.token, more.token[number]))
        top = np.concatenate((chosen.top_token, more.top_token[number]))
        logprob = np.concatenate((chosen.top_logprob, more.top_logprob[number]))
        text = np.concatenate((prompt, tokens))
        padded = np.pad(text, (0, WINDOW + 1 + STEPS - len(text)))[None]  # one length: one program
        expected = full_logprobs(config, padded)[0, len(prompt) - 1 : len(text) - 1]
        # Logprobs reach 18 here, where adjacent f32 values differ by 2e-6.
        np.testing.assert_allclose(by_token(top, logprob), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_nothing_is_compiled_again_as_rows_grow():
    """Prompts of several lengths, whose answers fill the window and go on."""
    config = small_config(seq=64, attention_window=WINDOW)
    network, pool = network_of(config), Pool(pages=60, page=4)
    batch, pages = network.batch(4, pool), Pages(pool, pool.slots(WINDOW))
    options = {"settings": sampler_settings(SAMPLED, 1), "alternatives": None}
    compiled = network._generator.decode(None, MOST_STEPS, Storage(in_pages=True), 0, False)
    for number, prompt in enumerate(random_prompts(config, [3, 16, WINDOW, 1])):
        insert_in_parts(batch, number, prompt, 16, pages, length=WINDOW, **options)
        for steps in (1, 9):
            batch.decode(steps)
            assert compiled._cache_size() == 1
    batch.decode(MOST_STEPS)
    assert list(batch.left) == [0, 0, 0, 0]
    assert compiled._cache_size() == 1


@pytest.mark.parametrize("seed", range(20))
def test_pages_hold_the_tokens_of_their_rows(seed):
    """Random prompts over two tokens, so that many begin alike, in pools that are often full."""
    rng = np.random.default_rng(seed)
    size, places = int(rng.integers(1, 4)), int(rng.integers(2, 8))
    behind = int(rng.integers(0, 4))
    pool = Pool(places + int(rng.integers(1, 3 * places)), size, int(rng.integers(2, 20)))
    pages, slots = Pages(pool, places * size, behind=behind), places * size
    contents = {}  # what is written in each page
    windows, restored = {}, 0  # the tokens up to the end of each page that rings may be filled from
    rows = []  # the rows in use, with what each holds
    shared = shared_by_wrapped = refused = 0
    for _ in range(300):
        prompt = rng.integers(0, 2, rng.integers(1, slots + 1))
        named = Prompt(prompt)
        positions = len(prompt) + int(rng.integers(0, 6))
        while pages.needed(named, positions) > pages.available:
            with pytest.raises(NoPageError):
                pages.add_row(named, positions)
            refused += 1
            pages.remove_row(rows.pop(int(rng.integers(len(rows))))[0])
        expected = pages.available - pages.needed(named, positions)
        row = pages.add_row(named, positions)
        assert pages.available == expected
        # Some prompts are inserted in two calls, the first of which ends anywhere.
        begin = 0
        for end in sorted({int(rng.integers(1, len(prompt) + 1)), len(prompt)}):
            filled = pages.share(row, named, begin)
            chunk = pages.insertion(row, named, filled, end)
            assert chunk.restored_PG is not None
            assert chunk.kept_PG is not None
            if filled > begin:  # the ring is filled with the pages before
                last = filled // size
                ends = range(last - min(last, behind) + 1, last + 1)
                found = [windows[int(page)] for page in chunk.restored_PG[0] if page >= 0]
                assert found == [tuple(prompt[: end * size]) for end in ends]
                restored += len(found)
            else:
                assert (chunk.restored_PG < 0).all()
            for at, page in enumerate(chunk.kept_PG[0], filled // size):
                if page >= 0:
                    assert (at + 1) * size <= end
                    windows[int(page)] = tuple(prompt[: (at + 1) * size])
            shared += filled - begin
            shared_by_wrapped += (filled - begin) * (positions > slots)
            begin = filled
            # What is written from here on belongs to no other row, and is not kept.
            for at in range(begin, end):
                contents[int(row.prompt_J[at // size]), at % size] = prompt[at]
            pages.keep(row, named, begin, end)
            begin = end
        for at in range(len(prompt)):  # what is not in the row's own pages is copied there
            contents[int(row.page_J[at // size]), at % size] = contents[
                int(row.prompt_J[at // size]), at % size
            ]
        pages.end_prompt(row)
        held = dict(enumerate(prompt))
        for at in range(slots, positions):  # the answer is written over the first positions
            place = at % slots
            contents[int(row.page_J[place // size]), place % size] = -1
            held[place] = -1
        rows.append((row, held))
        for row, held in rows:
            found = {at: contents[int(row.page_J[at // size]), at % size] for at in held}
            assert found == held
            assert all(row.page_J[at // size] >= 0 for at in held)
    for row, _ in rows:
        pages.remove_row(row)
    assert pages.used == 0
    assert (shared > shared_by_wrapped > 0) or behind
    assert (restored > 0) == (behind > 0)
    assert refused > 0


def test_the_least_recently_used_pages_are_given_away():
    pages = Pages(Pool(pages=4, page=2), 8)

    def insert(*prompt):
        tokens = Prompt(np.array(prompt))
        row = pages.add_row(tokens, len(prompt))
        pages.share(row, tokens, 0)
        pages.keep(row, tokens, 0, len(prompt))
        pages.remove_row(row)

    def kept(*prompt):
        return len(pages.find(Prompt(np.array([*prompt, 0]))))

    insert(1, 1, 2, 2)
    insert(3, 3, 4, 4)
    assert kept(1, 1, 2, 2) == kept(3, 3, 4, 4) == 2
    insert(5, 5)  # takes the place of the end of the oldest prompt
    assert (kept(1, 1, 2, 2), kept(3, 3, 4, 4), kept(5, 5)) == (1, 2, 1)
    insert(3, 3, 6, 6)  # uses a page again, which counts as new
    insert(7, 7)
    assert (kept(3, 3, 6, 6), kept(7, 7), kept(1, 1)) == (2, 1, 0)


def test_pages_are_neither_shared_nor_kept_if_not_wanted():
    prompt, pages = Prompt(np.arange(8)), Pages(Pool(pages=4, page=2), 8, keep=False)
    row = pages.add_row(prompt, 12)
    assert pages.available == 0
    pages.keep(row, prompt, 0, 8)
    assert pages.find(prompt) == []
    pages.remove_row(row)
    assert pages.available == 4


@pytest.mark.slow
def test_other_rows_generate_between_the_parts_of_a_prompt_without_a_pool():
    """The first part fills the cache, so the idle row has no room for what it writes."""
    network = CausalTransformer(small_config(seq=1024, layers=1), devices=jax.devices()[:1])
    prompt, other = random_prompts(network.config, [SMALLEST_CACHE + 20, 5])
    settings = sampler_settings({"temp": 0.0}, 1)
    no_pages = np.full((1, 0), -1)

    def first_token(decodes: bool) -> Any:
        batch = network.batch(2)
        batch.insert([0], [other], 50, settings)
        for begin, end in ((0, SMALLEST_CACHE), (SMALLEST_CACHE, len(prompt))):
            chosen = batch.insert(
                [1],
                [prompt[:end]],
                1,
                settings,
                alternatives=1,
                chunks=Chunks(np.array([begin]), no_pages, no_pages),
            )
            if decodes and not begin:
                batch.decode(STEPS)
        return chosen.logprob

    # The cache grows between the parts, and XLA sums longer rows in another order.
    np.testing.assert_allclose(first_token(True), first_token(False), atol=1e-6, rtol=0)
