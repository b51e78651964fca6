"""Records of the base models of LoRA adapters, and merging of adapters into a base model."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mesh_transformer.checkpoint.host_arrays import LazyLeaf, cast
from mesh_transformer.checkpoint.integrity import host_checksum
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
        name is "part/module/name".
    """

    path: str
    checksums: dict[str, dict[str, int]]

    def checksum_of(self, leaf: str) -> tuple[str, int | None]:
        """Return a dtype, and the recorded checksum of a leaf that was cast to this dtype.

        The dtype is float32 if the record has checksums for it, otherwise bfloat16.  The checksum
        is None if the base model has no such leaf.
        """
        dtype = "float32" if "float32" in self.checksums else "bfloat16"
        return dtype, self.checksums[dtype].get(leaf)

    def difference(self, other: "Base") -> str | None:
        """Return the name of the first leaf whose checksum differs in `other`; None if all match.

        Compares the float32 checksums if both records have them, otherwise those for bfloat16.
        """
        common = self.checksums.keys() & other.checksums.keys()
        one, two = (base.checksums[max(common)] for base in (self, other))
        return next((leaf for leaf in sorted(one | two) if one.get(leaf) != two.get(leaf)), None)


def saved_base(aux: Any, where: str) -> Base | None:
    """Return the record of the base model in a checkpoint's `aux`; None if there is no record.

    Only checkpoints of adapters have a record; checkpoints of whole models do not.

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
            f"{where}: its aux/metadata does not name the base model of its adapters; restore "
            "another step or copy this one again"
        )
    return base


def merged_leaves(
    params: dict[str, Any],
    adapters: dict[str, Any],
    scale: float,
    base: Base,
    where: str,
    *,
    dtype: DTypeLike | None = None,
) -> dict[str, Any]:
    """Return the base model's parameters with `adapters` merged in, as `LazyLeaf`s.

    The merged values are computed in f32 and rounded once.  The checksum of each leaf's unmerged
    values is compared with that in `base` once all layers of the leaf have been read.  If they
    differ, the read of the last layer raises InputError.

    Args:
      params: the parameters of the base model.
      adapters: nested dicts of adapter matrices, in the structure of `params`.
      scale: the factor by which the product of an adapter's two matrices is multiplied.
      base: the record of the base model that the adapters were trained on.
      where: the checkpoint of the adapters, for error messages.
      dtype: the dtype of the merged leaves (default: each leaf keeps its own).
    """

    def leaf(part: str, module: str, name: str, values: Any) -> LazyLeaf:
        module_adapters = adapters.get(part, {}).get(module, {})
        factors = [module_adapters[a] for a in adapter_names(name) if a in module_adapters]
        target = values.dtype if dtype is None else np.dtype(dtype)
        return _merged(values, factors, scale, base, (part, module, name), target, where)

    return {
        part: {
            module: {name: leaf(part, module, name, values) for name, values in named.items()}
            for module, named in modules.items()
        }
        for part, modules in params.items()
    }


def _merged(
    source: Any,
    factors: list[Any],
    scale: float,
    base: Base,
    path: tuple[str, ...],
    dtype: np.dtype,
    where: str,
) -> LazyLeaf:
    """Return one leaf of the base model, with its adapter merged in if it has one.

    Args:
      source: the leaf's values in the base model.
      factors: the adapter's two matrices; an empty list if the leaf has no adapter.
      path: the leaf's keys (part, module, name) in the nested dicts of parameters.
    """
    layers, name = path[0] == "layers", "/".join(path)
    sums: dict[int | None, int] = {}  # the checksum of each layer read so far
    checksum_dtype, expected = base.checksum_of(name)

    def read(layer: int | None) -> np.ndarray:
        values = np.asarray(source if layer is None else source[layer])
        sums[layer] = host_checksum(values, (layer or 0) * values.size, checksum_dtype)
        if (
            len(sums) == (source.shape[0] if layers else 1)
            and sum(sums.values()) % 2**32 != expected
        ):
            raise InputError(
                f"{where}: its adapters were not trained on the base model that was read (leaf "
                f"{name} differs); give the right one, which was at {base.path}, as --base"
            )
        if factors:
            a, b = (np.asarray(factor[layer], np.float32) for factor in factors)
            values = values.astype(np.float32) + np.float32(scale) * np.tensordot(a, b, 1)
        return cast(values, dtype, f"{where}: leaf {name}")

    return LazyLeaf(source.shape, dtype, read, layers=layers)


def aux_entries(base: Base | None) -> dict[str, Any]:
    """Return the entries of a checkpoint's `aux` that record `base`; {} if `base` is None.

    `saved_base` turns these entries back into a `Base`.
    """
    return {} if base is None else {"lora": {"base": base.path, "checksums": base.checksums}}
