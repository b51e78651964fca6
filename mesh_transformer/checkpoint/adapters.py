"""Records of the base model that LoRA adapters were trained on, and merging into it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from mesh_transformer.checkpoint.host_arrays import LazyLeaf, cast
from mesh_transformer.checkpoint.integrity import host_checksum
from mesh_transformer.checkpoint.state_tree import Path, map_leaves
from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import Declaration
from mesh_transformer.model import matrices, transformer
from mesh_transformer.model.lora import adapter_names
from mesh_transformer.util import InputError

# The end of errors about a base model that is no longer at its recorded path.
BASE_MOVED_ADVICE = (
    "put it back, or give its new path: as --tune-model-path to resume the run, or as --base to "
    "merge the adapters with convert_checkpoint.py"
)


class Base(NamedTuple):
    """A record of the base model that adapters were trained on.

    Attributes:
      path: the base model's path when the adapters were trained.
      checksums: {dtype: {leaf name: checksum of the leaf's values after a cast to dtype}}.  A leaf
        name is "part/module/name", such as "layers/layer/q/w".  Empty if none were recorded, as in
        the format of the package peft.
    """

    path: str
    checksums: dict[str, dict[str, int]]

    def difference(self, other: "Base") -> str | None:
        """Return the name of the first leaf whose checksum differs in `other`; None if all match.

        Compares the float32 checksums if both records have them, otherwise the bfloat16 ones.
        Returns None, too, if no checksums were recorded.
        """
        common = self.checksums.keys() & other.checksums.keys()
        if not self.checksums:
            return None
        one, two = (base.checksums[max(common)] for base in (self, other))
        return next((leaf for leaf in sorted(one | two) if one.get(leaf) != two.get(leaf)), None)


def saved_base(aux: Any, where: str) -> Base | None:
    """Return the record of the base model in a checkpoint of adapters; None for a whole model.

    Args:
      aux: the JSON dict that a native checkpoint stores with its arrays.
      where: the checkpoint, for error messages.

    Raises:
      InputError: if the record is malformed.
    """
    record = aux.get("lora") if isinstance(aux, dict) else None
    if record is None:
        return None
    try:
        checksums = record["checksums"]
        base = Base(str(record["base"]), {dtype: dict(checksums[dtype]) for dtype in checksums})
    except (KeyError, TypeError, ValueError):
        base = None
    if base is None or "bfloat16" not in base.checksums:
        raise InputError(
            f"{where}: its file aux/metadata does not name the base model that the adapters were "
            "trained on; copy the step again, or give another step"
        )
    return base


def merged_leaves(
    params: dict[str, Any],
    adapters: dict[str, Any],
    config: Config,
    base: Base,
    where: str,
    *,
    dtype: DTypeLike | None = None,
) -> dict[str, Any]:
    """Return the base model's parameters with `adapters` merged in.

    Each leaf is a `LazyLeaf`, whose values are read and merged on use.  The merge is computed in
    f32, and its result is cast to the leaf's dtype.  Once all layers of a leaf have been read, the
    checksum of the unmerged values is compared with the checksum in `base`.  If the two differ, the
    read of the last layer raises InputError.

    Args:
      adapters: nested dicts of adapter matrices, in the structure of `params`.
      config: the config of the adapters.  If it sets `frozen_bits`, they are merged into the
        rounded matrices that they were trained on.
      base: the record of the base model that the adapters were trained on.
      dtype: the dtype of the returned leaves (default: each leaf keeps its own).
    """
    declared = transformer.declarations(config)
    checked = "float32" if "float32" in base.checksums else "bfloat16"

    def merged(path: Path, source: Any) -> LazyLeaf:
        part, module, name = path
        own = adapters.get(part, {}).get(module, {})
        factors = [own[a] for a in adapter_names(name) if a in own]
        target = source.dtype if dtype is None else np.dtype(dtype)
        layers, leaf = part == "layers", "/".join(path)
        sums: dict[int | None, int] = {}  # the checksum of each layer read so far

        def check(layer: int | None, values: np.ndarray) -> None:
            sums[layer] = host_checksum(values, (layer or 0) * values.size, checked)
            is_last = len(sums) == (source.shape[0] if layers else 1)
            if is_last and sum(sums.values()) % 2**32 != base.checksums[checked].get(leaf):
                raise InputError(
                    f"{where}: its adapters were not trained on the base model that was read (leaf "
                    f"{leaf} differs); give the base model that they were trained on as --base "
                    f"(its recorded path is {base.path})"
                )

        def read(layer: int | None) -> np.ndarray:
            values = np.asarray(source if layer is None else source[layer])
            if base.checksums:
                check(layer, values)
            if layers and config.frozen_bits is not None:
                values = _rounded(declared[part][module][name].unstack(), config, values)
            if factors:
                a, b = (np.asarray(factor[layer], np.float32) for factor in factors)
                scale = np.float32(config.lora_scale)
                values = values.astype(np.float32) + scale * np.tensordot(a, b, 1)
            return cast(values, target, f"{where}: leaf {leaf}")

        return LazyLeaf(source.shape, target, read, layers=layers)

    return map_leaves(merged, params)


def _rounded(declared: Declaration, config: Config, values: np.ndarray) -> np.ndarray:
    """Return one layer of a leaf of the base model, with the values that training uses."""
    assert config.frozen_bits is not None
    w = matrices.quantize(jnp.asarray(values, config.dtype), declared, config.frozen_bits)
    return np.asarray(matrices.dequantized(w)) if matrices.is_quantized(w) else values


def aux_entries(base: Base | None) -> dict[str, Any]:
    """Return the entries of a checkpoint's `aux` dict that record a base model; {} for None.

    `saved_base` turns these entries back into a `Base`.
    """
    return {} if base is None else {"lora": {"base": base.path, "checksums": base.checksums}}
