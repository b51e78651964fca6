"""What the compiler is told of a program besides its text, each option with its reason.

What `plan` compiles is told the same as what is run: both come from `step`'s functions.
"""

from typing import Any

from jax.sharding import Mesh

from mesh_transformer.config import Config

# TPUs with an engine of its own for collectives; on the older ones the options change nothing.
ASYNC_KINDS = ("TPU v5", "TPU v6")


def compiler_options(config: Config, mesh: Mesh) -> dict[str, Any] | None:
    """The options of a training step on those devices; None where there are none."""
    device = mesh.devices.flat[0]
    if device.platform != "tpu":
        return None
    options: dict[str, Any] = {}
    if config.zero == 3:
        # The pass moves sums over replicas out of the loop over microbatches.  ZeRO 3 has none
        # that could leave it, as they are scattered in the loop over layers; and a prototype's
        # crashed the compiler there (libtpu 0.0.42), though small models compile with the pass.
        options["xla_disable_hlo_passes"] = "while-loop-all-reduce-code-motion"
    if any(kind in device.device_kind for kind in ASYNC_KINDS):
        # Off by default.  The activations' all-reduce of the backward pass then runs beside the
        # matmuls of the weights' gradients, which do not wait for it.
        options["xla_enable_async_all_reduce"] = "true"
        options["xla_tpu_enable_async_collective_fusion_fuse_all_reduce"] = "true"
    return options or None
