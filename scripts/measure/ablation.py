"""Time the train step with one optimisation off at a time, and with all off: `bench --ablate`.

Some optimisations have no config key.  This module switches them off by patching the library, so
that the library itself needs no code for ablations.  The flags are those of `bench`.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from mesh_transformer.cli import benchmark as command
from mesh_transformer.mesh import program
from mesh_transformer.mesh.parallel import Manual
from mesh_transformer.mesh.placement import Rows
from mesh_transformer.model import transformer
from mesh_transformer.performance import benchmark, hlo
from mesh_transformer.performance.hlo import planned_memory
from mesh_transformer.performance.report import Column
from mesh_transformer.training import step as steps
from mesh_transformer.util import StoppedError, run_script

COMPARED_STEPS = 2  # number of steps whose losses are compared; the second loss follows an update
# Relative tolerance when losses are compared.  Variants add the same numbers in different orders,
# so their rounding errors differ.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
COLUMNS: list[Column] = [  # of the table with one row per variant
    ("train step", lambda v: v["name"]),
    ("ms", lambda v: f"{v['step_seconds'] * 1e3:.1f}"),
    (
        "relative time (lowest to highest)",
        lambda v: f"{v['ratio']:.2f} ({min(v['ratios']):.2f} to {max(v['ratios']):.2f})",
    ),
    ("temporaries (MiB)", lambda v: f"{v['temporary_bytes'] / 2**20:.1f}"),
    ("total memory (MiB)", lambda v: f"{v['memory_bytes'] / 2**20:.1f}"),
    (
        "all-reduces, MB",
        lambda v: f"{v['all_reduces']}, {v['all_reduced_bytes'] / 1e6:.1f}",
    ),
    ("compile (s)", lambda v: f"{v['compile_seconds']:.1f}"),
]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant of the train step.  The default values give the library's own step.

    Attributes:
      name: label of the variant in the results.
      keys: config keys to change, and their values.
      separate_all_reduces: whether each matmul that reads the normalised activations has its own
        all-reduce of their gradient.  By default, these gradients are added first, and all-reduced
        once.
      unrolled: whether the scan over layers is unrolled.
      no_donation: whether the old state is kept in memory during the step instead of donated to it.
      no_remat: whether remat is switched off.  The backward pass then recomputes nothing and reads
        everything that the forward pass computed.
    """

    name: str
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    separate_all_reduces: bool = False
    unrolled: bool = False
    no_donation: bool = False
    no_remat: bool = False


def variants(layout: program.Layout) -> list[Variant]:
    """Return all variants for a config.

    The first variant is the library's own step.  The last one switches off all optimisations.  Each
    of the others switches off or changes one optimisation.
    """
    config, mesh = layout.config, layout.mesh
    whole_loss = {"loss_chunk": config.seq}
    # Whether `fan_out` affects the all-reduces.  It does not if the compiler places them (jit), if
    # there is only one device, or if activations are sharded, where `fan_out` is an all-gather.
    manual = mesh.size > 1 and config.partitioning == "shard_map" and not config.shard_activations
    result = [Variant("as it is")]
    if config.loss_chunk < config.seq:
        result.append(Variant("loss not in chunks", whole_loss))
    if manual:
        result.append(Variant("each matmul its own sum", separate_all_reduces=True))
    result += [
        Variant("layers unrolled", unrolled=True),
        Variant("state not donated", no_donation=True),
    ]
    policies = [policy for policy in ("full", "dots", "none") if policy != config.remat]
    result += [Variant(f"remat {policy}", {"remat": policy}) for policy in policies]
    naive = Variant("all off", whole_loss, manual, unrolled=True, no_donation=True, no_remat=True)
    return [*result, Variant("everything kept", no_remat=True), naive]


class SeparateAllReduces(Manual):
    """A `Manual` whose `fan_out` returns x unchanged.

    JAX then casts x to varying over mp separately for each use of x, so the gradient of each use
    has its own psum.  The normal `fan_out` needs only one psum, of the sum of these gradients.
    """

    def fan_out(self, x: Array) -> Array:
        return x


@contextlib.contextmanager
def patched_library(variant: Variant) -> Iterator[None]:
    """Context manager that patches the library to implement a variant.

    Only optimisations that have no config key are patched.  The train step must be traced inside
    the context.
    """
    scan, jit, checkpoint = jax.lax.scan, jax.jit, jax.checkpoint
    unrolled = 0

    def unroll_layers(body: Any, *args: Any, **options: Any) -> Any:
        nonlocal unrolled
        if not body.__qualname__.startswith("residual_stream."):
            return scan(body, *args, **options)
        unrolled += 1
        return scan(body, *args, **options | {"unroll": True})

    def checkpoint_outside_scan(function: Any, prevent_cse: bool = True, **options: Any) -> Any:
        # Outside a scan, prevent_cse=False would let the compiler merge the recomputed operations
        # with those of the forward pass, and save their results instead of recomputing them.
        return checkpoint(function, prevent_cse=True, **options)

    def jit_without_donation(function: Any, donate_argnums: Any = None, **options: Any) -> Any:
        return jit(function, **options)

    with contextlib.ExitStack() as patches:
        if variant.separate_all_reduces:
            patches.enter_context(mock.patch.object(program, "Manual", SeparateAllReduces))
        if variant.unrolled:
            patches.enter_context(mock.patch.object(jax.lax, "scan", unroll_layers))
            patches.enter_context(mock.patch.object(jax, "checkpoint", checkpoint_outside_scan))
        if variant.no_remat:
            patches.enter_context(mock.patch.object(transformer, "_remat", lambda run, _: run))
        if variant.no_donation:
            patches.enter_context(mock.patch.object(jax, "jit", jit_without_donation))
        yield
    assert unrolled or not variant.unrolled, "the function that scans over layers was renamed"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A variant's compiled train step, its first losses, and figures about the compiled program.

    Attributes:
      losses: losses of the first `COMPARED_STEPS` steps.
      figures: compilation time, memory and all-reduces, by name.
    """

    variant: Variant
    run: Any
    losses: list[float]
    figures: dict[str, Any]


def compile_variant(
    variant: Variant, layout: steps.StateLayout, state: Any, batch: Any
) -> Compiled:
    """Compile a variant's step and run it `COMPARED_STEPS` times, starting from `state`.

    The step donates `state`, so the caller cannot use it afterwards, unless the variant sets
    `no_donation`.
    """
    began = time.perf_counter()
    with patched_library(variant):
        train_step = steps.compile_train(layout.of(layout.config.replace(**variant.keys)))
        lowered = train_step.trace(state, batch).lower()  # type: ignore[attr-defined]
    run = lowered.compile()
    seconds = time.perf_counter() - began
    losses = []
    for _ in range(COMPARED_STEPS):
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
    collectives = [
        (times, collective.bytes)
        for collective, times in hlo.parse(run.as_text()).runs()
        if collective.kind == "all-reduce" and not collective.is_alone
    ]
    figures = {
        "compile_seconds": seconds,
        "memory_bytes": planned_memory(run),
        "temporary_bytes": run.memory_analysis().temp_size_in_bytes,
        "all_reduces": sum(times for times, _ in collectives),
        "all_reduced_bytes": sum(times * size for times, size in collectives),
    }
    return Compiled(variant, run, losses, figures)


def measure(
    layout: steps.StateLayout, rounds: int, selected: Sequence[Variant] | None = None
) -> dict[str, Any]:
    """Time variants of the train step.

    In each round every variant runs one step, and the variants take turns at being first.  All
    variants update the same state.

    Args:
      selected: the variants, of which the first is the library's own step (default: `variants`).

    Raises:
      StoppedError: if a variant's losses differ from those of the library's own step.
    """
    # Without warm-up, the first update affects the second loss.
    layout, rows = layout.of(layout.config.replace(warmup_steps=0)), Rows(layout.mesh)
    config = layout.config
    batch = rows.place(benchmark.random_sample(config, rows), P(None, "dp"))
    fresh, key = steps.compile_init(layout), jax.random.key(config.seed)
    selected = variants(layout) if selected is None else selected
    with tqdm(total=len(selected) * (1 + rounds), desc="compiling", leave=False) as bar:
        programs = []
        for variant in selected:
            programs.append(compile_variant(variant, layout, fresh(key), batch))
            bar.update()
        check_losses(programs, TOLERANCE[config.dtype])
        bar.set_description("timing")
        state, order = jax.block_until_ready(fresh(key)), list(range(len(programs)))
        seconds: list[list[float]] = [[] for _ in programs]
        for round_number in range(rounds):
            first = round_number % len(order)
            for index in itertools.chain(order[first:], order[:first]):
                step = functools.partial(programs[index].run, state, batch)
                elapsed, (state, _) = benchmark.timed(step)
                seconds[index].append(elapsed)
                bar.update()
    return {
        "rounds": rounds,
        "loss_tolerance": TOLERANCE[config.dtype],
        "variants": [
            _summary(compiled, own, seconds[0])
            for compiled, own in zip(programs, seconds, strict=True)
        ],
    }


def check_losses(programs: list[Compiled], tolerance: float) -> None:
    """Raise StoppedError if the losses of any variant differ from those of the first variant.

    `tolerance` is the largest allowed relative difference.
    """
    for compiled in programs[1:]:
        if not np.allclose(compiled.losses, programs[0].losses, rtol=tolerance, atol=0):
            raise StoppedError(
                f"variant {compiled.variant.name}: the losses are {compiled.losses}, but those of "
                f"the unchanged step are {programs[0].losses}; expected a relative difference of "
                f"at most {tolerance}"
            )


def _summary(compiled: Compiled, seconds: list[float], library: list[float]) -> dict[str, Any]:
    """Return a variant's results, as JSON-serialisable values.

    Args:
      seconds, library: the step time of the variant, and of the library's own step, in each round.
    """
    ratios = [own / baseline for own, baseline in zip(seconds, library, strict=True)]
    return {
        "name": compiled.variant.name,
        "step_seconds": statistics.median(seconds),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "losses": compiled.losses,
        **compiled.figures,
    }


def result(layout: steps.StateLayout, args: argparse.Namespace, _: float | None) -> dict[str, Any]:
    """Return the results that `bench --ablate` reports."""
    return measure(layout, args.rounds)


if __name__ == "__main__":
    sys.argv.insert(1, "--ablate")
    run_script(command.main)
