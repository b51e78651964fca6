"""Time of communication compared with computation as dp and mp grow, estimated on paper."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mesh_transformer.config import Config
from mesh_transformer.mesh import accelerators
from mesh_transformer.mesh.accelerators import Hardware
from mesh_transformer.model import flops
from mesh_transformer.performance.analytic import (
    BF16,
    F32,
    attention_on,
    dp_bytes,
    estimate_step,
    mp_bytes,
    tokens_per_replica,
)
from mesh_transformer.performance.roofline import compute_seconds, link_seconds

GENERATIONS = ("v3", "v4", "v5e", "v5p", "v6e")
MP_SIZES = (1, 2, 4, 8, 16, 32)
DEVICES = (8, 32, 128, 512, 2048, 6144)
LARGEST_BATCH = 4


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Communication time compared with compute time, for growing mp and dp.

    mp is the number of devices per replica, and dp the number of replicas.

    Attributes:
      generation, mp, sequences: TPU generation or other hardware, mp and sequences per step that
        all estimates in `steps` share.
      mp_shares: maps each TPU generation, and `generation`, to one value per entry of `mp_sizes`:
        the time of communication over mp, divided by the compute time.
      zeros: ZeRO stages.
      break_even_tokens: maps the same names to one value per entry of `zeros`: the number of
        tokens per replica for which communication over dp takes as long as computation.  Tokens are
        counted per step for ZeRO 0 and 1, and per microbatch for ZeRO 3.  The values assume many
        replicas.  They do not depend on mp.
      steps: one list per number of devices, with one estimate per entry of `zeros`, as a dict.
        Seconds and bytes are per device; those of mp and dp are what it sends over two links.
    """

    parameters: int
    seq: int
    remat: str
    generation: str
    mp: int
    sequences: int
    mp_sizes: tuple[int, ...]
    mp_shares: dict[str, list[float]]
    zeros: tuple[int, ...]
    break_even_tokens: dict[str, list[float]]
    steps: list[list[dict[str, Any]]]

    def table(self) -> str:
        """Format the results as three Markdown tables.

        The first table gives the communication time for each mp, the second gives the break-even
        tokens for each ZeRO stage, and the third gives the estimates for each number of devices.
        """
        head = f"{self.parameters / 1e9:.1f}B parameters, sequence {self.seq}, "
        head += f"remat {self.remat}; link time over compute time"
        columns = ["devices", "dp", "batch x micro", "compute s", "mp links s"]
        columns += [f"ZeRO {zero}: dp links s, GB sent" for zero in self.zeros]
        return "\n\n".join(
            (
                f"{head}, for mp only:",
                _by_generation("mp", self.mp_sizes, self.mp_shares, ".2f"),
                "Tokens per replica at which dp's links take as long as computing (per step with "
                "ZeRO 0 and 1, per microbatch with ZeRO 3):",
                _by_generation("ZeRO", self.zeros, self.break_even_tokens, ",.0f"),
                f"{self.generation}, mp {self.mp}, {self.sequences} sequences per step on any "
                "number of devices:",
                markdown_table(columns, [_step_cells(estimates) for estimates in self.steps]),
            )
        )


def scaling_of(config: Config, hardware: Hardware, sequences: int) -> Scaling:
    """Estimate communication and compute times of a config on several TPU generations.

    Args:
      config: its `cores_per_replica` is the mp of `Scaling.steps`.
      hardware: that of `Scaling.steps`, which may also be a GPU or a CPU.
      sequences: sequences per step in `Scaling.steps`, for any number of devices.
    """
    parameters = flops.n_params(config)
    compared = {name: accelerators.hardware(name) for name in GENERATIONS}
    compared[hardware.name] = hardware
    zeros, sent = (0, 1, 3), {0: 2 * F32, 1: BF16 + F32, 3: 2 * BF16 + F32}  # bytes per parameter
    return Scaling(
        parameters=parameters,
        seq=config.seq,
        remat=config.remat,
        generation=hardware.name,
        mp=config.cores_per_replica,
        sequences=sequences,
        mp_sizes=MP_SIZES,
        mp_shares={
            name: [_link_share(config, own, mp * mp_bytes(config, 1, mp)) for mp in MP_SIZES]
            for name, own in compared.items()
        },
        zeros=zeros,
        break_even_tokens={
            name: [_link_share(config, own, sent[zero] * parameters) for zero in zeros]
            for name, own in compared.items()
        },
        steps=_by_devices(config, hardware, sequences, zeros),
    )


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _by_generation(
    name: str, sizes: Sequence[int], values: dict[str, list[float]], form: str
) -> str:
    """Format a Markdown table with one row per size and one column per TPU generation.

    `name` is the title of the column of sizes, and `form` the format of the values.
    """
    rows = [
        [str(size), *(format(column[index], form) for column in values.values())]
        for index, size in enumerate(sizes)
    ]
    return markdown_table([name, *values], rows)


def _step_cells(estimates: list[dict[str, Any]]) -> list[str]:
    """Format the table cells for one number of devices, from its estimates per ZeRO stage."""
    first = estimates[0]
    return [
        str(first["dp"] * first["mp"]),
        str(first["dp"]),
        f"{first['per_replica_batch']} x {first['accumulation']}",
        f"{first['compute_seconds']:.2f}",
        f"{first['mp_seconds']:.2f}",
        *(f"{step['dp_seconds']:.2f}, {step['dp_bytes'] / 1e9:,.1f}" for step in estimates),
    ]


def _link_share(config: Config, hardware: Hardware, sent_bytes: int) -> float:
    """Return the time to send so many bytes, divided by the time to compute one token."""
    seconds = link_seconds(sent_bytes, hardware)[1]
    return seconds / compute_seconds(config, hardware, attention_on(config, hardware))


def _by_devices(
    config: Config, hardware: Hardware, sequences: int, zeros: Sequence[int]
) -> list[list[dict[str, Any]]]:
    """Estimate a step for each number of devices in `DEVICES` and each ZeRO stage in `zeros`.

    Numbers of devices for which dp does not divide `sequences` are left out.
    """
    steps = []
    for devices in DEVICES:
        dp = devices // config.cores_per_replica
        share = sequences // max(dp, 1)  # per replica
        if not dp or sequences % dp:
            continue
        batch = max(size for size in range(1, LARGEST_BATCH + 1) if share % size == 0)
        changed = config.replace(
            tpu_size=devices, per_replica_batch=batch, gradient_accumulation_steps=share // batch
        )
        steps.append([_step(changed.replace(zero=zero), hardware, devices) for zero in zeros])
    return steps


def _step(config: Config, hardware: Hardware, devices: int) -> dict[str, Any]:
    """Return the estimate of a step; see `Scaling.steps`."""
    estimate, mp = estimate_step(config, hardware, devices), config.cores_per_replica
    dp = devices // mp
    sent = {"mp": mp_bytes(config, tokens_per_replica(config), mp), "dp": dp_bytes(config, dp)}
    result: dict[str, Any] = {
        "dp": dp,
        "mp": mp,
        "zero": config.zero or 0,
        "per_replica_batch": config.per_replica_batch,
        "accumulation": config.gradient_accumulation_steps,
        "compute_seconds": estimate.compute_seconds,
        "memory_seconds": estimate.hbm_seconds,
        "memory_bytes": estimate.peak_bytes,
    }
    for axis, count in sent.items():
        seconds = link_seconds(count, hardware)[1]
        result |= {f"{axis}_bytes": count, f"{axis}_seconds": seconds}
    return result
