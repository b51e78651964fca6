"""Choice of the mesh, ZeRO, remat and batch size that fit a slice, by speed.

The estimate on paper ranks all settings with the same tokens per step.  `choose` compiles the first
ones until one fits, and `search` compiles many of them.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.mesh.accelerators import GIB, Hardware
from mesh_transformer.performance.analytic import (
    context_sizes,
    estimate_step,
    sequences_per_step,
)
from mesh_transformer.performance.compilation import OutOfTimeError
from mesh_transformer.performance.plan import Plan, plan
from mesh_transformer.performance.roofline import Estimate
from mesh_transformer.performance.scaling import markdown_table
from mesh_transformer.performance.topology import Slice, format_mesh, peak_on
from mesh_transformer.util import InputError

BATCHES = (1, 2, 4, 8, 16, 32)
ZERO = (0, 1, 3)
REMAT = ("full", "dots", "none")  # in order of increasing memory
MOST_MP = 32
PAPER_ERROR = 0.04  # by how much a compiled peak may differ from the estimate of `memory_bytes`
# A setting is chosen first if its estimate leaves this share of the memory, as estimates may be off
# by up to 9 percent (docs/plan.md).
SPARE = 0.1
MOST_CHOICES = 5  # settings that `choose` compiles
FULL_COMPILES = 3  # number of the fastest settings that are compiled again with full optimisation
# Config keys in which the candidate settings differ.
SEARCHED_KEYS = (
    "cores_per_replica",
    "context_parallel",
    "per_replica_batch",
    "gradient_accumulation_steps",
    "zero",
    "remat",
)
OUT_OF_TIME = "the time limit has ended this; raise --minutes to compile more"


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The settings that a search compiled for a slice, and counts of those that it did not compile.

    A setting is a choice of dp, cp, mp, ZeRO stage, remat and batch size.

    Attributes:
      sequences: sequences per step, the same for all settings.
      fits: whether any setting fits.
      plans: plans of the settings that fit.  Plans compiled with full optimisation come first, then
        those compiled with reduced optimisation.  Both parts are sorted by estimated speed without
        overlap of computation and communication, fastest first.
      too_large: plans of the settings that were compiled and do not fit.
      hopeless: number of settings not compiled because the analytic estimate of their memory is too
        large.
      larger: number of settings not compiled because they need at least as much memory as one of
        `too_large`.
      refused: number of settings that failed to compile.
      left_out: number of settings not compiled because the search ended first.  According to the
        analytic estimate, they are slower than the compiled ones.
      out_of_time: whether the time limit ended the search.
    """

    topology: str
    sequences: int
    fits: bool
    plans: list[Plan]
    too_large: list[Plan]
    hopeless: int
    larger: int
    refused: int
    left_out: int
    out_of_time: bool = False

    def table(self) -> str:
        """Format the result as readable text."""
        head = (
            f"{self.topology}, {self.sequences} sequences per step: {len(self.plans)} fit, "
            f"{len(self.too_large)} compiled and too large, {self.larger} at least as large as "
            f"one of these, {self.hopeless} too large on paper, {self.refused} failed to compile, "
            f"{self.left_out} not compiled because slower on paper"
        )
        rows = [
            "  dp   cp   mp ZeRO remat activations batch x micro  GiB per device  "
            "tokens/s (estimate)    MFU         compiled",
            *map(_row, self.plans),
        ]
        if not self.plans:
            rows = ["no compiled setting fits; raise --limit or choose a larger slice"]
        if self.out_of_time:
            rows.append(OUT_OF_TIME)
        return "\n".join([head, *rows])


def _row(plan: Plan) -> str:
    """Format a plan as a row of `SearchResult.table`."""
    assert plan.estimate is not None
    most, least = plan.estimate.tokens_per_second
    best_mfu, worst_mfu = plan.estimate.mfu
    return (
        f"{plan.dp:4} {plan.cp:4} {plan.mp:4} {plan.zero:4} {plan.remat:5} "
        f"{'sharded' if plan.shard_activations else 'whole':11} {plan.per_replica_batch:5} x "
        f"{plan.accumulation:<5}  {plan.peak_bytes / GIB:5.2f} of {plan.hbm_bytes / GIB:5.2f}  "
        f"{least:9,.0f} to {most:9,.0f}  {worst_mfu:.0%} to {best_mfu:.0%}  "
        f"{'quickly' if plan.fast else 'in full'}"
    )


def candidates(config: Config, devices: int, fixed: dict[str, Any] | None = None) -> list[Config]:
    """Return the settings that are worth trying on `devices` devices, as variants of a config.

    All variants have the config's number of sequences per step.

    Args:
      fixed: config keys and values that all variants must have.

    Raises:
      InputError: if a search does not try the number of devices per replica in `fixed`.
    """
    fixed = fixed or {}
    sequences = sequences_per_step(config)
    config = config.replace(
        **{key: value for key, value in fixed.items() if key not in SEARCHED_KEYS}
    )
    result = []
    # With more devices than heads, mp only adds padding.
    most_mp = min(MOST_MP, devices, config.n_heads)
    sizes = [mp for mp in range(1, most_mp + 1) if devices % mp == 0]
    if fixed.get("cores_per_replica", 1) not in sizes:
        raise InputError(
            f"search: cores_per_replica is {fixed['cores_per_replica']}, expected one of "
            f"{', '.join(map(str, sizes))} for {devices} devices; change --mp"
        )
    batches = (fixed["per_replica_batch"],) if "per_replica_batch" in fixed else BATCHES
    contexts = context_sizes(config.seq, devices)
    if "context_parallel" in fixed:
        contexts = [fixed["context_parallel"]]
    for mp, cp, batch, zero, remat in itertools.product(sizes, contexts, batches, ZERO, REMAT):
        dp, rest = divmod(devices, mp * cp)
        if rest or sequences % (dp * batch) or (zero and dp == 1):
            continue
        changes: dict[str, Any] = {
            "cores_per_replica": mp,
            "context_parallel": cp,
            "tpu_size": devices,
            "per_replica_batch": batch,
            "gradient_accumulation_steps": sequences // (dp * batch),
            "zero": zero,
            "remat": remat,
        }
        if cp > 1 and "shard_activations" not in fixed:
            changes["shard_activations"] = False
        if any(changes[key] != fixed[key] for key in SEARCHED_KEYS if key in fixed):
            continue
        try:
            result.append(config.replace(**changes))
        except InputError:  # such as a sequence that mp does not divide
            continue
    return result


def search(
    config: Config,
    topology: Slice,
    *,
    fixed: dict[str, Any] | None = None,
    limit: int = 12,
    in_full: bool = True,
    deadline: float | None = None,
) -> SearchResult:
    """Search for the mp, cp, ZeRO stage, remat and batch size that train fastest on a slice.

    All settings have the config's number of sequences per step.  They are compiled in the order of
    their analytic estimates, fastest first, with reduced optimisation.  The search ends when
    `limit` settings fit, or when three times `limit` do not.

    Args:
      fixed: config keys and values that all settings must have.
      limit: number of fitting settings after which the search ends.
      in_full: whether to compile the fastest settings again with full optimisation, as in training,
        until `FULL_COMPILES` of them fit.
      deadline: time of `time.monotonic` at which to stop compiling; None for no limit.

    Raises:
      InputError: if a search does not try the number of devices per replica in `fixed`, if no
        setting for the slice has the config's number of sequences per step, or if no setting
        compiles.
    """
    settings = _settings(config, topology, fixed or {})
    possible = [_that_may_fit(setting, topology, fixed or {}) for setting in settings]
    promising = [setting for _, setting in _ranked(itertools.chain(*possible))]
    outcomes = _Outcomes()
    try:
        _compile(outcomes, promising, topology, limit, deadline)
        outcomes.fitting.sort(key=_speed, reverse=True)
        if in_full:
            _compile_best_in_full(outcomes, topology, deadline)
    except OutOfTimeError:
        outcomes.out_of_time = True
        outcomes.fitting.sort(key=_speed, reverse=True)
        outcomes.fitting.sort(key=lambda pair: pair[1].fast)  # those compiled in full stay first
    return SearchResult(
        topology=topology.name,
        sequences=sequences_per_step(config),
        fits=bool(outcomes.fitting),
        plans=[fitting_plan for _, fitting_plan in outcomes.fitting],
        too_large=outcomes.too_large,
        hopeless=possible.count([]),
        larger=outcomes.larger,
        refused=len(outcomes.refused),
        left_out=len(promising) - outcomes.count,
        out_of_time=outcomes.out_of_time,
    )


def _settings(config: Config, topology: Slice, fixed: dict[str, Any]) -> list[Config]:
    """Return the result of `candidates` for a slice, or raise InputError if there is none."""
    settings = candidates(config, topology.devices, fixed)
    if not settings:
        raise InputError(
            f"topology {topology.name}: no setting for its {topology.devices} devices gives the "
            f"{sequences_per_step(config)} sequences per step; change --batch-tokens, or "
            "per_replica_batch or gradient_accumulation_steps, or fix fewer settings with flags "
            "such as --mp"
        )
    return settings


def _ranked(pairs: Iterable[tuple[Estimate, Config]]) -> list[tuple[Estimate, Config]]:
    """Sort settings by their speed on paper without any overlap, fastest first."""
    return sorted(pairs, key=lambda pair: pair[0].step_seconds[1])


def with_batch(config: Config, tokens: int, devices: Sequence[int]) -> Config:
    """Return a config whose steps have so many tokens, for `choose`, `search` and `fastest`.

    It is for one device, which computes one sequence at a time.

    Args:
      devices: the numbers of devices of all slices that the config is to be planned for.

    Raises:
      InputError: if the tokens are not a whole number of sequences.
    """
    sequences, rest = divmod(tokens, config.seq)
    if rest or not sequences:
        unit = config.seq * math.lcm(*devices)
        nearest = max(1, round(tokens / unit)) * unit
        raise InputError(
            f"--batch-tokens is {tokens:,}, not a whole number of sequences of {config.seq:,} "
            f"tokens; the nearest that any mesh of {' or '.join(map(str, devices))} devices "
            f"divides is {nearest:,}, {nearest // config.seq:,} sequences"
        )
    return config.replace(
        tpu_size=1,
        cores_per_replica=1,
        context_parallel=1,
        per_replica_batch=1,
        gradient_accumulation_steps=sequences,
    )


def choose(
    config: Config,
    topology: Slice,
    *,
    fixed: dict[str, Any] | None = None,
    fast: bool = False,
    deadline: float | None = None,
) -> Plan:
    """Choose the settings that train fastest on paper, and compile them to confirm that they fit.

    All settings have the config's number of sequences per step.  Those that fit with memory to
    spare (`SPARE`) come first.  The next ones are compiled only if the first one does not fit.
    With a deadline, each is compiled with reduced optimisation first, and in full if it then fits.

    Args:
      fixed: config keys and values that all settings must have.
      fast: whether to compile nothing in full.
      deadline: time of `time.monotonic` at which to stop compiling; None for no limit.

    Returns:
      The first plan that fits; if none of `MOST_CHOICES` does, the one with the smallest peak.  If
      the deadline passes first, it is compiled with reduced optimisation or on paper.  It is also
      on paper if no setting may fit.

    Raises:
      InputError: if no setting for the slice has the config's number of sequences per step, or if
        no setting compiles.
    """
    fixed = fixed or {}
    settings = _settings(config, topology, fixed)
    ranked = _ranked(
        itertools.chain(*(_that_may_fit(setting, topology, fixed) for setting in settings))
    )
    if not ranked:
        hardware = topology.hardware(config.dtype)
        estimates = [estimate_step(setting, hardware, topology.devices) for setting in settings]
        smallest = min(range(len(settings)), key=lambda index: estimates[index].peak_bytes)
        return plan(settings[smallest], topology, on_paper=True)
    ranked.sort(key=lambda pair: _with_spare(pair[0], topology) > topology.hbm)
    outcomes = _Outcomes()
    for _, setting in ranked:
        if len(outcomes.too_large) == MOST_CHOICES:
            break
        if any(_is_larger(setting, other) for other in outcomes.too_large):
            continue
        try:
            result, is_last = _confirmed(setting, topology, fast, deadline)
        except InputError as error:  # ZeRO finds no axis to split, or compilation fails
            outcomes.refused.append(error)
            continue
        if is_last:
            return result
        outcomes.too_large.append(result)
    if not outcomes.too_large:
        raise outcomes.refused[0]
    return min(outcomes.too_large, key=lambda result: result.peak_bytes)


def _confirmed(
    config: Config, topology: Slice, fast: bool, deadline: float | None
) -> tuple[Plan, bool]:
    """Compile a setting as far as the time allows; see `choose`.

    Returns:
      The plan, and whether it fits or the deadline has passed.
    """
    result = None
    try:
        if fast or deadline is not None:
            result = plan(config, topology, fast=True, deadline=deadline)
        if result is None or (result.fits and result.fast and not fast):
            result = plan(config, topology, deadline=deadline)
    except OutOfTimeError:
        return result or plan(config, topology, on_paper=True), True
    return result, result.fits


def comparison(plans: Sequence[Plan]) -> str:
    """Format plans for several slices as a Markdown table, one row per plan."""
    head = ["devices", "fits", "mesh", "ZeRO", "remat", "activations", "batch x micro"]
    head += ["GiB per device", "MFU, estimate", "tokens/s, estimate", "bound by", "peak and bytes"]
    return markdown_table(head, [_comparison_cells(own) for own in plans])


def _comparison_cells(own: Plan) -> list[str]:
    speeds = ["", "", ""]
    if estimate := own.estimate:
        (most, least), (best, worst) = estimate.tokens_per_second, estimate.mfu
        shares = f"{worst:.0%} to {best:.0%}" if estimate.hardware != "cpu" else ""
        speeds = [shares, f"{least:,.0f} to {most:,.0f}", estimate.bound]
    return [
        own.topology,
        "yes" if own.fits else "no",
        format_mesh(own.dp, own.cp, own.mp),
        str(own.zero),
        own.remat,
        "sharded" if own.shard_activations else "whole",
        f"{own.per_replica_batch} x {own.accumulation}",
        f"{own.peak_bytes / GIB:.2f} of {own.hbm_bytes / GIB:.2f}",
        *speeds,
        f"{own.basis}{', compiled quickly' * own.fast}",
    ]


def fastest(
    config: Config, hardware: Hardware, devices: int, limit: int, fixed: dict[str, Any]
) -> tuple[Estimate, Config] | None:
    """Return the setting that is fastest on paper and fits with memory to spare, and its estimate.

    All settings have the config's number of sequences per step.  The result is None if none fits.

    Args:
      limit: bytes that a setting may use on each of the devices, on paper.
      fixed: config keys and values that all settings must have.
    """
    settings = candidates(config, devices, fixed)
    estimates = ((estimate_step(setting, hardware, devices), setting) for setting in settings)
    return next(iter(_ranked(pair for pair in estimates if pair[0].peak_bytes <= limit)), None)


def _with_spare(estimate: Estimate, topology: Slice) -> int:
    return int((1 + SPARE) * peak_on(topology, estimate.peak_bytes))


def _that_may_fit(
    config: Config, topology: Slice, fixed: dict[str, Any]
) -> list[tuple[Estimate, Config]]:
    """Return a setting if its memory may suffice, and its variant with sharded activations.

    If `fixed` contains the key `shard_activations`, all settings have its value.  Otherwise the
    variant is left out if the setting certainly fits without it, if mp is 1 or does not divide
    `seq`, or if cp is not 1.

    Returns:
      Each of the two settings that may fit, after its analytic estimate.
    """
    hardware, limit = topology.hardware(config.dtype), topology.hbm
    is_fixed = "shard_activations" in fixed
    is_whole = is_fixed or not config.shard_activations
    variants = [config if is_whole else config.replace(shard_activations=False)]
    estimates = [estimate_step(variants[0], hardware, topology.devices)]
    mp, cp = config.cores_per_replica, config.context_parallel
    may_exceed = peak_on(topology, estimates[0].peak_bytes) * (1 + PAPER_ERROR) > limit
    if may_exceed and mp > 1 and not config.seq % mp and cp == 1 and not is_fixed:
        variants.append(config.replace(shard_activations=True))
        estimates.append(estimate_step(variants[1], hardware, topology.devices))
    return [
        pair
        for pair in zip(estimates, variants, strict=True)
        if peak_on(topology, pair[0].peak_bytes) * (1 - PAPER_ERROR) <= limit
    ]


@dataclasses.dataclass
class _Outcomes:
    """Outcomes of the settings tried so far.

    Attributes:
      fitting: settings that fit, with their plans.
      too_large, larger, out_of_time: as in `SearchResult`.
      refused: the errors of the settings that failed to compile.
    """

    fitting: list[tuple[Config, Plan]] = dataclasses.field(default_factory=list)
    too_large: list[Plan] = dataclasses.field(default_factory=list)
    refused: list[InputError] = dataclasses.field(default_factory=list)
    larger: int = 0
    out_of_time: bool = False

    @property
    def count(self) -> int:
        return len(self.fitting) + len(self.too_large) + len(self.refused) + self.larger


def _compile(
    outcomes: _Outcomes,
    promising: list[Config],
    topology: Slice,
    limit: int,
    deadline: float | None,
) -> None:
    """Compile settings in the order of the list with reduced optimisation, and record the outcomes.

    Stops when `limit` settings fit, or when three times `limit` do not fit.

    Raises:
      InputError: if every setting failed to compile.
      OutOfTimeError: if the deadline passes first.
    """
    with tqdm(total=min(limit, len(promising)), unit="setting", dynamic_ncols=True) as bar:
        for config in promising:
            if len(outcomes.fitting) == limit or len(outcomes.too_large) == 3 * limit:
                break
            if any(_is_larger(config, other) for other in outcomes.too_large):
                outcomes.larger += 1
                continue
            bar.set_postfix_str(
                f"mp {config.cores_per_replica} cp {config.context_parallel} ZeRO {config.zero} "
                f"{config.remat} batch {config.per_replica_batch}; {len(outcomes.too_large)} too "
                "large"
            )
            try:
                quick_plan = plan(config, topology, fast=True, deadline=deadline)
            except InputError as error:  # ZeRO finds no axis to split, or compilation fails
                outcomes.refused.append(error)
                continue
            if quick_plan.fits:
                outcomes.fitting.append((config, quick_plan))
            else:
                outcomes.too_large.append(quick_plan)
            bar.update(quick_plan.fits)
    if outcomes.refused and not outcomes.fitting and not outcomes.too_large:
        raise outcomes.refused[0]


def _compile_best_in_full(outcomes: _Outcomes, topology: Slice, deadline: float | None) -> None:
    """Recompile the fastest settings in full, until `FULL_COMPILES` fit, and update `outcomes`.

    In `outcomes.fitting`, the recompiled settings come first, sorted by their new speed.  Settings
    that no longer fit are moved to `too_large`, and settings that fail to compile to `refused`.
    """
    if all(not quick_plan.fast for _, quick_plan in outcomes.fitting):  # not TPUs: already in full
        return
    in_full: list[tuple[Config, Plan]] = []
    try:
        with tqdm(total=FULL_COMPILES, desc="in full", unit="setting", dynamic_ncols=True) as bar:
            while outcomes.fitting and len(in_full) < FULL_COMPILES:
                config, _ = outcomes.fitting[0]
                try:
                    full_plan = plan(config, topology, deadline=deadline)
                except InputError as error:
                    outcomes.refused.append(error)
                else:
                    if full_plan.fits:
                        in_full.append((config, full_plan))
                    else:
                        outcomes.too_large.append(full_plan)
                    bar.update(full_plan.fits)
                del outcomes.fitting[0]
    finally:  # also if the time limit ends it
        outcomes.fitting = sorted(in_full, key=_speed, reverse=True) + outcomes.fitting


def _is_larger(config: Config, other: Plan) -> bool:
    """Return whether `config` certainly needs at least as much memory as the plan `other`.

    Returns False if they differ in mp, cp, ZeRO stage or sharding of activations, because their
    memory can then not be compared.
    """
    comparable = (
        (config.cores_per_replica, config.context_parallel) == (other.mp, other.cp)
        and config.zero == other.zero
        and config.shard_activations == other.shard_activations
    )
    return (
        comparable
        and REMAT.index(config.remat) >= REMAT.index(other.remat)
        and config.per_replica_batch >= other.per_replica_batch
        and (config.gradient_accumulation_steps > 1 or other.accumulation == 1)
    )


def _speed(pair: tuple[Config, Plan]) -> float:
    estimate = pair[1].estimate
    assert estimate is not None
    return estimate.tokens_per_second[1]
