"""LoRA (Hu 2021): adapters merged into the weights they sit on; which model they were trained on.

Adapters change what a model computes, and mean nothing without the model that was frozen beneath
them, their base.  A checksum of each of its leaves tells whether it still is the same.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from mesh_transformer.util import InputError

# What to do where a base is not in its place.
MOVED = (
    "put it back, or give its place now: to a run that goes on as --tune-model-path, else to "
    "convert_checkpoint.py as --base, which merges the adapters into it"
)
_CHUNK = 1 << 22  # entries of which a host's checksum is made at a time
_BITS = {"float32": jnp.uint32, "bfloat16": jnp.uint16}


def adapter_names(weight: str) -> tuple[str, str]:
    """What the two factors beside a weight are called, in its own module."""
    return f"{weight}_lora_a", f"{weight}_lora_b"


def merged(modules: dict[str, Any], scale: float) -> dict[str, Any]:
    """One layer's modules with their adapters, [in, R] and [R, out], in their weights; in f32."""

    def one(leaves: dict[str, Array]) -> dict[str, Array]:
        own = set(leaves).difference(*map(adapter_names, leaves))
        found = {name: leaves[name] for name in own}
        for name in own:
            a, b = (leaves.get(each) for each in adapter_names(name))
            if a is not None and b is not None:
                a, b = a.astype(jnp.float32), b.astype(jnp.float32)
                product = jnp.tensordot(a, b, 1, precision="highest")
                found[name] = found[name].astype(jnp.float32) + scale * product
        return found

    return {module: one(leaves) for module, leaves in modules.items()}


def _digest(bits: Any, index: Any) -> Any:
    """The bits of each number and where it stands, mixed into one uint32 (MurmurHash3's last)."""
    mixed = bits ^ (index * np.uint32(0x9E3779B1))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return mixed ^ (mixed >> np.uint32(16))


def checksum(values: Array, dtype: str) -> Array:
    """A number that follows from all entries of an array in `dtype`, the same on every mesh."""
    bits = jax.lax.bitcast_convert_type(values.astype(dtype), _BITS[dtype]).astype(jnp.uint32)
    index = jnp.zeros(values.shape, jnp.uint32)
    for axis, size in enumerate(values.shape):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, values.shape, axis)
    return jnp.sum(_digest(bits, index), dtype=jnp.uint32)


def host_checksum(values: np.ndarray, dtype: str, first: int = 0) -> int:
    """As `checksum`, of a part of an array which begins at its entry `first`.

    The sum of the parts', modulo 2^32, is the array's.
    """
    flat, total = values.reshape(-1), 0
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    for begin in range(0, flat.size, _CHUNK):
        part = flat[begin : begin + _CHUNK].astype(kind)
        bits = part.view(np.dtype(_BITS[dtype])).astype(np.uint32)
        index = np.arange(first + begin, first + begin + part.size).astype(np.uint32)
        total += int(_digest(bits, index).sum(dtype=np.uint32))
    return total % 2**32


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


def told(base: Base | None) -> dict[str, Any]:
    """What `saved_base` finds in the `aux` of a checkpoint."""
    return {} if base is None else {"lora": {"base": base.path, "checksums": base.checksums}}
