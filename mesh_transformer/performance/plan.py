"""Predictions of the memory, collectives and speed of training or generation on given devices.

A plan compiles the real training or decode step, but does not run it, so the devices need not be
present.  The peak memory and the collectives come from the compiler; the speed is an estimate.  For
GPUs that are not present the compiler is that of TPUs (`topology.Gpus`).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import Config
from mesh_transformer.data.batches import TEACHER_KEYS
from mesh_transformer.generation import decode, programs
from mesh_transformer.generation.pool import Pool, check_kernel, server_pool, storage
from mesh_transformer.generation.speculation import check_guesses, draft_config, within_window
from mesh_transformer.generation.weights import DRAFT, WeightLayout, Weights, weight_layout
from mesh_transformer.mesh.accelerators import GIB
from mesh_transformer.mesh.device_order import Distances
from mesh_transformer.mesh.program import Layout
from mesh_transformer.model import flops
from mesh_transformer.model.paged import slots_together
from mesh_transformer.performance.analytic import estimate_step
from mesh_transformer.performance.compilation import Memory, compiled
from mesh_transformer.performance.device_arrays import (
    abstract_rows,
    abstract_weights,
    bytes_per_device,
    cache_read,
    weights_read,
)
from mesh_transformer.performance.hlo import Program
from mesh_transformer.performance.roofline import (
    Estimate,
    Traffic,
    decode_traffic,
    estimate,
    traffic_of,
)
from mesh_transformer.performance.topology import (
    Slice,
    basis_of,
    format_mesh,
    mesh_of,
    peak_on,
)
from mesh_transformer.training import step
from mesh_transformer.training.distillation import teacher_layout
from mesh_transformer.training.objectives import Head, head_of


@dataclasses.dataclass(frozen=True)
class Plan:
    """Predicted memory, collectives and speed of training a config on a TPU slice or other devices.

    Bytes are per device.

    Attributes:
      dp, cp, mp: number of data-parallel replicas, of devices that split each sequence's positions,
        and of devices that split the model.
      state_bytes: parameters, also of a teacher, and optimizer state, without those in host memory.
      host_bytes: parameters and optimizer state in host memory.
      hbm_bytes: memory that a program may use on one device.
      fits: whether `peak_bytes` is at most `hbm_bytes`.
      basis: where `peak_bytes`, `collectives` and the bytes of `estimate` come from.
      flops: FLOPs of one step on all devices together, counted as in the PaLM paper, without those
        of a teacher.
      collectives, estimate: collectives of one step, and its estimated speed.  Both are None if the
        compiler rejected the program because it needs too much memory, and `collectives` if the
        step was not compiled.
      compile_seconds: compilation time; 0 if the step was not compiled.
      fast: whether the step was compiled with reduced optimisation (`FAST_OPTIONS`), which makes
        the peak and the estimate less exact.
      cached: whether the figures are those of an earlier compilation of the same program.
      distances: how far apart the devices of the mesh are; None except for TPUs.
      plain: the plan without `virtual_mesh`, if `priced_plan` made this one for a config with it.
    """

    topology: str
    devices: int
    dp: int
    cp: int
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
    host_bytes: int
    peak_bytes: int
    hbm_bytes: int
    fits: bool
    basis: str
    flops_per_token: int
    flops: int
    collectives: Traffic | None
    estimate: Estimate | None
    compile_seconds: float
    fast: bool
    cached: bool = False
    distances: Distances | None = None
    plain: "Plan | None" = None

    @property
    def setting(self) -> str:
        """The mesh, batch size and other settings of the plan, as one line of text."""
        return (
            f"{format_mesh(self.dp, self.cp, self.mp)}, {self.partitioning}, ZeRO {self.zero}, "
            f"remat {self.remat}, {'sharded' if self.shard_activations else 'whole'} activations, "
            f"loss in chunks of {self.loss_chunk}, batch {self.per_replica_batch} per replica x "
            f"{self.accumulation} microbatches"
        )

    def table(self) -> str:
        """Format the plan as readable text."""
        lines = [
            f"{self.topology}: {self.devices} devices, {self.setting}",
            f"{self.parameters / 1e9:.2f}B parameters, {self.flops_per_token / 1e9:.2f} GFLOP per "
            f"token (weights + 12LHQT), {self.flops / 1e12:,.1f} TFLOP per step",
            format_memory(self.state_bytes, self.peak_bytes, self.hbm_bytes, fits=self.fits),
            f"peak and bytes: {self.basis}; nothing was measured",
        ]
        if self.host_bytes:
            lines.append(
                f"host memory: {self.host_bytes / GIB:.2f} GiB per device, "
                f"{self.host_bytes * self.devices / GIB:.2f} GiB of all hosts together"
            )
        if self.distances is not None:
            lines.append(self.distances.line())
        if self.collectives is not None:
            lines += self.collectives.lines()
        if self.estimate is not None:
            lines += self.estimate.lines()
        if self.plain is not None:
            lines.append(self._price(self.plain))
        if self.compile_seconds:
            lines.append(_compilation(self.compile_seconds, fast=self.fast, cached=self.cached))
        return "\n".join(lines)

    def _price(self, plain: "Plan") -> str:
        """Compare this plan with that of the step without `virtual_mesh`, as a line of text."""
        here, there = self.estimate, plain.estimate
        traffic, plain_traffic = self.collectives, plain.collectives
        if here is None or there is None or traffic is None or plain_traffic is None:
            return f"without virtual_mesh: peak {plain.peak_bytes / GIB:.2f} GiB"
        seconds = [f"{seconds:.4g}" for seconds in there.step_seconds]
        ratios = [a / b for a, b in zip(here.step_seconds, there.step_seconds, strict=True)]
        sent, more = "", ""
        if plain_traffic.sent:
            sent = f", {plain_traffic.sent / 1e9:.2f} GB sent per device"
            more = (
                f", {traffic.sent / plain_traffic.sent:.2f} of the bytes sent "
                f"({traffic.on_links / plain_traffic.on_links:.2f} counted per link of a ring)"
            )
        return (
            f"without virtual_mesh: peak {plain.peak_bytes / GIB:.2f} GiB{sent}, step "
            f"{seconds[0]} to {seconds[1]} s; virtual_mesh takes "
            f"{self.peak_bytes / plain.peak_bytes:.2f} of the memory{more}, and "
            f"{min(ratios):.2f} to {max(ratios):.2f} of the time"
        )


def _compilation(seconds: float, *, fast: bool = False, cached: bool = False) -> str:
    earlier = ", by an earlier command (cached)" if cached else ""
    return f"compiled in {seconds:.0f} s{' (--fast)' if fast else ''}{earlier}"


def format_memory(state: int, peak: int, limit: int, *, fits: bool) -> str:
    """Format the memory per device as one line of text.

    Args:
      state: bytes of the arrays that stay in memory, such as the parameters.
      peak: bytes in use at the peak.
      limit: bytes that a program may use.
      fits: whether the program fits into the device's memory.
    """
    spare = (limit - peak) / GIB
    verdict = (
        f"fits, {spare:.2f} GiB to spare" if fits else f"does not fit, {-spare:.2f} GiB too large"
    )
    return (
        f"memory per device: state {state / GIB:.2f} GiB, peak {peak / GIB:.2f} of "
        f"{limit / GIB:.2f} GiB: {verdict}"
    )


def plan(
    config: Config,
    topology: Slice,
    *,
    fast: bool = False,
    teacher: Config | None = None,
    deadline: float | None = None,
    on_paper: bool = False,
) -> Plan:
    """Compile a config's training step for a slice, and predict its memory, collectives and speed.

    Args:
      config: the config, whose mesh is that of `mesh_of`.
      topology: the devices to compile for.
      fast: whether to compile with reduced optimisation, which takes a fraction of the time and
        makes the figures less exact.
      teacher: the config of the config's `teacher`, if it has one.
      deadline: time of `time.monotonic` at which to stop compiling; None for no limit.
      on_paper: whether to estimate the step by `performance.analytic` instead of compiling it.

    Raises:
      InputError: if mp x cp does not divide the number of devices, if libtpu is missing, or if
        compilation fails.  A step that needs too much memory raises no error; `fits` is then False.
      OutOfTimeError: if the deadline passes first.
    """
    mesh = mesh_of(config, topology)
    config = config.replace(tpu_size=topology.devices, batch_ramp_steps=0)
    layout = step.StateLayout(config, mesh)
    # Called before compiling, because this raises an error if the devices are unknown.
    hardware, limit = topology.hardware(config.dtype), topology.hbm
    head = head_of(config)
    state, batch = layout.abstract, abstract_batch(layout, head)
    own, teachers = None, []
    if teacher is not None:
        own = teacher_layout(layout, teacher, str(config.teacher))
        teachers = [own.abstract["params"]]
    tokens = math.prod(batch["obs"].shape)
    traffic = speed = None
    if on_paper:
        speed = estimate_step(config, hardware, mesh.size)
        memory = Memory(speed.peak_bytes, None, 0.0, fast=False)
    else:
        train = step.compile_train(layout, head, own)
        setting = (
            f"{format_mesh(mesh.shape['dp'], config.context_parallel, mesh.shape['mp'])}, ZeRO "
            f"{config.zero}, remat {config.remat}, batch {config.per_replica_batch} x "
            f"{config.gradient_accumulation_steps}"
        )
        memory = compiled(
            topology.name,
            train,
            state,
            batch,
            *teachers,
            setting=setting,
            fast=fast,
            deadline=deadline,
        )
    peak = peak_on(topology, memory.peak)
    if memory.text is not None:
        traffic = traffic_of(memory.text, layout)
        speed = estimate(
            config,
            hardware,
            devices=mesh.size,
            tokens=tokens,
            peak_bytes=peak,
            hbm_traffic_bytes=Program(memory.text).moved(),
            link_bytes=traffic.on_links,
            slice_bytes=traffic.between_slices,
            host_bytes=_bytes_with_hosts(state),
            attention=layout.attention,
            # A third of a training step is the forward pass.
            teacher_flops=flops.palm_flops_per_token(own.config) // 3 if own else 0,
        )
    elif peak <= limit:  # of GPUs with more memory than the TPUs in their place
        speed = speed or estimate_step(config, hardware, mesh.size)
    per_token = flops.palm_flops_per_token(config)
    return Plan(
        topology=topology.name,
        devices=mesh.size,
        dp=mesh.shape["dp"],
        cp=config.context_parallel,
        mp=mesh.shape["mp"],
        partitioning=config.partitioning,
        zero=config.zero,
        remat=config.remat,
        shard_activations=config.shard_activations,
        loss_chunk=config.loss_chunk,
        per_replica_batch=config.per_replica_batch,
        accumulation=config.gradient_accumulation_steps,
        parameters=flops.n_params(config),
        state_bytes=bytes_per_device([state, teachers]),
        host_bytes=bytes_per_device(state, in_host=True),
        peak_bytes=peak,
        hbm_bytes=limit,
        fits=speed is not None and peak <= limit,
        basis=basis_of(topology, on_paper=on_paper),
        flops_per_token=per_token,
        flops=per_token * tokens,
        collectives=traffic,
        estimate=speed,
        compile_seconds=memory.seconds,
        fast=memory.fast,
        cached=memory.cached,
        distances=topology.distances(mesh),
    )


def priced_plan(config: Config, topology: Slice, **options: Any) -> Plan:
    """Return the result of `plan`, compared with the plain step if the config sets `virtual_mesh`.

    The plain step trains on the same sequences.  See `plan` for the arguments and errors.
    """
    result = plan(config, topology, **options)
    if config.virtual_mesh is None:
        return result
    rows = config.per_replica_batch * config.virtual_replicas(result.dp)
    plain = config.replace(virtual_mesh=None, per_replica_batch=rows)
    return dataclasses.replace(result, plain=plan(plain, topology, **options))


PLANNED_ALTERNATIVES = 20  # tokens of a stored teacher per position: the most that servers send


def abstract_batch(layout: Layout, head: Head | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays of a batch for one training step, with their shardings.

    The shape is [A, B, T]: A microbatches, B batch rows of all replicas together, T tokens.

    Args:
      head: the objective, which may need further arrays; None for cross entropy.
    """
    config, mesh = layout.config, layout.mesh
    rows = config.per_replica_batch * config.replicas(mesh.shape["dp"])
    shape = (config.gradient_accumulation_steps, rows, config.seq)
    dtypes: dict[str, Any] = {"obs": jnp.uint32, "target": jnp.uint32}
    if config.separate_documents:
        dtypes |= {"segment_ids": jnp.int32}
    if head is not None:
        dtypes |= {"loss_mask": jnp.uint8}
        values = ["reference"] if head.needs_reference else []
        if head.by_token:
            values += ["advantage", "sampled", *(["old"] if config.rollout_updates > 1 else [])]
        else:
            dtypes |= {"segment_ids": jnp.int32}
        dtypes |= dict.fromkeys(values, jnp.float32)
    split = NamedSharding(mesh, P(None, "dp"))
    arrays = {key: jax.ShapeDtypeStruct(shape, x, sharding=split) for key, x in dtypes.items()}
    if config.has_stored_teacher:
        shape = (*shape[:-1], config.seq * PLANNED_ALTERNATIVES)
        for key, dtype in zip(TEACHER_KEYS, (jnp.uint32, jnp.float32), strict=True):
            arrays[key] = jax.ShapeDtypeStruct(shape, dtype, sharding=split)
    return arrays


def _bytes_with_hosts(state: step.State) -> tuple[int, int]:
    """Return the bytes that a training step moves from the hosts to each device, and back."""
    both = bytes_per_device([state["params"], state["opt_state"]], in_host=True)
    # The update reads and writes both.  The forward pass reads the parameters.
    return both + bytes_per_device(state["params"], in_host=True), both


STEPS = 64  # decode steps per call of the compiled function; affects only the size of its output


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Predicted memory, collectives and speed of generation on a TPU slice or other devices.

    One decode step generates one token in every row, and right guesses.  Bytes are per device.

    Attributes:
      dp, cp, mp: as in `Plan`; devices along cp repeat each other's work.
      guesses: number of tokens that a step guesses; it then generates up to so many more per row.
      rows: batch rows of all replicas together.
      cache_length: number of positions in the KV cache of each row; if the cache is in pages, on
        average.
      cache_tokens: number of positions in the pages of each replica; None for rows of their own.
      weights_bytes, cache_bytes: those of the model and of the draft, if there is one.
      draft_bytes: weights and cache of the draft.
      basis: where `peak_bytes`, `collectives` and `bytes_per_step` come from.
      flops_per_token: those of the model.
      state_bytes: weights and cache.
      read_bytes: bytes that every step must read: the cache in use, and the weights except the
        embedding unless it is the head; those of the draft once per guess, and once more.
      bytes_per_step: bytes that one compiled step reads and writes (see `hlo.Program`); None if the
        compiler rejected the program because it needs too much memory.
      tokens_per_second: two estimates for all rows together, which assume that memory bandwidth is
        the only limit, and that no guess is right.  The first counts `read_bytes` per step and
        is an upper bound.  The second counts `bytes_per_step`, and is None if that is None.
      source: where the hardware's figures come from.
    """

    topology: str
    devices: int
    dp: int
    cp: int
    mp: int
    rows: int
    guesses: int
    cache_length: int
    cache_tokens: int | None
    weight_bits: int | None
    int8_cache: bool
    weights_bytes: int
    cache_bytes: int
    draft_bytes: int
    state_bytes: int
    read_bytes: int
    peak_bytes: int
    hbm_bytes: int
    fits: bool
    basis: str
    flops_per_token: int
    collectives: Traffic | None
    bytes_per_step: int | None
    hardware: str
    source: str
    tokens_per_second: tuple[float, float | None]
    compile_seconds: float
    cached: bool = False

    def table(self) -> str:
        """Format the plan as readable text."""
        most, likely = self.tokens_per_second
        weights = f"{self.weight_bits}-bit weights" if self.weight_bits else "weights"
        cache = "8-bit cache" if self.int8_cache else "cache"
        lines = [
            f"{self.topology}: {self.devices} devices, "
            f"{format_mesh(self.dp, self.cp, self.mp)}, generation of "
            f"{self.rows} rows with {self.cache_length} positions each"
            + (f", in pages for {self.cache_tokens} per replica" if self.cache_tokens else "")
            + (f", {self.guesses} guesses per step" if self.guesses else ""),
            f"{weights} {self.weights_bytes / 1e9:.2f} GB and {cache} "
            f"{self.cache_bytes / 1e9:.2f} GB per device, "
            + (f"{self.draft_bytes / 1e9:.2f} GB of it the draft's, " if self.draft_bytes else "")
            + f"{self.flops_per_token / 1e9:.2f} GFLOP per token",
            format_memory(self.state_bytes, self.peak_bytes, self.hbm_bytes, fits=self.fits),
            f"peak and bytes: {self.basis}; nothing was measured",
        ]
        if self.collectives is not None and self.bytes_per_step is not None:
            lines += self.collectives.lines()
            lines.append(
                f"estimate on {self.hardware} ({self.source}), rows x bandwidth / bytes per step: "
                f"{likely:,.0f} tokens/s with the {self.bytes_per_step / 1e9:.2f} GB per step "
                f"that the compiled program moves, at most {most:,.0f} with weights and cache only"
            )
            if self.guesses:
                lines.append(f"{1 + self.guesses} times as many if all guesses are right")
        return "\n".join([*lines, _compilation(self.compile_seconds, cached=self.cached)])


def decode_program(
    layout: WeightLayout,
    weights: Weights,
    state: decode.DecodeState,
    pool: Pool | None = None,
    guesses: int = 0,
    draft: Config | None = None,
) -> tuple[Any, ...]:
    """Return the function that makes decode steps, and its abstract arguments.

    Args:
      weights, state: results of `abstract_weights` and `abstract_rows`.
      pool, guesses, draft: as for `abstract_rows`.
    """
    config, mesh = layout.config, layout.mesh
    rows = len(state.length_B)
    left = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=NamedSharding(mesh, P("dp")))
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    stored = storage(config, guesses, pool)
    function = programs.compile_decode(layout, None, STEPS, stored, guesses, draft=draft)
    return function, weights, state, left, count, None


def decode_plan(
    config: Config,
    topology: Slice,
    *,
    cache_tokens: int | None = None,
    guesses: int = 0,
    draft: Config | None = None,
    fast: bool = False,
    deadline: float | None = None,
) -> DecodePlan:
    """Compile a decode step for a slice, and predict its memory, collectives and speed.

    The batch has `per_replica_batch` rows per replica.

    Args:
      config: the config, whose mesh is that of `mesh_of`.
      topology: the devices to compile for.
      cache_tokens: number of positions in the pages of each replica, as of a server; these are
        divided evenly among the rows.  None gives each row a cache for the window of its own.
      guesses: number of tokens that a step guesses.
      draft: the config of the model that guesses; None: guesses are looked up.
      fast: whether to compile with reduced optimisation, which takes a fraction of the time and
        makes the figures less exact.
      deadline: time of `time.monotonic` at which to stop compiling; None for no limit.

    Raises:
      OutOfTimeError: if the deadline passes first.
      InputError: if mp x cp does not divide the number of devices, if `cache_tokens` is too small
        for one row, if the draft does not fit the model, if libtpu is missing, or if compilation
        fails.  A step that needs too much memory raises no error; `fits` is then False.
    """
    mesh = mesh_of(config, topology)
    layout = weight_layout(Layout(config.replace(virtual_mesh=None), mesh))
    config = layout.config
    check_guesses(guesses, config.window)
    if draft is not None:
        draft = within_window(draft_config(draft, config, "draft"), config)
        draft = weight_layout(Layout(draft, mesh)).config
    rows = config.per_replica_batch * mesh.shape["dp"]
    pool = None
    if cache_tokens is not None:
        pool = server_pool(config, config.per_replica_batch, guesses, tokens=cache_tokens)
        check_kernel(config, mesh, config.per_replica_batch, guesses, pool)
    weights = abstract_weights(layout)
    state = abstract_rows(layout, rows, pool, guesses, draft)
    models = [(1, config, weights, state.caches)]  # and how often a step reads each
    if draft is not None:
        weights = weights | {DRAFT: abstract_weights(layout.of(draft))}
        models.append((1 + guesses, draft, weights[DRAFT], state.draft_caches))
    length, turns, used = config.window, 1, 1.0
    if pool is not None:
        room = pool.pages * pool.page
        length = min(room // config.per_replica_batch, config.window)
        # How often attention over pages loops is not in the program.
        turns = -(-length // slots_together(config.per_replica_batch, pool.page))
        used = length * config.per_replica_batch / room
    # Called before compiling, because this raises an error if the devices are unknown.
    hardware, limit = topology.hardware(config.dtype), topology.hbm
    program = decode_program(layout, weights, state, pool, guesses, draft)
    memory = compiled(topology.name, *program, fast=fast, deadline=deadline)
    peak = peak_on(topology, memory.peak)
    weights_bytes = cache_bytes = read = 0
    for times, model, own, caches in models:
        own_bytes, own_cache = bytes_per_device(own), bytes_per_device(caches)
        weights_bytes, cache_bytes = weights_bytes + own_bytes, cache_bytes + own_cache
        read += times * (weights_read(model, own) + cache_read(caches, used, length))
    draft_bytes = sum(bytes_per_device((own, caches)) for _, _, own, caches in models[1:])
    traffic = moved = likely = None
    if memory.text is not None:
        traffic = decode_traffic(memory.text, layout, 1 + guesses)
        moved = Program(memory.text).bytes_moved_per_iteration(turns)
        likely = rows * hardware.hbm / moved
    return DecodePlan(
        topology=topology.name,
        devices=topology.devices,
        dp=mesh.shape["dp"],
        cp=config.context_parallel,
        mp=mesh.shape["mp"],
        rows=rows,
        guesses=guesses,
        cache_length=length,
        cache_tokens=cache_tokens,
        weight_bits=config.weight_bits,
        int8_cache=config.int8_cache,
        weights_bytes=weights_bytes,
        cache_bytes=cache_bytes,
        draft_bytes=draft_bytes,
        state_bytes=weights_bytes + cache_bytes,
        read_bytes=read,
        peak_bytes=peak,
        hbm_bytes=limit,
        fits=memory.text is not None and peak <= limit,
        basis=basis_of(topology),
        flops_per_token=flops.decode_flops_per_token(config),
        collectives=traffic,
        bytes_per_step=moved,
        hardware=hardware.name,
        source=hardware.source,
        tokens_per_second=(rows * hardware.hbm / read, likely),
        compile_seconds=memory.seconds,
        cached=memory.cached,
    )
