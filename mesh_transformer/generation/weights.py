"""The weights that generation uses: parameters without stacked layers, cast or quantized.

They may have LoRA adapters, of which each row of a batch may use another one.  The adapters are
joined to a single one, whose columns R are those of all of them.  For each row, the columns of the
other adapters are multiplied by 0.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from mesh_transformer.config import Config
from mesh_transformer.config_model import Model
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.mesh.parallel import Parallel
from mesh_transformer.mesh.program import Layout
from mesh_transformer.model import lora, matrices, transformer
from mesh_transformer.model.lora import Adapter
from mesh_transformer.model.transformer import Params
from mesh_transformer.util import InputError

Weights = dict[str, Any]
SCALES = "adapter_scales"  # the key of the result of `scales`
DRAFT = "draft"  # the key of the weights of the model that guesses tokens, if there is one


def joined_config(config: Config, adapters: Sequence[Model]) -> Config:
    """Return the config of a base model with all adapters joined.

    Raises:
      InputError: if the sum of the adapters' ranks is larger than the model's width.
    """
    if not adapters:
        return config
    rank = sum(adapter.lora_rank for adapter in adapters)
    if rank > config.d_model:
        raise InputError(
            f"adapters: their ranks (lora_rank) sum to {rank}, expected at most d_model "
            f"({config.d_model}); use fewer adapters"
        )
    known = config.layer_kind.lora_targets
    targets = [name for name in known if any(adapter.adapts(name) for adapter in adapters)]
    return config.replace(lora_rank=rank, lora_alpha=float(rank), lora_targets=targets)


def scales(adapters: Sequence[Model]) -> np.ndarray:
    """Return the factor of each of the joined columns, f32 [1 + number of adapters, R].

    Row 0 is for no adapter, and row n for adapter n, counted from 1.
    """
    ranks = [adapter.lora_rank for adapter in adapters]
    table_AR = np.zeros((1 + len(ranks), sum(ranks)), np.float32)
    for number, adapter in enumerate(adapters, 1):
        begin = sum(ranks[: number - 1])
        table_AR[number, begin : begin + adapter.lora_rank] = adapter.lora_scale
    return table_AR


def join(config: Config, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Return the factors of the joined adapter, {module: {name: array}}, stacked by layer.

    Args:
      config: the result of `joined_config`.
    """

    def factor(module: str, name: str) -> Any:
        own = [adapter.params["layers"].get(module, {}).get(name) for adapter in adapters]
        like = next(x for x in own if x is not None)
        axis = lora.rank_axis(name) % (like.ndim - 1) + 1  # after the layers
        parts = []
        for adapter, x in zip(adapters, own, strict=True):
            shape = list(like.shape)
            shape[axis] = adapter.config.lora_rank
            parts.append(jnp.zeros(shape, like.dtype) if x is None else x)
        return jnp.concatenate(parts, axis)

    modules = transformer.trained(config)["layers"]
    return {
        module: {name: factor(module, name) for name in leaves}
        for module, leaves in modules.items()
    }


def weights_of(params: Params, config: Config, adapters: Sequence[Adapter] = ()) -> Weights:
    """Convert parameters to the weights that generation uses.

    The layers are unstacked, LoRA adapters are merged except with `exact`, and arrays are cast to
    `config.dtype`.  If the config sets `weight_bits`, the matrices of the layers and of the output
    head are quantized instead of cast.

    Args:
      adapters: LoRA adapters that rows may choose from.  These are joined, not merged.
    """
    own = joined_config(_usual(config), [adapter.config for adapter in adapters])
    declared = weight_declarations(own)
    factors = join(own, adapters) if adapters else {}

    def unstacked(layer: int) -> Any:
        modules = matrices.dequantized(jax.tree.map(lambda x: x[layer], params["layers"]))
        if config.lora_rank and not config.exact:
            modules = lora.merged(modules, config.lora_scale)
        more = jax.tree.map(lambda x: x[layer].astype(config.dtype), factors)
        return {name: leaves | more.get(name, {}) for name, leaves in modules.items()}

    weights = params | {"layers": tuple(unstacked(layer) for layer in range(config.layers))}
    if config.weight_bits:
        weights["proj"] = transformer.projection_params(weights)
    for part, bits in quantized_parts(config).items():
        weights[part] = matrices.quantize(weights[part], declared[part], bits)

    def cast(x: Any) -> Any:
        return x if matrices.is_quantized(x) else x.astype(config.dtype)

    weights = jax.tree.map(cast, weights, is_leaf=matrices.is_quantized)
    if adapters:
        weights[SCALES] = jnp.asarray(scales([adapter.config for adapter in adapters]))
    elif own.lora_rank:
        weights[SCALES] = jnp.full((1, own.lora_rank), own.lora_scale)
    return weights


def _usual(config: Config) -> Config:
    """Return the config of the weights for generation without further adapters.

    LoRA adapters are merged, unless the config sets `exact`: the sums would be others.
    """
    return config.replace(frozen_bits=None) if config.exact else config.merged()


def weight_declarations(config: Config) -> Weights:
    """Return the `Declaration` (shape and layout) of each array that `weights_of` returns.

    If the config quantizes weights, the declarations describe the arrays before quantization.

    Args:
      config: the config of the weights: without adapters, or with the joined ones.
    """
    declared = transformer.declarations(config)
    layer = map_declared(lambda d: d.unstack(), declared["layers"])
    if config.weight_bits:  # of a tied head there is a quantized copy
        declared = declared | {"proj": transformer.declared_projection(config)}
    return declared | {"layers": (layer,) * config.layers}


def quantized_parts(config: Config) -> dict[str, int]:
    """Return {part: bits} for the parts of the model whose matrices are quantized.

    The output head has 8 bits if the layers have 4, because in 4 bits it would add more to the loss
    than all layers together.
    """
    return {} if config.weight_bits is None else {"layers": config.weight_bits, "proj": 8}


@dataclass(frozen=True)
class WeightLayout(Layout):
    """How the weights for generation, with the joined adapters, are laid out on a mesh.

    They are split over mp only, even if ZeRO splits the training state over dp.

    Raises:
      InputError: at construction, if a matrix cannot be quantized to `weight_bits`.
    """

    def __post_init__(self) -> None:
        for part, bits in quantized_parts(self.config).items():
            if bits == 4:
                declared = weight_declarations(self.config.merged())[part]
                matrices.check_groups(declared, self.par.shards, "weight_bits")

    def parallel(self, **choices: Any) -> Parallel:
        # For whole texts of more than `LONG` tokens; see `forward.context_of`.
        return super().parallel(attention="blocks", **choices)

    @functools.cached_property
    def specs(self) -> Weights:
        """The PartitionSpecs of the arrays that `weights_of` returns."""
        declared = weight_declarations(self.config)
        for part, bits in quantized_parts(self.config).items():
            declared[part] = matrices.stored(declared[part], bits)
        specs = map_declared(lambda d: d.spec, declared)
        return specs | ({SCALES: P()} if self.config.lora_rank else {})

    def specs_with(self, draft: Config | None) -> Weights:
        """Return `specs` with those of the weights of `draft`, if there is one."""
        return self.specs if draft is None else self.specs | {DRAFT: self.of(draft).specs}


def weight_layout(layout: Layout, adapters: Sequence[Model] = ()) -> WeightLayout:
    """Return the layout of the weights with which a model generates.

    CPUs compute in f32, in which their matmuls are faster, unless the config sets `exact`.

    Args:
      layout: the layout of the model's parameters.
    """
    config, mesh = _usual(layout.config), layout.mesh
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    # Rows do not depend on each other, so that dp may be that of the mesh.
    is_virtual = config.exact and config.virtual_mesh is not None
    config = config.replace(
        int8_matmuls=[],
        dtype="float32" if on_cpu and not config.exact else config.dtype,
        zero=0,
        virtual_mesh=[mesh.shape["dp"], config.shards] if is_virtual else None,
        cores_per_replica=mesh.shape["mp"] if is_virtual else config.shards,
        tpu_size=None,
    )
    return WeightLayout(joined_config(config, adapters), mesh)
