"""Whether generation fits a slice of devices, and what its speed is bound by."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import Config
from mesh_transformer.generation import decode
from mesh_transformer.mesh.devices import abstract, named
from mesh_transformer.model import flops, gptj
from mesh_transformer.performance.hlo_bytes import Program
from mesh_transformer.performance.plan import bytes_on_one_device, compiled, mesh_of, room
from mesh_transformer.performance.topology import Slice
from mesh_transformer.performance.traffic import Traffic, decode_traffic
from mesh_transformer.training import step

STEPS = 64  # of one call; the program's size does not depend on it, but for the tokens' place


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """One more token in every row, on a slice.  Bytes are of one device.

    Attributes:
      rows: in the batch, of all replicas.
      cache_length: positions of each row.
      state_bytes: weights and cache.
      read_bytes: of them what every token reads, all but the embedding: a step is no faster than
        that over the memory's bandwidth.
      bytes_per_token: what the compiled step reads and writes (`hlo_bytes`).
      tokens_per_second: of all rows, by `read_bytes` and by `bytes_per_token`, at the memory's
        full bandwidth and with nothing else in the way: an estimate.
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
        """The same for people."""
        most, likely = self.tokens_per_second
        kind = "8-bit weights" if self.int8_weights else "weights"
        lines = [
            f"{self.topology}: {self.devices} devices, dp {self.dp} x mp {self.mp}, generation of "
            f"{self.rows} rows with {self.cache_length} positions each",
            f"{kind} {self.weights_bytes / 1e9:.2f} GB and cache {self.cache_bytes / 1e9:.2f} GB "
            f"a device, {self.flops_per_token / 1e9:.2f} GFLOP a token",
            room(self.state_bytes, self.peak_bytes, self.hbm_bytes, fits=self.fits),
        ]
        if self.collectives is not None and self.bytes_per_token is not None:
            lines += self.collectives.lines()
            lines.append(
                f"estimate on {self.hardware} ({self.source}), rows x bandwidth over bytes: "
                f"{likely:,.0f} tokens/s by the {self.bytes_per_token / 1e9:.2f} GB a step that "
                f"the compiled program moves, at most {most:,.0f} by weights and cache"
            )
        return "\n".join([*lines, f"compiled in {self.compile_seconds:.0f} s"])


def decode_plan(config: Config, topology: Slice, *, fast: bool = False) -> DecodePlan:
    """Compiles generation's step for `per_replica_batch` rows a replica, each of `seq` positions.

    Raises:
      InputError: where mp does not divide the devices, libtpu is missing, or the compiler refuses
        the program for another reason than its size.
    """
    mesh = mesh_of(config, topology)
    rows = config.per_replica_batch * mesh.shape["dp"]
    weights, state = _abstract_weights(config, mesh), _abstract_rows(config, mesh, rows)
    left = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=NamedSharding(mesh, P("dp")))
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    function = step.compile_decode(config, mesh, None, STEPS)
    # Before the compilation, as not every device is known.
    hardware, limit = topology.hardware(config.dtype), topology.hbm
    found = compiled(topology.name, function, weights, state, left, count, fast=fast)
    sizes = bytes_on_one_device(weights), bytes_on_one_device(state.caches)
    read = sum(sizes) - bytes_on_one_device(weights["embed"])
    traffic = moved = likely = None
    if found.text is not None:
        traffic = decode_traffic(found.text, config, mesh)
        moved = Program(found.text).moved_in_a_loop()
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
        peak_bytes=found.peak,
        hbm_bytes=limit,
        fits=found.text is not None and found.peak <= limit,
        flops_per_token=flops.decode_flops_per_token(config),
        collectives=traffic,
        bytes_per_token=moved,
        hardware=hardware.name,
        source=hardware.source,
        tokens_per_second=(rows * hardware.hbm / read, likely),
        compile_seconds=found.seconds,
    )


def _abstract_weights(config: Config, mesh: Mesh) -> decode.Weights:
    params = jax.eval_shape(functools.partial(gptj.init, config), jax.random.key(0))
    shapes = jax.eval_shape(functools.partial(decode.weights_of, config=config), params)
    return abstract(shapes, named(mesh, decode.weight_specs(config)))


def _abstract_rows(config: Config, mesh: Mesh, rows: int) -> decode.DecodeState:
    shapes = jax.eval_shape(lambda: decode.empty(config, rows, config.seq))
    return abstract(shapes, named(mesh, step.decode_specs(config)))
