"""Prompts inserted in parts, and the pool of blocks from which prompts take their beginnings."""

import numpy as np
import pytest

from mesh_transformer.generation.prefixes import Chunks, Pool, Prefixes
from mesh_transformer.generation.sampling import sampler_settings
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
POOL = Pool(blocks=12, block=4)
STEPS = 3


def insert_in_parts(batch, row, prompt, parts, index=None, **options):
    """Insert one prompt, `parts` tokens per call, and return the first token and all calls' parts.

    Args:
      index: the `Prefixes` of the row's replica, from which the beginning is taken.
    """
    begin, calls = 0, []
    while begin < len(prompt):
        if index is not None:
            begin = max(begin, len(index.find(prompt)) * index.pool.block)
        end = min(begin + parts, len(prompt))
        blocks = ([], []) if index is None else index.use(prompt[:end], begin)
        part = Chunks(np.array([begin]), *(np.array([x], np.int32) for x in blocks))
        calls.append((begin, end))
        length = options["length"] if end == len(prompt) else 1
        chosen = batch.insert(
            [row],
            [prompt[:end]],
            length,
            options["settings"],
            alternatives=options["alternatives"],
            chunks=part,
        )
        begin = end
    return chosen, calls


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "place"), EVERYWHERE)
def test_logits_after_parts_and_blocks_match_a_full_pass(kind, place):
    """Prompts in parts, with beginnings from the pool, while other rows generate."""
    block, pe = kind
    config = small_config(block=block, pe=pe, seq=64, attention_window=WINDOW, layers=3)
    dp, rng = place[1], np.random.default_rng(5)
    # Pairs of prompts in the same replica, of which the second one begins like the first one.
    firsts = random_prompts(config, [33, 21])
    seconds = [
        np.concatenate((first[:common], rng.integers(0, config.n_vocab, 6)))
        for first, common in zip(firsts, [30, 16], strict=True)
    ]
    network = network_of(config, place)
    batch = network.batch(4, POOL)
    batch.reserve(WINDOW)
    indices = [Prefixes(POOL) for _ in range(dp)]
    every = config.n_vocab
    for at, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
        for number, prompt in enumerate((first, second)):
            row = 2 * at + number
            settings = sampler_settings(SAMPLED | {"seed": row}, 1)
            options = {"length": STEPS + 4, "settings": settings, "alternatives": every}
            index = indices[row * dp // 4]
            chosen, calls = insert_in_parts(batch, row, prompt, 16, index, **options)
            # Both end in the same place: what the pool holds is not computed again.
            assert calls[0][0] == (0 if number == 0 else [28, 16][at])
            more = batch.decode(STEPS, every)
            tokens = np.concatenate((chosen.token, more.token[row]))
            top = np.concatenate((chosen.top_token, more.top_token[row]))
            logprob = np.concatenate((chosen.top_logprob, more.top_logprob[row]))
            text = np.concatenate((prompt, tokens))
            padded = np.pad(text, (0, WINDOW + STEPS - len(text)))[None]  # one length: one program
            expected = full_logprobs(config, padded)[0, len(prompt) - 1 : len(text) - 1]
            # Logprobs reach 18 here, where adjacent f32 values differ by 2e-6.
            np.testing.assert_allclose(by_token(top, logprob), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_loaded_blocks_hold_the_beginning_of_the_prompt(seed):
    """Random prompts over two tokens, so that many begin alike, in pools that are soon full."""
    rng = np.random.default_rng(seed)
    index = Prefixes(Pool(blocks=int(rng.integers(1, 30)), block=int(rng.integers(1, 5))))
    size, contents = index.pool.block, {}
    found = 0
    for _ in range(300):
        prompt = rng.integers(0, 2, rng.integers(1, 30))
        kept = len(index.find(prompt))
        # Some prompts are inserted in two calls, the first of which ends anywhere.
        begin = kept * size
        ends = sorted({int(rng.integers(begin, len(prompt))), len(prompt)})
        assert begin < len(prompt)
        for end in ends:
            load, save = index.use(prompt[:end], begin)
            for at, block in enumerate(load):
                assert (at + 1) * size <= begin or block < 0
                if block >= 0:
                    np.testing.assert_array_equal(contents[block], prompt[: (at + 1) * size])
            assert begin > kept * size or (load[:kept] >= 0).all()
            for at, block in enumerate(save):
                if block >= 0:
                    assert (at + 1) * size > begin
                    contents[block] = prompt[: (at + 1) * size].copy()
            begin = end
        found += kept
        assert len(index) == len(contents) <= index.pool.blocks
    assert found > 0


@pytest.mark.parametrize("seed", range(10))
def test_prompts_of_one_call_are_saved_to_different_blocks(seed):
    rng = np.random.default_rng(seed)
    index = Prefixes(Pool(blocks=int(rng.integers(1, 12)), block=2))
    contents = {}
    for _ in range(100):
        prompts = [rng.integers(0, 3, rng.integers(1, 12)) for _ in range(4)]
        new = {}
        for prompt in prompts:
            _, save = index.use(prompt, 0, prompts)
            for at, block in enumerate(save):
                if block >= 0:
                    assert block not in new
                    new[block] = prompt[: 2 * at + 2]
        contents |= new
        for prompt in prompts:
            for at, block in enumerate(index.find(prompt)):
                np.testing.assert_array_equal(contents[block], prompt[: 2 * at + 2])


def test_the_least_recently_used_blocks_are_replaced():
    index = Prefixes(Pool(blocks=4, block=2))

    def insert(*prompt):
        index.use(np.array(prompt), len(index.find(np.array(prompt))) * 2)

    def kept(*prompt):
        return len(index.find(np.array([*prompt, 0])))

    insert(1, 1, 2, 2)
    insert(3, 3, 4, 4)
    assert kept(1, 1, 2, 2) == kept(3, 3, 4, 4) == 2
    insert(1, 1, 5, 5)  # replaces the end of the prompt that was used last, not its beginning
    assert (kept(1, 1, 2, 2), kept(1, 1, 5, 5), kept(3, 3, 4, 4)) == (1, 2, 2)
    insert(6, 6)
    assert (kept(1, 1, 5, 5), kept(3, 3, 4, 4), kept(6, 6)) == (2, 1, 1)
    insert(*range(10, 22))  # more than the pool can hold: as much of its beginning as possible
    assert kept(*range(10, 22)) == 4
