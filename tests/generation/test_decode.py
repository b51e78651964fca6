"""Running batches: logits against full passes, in-place caches and independence of rows."""

import gc
import itertools
import re
import weakref
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from mesh_transformer.config import Config
from mesh_transformer.config_model import Architecture
from mesh_transformer.generation import decode, programs
from mesh_transformer.generation import generator as generators
from mesh_transformer.generation.batch import MOST_STEPS, Batch
from mesh_transformer.generation.generator import DeviceBatch
from mesh_transformer.generation.pool import IN_ROWS, Chunks, Pool
from mesh_transformer.generation.sampling import choose, penalize, sampler_settings
from mesh_transformer.mesh.parallel import Auto
from mesh_transformer.model import transformer
from mesh_transformer.model.cache import LayerCache, write, write_rows
from mesh_transformer.training.step import StateLayout
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import AS_USERS_COMPILE, DATA
from tests.model.test_transformer import KINDS, base_of, full_pass, small_config, weights
from tests.training.test_parity import network_at_step_0

WINDOW = 24
# A prompt longer than the window is reduced to its last tokens.
LENGTHS = [1, 5, 16, WINDOW, WINDOW + 9, 3]
PLACES = [("jit", 1, 1), ("shard_map", 2, 4), ("jit", 2, 4), ("shard_map", 1, 8), ("jit", 1, 8)]
GREEDY = {"top_p": 1.0, "temp": 0.0}
SAMPLED = {"top_p": 0.9, "temp": 1.0}


def on_devices(batch: Batch) -> DeviceBatch:
    """Return what runs the calls of a batch in this process."""
    run: Any = batch._run
    return run.__self__


def network_of(config: Config, place: tuple[str, int, int] = PLACES[0]) -> CausalTransformer:
    """Return a network on a dp x mp mesh, with the weights that `config` has on every mesh."""
    partitioning, dp, mp = place
    mesh_config = config.replace(partitioning=partitioning, cores_per_replica=mp, tpu_size=dp * mp)
    network = CausalTransformer(mesh_config, devices=jax.devices()[: dp * mp], init=False)
    shardings = StateLayout(mesh_config, network.mesh).shardings["params"]
    params = jax.tree.map(jax.device_put, weights(base_of(config)), shardings)
    network.state = {"params": params, "frozen": {}}
    return network


def random_prompts(config: Config, lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, config.n_vocab, length) for length in lengths]


def full_logprobs(config: Config, tokens: np.ndarray) -> np.ndarray:
    """Return logprobs [B, T, V] of one pass without a cache, with `config`'s attention window."""
    width = tokens.shape[1]
    # A position table has a fixed length; without one, sequences may have any length.
    seq = config.seq if config.pe == "fixed" else width
    full_config = config.replace(seq=seq, attention_window=min(config.window, width))
    run = jax.jit(lambda params, tokens: transformer.logits(params, tokens, full_config, Auto()))
    return np.asarray(jax.nn.log_softmax(run(weights(base_of(config)), tokens)))


def by_token(token: np.ndarray, logprob: np.ndarray) -> np.ndarray:
    """Return logprobs of all tokens in vocabulary order, from those sorted by likelihood."""
    ordered = np.empty_like(logprob)
    np.put_along_axis(ordered, token.astype(int), logprob, axis=-1)
    return ordered


# The first kind of model on every mesh, the others on one mesh, alternately of each partitioning.
EVERYWHERE = [(KINDS[0], place) for place in PLACES] + [
    (kind, PLACES[1 + number % 2])
    for number, kind in enumerate([*KINDS[1:], ("geglu", "t5"), ("geglu", "fixed")])
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "place"), EVERYWHERE)
def test_logits_at_every_position_match_a_full_pass(kind, place):
    block, pe = kind
    steps = 12
    fixed = pe == "fixed"
    config = small_config(
        block=block, pe=pe, seq=64 if fixed else WINDOW, attention_window=WINDOW, layers=3
    )
    prompts = random_prompts(config, LENGTHS)
    batch = network_of(config, place).batch(len(prompts))
    settings = sampler_settings(SAMPLED | {"seed": np.arange(6)}, 6)
    first = batch.insert(range(6), prompts, steps, settings, alternatives=config.n_vocab)
    parts = [jax.tree.map(lambda x: x[:, None], first)]
    for count in (1, 4, 6):  # the cache's ring buffer wraps around during a call
        parts.append(batch.decode(count, alternatives=config.n_vocab))
    tokens, token_logprobs, top, logprob = (
        np.concatenate(x, axis=1) for x in zip(*parts, strict=True)
    )
    actual = by_token(top, logprob)
    prompts = [prompt[-WINDOW:] for prompt in prompts]
    texts = [np.concatenate(pair) for pair in zip(prompts, tokens, strict=True)]
    padded = np.zeros((6, WINDOW + steps), np.uint32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    expected = full_logprobs(config, padded)
    for row, prompt in enumerate(prompts):
        here = slice(len(prompt) - 1, len(prompt) - 1 + steps)
        # Logprobs reach 18 here, where adjacent f32 values differ by 2e-6.
        np.testing.assert_allclose(actual[row], expected[row, here], atol=1e-5, rtol=1e-5)
    drawn = np.take_along_axis(actual, tokens[..., None].astype(int), axis=-1)[..., 0]
    np.testing.assert_array_equal(token_logprobs, drawn)


@pytest.mark.quick(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (1, 3), (4, 1), (4, 3)])
def test_write_changes_only_the_given_positions(rows, heads, dtype):
    """Compile as users do, unlike the other tests, so that the same kernels are tested."""
    rng = np.random.default_rng(3)

    def random_cache(slots: int) -> LayerCache:
        shape, of = (rows, heads, slots, 5), "float32" if dtype == "int8" else dtype
        cache = LayerCache(*(jnp.asarray(rng.normal(size=shape), of) for _ in range(2)))
        return cache.in_8_bits() if dtype == "int8" else cache

    cache, new, slots = random_cache(7), random_cache(1), rng.integers(0, 7, (rows, 1))
    lowered = jax.jit(write).lower(cache, new, slots)
    written = lowered.compile(AS_USERS_COMPILE)(cache, new, slots)
    for before, entry, after in zip(*map(jax.tree.leaves, (cache, new, written)), strict=True):
        expected = np.array(before)
        expected[np.arange(rows), :, slots[:, 0]] = np.asarray(entry)[:, :, 0]
        np.testing.assert_array_equal(np.asarray(after), expected)


def test_rows_out_of_range_are_not_written():
    rng = np.random.default_rng(4)

    def random_cache(*shape: int) -> LayerCache:
        return LayerCache(*(jnp.asarray(rng.normal(size=shape), "float32") for _ in range(2)))

    whole = random_cache(3, 2, 9, 4), random_cache(4, 2, 5, 4)
    rows, slots = np.array([3, 2, 4, 0]), np.array([0, 4, 1, 2])
    for cache, new in (whole, [x.in_8_bits() for x in whole]):
        written = jax.jit(write_rows)(cache, new, rows, slots)
        for before, entry, after in zip(*map(jax.tree.leaves, (cache, new, written)), strict=True):
            expected = np.array(before)
            expected[2, :, 4:9], expected[0, :, 2:7] = entry[1], entry[3]
            np.testing.assert_array_equal(after, expected)


def cache_results(text: str, shape: tuple[int, ...]) -> list[str]:
    """Return the operations of a compiled program that create an array as large as one cache.

    Operations that only pass an array on are excluded, as is the scatter that writes into it.
    """
    size = int(np.prod(shape))
    pass_through = {"parameter", "get-tuple-element", "bitcast", "scatter"}
    results, scatters = [], set()
    for computation in re.split(r"\n(?=%|ENTRY)", text):
        name = re.match(r"(?:ENTRY )?%(\S+)", computation)
        for line in computation.splitlines()[1:]:
            match = re.match(r"\s*(ROOT )?%\S+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(", line)
            if match is None:
                continue
            numbers = [int(n) for n in match[2].split(",")]
            if match[1] and match[3] == "scatter" and name:
                scatters.add(name[1])
            if int(np.prod(numbers)) == size and match[3] not in pass_through:
                results.append(line.strip())
    return [line for line in results if not any(f"calls=%{name}" in line for name in scatters)]


def compiled_decode(
    batch: Batch, function: Any = decode.decode, guesses: int = 0
) -> tuple[str, Any]:
    """Return the compiled text and the memory analysis of the decode step for `batch`."""
    generator, network = on_devices(batch)._generator, on_devices(batch)._state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "decode", function)
        run: Any = programs.compile_decode(generator.layout, None, 8, guesses=guesses)
        lowered = run.lower(on_devices(batch)._weights, network, batch.left, np.int32(3), None)
    compiled = lowered.compile(compiler_options=AS_USERS_COMPILE)
    return compiled.as_text(), compiled.memory_analysis()


@pytest.mark.slow
@pytest.mark.parametrize("place", [PLACES[1], PLACES[2]])
@pytest.mark.parametrize(
    ("changes", "in_pages"),
    [
        ({}, False),
        ({"weight_bits": 8, "int8_cache": True}, False),
        ({"weight_bits": 4, "d_model": 256}, False),
        ({}, True),
        ({"block": "llama", "key_heads": 2, "int8_cache": True}, True),
    ],
)
def test_generation_is_lowered_for_gpus(place, changes, in_pages):
    """Lower a prompt and a decode step: with guesses or, in pages, as the server's usual step."""
    network, pages = network_of(small_config(**changes), place), None
    if in_pages:
        page_PJ = np.arange(network.config.window // 4, dtype=np.int32)[None]
        pages = Chunks(np.array([0], np.int32), page_PJ, page_PJ)
    batch = network.batch(2, Pool(8, 4) if in_pages else None, guesses=0 if in_pages else 2)
    generator, texts = on_devices(batch)._generator, []

    def lowered(compile_program: Any) -> Any:
        """Lower a program for CUDA where it is called; its results are zeros, as for any device."""

        def program(*args: Any, **options: Any) -> Any:
            run = compile_program(*args, **options)

            def call(*inputs: Any) -> Any:
                traced = run.trace(*inputs)
                texts.append(traced.lower(lowering_platforms=("cuda",)).as_text())
                return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), traced.out_info)

            return call

        return program

    generator.prefill, generator.decode = map(lowered, (generator.prefill, generator.decode))
    settings = sampler_settings({"seed": 1}, 1)
    prompts = random_prompts(network.config, [9])
    batch.insert([0], prompts, 5, settings, alternatives=2, chunks=pages)
    batch.decode(2, 2, speculate=not in_pages)
    assert len(texts) == 2
    for text in texts:
        assert "custom_call" not in text  # which would be a function of the CPU's compiler
        assert ("xi8>" in text) == bool(changes)  # the head of a model in 4 bits has 8
        assert ("xi4>" in text) == (changes.get("weight_bits") == 4)


def test_only_batches_with_pages_need_their_kernel():
    network = network_of(small_config(paged_attention="pallas", seq=16))
    network.batch(2)
    with pytest.raises(InputError, match="'pallas', which requires a head size"):
        network.batch(2, Pool(8, 4))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES[:2])  # with jit, XLA cannot compile the interpreter
def test_the_kernel_for_pages_chooses_the_same_tokens(place, monkeypatch):
    monkeypatch.setattr(generators, "check_kernel", lambda *_: None)  # which refuses CPUs
    like = LayerCache.like

    def rounded(new: LayerCache, cache: LayerCache) -> LayerCache:
        """Round what is cached, as the kernel does with the float32 that CPUs use."""
        return jax.tree.map(lambda x: x.astype("bfloat16").astype(x.dtype), like(new, cache))

    monkeypatch.setattr(LayerCache, "like", rounded)
    keys = {"block": "llama", "n_heads": 8, "key_heads": 4, "head_size": 128, "seq": 32}
    config, rows = small_config(**keys), 2 * place[1]
    lengths = [5, 31] * place[1]  # the second row goes round
    page_PJ = np.arange(rows * 2, dtype=np.int32).reshape(rows, 2)[::-1] % 4
    pages = Chunks(np.zeros(rows, np.int32), page_PJ, page_PJ)

    def answers(kind: str) -> decode.Chosen:
        network = network_of(config.replace(paged_attention=kind), place)
        batch = network.batch(rows, Pool(4, 16))
        prompts = random_prompts(config, lengths)
        batch.insert(range(rows), prompts, 5, sampler_settings(GREEDY, rows), chunks=pages)
        return batch.decode(4, 1)

    expected = answers("xla")
    with pltpu.force_tpu_interpret_mode():
        actual = answers("pallas")
    np.testing.assert_array_equal(actual.token, expected.token)
    # Sums in float32 have another order, after which a few cached numbers round the other way, by
    # 2^-9 of themselves.
    np.testing.assert_allclose(actual.logprob, expected.logprob, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "rows", "guesses"),
    [
        (PLACES[0], 1, 0),
        (PLACES[0], 1, 3),
        (PLACES[0], 3, 3),
        (PLACES[1], 1, 3),
        (PLACES[2], 1, 0),
        (PLACES[4], 3, 0),
        (PLACES[4], 3, 3),
    ],
)
def test_a_decode_step_copies_no_cache(place, rows, guesses):
    _, dp, mp = place
    # No other array has this head size, and none that a step needs is as large as a cache.
    config = small_config(seq=512, head_size=100)
    batch = network_of(config, place).batch(rows * dp)
    shape = (rows, config.n_heads // mp, on_devices(batch)._state.slots, config.d_head)
    text, memory = compiled_decode(batch, guesses=guesses)
    assert text.count(" scatter(") >= 2 * config.layers
    assert cache_results(text, shape) == []
    cache_bytes = 4 * int(np.prod(shape))
    assert memory.alias_size_in_bytes >= 2 * config.layers * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes


@pytest.mark.slow
def test_a_copy_of_a_cache_is_detected():
    config = small_config(seq=512, head_size=12)
    batch = network_of(config).batch(3)
    shape = (3, config.n_heads, on_devices(batch)._state.slots, config.d_head)

    def rolled(weights: Any, state: Any, *counts: Any, **rest: Any) -> Any:
        state, *results = generation_decode(weights, state, *counts, **rest)
        caches = jax.tree.map(lambda x: jnp.roll(x, 1, axis=2), state.caches)
        return state._replace(caches=caches), *results

    generation_decode = decode.decode
    text, _ = compiled_decode(batch, rolled)
    assert cache_results(text, shape)


def generate_alone(
    network: CausalTransformer, prompt: np.ndarray, steps: int, **options: Any
) -> list[int]:
    tokens = network.generate(prompt[None], [len(prompt)], steps, options)
    return tokens[0].tolist()


@pytest.mark.quick(1)
@pytest.mark.parametrize("place", PLACES[:2])
def test_inserted_rows_generate_the_same_tokens_as_alone(place):
    """Insert prompts late, into used rows, with varying calls, and generate beyond the window."""
    config = small_config(seq=32)
    network = network_of(config, place)
    single = network_of(config)
    prompts = random_prompts(config, [5, 20, 1, 32, 11, 7])
    limits = [30, 9, 17, 12, 25, 40]
    options = [SAMPLED | {"seed": seed} for seed in range(6)]
    options[2] |= {"temp": 0.0}
    options[3] |= {"repetition_penalty": 1.3, "top_k": 9}
    options[4] |= {"presence_penalty": 1.0, "frequency_penalty": 0.5, "min_p": 0.02}
    options[5] |= {"logit_bias": {3: 4.0, 9: -100.0}}
    answers: list[list[int]] = [[] for _ in prompts]
    prompt_of_row: dict[int, int] = {}
    waiting = list(range(len(prompts)))
    batch = network.batch(4)
    for steps in [3, 1, 8, 2, 5] * 8:
        free = [row for row in range(4) if batch.left[row] == 0][:2]
        for row in free:
            if waiting:
                prompt_of_row[row] = index = waiting.pop(0)
                settings = sampler_settings(options[index], 1)
                first = batch.insert([row], [prompts[index]], limits[index], settings)
                answers[index].append(int(first.token[0]))
        left = batch.left.copy()
        tokens = batch.decode(steps).token
        for row, index in prompt_of_row.items():
            answers[index] += tokens[row, : min(left[row], steps)].tolist()
    for prompt, limit, option, answer in zip(prompts, limits, options, answers, strict=True):
        assert answer == generate_alone(single, prompt, limit, **option)


@pytest.mark.slow
def test_sampled_tokens_are_draws_from_logits_of_a_full_pass():
    """Apply the sampler to logits without a cache, with the same seed and number of tokens."""
    config = small_config()
    prompts = np.stack(random_prompts(config, [6, 6]))
    options = SAMPLED | {"seed": [11, 12]}
    actual = network_of(config).generate(prompts, [6, 6], 5, options)
    run, text = full_pass(config, base_of(config)), np.zeros((2, 16), np.uint32)
    text[:, :6] = prompts
    settings, count = sampler_settings(options, 2), jnp.zeros((2, config.n_vocab), int)
    for at in range(5):
        logits, made, none = run(text)[:, 5 + at], jnp.full(2, at), (count > 0, count)
        drawn = choose(logits, settings, made, lambda none=none: none)
        np.testing.assert_array_equal(actual[:, at], drawn)
        text[:, 6 + at] = drawn
    assert actual[0].tolist() != actual[1].tolist()


@pytest.mark.slow
def test_equal_prompts_get_different_answers():
    """In one call and in several; with a seed, they are repeatable, and those of single rows."""
    network, prompts = network_of(small_config()), np.ones((4, 6), int)

    def answers(**options: Any) -> list[Any]:
        return network.generate(prompts, [6] * 4, 16, SAMPLED | options).tolist()

    unseeded = answers() + answers()
    assert all(one != other for one, other in itertools.combinations(unseeded, 2))
    seeded = answers(seed=3)
    assert seeded == answers(seed=3) == answers(seed=[3, 4, 5, 6])
    assert all(one != other for one, other in itertools.combinations(seeded, 2))
    assert seeded[2] == generate_alone(network, prompts[2], 16, **SAMPLED, seed=5)


def test_seeds_of_processes_that_share_a_replica_agree(monkeypatch):
    """A row has the same seed in every process that holds it."""
    network, seeds = network_of(small_config()), []
    generator = network._generator

    def insert(_: Any, rows: Any, prompts: Any, lengths: Any, settings: Any, **__: Any) -> Any:
        seeds.append(settings.seed_B.tolist())
        raise KeyboardInterrupt

    monkeypatch.setattr(generators.Batch, "insert", insert)
    monkeypatch.setattr(generator.rows, "alone", False)
    for replicas in ([0, 1], [1, 2], [5]):
        monkeypatch.setattr(generator.rows, "replicas", replicas)
        prompts = np.ones((2 * len(replicas), 6), int)
        for options in ({}, {"seed": 2**32 - 3}):
            with pytest.raises(KeyboardInterrupt):
                network.generate(prompts, [6] * len(prompts), 3, options)
    first = 2**32 - 3
    assert seeds == [
        [0, 1, 2, 3], [first, first + 1, first + 2, 0],
        [2, 3, 4, 5], [first + 2, 0, 1, 2],
        [10, 11], [7, 8],
    ]  # fmt: skip


@pytest.mark.slow
def test_released_rows_generate_nothing_and_their_settings_are_ignored(monkeypatch):
    """Replace the sampler by one that returns the sum of all rows' top_k as every token."""

    def choose(logits_BV, settings, generated_B, occurrences, allowed_BW):
        return jnp.full(len(generated_B), settings.top_k_B.sum(), jnp.uint32)

    config = small_config()
    network = network_of(config)
    monkeypatch.setattr(decode, "choose", choose)
    batch = network.batch(4)
    options = {"top_k": np.array([1, 10, 20]), "repetition_penalty": 2.0, "top_p": 0.5}
    settings = sampler_settings(options, 3)
    batch.insert([0, 1, 3], random_prompts(config, [3, 4, 5]), [20, 20, 2], settings)
    assert batch.decode(2).token.tolist() == [[31, 11], [31, 11], [0, 0], [31, 31]]
    batch.release([1])
    assert batch.left.tolist() == [17, 0, 0, 0]
    assert batch.decode(2).token[0].tolist() == [1, 1]
    *idle, biases = decode.IDLE
    assert [x.tolist() for x in idle[:8]] == [1.0, 0, 0.0, 1.0, 0, 0.0, 0.0, 0.0]
    assert not biases.any()  # greedy, without a filter, a penalty or a bias


@pytest.mark.slow
def test_a_growing_cache_gives_the_same_tokens_as_a_large_one(monkeypatch):
    config = small_config(seq=64)
    network = network_of(config)
    prompts = random_prompts(config, [5, 9])
    settings = sampler_settings(SAMPLED, 2)

    def generate(smallest: int) -> tuple[list[int], np.ndarray]:
        monkeypatch.setattr(generators, "SMALLEST_CACHE", smallest)
        batch, slots = network.batch(2), []
        parts = [batch.insert([0, 1], prompts, 40, settings).token[:, None]]
        while batch.left.any():
            parts.append(batch.decode(7).token)
            slots.append(on_devices(batch)._state.slots)
        return slots, np.concatenate(parts, axis=1)[:, :40]

    slots, small = generate(8)
    assert slots == [16, 32, 32, 64, 64, 64]
    _, large = generate(64)
    np.testing.assert_array_equal(small, large)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("variant", "partitioning"),
    [
        ("f32/mp4_ga1", "shard_map"),
        ("f32/t5_mp4", "shard_map"),
        ("f32/t5_mp4", "jit"),
    ],
)
def test_greedy_tokens_match_the_original(variant, partitioning):
    golden = np.load(DATA / "original" / variant / "golden.npz")
    changes = {"partitioning": partitioning, "original_bias_copies": 4}
    network = network_at_step_0(variant, **changes)
    if "train.loss" in golden:  # the original generated after training
        for tokens in golden["train_tokens"]:
            network.train({"obs": tokens[..., :-1], "target": tokens[..., 1:]})
    # The original's cache has seq - 1 slots, so a prompt of seq tokens loses its first token.
    sliding = CausalTransformer(
        network.config.replace(attention_window=network.config.seq - 1), init=False
    )
    sliding.state = network.state
    for name, model in (("gen", network), ("gen_overflow", sliding)):
        ctx, lengths = golden[f"{name}.ctx"], golden[f"{name}.ctx_length"]
        expected = golden[f"{name}.tokens"]
        actual = model.generate(ctx, lengths, expected.shape[1], {"temp": 0.0})
        np.testing.assert_array_equal(actual, expected, err_msg=name)


@pytest.mark.slow
def test_calls_with_similar_lengths_share_compiled_functions():
    network = network_of(small_config(seq=64))
    generator: Any = network._generator
    prompts = np.ones((4, 40), int)

    def compilations() -> list[int]:
        return [
            run._cache_size()
            for run in (
                *(generator.prefill(None, width, IN_ROWS, False) for width in (32, 64)),
                generator.decode(None, MOST_STEPS, IN_ROWS, 0, False),
            )
        ]

    network.generate(prompts, [17] * 4, 9, SAMPLED)
    assert compilations() == [1, 0, 1]
    # Other lengths in the same bucket, other settings, more tokens, or three rows instead of four.
    network.generate(prompts, [32, 17, 20, 1], 40, GREEDY | {"repetition_penalty": 1.1})
    network.generate(prompts[:3], [25] * 3, 1)
    assert compilations() == [1, 0, 1]
    network.generate(prompts, [33] * 4, 3)
    assert compilations() == [1, 1, 1]


def test_repetition_penalty_matches_hugging_face():
    torch = pytest.importorskip("torch")
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(3)
    logits = rng.normal(size=(4, 30)).astype(np.float32)
    text = rng.integers(0, 30, (4, 9))
    seen = np.zeros((4, 30), bool)
    np.put_along_axis(seen, text, True, axis=1)
    processor = RepetitionPenaltyLogitsProcessor(penalty=1.7)
    expected = processor(torch.tensor(text), torch.tensor(logits.copy()))
    actual = penalize(jnp.asarray(logits), jnp.asarray(seen), 1.7)
    np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [1.5, 0.7])
def test_the_penalty_applies_to_tokens_of_the_prompt_and_the_answer(penalty):
    config = small_config(seq=32)
    prompt = random_prompts(config, [9])[0]
    actual = generate_alone(network_of(config), prompt, 12, temp=0.0, repetition_penalty=penalty)
    text, run = prompt.tolist(), full_pass(config, base_of(config))
    for token in actual:
        padded = np.zeros((1, 32), np.uint32)
        padded[0, : len(text)] = text
        logits = np.array(run(padded)[0, len(text) - 1])
        for seen in set(text):
            logits[seen] *= 1 / penalty if logits[seen] > 0 else penalty
        assert token == logits.argmax()
        text.append(token)


@pytest.mark.slow
def test_presence_and_frequency_penalties_and_biases_apply_to_the_answer():
    config = small_config(seq=32)
    prompt = random_prompts(config, [9])[0]
    network = network_of(config)
    plain = generate_alone(network, prompt, 12, temp=0.0)
    banned, raised = plain[0], plain[-1]
    options = {
        "presence_penalty": 0.9,
        "frequency_penalty": 0.6,
        "logit_bias": {raised: 4.0, banned: -100},  # repeats a token until the penalties add up
    }
    actual = generate_alone(network, prompt, 12, temp=0.0, **options)
    run, answer = full_pass(config, base_of(config)), list[int]()
    for token in actual:
        padded = np.zeros((1, 32), np.uint32)
        text = [*prompt.tolist(), *answer]
        padded[0, : len(text)] = text
        logits = np.array(run(padded)[0, len(text) - 1])
        for chosen in set(answer):
            logits[chosen] -= 0.9 + 0.6 * answer.count(chosen)
        logits[raised] += 4
        logits[banned] -= 100
        assert token == logits.argmax()
        answer.append(token)
    # Each of the options has an effect, and so has the number of times a token was chosen.
    for changes in ({"presence_penalty": 0}, {"frequency_penalty": 0}, {"logit_bias": None}):
        assert generate_alone(network, prompt, 12, temp=0.0, **options | changes) != actual
    assert 1 < actual.count(raised) < 12
    once = {"presence_penalty": 1.5, "frequency_penalty": 0}
    assert generate_alone(network, prompt, 12, temp=0.0, **options | once) != actual


def test_a_bias_outside_the_vocabulary_is_refused():
    config = small_config()
    with pytest.raises(InputError, match=rf"logit_bias has the token id {config.n_vocab}, outside"):
        network_of(config).generate(
            np.ones((1, 4), int), [4], 2, {"logit_bias": {config.n_vocab: 1.0}}
        )


@pytest.mark.slow
def test_only_generate_frees_the_training_parameters():
    network = network_of(small_config())
    prompts = np.ones((1, 4), int)
    expected = network.generate(prompts, [4], 5, GREEDY)
    assert network.state is not None
    leaf = weakref.ref(jax.tree.leaves(network.state["params"])[0])
    network.only_generate()
    gc.collect()
    assert leaf() is None
    np.testing.assert_array_equal(network.generate(prompts, [4], 5, GREEDY), expected)
    with pytest.raises(InputError, match="no weights yet"):
        network.logits(prompts)
    with pytest.raises(InputError, match="no weights yet"):
        CausalTransformer(network.config, init=False).generate(prompts, [4], 5)


@pytest.mark.slow
def test_load_frees_the_weights_that_only_generate_keeps(tmp_path):
    network = network_of(small_config())
    network.save(tmp_path)
    network.wait()
    network.only_generate()
    leaf = weakref.ref(jax.tree.leaves(network._generator.weights(None))[0])
    network.load(tmp_path)
    gc.collect()
    assert leaf() is None


@pytest.mark.parametrize("steps", [0, MOST_STEPS + 1, 1.5])
def test_decode_refuses_an_invalid_number_of_tokens(steps):
    batch = network_of(small_config()).batch(1)
    with pytest.raises(InputError, match=f"steps is {steps}, expected .*1 to {MOST_STEPS}"):
        batch.decode(steps)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, -1], "rows has -1, expected 0 to 2"),
        ([3, 0], "rows has 3, expected 0 to 2"),
        ([1, 1], "rows has 1 more than once; insert one prompt into each row"),
        ([1], r"rows is \[1\], expected 2 whole numbers, one for each prompt"),
        ([0.0, 1.0], "expected 2 whole numbers"),
    ],
)
def test_insert_refuses_rows_that_a_batch_does_not_have(rows, message):
    network = network_of(small_config())
    batch, prompts = network.batch(3), random_prompts(network.config, [4, 5])
    with pytest.raises(InputError, match=message):
        batch.insert(rows, prompts, 3, sampler_settings({}, 2))
    assert batch.left.tolist() == [0, 0, 0]


def test_a_prompt_is_an_array_of_tokens():
    batch = network_of(small_config()).batch(1)
    with pytest.raises(InputError, match=r"prompt 0 has dtype int64 and shape \(\), expected"):
        batch.insert([0], [np.int64(5)], 3, sampler_settings({}, 1))


def test_a_number_of_rows_is_a_whole_number():
    with pytest.raises(InputError, match=r"rows is 2\.0, expected a whole number, at least 1"):
        network_of(small_config()).batch(2.0)


@pytest.mark.slow
@pytest.mark.parametrize("pe", get_args(get_args(Architecture.__annotations__["pe"])[0]))
def test_an_answer_may_use_every_position_of_the_window(pe):
    """The last token of the answer follows the last position, and needs none of its own."""
    config = small_config(pe=pe)
    lengths = np.array([1, 2, *np.random.default_rng(5).integers(3, 15, 2), 15, 16], np.int32)
    answers = config.seq + 1 - lengths
    prompts = random_prompts(config, list(lengths))
    batch = network_of(config).batch(len(prompts))
    settings = sampler_settings(GREEDY, len(prompts))
    tokens = batch.insert(range(len(prompts)), prompts, answers, settings).token[:, None]
    tokens = np.concatenate([tokens, batch.decode(config.seq - 1).token], axis=1)
    np.testing.assert_array_equal(batch.left, 0)
    rows = zip(prompts, tokens, answers, strict=True)
    texts = np.stack([np.concatenate([prompt, row[:count]]) for prompt, row, count in rows])
    assert texts.shape == (6, config.seq + 1)
    likeliest = full_logprobs(config, texts[:, :-1].astype(np.uint32)).argmax(-1)
    for text, best, length in zip(texts, likeliest, lengths, strict=True):
        np.testing.assert_array_equal(text[length:], best[length - 1 :])


@pytest.mark.slow
def test_exceeding_the_fixed_positions_is_refused():
    config = small_config(pe="fixed")
    batch = network_of(config).batch(1)
    settings = sampler_settings(GREEDY, 1)
    batch.insert([0], [np.ones(10, int)], 7, settings)
    with pytest.raises(InputError, match=r"have 18 tokens, but .* at most 17"):
        batch.insert([0], [np.ones(10, int)], 8, settings)
