"""A model's leaves on the host with LoRA's adapters merged into them as they are read."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mesh_transformer.checkpoint.casts import cast
from mesh_transformer.checkpoint.checksums import host_checksum
from mesh_transformer.checkpoint.lazy_leaf import LazyLeaf
from mesh_transformer.model.lora import Base, adapter_names
from mesh_transformer.util import InputError


def merged_leaves(
    params: dict[str, Any],
    adapters: dict[str, Any],
    scale: float,
    base: Base,
    where: str,
    *,
    dtype: DTypeLike | None = None,
) -> dict[str, Any]:
    """The parameters with `adapters`, as `LazyLeaf`s of `dtype` (None: each leaf's own).

    The sum is rounded to it once, from f32.  Whoever reads all of a leaf gets InputError, which
    begins with `where`, unless it is the one of `base` that the adapters were trained on.
    """

    def leaf(part: str, module: str, name: str, values: Any) -> LazyLeaf:
        beside = adapters.get(part, {}).get(module, {})
        factors = [beside[each] for each in adapter_names(name) if each in beside]
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
    layers, name = path[0] == "layers", "/".join(path)
    sums: dict[int | None, int] = {}
    kind, expected = base.strictest(name)

    def read(layer: int | None) -> np.ndarray:
        values = np.asarray(source if layer is None else source[layer])
        sums[layer] = host_checksum(values, (layer or 0) * values.size, kind)
        if (
            len(sums) == (source.shape[0] if layers else 1)
            and sum(sums.values()) % 2**32 != expected
        ):
            raise InputError(
                f"{where}: its adapters were trained on another model than the one given (it "
                f"differs in the leaf {name}), which was {base.path}; give that one as --base"
            )
        if factors:
            a, b = (np.asarray(factor[layer], np.float32) for factor in factors)
            values = values.astype(np.float32) + np.float32(scale) * np.tensordot(a, b, 1)
        return cast(values, dtype, f"{where}: leaf {name}")

    return LazyLeaf(source.shape, dtype, read, layers=layers)
