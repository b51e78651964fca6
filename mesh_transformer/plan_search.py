"""Which setting of dp, mp, ZeRO, remat and batch fits a slice, and which of them is fastest."""

import dataclasses
import itertools
from typing import Any

from tqdm import tqdm

from mesh_transformer.config import Config
from mesh_transformer.flops import Hardware
from mesh_transformer.plan import Plan, plan
from mesh_transformer.scaling import Paper, on_paper, sequences_a_step
from mesh_transformer.topology import GIB, Slice
from mesh_transformer.util import InputError

BATCHES = (1, 2, 4, 8, 16)
ZERO = (0, 1, 3)
REMAT = ("full", "dots", "none")  # the one that keeps least first
MOST_MP = 32


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
      fits: whether any does.
      plans: of what fits, the fastest first, by the estimate in which nothing overlaps.
      too_large: settings that were compiled and do not fit.
      hopeless: how many were not compiled, as state and activations alone are too large.
      left_out: how many were not compiled, as `limit` others looked faster on paper.
    """

    topology: str
    sequences: int
    fits: bool
    plans: list[Plan]
    too_large: list[Plan]
    hopeless: int
    left_out: int

    def table(self) -> str:
        """The same for people."""
        head = (
            f"{self.topology}, {self.sequences} sequences a step: {len(self.plans)} fit, "
            f"{len(self.too_large)} compiled and too large, {self.hopeless} too large on paper, "
            f"{self.left_out} not compiled, as slower on paper"
        )
        rows = [
            "  dp   mp ZeRO remat activations batch x micro  GiB a device   tokens/s (estimate)"
            "     MFU",
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
        f"{least:9,.0f} to {most:9,.0f}  {one.estimate.mfu[1]:.0%} to {one.estimate.mfu[0]:.0%}"
    )


def candidates(config: Config, devices: int) -> list[Config]:
    """All sensible settings that train on as many sequences a step as the config does."""
    sequences = sequences_a_step(config)
    found = []
    sizes = [mp for mp in range(1, min(MOST_MP, devices) + 1) if devices % mp == 0]
    for mp, batch, zero, remat in itertools.product(sizes, BATCHES, ZERO, REMAT):
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
        try:
            found.append(config.replace(**changes))
        except InputError:  # mp does not divide the heads, or the vocabulary
            continue
    return found


def search(
    config: Config,
    topology: Slice,
    *,
    fixed: dict[str, Any] | None = None,
    limit: int = 12,
    fast: bool = True,
) -> Found:
    """Compiles settings, those that look fastest on paper first, until `limit` of them fit.

    Args:
      fixed: keys of the config that every setting has to have so.

    Raises:
      InputError: where no setting of the slice takes the config's sequences a step.
    """
    every = [
        each
        for each in candidates(config, topology.devices)
        if all(getattr(each, key) == value for key, value in (fixed or {}).items())
    ]
    if not every:
        raise InputError(
            f"topology {topology.name}: no setting of its {topology.devices} devices takes the "
            "sequences a step of the config; change its per_replica_batch or accumulation, or "
            "give fewer flags"
        )
    hardware = topology.hardware(config.dtype)
    papers = [_with_room(each, hardware, topology) for each in every]
    hopeful = [
        each
        for paper, each in sorted(papers, key=_paper_seconds)
        if paper.memory_bytes <= topology.hbm
    ]
    fitting, too_large = _compile(hopeful, topology, limit, fast=fast)
    fitting.sort(key=_speed, reverse=True)
    return Found(
        topology=topology.name,
        sequences=sequences_a_step(config),
        fits=bool(fitting),
        plans=fitting,
        too_large=too_large,
        hopeless=len(every) - len(hopeful),
        left_out=len(hopeful) - len(fitting) - len(too_large),
    )


def _with_room(config: Config, hardware: Hardware, topology: Slice) -> tuple[Paper, Config]:
    """The config on paper; with sharded activations where it is too large otherwise."""
    paper = on_paper(config, hardware, topology.devices)
    shards = config.cores_per_replica
    if paper.memory_bytes <= topology.hbm or shards == 1 or config.seq % shards:
        return paper, config
    config = config.replace(shard_activations=True)
    return on_paper(config, hardware, topology.devices), config


def _compile(
    hopeful: list[Config], topology: Slice, limit: int, *, fast: bool
) -> tuple[list[Plan], list[Plan]]:
    """What fits, `limit` at most, and what does not, three times as many at most."""
    fitting: list[Plan] = []
    too_large: list[Plan] = []
    with tqdm(total=min(limit, len(hopeful)), unit="setting", dynamic_ncols=True) as bar:
        for each in hopeful:
            if len(fitting) == limit or len(too_large) == 3 * limit:
                break
            if any(_is_larger(each, other) for other in too_large):
                continue
            bar.set_postfix_str(
                f"mp {each.cores_per_replica} ZeRO {each.zero} {each.remat} batch "
                f"{each.per_replica_batch}; {len(too_large)} too large"
            )
            try:
                one = plan(each, topology, fast=fast)
            except InputError:  # ZeRO finds no axis to split
                continue
            (fitting if one.fits else too_large).append(one)
            bar.update(one.fits)
    return fitting, too_large


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


def _speed(one: Plan) -> float:
    assert one.estimate is not None
    return one.estimate.tokens_per_second[1]
