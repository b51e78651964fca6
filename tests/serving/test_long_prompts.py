"""Long prompts beside short ones: their memory, the time they take, and where they are kept."""

import hashlib
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.generation import forward, texts
from mesh_transformer.generation.generator import check_memory
from mesh_transformer.generation.sampling_settings import SamplingOptions
from mesh_transformer.model import attention, block_attention, paged
from mesh_transformer.model.attention import causal_bias
from mesh_transformer.model.cache import LayerCache
from mesh_transformer.serving import pages
from mesh_transformer.serving.engine import Engine, Request
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.pages import HostPages, Prompt
from mesh_transformer.util import InputError
from tests.generation.test_decode import network_of
from tests.model.test_transformer import small_config
from tests.support.mixes import ROWS, answers


def value_of(metrics, name):
    return metrics.registry.get_sample_value(f"mesh_transformer_{name}") or 0.0


def test_a_chunk_holds_scores_of_some_slots_only_and_copies_no_cache():
    """The scores and the mask of a chunk of 256 tokens over 65,536 slots would be 64 MiB each."""
    queries, slots, size = 256, 65536, 16
    kv_shape = (slots // size, 1, size, 8)
    table_1J = jax.ShapeDtypeStruct((1, slots // size), "int32")
    q, new = (jax.ShapeDtypeStruct(x, "f") for x in ((1, queries, 1, 8), (1, 1, queries, 8)))
    kv = jax.ShapeDtypeStruct(kv_shape, "f")

    def run(cache, new, q_BTHK, page_1J, copied_1J, begin):
        def bias(slot_1S):
            return causal_bias(begin + jnp.arange(queries)[None], slot_1S, slots)

        table = paged.Table(page_1J, jnp.full(1, begin + queries), copied_1J)
        cache = paged.write_part(cache, new, page_1J, begin[None])
        cache = paged.copy_pages(cache, page_1J, copied_1J)
        return paged.attend(q_BTHK, cache, table, bias), cache

    arguments = LayerCache(kv, kv), LayerCache(new, new), q, table_1J, table_1J
    begin = jax.ShapeDtypeStruct((), "int32")
    compiled = jax.jit(run, donate_argnums=0).lower(*arguments, begin).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    assert memory.temp_size_in_bytes < 4 * 2**20
    cache = f"f32[{','.join(map(str, kv_shape))}]"
    assert cache in text
    assert not [line for line in text.splitlines() if re.search(r" copy\(", line) and cache in line]


def test_each_token_of_a_prompt_is_hashed_once(monkeypatch):
    hashed = []
    monkeypatch.setattr(
        pages.hashlib, "sha256", lambda data: hashed.append(len(data)) or hashlib.blake2s(data)
    )
    tokens = np.random.default_rng(0).integers(0, 256, 60_000)
    prompt = Prompt(tokens)
    for count in (10, 3750, 5, 3000):
        prompt.key(count, 16)
    assert sum(hashed) == 3750 * (32 + 16 * 8) - 32 + 8


@pytest.mark.parametrize("seed", range(5))
def test_a_key_depends_on_all_tokens_before_its_end(seed):
    rng = np.random.default_rng(seed)
    tokens, at = rng.integers(0, 9, 40), int(rng.integers(40))
    other = tokens.copy()
    other[at] += 1
    one, another = Prompt(tokens), Prompt(other)
    equal = [one.key(n, 4) == another.key(n, 4) for n in range(1, 11)]
    assert equal == [n * 4 <= at for n in range(1, 11)]


def test_chunks_are_shorter_after_more_tokens():
    prefiller = Engine(network_of(small_config(seq=512)), Metrics(4), rows=4)._prefiller
    prefiller._seconds = {16: 0.01, 32: 0.01, 64: 0.02, 128: 0.04, 256: 0.08}
    prefiller._slopes = {width: width * 1e-8 for width in prefiller._seconds}
    begins = (0, 10_000, 50_000, 100_000, 10**6)
    assert [prefiller.chunk(0.08, begin) for begin in begins] == [256, 128, 64, 32, 16]
    # At the end, half as long chunks would take half as long; at the beginning they would not.
    assert [prefiller.chunk(1e-9, begin) for begin in (0, 10**6)] == [32, 16]
    for _ in range(100):  # attention is four times as slow as expected
        prefiller._observe(64, 0.02 + 4 * 64 * 1e-8 * 50_000, 50_000)
    least, most = 64e-8, 4 * 64e-8 * 1.1
    assert least < prefiller._slopes[64] < most
    assert sum(prefiller._cost(64, 50_000)) == pytest.approx(0.148, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 20, "sliding_layers": [0]}])
def test_narrow_chunks_give_the_same_answer(monkeypatch, changes):
    """Chunks of 8 tokens, with ends inside and between pages, against the whole prompt."""
    monkeypatch.setattr("mesh_transformer.serving.prefill.LONG_WINDOW", 128)
    network = network_of(small_config(seq=128, n_vocab=64, **changes))
    prompt = np.random.default_rng(3).integers(0, 64, 60, np.int32)
    results, widths = [], []
    for sizes in [[60], [16, 8, 5, 8, 7, 8, 8]]:
        prefiller = Engine(network, Metrics(ROWS), rows=ROWS)._prefiller
        prefiller._seconds = dict.fromkeys(prefiller._widths, 0.01)
        prefiller._slopes = {width: width / 16 for width in prefiller._widths}
        assert prefiller.chunk(1e-9, 10**6) == 8
        run, own = prefiller.batch._run, []

        def noted(call, own=own, run=run):
            own.append(call.width)
            return run(call)

        monkeypatch.setattr(prefiller.batch, "_run", noted)
        request = Request(prompt, 5, SamplingOptions(temp=0.0), lambda _: None)
        prefiller.place([request], [1], chunks=True)
        for size in sizes:
            _, first = prefiller.insert_chunk(request, size)
        monkeypatch.setattr(prefiller.batch, "_run", run)
        later = prefiller.batch.decode(4, 20, allowed={})
        results.append([first, jax.tree.map(lambda x: x[1], later)])
        widths.append(own)
    assert widths == [[64], [16, *[8] * 6]]
    for whole, parts in zip(*results, strict=True):
        assert np.array_equal(whole.token, parts.token)
        np.testing.assert_allclose(whole.logprob, parts.logprob, atol=1e-5)  # f32, in other sums


def requests_of(config, count):
    """Return requests whose last ones repeat the prompts of the first ones."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.n_vocab, 100, np.int32) for _ in range(count)]
    return [
        {
            "prompt": prompt,
            "length": 5,
            "settings": SamplingOptions(temp=float(seed % 2), seed=seed),
            "logprobs": True,
        }
        for seed, prompt in enumerate([*prompts, *prompts])
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize("changes", [{}, {"int8_cache": True}])
@pytest.mark.parametrize("fixed", [True, False])
def test_prompts_come_back_from_host_memory_with_the_same_bits(changes, fixed):
    """The pool holds one prompt and a half, and host memory all of them, or one less."""
    network = network_of(small_config(seq=128, n_vocab=64, **changes))
    requests, results, restored = requests_of(network.config, 3), [], []
    options = {"fixed_shapes": fixed, "cache_tokens": 160, "kept_tokens": 160}
    for host_bytes in (0, 10**9):
        metrics = Metrics(ROWS)
        sizes = [1] * len(requests)
        results.append(answers(network, requests, sizes, metrics, host_bytes=host_bytes, **options))
        spilled = value_of(metrics, "spilled_prompt_tokens_total")
        restored.append(value_of(metrics, "restored_prompt_tokens_total"))
        assert (spilled > 0) == (host_bytes > 0)
    assert results[0] == results[1]
    # Each prompt is found again, except the last page and what is still in the pool.
    assert restored[0] == 0
    assert restored[1] > 3 * 50


def test_host_memory_is_limited():
    host = HostPages(100)
    arrays = [[np.full(10, n, np.int32)] for n in range(4)]  # of 40 bytes each
    host.put(b"0", arrays[0])
    host.put(b"1", arrays[1])
    assert host.get(b"0") is arrays[0]
    host.put(b"2", arrays[2])
    assert (b"0" in host, b"1" in host, b"2" in host, host.bytes) == (True, False, True, 80)
    host.put(b"3", [np.zeros(30, np.int32)])  # more than there is room for
    assert (b"3" in host, host.bytes) == (False, 80)
    host.put(b"2", arrays[3])  # it is there
    assert (host.get(b"2")[0][0], host.bytes) == (2, 80)


def test_layers_with_rings_do_not_use_host_memory():
    config = small_config(
        seq=512, sliding_window=32, sliding_layers=[0], attention_window=None, pe="rotary"
    )
    with pytest.raises(InputError, match=r"--host-cache .* sliding window apart; leave it out"):
        Engine(network_of(config), Metrics(4), rows=4, host_bytes=1)


def test_host_memory_needs_kept_beginnings():
    with pytest.raises(InputError, match="leave out --prefix-cache 0"):
        Engine(network_of(small_config()), Metrics(4), rows=4, kept_tokens=0, host_bytes=1)


def test_what_the_cache_has_no_room_for_is_refused_at_once():
    engine = Engine(network_of(small_config(seq=512)), Metrics(4), rows=4, cache_tokens=200)
    assert engine.room == 192
    assert engine.capacity == (
        "the cache has room for 192 tokens: requests that run together may be 1 of 192 tokens, "
        "each with its answer"
    )

    def request(tokens, length):
        return Request(np.zeros(tokens, np.int32), length, SamplingOptions(), lambda _: None)

    with pytest.raises(InputError, match="have 201 tokens, but the cache has room for 192"):
        engine.submit([request(1, 1), request(150, 51)])
    assert engine.waiting == 0
    engine.submit([request(150, 42)])
    enough = Engine(network_of(small_config(seq=512)), Metrics(4), rows=4, cache_tokens=512)
    assert enough.room is None
    enough.submit([request(150, 10**6)])


def test_a_cache_that_devices_have_no_memory_for_is_refused_with_what_fits():
    memory = {"bytes_limit": 2**30, "bytes_in_use": 2**29}
    device = types.SimpleNamespace(memory_stats=lambda: memory)
    mesh: Any = types.SimpleNamespace(
        local_devices=[device], size=8, shape={"dp": 2, "cp": 2, "mp": 2}
    )
    state = {"k": jax.ShapeDtypeStruct((2**19, 512), "float32")}  # 1 GiB on 4 devices
    check_memory(state, 2**19, mesh)
    memory["bytes_in_use"] += 3 * 2**27
    message = (
        "a cache of 524,288 tokens needs 0.25 GiB per device, and 0.12 are free, which about "
        "262,144 tokens fit in; lower --cache-tokens"
    )
    with pytest.raises(InputError, match=message):
        check_memory(state, 2**19, mesh)
    memory.clear()
    check_memory(state, 2**19, mesh)


@pytest.mark.parametrize("sliding", [False, True])
def test_long_texts_are_scored_in_blocks_and_parts(monkeypatch, sliding):
    changes = {"sliding_window": 20, "sliding_layers": [1]} if sliding else {}
    config = small_config(seq=128, **changes)
    tokens = np.random.default_rng(0).integers(0, config.n_vocab, (2, 97))
    lengths = np.array([96, 50])

    def results():
        network = network_of(config)
        vectors = network.embed(tokens[:, :96], lengths)
        return network.score(tokens, 3), vectors

    (whole, vectors), results_of_parts = results(), None
    for module in (forward, texts):
        monkeypatch.setattr(module, "LONG", 32)
    monkeypatch.setattr(block_attention, "BLOCK", 16)
    computed = []

    def attend_in_blocks(*args):
        computed.append(args[0])
        return block_attention.attend_in_blocks(*args)

    monkeypatch.setattr(attention, "attend_in_blocks", attend_in_blocks)
    results_of_parts, other = results()
    assert set(computed) == ({20, 128} if sliding else {128})
    # Sums of up to 96 terms in f32, in another order.
    np.testing.assert_allclose(results_of_parts.logprob, whole.logprob, atol=2e-5)
    np.testing.assert_allclose(results_of_parts.top_logprob, whole.top_logprob, atol=2e-5)
    np.testing.assert_allclose(other, vectors, atol=2e-5)
