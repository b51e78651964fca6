"""Plans: whether training or generation fits a slice of devices, and what bounds its speed.

A plan compiles the real step for devices that need not be present.  All figures are the
compiler's, except those called an estimate.
"""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import Config
from mesh_transformer.generation import batch, decode
from mesh_transformer.mesh.accelerators import GIB, Hardware
from mesh_transformer.mesh.devices import abstract, named
from mesh_transformer.model import flops, gptj
from mesh_transformer.model.attention import attention_backend
from mesh_transformer.performance.hlo import Program, planned_memory
from mesh_transformer.performance.roofline import (
    Estimate,
    Traffic,
    decode_traffic,
    estimate,
    traffic_of,
)
from mesh_transformer.performance.topology import Slice
from mesh_transformer.training import step
from mesh_transformer.util import InputError

# Compiler options of `fast`.  They do not change the collectives, change the peak by at most 8
# percent, and the memory traffic by at most a factor of 2.
FAST = {"exec_time_optimization_effort": -1.0}
_OUT_OF_MEMORY = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM")
_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Peak memory and HLO of a program compiled for a device.

    Attributes:
      peak: bytes on one device.
      text: HLO text; None if the compiler rejects the program for its size.
      seconds: compilation time.
      fast: whether it was compiled with `FAST`.
    """

    peak: int
    text: str | None
    seconds: float
    fast: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of a config's training on a slice.

    Bytes are per device.

    Attributes:
      flops: FLOPs of a whole step on all devices, as PaLM counts them.
      collectives, estimate: None if the compiler rejects the program for its size.
      fast: whether it was compiled with `FAST`, which makes peak and estimate less exact.
    """

    topology: str
    devices: int
    dp: int
    mp: int
    partitioning: str | None
    zero: int | None
    remat: str
    shard_activations: bool
    loss_chunk: int
    per_replica_batch: int
    accumulation: int
    parameters: int
    state_bytes: int
    peak_bytes: int
    hbm_bytes: int
    fits: bool
    flops_per_token: int
    flops: int
    collectives: Traffic | None
    estimate: Estimate | None
    compile_seconds: float
    fast: bool

    @property
    def setting(self) -> str:
        """The plan's settings in one line."""
        return (
            f"dp {self.dp} x mp {self.mp}, {self.partitioning}, ZeRO {self.zero}, remat "
            f"{self.remat}, {'sharded' if self.shard_activations else 'whole'} activations, loss "
            f"in chunks of {self.loss_chunk}, batch {self.per_replica_batch} per replica x "
            f"{self.accumulation} microbatches"
        )

    def table(self) -> str:
        """Format the plan as readable text."""
        lines = [
            f"{self.topology}: {self.devices} devices, {self.setting}",
            f"{self.parameters / 1e9:.2f}B parameters, {self.flops_per_token / 1e9:.2f} GFLOP per "
            f"token (weights + 12LHQT), {self.flops / 1e12:,.1f} TFLOP per step",
            room(self.state_bytes, self.peak_bytes, self.hbm_bytes, fits=self.fits),
        ]
        if self.collectives is not None:
            lines += self.collectives.lines()
        if self.estimate is not None:
            lines += self.estimate.lines()
        effort = " (--fast)" if self.fast else ""
        return "\n".join([*lines, f"compiled in {self.compile_seconds:.0f} s{effort}"])


def room(state: int, peak: int, limit: int, *, fits: bool) -> str:
    """Format memory per device in one line: state, peak, limit, and by how much it fits or not.

    Sizes are in bytes.
    """
    spare = (limit - peak) / GIB
    verdict = (
        f"fits, {spare:.2f} GiB to spare" if fits else f"does not fit, {-spare:.2f} GiB too large"
    )
    return (
        f"memory per device: state {state / GIB:.2f} GiB, peak {peak / GIB:.2f} of "
        f"{limit / GIB:.2f} GiB: {verdict}"
    )


def mesh_of(config: Config, topology: Slice) -> Mesh:
    """Return the slice's devices as replicas of `cores_per_replica` devices.

    Raises:
      InputError: if `cores_per_replica` does not divide the slice.
    """
    mp = config.cores_per_replica
    if topology.devices % mp:
        raise InputError(
            f"topology {topology.name} has {topology.devices} devices, which mp {mp} does not "
            "divide; change --mp"
        )
    return topology.mesh(topology.devices // mp, mp)


def plan(config: Config, topology: Slice, *, fast: bool = False) -> Plan:
    """Compile a config's training step for a slice; report memory, collectives and speed.

    Args:
      config: its `cores_per_replica` is mp; dp follows from the number of devices.
      fast: whether to compile in a fraction of the time, with less exact figures.

    Raises:
      InputError: if mp does not divide the devices, libtpu is missing, or compilation fails for
        another reason than the program's size.
    """
    mesh = mesh_of(config, topology)
    config = config.replace(tpu_size=topology.devices)
    step.check_zero(config, mesh)
    # Before compiling, as this fails for unknown devices.
    hardware, limit = topology.hardware(config.dtype), topology.hbm
    state, batch = step.abstract_state(config, mesh), abstract_batch(config, mesh)
    memory = compiled(topology.name, step.compile_train(config, mesh), state, batch, fast=fast)
    tokens = math.prod(batch["obs"].shape)
    traffic = speed = None
    if memory.text is not None:
        traffic, speed = _traffic_and_speed(memory.text, config, mesh, hardware, tokens)
    per_token = flops.palm_flops_per_token(config)
    return Plan(
        topology=topology.name,
        devices=mesh.size,
        dp=mesh.shape["dp"],
        mp=mesh.shape["mp"],
        partitioning=config.partitioning,
        zero=config.zero,
        remat=config.remat,
        shard_activations=config.shard_activations,
        loss_chunk=config.loss_chunk,
        per_replica_batch=config.per_replica_batch,
        accumulation=config.gradient_accumulation_steps,
        parameters=flops.n_params(config),
        state_bytes=bytes_on_one_device(state),
        peak_bytes=memory.peak,
        hbm_bytes=limit,
        fits=memory.text is not None and memory.peak <= limit,
        flops_per_token=per_token,
        flops=per_token * tokens,
        collectives=traffic,
        estimate=speed,
        compile_seconds=memory.seconds,
        fast=memory.fast,
    )


def _traffic_and_speed(
    text: str, config: Config, mesh: Mesh, hardware: Hardware, tokens: int
) -> tuple[Traffic, Estimate]:
    """Return the collectives of a step's HLO, and the speed estimated from it."""
    traffic = traffic_of(text, config, mesh)
    return traffic, estimate(
        config,
        hardware,
        devices=mesh.size,
        tokens=tokens,
        hbm_traffic_bytes=Program(text).moved(),
        link_bytes=sum(exchange.sent for exchange in traffic.exchanges),
        attention=attention_backend(config, mesh.devices.flat[0]),
    )


def compiled(topology: str, function: Callable[..., Any], *args: Any, fast: bool = False) -> Memory:
    """Compile a jitted function for abstract arguments, on the devices of their shardings.

    Raises:
      InputError: if compilation fails for another reason than the program's size.
    """
    began = time.perf_counter()
    lowered = function.trace(*args).lower()  # type: ignore[attr-defined]
    on_tpu = _platform(args) == "tpu"
    fast = fast and on_tpu
    try:
        program = lowered.compile(compiler_options=FAST if fast else None)
    except jax.errors.JaxRuntimeError as error:
        size = _OUT_OF_MEMORY.search(str(error))
        if size is None:
            reason = str(error).strip().partition("\n")[0]
            raise InputError(f"topology {topology}: compilation failed: {reason}") from None
        peak = int(float(size[1]) * _SIZES[size[2]])
        return Memory(peak, None, time.perf_counter() - began, fast)
    # Only the TPU compiler reports the peak.
    peak = program.memory_analysis().peak_memory_in_bytes if on_tpu else planned_memory(program)
    return Memory(peak, program.as_text(), time.perf_counter() - began, fast)


def _platform(args: Any) -> str:
    """Return the platform of the devices that abstract arrays are placed on."""
    leaves = (leaf for leaf in jax.tree.leaves(args) if leaf.sharding is not None)
    return next(iter(next(leaves).sharding.device_set)).platform


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and shardings of one training step's tokens, [A, B, T]."""
    rows = config.per_replica_batch * mesh.shape["dp"]
    shape = (config.gradient_accumulation_steps, rows, config.seq)
    tokens = jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=NamedSharding(mesh, P(None, "dp")))
    return {"obs": tokens, "target": tokens}


def bytes_on_one_device(tree: Any) -> int:
    """Return the bytes that one device holds of abstract arrays."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


STEPS = 64  # decode steps per call; only the size of the output depends on it


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Plan of generation on a slice: one step makes one more token in every row.

    Bytes are per device.

    Attributes:
      rows: batch rows of all replicas.
      cache_length: positions per row.
      state_bytes: weights and cache.
      read_bytes: the part of `state_bytes` that every step reads: all but the embedding.  A step
        takes at least the time to read it at the memory's bandwidth.
      bytes_per_token: bytes that the compiled step reads and writes (`hlo.Program`).
      tokens_per_second: estimates for all rows, from `read_bytes` and from `bytes_per_token`, at
        the memory's full bandwidth and with no other limit.
    """

    topology: str
    devices: int
    dp: int
    mp: int
    rows: int
    cache_length: int
    int8_weights: bool
    weights_bytes: int
    cache_bytes: int
    state_bytes: int
    read_bytes: int
    peak_bytes: int
    hbm_bytes: int
    fits: bool
    flops_per_token: int
    collectives: Traffic | None
    bytes_per_token: int | None
    hardware: str
    source: str
    tokens_per_second: tuple[float, float | None]
    compile_seconds: float

    def table(self) -> str:
        """Format the plan as readable text."""
        most, likely = self.tokens_per_second
        kind = "8-bit weights" if self.int8_weights else "weights"
        lines = [
            f"{self.topology}: {self.devices} devices, dp {self.dp} x mp {self.mp}, generation of "
            f"{self.rows} rows with {self.cache_length} positions each",
            f"{kind} {self.weights_bytes / 1e9:.2f} GB and cache {self.cache_bytes / 1e9:.2f} GB "
            f"per device, {self.flops_per_token / 1e9:.2f} GFLOP per token",
            room(self.state_bytes, self.peak_bytes, self.hbm_bytes, fits=self.fits),
        ]
        if self.collectives is not None and self.bytes_per_token is not None:
            lines += self.collectives.lines()
            lines.append(
                f"estimate on {self.hardware} ({self.source}), rows x bandwidth over bytes: "
                f"{likely:,.0f} tokens/s by the {self.bytes_per_token / 1e9:.2f} GB per step that "
                f"the compiled program moves, at most {most:,.0f} by weights and cache"
            )
        return "\n".join([*lines, f"compiled in {self.compile_seconds:.0f} s"])


def decode_plan(config: Config, topology: Slice, *, fast: bool = False) -> DecodePlan:
    """Compile a generation step for `per_replica_batch` rows per replica of `seq` positions.

    Raises:
      InputError: if mp does not divide the devices, libtpu is missing, or compilation fails for
        another reason than the program's size.
    """
    mesh = mesh_of(config, topology)
    rows = config.per_replica_batch * mesh.shape["dp"]
    weights, state = _abstract_weights(config, mesh), _abstract_rows(config, mesh, rows)
    left = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=NamedSharding(mesh, P("dp")))
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    function = batch.compile_decode(config, mesh, None, STEPS)
    # Before compiling, as this fails for unknown devices.
    hardware, limit = topology.hardware(config.dtype), topology.hbm
    memory = compiled(topology.name, function, weights, state, left, count, fast=fast)
    sizes = bytes_on_one_device(weights), bytes_on_one_device(state.caches)
    read = sum(sizes) - bytes_on_one_device(weights["embed"])
    traffic = moved = likely = None
    if memory.text is not None:
        traffic = decode_traffic(memory.text, config, mesh)
        moved = Program(memory.text).moved_in_a_loop()
        likely = rows * hardware.hbm / moved
    return DecodePlan(
        topology=topology.name,
        devices=topology.devices,
        dp=mesh.shape["dp"],
        mp=mesh.shape["mp"],
        rows=rows,
        cache_length=config.seq,
        int8_weights=config.int8_weights,
        weights_bytes=sizes[0],
        cache_bytes=sizes[1],
        state_bytes=sum(sizes),
        read_bytes=read,
        peak_bytes=memory.peak,
        hbm_bytes=limit,
        fits=memory.text is not None and memory.peak <= limit,
        flops_per_token=flops.decode_flops_per_token(config),
        collectives=traffic,
        bytes_per_token=moved,
        hardware=hardware.name,
        source=hardware.source,
        tokens_per_second=(rows * hardware.hbm / read, likely),
        compile_seconds=memory.seconds,
    )


def _abstract_weights(config: Config, mesh: Mesh) -> decode.Weights:
    """Return the shapes and shardings of generation's weights."""
    params = jax.eval_shape(functools.partial(gptj.init, config), jax.random.key(0))
    shapes = jax.eval_shape(functools.partial(decode.weights_of, config=config), params)
    return abstract(shapes, named(mesh, decode.weight_specs(config)))


def _abstract_rows(config: Config, mesh: Mesh, rows: int) -> decode.DecodeState:
    """Return the shapes and shardings of a batch of `rows` rows with `seq` positions each."""
    shapes = jax.eval_shape(lambda: decode.empty(config, rows, config.seq))
    return abstract(shapes, named(mesh, batch.decode_specs(config)))
