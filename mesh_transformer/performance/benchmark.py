"""How fast a config is on devices that are here: its train step, and decoding.

What is measured are the library's own compiled functions, by the host's clock, each time until the
devices are done.  Bytes are of one device where nothing else is said.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.generation.batch import MOST_STEPS, Generator
from mesh_transformer.generation.sampling import sampler_settings
from mesh_transformer.mesh import accelerators
from mesh_transformer.mesh.devices import named
from mesh_transformer.mesh.placement import Rows
from mesh_transformer.model import flops
from mesh_transformer.model.attention import attention_backend
from mesh_transformer.performance import device_trace
from mesh_transformer.performance.hlo import planned_memory
from mesh_transformer.training import step as steps
from mesh_transformer.util import InputError

PROFILED_STEPS, TOLD_OPERATIONS = 3, 10
# A CPU's peak beside a step: what it keeps up, and with the matmuls that suit it best.
PEAK_SIZES, PEAK_SECONDS = (512, 1024, 2048), 0.3


@dataclasses.dataclass(frozen=True)
class Limits:
    """What all devices of a mesh can do together, FLOP/s and bytes/s, and who says so."""

    hardware: str
    flops: float
    bandwidth: float
    source: str


def limits(name: str | None, mesh: Mesh, dtype: str) -> Limits | None:
    """The limits of a mesh's devices, or of as many of the hardware of that name.

    None for a device that the table does not know.  CPU devices are virtual: all of them together
    are one machine, whose limits are measured.
    """
    if name is None:
        device = mesh.devices.flat[0]
        one = (
            accelerators.hardware("cpu", dtype)
            if device.platform == "cpu"
            else accelerators.hardware_of(device)
        )
    else:
        one = accelerators.hardware(name, dtype)
    if one is None:
        return None
    count = 1 if one.name == "cpu" else mesh.size
    dense = f"{dtype} matmul" if one.name == "cpu" else "dense bf16"
    return Limits(one.name, count * one.peak, count * one.hbm, f"{dense}, {one.source}")


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a train step's time comes to.  FLOPs are PaLM's; None: the peak is not known."""

    tokens_per_second: float
    tflops: float  # a second, of all devices
    mfu: float | None
    hfu: float | None  # of what is really multiplied, again or not


def speed(
    config: Config, tokens: int, seconds: float, peak: float | None, attention: str = "xla"
) -> Speed:
    """Of a step of so many tokens; `peak` is the FLOP/s of all devices together.

    Args:
      attention: what computes it, as `flash_attention.chosen` names it.
    """
    rate = tokens / seconds
    return Speed(
        rate,
        rate * flops.palm_flops_per_token(config) / 1e12,
        flops.mfu(config, rate, peak) if peak else None,
        flops.hfu(config, rate, peak, attention) if peak else None,
    )


@dataclasses.dataclass(frozen=True)
class Training:
    """Seconds of a train step, and what the step takes."""

    compile_seconds: float
    first_step_seconds: float
    step_seconds: float  # the median
    all_step_seconds: list[float]
    tokens_per_step: int
    peak_flops: float | None  # of all devices together
    speed: Speed
    loss: float  # of the last step, on random tokens
    peak_bytes: int
    peak_bytes_source: str
    temporary_bytes: int  # by the compiler
    profile: list[device_trace.Operation] | None


def random_sample(config: Config, rows: Rows, seed: int = 0) -> dict[str, np.ndarray]:
    """Random `obs` and `target` [A, B, T] for one step, of this process's rows.

    Processes that share a replica have the same.
    """
    count = config.per_replica_batch * len(rows.replicas)
    shape = (config.gradient_accumulation_steps, count, config.seq + 1)
    rng = np.random.default_rng((seed, rows.replicas[0]))
    tokens = rng.integers(0, config.n_vocab, shape).astype(np.uint32)
    return {"obs": tokens[..., :-1], "target": tokens[..., 1:]}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until what a function returns is there, and what it returns."""
    began = time.perf_counter()
    found = jax.block_until_ready(function())
    return time.perf_counter() - began, found


@dataclasses.dataclass
class _Run:
    """A compiled train step with its state, and what came of it so far."""

    compiled: Any
    state: Any
    batches: list[Any]
    seconds: list[float] = dataclasses.field(default_factory=list)
    loss: float = float("nan")

    def step(self) -> None:
        """One more, on the batches by turns."""
        batch = self.batches[len(self.seconds) % len(self.batches)]
        spent, (self.state, metrics) = timed(lambda: self.compiled(self.state, batch))
        self.seconds.append(spent)
        self.loss = float(metrics["loss"])


def _compiled_run(config: Config, mesh: Mesh) -> tuple[_Run, float]:
    """A fresh run on random tokens, and the seconds that its step took to compile."""
    rows = Rows(mesh)
    samples = (random_sample(config, rows, seed) for seed in range(2))
    batches = [rows.place(sample, P(None, "dp")) for sample in samples]
    state = jax.block_until_ready(steps.compile_init(config, mesh)(jax.random.key(config.seed)))
    train_step = steps.compile_train(config, mesh)
    began = time.perf_counter()
    compiled = train_step.trace(state, batches[0]).lower().compile()  # type: ignore[attr-defined]
    return _Run(compiled, state, batches), time.perf_counter() - began


def measure_training(
    config: Config,
    mesh: Mesh,
    limit: Limits | None,
    *,
    count: int,
    warmup: int,
    profile: str | None = None,
) -> Training:
    """Runs the real train step, its state donated, on random tokens.

    Args:
      limit: what the devices can do, where known.  A CPU's speed changes with what else it has to
        do: its peak is measured anew before and after each timed step.
      count, warmup: steps that are timed, and those before them, the first left out.
      profile: a folder for a trace of a few more steps.
    """
    steps.check_zero(config, mesh)
    total = 1 + warmup + count
    peaks: list[float] = []
    with tqdm(total=total, desc="compiling", unit="step", disable=jax.process_index() > 0) as bar:
        run, compile_seconds = _compiled_run(config, mesh)
        bar.set_description("training")
        for number in range(total):
            run.step()
            if limit is not None and limit.hardware == "cpu" and number >= warmup:
                peaks.append(accelerators.matmul_flops(config.dtype, PEAK_SIZES, PEAK_SECONDS))
            bar.update()
        all_timed = run.seconds[1 + warmup :]
        if profile is not None:
            bar.set_description("profiling")
            with device_trace.record(profile):
                for _ in range(PROFILED_STEPS):
                    run.step()
    peak = None if limit is None else limit.flops
    if peaks:  # of the two beside a step the larger one counts
        peak = statistics.median(map(max, itertools.pairwise(peaks)))
    median, tokens = statistics.median(all_timed), run.batches[0]["obs"].size
    attention = attention_backend(config, mesh.devices.flat[0])
    peak_bytes, source = peak_memory(mesh, run.compiled)
    return Training(
        compile_seconds=compile_seconds,
        first_step_seconds=run.seconds[0],
        step_seconds=median,
        all_step_seconds=all_timed,
        tokens_per_step=tokens,
        peak_flops=peak,
        speed=speed(config, tokens, median, peak, attention),
        loss=run.loss,
        peak_bytes=peak_bytes,
        peak_bytes_source=source,
        temporary_bytes=run.compiled.memory_analysis().temp_size_in_bytes,
        profile=None if profile is None else device_trace.operations(profile)[:TOLD_OPERATIONS],
    )


def peak_memory(mesh: Mesh, compiled: Any) -> tuple[int, str]:
    """Bytes that one device held at most, and who says so; a CPU does not count its own."""
    counted = mesh.local_devices[0].memory_stats()
    if counted and "peak_bytes_in_use" in counted:
        return counted["peak_bytes_in_use"], "the device's memory_stats"
    return planned_memory(compiled), "the compiler's memory_analysis"


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Seconds of a batch of rows that generate, and what its devices must read for a token."""

    rows: int
    prompt: int
    first_seconds: float  # compilation and the first prompts
    prefill_seconds: float
    token_seconds: float  # of one more token in every row, the median
    tokens_per_second: float  # of all rows
    weight_bytes: int  # read for each token, all matrices but the embedding's
    cache_bytes: int  # keys and values of the positions that there are, on average
    limit_seconds: float | None  # to read both
    share_of_limit: float | None


def measure_decoding(
    config: Config, mesh: Mesh, bandwidth: float | None, *, prompt: int, tokens: int
) -> Decoding:
    """Prefills `per_replica_batch` prompts a replica, then lets them generate, greedily.

    Args:
      bandwidth: bytes/s that all devices together read, where known.
      prompt, tokens: in each row; as many more are generated first, and not timed.
    """
    calls, length = -(-tokens // MOST_STEPS), min(tokens, MOST_STEPS)
    new = 1 + (1 + calls) * length
    if prompt + new > config.window:
        raise InputError(
            f"decode: a prompt of {prompt} and {new} more tokens are more than the window of "
            f"{config.window}; give fewer --tokens, a shorter --prompt or a longer --seq"
        )
    rows = Rows(mesh)
    count = config.per_replica_batch * len(rows.replicas)
    generator = Generator(config, mesh, rows)
    generator.keep(_fresh_params(config, mesh))
    batch = generator.batch(None, count)
    batch.reserve(prompt + new)
    rng = np.random.default_rng(0)
    prompts = list(rng.integers(0, config.n_vocab, (count, prompt)).astype(np.uint32))
    settings = sampler_settings({"temp": 0.0}, count)

    def prefill() -> None:
        batch.insert(range(count), prompts, new, settings)

    with tqdm(total=3 + calls, desc="decoding", disable=jax.process_index() > 0) as bar:

        def seconds(call: Callable[[], Any]) -> float:
            spent = timed(call)[0]
            bar.update()
            return spent

        decode = functools.partial(batch.decode, length)
        first = seconds(prefill)
        prefilled = seconds(prefill)
        seconds(decode)  # compiles
        token = statistics.median(seconds(decode) for _ in range(calls)) / length
    read, cache = _read_for_a_token(generator, prompt + length + calls * length / 2)
    limit = (read + cache) * mesh.size / bandwidth if bandwidth else None
    everywhere = config.per_replica_batch * rows.dp
    return Decoding(
        rows=everywhere,
        prompt=prompt,
        first_seconds=first,
        prefill_seconds=prefilled,
        token_seconds=token,
        tokens_per_second=everywhere / token,
        weight_bytes=read,
        cache_bytes=cache,
        limit_seconds=limit,
        share_of_limit=limit / token if limit else None,
    )


def _fresh_params(config: Config, mesh: Mesh) -> Any:
    """Random parameters without an optimizer's moments."""

    def params(key: jax.Array) -> Any:
        return steps.init_state(config, key)["params"]

    layout = named(mesh, steps.state_specs(config, mesh)["params"])
    return jax.jit(params, out_shardings=layout)(jax.random.key(config.seed))


def _read_for_a_token(generator: Generator, held: float) -> tuple[int, int]:
    """Bytes of the weights, and of the caches' `held` positions in each row, on one device."""
    weights, config = generator.weights(None), generator.config
    # Of the embedding's table a token takes one row.
    matrices = jax.tree.leaves({part: weights[part] for part in weights if part != "embed"})
    read = sum(leaf.addressable_shards[0].data.nbytes for leaf in matrices)
    numbers = 2 * config.layers * config.n_heads * config.d_head / generator.mesh.shape["mp"]
    row = numbers * jnp.dtype(config.dtype).itemsize * held
    return read, int(row * config.per_replica_batch)
