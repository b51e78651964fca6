"""Weights that are NaN or infinite: an error that names them, wherever results would show it."""

import functools
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mesh_transformer
from mesh_transformer.generation import finite
from mesh_transformer.generation.finite import NO_TOKEN
from mesh_transformer.generation.pool import PAGE, Chunks, Pool
from mesh_transformer.generation.sampling import sampler_settings
from mesh_transformer.generation.stream import stream_tokens
from mesh_transformer.mesh.placement import Rows
from mesh_transformer.model import matrices
from mesh_transformer.model.casts import to_int8
from mesh_transformer.pod.fleet import Fleet
from mesh_transformer.pod.runner import NetworkRunner
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError, NonFiniteError
from tests.conftest import SMALL, random_batch

TOKEN = 9  # the token whose embedding `with_bad_token` damages
BAD = [np.nan, np.inf, -np.inf]
WAYS = {
    "one device": (1, 1, {}),
    "shard_map": (2, 4, {}),
    "jit": (2, 2, {"partitioning": "jit", "zero": 1}),
    "offload": (1, 2, {"offload": "params"}),
    "int8": (1, 1, {"weight_bits": 8, "int8_cache": True}),
    "int4": (1, 1, {"weight_bits": 4}),
}


def network_of(way: str, **changes: Any) -> CausalTransformer:
    dp, mp, own = WAYS[way]
    sizes = {"layers": 2, "cores_per_replica": mp, "tpu_size": dp * mp, "total_steps": 3}
    return CausalTransformer(SMALL | sizes | own | changes, devices=jax.devices()[: dp * mp])


def damaged(network: CausalTransformer, value: float, seed: int = 0) -> str:
    """Put a value into a random place of a random matrix of the layers; return its name."""
    assert network.state is not None
    params, rng = network.state["params"], np.random.default_rng(seed)
    paths, tree = jax.tree.flatten_with_path(params)
    places = [i for i, (path, x) in enumerate(paths) if path[0].key == "layers" and x.ndim > 2]
    place = int(rng.choice(places))
    leaves = [x for _, x in paths]
    changed = np.array(leaves[place])
    changed[tuple(rng.integers(changed.shape))] = value
    leaves[place] = jax.device_put(changed, leaves[place].sharding)
    network.state["params"] = jax.tree.unflatten(tree, leaves)
    return jax.tree_util.keystr(paths[place][0], simple=True, separator="/")


class FakeFleet(Fleet):
    """A fleet whose members all have the same rows; one runner in this process stands for them."""

    def __init__(self, runner: NetworkRunner, members: int):
        assert runner.network is not None
        super().__init__(runner.network.config)
        self.dp, self.members, self.replicas = 1, [runner] * members, [[0]] * members

    def call(self, method: str, *arguments: tuple[Any, ...], agree: float = 0.0) -> list[Any]:
        own = (arguments or [()])[0]
        return [getattr(self.members[0], method)(*own)] * len(self.members)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_results_of_such_weights_are_an_error_that_names_them(way):
    network = network_of(way)
    tokens = np.random.default_rng(0).integers(0, network.config.n_vocab, (2, 8))
    calls = {
        "generate": lambda: network.generate(tokens, [8, 5], 4),
        "greedy": lambda: network.generate(tokens, [8, 5], 4, {"temp": 0}),
        "score": lambda: network.score(tokens, 3),
        "logits": lambda: network.logits(tokens),
        "embed": lambda: network.embed(tokens, [8, 3]),
    }
    for value, (what, call) in itertools.product(BAD, calls.items()):
        network.init()
        name = damaged(network, value, seed=len(way))
        with pytest.raises(NonFiniteError, match=r"model's .* are NaN or infinite: ") as error:
            call()
        assert isinstance(error.value, ArithmeticError), (what, value)
        # Generation unstacks the layers; quantization spreads NaN over a column.
        named = name.rpartition("/")[2] in str(error.value)
        assert named or network.config.weight_bits, (what, value)
        assert "of the weights layers/" in str(error.value), (what, value)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantization_keeps_what_is_not_finite(value, bits):
    """The compiler's maximum may ignore NaN, which would become the integer 0."""
    rng = np.random.default_rng(bits)
    w = rng.normal(size=(64, 24)).astype(np.float32)
    w[:, 5] = 0
    quantize = jax.jit(
        functools.partial(to_int8, axis=0)
        if bits == 8
        else functools.partial(matrices._to_int4, axis=0, group=32)
    )
    clean = np.asarray(quantize(w)[1], np.float32)
    assert np.isfinite(clean).all()
    for _ in range(5):
        row, column = rng.integers(64), rng.integers(24)
        damaged = w.copy()
        damaged[row, column] = value
        scale = np.asarray(quantize(damaged)[1], np.float32)
        bad = np.zeros(scale.shape, bool)
        bad[(0, column) if bits == 8 else (row // 32, 0, column)] = True
        np.testing.assert_array_equal(~np.isfinite(scale), bad)
        np.testing.assert_array_equal(scale[~bad], clean[~bad])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["one device", "shard_map", "offload"])
def test_training_from_such_weights_blames_them(way, tmp_path, capsys):
    network = network_of(way, ckpt_every=1)
    name = damaged(network, np.nan)
    network.save(str(tmp_path / "bad"))
    network.close()
    batch = random_batch(network.config, 1, network.batch_size)
    loaded = CausalTransformer(network.config, devices=network.mesh.devices.flat, init=False)
    loaded.load(tmp_path / "bad")
    with pytest.raises(NonFiniteError, match=f"train: 1 of .* of the weights {name} are NaN"):
        loaded.train(batch)
    assert loaded.step == 0
    data = np.random.default_rng(0).integers(0, network.config.n_vocab, 500)
    with pytest.raises(NonFiniteError, match=f"of the weights {name} are NaN"):
        mesh_transformer.fit(loaded, data, tmp_path / "model")
    assert not list((tmp_path / "model").glob("step_*"))
    restored = CausalTransformer(network.config, devices=network.mesh.devices.flat, init=False)
    restored.restore(tmp_path / "bad")
    with pytest.raises(NonFiniteError, match=f"of the weights {name} are NaN"):
        restored.train(batch)
    restored.init()
    assert np.isfinite(float(restored.train(batch)["loss"]))
    for each in (loaded, restored):
        each.close()


@pytest.mark.slow
def test_a_pod_names_such_weights_and_goes_on():
    """One host, whose `NetworkRunner` is called in this process."""
    runner = NetworkRunner(0)
    runner.network = network_of("one device")
    name, vocabulary = damaged(runner.network, np.nan), runner.network.config.n_vocab

    cluster = FakeFleet(runner, 1)
    for _ in range(2):
        batch = cluster.batch(2)
        prompts = [np.arange(3) % vocabulary, np.arange(5) % vocabulary]
        with pytest.raises(NonFiniteError) as error:
            list(stream_tokens(batch, prompts, 4, sampler_settings({}, 2)))
        assert name.rpartition("/")[2] in str(error.value)
        assert "of the weights layers/" in str(error.value)


def with_bad_token(way: str = "one device", **changes: Any) -> CausalTransformer:
    """Return a network whose results are not finite for texts with `TOKEN`, and only for those."""
    network = network_of(way, **{"layers": 1} | changes)
    assert network.state is not None
    # Finite, because a product with one-hot rows would turn NaN in one row into NaN for all.
    embedding = network.state["params"]["embed"]["embedding"]
    embedding["w"] = embedding["w"].at[TOKEN].set(3e38)
    return network


@pytest.mark.slow
def test_only_the_rows_that_overflow_lack_a_token():
    network, rng = with_bad_token(), np.random.default_rng(1)
    prompts = [rng.integers(TOKEN + 1, network.config.n_vocab, 6) for _ in range(4)]
    settings = sampler_settings({"temp": [0, 1, 0, 1], "logit_bias": {TOKEN: -100}}, 4)
    expected = network.batch(4)
    first = expected.insert(range(4), prompts, [5] * 4, settings).token
    rest = expected.decode(4).token
    bad = [prompts[0], np.append(prompts[1], TOKEN), prompts[2], prompts[3]]
    for pool in (None, Pool(16, PAGE)):
        batch = network.batch(4, pool)
        chunks = None
        if pool is not None:
            slots = network.config.window // PAGE or 1
            page_PJ = np.arange(4 * slots, dtype=np.int32).reshape(4, slots)
            chunks = Chunks(np.zeros(4, np.int32), page_PJ, page_PJ)
        actual = batch.insert(range(4), bad, [5] * 4, settings, chunks=chunks).token
        later = batch.decode(4).token
        assert actual[1] == NO_TOKEN
        assert (later[1] == NO_TOKEN).all()
        others = [0, 2, 3]
        np.testing.assert_array_equal(actual[others], first[others])
        np.testing.assert_array_equal(later[others], rest[others])
        assert batch.bad_weights() == ""
    with pytest.raises(NonFiniteError, match="weights are finite, so an activation has overflowed"):
        network.generate([[TOKEN]], [1], 2)


@pytest.mark.slow
@pytest.mark.parametrize("paged", [True, False], ids=["pages", "rows"])
@pytest.mark.parametrize("way", ["one device", "shard_map", "jit", "int8"])
def test_rows_are_as_new_after_texts_that_overflow(way, paged):
    """A probability of 0 times the value of an earlier text must be 0, not NaN."""
    network, rng = with_bad_token(way, layers=2, seq=64), np.random.default_rng(len(way))
    vocabulary, window = network.config.n_vocab, network.config.window
    pages = 4 * window // PAGE // network.dp
    settings = sampler_settings({"temp": [0, 1, 0, 1], "logit_bias": {TOKEN: -100}}, 4)
    lengths = rng.integers(window // 2 + 1, window - 8, 4)
    prompts = [rng.integers(TOKEN + 1, vocabulary, length) for length in lengths]
    page_PJ = np.arange(4 * window // PAGE, dtype=np.int32).reshape(4, -1) % pages
    page_PJ = page_PJ if paged else page_PJ[:, :0]
    begins = [np.zeros(4, np.int32), np.minimum(lengths // 2, window // 2).astype(np.int32)]

    def answers(texts: list[np.ndarray], batch: Any, *, chunks: bool = False) -> list[Any]:
        results, begun = [], begins[0]
        for begin in begins[1:] if chunks else []:
            parts = [text[:end] for text, end in zip(texts, begin, strict=True)]
            place = Chunks(begun, page_PJ, page_PJ)
            batch.insert(range(4), parts, [1] * 4, settings, chunks=place)
            begun = begin
        place = Chunks(begun, page_PJ, page_PJ) if paged or chunks else None
        results.append(batch.insert(range(4), texts, [9] * 4, settings, chunks=place).token)
        results.append(batch.decode(8).token)
        batch.release(range(4))
        return results

    pool = Pool(pages, PAGE) if paged else None
    used, bad = network.batch(4, pool), [text.copy() for text in prompts]
    for text in bad:
        text[rng.integers(len(text))] = TOKEN
    longest = [np.full(window, TOKEN)] * 4
    for chunks in (False, True):
        expected = answers(prompts, network.batch(4, pool), chunks=chunks)
        assert all((tokens < vocabulary).all() for tokens in expected)
        for texts in (bad, longest):
            overflowed = answers(texts, used)
            assert all((tokens == NO_TOKEN).all() for tokens in overflowed)
            for actual, right in zip(answers(prompts, used, chunks=chunks), expected, strict=True):
                np.testing.assert_array_equal(actual, right)


@pytest.mark.slow
def test_a_network_inside_a_transformation_names_the_function_to_use():
    network = network_of("one device", layers=1)
    assert network.state is not None
    params, tokens = network.state["params"], np.arange(8)[None]

    def wrong(params: Any) -> Any:
        network.state["params"] = params
        return jnp.sum(network.logits(tokens)[..., 3])

    def scale(factor: Any) -> Any:
        return factor * jnp.sum(network.score(tokens, 1).logprob)

    for transformed in (jax.grad(wrong), jax.jit(wrong), jax.value_and_grad(wrong)):
        with pytest.raises(InputError, match=r"mesh_transformer.apply\(network.params, tokens\)"):
            transformed(params)
    with pytest.raises(InputError, match="take the weights of a network for constants"):
        jax.jvp(scale, (1.0,), (1.0,))
    network.state["params"] = params

    def right(params: Any) -> Any:
        return jnp.sum(mesh_transformer.apply(params, tokens)[..., 3])

    params = network.params
    gradient = jax.grad(right)(params)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradient["layers"]))
    np.testing.assert_allclose(right(params), jnp.sum(network.logits(tokens)[..., 3]), rtol=1e-4)


@pytest.mark.slow
def test_weights_are_searched_once_until_there_are_others(monkeypatch):
    searched: list[int] = []

    def describe(weights: Any, mesh: Any) -> str:
        searched.append(len(jax.tree.leaves(weights)))
        return finite.describe_bad_weights(weights, mesh)

    monkeypatch.setattr("mesh_transformer.generation.generator.describe_bad_weights", describe)
    network = with_bad_token()
    tokens = np.full((2, 5), TOKEN)
    calls = [
        lambda: network.score(tokens, 1),
        lambda: network.embed(tokens, [3, 5]),
        lambda: network.generate(tokens, [3, 5], 2),
        lambda: next(stream_tokens(network.batch(2), tokens, 2, sampler_settings({}, 2))),
    ]

    def search(cause: str, times: int) -> None:
        searched.clear()
        for call in random.Random(times).choices(calls, k=12):
            with pytest.raises(NonFiniteError, match=cause):
                call()
        assert len(searched) == times

    search("an activation has overflowed", 1)
    search("an activation has overflowed", 0)
    name = damaged(network, np.inf)
    search(f"of the weights .*{name.rpartition('/')[2]} are NaN", 1)
    assert network.state is not None
    embedding = network.state["params"]["embed"]["embedding"]
    network.init()
    assert network.state is not None
    network.state["params"]["embed"]["embedding"] = embedding
    search("an activation has overflowed", 1)
    network.only_generate()
    search("an activation has overflowed", 0)  # these are the same arrays


@pytest.mark.slow
def test_one_of_several_processes_names_such_weights():
    """One process, which is made to take itself for one of several."""
    network = network_of("one device")
    name = damaged(network, np.nan).rpartition("/")[2]
    rows = Rows(network.mesh)
    rows.alone = False
    network._rows = network._generator.rows = rows
    tokens = np.random.default_rng(0).integers(0, network.config.n_vocab, (2, 8))
    named = f"NaN or infinite: 1 of .* weights layers/.*{name}"
    runner = NetworkRunner(0)
    runner.network = network
    fleet = FakeFleet(runner, 2)
    calls = [
        lambda: fleet.score(tokens, 3),
        lambda: fleet.embed(tokens, np.array([8, 3])),
        lambda: fleet.generate(tokens, [8, 5], 4),
    ]
    with pytest.raises(NonFiniteError, match=r"NaN or infinite$"):
        network.score(tokens, 3)  # others may have no such rows, and would not search
    for call in calls:
        with pytest.raises(NonFiniteError, match=named):
            call()
