"""Compare the numbers that the devices compute with independent ones: `bench --verify`.

Most checks compare the library with the formulas in `formulas.py`, others with results of the
original mesh-transformer-jax, or with JAX's CPU device.

Array names end in their shape: B batch, T query, S key, H heads, K head size, J pages of a row.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from mesh_transformer.cli import benchmark as command
from mesh_transformer.config import Config
from mesh_transformer.config_model import Attention
from mesh_transformer.generation.decode import Chosen
from mesh_transformer.generation.pool import PAGE, Chunks, Pool, check_kernel
from mesh_transformer.generation.sampling import sampler_settings
from mesh_transformer.mesh.declaration import Declaration, map_declared
from mesh_transformer.mesh.devices import make_mesh, named, use_virtual_devices
from mesh_transformer.mesh.parallel import Auto, Parallel
from mesh_transformer.mesh.placement import Rows
from mesh_transformer.model import attention, matrices, transformer
from mesh_transformer.model.cache import LayerCache
from mesh_transformer.model.dropout import PROBS, Dropout, drop_probs, sequence_keys
from mesh_transformer.training import step as steps
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError, run_script

formulas: Any = command.script("formulas", "verify")
ORIGINAL = Path(__file__).parents[2] / "tests" / "data" / "original"
DEVICES = 8  # virtual CPU devices on a machine without an accelerator
SIZES = {"layers": 2, "d_model": 64, "n_heads": 4, "n_vocab": 128, "seq": 64, "dtype": "float32"}
GPTJ = Config.from_dict(SIZES | {"pe_rotary_dims": 8, "z_loss": 0.1})
LLAMA = Config.from_dict(SIZES | {"block": "llama", "key_heads": 2, "ff_size": 160, "z_loss": 0.1})
RATES = {"dropout_embedding": 0.1, "dropout_attention": 0.2, "dropout_residual": 0.15}
LENGTHS = (1, 7, 16, 37)  # of prompts, in tokens
ANSWER = 12  # tokens
CALLS = 50
CURVE = 200  # steps
# XLA for GPUs adds some gradients in an order that changes from call to call, unless told not to.
SAME_ORDER = {"xla_gpu_deterministic_ops": True}


class SkippedError(Exception):
    """A check cannot run here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A comparison.

    Attributes:
      run: computes the largest difference.  Unless it says otherwise, differences are divided by
        the largest magnitude of the expected numbers.
      tolerance: the largest difference with which the check passes.
    """

    name: str
    run: Callable[[], float]
    tolerance: float


def difference(actual: Any, expected: Any) -> float:
    """Return the largest difference, divided by the largest expected magnitude."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def layout_of(c: Config, devices: list[Any] | None = None) -> steps.StateLayout:
    """Return the layout of a config on the first of JAX's devices, or on `devices`."""
    return steps.StateLayout(c, make_mesh(c, devices or jax.devices()[: c.tpu_size]))


def random_tokens(c: Config, *shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, c.n_vocab, shape).astype(np.uint32)


def random_params(c: Config) -> Any:
    """Return random weights that bfloat16 holds exactly.

    They are so large that attention is far from uniform.  Each column of a matrix has another
    magnitude.
    """
    rng = np.random.default_rng(4)

    def draw(d: Declaration) -> np.ndarray:
        noise = rng.normal(size=d.shape)
        if d.decay:
            x = 2 * c.d_model**-0.5 * noise * rng.uniform(0.5, 1.5, d.shape[-1])
        else:
            x = 1 + 0.1 * noise
        return x.astype(jnp.bfloat16).astype(np.float32)

    return map_declared(draw, transformer.declarations(c))


def with_matrices(change: Callable[..., np.ndarray], c: Config, params: Any) -> Any:
    """Return weights in which `change(matrix, axis of the inputs)` replaces what int8 rounds."""
    declared = transformer.declarations(c)
    changed = map_declared(lambda d, x: change(x, -2) if d.decay else x, declared, params)
    return changed | {"embed": params["embed"]}


def network_of(c: Config, params: Any, devices: list[Any] | None = None) -> CausalTransformer:
    layout = layout_of(c, devices)
    network = CausalTransformer(c, devices=list(layout.mesh.devices.flat), init=False)
    placed = jax.tree.map(jax.device_put, params, layout.shardings["params"])
    network.state = {"params": placed, "frozen": {}, **layout.fresh_history()}
    return network


def batch_of(tokens: np.ndarray) -> dict[str, np.ndarray]:
    return {"obs": tokens[..., :-1], "target": tokens[..., 1:]}


def logits(c: Config) -> float:
    params, tokens = random_params(c), random_tokens(c, 2, c.seq)
    return difference(network_of(c, params).logits(tokens), formulas.logits(c, params, tokens))


def gradients_function(layout: steps.StateLayout) -> Callable[..., Any]:
    """Return the compiled gradients of a training step: (params, batch) -> (gradients, metrics)."""
    specs = layout.specs["params"]
    measure = layout.partitioned(
        steps.gradients,
        (specs, {}, P(None, "dp")),
        (specs, dict.fromkeys(steps.MEASURED, P())),
        attention=layout.attention,
    )
    return jax.jit(
        lambda params, batch: measure(params, {}, batch),
        in_shardings=named(layout.mesh, (specs, P(None, "dp"))),
    )


def gradients(c: Config) -> float:
    """Compare the loss, and derivatives in a random direction of each array.

    A derivative in a direction of standard normal numbers has the standard deviation of the
    gradient's norm, by which its difference is divided.
    """
    params, batch = random_params(c), batch_of(random_tokens(c, 2, c.seq + 1))
    inputs: Any = {name: x[None] for name, x in batch.items()}
    drop = dropped(c) if c.drops else None
    if c.drops:
        inputs["key"] = sequence_keys(c.seed, jnp.int32(0), (1, 2))
    grads, metrics = gradients_function(layout_of(c))(params, inputs)
    most = formulas.logits(c, params, batch["obs"], drop).max(-1, keepdims=True)
    leaves, tree = jax.tree.flatten(params)

    def loss(index: int = 0, move: Any = 0.0) -> float:
        moved = [x + move if i == index else x for i, x in enumerate(leaves)]
        return formulas.loss(c, tree.unflatten(moved), batch, most, drop)

    rng, differences = np.random.default_rng(5), [abs(float(metrics["loss"]) / loss() - 1)]
    for index, grad in enumerate(jax.tree.leaves(grads)):
        grad = np.asarray(grad, np.float64)
        move = 1e-5 * rng.normal(size=grad.shape)
        # Their error, of the third order in 1e-5 and from the rounding of float64, is below 1e-8.
        expected = (loss(index, move) - loss(index, -move)) / 2
        differences.append(abs((grad * move).sum() - expected) / 1e-5 / np.linalg.norm(grad))
    return float(np.max(differences))  # NaN if one is


def dropped(c: Config) -> Any:
    """Return dropout of the first step, with the masks that JAX's CPU device draws."""

    def rate(place: int, layer: int) -> float:
        if layer == c.layers:
            return c.dropout_embedding
        return c.dropout_attention if place == PROBS else c.dropout_residual

    @functools.cache
    def kept(place: int, layer: int, shape: tuple[int, ...]) -> np.ndarray:
        with jax.default_device(jax.devices("cpu")[0]):
            keys = sequence_keys(c.seed, jnp.int32(0), (1, shape[0]))[0]
            own, share = Dropout(keys).of_layer(layer), rate(place, layer)
            if len(shape) == 4:  # attention probabilities
                key_BH = own.head_keys(shape[1], Auto())
                return np.asarray(drop_probs(jnp.ones(shape), key_BH, share) > 0)
            return np.asarray(own.kept(place, share, *shape[1:]))

    return lambda place, layer, x: x * kept(place, layer, x.shape) / (1 - rate(place, layer))


def kept_share() -> float:
    """Return by how many standard deviations the share of kept entries is off, at most."""
    rate, shape = 0.1, (128, 256)
    masks = Dropout(sequence_keys(0, jnp.int32(3), (1, 12))[0]).kept(0, rate, *shape)
    deviation = math.sqrt(rate * (1 - rate) / math.prod(shape))
    return float(np.abs(np.asarray(masks).mean((1, 2)) - (1 - rate)).max() / deviation)


def decode(c: Config, way: str = "rows") -> float:
    """Compare the logprobs of all tokens at each step of answers with a pass over their texts.

    The rows of the batch have held other texts before.

    Args:
      way: how the batch stores keys and values, or reads prompts: "rows", "pages" or "chunks".
    """
    params, rows = random_params(c), len(LENGTHS)
    if c.weight_bits:
        params = with_matrices(formulas.quantizable, c, params)
    pages = c.seq // PAGE if way == "pages" else 0
    batch = network_of(c, params).batch(rows, Pool(rows * pages, PAGE) if pages else None)
    page_PJ = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)[::-1]
    settings = sampler_settings({"temp": 1.0, "top_p": 0.9, "seed": 3}, rows)

    def answers(prompts: list[np.ndarray]) -> Chosen:
        begin = np.zeros(rows, np.int32)
        if way == "chunks":
            halves = [prompt[: max(len(prompt) // 2, 1)] for prompt in prompts]
            chunks = Chunks(begin, page_PJ, page_PJ)
            batch.insert(range(rows), halves, 1, settings, chunks=chunks)
            begin = np.array([len(prompt) // 2 for prompt in prompts], np.int32)
        chunks = None if way == "rows" else Chunks(begin, page_PJ, page_PJ)
        options: Any = {"alternatives": c.n_vocab, "chunks": chunks}
        first = batch.insert(range(rows), prompts, ANSWER, settings, **options)
        parts = [jax.tree.map(lambda x: x[:, None], first)]
        parts += [batch.decode(count, c.n_vocab) for count in (1, ANSWER - 2)]
        batch.release(range(rows))
        return jax.tree.map(lambda *xs: np.concatenate(xs, axis=1), *parts)

    answers([random_tokens(c, 50, seed=100 + row) for row in range(rows)])
    prompts = [random_tokens(c, length, seed=length) for length in LENGTHS]
    answer = answers(prompts)
    if c.weight_bits:
        params = with_matrices(formulas.in_8_bits, c, params)
    actual, expected = np.empty_like(answer.top_logprob), []
    np.put_along_axis(actual, answer.top_token.astype(int), answer.top_logprob, axis=-1)
    for prompt, tokens in zip(prompts, answer.token, strict=True):
        text = np.concatenate((prompt, tokens[:-1]))[None]
        logprobs = formulas.logprobs(formulas.logits(c, params, text))
        expected.append(logprobs[0, len(prompt) - 1 :])
    return difference(actual, expected)


def int8_matmul() -> float:
    """Compare the product of two matrices that are rounded to 8 bits for it."""
    rng = np.random.default_rng(6)
    x = formulas.quantizable(rng.normal(size=(96, 256)) * rng.uniform(0.5, 2, (96, 1)), 1)
    w = formulas.quantizable(rng.normal(size=(256, 160)) * rng.uniform(0.5, 2, 160), 0)
    product = jax.jit(lambda x, w: matrices.rounded_matmul(x, w, frozenset(["forward"])))
    return difference(product(x, w), formulas.in_8_bits(x, 1) @ formulas.in_8_bits(w, 0))


def int8_cache() -> float:
    """Compare attention to keys and values in 8 bits."""
    q, k, v, _ = attention_inputs(64, 3)
    sizes = np.linspace(0.5, 2, k.shape[1])[:, None, None]
    k, v = (formulas.quantizable(x * sizes, -1) for x in (k, v))

    @jax.jit
    def attend(q: Array, k: Array, v: Array) -> Array:
        position_1T = jnp.arange(q.shape[1])[None]
        cache = LayerCache(*(jnp.moveaxis(x, 1, 2) for x in (k, v))).in_8_bits()
        bias_BHTS = attention.causal_bias(position_1T, position_1T, q.shape[1])
        return attention.attend_to_cache(q, cache, bias_BHTS)

    with jax.default_matmul_precision("highest"):
        actual = attend(q, k, v)
    k, v = (formulas.in_8_bits(x, -1) for x in (k, v))
    probs = formulas.attention_probs(q, k, math.inf)
    return difference(actual, formulas.weighted_sum(probs, v))


def attention_inputs(head: int, scale: float) -> list[np.ndarray]:
    """Return q, k, v and a gradient, float64 that bfloat16 holds exactly, [B, T, H, K] each.

    Args:
      scale: standard deviation of the scores.
    """
    rng = np.random.default_rng(7)
    inputs = [rng.normal(size=(2, 256, 2, head)) for _ in range(4)]
    inputs[0] *= scale
    return [x.astype(jnp.bfloat16).astype(np.float64) for x in inputs]


def attention_config(name: str, dtype: str) -> Config:
    # GPT-J's on TPUs, and one that cuDNN supports on all GPUs; powers of 4 scale queries exactly.
    head = 64 if jax.default_backend() == "gpu" else 256
    sizes = {"layers": 1, "d_model": 2 * head, "n_heads": 2, "n_vocab": 16, "seq": 256}
    return Config.from_dict(sizes | {"dtype": dtype, "attention": name})


def accepted(name: str, dtype: str) -> bool:
    """Return whether these devices can compute attention with this backend."""
    try:
        attention.attention_backend(attention_config(name, dtype), jax.devices()[0])
    except InputError:
        return False
    return name != "splash_interpreted" or jax.default_backend() == "cpu"


def accepts_kernel(c: Config) -> bool:
    """Return whether these devices have the kernel for attention over pages."""
    try:
        check_kernel(c, layout_of(c).mesh, len(LENGTHS), 0, Pool(0, PAGE))
    except InputError:
        return False
    return True


def backend(name: str, dtype: str, differentiate: bool) -> float:
    """Compare causal attention, or its gradients, with and without a window."""
    c = attention_config(name, dtype)
    # In bfloat16, scores reach 40, which a softmax that is not in float32 rounds by up to 0.1.
    q, k, v, g = attention_inputs(c.d_head, 10 if dtype == "bfloat16" else 3)
    differences = []
    for window in (c.seq, 130):
        program = attention_program(c.replace(attention_window=window), differentiate)
        actual = program(*(jnp.asarray(x, dtype) for x in (q, k, v, g)))
        if differentiate:
            expected = formulas.attention_gradients(q, k, v, g, window)
        else:
            expected = [formulas.weighted_sum(formulas.attention_probs(q, k, window), v)]
        differences += map(difference, actual, expected)
    return float(np.max(differences))  # NaN if one is


def attention_program(c: Config, differentiate: bool) -> Callable[..., tuple[Array, ...]]:
    """Return a jitted function from q, k, v and a gradient to attention, or to its gradients."""

    def run(*inputs: Array, config: Config, par: Parallel) -> tuple[Array, ...]:
        def attended(q: Array, k: Array, v: Array) -> Array:
            attend = attention.attend_function(config, par, q.shape[1], None)
            if attend is not None:
                return attend(q, k, v, None)
            position_1T = jnp.arange(q.shape[1])[None]
            bias_BHTS = attention.causal_bias(position_1T, position_1T, config.window)
            cache = LayerCache(*(jnp.moveaxis(x, 1, 2) for x in (k, v)))
            return attention.attend(q, cache, bias_BHTS)

        result, pull = jax.vjp(attended, *inputs[:3])
        return pull(inputs[3]) if differentiate else (result,)

    outputs = (P(),) * (3 if differentiate else 1)
    return jax.jit(layout_of(c).partitioned(run, (P(),) * 4, outputs, attention=c.attention))


def golden_network(folder: str, dtype: str) -> tuple[CausalTransformer, Any]:
    """Return a network with parameters of the original program, and its recorded numbers."""
    variant = ORIGINAL / folder
    if not variant.is_dir():
        raise SkippedError("needs tests/data of a checkout")
    # The original's mesh was 2 x 4, and each of 4 shards had copies of some biases.
    keys = {"cores_per_replica": 1, "per_replica_batch": 2, "original_bias_copies": 4}
    values = json.loads((variant.parent / "config.json").read_text()) | keys | {"dtype": dtype}
    c = Config.from_dict({key: value for key, value in values.items() if key[0] != "_"})
    network = CausalTransformer(c, devices=jax.devices()[:1], init=False)
    network.load(str(variant), fresh_opt=True)
    return network, np.load(variant.parent / "golden.npz")


def golden_logits() -> float:
    network, golden = golden_network("f32/mp4_ga1/step_0", "float32")
    return difference(network.logits(golden["eval_tokens"][:, :-1]), golden["eval_step0.logits"])


def golden_losses_in_bf16() -> float:
    network, golden = golden_network("bf16/mp4_ga1/slim_step_10", "bfloat16")
    actual = network.eval(batch_of(golden["eval_tokens"]))["loss"]
    return difference(actual, golden["eval_step10.loss"])


def golden_training() -> float:
    """Compare the losses of ten steps, or return how many tokens of greedy answers then differ."""
    network, golden = golden_network("f32/mp4_ga1/step_0", "float32")
    losses = [float(network.train(batch_of(tokens))["loss"]) for tokens in golden["train_tokens"]]
    prompts, expected = (golden["gen.ctx"], golden["gen.ctx_length"]), golden["gen.tokens"]
    actual = network.generate(*prompts, expected.shape[1], {"temp": 0.0})
    differ = np.count_nonzero(actual != expected)
    return float(differ or difference(losses, golden["train.loss"]))


def curve(c: Config, devices: list[Any]) -> np.ndarray:
    """Return the losses of training on texts whose tokens follow a rule, but for a tenth."""
    rng = np.random.default_rng(8)
    rule, losses = rng.permutation(c.n_vocab), []
    with jax.default_device(devices[0]):
        network = network_of(c, random_params(c), devices)
        for _ in range(CURVE):
            tokens = random_tokens(c, 1, 8, c.seq + 1, seed=int(rng.integers(2**31)))
            for at in range(c.seq):
                follows = rng.random((1, 8)) < 0.9
                tokens[..., at + 1] = np.where(follows, rule[tokens[..., at]], tokens[..., at + 1])
            losses.append(network.train(batch_of(tokens))["loss"])
    return np.array(jax.device_get(losses))


def loss_curve() -> float:
    """Compare with JAX's CPU device or, on a CPU, `jit` on a 2 x 2 mesh with one device."""
    c = GPTJ.replace(seq=32, z_loss=1e-4, lr=3e-3, end_lr=3e-4, warmup_steps=10, anneal_steps=CURVE)
    c = c.replace(per_replica_batch=8)
    other, devices = c, jax.devices()[:1]
    if jax.default_backend() == "cpu":
        if len(devices := jax.devices()[:4]) < 4:
            raise SkippedError("needs 4 devices, or an accelerator")
        other = c.replace(partitioning="jit", cores_per_replica=2, tpu_size=4, per_replica_batch=4)
    expected, actual = curve(c, jax.devices("cpu")[:1]), curve(other, devices)
    learned = actual[-20:].mean() < actual[0] / 2
    return difference(actual, expected) if learned else math.inf


def compiled(layout: steps.StateLayout, program: Any, *inputs: Any) -> Any:
    gpu = layout.mesh.devices.flat[0].platform == "gpu"
    return program.lower(*inputs).compile(SAME_ORDER if gpu else None)


def same_calls() -> float:
    """Return how many of 50 calls of a training step's gradients give other bits than the first."""
    c = GPTJ.replace(d_model=512, head_size=128, ff_size=2048, layers=1, seq=256, n_vocab=1024)
    layout, tokens = layout_of(c), random_tokens(c, 1, 2, c.seq + 1)
    inputs = jax.device_put((random_params(c), batch_of(tokens)), jax.devices()[0])
    run = compiled(layout, gradients_function(layout), *inputs)
    first = run(*inputs)

    def same() -> bool:
        equal = jax.tree.map(lambda x, y: bool((x == y).all()), run(*inputs), first)
        return all(jax.tree.leaves(equal))

    return float(sum(not same() for _ in range(CALLS)))


def meshes() -> list[tuple[int, int]]:
    """Return (dp, mp) of the meshes that there are devices for, the largest first."""
    return [(dp, mp) for dp, mp in ((2, 4), (2, 2), (1, 2)) if dp * mp <= len(jax.devices())]


def same_bits() -> float:
    """Return how many arrays of two steps of a virtual mesh differ between the meshes."""
    c = GPTJ.replace(virtual_mesh=[2, 4], seq=32, warmup_steps=0)

    def trained(dp: int, mp: int) -> list[bytes]:
        own = c.replace(cores_per_replica=mp, tpu_size=dp * mp)
        layout, state = layout_of(own), network_of(own, random_params(c)).state
        rows, train, metrics = Rows(layout.mesh), None, []
        assert state is not None
        state["opt_state"] = steps.compile_opt_state(layout)(state["params"])
        for seed in range(2):
            tokens = random_tokens(c, 1, 2, c.seq + 1, seed=seed)
            batch = rows.place(batch_of(tokens), P(None, "dp"))
            train = train or compiled(layout, steps.compile_train(layout), state, batch)
            state, measured = train(state, batch)
            metrics.append(measured)
        return [np.asarray(x).tobytes() for x in jax.tree.leaves((state, metrics))]

    first, *others = (trained(*mesh) for mesh in (*meshes(), (1, 1)))
    return float(max(sum(map(bytes.__ne__, first, other)) for other in others))


def checks() -> Iterator[Check]:
    """Yield all checks for the present devices, the most valuable first."""
    on_cpu = jax.default_backend() == "cpu"
    models = {"GPT-J": GPTJ, "Llama": LLAMA}
    # Some 30 roundings by 2^-24, on accelerators up to 2^-21, that the matrices enlarge; with
    # operands that are rounded as in TF32, the differences are 5e-4 or more.
    exact = 1e-4
    for name, c in models.items():
        yield Check(f"logits of {name}, float32", partial(logits, c), exact)
    yield Check("logits of the original", golden_logits, exact)
    for name, c in models.items():
        yield Check(f"gradients of {name}, float32", partial(gradients, c), exact)
    for name, c in models.items():
        bf16 = c.replace(dtype="bfloat16")
        # Some 24 roundings by 2^-9 that add up, and the matrices enlarge.
        yield Check(f"logits of {name}, bfloat16", partial(logits, bf16), 0.1)
        # Twice as many, of smaller numbers; a wrong sign, factor or term is off by more.
        yield Check(f"gradients of {name}, bfloat16", partial(gradients, bf16), 0.25)
    # Scores of up to 12 in float32 are rounded by 2^-21 of themselves at most.  In bfloat16,
    # probabilities and results are rounded by 2^-9, and two more products in gradients.
    for dtype, tolerances in (("float32", (2e-5, 2e-5)), ("bfloat16", (2**-7, 2**-6))):
        for name in get_args(Attention)[1:]:
            if not accepted(name, dtype):
                continue
            for prefix, tolerance in zip(("", "gradients of "), tolerances, strict=True):
                run = partial(backend, name, dtype, bool(prefix))
                yield Check(f"{prefix}attention {name}, {dtype}", run, tolerance)
    # Integers are summed exactly, and multiplied by two scales, which are rounded by up to 2^-21.
    yield Check("int8 matmul", int8_matmul, 2e-6)
    yield Check("attention to an int8 cache", int8_cache, exact)
    int8 = GPTJ.replace(weight_bits=8)
    yield Check("decode of GPT-J, int8 weights", partial(decode, int8), exact)
    yield Check("decode of Llama", partial(decode, LLAMA), exact)
    yield Check("decode of Llama, cache in pages", partial(decode, LLAMA, "pages"), exact)
    yield Check("decode of GPT-J, prompts in chunks", partial(decode, GPTJ, "chunks"), exact)
    # Keys and values are rounded by 1/254 of the largest of a head, and the matrices enlarge that.
    rounded = LLAMA.replace(int8_cache=True)
    yield Check("decode of Llama, int8 cache", partial(decode, rounded), 0.05)
    if not on_cpu:  # where generation is in float32
        bf16 = LLAMA.replace(dtype="bfloat16")
        yield Check("decode of Llama, bfloat16", partial(decode, bf16), 0.1)  # as its logits
        kernel = bf16.replace(head_size=128, paged_attention="pallas")
        if accepts_kernel(kernel):
            yield Check("decode of Llama, kernel for pages", partial(decode, kernel, "pages"), 0.1)
    dropped = GPTJ.replace(**RATES)
    yield Check("gradients of GPT-J with dropout, float32", partial(gradients, dropped), exact)
    # The largest of 12 normal deviations is beyond 5 in fewer than one of 100,000 cases.
    yield Check("share that dropout keeps, in deviations", kept_share, 5)
    # Ten steps of Adam enlarge the rounding of float32, on accelerators by 2^-21, tenfold.
    yield Check("training and answers of the original", golden_training, 2e-5)
    # The original rounded activations to 8 bits, at other places.
    yield Check("losses of the original, bfloat16", golden_losses_in_bf16, 5e-3)
    # 200 steps of Adam enlarge the rounding of float32 ten thousand times.
    yield Check("losses of 200 steps", loss_curve, 1e-3)
    # The same program and inputs: no rounding differs.
    yield Check(f"{CALLS} equal calls, number that differ", same_calls, 0)
    for dp, mp in meshes()[:1]:
        for partitioning in ("shard_map", "jit"):
            own = LLAMA.replace(partitioning=partitioning, cores_per_replica=mp, tpu_size=dp * mp)
            where = f"Llama on {dp} x {mp}, {partitioning}"
            yield Check(f"gradients of {where}", partial(gradients, own), exact)
            yield Check(f"decode of {where}", partial(decode, own), exact)
        # Sums have the same order on each mesh.
        yield Check("same bits on each mesh, arrays that differ", same_bits, 0)


def outcome(check: Check) -> dict[str, Any]:
    """Run a check, and return what --json prints for it."""
    began, value, status, note = time.perf_counter(), None, "failed", None
    try:
        value = check.run()
        status = "passed" if value <= check.tolerance else "failed"
        if not math.isfinite(value):  # which is no JSON
            value, note = None, f"the difference is {value}"
    except SkippedError as error:
        status, note = "skipped", str(error)
    except Exception as error:  # whatever the compiler or device raises, the next check may run
        note = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    seconds = round(time.perf_counter() - began, 1)
    values = {"status": status, "difference": value, "tolerance": check.tolerance}
    return {"name": check.name} | values | {"seconds": seconds, "note": note}


def line(result: dict[str, Any]) -> str:
    value, note = result["difference"], result["note"]
    shown = "" if value is None else f"{value:.2g}"
    text = f"{result['status']:<8}{result['name']:<52}{shown:>8} of {result['tolerance']:<8.2g}"
    return f"{text}{result['seconds']:>6.1f} s{'' if note is None else f'  {note}'}"


def results(
    selected: Iterable[Check],
    minutes: float | None = None,
    show: Callable[[str], None] = tqdm.write,
) -> list[dict[str, Any]]:
    """Run checks, also after one fails, and show a line for each.

    Args:
      minutes: checks that would begin later than this are skipped.
    """

    def late() -> float:
        raise SkippedError(f"--minutes {minutes:g} are over")

    began, done = time.perf_counter(), []
    with tqdm(list(selected), unit="check", leave=False, disable=None) as bar:
        for check in bar:
            bar.set_description(check.name)
            if minutes is not None and time.perf_counter() - began > 60 * minutes:
                check = dataclasses.replace(check, run=late)
            done.append(outcome(check))
            show(line(done[-1]))
    return done


def run(args: argparse.Namespace) -> int:
    """Run all checks for `bench --verify`; return the exit status, 1 if one failed."""
    if args.every_host:
        raise InputError("--verify checks the devices of a single host; remove --every-host")
    use_virtual_devices(DEVICES)
    about = command.run_info(args, command.config_of(args), jax.devices()[0])
    about = {key: about[key] for key in ("date", "command", "versions", "platform", "device")}
    about = {"mode": "verify", "devices": len(jax.devices())} | about
    show = (lambda text: None) if args.json else tqdm.write
    show("\n".join(f"{key}: {value}" for key, value in about.items()))
    done = results(checks(), args.minutes, show)
    count = collections.Counter(result["status"] for result in done)
    show(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    if args.json:
        print(json.dumps(about | {"checks": done}))
    return int(count["failed"] > 0)


if __name__ == "__main__":
    sys.argv.insert(1, "--verify")
    run_script(command.main)
