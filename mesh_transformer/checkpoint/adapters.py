"""A model's leaves on the host with LoRA's adapters merged into them as they are read."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mesh_transformer.checkpoint.host_arrays import LazyLeaf, cast
from mesh_transformer.checkpoint.integrity import host_checksum
from mesh_transformer.model.lora import adapter_names
from mesh_transformer.util import InputError

# What to do where a base is not in its place.
MOVED = (
    "put it back, or give its place now: to a run that goes on as --tune-model-path, else to "
    "convert_checkpoint.py as --base, which merges the adapters into it"
)


class Base(NamedTuple):
    """The model that adapters were trained on: where it was, and checksums of its leaves.

    The sums are of its numbers in each dtype that they were made in: {dtype: {leaf: sum}}.
    """

    path: str
    checksums: dict[str, dict[str, int]]

    def strictest(self, leaf: str) -> tuple[str, int | None]:
        """The dtype that tells most, and a leaf's sum in it; None for an unknown leaf."""
        dtype = "float32" if "float32" in self.checksums else "bfloat16"
        return dtype, self.checksums[dtype].get(leaf)

    def difference(self, other: "Base") -> str | None:
        """The first leaf in which two models differ, as far as both can tell."""
        both = self.checksums.keys() & other.checksums.keys()
        one, two = (each.checksums[max(both)] for each in (self, other))
        return next((leaf for leaf in sorted(one | two) if one.get(leaf) != two.get(leaf)), None)


def saved_base(aux: Any, where: str) -> Base | None:
    """The base that is told in a checkpoint's `aux`; None where it is a whole model.

    Raises InputError where it tells no sense.
    """
    told = aux.get("lora") if isinstance(aux, dict) else None
    if told is None:
        return None
    try:
        base = Base(str(told["base"]), {t: dict(told["checksums"][t]) for t in told["checksums"]})
    except (KeyError, TypeError, ValueError):
        base = None
    if base is None or "bfloat16" not in base.checksums:
        raise InputError(
            f"{where}: its aux does not tell what its adapters were trained on; restore another "
            "step or copy this one anew"
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


def told(base: Base | None) -> dict[str, Any]:
    """What `saved_base` finds in the `aux` of a checkpoint."""
    return {} if base is None else {"lora": {"base": base.path, "checksums": base.checksums}}
