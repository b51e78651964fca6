"""The train step beside itself with one optimisation off at a time, and with all of them off.

What has no key of the config is switched off from here: the library knows nothing of it.
"""

import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.mesh import program
from mesh_transformer.mesh.parallel import Manual
from mesh_transformer.mesh.placement import Rows
from mesh_transformer.model import gptj
from mesh_transformer.performance import benchmark, hlo
from mesh_transformer.performance.hlo import planned_memory
from mesh_transformer.training import step as steps
from mesh_transformer.util import StoppedError

COMPARED_STEPS = 2
# Of the loss: another order of sums rounds otherwise, and the second step's follows an update.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A train step; as the library has it unless something else is said."""

    name: str
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)  # the config's
    own_sums: bool = False  # no fan_out: each use of the normed activations is summed by itself
    unrolled: bool = False  # no scan over layers
    kept: bool = False  # the state is not donated
    plain: bool = False  # the backward pass finds all that the forward pass has computed


def variants(config: Config, mesh: Mesh) -> list[Variant]:
    """The library as it is, with one thing off each, and with all off."""
    whole_loss = {"loss_chunk": config.seq}
    # The compiler places its own sums, and one device has nobody to sum with.
    manual = mesh.size > 1 and config.partitioning == "shard_map" and not config.shard_activations
    found = [Variant("as it is")]
    if config.loss_chunk < config.seq:
        found.append(Variant("loss not in chunks", whole_loss))
    if manual:
        found.append(Variant("each matmul its own sum", own_sums=True))
    found += [Variant("layers unrolled", unrolled=True), Variant("state not donated", kept=True)]
    policies = [policy for policy in ("full", "dots", "none") if policy != config.remat]
    found += [Variant(f"remat {policy}", {"remat": policy}) for policy in policies]
    naive = Variant("all off", whole_loss, manual, unrolled=True, kept=True, plain=True)
    return [*found, Variant("everything kept", plain=True), naive]


class OwnSums(Manual):
    """What reads x reads it as it is: JAX gives each use its own way to all parts of mp."""

    def fan_out(self, x: Array) -> Array:
        return x


@contextlib.contextmanager
def switched(variant: Variant) -> Iterator[None]:
    """The library, while it traces a step, with what the variant has no key for."""
    scan, jit, checkpoint = jax.lax.scan, jax.jit, jax.checkpoint
    unrolled = 0

    def scan_of_layers(body: Any, *args: Any, **options: Any) -> Any:
        nonlocal unrolled
        if not body.__qualname__.startswith("residual_stream."):
            return scan(body, *args, **options)
        unrolled += 1
        return scan(body, *args, **options | {"unroll": True})

    def checkpoint_outside_a_scan(function: Any, prevent_cse: bool = True, **options: Any) -> Any:
        # Else the compiler would merge what is computed again with the first time.
        return checkpoint(function, prevent_cse=True, **options)

    def jit_that_keeps(function: Any, donate_argnums: Any = None, **options: Any) -> Any:
        return jit(function, **options)

    with contextlib.ExitStack() as patches:
        if variant.own_sums:
            patches.enter_context(mock.patch.object(program, "Manual", OwnSums))
        if variant.unrolled:
            patches.enter_context(mock.patch.object(jax.lax, "scan", scan_of_layers))
            patches.enter_context(mock.patch.object(jax, "checkpoint", checkpoint_outside_a_scan))
        if variant.plain:
            patches.enter_context(mock.patch.object(gptj, "_remat", lambda run, _: run))
        if variant.kept:
            patches.enter_context(mock.patch.object(jax, "jit", jit_that_keeps))
        yield
    assert unrolled or not variant.unrolled, "the scan over layers has another name"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A variant's program, its losses in the first steps, and what the compiler says of it."""

    variant: Variant
    run: Any
    losses: list[float]
    figures: dict[str, Any]


def compile_variant(
    variant: Variant, config: Config, mesh: Mesh, state: Any, batch: Any
) -> Compiled:
    """The variant's program, run for the first steps from `state`, which it may use up."""
    began = time.perf_counter()
    with switched(variant):
        train_step = steps.compile_train(config.replace(**variant.keys), mesh)
        lowered = train_step.trace(state, batch).lower()  # type: ignore[attr-defined]
    run = lowered.compile()
    seconds = time.perf_counter() - began
    losses = []
    for _ in range(COMPARED_STEPS):
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
    collectives = [
        (times, each.bytes)
        for each, times in hlo.parse(run.as_text()).runs()
        if each.kind == "all-reduce" and not each.is_alone
    ]
    figures = {
        "compile_seconds": seconds,
        "memory_bytes": planned_memory(run),
        "temporary_bytes": run.memory_analysis().temp_size_in_bytes,
        "all_reduces": sum(times for times, _ in collectives),
        "all_reduced_bytes": sum(times * size for times, size in collectives),
    }
    return Compiled(variant, run, losses, figures)


def measure(config: Config, mesh: Mesh, rounds: int) -> dict[str, Any]:
    """Times all variants by turns on one run's state, each round in another order.

    Raises:
      StoppedError: where two variants do not have the same loss.
    """
    config = config.replace(warmup_steps=0)  # so that the first update counts in the second loss
    rows = Rows(mesh)
    batch = rows.place(benchmark.random_sample(config, rows), P(None, "dp"))
    fresh, key = steps.compile_init(config, mesh), jax.random.key(config.seed)
    wanted = variants(config, mesh)
    with tqdm(total=len(wanted) * (1 + rounds), desc="compiling", leave=False) as bar:
        programs = []
        for variant in wanted:
            programs.append(compile_variant(variant, config, mesh, fresh(key), batch))
            bar.update()
        check_losses(programs, TOLERANCE[config.dtype])
        bar.set_description("timing")
        state, order = jax.block_until_ready(fresh(key)), list(range(len(programs)))
        seconds: list[list[float]] = [[] for _ in programs]
        for turn in range(rounds):
            first = turn % len(order)
            for place in itertools.chain(order[first:], order[:first]):
                step = functools.partial(programs[place].run, state, batch)
                spent, (state, _) = benchmark.timed(step)
                seconds[place].append(spent)
                bar.update()
    return {
        "rounds": rounds,
        "loss_tolerance": TOLERANCE[config.dtype],
        "variants": [
            _told(each, own, seconds[0]) for each, own in zip(programs, seconds, strict=True)
        ],
    }


def check_losses(programs: list[Compiled], tolerance: float) -> None:
    """Raises StoppedError where a variant has other losses than the first one."""
    for each in programs[1:]:
        if not np.allclose(each.losses, programs[0].losses, rtol=tolerance, atol=0):
            raise StoppedError(
                f"{each.variant.name}: the losses are {each.losses}, those of the library "
                f"{programs[0].losses}; expected the same to {tolerance}"
            )


def _told(program: Compiled, seconds: list[float], library: list[float]) -> dict[str, Any]:
    ratios = [one / other for one, other in zip(seconds, library, strict=True)]
    return {
        "name": program.variant.name,
        "step_seconds": statistics.median(seconds),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "losses": program.losses,
        **program.figures,
    }
