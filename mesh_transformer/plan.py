"""Whether a training step fits a TPU slice, and what its devices will say to each other.

The real step is compiled, for devices that need not exist; the figures are the compiler's own.
"""

import dataclasses
import math
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer import flops, hlo, step
from mesh_transformer.config import Config
from mesh_transformer.topology import GIB, Topology
from mesh_transformer.util import InputError

# The compiler crashes over ZeRO 3's reductions inside a loop of microbatches.
OPTIONS = {"xla_disable_hlo_passes": "while-loop-all-reduce-code-motion"}
FAST = {"exec_time_optimization_effort": -1.0}  # the same collectives, the peak within 8 percent
_OUT_OF_MEMORY = re.compile(r"\(([\d.]+)([KMG])\) exceeds available HBM")
_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What the devices exchange in one step: arrays, and their bytes on one device."""

    layer_forward: int  # activation all-reduces in the loop over layers, forward
    layer_backward: int
    bytes_by_kind: dict[str, int]  # in the whole step


@dataclasses.dataclass(frozen=True)
class Plan:
    """A config on a slice.  Bytes are of one device; FLOPs of one token or of all devices."""

    topology: str
    devices: int
    dp: int
    mp: int
    partitioning: str | None
    zero: int | None
    remat: str
    per_replica_batch: int
    accumulation: int
    parameters: int
    state_bytes: int
    peak_bytes: int
    hbm_bytes: int
    fits: bool
    flops_per_token: int
    flops_per_step: int
    collectives: Traffic | None  # None where it does not fit: there is no program then
    compile_seconds: float

    def table(self) -> str:
        """The same for people."""
        room = (self.hbm_bytes - self.peak_bytes) / GIB
        verdict = (
            f"fits, {room:.2f} GiB to spare" if self.fits else f"does not fit by {-room:.2f} GiB"
        )
        lines = [
            f"{self.topology}: {self.devices} devices, dp {self.dp} x mp {self.mp}, "
            f"{self.partitioning}, ZeRO {self.zero}, remat {self.remat}, batch "
            f"{self.per_replica_batch} a replica x {self.accumulation} microbatches",
            f"{self.parameters / 1e9:.2f}B parameters, {self.flops_per_token / 1e9:.2f} GFLOP a "
            f"token (weights + 12LHQT), {self.flops_per_step / 1e12:,.1f} TFLOP a step",
            f"memory of a device: state {self.state_bytes / GIB:.2f} GiB, peak "
            f"{self.peak_bytes / GIB:.2f} of {self.hbm_bytes / GIB:.2f}: {verdict}",
        ]
        if self.collectives is not None:
            each = self.collectives
            lines.append(
                f"activation all-reduces in the loop over layers: {each.layer_forward} forward, "
                f"{each.layer_backward} backward"
            )
            lines += [
                f"{kind} a step: {size / 1e6:,.1f} MB a device"
                for kind, size in sorted(each.bytes_by_kind.items())
            ]
        return "\n".join([*lines, f"compiled in {self.compile_seconds:.0f} s"])


def plan(config: Config, topology: Topology, *, fast: bool = False) -> Plan:
    """Compiles the config's training step for a slice, and tells what came of it.

    Args:
      config: its `cores_per_replica` is mp; the rest of the devices are replicas.
      fast: compile in a fraction of the time, for a peak that is less exact.

    Raises:
      InputError: where mp does not divide the devices, or libtpu is missing.
    """
    mp = config.cores_per_replica
    if topology.devices % mp:
        raise InputError(
            f"topology {topology.name} has {topology.devices} devices, which mp {mp} does not "
            "divide; give another --mp"
        )
    mesh = topology.mesh(topology.devices // mp, mp)
    config = config.replace(tpu_size=topology.devices)
    step.check_zero(config, mesh)
    state, batch = step.abstract_state(config, mesh), _abstract_batch(config, mesh)
    began = time.perf_counter()
    lowered = step.compile_train(config, mesh).trace(state, batch).lower()  # type: ignore[attr-defined]
    try:
        compiled = lowered.compile(compiler_options=OPTIONS | (FAST if fast else {}))
        peak, traffic = compiled.memory_analysis().peak_memory_in_bytes, _traffic(compiled, config)
    except jax.errors.JaxRuntimeError as error:
        wanted = _OUT_OF_MEMORY.search(str(error))
        if wanted is None:
            raise
        peak, traffic = int(float(wanted[1]) * _SIZES[wanted[2]]), None
    per_token = flops.palm_flops_per_token(config)
    return Plan(
        topology=topology.name,
        devices=topology.devices,
        dp=mesh.shape["dp"],
        mp=mp,
        partitioning=config.partitioning,
        zero=config.zero,
        remat=config.remat,
        per_replica_batch=config.per_replica_batch,
        accumulation=config.gradient_accumulation_steps,
        parameters=flops.n_params(config),
        state_bytes=_bytes_on_one_device(state),
        peak_bytes=peak,
        hbm_bytes=topology.hbm,
        fits=traffic is not None,
        flops_per_token=per_token,
        flops_per_step=per_token * math.prod(batch["obs"].shape),
        collectives=traffic,
        compile_seconds=time.perf_counter() - began,
    )


def _abstract_batch(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    rows = config.per_replica_batch * mesh.shape["dp"]
    shape = (config.gradient_accumulation_steps, rows, config.seq)
    tokens = jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=NamedSharding(mesh, P(None, "dp")))
    return {"obs": tokens, "target": tokens}


def _bytes_on_one_device(tree: Any) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _traffic(compiled: Any, config: Config) -> Traffic:
    """What a compiled step exchanges; of a combined collective each array counts."""
    whole = hlo.parse(compiled.as_text())
    size = config.per_replica_batch * config.seq * config.d_model
    reduced = [
        "transpose" in each.where
        for loop in whole.all()
        if loop.trips == config.layers
        for each in loop.collectives
        if each.kind == "all-reduce" and math.prod(each.shape) == size and not each.is_alone
    ]
    by_kind: dict[str, int] = {}
    for each, times in whole.runs():
        if not each.is_alone:
            by_kind[each.kind] = by_kind.get(each.kind, 0) + times * each.bytes
    return Traffic(reduced.count(False), reduced.count(True), by_kind)
