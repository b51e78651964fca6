"""Which setting of dp, mp, ZeRO, remat and batch fits a slice, and which of them is fastest."""

import dataclasses
import itertools
from typing import Any

from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.mesh.accelerators import GIB, Hardware
from mesh_transformer.performance.plan import Plan, plan
from mesh_transformer.performance.scaling import Paper, on_paper, sequences_a_step
from mesh_transformer.performance.topology import Slice
from mesh_transformer.util import InputError

BATCHES = (1, 2, 4, 8, 16)
ZERO = (0, 1, 3)
REMAT = ("full", "dots", "none")  # the one that keeps least first
MOST_MP = 32
IN_FULL = 3  # of the fastest by a quick compilation, as many are compiled again as they would run
# The keys in which candidates differ; all others stand as they are given.
VARIED = ("cores_per_replica", "per_replica_batch", "gradient_accumulation_steps", "zero", "remat")


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
      fits: whether any does.
      plans: of what fits, the fastest first, by the estimate in which nothing overlaps; those that
        were compiled in full before those that were not.
      too_large: settings that were compiled and do not fit.
      hopeless: how many were not compiled, as state and activations alone are too large.
      larger: how many were not compiled, as they need more than one of `too_large`.
      refused: how many could not be compiled.
      left_out: how many were not compiled, as `limit` others looked faster on paper.
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

    def table(self) -> str:
        """The same for people."""
        head = (
            f"{self.topology}, {self.sequences} sequences a step: {len(self.plans)} fit, "
            f"{len(self.too_large)} compiled and too large, {self.larger} larger than one of "
            f"these, {self.hopeless} too large on paper, {self.refused} that cannot be compiled, "
            f"{self.left_out} not compiled, as slower on paper"
        )
        rows = [
            "  dp   mp ZeRO remat activations batch x micro  GiB a device   tokens/s (estimate)"
            "     MFU         compiled",
            *map(_row, self.plans),
        ]
        if not self.plans:
            rows = ["nothing that was compiled fits; raise --limit, or take a larger slice"]
        return "\n".join([head, *rows])


def _row(one: Plan) -> str:
    assert one.estimate is not None
    most, least = one.estimate.tokens_per_second
    return (
        f"{one.dp:4} {one.mp:4} {one.zero:4} {one.remat:5} "
        f"{'sharded' if one.shard_activations else 'whole':11} {one.per_replica_batch:5} x "
        f"{one.accumulation:<5}  {one.peak_bytes / GIB:5.2f} of {one.hbm_bytes / GIB:5.2f}  "
        f"{least:9,.0f} to {most:9,.0f}  {one.estimate.mfu[1]:.0%} to {one.estimate.mfu[0]:.0%}  "
        f"{'quickly' if one.fast else 'in full'}"
    )


def candidates(config: Config, devices: int, fixed: dict[str, Any] | None = None) -> list[Config]:
    """All sensible settings that train on as many sequences a step as the config does.

    Args:
      fixed: keys of the config that every setting has so.
    """
    fixed = fixed or {}
    sequences = sequences_a_step(config)
    config = config.replace(**{key: value for key, value in fixed.items() if key not in VARIED})
    found = []
    sizes = [mp for mp in range(1, min(MOST_MP, devices) + 1) if devices % mp == 0]
    batches = (fixed["per_replica_batch"],) if "per_replica_batch" in fixed else BATCHES
    for mp, batch, zero, remat in itertools.product(sizes, batches, ZERO, REMAT):
        dp = devices // mp
        if sequences % (dp * batch) or (zero and dp == 1):
            continue
        changes: dict[str, Any] = {
            "cores_per_replica": mp,
            "tpu_size": devices,
            "per_replica_batch": batch,
            "gradient_accumulation_steps": sequences // (dp * batch),
            "zero": zero,
            "remat": remat,
        }
        if any(changes[key] != fixed[key] for key in VARIED if key in fixed):
            continue
        try:
            found.append(config.replace(**changes))
        except InputError:  # mp does not divide the heads, the vocabulary or the sequence
            continue
    return found


def search(
    config: Config,
    topology: Slice,
    *,
    fixed: dict[str, Any] | None = None,
    limit: int = 12,
    in_full: bool = True,
) -> Found:
    """Compiles settings quickly, those that look fastest on paper first, until `limit` fit.

    Args:
      fixed: keys of the config that every setting has to have so.
      in_full: compile the fastest of these again (`IN_FULL`), as they would be to run.

    Raises:
      InputError: where no setting of the slice takes the config's sequences a step, or none can
        be compiled.
    """
    every = candidates(config, topology.devices, fixed)
    if not every:
        raise InputError(
            f"topology {topology.name}: no setting of its {topology.devices} devices takes the "
            "sequences a step of the config; change its per_replica_batch or accumulation, or "
            "give fewer flags"
        )
    hardware = topology.hardware(config.dtype)
    papers = [_with_room(each, hardware, topology, fixed or {}) for each in every]
    hopeful = [
        each
        for paper, each in sorted(papers, key=_paper_seconds)
        if paper.memory_bytes <= topology.hbm
    ]
    tried = _compile(hopeful, topology, limit)
    tried.fitting.sort(key=_speed, reverse=True)
    if in_full:
        _compile_best_in_full(tried, topology)
    return Found(
        topology=topology.name,
        sequences=sequences_a_step(config),
        fits=bool(tried.fitting),
        plans=[one for _, one in tried.fitting],
        too_large=tried.too_large,
        hopeless=len(every) - len(hopeful),
        larger=tried.larger,
        refused=len(tried.refused),
        left_out=len(hopeful) - tried.count,
    )


def _with_room(
    config: Config, hardware: Hardware, topology: Slice, fixed: dict[str, Any]
) -> tuple[Paper, Config]:
    """The config on paper; with sharded activations where it is too large otherwise."""
    paper = on_paper(config, hardware, topology.devices)
    shards = config.cores_per_replica
    enough = paper.memory_bytes <= topology.hbm or shards == 1 or config.seq % shards
    if enough or "shard_activations" in fixed:
        return paper, config
    config = config.replace(shard_activations=True)
    return on_paper(config, hardware, topology.devices), config


@dataclasses.dataclass
class _Tried:
    """What became of the settings that were to be compiled; see `Found`."""

    fitting: list[tuple[Config, Plan]] = dataclasses.field(default_factory=list)
    too_large: list[Plan] = dataclasses.field(default_factory=list)
    refused: list[InputError] = dataclasses.field(default_factory=list)
    larger: int = 0

    @property
    def count(self) -> int:
        return len(self.fitting) + len(self.too_large) + len(self.refused) + self.larger


def _compile(hopeful: list[Config], topology: Slice, limit: int) -> _Tried:
    """Quickly, until `limit` fit, or three times as many do not."""
    tried = _Tried()
    with tqdm(total=min(limit, len(hopeful)), unit="setting", dynamic_ncols=True) as bar:
        for each in hopeful:
            if len(tried.fitting) == limit or len(tried.too_large) == 3 * limit:
                break
            if any(_is_larger(each, other) for other in tried.too_large):
                tried.larger += 1
                continue
            bar.set_postfix_str(
                f"mp {each.cores_per_replica} ZeRO {each.zero} {each.remat} batch "
                f"{each.per_replica_batch}; {len(tried.too_large)} too large"
            )
            try:
                one = plan(each, topology, fast=True)
            except InputError as error:  # ZeRO finds no axis to split, or the compiler fails
                tried.refused.append(error)
                continue
            if one.fits:
                tried.fitting.append((each, one))
            else:
                tried.too_large.append(one)
            bar.update(one.fits)
    if tried.refused and not tried.fitting and not tried.too_large:
        raise tried.refused[0]
    return tried


def _compile_best_in_full(tried: _Tried, topology: Slice) -> None:
    """The first of what fits, in the order of a compilation as it would be to run."""
    best, rest = tried.fitting[:IN_FULL], tried.fitting[IN_FULL:]
    if not any(one.fast for _, one in best):  # but for TPUs every compilation is in full
        return
    in_full = []
    for config, _ in tqdm(best, desc="in full", unit="setting", dynamic_ncols=True):
        try:
            one = plan(config, topology)
        except InputError as error:
            tried.refused.append(error)
            continue
        if one.fits:
            in_full.append((config, one))
        else:
            tried.too_large.append(one)
    tried.fitting = sorted(in_full, key=_speed, reverse=True) + rest


def _is_larger(one: Config, other: Plan) -> bool:
    """Whether it cannot fit where the other does not: the same with as many sequences or more."""
    same = (
        one.cores_per_replica == other.mp
        and one.zero == other.zero
        and one.shard_activations == other.shard_activations
    )
    return (
        same
        and REMAT.index(one.remat) >= REMAT.index(other.remat)
        and one.per_replica_batch >= other.per_replica_batch
        and (one.gradient_accumulation_steps > 1 or other.accumulation == 1)
    )


def _paper_seconds(pair: tuple[Paper, Config]) -> float:
    return pair[0].seconds


def _speed(pair: tuple[Config, Plan]) -> float:
    estimate = pair[1].estimate
    assert estimate is not None
    return estimate.tokens_per_second[1]
