"""LoRA (Hu 2021): adapters merged into the weights they sit on; which model they were trained on.

Adapters change what a model computes, and mean nothing without the model that was frozen beneath
them, their base.  A checksum of each of its leaves tells whether it still is the same.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from mesh_transformer.util import InputError

# What to do where a base is not in its place.
MOVED = (
    "put it back, or give its place now: to a run that goes on as --tune-model-path, else to "
    "convert_checkpoint.py as --base, which merges the adapters into it"
)


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
