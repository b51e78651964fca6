"""Benchmarks of training and decoding with a config, on the available devices.

The library's own compiled functions are timed with the host's clock.  Each timing ends when the
devices have finished.  Byte counts are per device unless stated otherwise.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.generation.batch import MOST_STEPS
from mesh_transformer.generation.generator import Generator
from mesh_transformer.generation.pool import Chunks, Pool, most_slots, page_size
from mesh_transformer.generation.sampling_settings import sampler_settings
from mesh_transformer.mesh import accelerators
from mesh_transformer.mesh.placement import Rows
from mesh_transformer.model import flops
from mesh_transformer.performance.device_arrays import abstract_rows, cache_read, weights_read
from mesh_transformer.performance.hlo import Program, planned_memory
from mesh_transformer.training import step as steps
from mesh_transformer.training.profile import traced
from mesh_transformer.util import InputError

PROFILED_STEPS = 3
# A CPU's peak FLOP/s is measured between steps by multiplying square matrices of these sizes; the
# fastest size counts.  `PEAK_SECONDS` per size are enough to measure a sustained speed.
PEAK_SIZES, PEAK_SECONDS = (512, 1024, 2048), 0.3


@dataclasses.dataclass(frozen=True)
class Limits:
    """Peak FLOP/s and memory bandwidth of all devices of a mesh together.

    Attributes:
      hardware: name of the hardware.
      flops: peak FLOP/s.
      bandwidth: memory bandwidth in bytes/s.
      source: where these figures come from.
    """

    hardware: str
    flops: float
    bandwidth: float
    source: str


def limits(name: str | None, mesh: Mesh, dtype: str) -> Limits | None:
    """Return the peak FLOP/s and memory bandwidth of a mesh; None if its hardware is unknown.

    Accelerators are looked up in the table `accelerators.HARDWARE`.  CPU devices are virtual
    devices of one machine, so the limits of the whole machine are measured.

    Args:
      name: name of the hardware to assume for every device of the mesh; None for the actual
        hardware.
      dtype: dtype of the matmuls that measure a CPU's FLOP/s.
    """
    if name is None and (device := mesh.devices.flat[0]).platform != "cpu":
        hardware = accelerators.hardware_of(device)
    else:
        hardware = accelerators.hardware("cpu" if name is None else name, dtype)
    if hardware is None:
        return None
    count = 1 if hardware.name == "cpu" else mesh.size
    dense = f"{dtype} matmul" if hardware.name == "cpu" else "dense bf16"
    source = f"{dense}, {hardware.source}"
    return Limits(hardware.name, count * hardware.peak, count * hardware.hbm, source)


@dataclasses.dataclass(frozen=True)
class Speed:
    """Throughput and utilisation of a train step, on all devices together.

    Attributes:
      tflops: TFLOP/s, with FLOPs counted as in the PaLM paper.
      mfu: model FLOPs utilisation, 0 to 1; None if the peak is unknown.
      hfu: hardware FLOPs utilisation, 0 to 1; None if the peak is unknown.  It counts all matmuls
        that run, including recomputed ones.
    """

    tokens_per_second: float
    tflops: float
    mfu: float | None
    hfu: float | None


def speed(
    config: Config, tokens: int, seconds: float, peak: float | None, attention: str = "xla"
) -> Speed:
    """Compute throughput and utilisation from the time of a train step.

    Args:
      tokens: number of tokens per step, on all devices together.
      seconds: time of the step.
      peak: peak FLOP/s of all devices together; None if unknown.
      attention: attention backend, as `attention_backend` returns it.
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
    """Timings of a train step, and its speed and memory."""

    compile_seconds: float
    first_step_seconds: float
    step_seconds: float  # median
    all_step_seconds: list[float]
    tokens_per_step: int
    peak_flops: float | None  # peak FLOP/s of all devices together
    speed: Speed
    loss: float  # of the last step, on random tokens
    peak_bytes: int
    peak_bytes_source: str
    temporary_bytes: int  # according to the compiler
    bytes_moved: int  # by each device in its memory per step, according to the compiled program


def random_sample(config: Config, rows: Rows, seed: int = 0) -> dict[str, np.ndarray]:
    """Return this process's rows of a batch of random tokens for one train step.

    The dict's arrays `obs` and `target` have shape [A, B, T]: A microbatches, B rows of this
    process, T tokens.  Processes that share a replica get the same tokens.
    """
    count = config.per_replica_batch * config.virtual_replicas(rows.dp) * len(rows.replicas)
    shape = (config.gradient_accumulation_steps, count, config.seq + 1)
    rng = np.random.default_rng((seed, rows.replicas[0]))
    tokens = rng.integers(0, config.n_vocab, shape).astype(np.uint32)
    return {"obs": tokens[..., :-1], "target": tokens[..., 1:]}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call a function; return the seconds until its result is ready, and the result."""
    began = time.perf_counter()
    result = jax.block_until_ready(function())
    return time.perf_counter() - began, result


@dataclasses.dataclass
class _Run:
    """A compiled train step, with its current state and the batches to run it on.

    Attributes:
      function: called for each step: `compiled` or a function that compiles the same program.
      seconds: time of each step so far.
      loss: loss of the last step.
    """

    compiled: Any
    state: Any
    batches: list[Any]
    function: Any
    seconds: list[float] = dataclasses.field(default_factory=list)
    loss: float = float("nan")

    def step(self) -> None:
        """Run and time one step, alternating between the batches."""
        batch = self.batches[len(self.seconds) % len(self.batches)]
        elapsed, (self.state, metrics) = timed(lambda: self.function(self.state, batch))
        self.seconds.append(elapsed)
        self.loss = float(metrics["loss"])


def _compiled_run(layout: steps.StateLayout) -> tuple[_Run, float]:
    """Compile a train step, and create random batches; return also the seconds of compilation."""
    config, rows = layout.config, Rows(layout.mesh)
    samples = (random_sample(config, rows, seed) for seed in range(2))
    batches = [rows.place(sample, P(None, "dp")) for sample in samples]
    state = jax.block_until_ready(steps.compile_init(layout)(jax.random.key(config.seed)))
    train_step = steps.compile_train(layout)
    began = time.perf_counter()
    compiled = train_step.trace(state, batches[0]).lower().compile()  # type: ignore[attr-defined]
    seconds = time.perf_counter() - began
    # JAX 0.10 refuses 4-bit arguments of programs that were compiled ahead of their call.
    function = train_step if config.frozen_bits == 4 else compiled
    return _Run(compiled, state, batches, function), seconds


def measure_training(
    layout: steps.StateLayout,
    limit: Limits | None,
    *,
    count: int,
    warmup: int,
    profile: str | None = None,
) -> Training:
    """Time the library's own train step on random tokens.

    Args:
      limit: peak FLOP/s and memory bandwidth of the mesh (see `limits`); None if unknown.  A CPU's
        peak is measured again before and after each timed step, because it depends on the other
        load of the machine.
      count: number of timed steps.
      warmup: number of untimed steps between the first step and the timed steps.
      profile: folder for a profiler trace of a few additional steps; None for no trace.
    """
    config, mesh = layout.config, layout.mesh
    total = 1 + warmup + count
    peaks: list[float] = []
    with tqdm(total=total, desc="compiling", unit="step", disable=jax.process_index() > 0) as bar:
        run, compile_seconds = _compiled_run(layout)
        bar.set_description("training")
        for number in range(total):
            run.step()
            if limit is not None and limit.hardware == "cpu" and number >= warmup:
                peaks.append(accelerators.matmul_flops(config.dtype, PEAK_SIZES, PEAK_SECONDS))
            bar.update()
        timed_seconds = run.seconds[1 + warmup :]
        if profile is not None:
            bar.set_description("profiling")
            with traced(profile):
                for _ in range(PROFILED_STEPS):
                    run.step()
    peak = None if limit is None else limit.flops
    if peaks:  # for each step, the larger of the two measurements before and after it counts
        peak = statistics.median(map(max, itertools.pairwise(peaks)))
    median, tokens = statistics.median(timed_seconds), run.batches[0]["obs"].size
    peak_bytes, source = peak_memory(mesh, run.compiled)
    return Training(
        compile_seconds=compile_seconds,
        first_step_seconds=run.seconds[0],
        step_seconds=median,
        all_step_seconds=timed_seconds,
        tokens_per_step=tokens,
        peak_flops=peak,
        speed=speed(config, tokens, median, peak, layout.attention),
        loss=run.loss,
        peak_bytes=peak_bytes,
        peak_bytes_source=source,
        temporary_bytes=run.compiled.memory_analysis().temp_size_in_bytes,
        bytes_moved=Program(run.compiled.as_text()).moved(),
    )


def peak_memory(mesh: Mesh, compiled: Any) -> tuple[int, str]:
    """Return the peak memory of one device in bytes, and the source of this figure.

    The figure comes from the device's own statistics or, for devices without them, such as CPUs,
    from the compiler.
    """
    stats = mesh.local_devices[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"], "the device's memory_stats"
    return planned_memory(compiled), "the compiler's memory_analysis"


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Timings of decoding a batch, and the bytes that each device must read per decode step.

    A decode step generates one token in every row.

    Attributes:
      rows: number of batch rows on all replicas together.
      prompt: prompt tokens per row.
      first_seconds: time of the first prefill, including compilation.
      prefill_seconds: time of another prefill, without compilation.
      token_seconds: median time of a decode step.
      tokens_per_second: tokens generated per second in all rows together.
      weight_bytes: bytes of weights that each device reads per step: all but the embedding table.
      cache_bytes: bytes of cached keys and values that each device reads per step, on average.
      limit_seconds: lower bound of the time of a decode step: the time to read the weights and the
        cache once at the full memory bandwidth.  None if the bandwidth is unknown.
      share_of_limit: `limit_seconds` divided by `token_seconds`; None if the bandwidth is unknown.
    """

    rows: int
    prompt: int
    first_seconds: float
    prefill_seconds: float
    token_seconds: float
    tokens_per_second: float
    weight_bytes: int
    cache_bytes: int
    limit_seconds: float | None
    share_of_limit: float | None


def measure_decoding(
    layout: steps.StateLayout,
    bandwidth: float | None,
    *,
    prompt: int,
    tokens: int,
    profile: str | None = None,
    pages: bool = False,
) -> Decoding:
    """Time prefill and greedy decoding of a batch with `per_replica_batch` rows per replica.

    Args:
      bandwidth: memory bandwidth of all devices together in bytes/s; None if unknown.
      prompt: prompt tokens per row.
      tokens: minimum number of tokens per row whose decoding is timed.  The number is rounded up to
        whole decode calls, which generate up to `MOST_STEPS` (32) tokens per row.
      profile: folder for a profiler trace of the last call; None for no trace.
      pages: whether the cache is in pages, as that of a server is.

    Raises:
      InputError: if the prompt and the new tokens together exceed the config's window.
    """
    config, mesh = layout.config, layout.mesh
    calls, length = -(-tokens // MOST_STEPS), min(tokens, MOST_STEPS)
    new = 1 + (1 + calls) * length
    if prompt + new > config.window:
        raise InputError(
            f"decode: a prompt of {prompt} tokens and {new} new ones (warm-up included) exceed the "
            f"window of {config.window}; reduce --tokens or --prompt, or increase --seq"
        )
    rows = Rows(mesh)
    count = config.per_replica_batch * len(rows.replicas)
    generator = Generator(layout, rows)
    generator.init_weights(
        lambda key: steps.all_params(steps.init_state(config, key, layout.par.shards))
    )
    positions = prompt + new + (length if profile is not None else 0)
    pool, chunks = _own_pages(generator.config, count, positions) if pages else (None, None)
    batch = generator.batch(None, count, pool)
    batch.reserve(positions)
    rng = np.random.default_rng(0)
    prompts = list(rng.integers(0, config.n_vocab, (count, prompt)).astype(np.uint32))
    settings = sampler_settings({"temp": 0.0}, count)

    def prefill() -> None:
        batch.insert(range(count), prompts, new, settings, chunks=chunks)

    with tqdm(total=3 + calls, desc="decoding", disable=jax.process_index() > 0) as bar:

        def seconds(call: Callable[[], Any]) -> float:
            elapsed = timed(call)[0]
            bar.update()
            return elapsed

        decode = functools.partial(batch.decode, length)
        first_seconds = seconds(prefill)
        prefill_seconds = seconds(prefill)
        seconds(decode)  # compiles
        token_seconds = statistics.median(seconds(decode) for _ in range(calls)) / length
        if profile is not None:
            batch.left[:] = length
            with traced(profile):
                decode()
    positions = prompt + length + calls * length / 2
    weight_bytes, cache_bytes = _read_per_token(generator, positions)
    limit_seconds = (weight_bytes + cache_bytes) * mesh.size / bandwidth if bandwidth else None
    all_rows = config.per_replica_batch * rows.dp
    return Decoding(
        rows=all_rows,
        prompt=prompt,
        first_seconds=first_seconds,
        prefill_seconds=prefill_seconds,
        token_seconds=token_seconds,
        tokens_per_second=all_rows / token_seconds,
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes,
        limit_seconds=limit_seconds,
        share_of_limit=limit_seconds / token_seconds if limit_seconds else None,
    )


def _own_pages(config: Config, count: int, positions: int) -> tuple[Pool, Chunks]:
    """Return a pool with pages for so many positions of each row, and those of `count` rows."""
    rows, page = config.per_replica_batch, page_size(config)
    each = -(-min(positions, config.window) // page)
    pool = Pool(rows * each, page)
    page_PJ = np.full((count, most_slots(config.window, 0, pool) // page), -1, np.int32)
    page_PJ[:, :each] = np.arange(count * each).reshape(count, each) % pool.pages
    return pool, Chunks(np.zeros(count, np.int32), page_PJ, page_PJ)


def _read_per_token(generator: Generator, positions: float) -> tuple[int, int]:
    """Return the bytes of weights, and the bytes of caches, that one device reads per decode step.

    Args:
      generator: a generator whose weights are cached.
      positions: average number of filled cache positions per row.
    """
    layout, config = generator.layout, generator.config
    rows = config.per_replica_batch * layout.mesh.shape["dp"]
    caches = abstract_rows(layout, rows).caches
    cache = cache_read(caches, positions / config.window, positions)
    return weights_read(config, generator.weights(None)), cache
